// Runs side by side: state, settings that differ, and curves on one axis.

import { get } from "./api.js";
import { COLOURS } from "./chart.js";
import { curves } from "./curves.js";
import { h, number, percent, put, span, visible } from "./dom.js";
import { rowKeys } from "./keys.js";
import { link, note } from "./place.js";

const FIGURES = new Set(["step", "reward", "held out", "seed", "failures", "changed"]);
const MOST = COLOURS.length;

export async function runs(at) {
  const list = await get("runs");
  const known = new Set(list.runs.map((one) => one.run));
  const requested = at.all("run").filter((run) => known.has(run));
  const newest = [...list.runs].sort((a, b) => b.changed - a.changed).map((one) => one.run);
  const state = {
    chosen: (requested.length ? requested : newest.slice(0, 3)).slice(0, MOST),
  };
  const table = h("div"), beside = h("div"), replays = h("div");
  const colour = (run) => COLOURS[state.chosen.indexOf(run)];
  const charts = curves({ runs: () => state.chosen, colour, at });
  const element = h("div", {}, table, charts.element, beside, replays);
  const keep = () => note({ run: state.chosen });

  function drawTable(rows) {
    const boxes = rows.map((one) => {
      const on = state.chosen.includes(one.run);
      const name = h("a", { href: link("episodes", { run: one.run }) }, visible(one.run === "." ? one.title : one.run));
      const box = h("input", { type: "checkbox", checked: on, "aria-label": `compare ${visible(one.run)}`, onchange: () => choose(one.run) });
      const measured = (which) => (one[which].success ?? null) !== null ? percent(one[which].success) : number(one[which].reward ?? null);
      return h("tr", { class: on ? "on" : null },
        h("td.box", {}, box, h("i", { class: `key ${on ? colour(one.run) : ""}` })),
        h("td.name", {}, name, one.problems.map((problem) => h("p.problem", {}, visible(problem)))),
        h("td", { "data-label": "state" }, h("span", { class: `state ${one.state}` }, one.state)),
        h("td.figure", { "data-label": "step" }, `${number(one.step)}${one.steps ? ` / ${number(one.steps)}` : ""}`),
        h("td.figure", { "data-label": "reward" }, number(one.last["reward/mean"])),
        h("td.figure", { "data-label": "held out" }, `${measured("before")} → ${measured("after")}`),
        h("td", { "data-label": "model" }, visible(one.model ?? "–")),
        h("td", { "data-label": "algorithm" }, visible(one.algorithm ?? "–")),
        h("td", { "data-label": "environment" }, visible(one.environment ?? "–")),
        h("td.figure", { "data-label": "seed" }, visible(one.seed ?? "–")),
        h("td.figure", { "data-label": "failures" }, number(one.failures.reduce((sum, cause) => sum + (cause.count ?? 0), 0))),
        h("td.figure", { "data-label": "changed" }, `${span(Math.max(0, Date.now() / 1000 - one.changed))} ago`));
    });
    const heads = ["", "run", "state", "step", "reward", "held out", "model", "algorithm", "environment", "seed", "failures", "changed"];
    put(table, h("h1", {}, "Runs"), h("p.faint", {}, `in ${visible(list.root)}; up to ${MOST} are compared`),
      rows.length
        ? h("table.wide.runs", {}, h("thead", {}, h("tr", {}, heads.map((head) => h(FIGURES.has(head) ? "th.figure" : "th", { scope: "col" }, head)))), h("tbody", {}, boxes))
        : h("p.problem", {}, "There is no run here yet. Start one with `arborl train`; this page looks again by itself."));
  }

  async function choose(run) {
    const on = state.chosen.includes(run);
    state.chosen = on ? state.chosen.filter((one) => one !== run) : [...state.chosen, run].slice(-MOST);
    keep();
    await refresh();
  }

  async function drawDifferences() {
    if (state.chosen.length < 1) return put(beside);
    const found = await get("differences", { run: state.chosen });
    const rows = Object.entries(found.differ);
    const value = (one) => visible(one === null ? "–" : typeof one === "object" ? JSON.stringify(one) : String(one));
    put(beside, h("h2", {}, "Configuration"),
      state.chosen.length < 2 ? null : rows.length
        ? h("div.scroll", { tabindex: 0, role: "region", "aria-label": "settings that differ" }, h("table.differences", {},
            h("thead", {}, h("tr", {}, h("th", {}, "setting"), found.runs.map((run) => h("th", {}, h("i", { class: `key ${colour(run)}` }), visible(run))))),
            h("tbody", {}, rows.map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, visible(name)), values.map((one) => h("td", {}, value(one))))))))
        : h("p.faint", {}, "These runs have the same settings."),
      h("details", {}, h("summary", {}, `${Object.keys(found.same).length} settings ${state.chosen.length > 1 ? "that all share" : "of this run"}`),
        h("dl.settings", {}, Object.entries(found.same).map(([name, one]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, value(one)))))));
  }

  async function drawReplays() {
    const found = state.chosen.length === 1 ? await get("frames", { run: state.chosen[0] }) : [];
    put(replays, found.length ? [h("h2", {}, "Replays"), h("div.gifs", {}, found.slice(0, 24).map((name) =>
      h("figure", {}, h("img", { src: `/frame?${new URLSearchParams({ run: state.chosen[0], name })}`, alt: `replay ${visible(name)}`, loading: "lazy" }), h("figcaption", {}, visible(name)))))] : null);
  }

  async function refresh() {
    list.runs = (await get("runs")).runs;
    drawTable(list.runs);
    await Promise.all([charts.draw(), drawDifferences(), drawReplays()]);
  }

  keep();
  drawTable(list.runs);
  return {
    element, title: "Runs", refresh,
    keys: rowKeys(() => [...table.querySelectorAll("tbody tr")]),
    ready: () => Promise.all([charts.draw(), drawDifferences(), drawReplays()]),
  };
}
