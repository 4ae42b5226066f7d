"""Monte Carlo tree search for a small puzzle: reach a number by given moves, with the model's opinion as the prior.

At each position the model says how likely each move is (`tree.logprobs`, all moves in one batch), and a random playout
says how good it is. Moves that are played become nodes (`tree.extend`), so the model reads every position once.

    python examples/puzzle_mcts.py --start 2 --target 26 --moves 4
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ramify import LLM, Node, Tree

MOVES: dict[str, Callable[[int], int]] = {"+3": lambda x: x + 3, "*2": lambda x: x * 2, "-1": lambda x: x - 1}
EXPLORATION = 1.5


@dataclass(slots=True)
class Position:
    number: int
    num_left: int  # moves
    node: Node
    prior: float = 1.0
    num_visits: int = 0
    total: float = 0.0
    priors: dict[str, float] = field(default_factory=dict)
    children: dict[str, Position] = field(default_factory=dict)

    @property
    def is_spent(self) -> bool:
        """Nothing below it is left to be looked at."""
        played = self.children.values()
        return self.num_visits > 0 and (
            self.num_left == 0 or (len(played) == len(MOVES) and all(child.is_spent for child in played))
        )

    def score(self, num_visits_above: int) -> float:
        """PUCT: what was found here, and what may be found if the model is right."""
        mean = self.total / self.num_visits if self.num_visits else 0.0
        return mean + EXPLORATION * self.prior * math.sqrt(num_visits_above) / (1 + self.num_visits)


class Search:
    def __init__(self, tree: Tree, start: int, target: int, num_moves: int, seed: int) -> None:
        rules = ", ".join(MOVES)
        self._tree, self._target, self._numbers = tree, target, random.Random(seed)
        shown = "12: 6 *2 = 12\n8: 6 +3 = 9, -1 = 8"
        prompt = f"Reach {target} from {start} with the moves {rules}.\n{shown}\n{target}: {start}"
        self.root = Position(start, num_moves, tree.root(prompt))

    def simulate(self) -> list[str] | None:
        """Walks down to a position that is new, looks at it, and tells those above; returns moves that solve it."""
        path, played, position = [self.root], [], self.root
        while position.number != self._target and position.num_left and position.priors:
            above = position.num_visits + 1
            unplayed = {name: EXPLORATION * prior * math.sqrt(above) for name, prior in position.priors.items()}
            scores = unplayed | {name: child.score(above) for name, child in position.children.items()}
            scores = {name: score for name, score in scores.items() if not self._is_spent(position, name)}
            if not scores:
                return None  # all was looked at
            move = max(scores, key=lambda name: scores[name])
            if move not in position.children:
                position.children[move] = self._play(position, move)
            position = position.children[move]
            path.append(position)
            played.append(move)
        if position.number != self._target and position.num_left and not position.priors:
            position.priors = self._ask(position)
        value, rest = self._play_out(position)
        for each in path:
            each.num_visits += 1
            each.total += value
        return played + rest if value == 1.0 else None

    def _is_spent(self, position: Position, move: str) -> bool:
        return move in position.children and position.children[move].is_spent

    def _play(self, position: Position, move: str) -> Position:
        number = MOVES[move](position.number)
        [node] = self._tree.extend(position.node, f"{self._separator(position)}{move} = {number}")
        return Position(number, position.num_left - 1, node, position.priors[move])

    def _separator(self, position: Position) -> str:
        return " " if position is self.root else ", "

    def _ask(self, position: Position) -> dict[str, float]:
        """How likely the model finds each move: a softmax over their texts."""
        texts = [f"{self._separator(position)}{move}" for move in MOVES]
        told = [sum(each) for each in self._tree.logprobs([position.node] * len(texts), texts)]
        largest = max(told)
        shares = [math.exp(each - largest) for each in told]
        return {move: share / sum(shares) for move, share in zip(MOVES, shares, strict=True)}

    def _play_out(self, position: Position) -> tuple[float, list[str]]:
        """At random to the end: 1 if the target is met, else less, the further away it stays."""
        number, played, nearest = position.number, [], abs(self._target - position.number)
        for _ in range(position.num_left):
            if number == self._target:
                break
            played.append(self._numbers.choice(list(MOVES)))
            number = MOVES[played[-1]](number)
            nearest = min(nearest, abs(self._target - number))
        return (1.0, played) if number == self._target else (0.5 / (1 + nearest), played)


def main() -> None:
    parser = argparse.ArgumentParser(description="Solve a puzzle of numbers by tree search.")
    parser.add_argument("--start", type=int, default=2)
    parser.add_argument("--target", type=int, default=26)
    parser.add_argument("--moves", type=int, default=4)
    parser.add_argument("--simulations", type=int, default=200, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    llm = LLM()
    with llm.tree() as tree:
        search = Search(tree, options.start, options.target, options.moves, options.seed)
        for number in range(1, options.simulations + 1):
            solution = search.simulate()
            if solution is None:
                continue
            value, shown = options.start, str(options.start)
            for move in solution:
                value = MOVES[move](value)
                shown += f" {move} = {value}"
            print(f"solved after {number} simulations, with {len(tree)} nodes: {shown}")
            break
        else:
            print(f"not solved in {options.simulations} simulations")
        priors = ", ".join(f"{move} {share:.2f}" for move, share in search.root.priors.items())
        print(f"the model's opinion of the first move: {priors}")


if __name__ == "__main__":
    main()
