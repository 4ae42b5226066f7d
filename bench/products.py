"""Matrix products of a decode step, as the decoder computes them after measuring: the form it chose beside cuBLAS.

Regime: 1 to 512 rows in bfloat16. Each time is that of a CUDA graph over several weights of one shape (together many
times the cache, as in a model), divided by their number: alone, and with the kernels around it (norm before, parts
added up after), which is what the choice is made by. Every chosen form is first compared with float32. Kernels are
compiled before anything is timed, on all cores.

    python bench/products.py [--shapes 0.6B 1.5B 3B 7B llama1B llama8B] [--rows 1 8 32 64 256 512] [--cache FOLDER]
                             [--save FILE]

`share` is that of the time which binds: reading weight and rows at 4.3 TB/s, or multiplying at 790 TFLOP/s. The last
line is JSON: for each model and number of rows the ms of all products of a step, by cuBLAS and as chosen. --save writes
all rows of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent))

from gpu_workloads import COMMON, SHAPES  # type: ignore[import-not-found]

from ramify.gpu.form_cache import FormCache, machine_of, spell_form
from ramify.gpu.kernels.row_product import Norm, RowTiles
from ramify.gpu.product_candidates import Chip, candidates
from ramify.gpu.product_forms import Form, OneForm, Product, Role, Vendor
from ramify.gpu.products import TRIAL_BYTES, DenseWeight, Stream, trial_of
from ramify.gpu.tuning import GraphStopwatch, MeasuredForms, Trial
from ramify.models.linear import Linear

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
BANDWIDTH, OPERATIONS = 4.3e12, 790e12
TOLERANCE = 1e-2  # of the norm, for rounded factors
ROWS = [1, 8, 32, 64, 256, 512]
FAMILIES = [shape for shape in SHAPES if not shape.startswith("text")]  # that one is another's shape


@dataclass(frozen=True)
class Line:
    """Of one product: microseconds alone and among its neighbours, by cuBLAS and as chosen."""

    shape: str
    product: str
    rows: int
    form: str
    cublas: float
    chosen: float
    cublas_with_neighbours: float
    chosen_with_neighbours: float
    share: float


def products_of(shape: str) -> list[tuple[str, Product, int]]:
    """Name, weight and how many of it a model has."""
    facts = {**COMMON, **SHAPES[shape]}
    hidden, inner, layers = facts["hidden_size"], facts["intermediate_size"], facts["num_hidden_layers"]
    head_dim = facts.get("head_dim", hidden // facts["num_attention_heads"])
    queries, keys = facts["num_attention_heads"] * head_dim, facts["num_key_value_heads"] * head_dim
    weights: list[tuple[str, Role, int, int, int]] = [
        ("qkv", "read", queries + 2 * keys, hidden, layers),
        ("output", "added", hidden, queries, layers),
        ("gate_up", "gate_up", 2 * inner, hidden, layers),
        ("down", "added", hidden, inner, layers),
        ("head", "head", facts["vocab_size"], hidden, 1),
    ]
    return [(name, Product(role, outputs, columns, DTYPE), count) for name, role, outputs, columns, count in weights]


def alone(product: Product, linears: Sequence[Linear], rows: int) -> Trial:
    """Nothing but the products; one row's own form has norm or residual in it."""
    stream = Stream(torch.randn(rows, product.columns, dtype=DTYPE, device=DEVICE))
    after = Stream(torch.randn(rows, product.outputs, dtype=DTYPE, device=DEVICE))
    gated = torch.empty(rows, product.tiled_outputs, dtype=DTYPE, device=DEVICE)
    logits = torch.empty(rows if product.role == "head" else 0, product.outputs, device=DEVICE)
    norm = Norm(torch.ones(product.columns, dtype=DTYPE, device=DEVICE), 1e-6)
    normed = stream.normed(norm)
    stream.normed = lambda norm: normed  # type: ignore[method-assign]  # noqa: ARG005

    def launch(form: Form) -> None:
        for linear in linears:
            weight = DenseWeight(linear, OneForm(form))
            if product.role == "gate_up":
                weight.gated_from_stream(stream, norm, gated)
            elif product.role == "head":
                weight.logits(normed, logits)
            elif product.role == "added" and isinstance(form, RowTiles):
                weight.into_stream(normed, after)
            else:
                weight.from_stream(stream, norm)

    return launch


def check(product: Product, linear: Linear, rows: int, form: Form) -> None:
    x = torch.randn(rows, product.columns, dtype=DTYPE, device=DEVICE)
    norm = Norm(torch.ones(product.columns, dtype=DTYPE, device=DEVICE), 1e-6)
    weight = DenseWeight(linear, OneForm(form))
    expected = F.rms_norm(x.float(), (product.columns,)) @ linear.weight.float().t()
    if product.role == "gate_up":
        gate, up = expected.chunk(2, dim=-1)
        expected, found = F.silu(gate) * up, torch.full((rows, product.tiled_outputs), torch.nan, device=DEVICE)
        found = found.to(DTYPE)
        weight.gated_from_stream(Stream(x), norm, found)
    elif product.role == "head":
        expected, found = x.float() @ linear.weight.float().t(), torch.full_like(expected, torch.nan)
        weight.logits(x, found)
    else:
        found = weight.from_stream(Stream(x), norm).values.float().sum(0)
    difference = float((found.float() - expected).norm() / expected.norm())
    assert difference < TOLERANCE, f"{product}, {rows} rows, {form}: off by {difference}"


