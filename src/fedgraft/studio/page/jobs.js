// The commands that this studio started, with the end of what each printed; drawn again while one of them goes on.
import { make } from "./charts.js";
import { get } from "./api.js";

// `ended` is called when none of them goes on any more: what they wrote can be read.
export async function jobList(place, ended) {
  const known = await get("jobs"), opened = new Set([...place.querySelectorAll("details[open]")].map(part => part.dataset.job));
  if (place.contains(document.activeElement)) return again(place, ended);  // nobody's place is taken away
  place.replaceChildren();
  if (!known.length) return;
  if (known.some(job => job.code === null)) again(place, ended);
  else if (going.delete(place)) ended?.();
  make("h2", {}, place, "Commands of this studio");
  for (const job of known.slice(0, 20)) {
    const part = make("details", { "data-job": job.id, ...(opened.has(job.id) ? { open: "" } : {}) }, place);
    const state = job.code === null ? "runs" : job.code === 0 ? "done" : `ended with ${job.code}`;
    make("summary", {}, part, `${job.title}: ${state}, started at ${new Date(Date.now() - 1000 * job.seconds).toLocaleTimeString("en-GB")}`);
    if (job.has_run) make("a", { href: `#/run?run=${encodeURIComponent(job.run)}` }, make("p", {}, part), job.run);
    make("pre", { class: "log", tabindex: "0" }, part, job.output || "(no output)");
  }
}

const waiting = new WeakSet(), going = new WeakSet();

function again(place, ended) {
  going.add(place);
  if (waiting.has(place)) return;
  waiting.add(place);
  setTimeout(() => { waiting.delete(place); if (place.isConnected) jobList(place, ended).catch(() => again(place, ended)); }, 2000);
}
