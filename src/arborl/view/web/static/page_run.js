// One run: summary, findings, tags and note, curves, use of the machine, episodes, settings, log.

import { get, send } from "./api.js";
import { chart, newBoard } from "./chart.js";
import { curves } from "./curves.js";
import { h, number, percent, put, span, visible } from "./dom.js";
import { rowKeys } from "./keys.js";
import { link, note } from "./place.js";
import { theRun } from "./page_episodes.js";
import { stubMark } from "./page_runs.js";

const USAGE = [
  ["CPU", [["system/process_cpu", "training process"], ["system/machine_cpu", "machine"]], "share of the cores"],
  ["Memory", [["system/process_memory_gib", "training process"], ["system/machine_memory_gib", "machine"]], "GiB"],
  ["GPU", [["system/gpu_utilization", "time with a running kernel"]], "share of the time"],
  ["GPU memory", [["system/gpu_memory_gib", "in use"], ["system/gpu_allocated_gib", "tensors of the training process"], ["learner/memory_gib", "peak of tensors"]], "GiB"],
];
const EPISODES = [["best", "-reward"], ["worst", "reward"], ["last", "-step"]];
const SHOWN = 3;
const later = (does, wait) => { let timer; return () => { clearTimeout(timer); timer = setTimeout(does, wait); }; };
const text = (value) => visible(value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

export async function run(at) {
  const name = await theRun(at);
  let facts = await get("run", { run: name });
  const top = h("div"), found = h("section", {}, h("h2", {}, "Findings"), h("p.faint", {}, "examining the run …"));
  const charts = curves({ runs: () => [name], colour: () => "c0", at });
  const parts = { usage: usage(name), episodes: episodes(name), settings: settings(name, at), log: log(name, at), tags: tags(name, facts, (now) => { facts = now; }) };
  const sections = [["Findings", found], ["Curves", charts.element], ["Machine", parts.usage.element], ["Episodes", parts.episodes.element], ["Configuration", parts.settings.element], ["Log", parts.log.element]];
  const jump = h("div.jump", { role: "navigation", "aria-label": "sections" }, sections.map(([title, section]) =>
    h("button", { type: "button", onclick: () => { section.scrollIntoView({ block: "start" }); section.setAttribute("tabindex", "-1"); section.focus({ preventScroll: true }); } }, title)));
  const element = h("div.run", {}, top, jump, h("div.two", {}, found, parts.tags.element), sections.slice(1).map(([, section]) => section));

  async function drawFindings() {
    try {
      put(found, h("h2", {}, "Findings ", h("span.faint", {}, "of arborl doctor")), findingList(name, await get("findings", { run: name })));
    } catch (error) {
      put(found, h("h2", {}, "Findings"), h("p.problem", {}, visible(error.message)));
    }
  }

  /** A section that cannot be read shows why; the others are drawn. */
  const safely = (part) => part.draw().catch((error) => { part.element.querySelector(".unread")?.remove(); part.element.append(h("p.problem.unread", {}, visible(error.message))); });
  const drawn = () => Promise.all([drawFindings(), ...[charts, parts.usage, parts.episodes, parts.settings, parts.log].map(safely)]);
  async function refresh() {
    facts = await get("run", { run: name });
    put(top, summary(name, facts));
    parts.tags.update(facts);
    await drawn();
  }
  put(top, summary(name, facts));
  return { element, title: name === "." ? facts.title : name, refresh, ready: drawn, keys: rowKeys(() => [...parts.episodes.element.querySelectorAll("tbody tr")]) };
}

// ------------------------------------------------------------------------------------------------ summary

function summary(name, facts) {
  const shown = name === "." ? facts.title : name, execution = facts.execution;
  const words = { model: facts.model, algorithm: facts.algorithm, environment: facts.environment, agent: facts.agent, engine: facts.engine, device: execution.device, precision: execution.precision, seed: facts.seed };
  return [
    h("p.crumbs", {}, h("a", { href: link("runs") }, "← All runs")),
    h("div.tools", {}, h("h1", {}, visible(shown), " ", h("span", { class: `state ${facts.state}` }, facts.state), stubMark(facts)), h("span.grow"),
      h("a.button", { href: link("episodes", { run: name }) }, "Episodes"), h("a.button", { href: link("gradient", { run: name }) }, "Gradient"), h("a.button", { href: link("runs", { run: name }) }, "Compare")),
    facts.stub ? h("p.notice", {}, h("b", {}, "Stub run. "), "Its replies are scripted, not sampled from a model: the numbers show that the loop works, and nothing else.") : null,
    facts.problems.map((problem) => h("p.problem", {}, visible(problem))),
    h("div.tiles", {}, tiles(facts)),
    h("p.facts", {}, Object.entries(words).filter(([, value]) => value !== null && value !== undefined).map(([key, value]) => h("span", {}, `${key} `, h("b", {}, visible(value)))),
      facts.started ? h("span", {}, "started ", h("b", {}, new Date(1000 * facts.started).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }))) : null),
    h("p.faint.path", {}, visible(facts.path)),
    facts.failures.length ? h("details.notice.bad", {}, h("summary", {}, `${number(facts.failures.reduce((sum, cause) => sum + (cause.count ?? 0), 0))} failed episodes, ${number(facts.failures.length)} ${facts.failures.length === 1 ? "cause" : "causes"}`),
      h("ul", {}, facts.failures.slice(0, 20).map((cause) => h("li", {}, `${number(cause.count)} × ${visible(cause.where ?? "")}: ${visible(cause.kind ?? "")} `, h("span.faint", {}, visible(cause.message ?? "")))))) : null,
    accounting(facts.accounting),
    facts.quarantine.length ? h("details.notice", {}, h("summary", {}, `${number(facts.quarantine.length)} set aside because ${facts.quarantine.length === 1 ? "it fails" : "they fail"} again and again`),
      h("ul", {}, facts.quarantine.map((one) => h("li", {}, `${visible(one.what ?? "")} until step ${number(one.until_step)}: ${number(one.failed_draws)} failed draws `, h("span.faint", {}, visible(one.failure ?? "")))))) : null,
  ];
}

