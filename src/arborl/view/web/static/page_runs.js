// The list of runs, sorted, filtered and grouped; below it the selected runs side by side: curves and settings that differ.

import { get } from "./api.js";
import { COLOURS } from "./chart.js";
import { curves } from "./curves.js";
import { h, number, percent, put, span, visible } from "./dom.js";
import { rowKeys } from "./keys.js";
import { link, note } from "./place.js";

const MOST = COLOURS.length;
const ROWS = 50;
const GROUPS = { "": "no grouping", algorithm: "algorithm", model: "model", environment: "environment", state: "state", tag: "tags" };
const failures = (one) => one.failures.reduce((sum, cause) => sum + (cause.count ?? 0), 0);
const heldOut = (one, when) => one[when].success ?? one[when].reward ?? null;
const measured = (one, when) => ((one[when].success ?? null) !== null ? percent(one[when].success) : number(one[when].reward ?? null));
const arrow = (first, last) => (first === "–" && last === "–" ? "–" : `${first} → ${last}`);
const age = (when) => (when ? `${span(Math.max(0, Date.now() / 1000 - when))} ago` : "–");

/** Columns: heading, value to sort by, cell. A figure is sorted from the largest first. */
const COLUMNS = {
  run: { value: (one) => one.run.toLowerCase() },
  state: { value: (one) => one.state, cell: (one) => h("span", { class: `state ${one.state}` }, one.state) },
  tags: { value: (one) => one.tags.join(", ").toLowerCase() || null, cell: (one) => tagChips(one.tags) },
  step: { figure: true, value: (one) => one.step, cell: (one) => `${number(one.step)}${one.steps ? ` / ${number(one.steps)}` : ""}` },
  reward: { figure: true, value: (one) => one.reward?.[1] ?? null, cell: (one) => (one.reward ? arrow(number(one.reward[0]), number(one.reward[1])) : "–"), help: "mean reward of the first and the last step" },
  "held out": { figure: true, value: (one) => heldOut(one, "after") ?? heldOut(one, "before"), cell: (one) => arrow(measured(one, "before"), measured(one, "after")), help: "success, or else reward, on held-out tasks before and after training" },
  model: { value: (one) => one.model, cell: (one) => visible(one.model ?? "–") },
  algorithm: { value: (one) => one.algorithm, cell: (one) => visible(one.algorithm ?? "–") },
  environment: { value: (one) => one.environment, cell: (one) => visible(one.environment ?? "–") },
  seed: { figure: true, value: (one) => one.seed, cell: (one) => visible(one.seed ?? "–") },
  failures: { figure: true, value: failures, cell: (one) => number(failures(one)), help: "failed episodes" },
  time: { figure: true, value: (one) => one.seconds, cell: (one) => span(one.seconds), help: "seconds of training" },
  started: { figure: true, value: (one) => one.started || null, cell: (one) => age(one.started) },
};

export function tagChips(tags) {
  return tags.length ? h("span.tags", {}, tags.map((tag) => h("span.tag", {}, visible(tag)))) : "–";
}

export function stubMark(one) {
  return one.stub ? h("span.stub", { title: "scripted replies: its numbers say nothing about a model" }, "stub") : null;
}

/** The value's order: missing values last in both directions. */
function sorted(rows, sort) {
  const down = sort.startsWith("-"), value = COLUMNS[sort.replace(/^-/, "")].value;
  const compare = (a, b) => {
    const [x, y] = [value(a) ?? null, value(b) ?? null];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return down ? -order : order;
  };
  return [...rows].sort((a, b) => compare(a, b) || b.started - a.started || (a.run < b.run ? -1 : 1));
}

