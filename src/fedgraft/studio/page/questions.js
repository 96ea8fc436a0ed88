// The questions of a reproduction, with their figures.
import { make } from "./charts.js";
import { address, get } from "./api.js";

export async function show(place) {
  make("h1", {}, place, "Questions");
  for (const question of await get("questions")) {
    const part = make("section", { class: "question" }, place);
    make("h2", {}, part, question.title);
    for (const text of question.text) make("p", {}, part, text);
    for (const picture of question.pictures) {
      const figure = make("figure", { class: "chart" }, part);
      make("img", { alt: picture.caption, loading: "lazy", src: address("question-picture", { path: picture.path }) }, figure);
      make("figcaption", { class: "note" }, figure, picture.caption);
    }
  }
}
