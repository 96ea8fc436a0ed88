// All runs of the folder: a table to filter, sort and group, from which runs are opened, compared and drawn as a sweep.
import { make } from "./charts.js";
import { boot, get } from "./api.js";
import { badge, grid, notice } from "./sections.js";
import { csv, save } from "./export.js";
import { bytes, clock, percent, text, when } from "./format.js";

const FIXED = [
  ["name", run => run.name, v => v],
  ["status", run => run.status, v => v],
  ["test", run => run.test, percent, true],
  ["best", run => run.best, percent, true],
  ["round", run => run.round, v => v ?? "–", true],
  ["sent", run => run.bytes, bytes, true],
  ["time", run => run.seconds, clock, true],
  ["changed", run => run.changed, when, true],
];
const PAGE = 100;
export const state = { filter: "", sort: "changed", down: true, grouped: false, page: 0, selected: new Set(), columns: null };

const USUAL = ["algorithm.name", "trainable.kind", "local.lr", "partition.kind", "seed"];

// A filter is words: `lr=0.01`, `test>0.9`, `algorithm.name!=fedavg`, or text that the name or an option contains.
export function matcher(filter, table) {
  const tests = filter.trim().split(/\s+/).filter(Boolean).map(word => {
    const parts = word.match(/^([\w.]+)(!=|>=|<=|=|>|<)(.*)$/);
    if (!parts) {
      const lower = word.toLowerCase();
      return run => run.name.toLowerCase().includes(lower) || run.options.some(v => text(v).toLowerCase().includes(lower));
    }
    const [, key, relation, wanted] = parts, value = reader(key, table);
    const number = Number(wanted);
    return run => {
      const own = value(run);
      if (own === undefined) return false;
      const same = text(own).toLowerCase() === wanted.toLowerCase() || (wanted !== "" && typeof own === "number" && own === number);
      if (relation === "=") return same;
      if (relation === "!=") return !same;
      if (own === null || typeof own !== "number" || Number.isNaN(number)) return false;
      return { ">": own > number, "<": own < number, ">=": own >= number, "<=": own <= number }[relation];
    };
  });
  return run => tests.every(test => test(run));
}

// Reads a column of a run by the column's name, an option's full name or its last word; undefined if there is none.
function reader(key, table) {
  const fixed = FIXED.find(([name]) => name === key);
  if (fixed) return fixed[1];
  let position = table.options.indexOf(key);
  if (position < 0) position = table.options.findIndex(name => name.endsWith(`.${key}`));
  if (position >= 0) return run => run.options[position];
  const constant = Object.keys(table.constant).find(name => name === key || name.endsWith(`.${key}`));
  return () => (constant ? table.constant[constant] : undefined);
}

const compare = (a, b) => {
  const empty = v => v === null || v === undefined;
  if (empty(a) || empty(b)) return empty(a) - empty(b);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return text(a).localeCompare(text(b), "en", { numeric: true });
};

export const chosen = table => table.runs.filter(matcher(state.filter, table));

