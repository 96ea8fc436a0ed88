// The one drawing module of fedgraft: charts of runs as SVG, for the studio, for reports and for every other page.
//
// A chart is plain data, made in Python (`report/charts.py`): title, unit, xlabel, and series of x, y and perhaps low
// and high. Names come from outside, so they are only ever set as text. Colours are presentation attributes that name
// the page's variables: no inline style is needed, which the studio's content security policy forbids.

const holder = document.createElement("template");
holder.innerHTML = "<svg></svg>";
const SVG = holder.content.firstChild.namespaceURI;

const HEIGHT = 250;
const DASHES = ["none", "7 5", "2 4", "10 4 2 4"];

const fill = (element, attributes, parent, text) => {
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
};
export const make = (name, ...rest) => fill(document.createElement(name), ...rest);
export const shape = (name, ...rest) => fill(document.createElementNS(SVG, name), ...rest);

export const number = v => {
  if (v === null || v === undefined) return "–";
  if (v === 0) return "0";
  return Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
};
export const colour = i => `var(--c${i % 7})`;
// Every line has another dash, so that one lying on another still lets it be seen.
const stroke = i => ({ fill: "none", stroke: colour(i), "stroke-width": 2, "stroke-dasharray": DASHES[i % 4] });

export const ticks = (low, high, count) => {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(m => m * power >= rough * 0.999), marks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) marks.push(+(k * step).toPrecision(12));
  return marks;
};

// The index in the ascending list `x` whose value is nearest to v, by bisection: lists may have thousands of values.
export const nearest = (x, v) => {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < v) low = middle; else high = middle;
  }
  return high >= 0 && Math.abs(x[high] - v) < Math.abs(x[low] - v) ? high : low;
};

const extent = values => {
  let low = Infinity, high = -Infinity;
  for (const list of values) for (const v of list) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
  return [low, high];
};
const widened = (low, high) => {
  if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
  const pad = (high - low) * 0.04;
  return [low - pad, high + pad];
};

// A figure with its heading, its drawing and what is beside it; returns its elements.
function frame(spec, place) {
  const box = make("figure", { class: "chart" }, place);
  make("h3", {}, box, spec.unit ? `${spec.title} (${spec.unit.trim()})` : spec.title);
  const svg = shape("svg", { role: "img", tabindex: "0", "aria-label": spec.title }, box);
  const tip = make("div", { class: "tip", role: "status", hidden: "" }, box);
  return { box, svg, tip };
}