/** Episodes by state: every started one is trained, dropped for a reason, or pending. */
function accounting(counts) {
  if (counts.started === undefined) return null;
  const reasons = Object.keys(counts).filter((name) => name.startsWith("dropped/")).sort();
  const dropped = reasons.reduce((sum, name) => sum + counts[name], 0);
  const rows = [["trained", counts.trained], ...reasons.map((name) => [`dropped: ${name.slice(8)}`, counts[name]]), ["pending", counts.pending], ["started", counts.started]];
  return h("details.accounting", {}, h("summary", {}, `${number(counts.started)} training episodes: ${number(counts.trained)} trained, ${number(dropped)} dropped, ${number(counts.pending)} pending`),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "state"), h("th.figure", { scope: "col" }, "episodes"))),
      h("tbody", {}, rows.map(([state, count]) => h("tr", {}, h("td", {}, visible(state)), h("td.figure", {}, number(count)))))));
}

function tiles(facts) {
  const share = facts.steps ? Math.min(1, facts.step / facts.steps) : null;
  const ends = (pair, shape) => (pair ? [h("span.faint", {}, `${shape(pair[0])} → `), shape(pair[1])] : "–");
  const rise = (pair, better = 1) => (pair && pair[1] !== pair[0] && !facts.stub ? (better * (pair[1] - pair[0]) > 0 ? "good" : "bad") : "");
  const [before, after] = [facts.before, facts.after], measure = (after.success ?? before.success ?? null) !== null ? "success" : "reward", shape = measure === "success" ? percent : number;
  const known = (when) => (when[measure] ?? null) !== null, interval = known(after) ? after : before;
  const left = facts.state === "running" && facts.steps && facts.step ? (facts.seconds / facts.step) * (facts.steps - facts.step) : null;
  return [
    tile("Steps", [number(facts.step), facts.steps ? h("span.faint", {}, ` / ${number(facts.steps)}`) : null], share === null ? null : h("progress", { max: 1, value: share, "aria-label": "steps done" })),
    facts.reward || !facts.loss ? tile("Reward, first → last step", ends(facts.reward, number), facts.success ? `success ${percent(facts.success[0])} → ${percent(facts.success[1])}` : null, rise(facts.reward))
      : tile("Loss, first → last step", ends(facts.loss, number), null, rise(facts.loss, -1)),
    tile(`Held-out ${measure}`, known(before) && known(after) ? ends([before[measure], after[measure]], shape) : known(after) || known(before) ? shape(interval[measure]) : "–",
      [(interval[`${measure}_low`] ?? null) !== null ? `95 % interval ${shape(interval[`${measure}_low`])} to ${shape(interval[`${measure}_high`])}` : null, interval.tasks ? `${number(interval.tasks)} tasks` : null].filter(Boolean).join(", ") || (facts.state === "running" ? "evaluated when the run ends" : "not evaluated"),
      known(before) && known(after) ? rise([before[measure], after[measure]]) : ""),
    tile("Training time", span(facts.seconds), left ? `about ${span(left)} left` : facts.step && facts.seconds ? `${span(facts.seconds / facts.step)} per step` : null),
  ];
}

