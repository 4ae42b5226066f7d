"""What every control costs on a CPU: the same samples with it and without, in turns, in one process.

    python bench/controls.py [--rows 32] [--output 32] [--repeats 3] [--controls penalties top_p …] [--save FILE]

Regime: the default model, prompts of 64 random ids, outputs of a fixed length. Of a step, products take most; a control
that reads the whole vocabulary of each row a few times more shows beside them, and the smaller the model, the more. A
ratio is the plain samples' best time by those of the same rows with the control; searches have as many rows as samples.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from machine import processor_name  # type: ignore[import-not-found]

from ramify import LLM, SamplingParams

PROMPT_LENGTH = 64
SIBLINGS = 8  # of what looks at siblings
GOAL, GOAL_OF_SEARCHES = 0.9, 0.5
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 400}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Control:
    """`twin`: what it is compared with, if that is not plain samples; `goal`: the ratio that is wanted."""

    params: dict[str, Any]
    n: int = 1
    twin: str = "plain"
    goal: float | None = GOAL
    is_fixed: bool = field(default=True)  # whether outputs have one length


def _siblings(goal: float, **params: Any) -> Control:
    return Control(params, SIBLINGS, "fans", goal)


CONTROLS = {
    "plain": Control({}, goal=None),
    "fans": Control({}, SIBLINGS, goal=None),
    "greedy": Control({"temperature": 0}),
    "temperature": Control({"temperature": 0.7}),
    "top_k": Control({"top_k": 50}),
    "top_p": Control({"top_p": 0.95}),
    "top_k, top_p": Control({"top_k": 50, "top_p": 0.9}),
    "min_p": Control({"min_p": 0.05}),
    "hot top_p": Control({"temperature": 2.0, "top_p": 0.95}),
    "penalties": Control({"repetition_penalty": 1.1, "presence_penalty": 0.2}),
    "bias": Control({"logit_bias": {100: 2.0, 200: -2.0}, "min_p": 0.05}),
    "allowed": Control({"allowed_token_ids": list(range(1000, 2000))}),
    "bad words": Control({"bad_words": ["terrible", "awful", "bad"]}),
    "min_tokens": Control({"min_tokens": 16}),
    "logprobs": Control({"logprobs": 5}),
    "top_n_sigma": Control({"top_n_sigma": 1.0}),
    "typical_p": Control({"typical_p": 0.9}),
    "eta_cutoff": Control({"eta_cutoff": 3e-4}),
    "top_a": Control({"top_a": 0.2}),
    "p_less": Control({"p_less": True}),
    "mirostat": Control({"mirostat_tau": 5.0}),
    "xtc": Control({"xtc_probability": 0.5}),
    "dynatemp": Control({"dynatemp_range": 0.5}),
    "smoothing": Control({"smoothing_factor": 0.2}),
    "ngrams": Control({"no_repeat_ngram_size": 3}),
    "dry": Control({"dry_multiplier": 0.8}),
    "processor": Control({"logits_processors": [lambda _, logits: logits]}, goal=None),
    "schema": Control({"structured_outputs": {"json": SCHEMA}}, goal=None, is_fixed=False),
    "best_of": Control({"best_of": SIBLINGS}, twin="fans"),
    "beams": _siblings(GOAL_OF_SEARCHES, strategy="beam_search"),
    "diverse": _siblings(GOAL_OF_SEARCHES, strategy="diverse", diversity_penalty=0.5),
    "without_replacement": _siblings(GOAL_OF_SEARCHES, strategy="without_replacement"),
    "arithmetic": _siblings(GOAL_OF_SEARCHES, strategy="arithmetic"),
}


class Bench:
    def __init__(self, llm: LLM, rows: int, output: int) -> None:
        self._llm, self._rows, self._output = llm, rows, output
        numbers = random.Random(0)
        self._prompts = [[numbers.randrange(100, 49_000) for _ in range(PROMPT_LENGTH)] for _ in range(rows)]

    def seconds_a_token(self, control: Control) -> float:
        """With as many rows as `rows`, whatever n is."""
        num_rows: int = control.params.get("best_of", control.n)
        ends: dict[str, Any] = {"ignore_eos": True} if control.is_fixed else {}
        seeded = {} if "strategy" in control.params else {"seed": 0}
        params = SamplingParams(**{"n": control.n, "max_tokens": self._output, **seeded, **ends, **control.params})
        self._llm.reset_prefix_cache()
        prompts = self._prompts[: max(1, self._rows // num_rows)]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        drawn = sum(len(sample.token_ids) for each in outputs for sample in each.outputs)
        return seconds / max(drawn, 1) * control.n / num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder or a file (default: the embedded model)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--output", type=int, default=32, help="tokens of each sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--controls", nargs="+", choices=CONTROLS, default=list(CONTROLS))
    parser.add_argument("--save", type=Path, help="append the result to this file")
    options = parser.parse_args()
    bench = Bench(LLM(options.model, max_num_seqs=max(256, options.rows)), options.rows, options.output)
    ratios = {}
    for name in options.controls:
        control = CONTROLS[name]
        if control.goal is None and name in {"plain", "fans"}:
            continue
        twin, own = [], []
        for turn in range(options.repeats + 1):  # the first turn warms up
            times = bench.seconds_a_token(CONTROLS[control.twin]), bench.seconds_a_token(control)
            if turn:
                twin.append(times[0])
                own.append(times[1])
        ratios[name] = round(min(twin) / min(own), 3)
        goal = "" if control.goal is None else f"goal {control.goal}"
        print(
            f"{name:20} {1 / min(own):7.1f} tok/s beside {1 / min(twin):7.1f}: {ratios[name]:.2f}  {goal}", flush=True
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "engine": "ramify",
        "workload": "controls",
        "ratios": ratios,
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": f"python bench/controls.py --rows {options.rows} --output {options.output}",
    }
    if options.save:
        with options.save.open("a") as file:
            file.write(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
