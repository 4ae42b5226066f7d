// The fields of the controls: a label, an input, a place for a message.

import { draw, make } from "./elements.js";
import { drawSeed } from "./settings.js";

/** { control, input, holder } of one control. */
export function fieldOf(control) {
  const input = control.choices ? make("select") : make("input");
  for (const [value, text] of control.choices ?? []) input.append(new Option(text, value));
  if (!control.choices) input.type = control.kind ? "number" : "text";
  if (control.kind) input.step = control.kind === "integer" ? "1" : "0.1";
  input.name = control.name;
  input.id = `control-${control.name}`;
  input.value = control.value;
  input.autocomplete = "off";
  const label = make("label", "", control.label);
  label.htmlFor = input.id;
  if (control.hint) label.title = input.title = control.hint;
  const message = make("p", "message");
  message.hidden = true;
  message.setAttribute("role", "alert");
  const entry = control.die ? make("div", "with-die", input, die(input)) : input;
  const holder = make("div", "field", label, entry, message);
  if (control.wide) holder.classList.add("wide");
  if (control.double) holder.classList.add("double");
  holder.dataset.field = control.name;
  const field = { control, input, holder };
  leftEmpty(field, undefined);
  return field;
}

/** Shows in an empty field what it means: what the model's makers recommend, or what the engine does without it. */
export function leftEmpty({ control, input }, recommended) {
  if (control.choices) return;
  const neutral = control.placeholder ?? (control.neutral === undefined ? "" : String(control.neutral));
  input.placeholder = recommended === undefined ? neutral : String(recommended);
}

function die(input) {
  const dots = [[6, 6], [14, 6], [10, 10], [6, 14], [14, 14]].map(([cx, cy]) => draw("circle", { cx, cy, r: 1.5 }));
  const button = make("button", "quiet icon die",
    draw("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, draw("rect", { x: 2, y: 2, width: 16, height: 16, rx: 4 }), ...dots));
  button.type = "button";
  button.title = "Draw a seed and keep it";
  button.setAttribute("aria-label", button.title);
  button.addEventListener("click", () => {
    input.value = String(drawSeed());
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  return button;
}
