// The keyboard: what works on every page; a page adds its own.

import { h, put } from "./dom.js";
import { here, link } from "./place.js";

const HELP = [
  ["Everywhere", [["?", "these keys"], ["/", "search"], ["1 2 3", "runs, episodes, gradient"], ["r", "the run"], ["d", "light or dark"], ["Esc", "back, or out of a field"]]],
  ["Lists", [["j k", "next, previous row"], ["Enter", "open it"], ["n p", "next, previous page"]]],
  ["Episode", [["← →", "token by token"], ["↑ ↓", "call by call"], ["c", "next colour"], ["v", "conversation or tokens"], ["[ ]", "previous, next episode"], ["t", "tree of its group"]]],
  ["A chart that has the focus", [["← →", "point by point"], ["+ -", "zoom in, out"], ["Shift ← →", "move the range"], ["0", "show everything"], ["l", "log scale"]]],
];

export function showKeys() {
  const dialog = document.getElementById("keys");
  put(dialog, h("h2", {}, "Keys"),
    h("div.keys", {}, HELP.map(([where, keys]) => h("section", {}, h("h3", {}, where),
      h("dl", {}, keys.map(([key, what]) => [h("dt", {}, key.split(" ").map((one) => h("kbd", {}, one))), h("dd", {}, what)]))))),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  dialog.showModal();
}

/** A key: the page's, or one of those that work everywhere. */
export function pressed(event, page, toggle) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const own = page()?.keys?.[event.key];
  if (own && own(event) !== false) return event.preventDefault();
  const run = here().all("run");
  const does = {
    "?": showKeys,
    "/": () => document.querySelector("[data-search]")?.focus(),
    "1": () => { location.hash = link("runs", { run }); },
    "2": () => { location.hash = link("episodes", { run: run.slice(0, 1) }); },
    "3": () => { location.hash = link("gradient", { run: run.slice(0, 1) }); },
    r: () => { location.hash = link("run", { run: run.slice(0, 1) }); },
    d: toggle,
    Escape: () => history.back(),
  }[event.key];
  if (does) {
    event.preventDefault();
    does();
  }
}

/** Moving through rows with j and k; `rows()` are elements with a link in them. */
export function rowKeys(rows) {
  const at = () => rows().findIndex((row) => row.classList.contains("chosen"));
  const choose = (number) => {
    const all = rows();
    if (!all.length) return;
    const next = Math.max(0, Math.min(all.length - 1, number));
    all.forEach((row, place) => row.classList.toggle("chosen", place === next));
    all[next].querySelector("a")?.focus({ preventScroll: true });
    all[next].scrollIntoView({ block: "nearest" });
  };
  return { j: () => choose(at() + 1), k: () => choose(Math.max(0, at() - 1)), Enter: () => (at() < 0 ? false : rows()[at()].querySelector("a")?.click()) };
}
