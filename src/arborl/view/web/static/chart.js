// Line charts as SVG: hover, smoothing, zoom, log scale, bands, and one cursor and one range for all charts of a page.

import { csvOf, pngOf, save } from "./chart_export.js";
import { h, number, put, s, visible } from "./dom.js";

export const COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];
const LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 24;
const DRAG = 6; // pixels; a shorter drag is a click
let serial = 0;

/** Exponential moving average with bias correction; `much` is from 0 (none) to below 1. Missing values stay missing. */
export function smoothed(values, much) {
  if (!much) return values;
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = much * mean + (1 - much) * value;
    share = much * share + (1 - much);
    return mean / share;
  });
}

/** Round numbers between two, about so many, and no closer than `apart`. */
export function ticks(low, high, count, apart = 0) {
  const rough = Math.max((high - low) / Math.max(count, 1), apart) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * (1 - 1e-9)) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / width - 1e-9) * width; at <= high + width * 1e-9 && found.length < 50; at += width) found.push(Math.abs(at) < width * 1e-9 ? 0 : at);
  return found;
}

/** Ticks of a log scale between two positive numbers: powers of ten, and 2 and 5 times these in a short range. */
export function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((to - from) / 5));
  const found = [];
  for (let power = from; power <= to; power += every) for (const one of to - from > 3 ? [1] : [1, 2, 5]) found.push(one * 10 ** power);
  const inside = found.filter((one) => one >= low && one <= high);
  return inside.length > 1 ? inside : ticks(low, high, 3);
}

const tick = (value) => (Math.abs(value) >= 1e4 && Math.abs(value) < 1e15 ? value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 }) : number(value));

/**
 * A chart. `lines`: [{name, colour, x, y, points, low, high, faint, columns}]: `y` is null where a value is not finite; `low` and `high` are the
 * ends of a band; a `faint` line is drawn thin and is not in the tooltip; `columns` are exported besides the values. `much`: smoothing;
 * `board`: what the charts of a page share; `window`: a height that is marked; `log`: log scale; `onLog` is told of its change.
 */
