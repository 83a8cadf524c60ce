// The frame of all pages: selection of the page, keys, light and dark mode, updates.

import { get } from "./api.js";
import { h, put, visible } from "./dom.js";
import { pressed, showKeys } from "./keys.js";
import { beside } from "./page_beside.js";
import { episode } from "./page_episode.js";
import { episodes } from "./page_episodes.js";
import { gradient } from "./page_gradient.js";
import { group } from "./page_group.js";
import { run } from "./page_run.js";
import { runs } from "./page_runs.js";
import { here, link } from "./place.js";

const PAGES = { runs, run, episodes, episode, group, beside, gradient };
const EVERY = 2000;
const page = document.getElementById("page");
let shown = null; // what the present page knows to do: refresh, keys
let turn = 0;
let pulse = "";

async function draw() {
  const mine = ++turn;
  const at = here();
  nav(at);
  page.setAttribute("aria-busy", "true");
  try {
    const made = await (PAGES[at.page] ?? runs)(at);
    if (mine !== turn) return;
    shown = made;
    put(page, made.element);
    pulse = "";
    beat().then(([now]) => { if (mine === turn) pulse ||= now; }, () => {});
    document.title = made.title ? `${visible(made.title)} · Arbor` : "Arbor";
    made.ready?.();
  } catch (error) {
    if (mine === turn) put(page, h("p.problem", {}, visible(error.message)), h("p", {}, h("a", { href: "#/runs" }, "All runs")));
    if (mine === turn) shown = null;
  }
  page.removeAttribute("aria-busy");
}

/** What changes with the runs of this page, and whether one of them is running. */
async function beat() {
  const found = await get("pulse", { run: here().all("run").slice(0, 40), every: shown?.every ? 1 : "" });
  return [JSON.stringify(found), Object.values(found).some((one) => one.includes("running"))];
}

function nav(at) {
  const run = at.all("run").slice(0, 1);
  const tabs = [["Runs", "runs", { run: at.all("run") }], ["Run", "run", { run }], ["Episodes", "episodes", { run }], ["Gradient", "gradient", { run }]];
  const under = { episode: "episodes", group: "episodes", beside: "episodes" };
  put(document.getElementById("nav"), tabs.map(([name, where, params]) =>
    h("a", { href: link(where, params), "aria-current": (under[at.page] ?? at.page) === where ? "page" : null }, name)));
}

async function look() {
  try {
    if (document.hidden) return;
    const asked = shown;
    const [now, running] = await beat();
    document.getElementById("live").hidden = !running;
    if (asked === shown && pulse && now !== pulse) await shown?.refresh?.();
    if (asked === shown) pulse = now; // else another page was opened meanwhile
    say("");
  } catch {
    say("The viewer does not answer. Is `arborl view` still running?");
  } finally {
    setTimeout(look, EVERY);
  }
}

function say(text) {
  const notice = document.getElementById("notice");
  if (notice.textContent !== text) notice.textContent = text;
}

function themed(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
}

function toggle() {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem("theme", dark ? "dark" : "light");
  themed(dark);
}

const kept = localStorage.getItem("theme");
themed(kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("theme").addEventListener("click", toggle);
document.getElementById("help").addEventListener("click", showKeys);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); page.focus(); });
addEventListener("hashchange", draw);
addEventListener("keydown", (event) => pressed(event, () => shown, toggle));
draw();
look();
