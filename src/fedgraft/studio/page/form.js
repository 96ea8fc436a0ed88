// A new run: a form made of the declared options, with the plan of `fedgraft run --dry-run` beside it.
import { make } from "./charts.js";
import { get, post } from "./api.js";
import { notice } from "./sections.js";
import { jobList } from "./jobs.js";

export async function show(place) {
  const form = await get("form");
  const values = new Map();
  let every = false;
  make("h1", {}, place, "New run");
  const columns = make("div", { class: "columns two" }, place);
  const left = make("form", { id: "new-run", autocomplete: "off" }, columns), right = make("div", { class: "sticky" }, columns);
  left.addEventListener("submit", event => { event.preventDefault(); start(); });

  const bar = make("div", { class: "bar" }, left);
  const label = make("label", {}, bar, "begin with");
  const preset = make("select", { id: "preset" }, label);
  make("option", { value: "" }, preset, "the defaults");
  for (const [name, line] of Object.entries(form.presets)) make("option", { value: name, title: line }, preset, name);
  const all = make("button", { type: "button", "aria-pressed": "false" }, bar, "All options");
  const search = make("input", { type: "search", class: "grow", "aria-label": "Find an option", placeholder: "find an option" }, bar);
  const box = make("div", {}, left);

  function fields() {
    box.replaceChildren();
    const words = search.value.toLowerCase().trim();
    let section = "", inside = null;
    for (const field of form.fields) {
      if (!(every || field.common || values.has(field.key) || words)) continue;
      if (words && !`${field.key} ${field.description}`.toLowerCase().includes(words)) continue;
      if (field.section !== section) {
        section = field.section;
        // A table's sentence: its first part is the heading, the rest stands below.
        const [, title, rest] = section.replaceAll("`", "").match(/^([^.;:]+)[.;:]?\s*(.*)$/);
        make("h2", {}, box, title);
        if (rest) make("p", { class: "note" }, box, rest);
        inside = make("div", { class: "fields" }, box);
      }
      input(field, inside);
    }
  }
  function input(field, parent) {
    const holder = make("label", { class: "field" }, parent);
    make("span", {}, holder, field.key);
    const choices = field.input === "switch" ? ["true", "false"] : field.input === "choice" ? field.choices : null;
    let element;
    if (choices) {
      element = make("select", { name: field.key }, holder);
      make("option", { value: "" }, element, field.default === "" ? "(default)" : `${field.default} (default)`);
      for (const choice of choices) make("option", { value: choice }, element, choice);
    } else element = make("input", { name: field.key, placeholder: field.default === "" ? "(default)" : field.default, inputmode: field.input === "number" ? "decimal" : "text" }, holder);
    if (field.suggestions.length) {
      const list = make("datalist", { id: `known-${field.key}` }, holder);
      for (const word of field.suggestions) make("option", { value: word }, list);
      element.setAttribute("list", list.id);
    }
    if (field.description) make("small", {}, holder, field.description.replaceAll("`", ""));
    element.value = values.get(field.key) ?? "";
    holder.classList.toggle("changed", values.has(field.key));
    element.addEventListener("input", () => {
      element.value === "" ? values.delete(field.key) : values.set(field.key, element.value);
      holder.classList.toggle("changed", values.has(field.key));
      command();
    });
  }
  search.addEventListener("input", fields);
  all.addEventListener("click", () => { every = !every; all.setAttribute("aria-pressed", String(every)); all.classList.toggle("on", every); fields(); });
  preset.addEventListener("change", command);

  make("h2", {}, right, "Plan");
  const line = make("pre", { tabindex: "0", id: "command" }, right);
  const buttons = make("div", { class: "bar" }, right);
  const plan = make("button", { type: "button", id: "plan" }, buttons, "Show the plan");
  const run = make("button", { type: "button", id: "start" }, buttons, "Start the run");
  const messages = make("div", { role: "status" }, right), jobs = make("div", {}, right);
  const body = () => ({ preset: preset.value, options: Object.fromEntries(values) });
  const quote = word => (/^[\w.=,:/@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  function command() {
    const words = [...values].map(([key, value]) => quote(`${key}=${value}`));
    line.textContent = ["fedgraft run", ...(preset.value ? [preset.value] : []), ...words].join(" ");
  }
  async function ask(button, path) {
    messages.replaceChildren(make("p", { class: "note" }, null, "working …"));
    button.disabled = true;
    try { return await post(path, body()); }
    catch (error) { messages.replaceChildren(); notice(messages, error.message); return null; }
    finally { button.disabled = false; }
  }
  plan.addEventListener("click", async () => {
    const result = await ask(plan, "plan");
    if (!result) return;
    messages.replaceChildren();
    if (!result.ok) notice(messages, "This run cannot start.");
    make("pre", { id: "plan-text", tabindex: "0" }, messages, result.text);
  });
  async function start() {
    const job = await ask(run, "start");
    if (!job) return;
    messages.replaceChildren();
    const text = make("p", { class: "notice", id: "started" }, messages, "started: ");
    make("a", { href: `#/run?run=${encodeURIComponent(job.run)}` }, text, job.run);
    await list();
  }
  run.addEventListener("click", start);
  const list = () => jobList(jobs);
  fields();
  command();
  await list();
}
