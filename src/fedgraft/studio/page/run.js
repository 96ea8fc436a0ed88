// One run: its result, live curves, clients, classes, holdings, layers, matrices over rounds, log, figures, config.
import { make, shape } from "./charts.js";
import { address, boot, get, post } from "./api.js";
import { badge, cards, grid, matrix, notice, sections } from "./sections.js";
import { matrixCsv, png, svgText, tableTools } from "./export.js";
import { clock } from "./format.js";
import { jobList } from "./jobs.js";

const TABS = [
  ["overview", "Overview"], ["clients", "Clients"], ["classes", "Classes"], ["holdings", "Who holds what"], ["layers", "Layers"],
  ["similarity", "Similarity"], ["worth", "Who gains"], ["release", "Release"], ["log", "Log"], ["figures", "Figures"], ["config", "Config"],
];

export async function show(place, { query, live, go }) {
  const name = query.get("run");
  let tab = query.get("tab") || "overview";
  const read = () => get("run", { run: name, tab });
  let view = await read();
  const drawn = new Map();
  const top = make("div", { class: "title" }, place);
  make("h1", {}, top, view.name);
  const state = make("span", {}, top);
  const buttons = make("div", { class: "bar" }, top);
  make("p", { class: "note" }, place, view.about);
  const messages = make("div", {}, place), failure = make("div", {}, place), summary = make("div", {}, place);
  const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run" }, place);
  const panel = make("div", { role: "tabpanel", tabindex: "0", id: "panel" }, place);

  make("a", { class: "button", href: address("report", { run: name }), download: `${name.split("/").pop()}.html` }, buttons, "Offline page");
  const allow = boot.actions ? actionButtons(buttons, name, () => view, messages, () => refresh()) : () => {};

  const present = () => TABS.filter(([key]) => key === "log" || view.tabs.includes(key) || (key === "similarity" && view.matrices.length));

  function head() {
    state.replaceChildren();
    badge(state, view.status);
    allow();
    summary.replaceChildren();
    if (view.reason) notice(summary, view.reason);
    if (view.status === "running" && view.total) {
      const bar = make("div", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": view.total, "aria-valuenow": view.round || 0, "aria-label": "rounds" }, summary);
      make("div", {}, bar).style.width = `${100 * (view.round || 0) / view.total}%`;
      make("p", { class: "note" }, summary, `round ${view.round ?? 0} of ${view.total}${view.left ? `, about ${clock(view.left)} left` : ""}`);
      for (const phase of view.phases) make("p", { class: "note" }, summary, `now: ${phase}`);
    }
    cards(view.cards, summary, view.result);
  }

  function tabList() {
    tabs.replaceChildren();
    const names = present();
    for (const [key, label] of names) {
      const button = make("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-selected": String(key === tab), "aria-controls": "panel", tabindex: key === tab ? 0 : -1 }, tabs, label);
      button.addEventListener("click", () => choose(key));
      button.addEventListener("keydown", event => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!move) return;
        const next = names[(names.findIndex(([k]) => k === key) + move + names.length) % names.length][0];
        choose(next);
        tabs.querySelector(`#tab-${next}`).focus();
      });
    }
  }

  async function choose(key) {
    tab = key;
    history.replaceState(null, "", `#/run?run=${encodeURIComponent(name)}&tab=${key}`);
    tabList();
    const next = await read();
    if (tab !== key) return;
    view = next;
    await body();
  }

  async function body() {
    drawn.clear();
    panel.replaceChildren();
    if (tab === "log") { await log(panel, name, view); return; }
    if (tab === "similarity" && view.matrices.length) slider(panel, name, view.matrices);
    sections(view.sections, panel, { run: name, drawn, open: tab === "config" });
  }

  // A run that goes on is fetched again at most so often that it takes a hundredth of the time.
  let waiting = false, last = 0, took = 0;
  async function refresh() {
    if (waiting) return;
    waiting = true;
    await new Promise(resolve => setTimeout(resolve, Math.max(0, last + Math.max(900, 100 * took) - performance.now())));
    const began = performance.now(), before = shapeOf(view);
    const shown = tab;
    try { const next = await read(); if (shown === tab) view = next; } catch (error) { failure.replaceChildren(); notice(failure, error.message); }
    waiting = false;
    if (!place.isConnected) return;
    head();
    if (before !== shapeOf(view)) { tabList(); await body(); }
    else for (const section of view.sections) for (const part of section.parts) if (part.kind === "charts") for (const spec of part.charts) drawn.get(spec.title)?.(spec);
    if (tab === "log") await body();
    took = performance.now() - began;
    last = performance.now();
  }
  // What a refresh cannot change in place: which tabs, charts and tables there are, and the tables of the open tab.
  const shapeOf = v => JSON.stringify([v.tabs, v.sections.map(s => [s.title, s.parts.map(p => (p.kind === "charts" ? p.charts.map(c => c.title) : p))])]);

  if (!present().some(([key]) => key === tab)) { tab = "overview"; view = await read(); }
  head();
  tabList();
  await body();
  live(changed => { if (!changed || changed.includes(name)) refresh(); });
}

