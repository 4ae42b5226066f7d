"""Six ways to continue one prompt, and how different the continuations are from each other.

distinct-2 is the share of distinct pairs among all pairs of neighbouring tokens: 1 means that no pair occurs twice.
Beams look for what is likely and resemble each other; beam groups and diverse siblings are pushed apart.

    python examples/beams_and_diversity.py --n 6 --max-tokens 32
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from ramify import LLM, RequestOutput, SamplingParams


def distinct_pairs(output: RequestOutput) -> float:
    pairs = [pair for completion in output.outputs for pair in pairwise(completion.token_ids)]
    return len(set(pairs)) / max(1, len(pairs))


def mean_logprob(output: RequestOutput) -> float:
    total = sum(completion.cumulative_logprob for completion in output.outputs)
    return total / sum(len(completion.token_ids) for completion in output.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare greedy, sampled, diverse and beam continuations.")
    parser.add_argument("--prompt", default="The best thing about living near the sea is")
    parser.add_argument("--n", type=int, default=4, help="continuations of each kind; an even number")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--penalty", type=float, default=2.0, help="what a token loses if an earlier sibling took it")
    options = parser.parse_args()
    if options.n < 2 or options.n % 2:
        parser.error("--n must be even: the beams of the last kind come in beam groups of two")

    n, length = options.n, options.max_tokens
    ways = {
        "greedy": SamplingParams(temperature=0, max_tokens=length),
        "parallel": SamplingParams(n=n, temperature=0.4, seed=7, max_tokens=length),
        "best of 3n": SamplingParams(n=n, best_of=3 * n, temperature=0.4, seed=7, max_tokens=length),
        "diverse": SamplingParams(
            n=n, strategy="diverse", diversity_penalty=options.penalty, temperature=0.4, seed=7, max_tokens=length
        ),
        "beam search": SamplingParams(n=n, strategy="beam_search", beam_width=n, max_tokens=length),
        "diverse beams": SamplingParams(
            n=n,
            strategy="beam_search",
            beam_width=n,
            num_beam_groups=n // 2,
            diversity_penalty=options.penalty,
            max_tokens=length,
        ),
    }
    # One call: requests of every kind run in the same batch, and the prompt's blocks are shared by all of them.
    outputs = LLM().generate([options.prompt] * len(ways), list(ways.values()), use_tqdm=False)

    print(options.prompt)
    for name, output in zip(ways, outputs, strict=True):
        print(f"\n{name:<14} distinct-2 {distinct_pairs(output):.2f}   logprob per token {mean_logprob(output):6.2f}")
        for completion in output.outputs:
            print(f"  {completion.index}  {' '.join(completion.text.split())}")


if __name__ == "__main__":
    main()
