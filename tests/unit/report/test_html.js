// Runs a report's script in a document just large enough for it, plays with it, and prints what happened as JSON.
const fs = require("fs"), vm = require("vm");
const text = fs.readFileSync(process.argv[2], "utf8");
const scripts = [...text.matchAll(/<script[^>]*>([\s\S]*?)<\/script>/g)].map(m => m[1]);

class Element {
  constructor(name) {
    Object.assign(this, { name, a: {}, kids: [], style: {}, dataset: {}, on: {}, hidden: false, own: "" });
  }
  setAttribute(key, value) {
    if (/NaN|undefined|Infinity/.test(value)) throw Error(`${this.name} ${key}=${value}`);
    this.a[key] = String(value);
  }
  append(...elements) { this.kids.push(...elements); }
  replaceChildren() { this.kids = []; }
  addEventListener(kind, react) { this.on[kind] = react; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 400, height: 400 }; }
  get textContent() { return [this.own, ...this.kids.map(kid => kid.textContent)].filter(part => part).join("|"); }
  set textContent(value) { this.own = String(value); }
  set innerHTML(value) {
    if (value !== "<svg></svg>") throw Error("markup was made from data");
    this.content = { firstChild: { namespaceURI: "svg" } };
  }
  all(name) { return this.kids.flatMap(kid => [...(kid.name === name ? [kid] : []), ...kid.all(name)]); }
}

const ids = {}, root = new Element("html");
global.document = {
  documentElement: root,
  createElement: name => new Element(name),
  createElementNS: (_, name) => new Element(name),
  getElementById: id => ids[id] ||= Object.assign(new Element(id), { own: id === "data" ? scripts[0] : "" }),
};
global.matchMedia = () => ({ matches: false, addEventListener() {} });
global.addEventListener = () => {};
global.ResizeObserver = class { constructor(react) { this.react = react; } observe() { this.react(); } };
vm.runInThisContext(scripts[1]);

const boxes = [...ids.charts.kids, ...(ids.more ? ids.more.kids : [])], out = { charts: boxes.length, theme: [root.dataset.theme] };
for (let i = 0; i < 2; i++) { ids.theme.on.click(); out.theme.push(root.dataset.theme); }
out.lines = boxes.map(box => box.all("polyline").length);
const within = pair => { const [x, y] = pair.split(",").map(Number); return x >= 19 && x <= 389 && y >= 7 && y <= 217; };
out.inside = boxes.every(box => box.all("polyline").every(line => line.a.points.split(" ").every(within)));

const labels = box => box.all("svg")[0].kids.filter(kid => kid.name === "text").map(kid => kid.own);
out.starts = boxes.every(box => labels(box).includes("0"));
out.units = labels(boxes[0]).some(text => text.endsWith(" %"));
out.dashes = new Set(boxes[boxes.length > 1 ? 1 : 0].all("polyline").map(line => line.a["stroke-dasharray"])).size;
const svg = boxes[1].all("svg")[0], tip = boxes[1].kids.find(kid => kid.a.class === "tip"), keys = boxes[1].all("button");
svg.on.pointermove({ clientX: 399 });
out.tip = tip.textContent;
out.tipShown = !tip.hidden;
svg.on.pointerleave();
out.tipGone = tip.hidden;
svg.on.keydown({ key: "ArrowRight", preventDefault() {} });
out.keyTip = tip.textContent;
out.keys = keys.map(key => key.textContent);
keys[0].on.click();
out.after = [svg.all("polyline").length, keys[0].a["aria-pressed"]];
keys.slice(1).forEach(key => key.on.click());
out.none = svg.all("polyline").length;
svg.on.pointermove({ clientX: 10 });
keys.forEach(key => key.on.click());
out.back = svg.all("polyline").length;
console.log(JSON.stringify(out));
