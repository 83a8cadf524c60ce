// Why this gradient: the tokens with the largest gradients of a step.

import { get } from "./api.js";
import { h, number, percent, sign, signed, visible } from "./dom.js";
import { rowKeys } from "./keys.js";
import { go, link } from "./place.js";
import { theRun } from "./page_episodes.js";

export async function gradient(at) {
  const run = await theRun(at);
  const steps = await get("steps", { run });
  if (!steps.length) throw new Error(`${run} has kept no terms: it was run with track.terms=0 or track.episodes=false, or its first step is not done yet.`);
  const step = steps.includes(Number(at.one("step"))) ? Number(at.one("step")) : steps[steps.length - 1];
  const found = await get("gradient", { run, step });
  const place = steps.indexOf(step);
  const move = (way) => { const next = steps[place + way]; if (next !== undefined) go("gradient", { run, step: next }); };
  const body = h("tbody", {}, found.tokens.map((token) => row(token, run, step, found.tokens[0]?.push || 1)));
  const element = h("div", {}, h("h1", {}, "Why this gradient ", h("span.faint", {}, visible(run))),
    h("div.tools", {}, h("button", { type: "button", disabled: place === 0, onclick: () => move(-1) }, "←"),
      h("label", {}, "step ", h("select", { onchange: (event) => go("gradient", { run, step: event.target.value }) }, steps.map((one) => h("option", { value: one, selected: one === step }, one)))),
      h("button", { type: "button", disabled: place === steps.length - 1, onclick: () => move(1) }, "→")),
    h("p", {}, found.half === null ? `${number(found.of)} tokens were trained on.` : [h("b", {}, `Half of the gradient comes from ${number(found.half)} of ${number(found.of)} tokens.`), ` ${number(found.clipped)} pulled nothing: clipped, or without advantage.`],
      found.kept < found.of ? ` ${number(found.kept)} of them were kept.` : ""),
    h("p.faint", {}, "Push: how long the loss's gradient is at the outputs that predict a token, |d loss / d log p| (1 − p). A token that the model is sure of pushes nothing, whatever its advantage."),
    h("div.two", {}, bars("By token", found.by_text.map((one) => ({ name: JSON.stringify(one.text), push: one.push, note: `${number(one.count)}×`, way: -one.pull })), found.pushed),
      bars("By episode", found.by_episode.map((one) => ({ name: one.id ?? `line ${one.line + 1} of the file`, href: link("episode", { run, kind: "train", step, line: one.line, colour: "push" }), push: one.push, way: -one.pull })), found.pushed)),
    h("p.faint", {}, "▲ green: the update makes these tokens likelier, as it does with a positive advantage. ▼ red: less likely, as with a negative one."),
    h("h2", {}, "Token by token"),
    h("table.wide.pushes", {}, h("thead", {}, h("tr", {}, ["push", "in its context", "", "p", "advantage", "ratio", "weight", "entropy", "episode"].map((head) => h(["in its context", "", "episode"].includes(head) ? "th" : "th.figure", { scope: "col" }, head)))), body));
  return { element, title: `Gradient of step ${step}`, refresh: null, keys: { ...rowKeys(() => [...body.children]), ArrowLeft: () => move(-1), ArrowRight: () => move(1) } };
}

function row(token, run, step, most) {
  const to = link("episode", { run, kind: "train", step, line: token.line, colour: "push", token: `${token.call}.${token.index}` });
  const cell = (label, value) => h("td.figure", { "data-label": label }, value);
  return h("tr", {},
    h("td.figure", { "data-label": "push" }, h("span.bar", { style: { "--w": `${(100 * token.push) / most}%` } }), percent(token.share)),
    h("td.context", { "data-label": "in its context" }, h("span.faint", {}, line(token.before)), h("mark", { class: sign(-token.pull) }, visible(token.text) || "·"), h("span.faint", {}, line(token.after))),
    h("td", { "data-label": "way" }, way(-token.pull)),
    cell("p", percent(Math.exp(token.now))), cell("advantage", signed(token.advantage)), cell("ratio", number(token.ratio)), cell("weight", number(token.weight)), cell("entropy", number(token.entropy)),
    h("td", { "data-label": "episode" }, h("a", { href: to }, visible(token.id))));
}

/** What an update does to the probability of a token. */
function way(value) {
  return h(`span.${sign(value)}`, {}, value > 0 ? "▲ likelier" : value < 0 ? "▼ less likely" : "unchanged");
}

/** In one line. */
const line = (text) => visible(text).replaceAll("\n", "↵");

function bars(title, rows, total) {
  const most = rows.reduce((best, one) => Math.max(best, one.push), 0) || 1;
  return h("section", {}, h("h2", {}, title), h("ol.bars", {}, rows.map((one) => h("li", {},
    h("span.bar", { class: `bar ${sign(one.way)}`, style: { "--w": `${(100 * one.push) / most}%` } }),
    one.href ? h("a", { href: one.href }, visible(one.name)) : h("code", {}, visible(one.name)), h("span.faint", {}, h(`span.${sign(one.way)}`, {}, one.way > 0 ? "▲ " : one.way < 0 ? "▼ " : ""), `${one.note ? `${one.note} · ` : ""}${percent(total ? one.push / total : 0)}`)))));
}
