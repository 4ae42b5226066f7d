"""Two models on a CPU: a mixture of teacher and student beside each of them alone, in turns, in one process.

The teacher is the default model with the answer in its prompt, the student the same model without it: 32 problems, 2
samples each, in one batch. The mixture computes every position of both sides, so the two runs alone are its floor; what
it adds is the search for alpha over the whole vocabulary, once per token.

    python bench/optimal.py PROBLEMS.jsonl [--repeats 2] [--save FILE]

PROBLEMS has a question and an answer a line (examples/problems/gsm8k_50.jsonl is one). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_process import wait_until_quiet  # type: ignore[import-not-found]
from machine import processor_name  # type: ignore[import-not-found]

from ramify import LLM, OptimalSampling, SamplingParams

NUM_PROBLEMS, SAMPLES, TOKENS = 32, 2, 48
GOAL = 1.2  # times the sum of the two models alone
OPTIONS = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 0}


def prompts_of(path: Path) -> tuple[list[str], list[str]]:
    """The teacher's prompts and the student's."""
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:NUM_PROBLEMS]]
    assert len(problems) == NUM_PROBLEMS, f"{path} has too few problems"
    theta = [f"Question: {problem['question']}\nSolution:" for problem in problems]
    return [
        f"{prompt} {problem['answer']}\nIn other words:" for prompt, problem in zip(theta, problems, strict=True)
    ], theta


def alone(llm: LLM, prompts: list[str]) -> Callable[[], int]:
    params = SamplingParams(n=SAMPLES, **OPTIONS)  # type: ignore[arg-type]

    def run() -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return run


def mixed(prompts: list[str], theta_prompts: list[str]) -> Callable[[], int]:
    sampler = OptimalSampling("smollm2-135m", "smollm2-135m")

    def run() -> int:
        sampler.reset_prefix_cache()
        return sum(sampler.generate(prompts, theta_prompts, n=SAMPLES, use_tqdm=False, **OPTIONS).num_tokens)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quiet", action="store_true", help="start each run only while nobody else computes (Linux)")
    parser.add_argument("--save", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()
    teacher, theta = prompts_of(options.problems)
    llm = LLM()
    runs = {"teacher64": alone(llm, teacher), "student64": alone(llm, theta), "optimal64": mixed(teacher, theta)}
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(options.repeats + 1):
        for name, run in runs.items():
            if options.quiet:
                wait_until_quiet()
            start = time.perf_counter()
            assert run() == NUM_PROBLEMS * SAMPLES * TOKENS
            seconds = time.perf_counter() - start
            if turn:  # the first is a warm-up
                best[name] = min(best[name], seconds)
            print(f"{name:<12}{seconds:8.1f} s{'' if turn else '  (warm-up)'}", flush=True)
    ratio = best["optimal64"] / (best["teacher64"] + best["student64"])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": f"python bench/optimal.py --repeats {options.repeats}",
    }
    print(f"the mixture takes {ratio:.2f} times both models alone (goal: at most {GOAL})")
    if options.save:
        total = NUM_PROBLEMS * SAMPLES * TOKENS
        with options.save.open("a") as file:
            for name, seconds in best.items():
                line = {"engine": "ramify", "workload": name, "tok_s": round(total / seconds, 1), **facts}
                file.write(json.dumps(line) + "\n")
    print(
        json.dumps({"ratio": round(ratio, 3), **{name: round(seconds, 2) for name, seconds in best.items()}, **facts})
    )


if __name__ == "__main__":
    main()