function tile(label, value, below = null, mood = "") {
  return h("div.tile", {}, h("span.faint", {}, label), h("div", { class: `value ${mood}` }, value), below ? h("div.faint.below", {}, below) : null);
}

// ------------------------------------------------------------------------------------------------ findings

const STATES = { ok: "ok", warn: "warning", fail: "failure" };

function findingList(name, all) {
  const bad = all.filter((one) => one.state !== "ok");
  return [
    bad.length ? null : h("p.good", {}, "No problems found."),
    h("ul.findings", {}, [...bad, ...all.filter((one) => one.state === "ok")].map((one) => h("li", { class: one.state },
      h("span", { class: `verdict ${one.state}` }, STATES[one.state]), h("b", {}, visible(one.name)), " ", visible(one.detail),
      one.advice ? h("p.faint", {}, visible(one.advice)) : null,
      one.evidence.length ? h("p.faint", {}, "Episodes: ", one.evidence.map((shown, place) => [place ? ", " : "", "line" in shown
        ? h("a", { href: link("episode", { run: name, kind: shown.kind, step: shown.step, line: shown.line }), title: visible(shown.why) }, `step ${shown.step}, ${visible(shown.episode)}`)
        : `step ${shown.step}, ${visible(shown.episode)}`])) : null))),
  ];
}

// ------------------------------------------------------------------------------------------------ tags and note

function tags(name, facts, saved) {
  let now = { tags: facts.tags, note: facts.note };
  const chips = h("div.tags"), said = h("p.faint", { role: "status" });
  const add = h("input", { type: "text", maxlength: 40, placeholder: "add a tag", "aria-label": "add a tag" });
  const words = h("textarea", { rows: 4, maxlength: 4000, "aria-label": "note", placeholder: "What was tried, and what came of it." });
  words.value = now.note;
  const button = h("button", { type: "button", hidden: true, onclick: () => save({ note: words.value }) }, "Save note");

  let queue = Promise.resolve();
  function save(change) {
    queue = queue.then(async () => {
      const next = { ...now, ...change };
      if (next.note.trim() === now.note && next.tags.join() === now.tags.join()) return;
      put(said, "saving …");
      said.className = "faint";
      try {
        const found = await send("tags", { run: name }, { ...next, before: now });
        now = { tags: found.tags, note: found.note };
        saved(found);
        put(said, "Saved in tags.json of the run folder.");
        draw();
      } catch (error) {
        said.className = "bad";
        put(said, `Not saved: ${visible(error.message)}`);
      }
    });
    return queue;
  }

  function draw() {
    put(chips, now.tags.map((tag) => h("span.tag", {}, visible(tag), h("button.link", { type: "button", "aria-label": `remove tag ${visible(tag)}`, onclick: () => save({ tags: now.tags.filter((one) => one !== tag) }).then(() => add.focus()) }, "×"))), add);
    button.hidden = words.value.trim() === now.note;
  }
  add.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== ",") return;
    event.preventDefault();
    const given = add.value.split(",").map((one) => one.trim()).filter(Boolean);
    add.value = "";
    if (given.length) save({ tags: [...new Set([...now.tags, ...given])] }).then(() => add.focus());
  });
  words.addEventListener("input", () => { button.hidden = words.value.trim() === now.note; });
  words.addEventListener("change", () => save({ note: words.value }));
  draw();
  const element = h("section", {}, h("h2", {}, "Tags and note"), chips, words, h("div.tools", {}, button, said));
  const update = (found) => { // what is being edited is kept
    const edited = words.value.trim() !== now.note || document.activeElement === words;
    if (edited || (document.activeElement === add && add.value)) return;
    if (found.note === now.note && found.tags.join() === now.tags.join()) return;
    now = { tags: found.tags, note: found.note };
    words.value = now.note;
    draw();
  };
  return { element, update };
}

