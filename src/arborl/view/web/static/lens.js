// The token lens: every token of an episode, coloured by what is known of it.

import { h, number, numberOf, percent, rewardOf, signed, visible } from "./dom.js";

/** What tokens can be coloured by: name, meaning, and value on a scale from -1 to 1 (null: unknown). */
export const LENSES = {
  mask: { says: "sampled (a loss term), or part of the prompt", of: (token) => (token.sampled ? (token.trained ? 0.55 : 0.15) : null), one: true },
  logprob: { says: "log-probability when it was sampled", of: (token) => (token.logprob === null ? null : 1 - Math.exp(Math.min(token.logprob, 0))), one: true },
  ratio: { says: "importance ratio: green with a bar below: above 1; red with a bar above: below 1", of: (token) => (token.ratio == null ? null : clamp(Math.log(token.ratio) * 5)) },
  advantage: { says: "advantage: green with a bar below: positive; red with a bar above: negative; uncoloured: zero", of: (token, most) => (token.advantage == null ? null : token.advantage / most.advantage) },
  weight: { says: "share of the loss", of: (token, most) => (token.weight == null ? null : token.weight / most.weight), one: true },
  entropy: { says: "entropy of the policy", of: (token, most) => (token.entropy == null ? null : token.entropy / most.entropy), one: true },
  push: { says: "size of its gradient: green with a bar below: its probability rises; red with a bar above: it falls", of: (token, most) => (token.push == null ? null : (-Math.sign(token.pull) * token.push) / most.push) },
  version: { says: "policy version; older is stronger", of: (token, most, least) => (token.version == null || token.version < 0 ? null : most.version === least.version ? 0.12 : 0.1 + (0.9 * (most.version - token.version)) / (most.version - least.version)), one: true },
};
const NUMBERS = ["logprob", "now", "ratio", "advantage", "weight", "entropy", "loss", "pull", "push", "version"];
const LABELS = {
  logprob: "log-probability, sampled", now: "log-probability, learner", ratio: "ratio", advantage: "advantage", weight: "weight", entropy: "entropy",
  loss: "loss", pull: "pull (d loss / d log p)", push: "push (|pull| (1 − p))", version: "version",
};
const READ_MOST = 1200;

const clamp = (value) => Math.max(-1, Math.min(1, value));

/** The tokens of a call as records: those that were read, then those that were sampled. */
export function tokensOf(call) {
  const read = call.read.ids.map((id, at) => ({ call: call.number, at, sampled: false, id, text: call.read.text[at], logprob: null }));
  const sampled = call.sampled.ids.map((id, at) => {
    const token = { call: call.number, at, sampled: true, trained: call.trained, id, text: call.sampled.text[at], rivals: call.rivals?.[at], against: call.sampled.against?.[at] };
    for (const name of NUMBERS) token[name] = call.sampled[name]?.[at] ?? null;
    return token;
  });
  return { read, sampled };
}

/**
 * The calls of an episode, token by token. `on(token)` is called with what is pointed at.
 * `from`: {call, part, token} where another episode parts; earlier calls are left out.
 */
