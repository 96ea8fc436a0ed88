// A data owner's view of the own node: its connection and work, what left it and under which protection.
import { make } from "./charts.js";
import { get } from "./api.js";
import { badge, cards, notice, sections } from "./sections.js";

export async function show(place, { ended }) {
  const title = make("h1", {}, place, "This node"), top = make("div", {}, place), rest = make("div", {}, place);
  let shape = "", closed = false, timer = null;
  async function draw() {
    const state = await get("node");
    if (closed) return;
    title.textContent = state.title;
    top.replaceChildren();
    if (state.problem) notice(top, state.problem);
    const line = make("div", { class: "bar" }, top);
    badge(line, state.now.connection);
    make("span", { class: "note" }, line, state.now.work ? `works on a request: ${state.now.work}` : "no request now");
    cards(state.cards, top, false);
    const next = JSON.stringify(state.sections);
    if (next !== shape && !rest.contains(document.activeElement)) {
      shape = next;
      rest.replaceChildren();
      sections(state.sections, rest);
    }
  }
  async function loop() {
    try { await draw(); } catch (error) { top.replaceChildren(); notice(top, error.message); }
    if (!closed) timer = setTimeout(loop, document.hidden ? 10000 : 2000);
  }
  ended(() => { closed = true; clearTimeout(timer); });
  await loop();
}