export async function show(place, { live }) {
  let table = await get("runs");
  let timer = null;
  if (!state.columns) state.columns = new Set(table.options.filter(key => USUAL.includes(key)));
  make("h1", {}, place, "Runs");
  const note = make("p", { class: "note", id: "count", role: "status" }, place);
  const bar = make("div", { class: "bar" }, place);
  const filter = make("input", { type: "search", class: "grow", id: "filter", "aria-label": "Filter runs", placeholder: "filter: words, lr=0.01, test>0.9, status=running", value: state.filter }, bar);
  const grouped = make("button", { type: "button", id: "group", "aria-pressed": String(state.grouped) }, bar, "Group by seed");
  const open = make("button", { type: "button", id: "compare" }, bar, "Compare");
  const sweep = make("a", { class: "button", href: "#/sweep" }, bar, "As a sweep");
  const out = make("button", { type: "button" }, bar, "CSV");
  const chooser = make("details", {}, place);
  make("summary", {}, chooser, "Columns");
  const options = make("div", { class: "options" }, chooser);
  const box = make("div", {}, place);
  const pager = make("div", { class: "bar" }, place);

  for (const key of table.options) {
    const label = make("label", {}, options);
    const tick = make("input", { type: "checkbox" }, label);
    tick.checked = state.columns.has(key);
    make("span", {}, label, key);
    tick.addEventListener("change", () => { tick.checked ? state.columns.add(key) : state.columns.delete(key); draw(); });
  }
  if (!table.options.length) make("span", { class: "note" }, options, "no option differs between these runs");

  const columns = () => [...FIXED, ...table.options.filter(key => state.columns.has(key)).map(key => [key, reader(key, table), text, false])];

  function sorted() {
    const column = columns().find(([name]) => name === state.sort) || FIXED[0];
    const runs = chosen(table).sort((a, b) => compare(column[1](a), column[1](b)) || compare(a.name, b.name));
    return state.down ? runs.reverse() : runs;
  }

  async function draw() {
    grouped.setAttribute("aria-pressed", String(state.grouped));
    grouped.classList.toggle("on", state.grouped);
    open.textContent = `Compare (${state.selected.size})`;
    open.disabled = state.selected.size < 2;
    if (state.grouped) {
      const places = new Map(table.runs.map((run, i) => [run.name, i])), some = state.filter.trim() !== "";
      const groups = await get("groups", some ? { version: table.version, among: chosen(table).map(run => places.get(run.name)).join(" ") || "none" } : {});
      box.replaceChildren();
      pager.replaceChildren();
      note.textContent = "Runs that differ only in their seed, together: mean test accuracy, deviation and 95 % intervals.";
      if (groups.rows.length) grid(groups, box, "Runs by setting");
      else make("p", { class: "empty" }, box, "No setting has finished runs with two seeds.");
      return;
    }
    const runs = sorted(), pages = Math.max(1, Math.ceil(runs.length / PAGE));
    state.page = Math.min(state.page, pages - 1);
    note.textContent = `${runs.length.toLocaleString("en")} of ${table.runs.length.toLocaleString("en")} runs`;
    const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "runs" });
    const element = make("table", { class: "runs" }, scroll), head = make("tr", {}, make("thead", {}, element)), body = make("tbody", {}, element);
    make("th", { scope: "col" }, head, "");
    for (const [name, , , number] of columns()) {
      const cell = make("th", { scope: "col", ...(number ? { class: "number" } : {}), ...(state.sort === name ? { "aria-sort": state.down ? "descending" : "ascending" } : {}) }, head);
      make("button", { type: "button" }, cell, name).addEventListener("click", () => {
        state.down = state.sort === name ? !state.down : name !== "name";
        state.sort = name;
        draw().then(() => [...box.querySelectorAll("th button")].find(b => b.textContent === name)?.focus());
      });
    }
    for (const run of runs.slice(state.page * PAGE, (state.page + 1) * PAGE)) {
      const line = make("tr", { "data-run": run.name }, body);
      const tick = make("input", { type: "checkbox", "aria-label": `select ${run.name}` }, make("td", {}, line));
      tick.checked = state.selected.has(run.name);
      tick.addEventListener("change", () => {
        tick.checked ? state.selected.add(run.name) : state.selected.delete(run.name);
        open.textContent = `Compare (${state.selected.size})`;
        open.disabled = state.selected.size < 2;
      });
      for (const [name, value, form, number] of columns()) {
        const cell = make("td", number ? { class: "number" } : name === "name" ? { class: "name" } : {}, line);
        if (name === "name") make("a", { href: `#/run?run=${encodeURIComponent(run.name)}` }, cell, run.name);
        else if (name === "status") badge(cell, run.status);
        else cell.textContent = form(value(run));
      }
    }
    box.replaceChildren(scroll);
    if (!runs.length) box.replaceChildren(make("p", { class: "empty" }, null, table.runs.length ? "No run matches the filter." : boot.questions ? "There are no runs in this folder; its questions are under Questions." : "There are no runs in this folder yet: fedgraft run demo"));
    pager.replaceChildren();
    if (pages > 1) {
      const back = make("button", { type: "button" }, pager, "Back"), next = make("button", { type: "button" }, pager, "Next");
      make("span", { class: "note" }, pager, `page ${state.page + 1} of ${pages}`);
      back.disabled = state.page === 0;
      next.disabled = state.page === pages - 1;
      back.addEventListener("click", () => { state.page--; draw(); });
      next.addEventListener("click", () => { state.page++; draw(); });
    }
  }

  filter.addEventListener("input", () => {
    state.filter = filter.value;
    state.page = 0;
    clearTimeout(timer);
    timer = setTimeout(draw, 120);
  });
  grouped.addEventListener("click", () => { state.grouped = !state.grouped; draw(); });
  open.addEventListener("click", () => { location.hash = `#/compare?${[...state.selected].map(name => `run=${encodeURIComponent(name)}`).join("&")}`; });
  out.addEventListener("click", () => {
    const names = [...FIXED.map(([name]) => name), ...table.options];
    const rows = sorted().map(run => [...FIXED.map(([, value]) => value(run)), ...run.options.map(v => (typeof v === "object" && v !== null ? JSON.stringify(v) : v))]);
    save("runs.csv", csv([names, ...rows]));
  });
  await draw();
  live(async () => {
    const before = document.activeElement;
    table = await get("runs");
    if (state.grouped || !box.contains(before)) await draw();  // nobody's place in the table is taken away
  });
  sweep.setAttribute("title", "parallel coordinates of the runs that match the filter");
}

export { notice };
