// Two episodes of a group side by side, from the token at which they diverge.

import { get } from "./api.js";
import { h, number, put, rewardOf, visible } from "./dom.js";
import { aboutToken, legend, lens, LENSES } from "./lens.js";
import { link, note } from "./place.js";

export async function beside(at) {
  const place = at.place(), other = at.one("other");
  let colour = LENSES[at.one("colour")] ? at.one("colour") : "logprob";
  const [left, right, parting] = await Promise.all([
    get("episode", place), get("episode", { ...place, line: other }), get("parting", { ...place, other }),
  ]);
  const panel = h("aside.about", {}, h("p.faint", {}, "Point at a token."));
  const views = [left, right].map((one) => lens(one.calls, { colour, from: parting, on: (token) => put(panel, aboutToken(token, one.group, () => {})) }));
  const column = (one, view) => h("section", {}, h("h2", {}, h("a", { href: link("episode", { ...place, line: one.line }) }, visible(one.id))),
    h("p.facts", {}, h("span", {}, "reward ", h("b", {}, rewardOf(one))), h("span", {}, "stop ", h("b", {}, visible(one.stop))), h("span", {}, "calls ", h("b", {}, number(one.calls.length)))), view.element);
  const key = h("p.faint.keyline", {}, legend(colour));
  const select = h("select", { "aria-label": "colour by", onchange: (event) => { colour = event.target.value; views.forEach((view) => view.paint(colour)); put(key, legend(colour)); note({ colour }); } },
    Object.keys(LENSES).map((name) => h("option", { value: name, selected: name === colour }, name)));
  const element = h("div", {}, h("h1", {}, "Side by side"), h("p", {}, where(parting)),
    h("div.tools", {}, h("label", {}, "colour by ", select), h("a.button", { href: link("group", place) }, "Tree")), key,
    h("div.reading", {}, h("div.two.columns", {}, column(left, views[0]), column(right, views[1])), panel));
  return { element, title: "Side by side", keys: { t: () => { location.hash = link("group", place); } } };
}

function where({ call, part, token }) {
  if (part === "never") return "Both episodes have the same tokens.";
  if (part === "end") return `One episode ends; the other has a model call number ${number(call + 1)}.`.replace("1th", "1st").replace("2th", "2nd").replace("3th", "3rd");
  const same = call === 0 ? "" : ` The ${call === 1 ? "call" : `${number(call)} calls`} before ${call === 1 ? "is" : "are"} the same.`;
  return (part === "sampled" ? `They diverge in call ${number(call + 1)}, at token ${number(token + 1)} of the reply (outlined): the model sampled different tokens.` : `They diverge in the prompt of call ${number(call + 1)}, at token ${number(token + 1)}: the environment or a tool returned different text.`) + same;
}
