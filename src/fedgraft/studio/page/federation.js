// The coordinator's view: who is connected, what each node does, how far the run is, what it cost.
import { make } from "./charts.js";
import { boot, get, post } from "./api.js";
import { badge, notice, sections } from "./sections.js";
import { clock } from "./format.js";
import { jobList } from "./jobs.js";

export async function show(place, { ended }) {
  make("h1", {}, place, "Federation");
  const acting = make("div", {}, place), top = make("div", {}, place), heading = make("h2", {}, place, "Nodes"), nodes = make("div", { class: "nodes", id: "nodes" }, place), rest = make("div", {}, place);
  const drawn = new Map();
  let shape = "", closed = false, timer = null;

  async function draw() {
    const state = await get("federation");
    if (closed) return;
    top.replaceChildren();
    if (state.problem) notice(top, state.problem);
    const line = make("div", { class: "bar" }, top);
    badge(line, state.address ? "server running" : "server stopped");
    make("span", { class: "note" }, line, state.address || "start it with: fedgraft deploy server");
    if (state.run !== null) {
      make("h2", {}, top, state.query ? `Question to the nodes: ${state.query}` : `Run ${state.run}`);
      const bar = make("div", { class: "bar" }, top);
      badge(bar, state.run_status);
      if (state.run_name) make("a", { href: `#/run?run=${encodeURIComponent(state.run_name)}` }, bar, "its curves");
      if (!state.query) {
        make("span", { class: "note" }, bar, `round ${state.round ?? 0} of ${state.total}; ${state.sent[0]} up, ${state.sent[1]} down${state.left ? `; about ${clock(state.left)} left` : ""}`);
        const progress = make("div", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": state.total, "aria-valuenow": state.round || 0, "aria-label": "rounds" }, top);
        make("div", {}, progress).style.width = `${100 * (state.round || 0) / state.total}%`;
      }
      if (state.reason) notice(top, `The run died: ${state.reason}`);
      if (state.waits_for.length) notice(top, `The run waits for ${state.waits_for.join(", ")}: too few nodes for a secure sum.`);
      for (const phase of state.phases) make("p", { class: "note" }, top, `now: ${phase}`);
    }
    heading.textContent = `Nodes: ${state.nodes.filter(node => node.connection === "connected").length} of ${state.nodes.length} connected`;
    nodes.replaceChildren();
    for (const node of state.nodes) {
      const card = make("div", { class: `node ${node.connection === "connected" ? "connected" : "absent"}`, "data-node": node.name }, nodes);
      make("span", {}, make("h3", {}, card, node.name), node.connection);
      if (node.now) make("p", {}, card, `now: ${node.now}`);
      if (node.speed) make("p", {}, card, `link: ${node.speed} (${node.down} down, ${node.up} up of this request)`);
      make("p", { class: "note" }, card, node.contributed);
    }
    const next = JSON.stringify(state.sections);
    if (next !== shape && !rest.contains(document.activeElement)) {
      shape = next;
      rest.replaceChildren();
      sections(state.sections, rest, { drawn });
    }
  }
  if (boot.actions) actions(acting, draw);
  async function loop() {
    try { await draw(); } catch (error) { top.replaceChildren(); notice(top, error.message); }
    if (!closed) timer = setTimeout(loop, document.hidden ? 10000 : 2000);
  }
  ended(() => { closed = true; clearTimeout(timer); });
  await loop();
}

// What the coordinator may do here, each a `fedgraft deploy` command; the plan is that of the config that owners agreed to.
function actions(place, draw) {
  const bar = make("div", { class: "bar", role: "group", "aria-label": "Actions" }, place), messages = make("div", { role: "status" }, place), jobs = make("div", {}, place);
  const act = (label, path, done, danger) => {
    const button = make("button", { type: "button", "data-action": path, ...(danger ? { class: "danger" } : {}) }, bar, label);
    button.addEventListener("click", async () => {
      messages.replaceChildren(make("p", { class: "note" }, null, "working …"));
      button.disabled = true;
      try { done(await post(path, {})); }
      catch (error) { messages.replaceChildren(); notice(messages, error.message); }
      button.disabled = false;
      await jobList(jobs);
      await draw();
    });
  };
  const started = job => messages.replaceChildren(make("p", { class: "note" }, null, `${job.title}: started`));
  act("Preflight", "preflight", started);
  act("Show the plan", "plan", plan => {
    messages.replaceChildren();
    if (!plan.ok) notice(messages, "This run cannot start.");
    make("pre", { id: "plan-text", tabindex: "0" }, messages, plan.text);
  });
  act("Start the run", "start", started);
  act("Stop the run", "stop", started, true);
  jobList(jobs);
}
