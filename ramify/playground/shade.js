// Numbers as colours: how surprising a token was, and which of two models it leans to.

const DECADES = 3; // a token of one in a thousand, or less, has the full colour

/** Marks an element with what the stylesheet needs to shade it. */
export function shade(element, node) {
  const level = surprise(node.logprob);
  if (level > 0.01) { // what is all but certain stays clear
    element.dataset.level = "";
    element.style.setProperty("--level", level.toFixed(3));
  }
  if (node.mixture) {
    const { alpha } = node.mixture;
    element.dataset.side = alpha >= 0.5 ? "teacher" : "student";
    element.style.setProperty("--lean", Math.abs(alpha - 0.5).toFixed(4));
  }
}

function surprise(logprob) {
  if (logprob == null) return 1; // nothing is more surprising than what could not be drawn
  return Math.min(1, Math.max(0, -logprob / Math.LN10 / DECADES));
}

/** How far from the middle α's scale goes: the least of a few round numbers that holds all of these. */
export function reachOf(alphas) {
  const farthest = alphas.reduce((most, alpha) => Math.max(most, Math.abs(alpha - 0.5)), 0);
  return [0.05, 0.1, 0.2, 0.3].find((reach) => farthest <= reach) ?? 0.5;
}

/** The least of 1, 2, 5, 10, 20, 50 … that holds a number: a scale that does not move with every token. */
export function roundUp(number) {
  if (!(number > 1e-6)) return 0;
  const decade = 10 ** Math.floor(Math.log10(number));
  const step = [1, 2, 5, 10].find((part) => number <= part * decade);
  return Number((step * decade).toPrecision(1));
}

/** The probability of a token; null stands for the logprob of one that could not be drawn. */
export function probability(logprob) {
  return Math.exp(logprob ?? -Infinity);
}

/** A share in words short enough for a list: 37 %, 0.42 %, < 0.01 %. */
export function percent(share) {
  const value = share * 100;
  if (value >= 10) return `${value.toFixed(0)} %`;
  if (value >= 0.1) return `${value.toFixed(value >= 1 ? 1 : 2)} %`;
  return value >= 0.01 ? `${value.toFixed(2)} %` : "< 0.01 %";
}

/** A number with a true minus sign. */
export function signed(number, digits) {
  return number.toFixed(digits).replace("-", "−");
}

/** A token's text with what cannot be seen made visible. */
export function visible(piece) {
  if (piece === "") return "(no text)";
  if (isPart(piece)) return "(part of a character)";
  return piece.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

/** Whether a token is some bytes of a character, as of emoji and of rare signs: by itself it spells nothing. */
export function isPart(piece) {
  return /^\uFFFD+$/.test(piece);
}

export function groupColour(group) {
  return `var(--group-${group % 8})`;
}
