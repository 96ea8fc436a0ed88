// Charts taken out of the page: as SVG and PNG with their colours as they are seen, and as CSV.
import { make, shape } from "./charts.js";

export function save(name, blob) {
  const link = make("a", { download: name.replace(/[^\w.-]+/g, "-").slice(0, 80), href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const cell = value => {
  if (value === null || value === undefined) return "";
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // a spreadsheet would compute it
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

export const csv = rows => new Blob([rows.map(row => row.map(cell).join(",")).join("\n") + "\n"], { type: "text/csv" });

export function chartCsv(spec) {
  if (spec.categories) {
    const rows = [["category", ...spec.series.map(s => s.name)]];
    spec.categories.forEach((category, c) => rows.push([category, ...spec.series.map(s => s.y[c])]));
    return csv(rows);
  }
  const rows = [["series", spec.xlabel, spec.title + spec.unit, "low", "high"]];
  for (const s of spec.series) s.x.forEach((x, k) => rows.push([s.name, x, s.y[k], s.low ? s.low[k] : null, s.high ? s.high[k] : null]));
  return csv(rows);
}

// The drawing as a file of its own: variables of the page become the colours that they are now.
export function svgText(drawing, title, names) {
  const copy = drawing.cloneNode(true), box = drawing.getBoundingClientRect();
  const originals = [drawing, ...drawing.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((element, i) => {
    const seen = getComputedStyle(element);
    for (const key of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "paint-order"]) copies[i].setAttribute(key, seen.getPropertyValue(key));
    copies[i].removeAttribute("class");
  });
  const root = getComputedStyle(document.documentElement), ink = root.getPropertyValue("--ink"), card = root.getPropertyValue("--card");
  const height = box.height + 26 + 18 * names.length;
  for (const [key, value] of Object.entries({ viewBox: `0 -26 ${box.width} ${height}`, width: box.width, height, "font-family": "system-ui, sans-serif" })) copy.setAttribute(key, value);
  copy.prepend(shape("rect", { x: 0, y: -26, width: box.width, height, fill: card }));
  shape("text", { x: 12, y: -8, fill: ink, "font-size": "14px", "font-weight": 600 }, copy, title);
  names.forEach((name, i) => {
    const y = box.height + 14 + 18 * i, paint = root.getPropertyValue(`--c${i % 7}`);
    shape("line", { x1: 12, x2: 38, y1: y - 4, y2: y - 4, stroke: paint, "stroke-width": 2, "stroke-dasharray": ["none", "7 5", "2 4", "10 4 2 4"][i % 4] }, copy);
    shape("text", { x: 46, y, fill: ink, "font-size": "12px" }, copy, name);
  });
  return new XMLSerializer().serializeToString(copy);
}

export async function png(text, scale = 2) {
  const picture = new Image(), data = new Blob([text], { type: "image/svg+xml" }), url = URL.createObjectURL(data);
  await new Promise((resolve, reject) => { picture.onload = resolve; picture.onerror = reject; picture.src = url; });
  const canvas = make("canvas", { width: Math.ceil(picture.width * scale), height: Math.ceil(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(url);
  return new Promise(resolve => canvas.toBlob(resolve, "image/png"));
}

// A matrix as a drawing of its own: the page shows it as a table, a file shows it as a picture.
export function matrixSvg(part, title) {
  const cell = 40, left = 14 + 7 * Math.max(part.corner.length, ...part.rows.map(name => name.length)), top = 44 + 7 * Math.max(...part.columns.map(name => name.length));
  const root = getComputedStyle(document.documentElement), paint = key => root.getPropertyValue(key).trim();
  const width = Math.max(left + cell * part.columns.length + 12, 8 * title.length + 24), height = top + 24 * part.rows.length + 12;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, sans-serif", "font-size": "12px", fill: paint("--ink") });
  shape("rect", { x: 0, y: 0, width, height, fill: paint("--card") }, svg);
  shape("text", { x: 12, y: 20, "font-size": "14px", "font-weight": 600 }, svg, title);
  let largest = 0;
  for (const row of part.values) for (const v of row) if (v !== null && v > largest) largest = v;
  const whole = part.values.every(row => row.every(v => v === null || Number.isInteger(v)));
  part.columns.forEach((name, c) => { const x = left + cell * (c + 0.6), y = top - 6; shape("text", { x, y, transform: `rotate(-90 ${x} ${y})` }, svg, name); });
  part.rows.forEach((name, r) => {
    const y = top + 24 * r;
    shape("text", { x: left - 6, y: y + 16, "text-anchor": "end" }, svg, name);
    part.values[r].forEach((v, c) => {
      if (!v) return;
      shape("rect", { x: left + cell * c, y, width: cell - 1, height: 23, fill: paint("--c0"), opacity: (0.05 + 0.45 * Math.sqrt(Math.max(0, v) / (largest || 1))).toFixed(2) }, svg);
      shape("text", { x: left + cell * (c + 1) - 5, y: y + 16, "text-anchor": "end" }, svg, whole ? String(v) : v.toFixed(2));
    });
  });
  return new XMLSerializer().serializeToString(svg);
}

export const matrixCsv = part => csv([[part.corner, ...part.columns], ...part.rows.map((name, r) => [name, ...part.values[r]])]);
export const gridCsv = part => csv([part.columns.map(column => column.name), ...part.rows]);

// Buttons that save what is shown; `kinds` has a function for each kind of file, which returns text or a blob.
export function saveButtons(bar, title, kinds) {
  for (const [kind, content] of Object.entries(kinds)) {
    const button = make("button", { type: "button", "aria-label": `${title()} as ${kind}` }, bar, kind);
    button.addEventListener("click", async () => {
      const data = await content();
      save(`${title()}.${kind.toLowerCase()}`, data instanceof Blob ? data : new Blob([data], { type: "image/svg+xml" }));
    });
  }
}

// The buttons beside a table or a matrix.
export const tableTools = (place, title, kinds) => saveButtons(make("div", { class: "tools still" }, place), title, kinds);

// The three buttons of a chart; `now` returns what the chart shows at present.
export function tools(box, now) {
  const bar = make("div", { class: "tools" });
  box.insertBefore(bar, box.children[1]);
  const text = () => svgText(box.querySelector("svg"), now().title, (now().series || []).map(s => s.name));
  saveButtons(bar, () => now().title, { SVG: text, PNG: () => png(text()), CSV: () => chartCsv(now()) });
}