// Lines over rounds, megabytes or seconds. Returns {box, update(spec)}: a run that goes on is drawn again in place.
export function lineChart(spec, place) {
  const { box, svg, tip } = frame(spec, place);
  const hidden = new Set();
  let scale = null, cursor = null, across = [], at = 0;

  const visible = () => spec.series.filter(s => !hidden.has(s.name));

  function draw() {
    svg.replaceChildren();
    const series = visible();
    let [low, high] = extent(series.flatMap(s => [s.y, s.low || [], s.high || []]));
    if (low === Infinity) { scale = null; return; }
    across = [...new Set(series.flatMap(s => s.x))].sort((a, b) => a - b);
    const first = Math.min(0, across[0]), last = Math.max(across[across.length - 1], first + 1);
    if (low >= 0 && spec.unit !== " %") low = 0;
    [low, high] = widened(low, high);
    const marks = ticks(low, high, 5).map(y => [y, number(y) + spec.unit]);
    const width = svg.getBoundingClientRect().width || 400, top = 8, bottom = HEIGHT - 34;
    const left = 12 + 7 * Math.max(...marks.map(([, text]) => text.length)), right = width - 12;
    const px = x => left + (x - first) / (last - first) * (right - left);
    const py = y => bottom - (y - low) / (high - low) * (bottom - top);
    for (const [y, text] of marks) {
      shape("line", { class: "grid", x1: left, x2: right, y1: py(y), y2: py(y) }, svg);
      shape("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, svg, text);
    }
    for (const x of ticks(first, last, Math.max(2, Math.floor(width / 90))))
      if (spec.xlabel !== "round" || Number.isInteger(x)) shape("text", { x: px(x), y: bottom + 16, "text-anchor": "middle" }, svg, number(x));
    shape("text", { x: (left + right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, svg, spec.xlabel);
    if (spec.best !== undefined && spec.best !== null) {
      const end = px(spec.best) > width / 2;
      shape("line", { x1: px(spec.best), x2: px(spec.best), y1: top, y2: bottom, stroke: "var(--soft)", "stroke-dasharray": "2 3" }, svg);
      shape("text", { x: px(spec.best) + (end ? -5 : 5), y: bottom - 6, "text-anchor": end ? "end" : "start" }, svg, `best: round ${spec.best}`);
    }
    spec.series.forEach((s, i) => { if (!hidden.has(s.name)) line(s, i, px, py); });
    cursor = shape("g", {}, svg);
    scale = { px, py, top, bottom, width };
  }
  function line(s, i, px, py) {
    const present = s.x.map((x, k) => k).filter(k => s.y[k] !== null);
    if (s.low) {
      const band = present.filter(k => s.low[k] !== null && s.high[k] !== null);
      const edge = band.map(k => `${px(s.x[k])},${py(s.high[k])}`).concat(band.reverse().map(k => `${px(s.x[k])},${py(s.low[k])}`));
      shape("polygon", { points: edge.join(" "), fill: colour(i), opacity: 0.16 }, svg);
    }
    shape("polyline", { points: present.map(k => `${px(s.x[k])},${py(s.y[k])}`).join(" "), ...stroke(i) }, svg);
    if (present.length <= 25) for (const k of present) shape("circle", { cx: px(s.x[k]), cy: py(s.y[k]), r: 3, fill: colour(i) }, svg);
  }
  function point(x) {
    if (!scale) return;
    cursor.replaceChildren();
    tip.replaceChildren();
    shape("line", { x1: scale.px(x), x2: scale.px(x), y1: scale.top, y2: scale.bottom, stroke: "var(--soft)" }, cursor);
    make("div", {}, tip, `${spec.xlabel} ${number(x)}`);
    spec.series.forEach((s, i) => {
      if (hidden.has(s.name) || !s.x.length) return;
      const near = nearest(s.x, x);
      if (s.y[near] === null) return;
      shape("circle", { cx: scale.px(s.x[near]), cy: scale.py(s.y[near]), r: 4, fill: colour(i) }, cursor);
      const band = s.low && s.low[near] !== null ? ` (${number(s.low[near])} to ${number(s.high[near])})` : "";
      make("div", { class: `key${i % 7}` }, tip, `${s.name}: ${number(s.y[near])}${spec.unit}${band}`);
    });
    tip.hidden = false;
    const over = scale.px(x) > scale.width / 2;
    tip.style.left = over ? "auto" : `${scale.px(x) + 24}px`;
    tip.style.right = over ? `${scale.width - scale.px(x) + 24}px` : "auto";
    tip.style.top = "3rem";
  }
  const leave = () => { tip.hidden = true; if (cursor) cursor.replaceChildren(); };
  for (const kind of ["pointermove", "pointerdown"])
    svg.addEventListener(kind, e => {
      if (!scale) return;
      const position = e.clientX - svg.getBoundingClientRect().left;
      const [first, last] = [scale.px(across[0]), scale.px(across[across.length - 1])];
      const share = last > first ? (position - first) / (last - first) : 0;
      point(across[nearest(across, across[0] + share * (across[across.length - 1] - across[0]))]);
    });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", e => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!move || !across.length) return;
    e.preventDefault();
    at = Math.max(0, Math.min(across.length - 1, at + move));
    point(across[at]);
  });
  const keys = make("div", { class: "keys" }, box);
  function legend() {
    keys.replaceChildren();
    spec.series.forEach((s, i) => {
      const key = make("button", { type: "button", "aria-pressed": String(!hidden.has(s.name)) }, keys);
      shape("line", { x1: 0, x2: 26, y1: 3, y2: 3, ...stroke(i) }, shape("svg", { "aria-hidden": "true" }, key));
      make("span", {}, key, s.name);
      key.addEventListener("click", () => {
        hidden.has(s.name) ? hidden.delete(s.name) : hidden.add(s.name);
        key.setAttribute("aria-pressed", String(!hidden.has(s.name)));
        leave();
        draw();
      });
    });
  }
  legend();
  new ResizeObserver(draw).observe(box);
  draw();
  return {
    box,
    update(next) {
      const names = list => list.map(s => s.name).join("\n");
      const changed = names(next.series) !== names(spec.series);
      spec = next;
      if (changed) legend();
      draw();
    },
  };
}

// Grouped bars: spec.categories, and for each series one value (or null) by category, perhaps with low and high.
export function barChart(spec, place) {
  const { box, svg, tip } = frame(spec, place);
  function draw() {
    svg.replaceChildren();
    const [low, high] = extent(spec.series.flatMap(s => [s.y, s.low || [], s.high || []]).concat([[0]]));
    const top = 8, longest = Math.max(...spec.categories.map(c => c.length));
    const width = svg.getBoundingClientRect().width || 400;
    const marks = ticks(low, high === low ? low + 1 : high, 5).map(y => [y, number(y) + (spec.unit || "")]);
    const left = 12 + 7 * Math.max(...marks.map(([, text]) => text.length)), right = width - 8;
    const slot = (right - left) / spec.categories.length;
    const turned = longest * 7 > slot, bottom = HEIGHT - (turned ? Math.min(90, 14 + 5 * longest) : 24);
    const least = Math.min(0, low), most = Math.max(high, marks[marks.length - 1][0]);
    const py = y => bottom - (y - least) / ((most - least) || 1) * (bottom - top);
    for (const [y, text] of marks) {
      shape("line", { class: "grid", x1: left, x2: right, y1: py(y), y2: py(y) }, svg);
      shape("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, svg, text);
    }
    const each = Math.min(90, slot * 0.8 / spec.series.length), group = each * spec.series.length, every = Math.ceil(spec.categories.length * 14 / (right - left));
    spec.categories.forEach((category, c) => {
      const middle = left + slot * (c + 0.5);
      if (c % every === 0) {
        const turn = turned ? { transform: `rotate(-40 ${middle} ${bottom + 12})`, "text-anchor": "end" } : { "text-anchor": "middle" };
        shape("text", { x: middle, y: bottom + 14, ...turn }, svg, category.length > 18 ? `${category.slice(0, 17)}…` : category);
      }
      spec.series.forEach((s, i) => {
        const value = s.y[c];
        if (value === null || value === undefined) return;
        const x = middle - group / 2 + each * i, y = Math.min(py(value), py(0));
        const bar = shape("rect", { x, y, width: Math.max(1, each - 1), height: Math.max(0.5, Math.abs(py(0) - py(value))), fill: colour(i) }, svg);
        if (s.low && s.low[c] !== null && s.low[c] !== undefined)
          shape("line", { x1: x + each / 2, x2: x + each / 2, y1: py(s.low[c]), y2: py(s.high[c]), stroke: "var(--ink)", "stroke-width": 1.5 }, svg);
        bar.addEventListener("pointerenter", () => { tip.hidden = false; tip.style.left = `${Math.min(x, width - 180)}px`; tip.style.top = "2.6rem"; tip.textContent = `${category}, ${s.name}: ${number(value)}${spec.unit || ""}`; });
        bar.addEventListener("pointerleave", () => { tip.hidden = true; });
      });
    });
    shape("line", { x1: left, x2: right, y1: py(0), y2: py(0), stroke: "var(--soft)" }, svg);
  }
  const keys = make("div", { class: "keys" }, box);
  if (spec.series.length > 1)
    spec.series.forEach((s, i) => {
      const key = make("span", { class: "key" }, keys);
      shape("line", { x1: 0, x2: 26, y1: 3, y2: 3, stroke: colour(i), "stroke-width": 6 }, shape("svg", { "aria-hidden": "true" }, key));
      make("span", {}, key, s.name);
    });
  new ResizeObserver(draw).observe(box);
  draw();
  return { box, update(next) { spec = next; draw(); } };
}

// Points with intervals, one row a category: what each site gains, and whether that is certain.
export function intervalChart(spec, place) {
  const { box, svg } = frame(spec, place);
  const step = Math.max(22, 13 * spec.series.length), height = 40 + step * spec.categories.length;
  svg.classList.add("tall");
  svg.setAttribute("height", height);
  function draw() {
    svg.replaceChildren();
    const values = spec.series.flatMap(s => [s.y, s.low || [], s.high || []]);
    const [low, high] = widened(...extent(spec.zero ? values.concat([[0]]) : values));
    if (low === -Infinity || low === Infinity) return;
    const width = svg.getBoundingClientRect().width || 400;
    const left = Math.min(width * 0.4, 16 + 7 * Math.max(...spec.categories.map(c => c.length))), right = width - 14;
    const px = x => left + (x - low) / (high - low) * (right - left), bottom = height - 26;
    for (const x of ticks(low, high, Math.max(2, Math.floor((right - left) / 80)))) {
      shape("line", { class: "grid", x1: px(x), x2: px(x), y1: 4, y2: bottom }, svg);
      shape("text", { x: px(x), y: bottom + 17, "text-anchor": "middle" }, svg, number(x) + (spec.unit || ""));
    }
    if (low < 0 && high > 0) shape("line", { x1: px(0), x2: px(0), y1: 4, y2: bottom, stroke: "var(--soft)" }, svg);
    spec.categories.forEach((category, c) => {
      const middle = 8 + step * (c + 0.5), room = Math.floor((left - 12) / 7);
      shape("text", { x: left - 8, y: middle + 4, "text-anchor": "end" }, svg, category.length > room ? `${category.slice(0, room - 1)}…` : category);
      spec.series.forEach((s, i) => {
        if (s.y[c] === null) return;
        const y = middle + (i - (spec.series.length - 1) / 2) * 11, paint = s.colours ? `var(--${s.colours[c]})` : colour(i);
        if (s.low && s.low[c] !== null) shape("line", { x1: px(s.low[c]), x2: px(s.high[c]), y1: y, y2: y, stroke: paint, "stroke-width": 2 }, svg);
        shape("circle", { cx: px(s.y[c]), cy: y, r: 4.5, fill: paint }, svg);
      });
    });
  }
  const keys = make("div", { class: "keys" }, box);
  if (spec.series.length > 1)
    spec.series.forEach((s, i) => {
      const key = make("span", { class: "key" }, keys);
      shape("line", { x1: 0, x2: 26, y1: 3, y2: 3, stroke: colour(i), "stroke-width": 6 }, shape("svg", { "aria-hidden": "true" }, key));
      make("span", {}, key, s.name);
    });
  new ResizeObserver(draw).observe(box);
  draw();
  return { box, update(next) { spec = next; draw(); } };
}

// Draw a chart by its kind: lines unless it says otherwise.
export function chart(spec, place) {
  if (spec.kind === "bars") return barChart(spec, place);
  if (spec.kind === "intervals") return intervalChart(spec, place);
  return lineChart(spec, place);
}

// The theme: the system's, until the reader chooses.
export function theme(button) {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const paint = () => { root.dataset.theme = chosen || (dark.matches ? "dark" : "light"); };
  dark.addEventListener("change", paint);
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; });
  addEventListener("afterprint", paint);
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    paint();
  });
  paint();
}
