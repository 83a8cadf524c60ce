// One episode: its conversation with the reward, or its tokens.

import { get } from "./api.js";
import { h, number, numberOf, put, rewardOf, signed, span, visible } from "./dom.js";
import { aboutToken, legend, lens, LENSES } from "./lens.js";
import { go, link, note } from "./place.js";

const TABS = [["text", "Conversation"], ["tokens", "Tokens"]];
const LONG = 4000; // characters of a text that is shown at once

export async function episode(at) {
  const place = at.place();
  const found = await get("episode", place);
  let colour = LENSES[at.one("colour")] ? at.one("colour") : "logprob";
  let shown = at.one("show") || (at.one("token") || at.one("colour") ? "tokens" : "text");
  const tokens = () => shown === "tokens";
  const panel = h("aside.about", { "aria-live": "polite" }, h("p.faint", {}, "Point at a token, or press →."));
  const opened = (row) => go("episode", { run: place.run, kind: row.kind, step: row.step, line: row.line, colour: tokens() && colour !== "logprob" ? colour : "", show: tokens() ? "tokens" : "" });
  const view = lens(found.calls, {
    colour,
    on: (token) => { put(panel, aboutToken(token, found.group, opened)); note({ token: `${token.call}.${token.at}` }); },
  });
  const key = h("p.faint.keyline"), text = conversation(found), tools = h("div.tools"), tabs = h("div.tabs", { role: "tablist", "aria-label": "View" });
  const undecoded = found.decoded ? null : h("p.problem", {}, "The run's tokenizer is not on this machine, so tokens are shown as numbers.");
  const sheet = h("div", { id: "sheet", role: "tabpanel" }, undecoded, key, h("div.reading", {}, h("div", {}, view.element, text), panel));

  function repaint() {
    view.paint(colour);
    put(key, legend(colour));
    for (const one of [view.element, panel, key, undecoded]) if (one) one.hidden = !tokens();
    text.hidden = tokens();
    sheet.setAttribute("aria-labelledby", `tab-${shown}`);
    note({ colour: tokens() && colour !== "logprob" ? colour : "", show: tokens() ? "tokens" : "", ...(tokens() ? {} : { token: "" }) });
    put(tabs, TABS.map(([name, title]) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(shown === name), "aria-controls": "sheet", tabindex: shown === name ? 0 : -1,
      onclick: () => choose(name), onkeydown: (event) => { if (["ArrowLeft", "ArrowRight"].includes(event.key)) { event.preventDefault(); event.stopPropagation(); choose(tokens() ? "text" : "tokens"); tabs.querySelector('[aria-selected="true"]').focus(); } } }, title)));
    put(tools, tabs,
      tokens() ? h("label", {}, "colour by ", h("select", { name: "colour", onchange: (event) => { colour = event.target.value; repaint(); } },
        Object.keys(LENSES).map((name) => h("option", { value: name, selected: name === colour }, name)))) : null,
      h("a.button", { href: link("group", place) }, `Tree of ${found.group.length} episodes`),
      found.kind === "train" ? h("a.button", { href: link("gradient", { run: place.run, step: place.step }) }, "Why this gradient") : null,
      h("a.button", { href: `/api/raw?${new URLSearchParams(place)}` }, "Raw line"));
  }
  const choose = (name) => { shown = name; repaint(); };
  if (!TABS.some(([name]) => name === shown)) shown = "text";
  repaint();

  const own = found.group.findIndex((row) => row.line === found.line);
  const step = (way) => { const row = found.group[own + way]; if (row) opened(row); };
  const inTokens = (does) => () => (tokens() ? does() : false);
  const element = h("div", {},
    h("h1", {}, "Episode ", h("span.faint", {}, visible(found.id))), facts(found, place), siblings(found, opened),
    failure(found.failure), frames(found), tools, sheet);
  return {
    element, title: `Episode ${found.id}`,
    ready: () => { if (at.one("token")) view.pointAt(at.one("token")); },
    keys: {
      ArrowRight: inTokens(() => view.move(1)), ArrowLeft: inTokens(() => view.move(-1)), ArrowDown: inTokens(() => view.moveCall(1)), ArrowUp: inTokens(() => view.moveCall(-1)),
      c: inTokens(() => { const names = Object.keys(LENSES); colour = names[(names.indexOf(colour) + 1) % names.length]; repaint(); }),
      v: () => choose(tokens() ? "text" : "tokens"),
      t: () => go("group", place), "[": () => step(-1), "]": () => step(1),
    },
  };
}

