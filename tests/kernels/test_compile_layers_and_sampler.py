"""The kernels of layers and sampler compile for the GPU they are meant for, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = {
    "_add_rms_norm",
    "_silu_and_multiply",
    "_rope_and_write",
    "_score_blocks",
    "_begin",
    "propose",
    "sift",
    "_narrow",
    "_finish",
    "_match_words",
    "_control_blocks",
    "_count_drawn",
    "_keep_above",
    "_draw_tokens",
    "_report",
    "_count_larger",
    "_count_larger_than_each",
    "_select",
    "_read_tables",
    "_write",
    "_bend",
    "_read_codes",
    "_add_prefix_noise",
    "_row_product",
    "_packed_rows",
    "_packed_tiles",
    "_unpack",
    "_write_out",
    "_tiled_product",
    "_tiled_gate_up",
    "_copied_product",
    "_copied_gate_up",
    "_row_stream",
    "_tile_stream",
    "survey",
    "grow",
    "settle",
    "seek",
    "bound",
    "refine",
    "weigh",
    "write",
}


def test_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == KERNELS


def test_sums_do_not_depend_on_which_form_of_a_kernel_runs() -> None:
    """See hopper_orders.py: one way to sum of each kind, and one kind of matrix instruction (2: mma.sync, 3: wgmma).

    Exact shared prefixes were once read by wgmma, and everything else in attention by mma.sync.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper_orders"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    multiplied = ["products 1 versionMajor = 3", "attention 1 versionMajor = 2"]
    assert run.stdout.splitlines() == ["norms 1", "heads 1", "blocks 1", "draws 1", *multiplied]
