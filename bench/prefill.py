"""Prompts on a GPU: tokens a second, and the share of the chip's arithmetic that the model's own work takes.

    python bench/prefill.py [--shapes 0.6B 1.5B 3B 7B llama1B llama8B] [--rehearse]

Only what the model must do is counted: two operations per weight and token (the head once per prompt), and causal
attention. The shares are of 790 TFLOP/s, which a large bfloat16 product reaches on an H200, and of the data sheet's
989. Random weights and prompts, one token drawn, the prefix cache empty; best of three. --rehearse runs tiny models and
prompts, on a CPU too: its figures mean nothing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu import engine  # type: ignore[import-not-found]
from gpu_workloads import COMMON, REHEARSAL, SHAPES  # type: ignore[import-not-found]

from ramify import LLM, SamplingParams

REACHED, DATA_SHEET = 790e12, 989e12
PROMPTS = ((1, 8192), (8, 1024), (16, 512), (64, 128))  # number and length
LONGEST = 9_216


def operations(shape: str, prompts: int, length: int) -> float:
    facts = {**COMMON, **SHAPES[shape]}
    hidden, inner, layers = facts["hidden_size"], facts["intermediate_size"], facts["num_hidden_layers"]
    heads, kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
    head_dim = facts.get("head_dim", hidden // heads)
    weights = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden + 3 * hidden * inner
    attention = 4 * heads * head_dim * length * (length + 1) / 2
    return float(prompts * (layers * (2 * weights * length + attention) + 2 * hidden * facts["vocab_size"]))


def seconds(llm: LLM, prompts: int, length: int, vocab_size: int) -> float:
    numbers = random.Random(0)
    asked = [[numbers.randint(100, vocab_size - 1) for _ in range(length)] for _ in range(prompts)]
    times = []
    for _ in range(4):
        llm.reset_prefix_cache()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(asked, SamplingParams(max_tokens=1, temperature=0, detokenize=False), use_tqdm=False)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rehearse", action="store_true", help="tiny models: only to see that everything runs")
    options = parser.parse_args()
    results = []
    print(f"{'':8}{'prompts':>12}{'tok/s':>12}{'TFLOP/s':>10}{'of 790':>9}{'of 989':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            llm = engine(shape, Path(folder, shape), rehearse=options.rehearse, max_model_len=LONGEST)
            facts = {**COMMON, **SHAPES[shape], **(REHEARSAL if options.rehearse else {})}
            for prompts, length in [(few, long // 32) for few, long in PROMPTS] if options.rehearse else PROMPTS:
                took = seconds(llm, prompts, length, facts["vocab_size"])
                speed = operations(shape, prompts, length) / took
                result = {
                    "shape": shape,
                    "prompts": prompts,
                    "length": length,
                    "tok_s": round(prompts * length / took),
                    "tflop_s": round(speed / 1e12, 1),
                    "share_of_reached": round(speed / REACHED, 3),
                    "mfu": round(speed / DATA_SHEET, 3),
                }
                results.append(result)
                print(
                    f"{shape:8}{f'{prompts} x {length}':>12}{result['tok_s']:12,}{result['tflop_s']:10.1f}"
                    f"{speed / REACHED:9.1%}{speed / DATA_SHEET:9.1%}",
                    flush=True,
                )
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    told = {"engine": "ramify", "workload": "prefill", "results": results, "machine": machine}
    print(json.dumps({**told, "commit": commit.stdout.strip()}))


if __name__ == "__main__":
    main()
