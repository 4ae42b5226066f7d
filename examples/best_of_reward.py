"""Best of n by a reward of your own: draw many, keep those that your function likes best.

`score=` may be any function of a finished output. Here it prefers an answer of about so many words that comes to its
end and says nothing twice.

    python examples/best_of_reward.py --best-of 12 --words 30
"""

from __future__ import annotations

import argparse
import re
import textwrap

from ramify import LLM, CompletionOutput, SamplingParams


class Reward:
    """0 is perfect. It is called once per candidate, so it can also note those that will not be returned."""

    def __init__(self, words: int) -> None:
        self.words = words
        self.notes: list[tuple[float, str]] = []

    def __call__(self, output: CompletionOutput) -> float:
        sentences = [part.strip().lower() for part in re.split(r"[.!?\n]+", output.text) if part.strip()]
        distance = abs(len(output.text.split()) - self.words) / self.words
        repeated = len(sentences) - len(set(sentences))
        unfinished = output.finish_reason != "stop"
        score = -distance - repeated - unfinished
        self.notes.append((score, output.text))
        return score


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw many answers, return those that a reward likes best.")
    parser.add_argument("--question", default="Why do leaves turn red in autumn? Answer in two sentences.")
    parser.add_argument("--n", type=int, default=2, help="answers to return")
    parser.add_argument("--best-of", type=int, default=10, help="answers to draw")
    parser.add_argument("--words", type=int, default=40, help="the length to come close to")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()

    reward = Reward(options.words)
    params = SamplingParams(
        n=options.n,
        best_of=options.best_of,
        score=reward,
        temperature=0.8,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    [output] = LLM().chat([{"role": "user", "content": options.question}], params, use_tqdm=False)

    print(options.question)
    print(f"\nReturned, best first ({options.n} of {options.best_of}):")
    for best in output.outputs:
        print(f"  {best.index}  {best.score:6.2f}  {len(best.text.split()):3} words")
        print(textwrap.fill(best.text, 96, initial_indent=" " * 5, subsequent_indent=" " * 5))
    print("\nNot returned:")
    losers = sorted(reward.notes, reverse=True)[options.n :]
    for score, text in losers:
        print(f"     {score:6.2f}  {len(text.split()):3} words  {textwrap.shorten(text, 75)}")


if __name__ == "__main__":
    main()
