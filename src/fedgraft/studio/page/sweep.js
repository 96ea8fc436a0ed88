// A sweep as parallel coordinates: one line for each run, one axis for each option that differs, the result at the right.
import { make, number, shape, ticks } from "./charts.js";
import { get } from "./api.js";
import { chosen, state } from "./runs.js";
import { csv, png, svgText, tableTools } from "./export.js";
import { percent, text } from "./format.js";

const HEIGHT = 380, MOST = 1000, AXES = 7;
const RESULTS = { test: "test accuracy", best: "validation accuracy" };

function axis(name, values) {
  const present = values.filter(v => v !== null && v !== undefined);
  if (present.length && present.every(v => typeof v === "number")) {
    const low = Math.min(...present), high = Math.max(...present), log = low > 0 && high / low > 20;
    const f = log ? Math.log10 : v => v, a = f(low), b = f(high);
    const own = [...new Set(present)].sort((x, y) => x - y), marks = log || own.length <= 8 ? own : ticks(low, high === low ? low + 1 : high, 5).filter(v => v >= low && v <= high);
    const shown = marks.length > 8 ? marks.filter((_, i) => i % Math.ceil(marks.length / 8) === 0) : marks;
    return { name, place: v => (v === null || v === undefined ? null : b === a ? 0.5 : (f(v) - a) / (b - a)), marks: shown.map(v => [v, number(v)]) };
  }
  const kinds = [...new Set(values.map(text))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const at = v => (kinds.length === 1 ? 0.5 : kinds.indexOf(text(v)) / (kinds.length - 1));
  return { name, place: at, marks: kinds.length <= 16 ? kinds.map(v => [v, v.length > 14 ? `${v.slice(0, 13)}…` : v]) : [] };
}

export async function show(place) {
  const table = await get("runs");
  make("h1", {}, place, "Sweep");
  const bar = make("div", { class: "bar" }, place);
  const filter = make("input", { type: "search", class: "grow", "aria-label": "Filter runs", placeholder: "filter, as in the table of runs", value: state.filter }, bar);
  const pick = make("select", { "aria-label": "Result" }, bar);
  for (const [key, label] of Object.entries(RESULTS)) make("option", { value: key }, pick, label);
  const chooser = make("details", {}, place);
  make("summary", {}, chooser, "Axes");
  const options = make("div", { class: "options" }, chooser);
  const note = make("p", { class: "note", role: "status" }, place);
  const out = make("div", {}, place), figure = make("figure", { class: "chart parallel" }, place), list = make("div", {}, place);
  const ticked = new Map();
  let picked = null;  // the axes that the reader chose; until then those that differ between the runs of the filter
  for (const key of table.options) {
    const label = make("label", {}, options), tick = make("input", { type: "checkbox" }, label);
    make("span", {}, label, key);
    ticked.set(key, tick);
    tick.addEventListener("change", () => { picked = new Set([...ticked].filter(([, box]) => box.checked).map(([name]) => name)); draw(); });
  }
  function axesOf(runs) {
    if (picked) return table.options.filter(key => picked.has(key));
    const differs = position => new Set(runs.map(run => text(run.options[position]))).size > 1;
    return table.options.filter((key, position) => key !== "seed" && key !== "name" && differs(position)).slice(0, AXES);
  }

  function draw() {
    figure.replaceChildren();
    list.replaceChildren();
    out.replaceChildren();
    const result = pick.value;
    const all = chosen(table).filter(run => run[result] !== null).sort((a, b) => b[result] - a[result]), runs = all.slice(0, MOST);
    figure.hidden = !runs.length;
    if (!runs.length) {
      note.textContent = state.filter.trim() ? "No run of the filter has a result." : "No run of this folder has a result yet.";
      return;
    }
    note.textContent = `${all.length.toLocaleString("en")} runs with a result${all.length > MOST ? `, the best ${MOST} are drawn` : ""}; warm lines are the better ones`;
    const keys = axesOf(runs);
    for (const [key, tick] of ticked) tick.checked = keys.includes(key);
    const columns = keys.map(key => [axis(key, runs.map(run => run.options[table.options.indexOf(key)])), run => run.options[table.options.indexOf(key)]]);
    columns.push([axis(`${RESULTS[result]} (%)`, runs.map(run => 100 * run[result])), run => 100 * run[result]]);
    const svg = shape("svg", { role: "img", "aria-label": "parallel coordinates of the runs; the table below has the same runs" }, figure);
    const width = Math.max(svg.getBoundingClientRect().width || 600, 110 * columns.length);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.style.width = `${width}px`;
    figure.style.overflowX = "auto";
    const px = i => 60 + (width - 130) * (columns.length === 1 ? 0.5 : i / (columns.length - 1)), py = v => HEIGHT - 20 - v * (HEIGHT - 70);
    const lines = new Map();
    [...runs].reverse().forEach((run, position) => {
      const points = columns.map(([column, value], i) => [px(i), column.place(value(run))]).filter(([, v]) => v !== null);
      const share = runs.length === 1 ? 1 : position / (runs.length - 1);
      const line = shape("path", { d: `M${points.map(([x, v]) => `${x.toFixed(1)} ${py(v).toFixed(1)}`).join("L")}`, stroke: `color-mix(in oklab, var(--c1) ${Math.round(100 * share ** 2)}%, var(--c0))` }, svg);
      shape("title", {}, line, `${run.name}: ${percent(run[result])}`);
      line.addEventListener("pointerenter", () => mark(run.name, true));
      line.addEventListener("pointerleave", () => mark(run.name, false));
      line.addEventListener("click", () => { location.hash = `#/run?run=${encodeURIComponent(run.name)}`; });
      lines.set(run.name, line);
    });
    // The whole name where two rows of names leave the room for it: `name` and `kind` alone say little.
    const room = columns.length > 1 ? Math.floor((2 * (width - 130)) / (columns.length - 1) / 7) : 60;
    columns.forEach(([column], i) => {
      const x = px(i), short = column.name.length <= room ? column.name : column.name.split(".").slice(-2).join(".");
      shape("line", { class: "axis", x1: x, x2: x, y1: py(0), y2: py(1) }, svg);
      shape("title", {}, shape("text", { x, y: i % 2 ? 34 : 16, "text-anchor": "middle" }, svg, short.length > 24 ? `${short.slice(0, 23)}…` : short), column.name);
      for (const [value, label] of column.marks) shape("text", { x: x + 5, y: py(column.place(value)) + 4 }, svg, label);
    });
    const drawing = () => svgText(svg, "Parallel coordinates", []);
    const values = run => [run.name, ...keys.map(key => text(run.options[table.options.indexOf(key)])), run[result]];
    tableTools(out, () => "Parallel coordinates", { SVG: drawing, PNG: () => png(drawing()), CSV: () => csv([["run", ...keys, RESULTS[result]], ...runs.map(values)]) });
    const rows = new Map(), scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "runs" }, list);
    const element = make("table", {}, scroll), head = make("tr", {}, make("thead", {}, element)), body = make("tbody", {}, element);
    for (const name of ["run", ...keys]) make("th", { scope: "col" }, head, name);
    make("th", { scope: "col", class: "number" }, head, RESULTS[result]);
    for (const run of runs.slice(0, 50)) {
      const line = make("tr", {}, body);
      make("a", { href: `#/run?run=${encodeURIComponent(run.name)}` }, make("td", {}, line), run.name);
      for (const key of keys) make("td", {}, line, text(run.options[table.options.indexOf(key)]));
      make("td", { class: "number" }, line, percent(run[result]));
      rows.set(run.name, line);
      for (const [kind, on] of [["pointerenter", true], ["pointerleave", false], ["focusin", true], ["focusout", false]]) line.addEventListener(kind, () => mark(run.name, on));
    }
    function mark(name, on) {
      lines.get(name)?.classList.toggle("over", on);
      rows.get(name)?.classList.toggle("over", on);
      if (on && lines.has(name)) svg.append(lines.get(name));
    }
  }
  let timer = null;
  filter.addEventListener("input", () => { state.filter = filter.value; clearTimeout(timer); timer = setTimeout(draw, 150); });
  pick.addEventListener("change", draw);
  draw();
}