function facts(found, place) {
  const measured = Object.entries(found.metrics);
  const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
  return h("p.facts", {},
    fact("run", h("a", { href: link("episodes", { run: place.run }) }, visible(place.run))), fact("step", number(found.step)), found.kind === "evaluation" ? h("span.tag", {}, "held out") : null,
    fact("reward", rewardOf(found)), rewardParts(found),
    fact("stop", visible(found.stop)), fact("turns", number(found.turns)), fact("calls", number(found.calls.length)), fact("took", span(found.seconds)),
    found.task.source ? fact("source", visible(found.task.source)) : null,
    measured.length ? h("span", {}, measured.slice(0, 10).map(([name, value]) => `${visible(name)} ${number(value)}`).join(" · ")) : null);
}

/** The parts of a reward of several. */
function rewardParts(found) {
  const parts = Object.entries(found.rewards);
  return parts.length > 1 ? h("span", {}, parts.map(([name, value], at) => [at ? ", " : "", `${visible(name)} `, signed(value)])) : null;
}

function siblings(found, opened) {
  return h("p.siblings", {}, h("span.faint", {}, "group "), found.group.map((row) =>
    h("button.chip", { type: "button", "aria-current": row.line === found.line ? "true" : null, title: visible(row.episode), onclick: () => opened(row) }, numberOf(row), " ", rewardOf(row))));
}

function failure(one) {
  return one && h("details.notice.bad", { open: true }, h("summary", {}, h("b", {}, visible(one.where)), ` ${visible(one.kind)}: ${visible(one.message)}`), one.traceback ? h("pre.trace", {}, visible(one.traceback)) : null);
}

function frames(found) {
  return found.frames.length ? h("div.gifs", {}, found.frames.map((name) => h("img", { src: `/frame?${new URLSearchParams({ run: found.run, name })}`, alt: "replay of this episode" }))) : null;
}

/** The messages by role, tool calls with their results, observations, and the reward at the end. */
function conversation(found) {
  const parts = Object.entries(found.rewards);
  return h("div.conversation", {}, found.conversation.map(entry),
    h("div.outcome", {}, h("p", {}, "Reward ", h("b", {}, rewardOf(found, 4)), parts.length > 1 || (parts.length && parts[0][0] !== "env")
      ? h("span.faint", {}, " = ", parts.map(([name, value], at) => [at ? " + " : "", `${visible(name)} `, signed(value)])) : null),
      h("p.faint", {}, `Stop: ${visible(found.stop)}`)));
}

const SAYS = { opening: "", reply: "", observation: "observation", context: "added by the agent" };

function entry(one) {
  const about = [one.kind === "reply" && one.turn !== null ? `turn ${one.turn + 1}` : SAYS[one.kind], one.call === null || one.call === undefined ? "" : `call ${one.call + 1}`].filter(Boolean).join(", ");
  return h("div", { class: `message ${one.role} ${one.kind}` },
    h("p.role", {}, visible(one.role), one.name ? ` ${visible(one.name)}` : "", about ? h("span.faint", {}, ` · ${about}`) : null, one.reward === null ? null : h("span.turn-reward", {}, " reward ", signed(one.reward))),
    one.parts.length ? one.parts.map((part) => (part.call ? toolCall(part.call) : words(part.text))) : h("p.faint", {}, "no text"));
}

/** A tool call: its name, a line an argument, its error or result. */
function toolCall(call) {
  const named = Object.entries(call.arguments ?? {}), lone = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  return h("div.tool-call", {},
    h("p.tool-name", {}, h("span.faint", {}, "tool call "), h("code", {}, visible(call.name || "?"))),
    named.length ? h("dl.arguments", {}, named.map(([name, value]) => [h("dt", {}, visible(name)), h("dd", {}, words(lone(value)))])) : null,
    call.text ? words(call.text) : null,
    call.error ? h("p.bad", {}, "✕ ", visible(call.error)) : null,
    call.result === null ? null : h("div.tool-result", {}, h("p.role", {}, "result"), words(call.result)));
}

/** A text; a long one is opened by a click. */
function words(text) {
  if (text.length <= LONG) return h("pre", {}, visible(text));
  const all = h("pre", {}, `${visible(text.slice(0, LONG))}…`);
  const more = h("button", { type: "button", onclick: () => { put(all, visible(text)); more.remove(); } }, `Show all ${number(text.length)} characters`);
  return [all, more];
}
