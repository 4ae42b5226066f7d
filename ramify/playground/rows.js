// Which row of the tree a beam's tokens stand in: the one that leads on top, in the order of the cards below.

import { path } from "./search.js";

const NOWHERE = Number.MAX_SAFE_INTEGER;

/** node -> the place of the best beam that goes through it; what was given up is not in it. */
export function ranksOf(search) {
  const ranks = new Map();
  search.standings.forEach((item, place) => {
    for (const node of path(search.tips.get(item.child)).reverse()) {
      if (ranks.has(node)) return; // a better one came this way, and so did all before it
      ranks.set(node, place);
    }
  });
  return ranks;
}

/** node -> its row among the nodes of its level: living ones by rank, then the others near their parents. */
export function rowsOf(levels, ranks) {
  const rows = new Map();
  const before = (node) => (node.before ? rows.get(node.before) : 0);
  for (const level of levels) {
    const order = [...level].sort((one, other) =>
      (ranks.get(one) ?? NOWHERE) - (ranks.get(other) ?? NOWHERE) || before(one) - before(other) || (other.score ?? 0) - (one.score ?? 0));
    order.forEach((node, row) => rows.set(node, row));
  }
  return rows;
}
