"""Offline generation on one GPU: the H200 workloads, each beside its floor and vLLM's recorded figure.

Random weights of public shapes in bfloat16, random prompts, fixed output lengths, best of two after a warm-up. The
floor is the time of the matrix products and of every key and value that must be read (a shared prefix once), as
measured on the same kind of GPU; vLLM 0.26.0's figures were measured there too.

    python bench/gpu.py [--workloads plain256 …] [--save FILE]

The last line is JSON; --save appends one object per result to a file.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ramify import LLM, OptimalSampling, SamplingParams

COMMON: dict[str, Any] = {
    "vocab_size": 151_936,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40_960,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
    },
    "1.5B": {
        **QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "3B": {
        **QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "7B": {
        **QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    """num_prompts prompts and outputs with lengths in these ranges, n samples each; tokens/s of vLLM, floor and goals.

    If the model is a pair, both models see the same prompts, and vLLM has nothing to compare with.
    """

    name: str
    model: str
    num_prompts: int
    lengths: tuple[int, int]
    n: int
    outputs: tuple[int, int]
    params: dict[str, Any]
    vllm: float | None
    floor: float
    goal: float
    then: float

    def requests(self) -> tuple[list[list[int]], list[SamplingParams]]:
        numbers = random.Random(0)
        prompts, params = [], []
        for index in range(self.num_prompts):
            length = numbers.randint(*self.lengths)
            prompts.append([numbers.randint(100, 150_000) for _ in range(length)])
            seeded = {**self.params, "seed": index} if self.params.get("seed") is not None else self.params
            params.append(
                SamplingParams(
                    n=self.n, max_tokens=numbers.randint(*self.outputs), ignore_eos=True, detokenize=False, **seeded
                )
            )
        return prompts, params


_FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
_W = GpuWorkload
PAIR = "3B+1.5B"
WORKLOADS = {
    workload.name: workload
    for workload in (
        _W("mixed256", "0.6B", 256, (100, 1024), 1, (100, 1024), {"temperature": 0.6}, 24_500, 31_800, 22_000, 26_000),
        _W("plain256", "0.6B", 256, (128, 128), 1, (256, 256), {"temperature": 0.8}, 38_400, 84_000, 50_000, 67_000),
        _W("filters256", "0.6B", 256, (128, 128), 1, (256, 256), _FILTERS, 33_800, 84_000, 50_000, 65_000),
        _W(
            "seeded256", "0.6B", 256, (128, 128), 1, (256, 256), {**_FILTERS, "seed": 0}, 34_700, 84_000, 50_000, 65_000
        ),
        _W(
            "logprobs256",
            "0.6B",
            256,
            (128, 128),
            1,
            (256, 256),
            {"temperature": 0.8, "logprobs": 5},
            19_900,
            84_000,
            40_000,
            60_000,
        ),
        _W("fan1x256@8k", "1.5B", 1, (8192, 8192), 256, (256, 256), {}, 17_500, 83_000, 40_000, 62_000),
        _W("fan8x32@2k", "1.5B", 8, (2048, 2048), 32, (256, 256), {}, 35_600, 100_000, 52_000, 75_000),
        _W("fan64x8@512", "1.5B", 64, (512, 512), 8, (256, 256), {}, 44_400, 120_000, 62_000, 90_000),
        _W("student32", "1.5B", 32, (128, 128), 1, (512, 512), {"temperature": 0.8}, 13_400, 22_400, 15_500, 18_500),
        _W("teacher32", "3B", 32, (128, 128), 1, (512, 512), {}, 9_570, 13_700, 10_500, 12_000),
        _W("teacher1", "3B", 1, (128, 128), 1, (512, 512), {}, 334, 486, 370, 430),
        _W("optimal32", PAIR, 32, (128, 128), 1, (512, 512), {"temperature": 0.8}, None, 8_500, 5_000, 7_000),
        _W("fan1x256@16k7b", "7B", 1, (16_384, 16_384), 256, (128, 128), {}, 4_700, 16_900, 9_500, 13_000),
    )
}


def engine(model: str, folder: Path) -> LLM | OptimalSampling:
    shapes = model.split("+")
    folders = []
    for shape in shapes:
        folders.append(folder / shape)
        folders[-1].mkdir(parents=True, exist_ok=True)
        (folders[-1] / "config.json").write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": 512,
        "max_model_len": 17_408 if model == "7B" else 9_216,
        "gpu_memory_utilization": 0.85,
    }
    if len(folders) == 2:
        return OptimalSampling(*map(str, folders), **options)
    return LLM(str(folders[0]), **options)


def run(llm: LLM | OptimalSampling, workload: GpuWorkload) -> float:
    llm.reset_prefix_cache()
    prompts, params = workload.requests()
    start = time.perf_counter()
    if isinstance(llm, OptimalSampling):
        options = {**workload.params, "max_tokens": workload.outputs[0], "ignore_eos": True, "detokenize": False}
        outputs = llm.generate(prompts, use_tqdm=False, **options).outputs
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "machine": torch.cuda.get_device_name(),
        "commit": commit.stdout.strip(),
        "command": f"python bench/gpu.py --repeats {options.repeats}",
    }
    print(f"{'workload':<16}{'tok/s':>9}{'floor':>9}{'of it':>7}{'vLLM':>9}{'times':>7}{'goal':>9}", flush=True)
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in (*SHAPES, PAIR):
            chosen = [WORKLOADS[name] for name in options.workloads if WORKLOADS[name].model == model]
            if not chosen:
                continue
            start = time.perf_counter()
            llm = engine(model, Path(folder))
            print(f"{model}: ready in {time.perf_counter() - start:.1f} s", file=sys.stderr)
            for workload in chosen:
                run(llm, workload)  # graphs are captured, kernels compiled
                speed = max(run(llm, workload) for _ in range(options.repeats))
                results[workload.name] = speed
                print(
                    f"{workload.name:<16}{speed:9,.0f}{workload.floor:9,.0f}{speed / workload.floor:7.0%}"
                    f"{f'{workload.vllm:9,.0f}{speed / workload.vllm:7.2f}' if workload.vllm else ' ' * 16}"
                    f"{workload.goal:9,.0f}"
                    f"{'' if speed < workload.goal else '  met' if speed < workload.then else '  met, and the next'}",
                    flush=True,
                )
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    if {"optimal32", "teacher32"} <= set(results):  # both made equally many tokens
        ratio = results["teacher32"] / results["optimal32"]
        print(f"optimal32 takes {ratio:.2f} times teacher32's time (floor 1.61, goal 2.0, then 1.75)")
    lines = [{"engine": "ramify", "workload": name, "tok_s": round(speed), **facts} for name, speed in results.items()]
    if options.save:
        with options.save.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(json.dumps({"results": {name: round(speed) for name, speed in results.items()}, **facts}))


if __name__ == "__main__":
    main()
