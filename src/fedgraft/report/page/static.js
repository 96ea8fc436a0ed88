// What a static page does when it is opened: it draws the charts of its own JSON block.
import { chart, theme } from "./charts.js";

const data = JSON.parse(document.getElementById("data").textContent);
theme(document.getElementById("theme"));
for (const spec of data.charts) chart(spec, document.getElementById(spec.place || "charts"));