// ------------------------------------------------------------------------------------------------ the machine

function usage(name) {
  const body = h("div"), element = h("section", {}, h("h2", {}, "Machine"), body);
  async function draw() {
    const names = USAGE.flatMap(([, lines]) => lines.map(([metric]) => metric));
    const found = (await get("series", { run: name, name: names }))[name] ?? {};
    const board = newBoard();
    const shown = USAGE.map(([title, lines, unit]) => [title, lines.filter(([metric]) => found[metric]), unit]).filter(([, lines]) => lines.some(([metric]) => metric.startsWith("system/")));
    put(body, shown.length ? h("div.charts", {}, shown.map(([title, lines, unit]) => h("div", {},
      chart({ title: `${title}, ${unit}`, board, zero: true, lines: lines.map(([metric, words], place) => ({ name: words, colour: `c${place}`, x: found[metric].step, y: found[metric].value })) }).element,
      lines.length > 1 ? h("p.legend-line.faint", {}, lines.map(([, words], place) => h("span", {}, h("i", { class: `key c${place}` }), words))) : null)))
      : h("p.faint", {}, "Not recorded: runs write the use of CPU, memory and GPU with each step since version 0.1."));
  }
  return { element, draw };
}

// ------------------------------------------------------------------------------------------------ episodes

function episodes(name) {
  const gifs = h("div.gifs"), body = h("div"), element = h("section", {}, h("h2", {}, "Episodes"), gifs, body);
  const to = (one) => link("episode", { run: name, kind: one.kind, step: one.step, line: one.line });
  const words = (one) => ("step" in one ? `step ${one.step}, ${visible(one.kind === "train" ? "training" : one.kind)}` : visible(one.name));
  async function draw() {
    const replays = await get("replays", { run: name });
    const names = replays.map((one) => one.name).join();
    if (gifs.dataset.names !== names) { // images are loaded once
      gifs.dataset.names = names;
      put(gifs, replays.map((one) => {
        const picture = h("img", { src: `/frame?${new URLSearchParams({ run: name, name: one.name })}`, alt: `replay ${visible(one.episode ?? one.name)}`, loading: "lazy" });
        return h("figure", {}, "line" in one ? h("a", { href: to(one) }, picture) : picture, h("figcaption", {}, words(one), one.episode ? h("br") : null, visible(one.episode ?? "")));
      }));
    }
    const lists = await Promise.all(EPISODES.map(([, order]) => get("episodes", { run: name, order, count: SHOWN, failure: order.endsWith("reward") ? "none" : "" })));
    const rows = EPISODES.flatMap(([kind], place) => lists[place].rows.map((one) => h("tr", {},
      h("td", { "data-label": "" }, kind), h("td.name", {}, h("a", { href: to(one) }, visible(one.episode))), h("td.figure", { "data-label": "step" }, number(one.step)),
      h("td", { "data-label": "kind" }, one.kind === "train" ? "training" : visible(one.kind)), h("td.figure", { "data-label": "reward" }, one.failure ? h("span.bad", {}, "failed") : number(one.reward)),
      h("td", { "data-label": "stop" }, visible(one.stop)), h("td.figure", { "data-label": "turns" }, number(one.turns)), h("td.figure", { "data-label": "tokens" }, number(one.sampled)))));
    put(body, rows.length ? h("table.wide", {}, h("thead", {}, h("tr", {}, ["", "episode", "step", "kind", "reward", "stop", "turns", "tokens"].map((head, place) => h([2, 4, 6, 7].includes(place) ? "th.figure" : "th", { scope: "col" }, head)))), h("tbody", {}, rows))
      : h("p.faint", {}, lists[0].indexed < 1 ? "reading the files …" : "No episodes are stored."),
      h("p", {}, h("a", { href: link("episodes", { run: name }) }, `All ${number(lists[2].total)} episodes`)));
    if (lists[0].indexed < 1) setTimeout(() => element.isConnected && draw(), 1000);
  }
  return { element, draw };
}

