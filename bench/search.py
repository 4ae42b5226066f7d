"""Beam search on a CPU: Ramify and `transformers` on the same work, in turns, in one process.

Regime: a handful of rows, so a step is bound by reading the weights once. What differs is how beams are reordered
(blocks forked, or a cache copied) and what is done besides the products.

    python bench/search.py [--repeats 3] [--save FILE]

Counts steps per second: one step extends all beams by a token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from machine import processor_name  # type: ignore[import-not-found]
from workloads import MODEL_SHAPE  # type: ignore[import-not-found]

PROMPT_LENGTH, WIDTH, STEPS = 11, 8, 32
GOAL = 2.0  # times transformers


def ramify_search(folder: str, prompt: list[int]) -> Callable[[], None]:
    from ramify import LLM, SamplingParams

    llm = LLM(folder, load_format="dummy", max_model_len=2048)
    params = SamplingParams(
        strategy="beam_search", n=WIDTH, beam_width=WIDTH, max_tokens=STEPS, ignore_eos=True, detokenize=False
    )

    def run() -> None:
        llm.reset_prefix_cache()
        outputs = llm.generate([prompt], params, use_tqdm=False)[0].outputs
        assert [len(beam.token_ids) for beam in outputs] == [STEPS] * WIDTH

    return run


def transformers_search(folder: str, prompt: list[int]) -> Callable[[], None]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])

    def run() -> None:
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                do_sample=False,
                max_new_tokens=STEPS,
                pad_token_id=0,
            )
        assert tuple(made.shape) == (WIDTH, PROMPT_LENGTH + STEPS)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()
    numbers = random.Random(0)
    prompt = [numbers.randrange(100, 49_000) for _ in range(PROMPT_LENGTH)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL_SHAPE))
        searches = {"ramify": ramify_search(folder, prompt), "transformers": transformers_search(folder, prompt)}
        best = dict.fromkeys(searches, 0.0)
        for turn in range(options.repeats + 1):  # the first turn warms up
            for name, run in searches.items():
                start = time.perf_counter()
                run()
                if turn > 0:
                    best[name] = max(best[name], STEPS / (time.perf_counter() - start))
    ratio = best["ramify"] / best["transformers"]
    print(f"beam8: ramify {best['ramify']:.1f} steps/s, transformers {best['transformers']:.1f}: {ratio:.2f}x", end=" ")
    print(f"(goal {GOAL}x)")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
        "command": f"python bench/search.py --repeats {options.repeats}",
    }
    lines = [{"engine": name, "workload": "beam8", "steps_s": round(speed, 2), **facts} for name, speed in best.items()]
    if options.save:
        with options.save.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(json.dumps({"results": best, "ratio": round(ratio, 3), **facts}))


if __name__ == "__main__":
    main()
