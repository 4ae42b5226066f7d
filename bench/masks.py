"""What masks of grammars cost the host: all rows of a step, by number of threads or processes, for several schemas.

    python bench/masks.py [--rows 256] [--steps 128] [--threads 1 2 4 8 16] [--workers 2 4 8 12] [--schemas …]

Rows take random tokens that their grammar allows, as a model of random weights does, over the vocabulary of
bench/random_tokenizer.py. Told of a step: its mean and its worst time, and the share that is Python's alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from gpu_workloads import WORKLOADS  # type: ignore[import-not-found]
from random_tokenizer import SIZE, write_tokenizer  # type: ignore[import-not-found]

from ramify.structured.grammars import Grammars
from ramify.structured.mask_threads import MaskThreads
from ramify.structured.matcher import Asked, num_words, write_masks
from ramify.structured_outputs import Structure
from ramify.text.codec import TextCodec
from ramify.text.tokenizer_folder import load_folder

END = SIZE - 1


def schemas() -> dict[str, Any]:
    """Those of the workloads of bench/gpu.py."""
    found = {}
    for name, workload in WORKLOADS.items():
        structure = workload.params.get("structured_outputs")
        if structure is not None and "json" in structure:
            found[name] = structure["json"]
    return found


def measure(grammars: Grammars, structure: Structure, rows: int, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and of the processor for each mask."""
    numbers = np.random.default_rng(0)
    asked = [Asked(grammars.begin(structure, [END]), ()) for _ in range(rows)]
    masks = np.zeros((rows, num_words(asked)), np.uint32)
    seconds, processor = [], 0.0
    for _ in range(steps):
        began, worked = time.perf_counter(), time.process_time()
        faults = write_masks(asked, masks)
        seconds.append(time.perf_counter() - began)
        processor += time.process_time() - worked
        assert not faults, faults
        for (matcher, _), mask in zip(asked, masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            going_on = allowed[allowed != END]
            matcher.take(int(numbers.choice(going_on if len(going_on) else allowed)))
    return seconds, processor / rows / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = schemas()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 8, 12])
    parser.add_argument("--schemas", nargs="+", choices=list(known), default=list(known))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        codec = TextCodec(load_folder(Path(folder)))
    print(f"{'schema':<14}{'':>11}{'ms a step':>11}{'median':>8}{'worst':>8}{'us a mask':>11}")
    for name in options.schemas:
        ways = [(count, "threads") for count in options.threads] + [(count, "workers") for count in options.workers]
        for count, kind in ways:
            grammars = Grammars(codec, MaskThreads(count if kind == "threads" else 1))
            if kind == "workers":
                grammars.use_workers(count)
            structure = Structure("json", json.dumps(known[name]))
            seconds, each = measure(grammars, structure, options.rows, options.steps)
            mean, median, worst = (1e3 * value for value in (np.mean(seconds), np.median(seconds), max(seconds)))
            line = f"{name:<14}{count:3d} {kind}{mean:11.3f}{median:8.3f}{worst:8.3f}{1e6 * each:11.1f}"
            print(line, flush=True)
            results[f"{name}/{count} {kind}"] = round(float(mean), 4)
    print(json.dumps({"rows": options.rows, "ms": results}))


if __name__ == "__main__":
    main()
