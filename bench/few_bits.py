"""Weights of few bits on one GPU: engines beside bfloat16, products by the number of rows, and a pair's memory.

    python bench/few_bits.py engines [--workloads teacher1 teacher32] [--forms bf16 gptq4 gptq8 fp8] [--save FILE]
    python bench/few_bits.py products [--shape 3B] [--rows 1 2 … 4096]
    python bench/few_bits.py pair [--card 80]

Weights are random (load_format="dummy"), in the bits that a quantization_config says. `engines` runs workloads of
bench/gpu.py. `products` times the matrices of a model's layers: bound by reading them, four bits would take 0.27 of
bfloat16's time and FP8 0.52. `pair` prints the memory of a 32B teacher in 4 bits beside a 7B student in bfloat16, as
counted and, on a GPU, as measured. --rehearse runs the first and the last with tiny models, on a CPU too. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu import MEMORY_SHARE, measure  # type: ignore[import-not-found]
from gpu_peak import Peak  # type: ignore[import-not-found]
from gpu_workloads import COMMON, QWEN2, REHEARSAL, SHAPES, WORKLOADS  # type: ignore[import-not-found]

from ramify import LLM, OptimalSampling
from ramify.models.families import Architecture, architecture_from_config
from ramify.models.number_formats import FP8_FORMAT, group_format

GPTQ: dict[str, Any] = {"quant_method": "gptq", "group_size": 128, "sym": True}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "gptq4": {"quantization_config": {**GPTQ, "bits": 4}},
    "gptq8": {"quantization_config": {**GPTQ, "bits": 8}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
}
TEACHER_32B: dict[str, Any] = {
    **QWEN2,
    "hidden_size": 5120,
    "intermediate_size": 27_648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}
TINY = {**REHEARSAL, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
GB = 10**9


def folder_of(folder: Path, name: str, facts: dict[str, Any], *, rehearse: bool) -> Path:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**COMMON, **facts, **(TINY if rehearse else {})}))
    return path


def weight_bytes(arch: Architecture) -> int:
    """On a GPU: matrices of layers in their blocks, all else in 16 bits."""
    outside = arch.vocab_size * arch.hidden_size * (1 if arch.tie_embeddings else 2)
    inside = arch.num_weights - outside
    if arch.quantization is None:
        return 2 * arch.num_weights
    held = FP8_FORMAT if arch.quantization.method == "fp8" else group_format(arch.quantization.bits, 128, 128)
    assert held is not None, "blocks of 128"
    return 2 * outside + held.size(inside)


def kv_bytes(arch: Architecture) -> int:
    """Of a token, in 16 bits."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * 2


def engines(options: argparse.Namespace) -> dict[str, Any]:
    speeds: dict[str, float] = {}
    models = {WORKLOADS[name].model: None for name in options.workloads}
    for model, form in itertools.product(models, options.forms):
        with tempfile.TemporaryDirectory() as folder:
            path = folder_of(Path(folder), form, {**SHAPES[model], **FORMS[form]}, rehearse=options.rehearse)
            llm = LLM(str(path), load_format="dummy", max_model_len=2_048, gpu_memory_utilization=MEMORY_SHARE)
        for name in options.workloads:
            workload = WORKLOADS[name].rehearsed() if options.rehearse else WORKLOADS[name]
            if WORKLOADS[name].model != model:
                continue
            result = measure(llm, workload, options.repeats)
            speeds[f"{name}/{form}"] = round(result.tokens_per_second)
            beside = speeds[f"{name}/{form}"] / max(speeds.get(f"{name}/bf16", 0), 1)
            told = f"{beside:.2f} of bf16" if f"{name}/bf16" in speeds else ""
            print(f"{name:<12}{form:<8}{result.tokens_per_second:10,.0f} tok/s  {told}", flush=True)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return {"tok_s": speeds}


