"""Speculation: what drafts save, what they cost where they are wrong, and how often a model drafts itself right.

    python bench/speculation.py texts      the default model by processor time: plain, ngram and suffix
    python bench/speculation.py table      how many of its tokens are drawn where it drafts for itself
    python bench/speculation.py imposed [--acceptance 0 0.5 0.85 1] [--workload optimal32] [--parts 1 3]

`imposed` is for a GPU (bench/imposed.py): drafts are right as often as is asked, beside the same requests without.
`--parts` tells what each part of a step takes with drafts of each length. --rehearse runs it with tiny models, on a CPU
too: its figures mean nothing. `texts` compares the tokens. The last line is JSON; --save appends it to a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_workloads import WORKLOADS  # type: ignore[import-not-found]
from imposed import imposed  # type: ignore[import-not-found]
from machine import commit, machine_name  # type: ignore[import-not-found]

from ramify import LLM, OptimalSampling, SamplingParams
from ramify.engine.core import EngineCore
from ramify.engine.drafting.pace import MOST, Pace
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.sequence import Sequence as Growing

PROGRAM = """def area_of_square(side):
    return side * side

def area_of_circle(radius):
    return 3.14159 * radius * radius

def area_of_triangle(base, height):
    return base * height / 2
"""
PROMPTS = {
    "code": f"Repeat this program exactly:\n\n{PROGRAM}\nThe program again:\n\n",
    "loop": "The list of all days, again and again: "
    + "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, " * 3,
    "story": "Once upon a time, in a small village by the sea,",
}
QUESTIONS = (
    "Why is the sky blue?",
    "How do I boil an egg?",
    "What is a prime number?",
    "Tell me about the city of Rome.",
)


def speculation_of(core: EngineCore) -> Speculation:
    assert core.scheduler.speculation is not None
    return core.scheduler.speculation


def texts(names: Sequence[str], repeats: int) -> dict[str, float]:
    """Processor seconds, in turns, the best of each."""
    engines = {kind: LLM(max_model_len=1024, speculation=kind) for kind in (None, "ngram", "suffix")}
    results: dict[str, float] = {}
    for name in names:
        prompt = PROMPTS[name]
        for temperature, n in ((0.0, 1), (0.8, 1), (0.8, 4)):
            params = SamplingParams(temperature=temperature, n=n, seed=5, max_tokens=192, ignore_eos=True)
            best = dict.fromkeys(engines, float("inf"))
            outputs: dict[str | None, list[tuple[int, ...]]] = {}
            shares = {}
            for _ in range(repeats):
                for kind, llm in engines.items():
                    before, start = llm.stats(), time.process_time()
                    [output] = llm.generate(prompt, params, use_tqdm=False)
                    best[kind] = min(best[kind], time.process_time() - start)
                    outputs[kind] = [tuple(sample.token_ids) for sample in output.outputs]
                    after = llm.stats()
                    shares[kind] = tuple(after[key] - before[key] for key in ("accepted_tokens", "drafted_tokens"))
            assert outputs[None] == outputs["ngram"] == outputs["suffix"]
            cells = [
                f"{kind} {best[None] / best[kind]:.2f} ({shares[kind][0]} of {shares[kind][1]} drawn)"
                for kind in ("ngram", "suffix")
            ]
            print(f"{name}, temperature {temperature}, n {n}: {best[None]:.2f} s plain; times: {', '.join(cells)}")
            for kind in ("ngram", "suffix"):
                results[f"{name}/{temperature}/{n}/{kind}"] = round(best[None] / best[kind], 3)
    return results


class Places:
    """Of the drafts that reached each of their places, how many were right there."""

    def __init__(self, speculation: Speculation) -> None:
        self._reached, self._right = Counter[int](), Counter[int]()
        self._note, speculation.note = speculation.note, self._count  # type: ignore[method-assign]

    def _count(self, sequence: Growing, num_drafted: int, num_accepted: int) -> None:
        for place in range(min(num_drafted, num_accepted + 1)):
            self._reached[place] += 1
            self._right[place] += place < num_accepted
        self._note(sequence, num_drafted, num_accepted)

    def shares(self) -> list[float]:
        return [self._right[place] / max(1, self._reached[place]) for place in range(MOST)]


def table(num_tokens: int) -> dict[str, list[float]]:
    """The same model with and without a system prompt, drafts always as long as they may be."""
    results: dict[str, list[float]] = {}
    for temperature in (0.0, 0.5, 1.0):
        both = OptimalSampling(
            "smollm2-135m",
            "smollm2-135m",
            alpha_method="fixed",
            alpha=1.0,
            teacher_system_prompt="You are a teacher who explains things to children in simple words.",
            enable_chat_template=True,
            max_model_len=1024,
            speculation="student",
        )
        speculation = speculation_of(both.core)
        speculation.most_rows = None
        places = Places(speculation)
        asked: dict[str, Any] = {"temperature": temperature, "seed": 2, "max_tokens": num_tokens, "ignore_eos": True}
        with patch.object(Pace, "length", return_value=MOST):
            both.generate(list(QUESTIONS), use_tqdm=False, **asked)
        shares = places.shares()
        whole = list(accumulate(shares, mul))
        print(f"temperature {temperature}: right at places 1 … {MOST}, where they were reached")
        print("   ", "  ".join(f"{share:.2f}" for share in shares))
        print("    all right up to there:", "  ".join(f"{share:.2f}" for share in whole))
        steps = [1 + sum(whole[: count + 1]) for count in range(MOST)]
        print(f"    tokens a step with drafts of 1 … {MOST}:", "  ".join(f"{count:.2f}" for count in steps))
        results[str(temperature)] = [round(share, 3) for share in shares]
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["texts", "table", "imposed"])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.85, 1.0])
    parser.add_argument("--workload", default="optimal32", choices=[name for name in WORKLOADS if "optimal" in name])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=list(PROMPTS), help="for texts")
    parser.add_argument("--tokens", type=int, default=96, help="of each output, for the table")
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[], help="what each part of a step takes with drafts of these lengths"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on whatever there is")
    parser.add_argument("--save", type=Path, help="append the last line to this file")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    results: dict[str, Any]
    if options.what == "texts":
        results = texts(options.prompts, options.repeats)
    elif options.what == "table":
        results = table(options.tokens)
    else:
        results = imposed(
            options.workload,
            options.acceptance,
            rehearse=options.rehearse,
            repeats=options.repeats,
            parts=options.parts,
        )
    line = json.dumps({"speculation": options.what, **results, "machine": machine_name(), "commit": commit()})
    print(line)
    if options.save is not None and not options.rehearse:
        with options.save.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