def share_of(product: Product, rows: int, microseconds: float) -> float:
    read = (product.num_bytes + 2 * rows * (product.columns + product.tiled_outputs)) / BANDWIDTH
    multiplied = 2 * rows * product.outputs * product.columns / OPERATIONS
    return max(read, multiplied) / (microseconds * 1e-6)


def random_weights(product: Product, count: int) -> list[Linear]:
    weights = torch.empty(count, product.outputs, product.columns, dtype=DTYPE, device=DEVICE).normal_(0.0, 1 / 64)
    return [Linear(weight) for weight in weights]


def compile_all(shapes: Sequence[str], rows: Sequence[int], chip: Chip) -> None:
    """Every candidate of ours is launched once. Those that the compiler may see alike come after each other, so that
    no two threads compile the same."""
    stream = torch.cuda.current_stream()

    def launch_all(cases: Sequence[tuple[Trial, Form]]) -> None:
        torch.ones(1, device=DEVICE)  # makes the GPU's context this thread's
        for trial, form in cases:
            with torch.inference_mode(), torch.cuda.stream(stream), suppress(OutOfResources):
                trial(form)

    alike: dict[object, list[tuple[Trial, Form]]] = {}
    for product in dict.fromkeys(product for shape in shapes for _, product, _ in products_of(shape)):
        linears = random_weights(product, 1)
        for count in rows:
            trial = trial_of(product, linears, count)
            for form in candidates(product, count, chip):
                if not isinstance(form, Vendor):
                    alike.setdefault((product.role, form, count), []).append((trial, form))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for each in [threads.submit(launch_all, cases) for cases in alike.values()]:
            each.result()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=FAMILIES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--cache", type=Path, help="a folder for the choices; without it they are measured anew")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    lines: list[Line] = []
    totals: dict[str, dict[str, float]] = {}
    stopwatch, chip, began = GraphStopwatch(DEVICE), Chip.of(DEVICE), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        cache = FormCache(machine_of(DEVICE), options.cache or Path(folder))
        compile_all(options.shapes, options.rows, chip)
        print(f"compiled in {time.perf_counter() - began:.1f} s")
        print(f"{'':18}{'rows':>5}{'cuBLAS':>12}{'chosen':>12}{'share':>7}{'among neighbours':>24}   form", flush=True)
        for shape in options.shapes:
            for name, product, count in products_of(shape):
                copies = max(2, min(count, -(-TRIAL_BYTES // product.num_bytes)))
                linears = random_weights(product, copies)
                forms = MeasuredForms(product, chip, cache, partial(trial_of, product, linears), stopwatch)
                for rows in options.rows:
                    form = forms.of(rows)
                    check(product, linears[0], rows, form)
                    pair = [Vendor(), form] if form != Vendor() else [Vendor()]
                    own = [1e6 * each / copies for each in stopwatch(alone(product, linears, rows), pair)]
                    among = [1e6 * each / copies for each in stopwatch(trial_of(product, linears, rows), pair)]
                    line = Line(
                        shape, name, rows, str(spell_form(form)), own[0], own[-1], among[0], among[-1],
                        share_of(product, rows, own[-1]),
                    )  # fmt: skip
                    lines.append(line)
                    tiles = " ".join(str(value) for value in spell_form(form).values())
                    print(
                        f"{shape + ' ' + name:18}{rows:5}{line.cublas:9.2f} us{line.chosen:9.2f} us{line.share:7.0%}"
                        f"{line.cublas_with_neighbours:12.2f}{line.chosen_with_neighbours:9.2f} us   {tiles}",
                        flush=True,
                    )
                    total = totals.setdefault(f"{shape} rows {rows}", {"cuBLAS": 0.0, "chosen": 0.0})
                    total["cuBLAS"] = round(total["cuBLAS"] + line.cublas_with_neighbours * count / 1e3, 4)
                    total["chosen"] = round(total["chosen"] + line.chosen_with_neighbours * count / 1e3, 4)
                del linears, forms
    print(f"{time.perf_counter() - began:.1f} s in all")
    if options.save:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        facts = {"machine": torch.cuda.get_device_name(), "commit": commit.stdout.strip(), "totals": totals}
        options.save.write_text(json.dumps({**facts, "lines": [asdict(line) for line in lines]}))
    for which, total in totals.items():
        print(f"{which:16}" + "".join(f"{how} {value:.3f} ms   " for how, value in total.items()))
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
