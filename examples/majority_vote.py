"""Majority vote (self-consistency): ask once, draw many answers, and let them vote.

A small model often reasons wrongly, but in many different ways, while right answers agree. The prompt is computed once,
whatever n is: all answers share its keys and values.

    python examples/majority_vote.py --n 24
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

from ramify import LLM, SamplingParams

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number of an answer is its result; those before belong to the reasoning."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw many answers to a question and let them vote.")
    parser.add_argument("--question", default="Tom has 3 boxes with 4 apples each. How many apples does he have?")
    parser.add_argument("--n", type=int, default=16, help="answers to draw")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 would give the same answer n times")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    llm = LLM()
    params = SamplingParams(
        n=options.n,
        temperature=options.temperature,
        top_p=0.95,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    [output] = llm.chat([{"role": "user", "content": options.question}], params, use_tqdm=False)

    # An answer that was cut off has no result yet, so it does not vote.
    answers = [last_number(each.text) if each.finish_reason == "stop" else None for each in output.outputs]
    tally = Counter(answer for answer in answers if answer is not None)

    print(options.question)
    print()
    print(f"{'answer':>10}  {'votes':>5}")
    for answer, votes in tally.most_common():
        print(f"{answer:>10}  {votes:>5}  {'#' * votes}")
    print(f"{'no answer':>10}  {answers.count(None):>5}")
    print()
    if tally:
        winner = tally.most_common(1)[0][0]
        print(f"The majority says {winner}. One of them: {output.outputs[answers.index(winner)].text.strip()!r}")
    computed = llm.stats()["prompt_tokens_computed"]
    print(f"{computed} prompt tokens were computed for {options.n} answers.")


if __name__ == "__main__":
    main()
