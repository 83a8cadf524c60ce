// The tree of a group: what its episodes share, where they branch, and how long their contexts were.

import { get } from "./api.js";
import { chart, COLOURS } from "./chart.js";
import { h, number, numberOf, put, rewardOf, s, visible } from "./dom.js";
import { rowKeys } from "./keys.js";
import { go, link, note } from "./place.js";

const ROW = 16, GAP = 2;

export async function group(at) {
  const place = at.place();
  const found = await get("group", place);
  const chosen = new Set(at.all("with").map(Number).filter((line) => found.group.some((row) => row.line === line)));
  const text = h("div.stretch", { "aria-live": "polite" }, h("p.faint", {}, "Point at a part of the tree for its text."));
  const list = h("tbody"), compare = h("p");

  function drawList() {
    put(list, found.group.map((row) => h("tr", { class: row.line === Number(place.line) ? "on" : null },
      h("td.box", {}, h("input", { type: "checkbox", checked: chosen.has(row.line), "aria-label": `compare episode ${numberOf(row)} with another`, onchange: () => pick(row.line) })),
      h("td", {}, h("a", { href: link("episode", { ...place, line: row.line }), title: visible(row.episode) }, numberOf(row))),
      h("td.figure", { "data-label": "reward" }, rewardOf(row)), h("td", { "data-label": "stop" }, visible(row.failure || row.stop)),
      h("td.figure", { "data-label": "calls" }, number(row.calls)), h("td.figure", { "data-label": "tokens" }, number(row.sampled)), h("td.figure", { "data-label": "context" }, number(row.context)))));
    const [one, other] = [...chosen];
    put(compare, chosen.size === 2 ? h("a.button", { href: link("beside", { ...place, line: one, other }) }, "Compare both episodes") : h("span.faint", {}, "Tick two episodes to see where they part."));
  }

  function pick(line) {
    if (chosen.has(line)) chosen.delete(line);
    else chosen.add(line);
    while (chosen.size > 2) chosen.delete(chosen.values().next().value);
    note({ with: [...chosen] });
    drawList();
  }

  drawList();
  const longest = chart({
    title: "length of the context by call", xName: "call", window: found.window, zero: true,
    lines: found.lengths.map((tokens, number_) => ({ name: numberOf(found.group[number_]), colour: COLOURS[number_ % COLOURS.length], x: tokens.map((_, call) => call + 1), y: tokens, points: tokens.length < 60 })),
  });
  const element = h("div", {}, h("h1", {}, "Group ", h("span.faint", {}, visible(found.group[0].task))),
    h("p.facts", {}, h("span", {}, "step ", h("b", {}, number(Number(place.step)))), h("span", {}, "episodes ", h("b", {}, number(found.group.length))),
      h("span", {}, "tokens of the tree ", h("b", {}, number(found.tokens))), h("span", {}, "of all calls ", h("b", {}, number(found.raw))),
      h("span", {}, "shared ", h("b", {}, found.raw ? `${Math.round(100 * (1 - found.tokens / found.raw))} %` : "–"))),
    h("h2", {}, "Tree"), h("p.faint", {}, "Left to right: tokens. Pale was read. Sampled by episodes with a reward above the mean of the group: green, +; below it: red, −; equal to it: grey."),
    h("div.scroll.tree", { tabindex: 0, role: "region", "aria-label": "tree of tokens" }, picture(found, (stretch) => describe(text, stretch, found, place))), text,
    h("div.two", {}, h("section", {}, h("h2", {}, "Episodes"), compare,
      h("table.wide", {}, h("thead", {}, h("tr", {}, ["beside", "episode", "reward", "stop", "calls", "tokens", "context"].map((head) => h(["reward", "calls", "tokens", "context"].includes(head) ? "th.figure" : "th", { scope: "col" }, head)))), list)),
      h("section", {}, h("h2", {}, "Context"), longest.element)));
  return { element, title: `Group ${found.group[0].task}`, keys: { ...rowKeys(() => [...list.children]), b: () => { const [one, other] = [...chosen]; if (chosen.size === 2) go("beside", { ...place, line: one, other }); } } };
}

function describe(text, stretch, found, place) {
  const who = [...new Set(stretch.sampled.flatMap(([, , episodes]) => episodes))];
  put(text, h("p", {}, `${number(stretch.length)} tokens from ${number(stretch.depth)} on`, who.length ? [" · sampled by ", who.map((one) => [h("a", { href: link("episode", { ...place, line: found.group[one].line }) }, numberOf(found.group[one])), " "])] : " · read only"),
    h("pre", {}, visible(stretch.text)));
}

/** The stretches as boxes: depth to the right, one row a leaf. */
function picture(found, show) {
  const { stretches, group: rows } = found;
  const children = stretches.map(() => []);
  stretches.forEach((one, at) => one.parent >= 0 && children[one.parent].push(at));
  const top = new Array(stretches.length).fill(0), rowsOf = new Array(stretches.length).fill(1);
  for (let at = stretches.length - 1; at >= 0; at--) if (children[at].length) rowsOf[at] = children[at].reduce((sum, child) => sum + rowsOf[child], 0);
  let free = 0;
  stretches.forEach((one, at) => {
    if (one.parent < 0) { top[at] = free; free += rowsOf[at]; }
    let next = top[at];
    for (const child of children[at]) { top[child] = next; next += rowsOf[child]; }
  });
  const deepest = stretches.reduce((most, one) => Math.max(most, one.depth + one.length), 1);
  const width = Math.max(640, Math.min(2600, deepest * 3)), X = (depth) => (depth / deepest) * width;
  const height = free * ROW + 4;
  const alive = rows.filter((row) => !row.failure && row.reward !== null).map((row) => row.reward);
  const mean = alive.reduce((sum, one) => sum + one, 0) / Math.max(alive.length, 1);
  const shade = (episodes) => {
    const worth = episodes.map((one) => rows[one].reward).filter((one) => one !== null);
    const own = worth.reduce((sum, one) => sum + one, 0) / Math.max(worth.length, 1);
    return Math.abs(own - mean) < 1e-9 || !worth.length ? "zero" : own > mean ? "positive" : "negative";
  };
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, stretches.map((one, at) => {
    const y = top[at] * ROW + 1, tall = rowsOf[at] * ROW - GAP;
    const box = s("g", { tabindex: 0, role: "button", "aria-label": `${one.length} tokens from ${one.depth} on` },
      s("rect", { class: "stretch read", x: X(one.depth), y, width: Math.max(X(one.length) - 1, 1), height: tall, rx: 2 }),
      one.sampled.map(([begin, length, episodes]) => {
        const kind = shade(episodes), x = X(one.depth + begin), wide = Math.max(X(length) - 0.5, 1), mark = { positive: "+", negative: "−" }[kind];
        return [s("rect", { class: `stretch ${kind}`, x, y, width: wide, height: tall, rx: 2 }),
          mark && wide > 10 && tall > 10 ? s("text", { class: "stretch-sign", x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle" }, mark) : null];
      }));
    for (const event of ["pointerenter", "focus", "click"]) box.addEventListener(event, () => show(one));
    return box;
  }));
}