export function chart({ title, lines, much = 0, xName = "step", board = null, window: mark = null, height = 190, zero = false, log = false, onLog = null, note = "" }) {
  const plot = h("div.plot", { tabindex: 0, role: "img", "aria-label": `${title}: ${lines.length} lines by ${xName}`, "aria-keyshortcuts": "ArrowLeft ArrowRight + - 0 l" });
  const tip = h("div.tip", { hidden: true }), notes = h("p.chart-notes", { hidden: true });
  const reset = h("button.mini", { type: "button", hidden: true, "aria-label": "reset zoom", title: "Show everything again (0, or double click)", onclick: () => zoom(null) }, "reset");
  const logButton = h("button.mini", { type: "button", "aria-pressed": String(log), title: "Log scale of the values (l)", onclick: () => setLog(!log) }, "log");
  const button = (name, tells, does) => h("button.mini", { type: "button", title: tells, "aria-label": `${name} of ${visible(title)}`, onclick: does }, name);
  const file = () => visible(title).replace(/[^\w.-]+/g, "-") || "chart";
  const element = h("figure.chart", { "data-name": title },
    h("div.chart-head", {}, h("figcaption", { title: visible(title) }, visible(title)), h("span.chart-tools", {}, reset, logButton,
      button("CSV", "Save the values that are shown", () => save(new Blob([csvOf(drawn, { xName, view: view(), much })], { type: "text/csv" }), `${file()}.csv`)),
      button("PNG", "Save the picture", async () => { point(null, false); save(await pngOf(plot.querySelector("svg"), { title: visible(title), xName, lines: drawn.filter((line) => !line.faint) }), `${file()}.png`); }))),
    plot, notes, tip);
  const drawn = lines.filter((line) => line.x.length).map((line) => ({ ...line, soft: smoothed(line.y, much) }));
  const clip = `clip-${++serial}`;
  let scale = null, cursor = null, own = null, drag = null;
  const view = () => (board ? board.view : own);

  function draw() {
    const width = plot.clientWidth;
    if (!width) return;
    element.querySelectorAll("button").forEach((one) => { one.disabled = !drawn.length; });
    if (!drawn.length) return put(plot, h("p.faint", {}, "not recorded"));
    scale = scaled(width);
    const { X, Y, x0, x1, y0, y1, logged } = scale;
    const across = logged ? logTicks(y0, y1) : ticks(y0, y1, 5), along = ticks(x0, x1, Math.max(2, width / 80), drawn.every((line) => line.x.every(Number.isInteger)) ? 1 : 0);
    const [floor, right] = [height - BOTTOM, width - RIGHT];
    put(plot, s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      s("clipPath", { id: clip }, s("rect", { x: LEFT - 3, y: 0, width: right - LEFT + 6, height: floor + 4 })),
      across.map((y) => [s("line", { class: "grid", x1: LEFT, x2: right, y1: Y(y), y2: Y(y) }), s("text", { x: LEFT - 6, y: Y(y) + 4, "text-anchor": "end" }, tick(y))]),
      along.map((x) => s("text", { x: X(x), y: height - 7, "text-anchor": "middle" }, tick(x))),
      mark === null ? null : s("line", { class: "mark", x1: LEFT, x2: right, y1: Y(mark), y2: Y(mark) }),
      s("g", { "clip-path": `url(#${clip})` }, drawn.map((line) => shapes(line, scale, floor))),
      s("rect", { class: "selection", x: -9, y: TOP, width: 0, height: floor - TOP }),
      s("line", { class: "cursor", x1: -9, x2: -9, y1: TOP, y2: floor })));
    reset.hidden = !view();
    logButton.setAttribute("aria-pressed", String(log));
    remarks();
    if (cursor !== null) point(cursor, false);
  }

  /** The scales of what is in view. */
  function scaled(width) {
    const xs = drawn.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
    const whole = [least(xs), most(xs)];
    let [x0, x1] = view() ?? whole;
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    const values = (from, to) => drawn.flatMap((line) => [much && line.y.length > 400 ? line.soft : line.y, line.low ?? [], line.high ?? []]
      .flatMap((column) => column.filter((value, at) => value !== null && line.x[at] >= from && line.x[at] <= to)));
    const seen = values(x0, x1), ys = (seen.length ? seen : values(...whole)).concat(mark === null ? [] : [mark], zero ? [0] : []);
    const positive = ys.filter((y) => y > 0), logged = log && positive.length > 0;
    let [y0, y1] = logged ? [least(positive), most(positive)] : ys.length ? [least(ys), most(ys)] : [0, 1];
    if (y0 === y1) [y0, y1] = logged ? [y0 / 2, y1 * 2] : [y0 - (Math.abs(y0) * 0.1 || 0.5), y1 + (Math.abs(y1) * 0.1 || 0.5)];
    const level = logged ? Math.log10 : (y) => y, back = logged ? (y) => 10 ** y : (y) => y;
    const pad = (level(y1) - level(y0)) * 0.06;
    [y0, y1] = [zero && y0 === 0 ? 0 : back(level(y0) - pad), back(level(y1) + pad)];
    const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const Y = (y) => height - BOTTOM - ((level(y) - level(y0)) / (level(y1) - level(y0))) * (height - TOP - BOTTOM);
    return { X, Y, x0, x1, y0, y1, whole, width, logged, shows: (y) => y !== null && (!logged || y > 0) };
  }

  function shapes(line, { X, Y, shows }, floor) {
    const lost = line.x.filter((_, at) => line.y[at] === null), lonely = (at) => !shows(line.y[at - 1] ?? null) && !shows(line.y[at + 1] ?? null);
    const dots = line.x.map((x, at) => [x, line.y[at], at]).filter(([, y, at]) => shows(y) && (line.points || lonely(at)));
    if (line.faint) return s("path", { class: `line faint-line ${line.colour}`, d: path(line.x, line.y, X, Y, shows) });
    return [
      line.low ? s("path", { class: `band ${line.colour}`, d: area(line, X, Y, shows) }) : null,
      much && !line.points ? s("path", { class: `line raw ${line.colour}`, d: path(line.x, line.y, X, Y, shows) }) : null,
      s("path", { class: `line ${line.colour}${line.dashed ? " dashed" : ""}`, d: path(line.x, line.points ? line.y : line.soft, X, Y, shows) }),
      dots.map(([x, y]) => s("circle", { class: `dot ${line.colour}`, cx: X(x), cy: Y(y), r: line.points ? 3 : 2 })),
      lost.map((x) => s("path", { class: `lost ${line.colour}`, d: `M${(X(x) - 3.5).toFixed(1)} ${floor - 7}l7 7m0 -7l-7 7` })),
    ];
  }

  /** What a reader would not see in the picture. */
  function remarks() {
    const values = drawn.filter((line) => !line.faint).flatMap((line) => line.y.filter((_, at) => line.x[at] >= scale.x0 && line.x[at] <= scale.x1));
    const lost = values.filter((y) => y === null).length, below = values.filter((y) => y !== null && y <= 0).length;
    const words = [
      lost ? `× ${number(lost)} ${lost === 1 ? "value is" : "values are"} not finite` : "",
      log && !scale.logged ? "no positive value, so the scale is linear" : log && below ? `log scale: ${number(below)} ${below === 1 ? "value" : "values"} ≤ 0 not drawn` : "",
      values.length ? "" : "no value in this range", note,
    ].filter(Boolean);
    notes.hidden = !words.length;
    put(notes, words.join(" · "));
  }

  function point(x, tell) {
    cursor = x;
    const line = plot.querySelector(".cursor");
    if (!line || !scale) return;
    const out = x === null || x < scale.x0 || x > scale.x1;
    tip.hidden = out || !tell;
    line.setAttribute("x1", out ? -9 : scale.X(x));
    line.setAttribute("x2", out ? -9 : scale.X(x));
    if (out || !tell) return;
    const rows = drawn.filter((one) => !one.faint).map((one) => ({ one, at: nearest(one.x, x) })).map(({ one, at }) =>
      h("tr", {}, h("td", {}, h("i.key", { class: `key ${one.colour}` })), h("td", {}, visible(one.name)), h("td.figure", {}, one.y[at] === null ? "not finite" : number(one.y[at], 4)),
        one.low ? h("td.figure.faint", {}, `${number(one.low[at])} to ${number(one.high[at])}`) : null,
        much && !one.points ? h("td.figure.faint", {}, number(one.soft[at], 4)) : null));
    put(tip, h("b", {}, `${xName} ${number(x, 4)}`), h("table", {}, rows));
    tip.style.left = `${Math.min(Math.max(scale.X(x) + 12, 0), Math.max(scale.width - tip.offsetWidth - 4, 0))}px`;
  }

  function zoom(range) {
    const next = range && narrowed(range);
    if (board) return board.zoom(next);
    own = next;
    draw();
  }

  /** A range within the whole; null if it is all of it. */
  function narrowed([from, to]) {
    const [low, high] = board?.whole ?? scale.whole, wide = Math.min(to - from, high - low);
    if (!(wide > 0) || wide >= high - low) return null;
    const begin = Math.min(Math.max(from, low), high - wide);
    return [begin, begin + wide];
  }

  function setLog(next) {
    log = next;
    onLog?.(log);
    draw();
  }

  function snap(x) {
    const all = drawn.filter((line) => !line.faint).map((line) => line.x[nearest(line.x, x)]);
    return all.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best), all[0]);
  }
  const tell = (x) => (board ? board.point(x, api) : point(x, true));
  const place = (event) => event.clientX - plot.getBoundingClientRect().left;
  const valueAt = (pixels) => Math.min(scale.x1, Math.max(scale.x0, scale.x0 + ((pixels - LEFT) / (scale.width - LEFT - RIGHT)) * (scale.x1 - scale.x0)));
  const select = (from, to) => { const box = plot.querySelector(".selection"); box?.setAttribute("x", Math.min(from, to)); box?.setAttribute("width", Math.abs(to - from)); };
  plot.addEventListener("pointerdown", (event) => { if (scale && event.button === 0) { drag = place(event); plot.classList.add("dragged"); plot.setPointerCapture(event.pointerId); } });
  plot.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const at = valueAt(place(event));
    if (drag !== null && Math.abs(place(event) - drag) >= DRAG) select(scale.X(valueAt(drag)), scale.X(at));
    tell(snap(at));
  });
  const dropped = (event) => {
    const from = drag;
    drag = null;
    plot.classList.remove("dragged");
    select(-9, -9);
    if (from !== null && event.type === "pointerup" && Math.abs(place(event) - from) >= DRAG) zoom([valueAt(from), valueAt(place(event))].sort((a, b) => a - b));
  };
  plot.addEventListener("pointerup", dropped);
  plot.addEventListener("pointercancel", dropped);
  plot.addEventListener("dblclick", () => scale && zoom(null));
  plot.addEventListener("pointerleave", () => drag === null && tell(null));
  plot.addEventListener("blur", () => tell(null));
  plot.addEventListener("keydown", (event) => {
    if (!scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const wide = scale.x1 - scale.x0, middle = cursor ?? (scale.x0 + scale.x1) / 2, way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const around = (share) => zoom([middle - (middle - scale.x0) * share, middle + (scale.x1 - middle) * share]);
    const step = () => {
      const all = [...new Set(drawn.filter((line) => !line.faint).flatMap((line) => line.x))].filter((x) => x >= scale.x0 && x <= scale.x1).sort((a, b) => a - b);
      const at = cursor === null ? (way > 0 ? -1 : all.length) : nearest(all, cursor);
      if (all.length) tell(all[Math.min(all.length - 1, Math.max(0, at + way))]);
    };
    const pan = () => view() && zoom([scale.x0 + (way * wide) / 4, scale.x1 + (way * wide) / 4]);
    const does = way ? (event.shiftKey ? pan : step) : { "+": () => around(0.5), "=": () => around(0.5), "-": () => around(2), 0: () => zoom(null), l: () => setLog(!log), Escape: view() ? () => zoom(null) : null }[event.key];
    if (!does) return;
    event.preventDefault();
    event.stopPropagation();
    does();
  });
  const api = { element, point, draw, setLog: (next) => { log = next; draw(); } };
  board?.charts.add(api);
  new ResizeObserver(draw).observe(plot);
  return api;
}

