"""What the mixture does to samples: how likely they are to each model, for teacher, student and mixture alone.

    python bench/likelihood.py problems.jsonl --problems 200

The default model is both: the teacher sees each problem with its solution, the student without (the preset math_qa). In
one context each of these numbers is monotonic in α (docs/theory.md); whether they are over whole samples can only be
observed, which is done here. Means are over all drawn tokens; the error is that of the mean over problems.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ramify.distill.problems import Problem, read_problems
from ramify.distill.recipe import Recipe, load_preset
from ramify.distill.samples import prompts_of
from ramify.optimal import OptimalSampling
from ramify.outputs import MixtureReport, RequestOutput

SOURCES: dict[str, dict[str, Any]] = {
    "student alone": {"alpha_method": "fixed", "alpha": 0.0},
    "mixture": {"alpha_method": "kl_symmetry"},
    "teacher alone": {"alpha_method": "fixed", "alpha": 1.0},
}
COLUMNS: dict[str, Callable[[MixtureReport], float]] = {
    "KL(q‖π_θ)": lambda report: report.kl_theta,
    "KL(q‖π_t)": lambda report: report.kl_teacher,
    "log π_t − log π_θ": lambda report: report.logprob_teacher - report.logprob_theta,
    "log π_θ": lambda report: report.logprob_theta,
    "log π_t": lambda report: report.logprob_teacher,
    "α": lambda report: report.alpha,
}


def sample(recipe: Recipe, problems: Sequence[Problem]) -> list[RequestOutput]:
    sampler = OptimalSampling(preset=recipe, max_model_len=2048, say=lambda text: print(text, file=sys.stderr))
    requests = [
        sampler.request(
            *prompts_of(problem, recipe), recipe.sampling(recipe.problem_seed(problem.line, problem.digest))
        )
        for problem in problems
    ]
    outputs = []
    for output in sampler.finish(iter(requests), most_at_once=64):
        outputs.append(output)
        print(f"\r{len(outputs)} of {len(problems)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return outputs


def summary(outputs: Sequence[RequestOutput]) -> dict[str, tuple[float, float]]:
    """Each column's mean over tokens and the error of that mean, estimated from the problems' means."""
    by_problem = [_reports(output) for output in outputs]
    means = {}
    for name, column in COLUMNS.items():
        values = [[column(report) for report in reports] for reports in by_problem if reports]
        mean = statistics.fmean(value for row in values for value in row)
        spread = statistics.stdev([statistics.fmean(row) for row in values]) if len(values) > 1 else 0.0
        means[name] = mean, spread / len(values) ** 0.5
    return means


def _reports(output: RequestOutput) -> list[MixtureReport]:
    return [report for sample in output.outputs for report in sample.mixture or ()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    problems, _ = read_problems(options.path, limit=options.problems)
    recipe = load_preset("math_qa").changed(
        {"n": 1, "max_tokens": options.max_tokens, "seed": options.seed, "min_length": 0}
    )
    results = {}
    print("| drawn from | tokens | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 2))
    for name, changes in SOURCES.items():
        outputs = sample(recipe.changed(changes | {"force_teacher_special_tokens": False}), problems)
        means = summary(outputs)
        count = sum(len(_reports(output)) for output in outputs)
        cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in means.values()]
        print(f"| {name} | {count:,} | " + " | ".join(cells) + " |", flush=True)
        results[name] = {"tokens": count} | {column: mean for column, (mean, _) in means.items()}
    print(json.dumps({"problems": len(problems), "max_tokens": options.max_tokens, "results": results}))


if __name__ == "__main__":
    main()
