// Elements from values. Whatever is shown becomes a text node: no string is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("a.quiet", {href, onclick}, "text", child). A null or false child is left out. */
export function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag || "div");
  if (classes.length) made.className = classes.join(" ");
  return filled(made, attributes, children);
}

/** The same of SVG. */
export function s(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, set] of Object.entries(value)) made.style.setProperty(name, set);
    else if (key === "value" || key === "checked") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Replace what an element holds. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** Text with escaped control characters, which could hide or reorder other text. */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (sign) => {
    const code = sign.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A formatted number; a dash if it was not measured. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return visible(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
}

/** The class of a reward or advantage: green if positive, red if negative, neutral if zero. */
export function sign(value) {
  return value > 0 ? "positive" : value < 0 ? "negative" : "zero";
}

/** A reward or advantage with its sign, which tells the same as its colour. */
export function signed(value, digits = 3) {
  if (value === null || value === undefined) return h("span.zero", {}, "–");
  return h(`span.${sign(value)}`, {}, value > 0 ? "+" : value < 0 ? "−" : "", number(Math.abs(value), digits));
}

/** The reward of an episode, or that it failed. */
export function rewardOf(row, digits = 3) {
  return row.failure ? h("span.negative", {}, "✕ failed") : signed(row.reward, digits);
}

/** The number of an episode in its group: the end of its id, `#0` of `lake/7#0`. */
export function numberOf({ episode, task }) {
  return visible(task && episode.startsWith(`${task}#`) ? episode.slice(task.length) : episode);
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${number(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600, 2)} h` : `${Math.round(seconds / 86400)} days`;
}
