"""How much steadier arithmetic sampling makes estimates and majority votes than independent samples, from seed to seed.

    python bench/arithmetic.py [--problems 12] [--n 8] [--seeds 16]

Of each problem (`examples/problems/small_tasks.jsonl`) both strategies draw n answers under each of many seeds. The
estimates are, of a set of n: the share of right answers, the share of the answer that is most frequent over all seeds,
and whether the majority is right. Their variances over the seeds are averaged over the problems; a ratio below 1 speaks
for arithmetic sampling. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from machine import commit, machine_name  # type: ignore[import-not-found]

from ramify import LLM, SamplingParams
from ramify.sampling_params import SamplingStrategy

PROBLEMS = Path(__file__).parents[1] / "examples" / "problems" / "small_tasks.jsonl"
WORD = re.compile(r"[\w-]*\d[\w-]*")
STRATEGIES = SamplingStrategy.PARALLEL, SamplingStrategy.ARITHMETIC


def answer_in(text: str) -> str | None:
    """The last word with a digit: numbers and dates alike."""
    words = WORD.findall(text.replace(",", ""))
    return words[-1] if words else None


def sets_of_answers(
    llm: LLM, question: str, strategy: SamplingStrategy, options: argparse.Namespace
) -> list[list[str | None]]:
    """n answers for each seed."""
    messages = [{"role": "user", "content": question}]
    params = [
        SamplingParams(strategy=strategy, n=options.n, seed=seed, temperature=0.8, max_tokens=options.max_tokens)
        for seed in range(options.seeds)
    ]
    outputs = llm.chat([messages] * options.seeds, params, use_tqdm=False)
    return [[answer_in(each.text) for each in output.outputs] for output in outputs]


def estimates(sets: list[list[str | None]], right: str, usual: str | None) -> dict[str, list[float]]:
    """One number a set, by the name of the estimate."""
    return {
        "share of right answers": [statistics.fmean(answer == right for answer in answers) for answers in sets],
        "share of the usual answer": [statistics.fmean(answer == usual for answer in answers) for answers in sets],
        "majority is right": [float(Counter(answers).most_common(1)[0][0] == right) for answers in sets],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args()

    problems = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    problems = [each for each in problems if any(letter.isdigit() for letter in each["answer"])][: options.problems]
    llm = LLM(max_num_seqs=128)
    found: dict[str, dict[str, list[list[float]]]] = {strategy.value: {} for strategy in STRATEGIES}
    for number, problem in enumerate(problems, 1):
        sets = {strategy: sets_of_answers(llm, problem["question"], strategy, options) for strategy in STRATEGIES}
        everything = [answer for each in sets.values() for answers in each for answer in answers]
        usual = Counter(everything).most_common(1)[0][0]
        for strategy, of_strategy in sets.items():
            for name, values in estimates(of_strategy, problem["answer"], usual).items():
                found[strategy.value].setdefault(name, []).append(values)
        print(f"{number} of {len(problems)} problems", file=sys.stderr)

    results = {}
    for name in next(iter(found.values())):
        independent, spread = (found[strategy.value][name] for strategy in STRATEGIES)
        variances = [statistics.fmean(map(statistics.variance, each)) for each in (independent, spread)]
        means = [statistics.fmean(map(statistics.fmean, each)) for each in (independent, spread)]
        results[name] = {
            "mean": [round(mean, 4) for mean in means],
            "variance": [round(variance, 5) for variance in variances],
            "ratio": round(variances[1] / variances[0], 3) if variances[0] else None,
        }
        print(
            f"{name:<28} independent {means[0]:.3f}, arithmetic {means[1]:.3f}; variances {variances[0]:.5f} and "
            f"{variances[1]:.5f}, ratio {results[name]['ratio']}"
        )
    line = {"bench": "arithmetic", "machine": machine_name(), "commit": commit(), **vars(options), "results": results}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