def products(options: argparse.Namespace) -> dict[str, Any]:
    """Each matrix as the decoder multiplies it, with so many copies that none stays in the cache.

    As little around it as there can be: one row's norm and residual are part of its kernels, those of more rows not.
    """
    from products import products_of  # type: ignore[import-not-found]

    from ramify.gpu.kernels.row_product import Norm
    from ramify.gpu.packed_parts import DevicePacking
    from ramify.gpu.packed_weight import PackedWeight
    from ramify.gpu.products import Stream, dense_weights
    from ramify.gpu.tuning import GraphStopwatch
    from ramify.models.linear import Linear
    from ramify.models.packed_quants import random_blocks
    from ramify.models.quantization_config import quantization_from_config

    device, dtype = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    stopwatch, times = GraphStopwatch(device), dict[str, float]()
    print(f"{'rows':>6}{'product':>10}" + "".join(f"{form:>12}" for form in options.forms) + "   microseconds")
    for name, each, _ in products_of(options.shape)[:-1]:
        copies: dict[str, list[Any]] = {}
        for form in options.forms:
            quantization = quantization_from_config(FORMS[form])
            linears = []
            for _ in range(max(2, (2**28 if quantization is None else 2**30) // each.num_bytes)):
                linears.append(Linear(torch.empty(each.outputs, each.columns, dtype=dtype, device="meta")))
                if quantization is None:
                    linears[-1].weight = torch.randn(each.outputs, each.columns, device=device, dtype=dtype)
                else:
                    blocks = random_blocks(quantization, (each.outputs, each.columns), generator)
                    linears[-1].put(0, blocks, DevicePacking(device, dtype))
            packed = [PackedWeight(linear) for linear in linears if linear.parts]
            copies[form] = packed or dense_weights(each.role, linears, None)
        for rows in options.rows:
            x, line = torch.randn(rows, each.columns, device=device, dtype=dtype), f"{rows:>6}{name:>10}"
            norm = Norm(torch.ones(each.columns, dtype=dtype, device=device), 1e-6)
            stream, after = Stream(x), Stream(torch.zeros(rows, each.outputs, dtype=dtype, device=device))
            gated = torch.empty(rows, each.tiled_outputs, dtype=dtype, device=device)
            stream.normed = lambda norm, x=x: x  # type: ignore[method-assign, misc]  # noqa: ARG005

            def launch(form: Any) -> None:
                for weight in copies[form]:  # noqa: B023
                    if each.role == "gate_up":  # noqa: B023
                        weight.gated_from_stream(stream, norm, gated)  # noqa: B023
                    elif each.role == "added" and rows == 1:  # noqa: B023
                        weight.into_stream(x, after)  # noqa: B023
                    else:
                        weight.from_stream(stream, norm)  # noqa: B023

            for form, took in zip(options.forms, stopwatch(launch, options.forms), strict=True):
                times[f"{name}/{rows}/{form}"] = round(took / len(copies[form]) * 1e6, 2)
                line += f"{times[f'{name}/{rows}/{form}']:12.1f}"
            print(line, flush=True)
    return {"microseconds": times}


def pair(options: argparse.Namespace) -> dict[str, Any]:
    card = int(options.card * GB)
    with tempfile.TemporaryDirectory() as folder:
        facts = {"teacher": {**TEACHER_32B, **FORMS["gptq4"]}, "student": SHAPES["7B"]}
        paths = [folder_of(Path(folder), name, each, rehearse=options.rehearse) for name, each in facts.items()]
        archs = [architecture_from_config(json.loads((path / "config.json").read_text())) for path in paths]
        needed, each_token = sum(map(weight_bytes, archs)), sum(map(kv_bytes, archs))
        for path, arch in zip(paths, archs, strict=True):
            print(f"{path.name:<10}{weight_bytes(arch) / GB:8.2f} GB of weights, {kv_bytes(arch):,} bytes a token")
        left = int(0.9 * card) - needed
        print(
            f"together  {needed / GB:8.2f} GB; of 0.9 of {options.card} GB are left {left / GB:.1f} GB for the largest"
        )
        print(
            f"          step and {left // each_token:,} tokens of both caches ({each_token:,} bytes each)", flush=True
        )
        told: dict[str, Any] = {"counted_gb": round(needed / GB, 3), "tokens": left // each_token}
        if not torch.cuda.is_available() and not options.rehearse:
            return told
        share = (
            min(0.9, 0.9 * card / torch.cuda.get_device_properties(0).total_memory)
            if torch.cuda.is_available()
            else 0.9
        )
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        Peak.begin()
        llm = OptimalSampling(
            *map(str, paths),
            load_format="dummy",
            max_model_len=512 if options.rehearse else 4_096,
            max_num_seqs=16,
            gpu_memory_utilization=share,
        )
        outputs = llm.generate([[1, 2, 3]] * 4, max_tokens=16, ignore_eos=True, use_tqdm=False).outputs
    assert all(len(output.outputs[0].token_ids) == 16 for output in outputs), "every request is answered"
    peak = Peak.since_begin(share)
    if peak is not None:
        held = sum(decoder.num_bytes for decoder in llm._engine.decoders) if llm._engine is not None else 0
        print(f"measured: weights {held / GB:.2f} GB (before: {before / GB:.2f} GB in use); {peak}", flush=True)
        told |= {"held_gb": round(held / GB, 3), **peak.as_dict()}
    return told


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["engines", "products", "pair"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["teacher1", "teacher32"])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["bf16", "gptq4", "fp8"])
    parser.add_argument("--shape", choices=list(SHAPES), default="3B")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--card", type=float, default=80.0, help="GB of the card that the pair is to fit")
    parser.add_argument("--rehearse", action="store_true", help="tiny models: only to see that everything runs")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and (
        options.what == "products" or (options.what == "engines" and not options.rehearse)
    ):
        parser.error("there is no GPU here; --rehearse runs engines and pair with tiny models without one")
    measured = {"engines": engines, "products": products, "pair": pair}[options.what](options)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    line = json.dumps({"what": options.what, "machine": machine, **measured})
    if options.save is not None:
        with options.save.open("a") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