async function log(place, name, view) {
  const data = await get("log", { run: name });
  sections(view.sections, place, { run: name });
  if (data.rounds) {
    const part = make("section", {}, place);
    make("h2", {}, part, "Rounds, the newest first");
    make("p", { class: "note" }, part, "Attested updates, protection and model are from the run's round log; fedgraft verify checks its signatures.");
    grid(data.rounds, part, `${name} rounds`);
    if (data.rounds.rows.length === 200) more(part, name, data.rounds);
  }
  const part = make("section", {}, place);
  make("h2", {}, part, "Log");
  const text = make("pre", { class: "log", tabindex: "0" }, part, data.log || "(empty)");
  text.scrollTop = text.scrollHeight;
}

function more(place, name, rounds) {
  const button = make("button", { type: "button" }, place, "Earlier rounds");
  button.addEventListener("click", async () => {
    const before = rounds.rows[rounds.rows.length - 1][0];
    const next = await get("log", { run: name, before });
    button.remove();
    if (!next.rounds) return;
    grid(next.rounds, place);
    if (next.rounds.rows.length === 200) more(place, name, next.rounds);
  });
}

const MATRICES = { similarity: "Similarity of clients", mixing: "Mixing weights between clients" };

// The matrices between clients over rounds: a slider over the rounds that the run stored, and which matrix is shown.
function slider(place, name, rounds) {
  const part = make("section", {}, place);
  make("h2", {}, part, "Clients beside each other, over rounds");
  const bar = make("div", { class: "bar" }, part);
  const label = make("label", { for: "round" }, bar, "round");
  const input = make("input", { type: "range", id: "round", min: 0, max: rounds.length - 1, value: rounds.length - 1, step: 1, "aria-label": "round" }, bar);
  const value = make("output", { for: "round" }, bar);
  const kind = make("select", { id: "kind", "aria-label": "matrix", hidden: "" }, bar);
  const box = make("div", { id: "matrix" }, part);
  label.hidden = rounds.length < 2;
  let wanted = 0;
  async function draw() {
    const number = rounds[+input.value], mine = ++wanted;
    value.textContent = `round ${number}`;
    input.setAttribute("aria-valuetext", `round ${number}`);
    const data = await get("matrix", { run: name, round: number, kind: kind.value });
    if (mine !== wanted) return;
    if (kind.options.length !== data.kinds.length) {
      kind.replaceChildren();
      for (const known of data.kinds) make("option", { value: known }, kind, MATRICES[known]);
    }
    kind.value = data.kind;
    kind.hidden = data.kinds.length < 2;
    box.replaceChildren();
    heat(box, data);
  }
  input.addEventListener("input", draw);
  kind.addEventListener("change", draw);
  input.hidden = rounds.length < 2;
  draw();
}

function heat(place, data) {
  const size = data.values.length, names = data.values.map((_, i) => data.names[i] || String(i)), title = `${MATRICES[data.kind]}, round ${data.round}`;
  const part = { rows: names, columns: names, values: data.values, corner: "client" };
  if (size <= 30) { matrix(part, place, title); return; }
  const bar = make("div", {}, place);
  const svg = shape("svg", { viewBox: `0 0 ${size} ${size}`, class: "tall", role: "img", "aria-label": `matrix of round ${data.round}`, "shape-rendering": "crispEdges", width: "100%" }, make("figure", { class: "chart" }, place));
  const text = () => svgText(svg, title, []);
  tableTools(bar, () => title, { SVG: text, PNG: () => png(text()), CSV: () => matrixCsv(part) });
  let largest = 0;
  for (const row of data.values) for (const v of row) if (v > largest) largest = v;
  data.values.forEach((row, r) => row.forEach((v, c) => {
    if (v) shape("title", {}, shape("rect", { x: c, y: r, width: 1, height: 1, fill: "var(--c0)", opacity: Math.sqrt(v / (largest || 1)).toFixed(2) }, svg), `${names[r]}, ${names[c]}: ${v.toFixed(3)}`);
  }));
}

// What the studio may do with the run; returns what enables the buttons that fit the run's present status.
function actionButtons(place, name, view, messages, refresh) {
  const said = make("div", { role: "status" }, messages), jobs = make("div", {}, messages), buttons = [];
  const allow = () => { for (const [button, fits] of buttons) button.disabled = !fits(view().status); };
  const act = (label, path, fits, danger) => {
    const button = make("button", { type: "button", "data-action": path, ...(danger ? { class: "danger" } : {}) }, place, label);
    buttons.push([button, fits]);
    button.addEventListener("click", async () => {
      said.replaceChildren();
      button.disabled = true;
      try { make("p", { class: "note" }, said, `${(await post(path, { run: name })).title}: started`); }
      catch (error) { notice(said, error.message); }
      allow();
      await jobList(jobs, refresh);
    });
  };
  act("Stop", "stop", status => status === "running", true);
  act("Resume", "resume", status => status !== "running" && status !== "finished");
  act("Evaluate", "evaluate", status => status === "finished");
  act("Release", "release", status => status === "finished");
  return allow;
}
