// The list of episodes: filters, order, a page at a time.

import { get } from "./api.js";
import { h, number, put, rewardOf, visible } from "./dom.js";
import { rowKeys } from "./keys.js";
import { go, link, note } from "./place.js";

const COUNT = 50;
const COLUMNS = [
  ["step", "step"], ["episode", "episode"], ["reward", "reward"], ["stop", "stop"], ["source", "source"], ["turns", "turns"],
  ["calls", "calls"], ["sampled", "tokens"], ["context", "context"], ["lag", "stale"], ["seconds", "s"],
];
const WORDS = new Set(["episode", "stop", "source"]);
const FIELDS = ["kind", "stop", "source", "failure", "step_from", "step_to", "reward_from", "reward_to", "lag_from", "lag_to", "text", "task"];

export async function theRun(at) {
  if (at.one("run")) return at.one("run");
  const list = (await get("runs")).runs;
  if (!list.length) throw new Error("There is no run here yet. Start one with `arborl train`.");
  const run = list.sort((a, b) => b.changed - a.changed)[0].run;
  note({ run });
  return run;
}

export async function episodes(at) {
  const run = await theRun(at);
  const filters = Object.fromEntries(FIELDS.map((name) => [name, at.one(name)]));
  let order = at.one("order", "-step"), first = Math.max(0, Number(at.one("first", "0")) || 0);
  const body = h("tbody"), foot = h("div.pager"), count = h("p.faint"), form = h("form.filters", { role: "search" });
  const head = h("thead");
  const element = h("div", {}, h("h1", {}, "Episodes ", h("span.faint", {}, visible(run))), form, count,
    h("table.wide.episodes", {}, head, body), foot);
  let total = 0, serial = 0;

  const keep = () => note({ run, ...filters, order: order === "-step" ? "" : order, first: first || "" });

  async function load(facets = false) {
    const mine = ++serial;
    const found = await get("episodes", { run, ...filters, order, first, count: COUNT, facets: facets ? "1" : "" });
    if (mine !== serial) return;
    total = found.total;
    if (found.facets) fields(found.facets);
    const chosen = body.querySelector(".chosen")?.dataset.place;
    put(body, found.rows.map(row));
    body.querySelector(`[data-place="${CSS.escape(chosen ?? "")}"]`)?.classList.add("chosen");
    const last = Math.min(first + COUNT, total);
    put(count, `${total ? `${number(first + 1)}–${number(last)} of ` : ""}${number(total)} episodes`, found.indexed < 1 ? ` · reading the files: ${Math.round(100 * found.indexed)} %` : "");
    put(foot, h("button", { type: "button", disabled: first === 0, onclick: () => turn(-1) }, "← previous page"), h("button", { type: "button", disabled: last >= total, onclick: () => turn(1) }, "next page →"));
    headings();
    if (found.indexed < 1) setTimeout(() => mine === serial && element.isConnected && load(true), 700);
  }

  function headings() {
    put(head, h("tr", {}, COLUMNS.map(([name, shown]) => {
      const now = order.split(",")[0], way = now === name ? "ascending" : now === `-${name}` ? "descending" : null;
      const next = way === "descending" ? name : `-${name}`;
      return h(WORDS.has(name) ? "th" : "th.figure", { scope: "col", "aria-sort": way }, h("button", { type: "button", onclick: () => { order = next; first = 0; keep(); load(); } },
        shown, way === "descending" ? " ↓" : way ? " ↑" : ""));
    }), h("th", { scope: "col" }, "last words")));
  }

  function row(one) {
    const to = link("episode", { run, kind: one.kind, step: one.step, line: one.line });
    const cell = (label, value, figure = true) => h(figure ? "td.figure" : "td", { "data-label": label }, value);
    return h("tr", { "data-place": `${one.kind}/${one.step}/${one.line}`, onclick: (event) => { if (!event.target.closest("a")) location.hash = to; } },
      cell("step", [number(one.step), one.kind === "evaluation" ? h("span.tag", {}, "held out") : null]),
      h("td.name", { "data-label": "episode" }, h("a", { href: to }, visible(one.episode))),
      cell("reward", rewardOf(one)), cell("stop", visible(one.failure || one.stop), false), cell("source", visible(one.source || "–"), false),
      cell("turns", number(one.turns)), cell("calls", number(one.calls)), cell("tokens", number(one.sampled)), cell("context", number(one.context)),
      cell("stale", number(one.lag)), cell("seconds", number(one.seconds, 2)),
      h("td.words", { "data-label": "last words" }, h("div.preview", {}, visible(one.preview))));
  }

  function fields(known) {
    if (form.contains(document.activeElement) && form.childElementCount) return;
    const change = (name) => (event) => { filters[name] = event.target.value; first = 0; keep(); load(); };
    const select = (name, shown, options) => h("label", {}, shown, h("select", { name, onchange: change(name) },
      h("option", { value: "" }, "all"), options.map(([value, text]) => h("option", { value, selected: filters[name] === value }, text))));
    const counted = (name) => known[name].filter(([value]) => value).map(([value, times]) => [value, `${visible(value)} (${number(times)})`]);
    const between = (name, shown, step) => h("label.between", {}, shown,
      ["from", "to"].map((end) => h("input", { type: "number", step, name: `${name}_${end}`, value: filters[`${name}_${end}`], placeholder: known[`${name}_${end}`] ?? "", "aria-label": `${shown} ${end}`, onchange: change(`${name}_${end}`) })));
    const text = h("input", { type: "search", name: "text", "data-search": "", value: filters.text, placeholder: "words of the messages …  ( / )", "aria-label": "text" });
    let timer;
    text.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { filters.text = text.value; first = 0; keep(); load(); }, 180); });
    const failed = known.failure.filter(([value]) => value);
    put(form, text, select("kind", "played for", [["train", "training"], ["evaluation", "held out"]]), select("stop", "stop", counted("stop")),
      known.source.length > 1 ? select("source", "source", counted("source")) : null,
      select("failure", "failure", [["none", "none"], ["any", `any (${number(failed.reduce((sum, [, times]) => sum + times, 0))})`], ...counted("failure")]),
      between("step", "step", 1), between("reward", "reward", "any"), between("lag", "stale", 1),
      h("button", { type: "button", onclick: () => { for (const name of FIELDS) filters[name] = ""; first = 0; keep(); load(); put(form); load(true); } }, "Clear"));
  }

  function turn(way) {
    const next = first + way * COUNT;
    if (next < 0 || next >= total) return;
    first = next;
    keep();
    load().then(() => scrollTo({ top: 0 }));
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  await load(true);
  return {
    element, title: `Episodes of ${run}`, refresh: () => load(true),
    keys: { ...rowKeys(() => [...body.children]), n: () => turn(1), p: () => turn(-1), g: () => go("gradient", { run }) },
  };
}
