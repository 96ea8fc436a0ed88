// Sections of a run or a comparison, as `report/sections.py` makes them, drawn into the page. Text is only ever text.
import { chart, make } from "./charts.js";
import { gridCsv, matrixCsv, matrixSvg, png, tableTools, tools } from "./export.js";
import { address } from "./api.js";

export function grid(part, place, title) {
  if (title) tableTools(place, () => title, { CSV: () => gridCsv(part) });
  const table = make("table", {}, make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, place));
  const head = make("tr", {}, make("thead", {}, table)), body = make("tbody", {}, table);
  for (const column of part.columns) make("th", { scope: "col", ...(column.number ? { class: "number" } : {}) }, head, column.name);
  for (const row of part.rows) {
    const line = make("tr", {}, body);
    row.forEach((text, i) => make("td", part.columns[i].number ? { class: "number" } : text.length > 44 ? { class: "text" } : {}, line, text));
  }
  return table;
}

export function matrix(part, place, title) {
  if (title) tableTools(place, () => title, { SVG: () => matrixSvg(part, title), PNG: () => png(matrixSvg(part, title)), CSV: () => matrixCsv(part) });
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "matrix" }, place);
  const table = make("table", { class: "map" }, scroll);
  const turned = part.columns.some(name => name.length > 4);
  const head = make("tr", {}, make("thead", turned ? { class: "turned" } : {}, table));
  const totals = part.sums && part.sums.length > 0;
  for (const name of [part.corner, ...(totals ? ["all"] : []), ...part.columns]) make("span", {}, make("th", { scope: "col" }, head), name);
  let largest = 0;
  for (const row of part.values) for (const value of row) if (value !== null && value > largest) largest = value;
  const body = make("tbody", {}, table), whole = part.values.every(row => row.every(v => v === null || Number.isInteger(v)));
  part.rows.forEach((name, r) => {
    const line = make("tr", {}, body);
    make("th", { scope: "row" }, line, name);
    if (totals) make("td", {}, line, part.values[r].reduce((a, b) => a + (b || 0), 0).toLocaleString("en"));
    for (const value of part.values[r]) {
      const cell = make("td", {}, line, value ? (whole ? value.toLocaleString("en") : value.toFixed(2)) : "");
      if (value) cell.style.setProperty("--s", Math.sqrt(Math.max(0, value) / (largest || 1)).toFixed(2));
    }
  });
  if (totals) {
    const line = make("tr", {}, make("tfoot", {}, table));
    make("th", { scope: "row" }, line, "all");
    for (const count of [part.sums.reduce((a, b) => a + b, 0), ...part.sums]) make("td", {}, line, count.toLocaleString("en"));
  }
  return table;
}

// Charts are drawn again in place while a run goes on; `drawn` remembers them by their titles.
export function charts(part, place, drawn = new Map()) {
  const box = make("div", { class: "charts" }, place);
  for (const spec of part.charts) {
    let current = spec;
    const handle = chart(spec, box);
    tools(handle.box, () => current);
    drawn.set(spec.title, next => { current = next; handle.update(next); });
  }
}

function part(run, item, place, drawn, title) {
  if (item.kind === "grid") grid(item, place, title);
  else if (item.kind === "matrix") matrix(item, place, title);
  else if (item.kind === "charts") charts(item, place, drawn);
  else if (item.kind === "facts") {
    const table = make("table", { class: "facts" }, make("div", { class: "scroll", tabindex: "0" }, place));
    for (const [name, text] of item.rows) {
      const line = make("tr", {}, table);
      make("th", { scope: "row" }, line, name);
      make("td", { class: "text" }, line, text);
    }
  } else if (item.kind === "pictures")
    for (const picture of item.pictures)
      make("img", { alt: picture.caption, loading: "lazy", src: address("picture", { run, path: picture.path }) }, make("p", {}, place));
  else if (item.kind === "list") {
    const list = make("ul", { class: "warnings" }, place);
    for (const text of item.texts) make("li", {}, list, text);
  } else if (item.kind === "code") for (const text of item.texts) make("pre", { tabindex: "0" }, place, text);
  else for (const text of item.texts) make(item.kind === "heading" ? "h3" : "p", item.kind === "heading" ? {} : { class: "note" }, place, text);
}

export function sections(list, place, { run = "", drawn = new Map(), open = false } = {}) {
  for (const section of list) {
    let inside;
    if (section.folded && !open) {
      inside = make("details", {}, place);
      make("summary", {}, inside, section.title);
    } else {
      inside = make("section", {}, place);
      make("h2", {}, inside, section.title);
    }
    for (const item of section.parts) part(run, item, inside, drawn, section.title);
  }
}

export const notice = (place, text) => make("p", { class: "notice", role: "alert" }, place, text);
export const badge = (place, status) => make("span", { class: `badge ${String(status).split(" ")[0].replace(/\W/g, "")}` }, place, status);

export function cards(list, place, large) {
  const box = make("div", { class: large ? "cards with-result" : "cards" }, place);
  for (const [name, number, evidence] of list) {
    const card = make("div", { class: "card" }, box);
    make("span", {}, card, name);
    make("b", {}, card, number);
    make("small", {}, card, evidence);
  }
}
