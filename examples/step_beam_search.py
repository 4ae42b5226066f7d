"""Step-wise beam search with a verifier: a function of the text so far decides which steps go on.

The model writes a list, a line at a time. After each line a verifier looks at the whole text; the best lines go on.
Likely text is not what is searched for, but text that passes the check.

    python examples/step_beam_search.py --width 3 --branches 4 --steps 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ramify import LLM, Node, SamplingParams, Tree

NAMES = """
ant bat bear bee bird bison boar buffalo camel cat cheetah chicken cow crab crocodile crow deer dog dolphin donkey duck
eagle elephant elk falcon fish flamingo fox frog giraffe goat goose gorilla hamster hare hawk hippo horse hyena jaguar
kangaroo koala leopard lion lizard llama lynx monkey moose mouse octopus ostrich otter owl ox panda panther parrot
penguin pig pigeon rabbit raccoon rat raven rhino salmon seal shark sheep sloth snail snake spider squirrel swan tiger
toad turkey turtle walrus whale wolf zebra
"""
ANIMALS = frozenset(NAMES.split())
PROMPT = "Animals, one on each line, none of them twice:\nowl\nhorse\n"


@dataclass(frozen=True, slots=True)
class Beam:
    node: Node
    reward: float


def beam_search(
    tree: Tree, root: Node, reward: Callable[[str], float], params: SamplingParams, *, width: int, steps: int
) -> list[Beam]:
    """`width` texts after `steps` steps, best first; ties go to the likelier one. One batch a step."""
    beams = [Beam(root, reward(root.text))]
    for _ in range(steps):
        open_beams = [beam for beam in beams if not beam.node.has_ended]
        if not open_beams:
            break
        grown = tree.sample([beam.node for beam in open_beams], params)
        candidates = [beam for beam in beams if beam.node.has_ended]
        candidates += [Beam(node, reward(node.text)) for children in grown for node in children]
        candidates.sort(key=lambda beam: (beam.reward, beam.node.total_logprob), reverse=True)
        different = {beam.node.token_ids: beam for beam in reversed(candidates)}  # copies would only crowd the beam
        beams = list(reversed(different.values()))[:width]
        tree.release([beam.node for beam in candidates if beam not in beams])
    return beams


def different_animals(text: str) -> float:
    """A point for each line that is an animal, one off for each that is not or that is there already."""
    lines = [line.strip().lower() for line in f"{PROMPT}{text}".splitlines()[1:]]
    named = {line for line in lines if line in ANIMALS}
    return 2 * len(named) - len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search for a list that passes a check, line by line.")
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--branches", type=int, default=4, help="continuations of each beam")
    parser.add_argument("--steps", type=int, default=6, help="lines")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()

    llm = LLM()
    params = SamplingParams(
        n=options.branches,
        temperature=1.0,
        seed=options.seed,
        stop="\n",
        include_stop_str_in_output=True,
        max_tokens=12,
    )
    with llm.tree() as tree:
        root = tree.root(PROMPT)
        plain = beam_search(tree, root, lambda _: 0.0, params, width=1, steps=options.steps)
        beams = beam_search(tree, root, different_animals, params, width=options.width, steps=options.steps)
        print(f"without the verifier: {different_animals(plain[0].node.text):.0f} points")
        for rank, beam in enumerate(beams):
            shown = " | ".join(beam.node.text.strip().split("\n"))
            print(f"  {rank}  {beam.reward:3.0f} points  logprob {beam.node.total_logprob:7.2f}  {shown}")
    print(f"{llm.stats()['prompt_tokens_computed']} prompt tokens computed, {llm.stats()['generated_tokens']} drawn")


if __name__ == "__main__":
    main()
