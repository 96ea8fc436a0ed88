// Several runs over each other: curves over rounds, megabytes or seconds, results, and what differs between their configs.
import { make } from "./charts.js";
import { address, get } from "./api.js";
import { notice, sections } from "./sections.js";
import { state } from "./runs.js";

const AXES = [["round", "rounds"], ["megabytes", "megabytes"], ["seconds", "seconds"]];

export async function show(place, { query, live }) {
  const runs = query.getAll("run").length ? query.getAll("run") : [...state.selected];
  make("h1", {}, place, "Compare");
  if (runs.length < 2) {
    make("p", { class: "empty" }, place, "Select two or more runs in the table of runs.");
    return;
  }
  let over = query.get("over") || "round";
  const bar = make("div", { class: "bar", role: "group", "aria-label": "Curves over" }, place);
  make("span", { class: "note" }, bar, "curves over");
  for (const [key, label] of AXES) {
    const button = make("button", { type: "button", "aria-pressed": String(key === over), "data-axis": key }, bar, label);
    button.classList.toggle("on", key === over);
    button.addEventListener("click", () => {
      over = key;
      for (const other of bar.querySelectorAll("button")) {
        other.setAttribute("aria-pressed", String(other.dataset.axis === over));
        other.classList.toggle("on", other.dataset.axis === over);
      }
      history.replaceState(null, "", `#/compare?${runs.map(run => `run=${encodeURIComponent(run)}`).join("&")}&over=${over}`);
      bar.querySelector("#offline").href = address("comparison", { run: runs, over });
      draw();
    });
  }
  make("a", { class: "button", href: address("comparison", { run: runs, over }), download: "comparison.html", id: "offline" }, bar, "Offline page");
  const box = make("div", {}, place);
  const drawn = new Map();
  async function draw() {
    const data = await get("compare", { run: runs, over });
    box.replaceChildren();
    drawn.clear();
    for (const warning of data.warnings) notice(box, warning);
    const curves = data.sections.filter(s => s.title === "Curves"), rest = data.sections.filter(s => s.title !== "Curves");
    sections([...curves, ...rest], box, { drawn });
  }
  await draw();
  let waiting = false;
  live(changed => {
    if (waiting || (changed && !changed.some(name => runs.includes(name)))) return;
    waiting = true;
    setTimeout(async () => {
      waiting = false;
      if (!box.isConnected) return;
      for (const spec of await get("curves", { run: runs, over })) drawn.get(spec.title)?.(spec);
    }, 2000);
  });
}
