// Line charts as SVG: hover, smoothing, and one cursor for all charts of a page.

import { h, number, put, s, visible } from "./dom.js";

export const COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];
const LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 24;

/** Exponential moving average with bias correction; `much` is from 0 (none) to below 1. */
export function smoothed(values, much) {
  if (!much) return values;
  let mean = 0, share = 0;
  return values.map((value) => {
    mean = much * mean + (1 - much) * value;
    share = much * share + (1 - much);
    return mean / share;
  });
}

/** Round numbers between two, about so many, and no closer than `apart`. */
export function ticks(low, high, count, apart = 0) {
  const rough = Math.max((high - low) / Math.max(count, 1), apart) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / width - 1e-9) * width; at <= high + width * 1e-9; at += width) found.push(Math.abs(at) < width * 1e-9 ? 0 : at);
  return found;
}

/**
 * A chart. `lines`: [{name, colour, x, y, points}]; `much`: smoothing; `board`: what the charts of a page share.
 * `window`: a height that is marked.
 */
export function chart({ title, lines, much = 0, xName = "step", board = null, window: mark = null, height = 190, zero = false }) {
  const plot = h("div.plot", { tabindex: 0, role: "img", "aria-label": `${title}: ${lines.length} lines by ${xName}` });
  const tip = h("div.tip", { hidden: true });
  const element = h("figure.chart", {}, h("figcaption", { title: visible(title) }, visible(title)), plot, tip);
  const drawn = lines.filter((line) => line.x.length);
  let scale = null, cursor = null;

  function draw() {
    const width = plot.clientWidth;
    if (!width) return;
    if (!drawn.length) return put(plot, h("p.faint", {}, "not recorded"));
    const shown = drawn.map((line) => ({ ...line, soft: smoothed(line.y, much) }));
    const xs = shown.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
    const ys = shown.flatMap((line) => (much && line.y.length > 400 ? line.soft : line.y)).concat(mark === null ? [] : [mark], zero ? [0] : []);
    let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), least(ys), most(ys)];
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) * 0.1 || 0.5), y1 + (Math.abs(y1) * 0.1 || 0.5)];
    const pad = (y1 - y0) * 0.06;
    [y0, y1] = [zero && y0 === 0 ? 0 : y0 - pad, y1 + pad];
    const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const Y = (y) => height - BOTTOM - ((y - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
    const across = ticks(y0, y1, 4), along = ticks(x0, x1, Math.max(2, width / 110), xs.every(Number.isInteger) ? 1 : 0);
    const picture = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      across.map((y) => [s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: Y(y), y2: Y(y) }), s("text", { x: LEFT - 6, y: Y(y) + 4, "text-anchor": "end" }, number(y))]),
      along.map((x) => s("text", { x: X(x), y: height - 7, "text-anchor": "middle" }, number(x))),
      mark === null ? null : s("line", { class: "mark", x1: LEFT, x2: width - RIGHT, y1: Y(mark), y2: Y(mark) }),
      shown.map((line) => [
        much && !line.points ? s("path", { class: `line raw ${line.colour}`, d: path(line.x, line.y, X, Y) }) : null,
        s("path", { class: `line ${line.colour}${line.dashed ? " dashed" : ""}`, d: path(line.x, line.points ? line.y : line.soft, X, Y) }),
        line.points || line.x.length === 1 ? line.x.map((x, at) => s("circle", { class: `dot ${line.colour}`, cx: X(x), cy: Y(line.y[at]), r: 3 })) : null,
      ]),
      s("line", { class: "cursor", x1: -9, x2: -9, y1: TOP, y2: height - BOTTOM }));
    scale = { X, Y, x0, x1, width, shown };
    put(plot, picture);
    if (cursor !== null) point(cursor, false);
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
    const rows = scale.shown.map((one) => ({ one, at: nearest(one.x, x) })).map(({ one, at }) =>
      h("tr", {}, h("td", {}, h("i.key", { class: `key ${one.colour}` })), h("td", {}, visible(one.name)), h("td.figure", {}, number(one.y[at], 4)),
        much && !one.points ? h("td.figure.faint", {}, number(one.soft[at], 4)) : null));
    put(tip, h("b", {}, `${xName} ${number(x, 4)}`), h("table", {}, rows));
    tip.style.left = `${Math.min(Math.max(scale.X(x) + 12, 0), Math.max(scale.width - tip.offsetWidth - 4, 0))}px`;
  }

  function snap(x) {
    const all = scale.shown.map((line) => line.x[nearest(line.x, x)]);
    return all.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best), all[0]);
  }
  const tell = (x) => (board ? board.point(x, api) : point(x, true));
  plot.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const x = scale.x0 + ((event.offsetX - LEFT) / (scale.width - LEFT - RIGHT)) * (scale.x1 - scale.x0);
    tell(snap(Math.min(scale.x1, Math.max(scale.x0, x))));
  });
  plot.addEventListener("pointerleave", () => tell(null));
  plot.addEventListener("blur", () => tell(null));
  plot.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !scale) return;
    event.preventDefault();
    event.stopPropagation();
    const all = [...new Set(scale.shown.flatMap((line) => line.x))].sort((a, b) => a - b);
    const at = cursor === null ? (way > 0 ? -1 : all.length) : nearest(all, cursor);
    tell(all[Math.min(all.length - 1, Math.max(0, at + way))]);
  });
  const api = { element, point, draw };
  board?.charts.add(api);
  new ResizeObserver(draw).observe(plot);
  return api;
}

/** What the charts of a page share: one cursor. */
export function newBoard() {
  const charts = new Set();
  return { charts, point: (x, who) => charts.forEach((one) => one.point(x, one === who)) };
}

function path(xs, ys, X, Y) {
  return xs.map((x, at) => `${at ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[at]).toFixed(1)}`).join("");
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