// ------------------------------------------------------------------------------------------------ settings

function settings(name, at) {
  let found = null, all = at.one("settings") === "all", wanted = "";
  const body = h("div"), count = h("span.faint", { role: "status" });
  const only = h("input", { type: "checkbox", checked: !all, onchange: () => { all = !only.checked; note({ settings: all ? "all" : "" }); show(); } });
  const find = h("input", { type: "search", placeholder: "setting …", "aria-label": "find a setting" });
  find.addEventListener("input", later(() => { wanted = find.value.toLowerCase(); show(); }, 150));
  const element = h("section", {}, h("div.tools", {}, h("h2", {}, "Configuration"), h("label", {}, only, " differs from defaults only"), find, count), body);

  function show() {
    if (!found) return;
    const differ = new Map(Object.entries(found.differ));
    const rows = Object.entries(found.settings).filter(([key, value]) => (all || differ.has(key)) && `${key}=${text(value)}`.toLowerCase().includes(wanted)).sort(([a], [b]) => (a < b ? -1 : 1));
    put(count, `${number(rows.length)} of ${number(Object.keys(found.settings).length)} settings`);
    put(body, rows.length ? h("div.scroll", { tabindex: 0, role: "region", "aria-label": "settings" }, h("table.differences", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), h("th", { scope: "col" }, "value"), h("th", { scope: "col" }, "default"))),
      h("tbody", {}, rows.map(([key, value]) => h("tr", { class: all && differ.has(key) ? "differs" : null }, h("th", { scope: "row" }, visible(key)), h("td", {}, text(value)), h("td.faint", {}, differ.has(key) ? text(differ.get(key)[0]) : text(value)))))))
      : h("p.faint", {}, Object.keys(found.settings).length ? (wanted ? "No setting matches." : "All settings have their defaults.") : "The run has no readable config.yaml."));
  }
  async function draw() {
    if (found && Object.keys(found.settings).length) return; // a run does not change its settings
    found = await get("settings", { run: name });
    show();
  }
  return { element, draw };
}

// ------------------------------------------------------------------------------------------------ log

function log(name, at) {
  const lines = h("div.log", { tabindex: 0, role: "log", "aria-label": "log" }), count = h("span.faint", { role: "status" });
  const find = h("input", { type: "search", value: at.one("log_text"), maxlength: 400, placeholder: "text …", "aria-label": "filter the log" });
  const level = h("select", { "aria-label": "level", onchange: () => { keep(); draw(); } }, [["", "all levels"], ["WARNING", "warnings and errors"], ["ERROR", "errors"]].map(([value, words]) => h("option", { value, selected: at.one("log_level") === value }, words)));
  const keep = () => note({ log_text: find.value, log_level: level.value });
  find.addEventListener("input", later(() => { keep(); draw(); }, 200));
  const element = h("section", {}, h("div.tools", {}, h("h2", {}, "Log"), find, level, count), lines);
  let turn = 0;
  async function draw() {
    const mine = ++turn;
    try {
      const found = await get("log", { run: name, find: find.value, level: level.value });
      if (mine !== turn) return;
      const end = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30 || !lines.childElementCount;
      put(lines, found.lines.length ? found.lines.map((line) => h("pre", { class: /^\S+ (ERROR|CRITICAL)\b/.test(line) ? "bad" : /^\S+ WARNING\b/.test(line) ? "warn" : null }, visibleLines(line))) : h("p.faint", {}, found.bytes ? "No line matches." : "There is no run.log yet."));
      put(count, found.total > found.lines.length ? `the last ${number(found.lines.length)} of ${number(found.total)} lines` : `${number(found.total)} lines`, found.searched < found.bytes ? `, in the last ${number(found.searched / 2 ** 20)} MiB` : "");
      if (end) lines.scrollTop = lines.scrollHeight;
    } catch (error) {
      put(lines, h("p.problem", {}, visible(error.message)));
    }
  }
  return { element, draw };
}

const visibleLines = (line) => line.split("\n").map(visible).join("\n");
