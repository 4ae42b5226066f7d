"""Power sampling: whole texts in proportion to p(text)^alpha, by Metropolis-Hastings on suffixes.

A low temperature sharpens every token by itself; this sharpens whole texts: a token that leads to one good text can
win over one that leads to many poor ones. Each move cuts the text somewhere, draws the rest anew from the model, and
takes it with probability min(1, (p(new rest) / p(old rest))^(alpha - 1)). Several chains move in one batch.

    python examples/power_sampling.py --alpha 4 --chains 4 --moves 12
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

from ramify import LLM, Node, SamplingParams, Tree


@dataclass(slots=True)
class Chain:
    """A text of so many pieces, as the nodes after each: any of them can be gone back to."""

    path: list[Node]
    num_taken: int = 0

    @property
    def logprob(self) -> float:
        return self.path[-1].total_logprob


def grow(tree: Tree, nodes: list[Node], pieces: list[int], params: SamplingParams) -> list[list[Node]]:
    """For each node a path of so many pieces after it; all of them a piece at a time, together."""
    paths: list[list[Node]] = [[] for _ in nodes]
    for step in range(max(pieces, default=0)):
        places = [place for place, count in enumerate(pieces) if step < count]
        tips = [paths[place][-1] if paths[place] else nodes[place] for place in places]
        for place, [child] in zip(places, tree.sample(tips, params), strict=True):
            paths[place].append(child)
    return paths


def power_sample(
    tree: Tree, root: Node, params: SamplingParams, *, alpha: float, chains: int, pieces: int, moves: int, seed: int = 0
) -> list[Chain]:
    """Chains after so many moves each. `params` draw one piece from the model itself: temperature 1 and no filters, and
    always as many tokens, so that every cut is as likely in the new text as in the old."""
    numbers = random.Random(seed)
    living = [Chain([root, *path]) for path in grow(tree, [root] * chains, [pieces] * chains, params)]
    for _ in range(moves):
        cuts = [numbers.randrange(pieces) for _ in living]
        kept = [chain.path[cut] for chain, cut in zip(living, cuts, strict=True)]
        proposed = grow(tree, kept, [pieces - cut for cut in cuts], params)
        for chain, cut, path in zip(living, cuts, proposed, strict=True):
            gain = (alpha - 1) * (path[-1].total_logprob - chain.logprob)
            if numbers.random() < math.exp(min(0.0, gain)):
                chain.path[cut + 1 :] = path  # the nodes that were there are dropped, and their blocks with them
                chain.num_taken += 1
    return living


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole texts by a power of their probability.")
    parser.add_argument("--prompt", default="The three most important things in life are")
    parser.add_argument("--alpha", type=float, default=4.0, help="1: plain samples; larger: likelier texts")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--moves", type=int, default=12)
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6, help="tokens a piece")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    llm = LLM()
    params = SamplingParams(max_tokens=options.tokens, temperature=1.0, top_p=1.0, ignore_eos=True, seed=options.seed)
    sizes = {"chains": options.chains, "pieces": options.pieces, "seed": options.seed}
    with llm.tree() as tree:
        root = tree.root(options.prompt)
        for name, alpha, moves in (("plain", 1.0, 0), (f"alpha {options.alpha:g}", options.alpha, options.moves)):
            found = power_sample(tree, root, params, alpha=alpha, moves=moves, **sizes)
            mean = sum(chain.logprob for chain in found) / len(found)
            print(f"{name}: mean logprob {mean:.1f}, {sum(chain.num_taken for chain in found)} moves taken")
            for chain in found:
                print(f"  {chain.logprob:7.1f}  {' '.join(chain.path[-1].text.split())}")


if __name__ == "__main__":
    main()