/** What the charts of a page share: one cursor, and one range of the horizontal axis (`view`, null: all) within `whole` (null: what is drawn). */
export function newBoard({ view = null, whole = null, onZoom = () => {} } = {}) {
  const charts = new Set();
  const board = {
    charts, view, whole,
    point: (x, who) => charts.forEach((one) => one.point(x, one === who)),
    zoom: (range) => { board.view = range; onZoom(range); charts.forEach((one) => one.draw()); },
  };
  return board;
}

/** A path with a gap where a value is not shown. */
function path(xs, ys, X, Y, shows) {
  let pen = false;
  return xs.map((x, at) => {
    if (!shows(ys[at])) { pen = false; return ""; }
    const word = `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[at]).toFixed(1)}`;
    pen = true;
    return word;
  }).join("");
}

/** The band between `low` and `high`; on a log scale its lower end is where the scale begins. */
function area({ x, low, high }, X, Y, shows) {
  const at = x.map((_, place) => place).filter((place) => shows(high[place]));
  if (at.length < 2) return "";
  const bottom = (place) => (shows(low[place]) ? Y(low[place]) : 1e4);
  return `M${at.map((place) => `${X(x[place]).toFixed(1)} ${Y(high[place]).toFixed(1)}`).join("L")}L${at.reverse().map((place) => `${X(x[place]).toFixed(1)} ${bottom(place).toFixed(1)}`).join("L")}Z`;
}

function nearest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - sorted[low - 1] <= sorted[low] - x ? low - 1 : low;
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
