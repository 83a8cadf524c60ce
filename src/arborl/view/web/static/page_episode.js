// One episode: rewards, conversation, tokens.

import { get } from "./api.js";
import { h, number, put, span, visible } from "./dom.js";
import { aboutToken, legend, lens, LENSES } from "./lens.js";
import { go, link, note } from "./place.js";

export async function episode(at) {
  const place = at.place();
  const found = await get("episode", place);
  let colour = LENSES[at.one("colour")] ? at.one("colour") : "logprob";
  let tokens = at.one("show", "tokens") !== "text";
  const panel = h("aside.about", { "aria-live": "polite" }, h("p.faint", {}, "Point at a token, or press →."));
  const opened = (row) => go("episode", { run: place.run, kind: row.kind, step: row.step, line: row.line, colour, show: tokens ? "" : "text" });
  const view = lens(found.calls, {
    colour,
    on: (token) => { put(panel, aboutToken(token, found.group, opened)); note({ token: `${token.call}.${token.at}` }); },
  });
  const key = h("p.faint.keyline"), text = conversation(found), tools = h("div.tools");

  function repaint() {
    view.paint(colour);
    put(key, legend(colour));
    view.element.hidden = panel.hidden = key.hidden = !tokens;
    text.hidden = tokens;
    note({ colour: colour === "logprob" ? "" : colour, show: tokens ? "" : "text" });
    put(tools,
      h("label", {}, "show ", h("select", { "aria-label": "show", onchange: (event) => { tokens = event.target.value === "tokens"; repaint(); } },
        h("option", { value: "tokens", selected: tokens }, "tokens"), h("option", { value: "text", selected: !tokens }, "conversation"))),
      tokens ? h("label", {}, "colour by ", h("select", { name: "colour", onchange: (event) => { colour = event.target.value; repaint(); } },
        Object.keys(LENSES).map((name) => h("option", { value: name, selected: name === colour }, name)))) : null,
      h("a.button", { href: link("group", place) }, `Tree of ${found.group.length} episodes`),
      found.kind === "train" ? h("a.button", { href: link("gradient", { run: place.run, step: place.step }) }, "Why this gradient") : null,
      h("a.button", { href: `/api/raw?${new URLSearchParams(place)}` }, "Raw line"));
  }
  repaint();

  const own = found.group.findIndex((row) => row.line === found.line);
  const step = (way) => { const row = found.group[own + way]; if (row) opened(row); };
  const element = h("div", {},
    h("h1", {}, "Episode ", h("span.faint", {}, visible(found.id))), facts(found, place), siblings(found, opened),
    failure(found.failure), frames(found), tools, key,
    found.decoded ? null : h("p.problem", {}, "The run's tokenizer is not on this machine, so tokens are shown as numbers."),
    h("div.reading", {}, h("div", {}, view.element, text), panel));
  return {
    element, title: `Episode ${found.id}`,
    ready: () => { if (at.one("token")) view.pointAt(at.one("token")); },
    keys: {
      ArrowRight: () => view.move(1), ArrowLeft: () => view.move(-1), ArrowDown: () => view.moveCall(1), ArrowUp: () => view.moveCall(-1),
      c: () => { const names = Object.keys(LENSES); colour = names[(names.indexOf(colour) + 1) % names.length]; repaint(); },
      v: () => { tokens = !tokens; repaint(); },
      t: () => go("group", place), "[": () => step(-1), "]": () => step(1),
    },
  };
}

function facts(found, place) {
  const rewards = Object.entries(found.rewards), measured = Object.entries(found.metrics);
  const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
  return h("p.facts", {},
    fact("run", h("a", { href: link("episodes", { run: place.run }) }, visible(place.run))), fact("step", number(found.step)), found.kind === "evaluation" ? h("span.tag", {}, "held out") : null,
    fact("reward", found.failure ? "failed" : number(found.reward)),
    rewards.length > 1 ? h("span", {}, rewards.map(([name, value]) => `${visible(name)} ${number(value)}`).join(", ")) : null,
    fact("stop", visible(found.stop)), fact("turns", number(found.turns.length)), fact("calls", number(found.calls.length)), fact("took", span(found.seconds)),
    found.task.source ? fact("source", visible(found.task.source)) : null,
    measured.length ? h("span", {}, measured.slice(0, 10).map(([name, value]) => `${visible(name)} ${number(value)}`).join(" · ")) : null);
}

function siblings(found, opened) {
  return h("p.siblings", {}, h("span.faint", {}, "group "), found.group.map((row, at) =>
    h("button", { type: "button", class: `chip ${row.failure ? "bad" : ""}`, "aria-current": row.line === found.line ? "true" : null, title: visible(row.episode), onclick: () => opened(row) },
      `#${at + 1} ${row.failure ? "failed" : number(row.reward)}`)));
}

function failure(one) {
  return one && h("details.notice.bad", { open: true }, h("summary", {}, h("b", {}, visible(one.where)), ` ${visible(one.kind)}: ${visible(one.message)}`), one.traceback ? h("pre.trace", {}, visible(one.traceback)) : null);
}

function frames(found) {
  return found.frames.length ? h("div.gifs", {}, found.frames.map((name) => h("img", { src: `/frame?${new URLSearchParams({ run: found.run, name })}`, alt: "replay of this episode" }))) : null;
}

/** The messages by role, with tool calls and their results. */
export function conversation(found) {
  const between = new Map();
  for (const call of found.calls) {
    const results = call.messages.filter((message) => message.role === "tool");
    between.set(call.turn, [...(between.get(call.turn) ?? []), ...results, ...(call.reply?.calls.length ? [call.reply] : [])]);
  }
  return h("div.conversation", {}, found.opening.map((message) => messageBlock(message)),
    found.turns.map((turn, at) => [
      ...(between.get(at) ?? []).filter((message) => message.content !== turn.message.content).map((message) => messageBlock(message)),
      messageBlock(turn.message, turn.reward), turn.observation.map((message) => messageBlock(message))]));
}

function messageBlock(message, reward = 0) {
  return h("div", { class: `message ${message.role}` },
    h("p.role", {}, message.role, message.name ? ` ${visible(message.name)}` : "", reward ? h("span.reward", {}, ` ${reward > 0 ? "+" : ""}${number(reward)}`) : null),
    message.content ? h("pre", {}, visible(message.content)) : null,
    message.calls.map((call) => h("p.tool-call", {}, h("code", {}, visible(call.name)), " ", h("code", {}, visible(JSON.stringify(call.arguments))), call.error ? h("span.bad", {}, ` ${visible(call.error)}`) : null)));
}