export function lens(calls, { colour = "logprob", on = () => {}, from = null, name = "" } = {}) {
  const all = calls.map(tokensOf);
  const sampled = all.flatMap((one) => one.sampled);
  const most = {}, least = {};
  for (const key of NUMBERS) {
    const known = sampled.map((token) => token[key]).filter((value) => value !== null);
    most[key] = known.reduce((best, one) => Math.max(best, key === "version" ? one : Math.abs(one)), key === "version" ? -Infinity : 0) || 1;
    least[key] = known.reduce((best, one) => Math.min(best, one), Infinity);
  }
  const spans = [];

  function span(token) {
    const made = h("span.token", { class: `token ${token.sampled ? "sampled" : "read"}`, tabindex: token.sampled ? -1 : null }, shownText(token.text));
    if (!token.sampled) return made;
    made.dataset.at = `${token.call}.${token.at}`;
    made.setAttribute("role", "button");
    if (token.rivals?.length) made.classList.add("contested");
    spans.push({ made, token });
    return made;
  }

  function block(call, { read, sampled: tokens }) {
    if (from && from.call !== null && call.number < from.call) return null;
    const [origin, repeated] = call.repeats;
    const parts = from && from.call === call.number ? from : null;
    const begins = origin < 0 ? "begins" : call.goes_on ? `extends call ${origin + 1}` : `another context: the first ${number(repeated)} tokens of call ${origin + 1}, then`;
    const some = read.slice(-READ_MOST);
    const words = h("pre.tokens", {},
      origin >= 0 ? h("span.repeated", { title: "tokens of an earlier call" }, `${number(repeated)} tokens …`) : null,
      some.length < read.length ? h("span.repeated", {}, `${number(read.length - some.length)} more tokens …`) : null,
      some.map((token) => mark(span(token), parts?.part === "read" && parts.token === repeated + token.at)),
      tokens.map((token) => mark(span(token), parts?.part === "sampled" && parts.token === token.at)),
      call.finish === "length" ? h("span.cut", {}, "cut off") : null);
    return h("section.call", { "data-call": call.number },
      h("h3", {}, `call ${call.number + 1}`, h("span.faint", {}, ` ${name} turn ${call.turn + 1} · branch ${call.branch + 1} · ${begins} · prompt ${number(call.prompt)}, sampled ${number(call.sampled.ids.length)}${call.trained ? "" : " · not trained"}`)),
      words);
  }

  const element = h("div.lens", {}, calls.map((call, at) => block(call, all[at])));

  function paint(chosen) {
    const scale = LENSES[chosen] ?? LENSES.logprob;
    for (const { made, token } of spans) {
      const value = scale.of(token, most, least);
      made.classList.toggle("down", value !== null && value < 0);
      made.classList.toggle("up", !scale.one && value !== null && value > 0);
      made.classList.toggle("one", Boolean(scale.one));
      made.classList.toggle("unknown", value === null);
      made.style.setProperty("--v", value === null ? 0 : Math.min(1, Math.abs(value)).toFixed(3));
    }
  }

  function point(number) {
    const found = spans[number];
    if (!found) return -1;
    element.querySelector(".token.pointed")?.classList.remove("pointed");
    found.made.classList.add("pointed");
    on(found.token, found.made);
    return number;
  }
  const place = new Map(spans.map(({ made }, at) => [made, at]));
  let now = -1;
  const hit = (event) => { const at = place.get(event.target.closest?.(".token.sampled")); if (at !== undefined && at !== now) now = point(at); };
  element.addEventListener("pointerover", hit);
  element.addEventListener("click", hit);
  paint(colour);
  return {
    element, paint,
    pointAt: (at) => { const found = spans.findIndex(({ made }) => made.dataset.at === at); if (found >= 0) { now = point(found); spans[found].made.scrollIntoView({ block: "center" }); } },
    move(way) { now = point(Math.max(0, Math.min(spans.length - 1, now + way))); spans[now]?.made.scrollIntoView({ block: "nearest" }); },
    moveCall(way) {
      const call = spans[now]?.token.call ?? -1;
      const wanted = spans.findIndex(({ token }) => (way > 0 ? token.call > call : token.call === Math.max(0, call - 1)));
      if (wanted >= 0) { now = point(wanted); spans[now].made.scrollIntoView({ block: "nearest" }); }
    },
  };
}

function mark(made, parted) {
  if (parted) made.classList.add("parted");
  return made;
}

/** Tokens that consist of spaces and line ends are made visible. */
function shownText(text) {
  if (text === "") return "·";
  if (text === "\n") return "↵\n";
  return visible(text);
}

/** All numbers of a token, for the side panel. */
export function aboutToken(token, group, open) {
  const known = NUMBERS.filter((name) => token[name] !== null && token[name] !== undefined);
  return [
    h("p.big", {}, h("code", {}, visible(JSON.stringify(token.text))), h("span.faint", {}, ` token ${token.id}`)),
    h("p.faint", {}, `call ${token.call + 1}, number ${token.at + 1} of it`),
    h("dl.numbers", {}, token.logprob === null ? null : [h("dt", {}, "probability"), h("dd", {}, percent(Math.exp(token.logprob)))],
      known.map((name) => [h("dt", {}, LABELS[name]), h("dd", {}, name === "advantage" ? signed(token[name], 4) : number(token[name], 4))])),
    token.against?.length
      ? [h("h3", {}, "Most likely other tokens"), h("ul.rivals", {}, token.against.map((rival) => h("li", {}, h("code", {}, visible(JSON.stringify(rival.text))), ` ${percent(Math.exp(rival.logprob))}`)))]
      : null,
    token.rivals?.length
      ? [h("h3", {}, "Other episodes sampled here"), h("ul.rivals", {}, token.rivals.map((rival) => h("li", {}, h("code", {}, visible(JSON.stringify(rival.text))), ` ${percent(Math.exp(rival.logprob))} · `,
          rival.episodes.map((at) => h("button.link", { type: "button", onclick: () => open(group[at]) }, numberOf(group[at]), " ", rewardOf(group[at]))))))]
      : null,
    token.advantage === null ? h("p.faint", {}, "No advantage, ratio or loss is stored for this token: it was not trained, or track.terms left it out.") : null,
  ];
}

/** What the colours mean. */
export function legend(colour) {
  const one = LENSES[colour]?.one;
  return h("span.legend", {}, [-1, -0.5, 0, 0.5, 1].filter((at) => !one || at >= 0).map((at) =>
    h("i.token.sampled", { class: `token sampled${at < 0 ? " down" : at > 0 && !one ? " up" : ""}${one ? " one" : ""}`, style: { "--v": Math.abs(at) } }, " ")), ` ${LENSES[colour]?.says ?? ""}`);
}

