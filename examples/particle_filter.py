"""Sequential Monte Carlo: draw from the model's distribution, twisted by a function of the text so far.

Particles grow a few tokens at a time. A potential says how good a text is so far; particles are weighted by what they
gained, and resampled when few carry most of the weight. The result is a set of weighted samples of

    p(text) * potential(text)  /  Z         and an unbiased estimate of Z.

Here the potential asks for sentences without one letter. A model that is merely told so fails; a filter of tokens
cannot look ahead; particles that walk into a dead end are replaced by others that do not.

    python examples/particle_filter.py --particles 16 --without e
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify import LLM, Node, SamplingParams, Tree


@dataclass(frozen=True, slots=True)
class Posterior:
    """Nodes, their weights (which sum to 1), and the log of the estimate of Z."""

    nodes: list[Node]
    weights: list[float]
    log_z: float


def particle_filter(
    tree: Tree,
    root: Node,
    potential: Callable[[Node], float],
    params: SamplingParams,
    *,
    particles: int,
    steps: int,
    seed: int = 0,
) -> Posterior:
    """`potential` is at least 0, and of a finished text what the target is multiplied by; `params` grow one step.

    Samples must be of the model's own distribution (temperature 1, no filters) for the target to be as said.
    """
    numbers = random.Random(seed)
    nodes = [root] * particles
    values = [potential(root)] * particles
    log_weights, log_z = [0.0] * particles, math.log(values[0])
    for _ in range(steps):
        open_places = [place for place, node in enumerate(nodes) if not node.has_ended]
        grown = tree.sample([nodes[place] for place in open_places], params)
        for place, [child] in zip(open_places, grown, strict=True):
            value = potential(child)
            is_alive = value > 0 and values[place] > 0  # what was worth nothing once stays worth nothing
            log_weights[place] += math.log(value / values[place]) if is_alive else -math.inf
            nodes[place], values[place] = child, value
        total = log_mean(log_weights)
        if total == -math.inf:
            return Posterior(nodes, [0.0] * particles, -math.inf)
        weights = [math.exp(weight - total) / particles for weight in log_weights]
        if 1 / sum(weight**2 for weight in weights) < particles / 2:
            chosen = systematic(weights, numbers.random())
            nodes, values = [nodes[place] for place in chosen], [values[place] for place in chosen]
            log_z, log_weights = log_z + total, [0.0] * particles
    total = log_mean(log_weights)
    return Posterior(nodes, [math.exp(weight - total) / particles for weight in log_weights], log_z + total)


def log_mean(logs: Sequence[float]) -> float:
    largest = max(logs)
    if largest == -math.inf:
        return largest
    return largest + math.log(sum(math.exp(each - largest) for each in logs) / len(logs))


def systematic(weights: Sequence[float], offset: float) -> list[int]:
    """As many places as weights: each at least ⌊n·weight⌋ times, from one random number."""
    count, reached, place = len(weights), weights[0], 0
    chosen = []
    for index in range(count):
        while (index + offset) / count >= reached and place < count - 1:
            place += 1
            reached += weights[place]
        chosen.append(place)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description="Samples of a model, given that a letter does not occur.")
    parser.add_argument("--prompt", default="A good morning begins with")
    parser.add_argument("--without", default="e", help="the letter to do without")
    parser.add_argument("--particles", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2, help="tokens a step")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def potential(node: Node) -> float:
        """A text with the letter is worth a little, so that not everything dies at once."""
        return 0.001 ** node.text.lower().count(options.without)

    llm = LLM()
    params = SamplingParams(max_tokens=options.tokens, seed=options.seed, top_p=1.0, temperature=1.0)
    with llm.tree() as tree:
        root = tree.root(options.prompt)
        posterior = particle_filter(
            tree, root, potential, params, particles=options.particles, steps=options.steps, seed=options.seed
        )
        [plain] = tree.sample(
            root, SamplingParams(n=options.particles, max_tokens=options.tokens * options.steps, seed=2)
        )
        free = sum(options.without not in node.text.lower() for node in plain)
        print(f"Of {len(plain)} plain samples {free} do without {options.without!r}.")
        merged: dict[str, float] = {}
        for node, weight in zip(posterior.nodes, posterior.weights, strict=True):
            merged[node.text] = merged.get(node.text, 0.0) + weight
        clean = sum(weight for text, weight in merged.items() if options.without not in text.lower())
        print(f"Of the particles' weight {clean:.2f} does; log Z = {posterior.log_z:.2f}")
        for text, weight in sorted(merged.items(), key=lambda each: -each[1])[:5]:
            print(f"  {weight:.2f}  {options.prompt}{' '.join(text.splitlines())}")


if __name__ == "__main__":
    main()
