// The charts of one or several runs: choice of the axis, smoothing, log scale, means over seeds, search; constant metrics in one line.

import { get } from "./api.js";
import { chart, newBoard } from "./chart.js";
import { h, number, put, visible } from "./dom.js";
import { note } from "./place.js";

const FIRST = [
  "reward/mean", "episode/success", "evaluation/success", "policy/loss", "policy/entropy", "learner/grad_norm",
  "policy/logprob_diff", "policy/clipped", "group/zero_variance", "episode/sampled", "batch/lag_mean", "time/step",
];
const AXES = { step: ["step", "step"], tokens: ["tokens", "tokens"], seconds: ["time", "s of training"] };
const BANDS = { range: ["mean, lowest to highest", "band: lowest to highest"], interval: ["mean, 95 % interval", "band: 95 % interval of the mean (Student's t)"], each: ["each run", ""] };
const MOST = 300; // charts
const NAMED = 4; // constant metrics named in the closed line

/**
 * The section of charts. `runs()`: the selected runs; `colour(run)`: class of a run's colour; `at`: the address. State is kept in the address:
 * axis, smooth, find, open, log (names, or `all` and `-name`), zoom, band. Returns {element, draw}.
 */
export function curves({ runs, colour, at, title = "Curves" }) {
  const state = {
    axis: AXES[at.one("axis")] ? at.one("axis") : "step",
    much: Math.min(0.99, Math.max(0, Number(at.one("smooth", "0")) || 0)),
    find: at.one("find"),
    opened: new Set(at.all("open")),
    logged: new Set(at.all("log")),
    view: rangeOf(at.one("zoom")),
    band: BANDS[at.one("band")] ? at.one("band") : "range",
  };
  const legend = h("div.lines"), all = h("div.all"), seeds = h("label", { hidden: true });
  const reset = h("button", { type: "button", hidden: !state.view, onclick: () => board.zoom(null) }, "Reset zoom");
  let board = newBoard(), turn = 0, whole = null, waiting = 0;
  const keep = () => note({
    axis: state.axis === "step" ? "" : state.axis, smooth: state.much || "", find: state.find, open: [...state.opened], log: [...state.logged],
    zoom: state.view ? state.view.map((end) => Number(end.toPrecision(6))).join("_") : "", band: state.band === "range" ? "" : state.band,
  });

  async function draw() {
    const mine = ++turn, chosen = runs();
    const names = chosen.length ? await get("names", { run: chosen }) : [];
    const hit = (name) => !state.find || name.toLowerCase().includes(state.find.toLowerCase());
    const first = FIRST.filter((name) => names.includes(name) && hit(name)), rooms = new Map();
    for (const name of names.filter((one) => hit(one) && !first.includes(one))) {
      const room = name.split("/")[0];
      rooms.set(room, [...(rooms.get(room) ?? []), name]);
    }
    const isOpen = (room) => Boolean(state.find) || state.opened.has(room);
    const wanted = [...first, ...[...rooms].filter(([room]) => isOpen(room)).flatMap(([, some]) => some)].slice(0, MOST);
    const part = state.view && whole ? { axis: state.axis, low: state.view[0], high: state.view[1] } : {};
    const [data, groups] = wanted.length
      ? await Promise.all([get("series", { run: chosen, name: wanted, ...part }), chosen.length > 1 ? get("bands", { run: chosen, name: wanted, ...part, band: state.band === "interval" ? "interval" : "range" }) : []])
      : [{}, []];
    if (mine !== turn || all.querySelector(".dragged")) return;
    const columns = Object.values(data).flatMap((run) => Object.values(run)), thinned = columns.some((found) => found.of);
    if (!part.axis) whole = thinned ? wholeOf(columns.map((found) => found[state.axis])) : null;
    board = newBoard({ view: state.view, whole, onZoom: (range) => { state.view = range; reset.hidden = !range; keep(); if (whole) { clearTimeout(waiting); waiting = setTimeout(draw, 150); } } });
    if (state.view && whole && !part.axis) return draw(); // in the detail of the range
    reset.hidden = !state.view;
    drawLegend(chosen, groups);
    const section = (room, some) => charts(room, some, data, groups, chosen);
    const focused = document.activeElement?.closest?.(".chart")?.dataset.name;
    put(all, first.length ? section("", first) : h("p.faint", {}, names.length ? "No metric is called so." : "Nothing was measured yet."),
      [...rooms].map(([room, some]) => h("details.room", { open: isOpen(room), ontoggle: (event) => toggled(room, event.target.open) },
        h("summary", {}, `${visible(room)} `, h("span.faint", {}, `${some.length}`)), isOpen(room) ? section(room, some) : null)));
    if (focused) all.querySelector(`.chart[data-name="${CSS.escape(focused)}"] .plot`)?.focus({ preventScroll: true });
  }

  /** The charts of a section; metrics that never change are one line that can be opened. */
  function charts(room, some, data, groups, chosen) {
    const found = some.map((name) => ({ name, values: chosen.map((run) => data[run]?.[name]?.value).filter(Boolean) }));
    const still = found.filter(({ values }) => isConstant(values)), key = `=${room}`, open = state.opened.has(key);
    const made = ({ name }) => one(name, data, groups, chosen);
    const words = still.map(({ name, values }) => `${visible(name)} = ${[...new Set(values.map((some_) => number(some_[0])))].join(", ")}`);
    const inside = h("div.charts");
    if (open) put(inside, still.map(made));
    return [
      h("div.charts", {}, found.filter(({ values }) => !isConstant(values)).map(made)),
      still.length ? h("details.constant", { open, ontoggle: (event) => { if (toggle(key, event.target.open) && !inside.childElementCount) put(inside, still.map(made)); } },
        h("summary", { title: words.join(", ") }, still.length === 1 ? "1 metric is constant: " : `${still.length} metrics are constant: `,
          h("span.faint", {}, words.slice(0, NAMED).join(", "), words.length > NAMED ? `, and ${words.length - NAMED} more` : "")),
        words.length > NAMED ? h("p.faint", {}, words.slice(NAMED).join(", ")) : null, inside) : null,
    ];
  }

  function one(name, data, groups, chosen) {
    const axis = state.axis, points = name.startsWith("evaluation/"), averaged = state.band === "each" ? [] : groups.filter((group) => group.means[name]);
    const mean = new Map(averaged.flatMap((group) => group.runs.map((run) => [run, group])));
    const columns = (found) => ({ step: found.step, tokens: found.tokens, seconds: found.seconds });
    const line = (run, found) => ({ name: run, colour: colour(run), x: found[axis], y: found.value, points, faint: mean.has(run), columns: columns(found) });
    const known = chosen.filter((run) => data[run]?.[name]), fewer = known.map((run) => data[run][name]).find((found) => found.of);
    const unknown = axis === "tokens" && known.every((run) => data[run][name].tokens.every((count) => count === 0));
    return chart({
      title: name, board, much: state.much, xName: AXES[axis][1], log: state.logged.has(name) || (state.logged.has("all") && !state.logged.has(`-${name}`)),
      onLog: (on) => { const all_ = state.logged.has("all"), mark = all_ ? `-${name}` : name; state.logged[on !== all_ ? "add" : "delete"](mark); keep(); },
      note: unknown ? "the number of tokens was not recorded" : fewer ? `${number(fewer.value.length)} of ${number(fewer.of[0])} points, with all peaks` : "",
      lines: unknown ? [] : [...known.map((run) => line(run, data[run][name])), ...averaged.map((group) => {
        const found = group.means[name];
        return { name: `${labelOf(group)}: mean of ${group.runs.length}`, colour: colour(group.runs[0]), x: found[axis], y: found.value, low: found.low, high: found.high, points, columns: columns(found) };
      })],
    }).element;
  }

  function drawLegend(chosen, groups) {
    const several = groups.some((group) => group.runs.length > 1);
    seeds.hidden = !several;
    const entries = several && state.band !== "each"
      ? groups.map((group) => [group.runs[0], group.runs.length > 1 ? `${labelOf(group)}: mean of ${group.runs.length} runs (${seedsOf(group)}) at steps that all have; thin lines: each run; ${BANDS[state.band][1]}` : labelOf(group)])
      : chosen.map((run) => [run, run]);
    put(legend, chosen.length > 1 ? entries.map(([run, words]) => h("p.line-name", {}, h("i", { class: `key ${colour(run)}` }), visible(words))) : null);
  }

  function toggle(key, open) {
    if (open === state.opened.has(key)) return false;
    state.opened[open ? "add" : "delete"](key);
    keep();
    return open;
  }

  function toggled(room, open) {
    if (!state.find && toggle(room, open)) draw();
  }

  function tools() {
    const later = (does, wait) => { let timer; return (event) => { clearTimeout(timer); timer = setTimeout(() => does(event), wait); }; };
    const select = (label, options, chosen, does) => h("select", { "aria-label": label, onchange: (event) => { does(event.target.value); keep(); draw(); } },
      Object.entries(options).map(([value, [name]]) => h("option", { value, selected: value === chosen }, name)));
    const find = h("input", { type: "search", "data-search": "", placeholder: "metric …", value: state.find, "aria-label": "find a metric" });
    find.addEventListener("input", later(() => { state.find = find.value; keep(); draw(); }, 200));
    const soft = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.much, "aria-label": "smoothing" });
    soft.addEventListener("input", later(() => { state.much = Number(soft.value); keep(); draw(); }, 60));
    const log = h("input", { type: "checkbox", checked: state.logged.has("all"), onchange: () => { state.logged = new Set(log.checked ? ["all"] : []); keep(); board.charts.forEach((made) => made.setLog(log.checked)); } });
    put(seeds, "seeds ", select("seeds", BANDS, state.band, (value) => { state.band = value; }));
    return h("div.tools", {}, h("h2", {}, title), h("label", {}, "axis ", select("axis", AXES, state.axis, (value) => { state.axis = value; state.view = whole = null; })),
      h("label", {}, log, " log scale"), h("label", {}, "smoothing ", soft), seeds, find, reset);
  }

  const element = h("section.curves", {}, tools(), legend, all, h("p.faint.hint", {}, "Drag over a range to zoom in; a double click shows everything."));
  return { element, draw };
}

/** Whether a metric has one value in every run, and more than one point. */
function isConstant(columns) {
  return columns.some((values) => values.length > 1) && columns.every((values) => values.every((value) => value !== null && value === values[0]));
}

/** The ends of all columns. */
function wholeOf(columns) {
  return [Math.min(...columns.map((column) => column[0])), Math.max(...columns.map((column) => column[column.length - 1]))];
}

function labelOf(group) {
  return group.runs.length === 1 ? group.runs[0] : group.changes || "same settings";
}

function seedsOf(group) {
  return `seeds ${group.seeds.map((seed) => seed ?? "unknown").join(", ")}`;
}

function rangeOf(text) {
  const ends = text.split("_").map(Number);
  return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}
