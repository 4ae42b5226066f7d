// One legend above all cards: what the shades of tokens mean, and the lines of charts.

import { make } from "./elements.js";
import { shade } from "./shade.js";

/** The legend's parts, for what tokens are shaded by ("probability", "alpha" or "nothing") and the search that is shown. */
export function legend(by, search) {
  const parts = [];
  if (by !== "nothing") parts.push(shades(by, search?.reach ?? 0.5));
  if (search?.mixture) parts.push(lines(search));
  return parts;
}

function shades(by, reach) {
  const steps = by === "alpha"
    ? [-1, -0.5, 0, 0.5, 1].map((part) => {
      const alpha = 0.5 + part * reach;
      return [rounded(alpha), { logprob: 0, mixture: { alpha } }];
    })
    : [1, 0.5, 0.1, 0.01, 0.001].map((p, place) => [place === 4 ? "≤ 0.001" : String(p), { logprob: Math.log(p) }]);
  const scale = make("span", "legend-scale", ...steps.map(([label, node]) => {
    const step = make("span", "", label);
    shade(step, node);
    step.style.setProperty("background", "var(--shade, transparent)");
    return step;
  }));
  const [before, after] = by === "alpha"
    ? ["α, the teacher’s weight: leans to the student", "to the teacher"]
    : ["probability the model gave each token: certain", "a surprise"];
  return make("div", "legend-part", before, scale, after);
}

function lines({ reach, klScale, klCoincide }) {
  const alpha = make("span", "key alpha-key", `α, ${rounded(0.5 - reach)} to ${rounded(0.5 + reach)}`);
  if (klScale === 0) return make("div", "legend-part", "charts:", alpha, make("span", "", "no KL: the models agree everywhere"));
  const to = `0 to ${klScale} nats`;
  const divergences = klCoincide
    ? [make("span", "key both-key", `KL to the teacher and to the student, ${to}: the two coincide, one line`)]
    : [make("span", "key teacher-key", "KL to the teacher"), make("span", "key theta-key", "KL to the student"), make("span", "", `both ${to}`)];
  return make("div", "legend-part", "charts:", alpha, ...divergences);
}

function rounded(number) {
  return String(Number(number.toFixed(3)));
}