export async function runs(at) {
  const known = (name, all, otherwise) => (all.includes(name) ? name : otherwise);
  const state = {
    chosen: [],
    filter: at.one("filter").slice(0, 400),
    by: at.one("by").slice(0, 200),
    sort: known(at.one("sort"), Object.keys(COLUMNS).flatMap((one) => [one, `-${one}`]), "-started"),
    page: Math.max(1, Math.floor(Number(at.one("page", "1"))) || 1),
    closed: new Set(at.all("closed")),
  };
  let list = await get("runs", { find: state.filter, by: state.by });
  const requested = at.all("run").filter((run) => list.names.includes(run));
  const newest = sorted(list.runs, "-started"), real = newest.filter((one) => !one.stub);
  state.chosen = (requested.length ? requested : (real.length ? real : newest).slice(0, 3).map((one) => one.run)).slice(0, MOST);
  const table = h("div"), counted = h("span.faint", { role: "status" }), beside = h("div"), root = h("p.faint");
  const colour = (run) => COLOURS[state.chosen.indexOf(run)];
  const charts = curves({ runs: () => state.chosen, colour, at });
  const element = h("div", {}, h("h1", {}, "Runs"), root, tools(), table, charts.element, beside);
  const keep = () => note({
    run: state.chosen, filter: state.filter, by: state.by, sort: state.sort === "-started" ? "" : state.sort,
    page: state.page === 1 ? "" : state.page, closed: [...state.closed],
  });

  function tools() {
    let timer;
    const filter = h("input.filter", { type: "search", "data-search": "", maxlength: 400, value: state.filter, placeholder: "name, tag, learner.lr=1e-5 …", "aria-label": "filter runs" });
    filter.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => { state.filter = filter.value; state.page = 1; keep(); reload(); }, 200);
    });
    const by = h("select", { "aria-label": "group by", onchange: () => { state.by = by.value; state.page = 1; state.closed.clear(); keep(); reload(); } });
    const options = (groups) => put(by, groups.map(([value, name]) => h("option", { value, selected: value === state.by }, visible(name))));
    const first = Object.entries(GROUPS);
    options(state.by && !GROUPS[state.by] ? [...first, [state.by, state.by]] : first);
    get("varying").then((keys) => options([...first, ...new Set([...keys, ...(state.by && !GROUPS[state.by] ? [state.by] : [])])].map((one) => (Array.isArray(one) ? one : [one, one])))).catch(() => {});
    const sort = h("select", { "aria-label": "sort by", onchange: () => { order(sort.value); } },
      Object.keys(COLUMNS).map((name) => h("option", { value: name, selected: state.sort.replace(/^-/, "") === name }, name)));
    return h("div.tools.list-tools", {}, filter, h("label", {}, "group by ", by), h("label.narrow", {}, "sort by ", sort), counted);
  }

  function order(name) {
    const first = COLUMNS[name].figure ? `-${name}` : name, other = COLUMNS[name].figure ? name : `-${name}`;
    state.sort = state.sort === first ? other : first;
    state.page = 1;
    keep();
    drawTable();
    table.querySelector("th[aria-sort] button")?.focus({ preventScroll: true });
  }

  function head(columns) {
    return h("tr", {}, h("th", { scope: "col" }, h("span.unseen", {}, "compare")), columns.map((name) => {
      const on = state.sort.replace(/^-/, "") === name, down = state.sort.startsWith("-");
      return h(COLUMNS[name].figure ? "th.figure" : "th", { scope: "col", title: COLUMNS[name].help, "aria-sort": on ? (down ? "descending" : "ascending") : null },
        h("button", { type: "button", onclick: () => order(name) }, name, h("span.arrow", { "aria-hidden": "true" }, on ? (down ? " ↓" : " ↑") : "")));
    }));
  }

  function row(one, columns) {
    const on = state.chosen.includes(one.run);
    const name = h("a", { href: link("run", { run: one.run }) }, visible(one.run === "." ? one.title : one.run));
    const box = h("input", { type: "checkbox", checked: on, "aria-label": `compare ${visible(one.run)}`, onchange: () => choose(one.run) });
    return h("tr", { class: on ? "on" : null },
      h("td.box", {}, box, h("i", { class: `key ${on ? colour(one.run) : ""}` })),
      columns.map((column) => (column === "run"
        ? h("td.name", {}, name, stubMark(one), one.note ? h("p.faint.note-line", { title: visible(one.note) }, visible(one.note.split("\n")[0])) : null, one.problems.map((problem) => h("p.problem", {}, visible(problem))))
        : h(COLUMNS[column].figure ? "td.figure" : "td", { "data-label": column }, COLUMNS[column].cell(one)))));
  }

  /** The heading of a group: count and means; a stub does not count in the means. */
  function heading(value, rows, columns) {
    const closed = state.closed.has(value), counts = rows.filter((one) => !one.stub);
    const mean = (values) => { const some = values.filter((one) => one !== null && one !== undefined); return some.length ? some.reduce((a, b) => a + b, 0) / some.length : null; };
    const success = mean(counts.map((one) => one.after.success)), reward = mean(counts.map((one) => one.reward?.[1]));
    const stubs = rows.length - counts.length;
    const facts = [
      `${number(rows.length)} ${rows.length === 1 ? "run" : "runs"}${stubs ? `, ${stubs} ${stubs === 1 ? "stub" : "stubs"}` : ""}`,
      reward === null ? null : `mean reward ${number(reward)}`, success === null ? null : `mean held out ${percent(success)}`,
      mean(counts.map((one) => one.seconds)) === null ? null : `mean time ${span(mean(counts.map((one) => one.seconds)))}`,
    ].filter(Boolean);
    const toggle = h("button", { type: "button", "aria-expanded": String(!closed), onclick: () => { state.closed[closed ? "delete" : "add"](value); keep(); drawTable(); table.querySelector(`[data-group="${CSS.escape(value)}"]`)?.focus(); }, "data-group": value },
      h("span.arrow", { "aria-hidden": "true" }, closed ? "▸" : "▾"), h("b", {}, `${visible(GROUPS[state.by] ?? state.by)}: ${visible(value || "none")}`));
    return h("tr.group", {}, h("th", { colspan: columns.length + 1, scope: "rowgroup" }, toggle, h("span.faint", {}, facts.join(" · "))));
  }

  function drawTable() {
    const focused = table.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const rows = sorted(list.runs, state.sort), groups = new Map();
    for (const one of rows) groups.set(one.group ?? "", [...(groups.get(one.group ?? "") ?? []), one]);
    const flat = state.by ? [...groups.entries()].flatMap(([value, some]) => [{ heading: value, some }, ...(state.closed.has(value) ? [] : some)]) : rows;
    const pages = Math.max(1, Math.ceil(flat.length / ROWS));
    state.page = Math.min(state.page, pages);
    const shown = flat.slice((state.page - 1) * ROWS, state.page * ROWS);
    const columns = Object.keys(COLUMNS).filter((name) => name !== "tags" || list.runs.some((one) => one.tags.length));
    put(root, `in ${visible(list.root)}; up to ${MOST} are compared`);
    put(counted, list.names.length ? `${number(list.runs.length)}${state.filter ? ` of ${number(list.names.length)}` : ""} ${list.runs.length === 1 && !state.filter ? "run" : "runs"}` : "");
    const turn = (by) => { state.page += by; keep(); drawTable(); };
    put(table,
      !list.names.length ? h("p.problem", {}, "There is no run here yet. Start one with `arborl train`; this page looks again by itself.")
        : !rows.length ? h("p.problem", {}, "No run matches the filter.")
        : h("div.scroll", {}, h("table.wide.runs", {}, h("thead", {}, head(columns)), h("tbody", {}, shown.map((one) => (one.some ? heading(one.heading, one.some, columns) : row(one, columns)))))),
      pages > 1 ? h("div.pager", {}, h("button", { type: "button", disabled: state.page === 1, onclick: () => turn(-1) }, "previous page"),
        h("button", { type: "button", disabled: state.page === pages, onclick: () => turn(1) }, "next page"), h("span.faint", {}, `page ${state.page} of ${pages}`)) : null);
    if (focused) table.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    turnPage = (by) => { if (state.page + by < 1 || state.page + by > pages) return false; turn(by); return true; };
  }
  let turnPage = () => false;

  async function choose(run) {
    const on = state.chosen.includes(run);
    state.chosen = on ? state.chosen.filter((one) => one !== run) : [...state.chosen, run].slice(-MOST);
    keep();
    drawTable();
    await Promise.all([charts.draw(), drawDifferences()]);
  }

  async function drawDifferences() {
    if (state.chosen.length < 2) return put(beside);
    const found = await get("differences", { run: state.chosen });
    const rows = Object.entries(found.differ);
    const value = (one) => visible(one === null ? "–" : typeof one === "object" ? JSON.stringify(one) : String(one));
    put(beside, h("h2", {}, "Configuration"),
      rows.length
        ? h("div.scroll", { tabindex: 0, role: "region", "aria-label": "settings that differ" }, h("table.differences", {},
            h("thead", {}, h("tr", {}, h("th", {}, "setting"), found.runs.map((run) => h("th", {}, h("i", { class: `key ${colour(run)}` }), visible(run))))),
            h("tbody", {}, rows.map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, visible(name)), values.map((one) => h("td", {}, value(one))))))))
        : h("p.faint", {}, "These runs have the same settings."),
      h("details", {}, h("summary", {}, `${Object.keys(found.same).length} settings that all share`),
        h("dl.settings", {}, Object.entries(found.same).map(([name, one]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, value(one)))))));
  }

  let asked = 0;
  async function reload() {
    const mine = ++asked;
    try {
      const found = await get("runs", { find: state.filter, by: state.by });
      if (mine !== asked) return;
      list = found;
      state.chosen = state.chosen.filter((run) => list.names.includes(run));
      drawTable();
    } catch (error) {
      if (mine === asked) put(table, h("p.problem", {}, visible(error.message)));
    }
  }

  async function refresh() {
    const started = list.names.length === 0;
    await reload();
    if (started && !state.chosen.length) state.chosen = list.names.slice(0, 1);
    drawTable();
    await Promise.all([charts.draw(), drawDifferences()]);
  }

  keep();
  drawTable();
  return {
    element, title: "Runs", refresh, every: true,
    keys: { ...rowKeys(() => [...table.querySelectorAll("tbody tr:not(.group)")]), n: () => turnPage(1), p: () => turnPage(-1) },
    ready: () => Promise.all([charts.draw(), drawDifferences()]),
  };
}
