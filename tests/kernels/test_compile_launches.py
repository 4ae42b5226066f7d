"""Exact attention as engines launch it, compiled for sm_90: with the tiles and options that the host chooses.

Exact kernels have alike bits because all of them multiply by one kind of instruction; the interpreter knows no others.
"""

from __future__ import annotations

import os
import subprocess
import sys

LAUNCH = """
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from ramify.device.reads import Reads
from ramify.gpu.exact_prompts import ExactPrompts
from ramify.gpu.kernels.stretches import PositionCuts
from ramify.gpu.paged import PagedDecode


class Compiler:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def compile_only(self, *arguments, grid, warmup, **options):
    ptx = run(self, *arguments, grid=grid, warmup=True, **options).asm["ptx"]
    found = [word for word in ("wgmma", "mma.sync", "fma.rn.f32") if word in ptx]
    print(self.__name__, *found)


driver.set_active(Compiler())
run, JITFunction.run = JITFunction.run, compile_only
dtype, device, cuts = torch.bfloat16, torch.device("cpu"), PositionCuts(1024)
heads, kv_heads, head_dim = 14, 2, 64
kv = torch.empty(64, 2, kv_heads, head_dim, dtype=dtype)
queries = torch.empty(16, heads, head_dim, dtype=dtype)
out = torch.empty(16, heads * head_dim, dtype=dtype)
shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 16}
paged = PagedDecode(max_rows=16, max_parts=64, max_blocks=4, **shape, dtype=dtype, device=device, cuts=cuts, exact=True)
paged.attend(queries, kv, out, with_prefix=True)
reads = Reads.of(np.array([0]), np.array([16]), np.array([1]), [(0,)], (), block_size=16, size=16)
ExactPrompts(reads, cuts).attend(queries, kv)
"""


def test_exact_attention_multiplies_by_one_kind_of_instruction() -> None:
    # In a process of its own: here Triton may be interpreting.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["_prefix mma.sync", "_decode mma.sync", "_causal mma.sync"]
