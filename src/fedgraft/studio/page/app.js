// The studio's page: which view the address names, the list of views, live updates.
import { make, theme } from "./charts.js";
import { boot, follow, get } from "./api.js";
import { notice } from "./sections.js";

const VIEWS = {
  runs: ["Runs", () => import("./runs.js"), () => boot.runs],
  compare: ["Compare", () => import("./compare.js"), () => boot.runs],
  sweep: ["Sweep", () => import("./sweep.js"), () => boot.runs],
  questions: ["Questions", () => import("./questions.js"), () => boot.questions],
  federation: ["Federation", () => import("./federation.js"), () => boot.federation],
  node: ["This node", () => import("./node.js"), () => boot.node],
  new: ["New run", () => import("./form.js"), () => boot.form],
  run: ["Run", () => import("./run.js"), () => false],
};

const main = document.getElementById("main"), nav = document.getElementById("nav"), state = document.getElementById("live");
let react = null, leave = null, shown = 0;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return [VIEWS[path] ? path : first(), new URLSearchParams(query || "")];
}
function first() {
  if (boot.node && !boot.runs) return "node";
  if (boot.federation) return "federation";
  return boot.questions && !boot.any_run ? "questions" : "runs";
}

async function show() {
  const [name, query] = route(), mine = ++shown;
  react = null;
  if (leave) leave();
  leave = null;
  for (const link of nav.children) link.dataset.view === name || (name === "run" && link.dataset.view === "runs") ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  const place = make("div", {});
  const loading = make("p", { class: "note" }, null, "loading …");
  main.replaceChildren(loading);
  try {
    const view = await VIEWS[name][1]();
    const holder = make("div", {});
    main.replaceChildren(holder, loading);
    holder.append(place);
    await view.show(place, { query, live: f => { if (mine === shown) react = f; }, ended: f => { leave = f; } });
    loading.remove();
  } catch (error) {
    if (mine !== shown) return;
    main.replaceChildren();
    notice(main, error.message);
    if (error.code === "E-REPORT-NO-RUN") react = show; // it may have been started a second ago
    return;
  }
  if (mine !== shown) return;
  document.title = `${place.querySelector("h1")?.textContent || VIEWS[name][0]} · fedgraft studio`;
}

async function begin() {
  theme(document.getElementById("theme"));
  Object.assign(boot, await get("boot"));
  for (const [name, [label, , there]] of Object.entries(VIEWS)) if (there()) make("a", { href: `#/${name}`, "data-view": name }, nav, label);
  addEventListener("hashchange", () => { show().then(() => { main.focus({ preventScroll: true }); scrollTo(0, 0); }); });
  await show();
  if (boot.runs)
    follow(
      async event => { try { await react?.(event.count > event.changed.length ? null : event.changed); } catch (error) { console.warn(error.message); } },
      connected => { state.textContent = connected ? "" : "The studio does not answer; trying again."; },
    );
}

begin().catch(error => notice(main, error.message));
