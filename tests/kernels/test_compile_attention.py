"""The attention kernels compile for the GPU they are meant for (sm_90), down to machine code, also where there is none.

The interpreter accepts much that the compiler refuses; this is the part of the compiler's word that needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHARED_MEMORY = 227 * 1024  # bytes that one program may take there

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from ramify.gpu.kernels import block_decode
from ramify.gpu.kernels import causal_attention
from ramify.gpu.kernels import decode_attention
from ramify.gpu.kernels import divided_prefix
from ramify.gpu.kernels import early_decode
from ramify.gpu.kernels import hopper_prefix
from ramify.gpu.kernels import merge
from ramify.gpu.kernels import own_parts
from ramify.gpu.kernels import prefix_attention
from ramify.gpu.kernels import prompt_attention
from ramify.gpu.kernels.walk import EXACT_BLOCK_M, EXACT_BLOCK_N, EXACT_OPTIONS

RESERVED, PROCESSOR, REGISTERS = 1024, 228 * 1024, 65536  # of a program; of a processor
number, head_dim = sys.argv[1], int(sys.argv[2])
size = 4 if number == "fp32" else 2
TYPES = {"queries": f"*{number}", "kv": f"*{number}", "out": f"*{number}", "partials": "*fp32", "lse": "*fp32",
         "rows": "i32", "query_stride": "i32", "table_stride": "i32", "out_stride": "i32", "scale": "fp32"}


def shared_memory(kernel, warps, stages, exact=False, registers=None, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*i32") for name in names}
    strides = ("query_stride", "out_stride")
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in strides]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, **(EXACT_OPTIONS if exact else {})}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if exact and number != "fp32":
        # One kind of matrix instruction in all exact kernels, and no product summed before an addition.
        assert "wgmma" not in compiled.asm["ptx"]
        assert "mma.sync" in compiled.asm["ptx"]
        assert "fma.rn.f32" not in compiled.asm["ptx"]
    return compiled.metadata.shared


common = {"KV_HEADS": 2, "QUERIES_PER_ROW": 7, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
d, p = decode_attention, prefix_attention
for merges, shared in ((True, True), (True, False), (False, False)):
    own = {"PADDED_QUERIES": 16, "MERGES": merges, "SHARED": shared, "PER_LINE": 128 // size, "OVERLAP": True, **common}
    print(shared_memory(d._decode, d.NUM_WARPS, d.NUM_STAGES, BLOCK_N=d.BLOCK_N, EXACT=False, **own))
    exact = {"BLOCK_N": EXACT_BLOCK_N[size], "EXACT": True}
    print(shared_memory(d._decode, d.NUM_WARPS, d.NUM_STAGES, True, **exact, **own))
e = early_decode
for overlap in (True, False):
    held = {"PADDED_QUERIES": 16, "BLOCK_N": e.BLOCK_N, "TAIL": e.TAIL, "AT_ONCE": e.PARTS_AT_ONCE, "STARTS": 0}
    print(shared_memory(e._early_decode, e.NUM_WARPS, e.NUM_STAGES, OVERLAP=overlap, **held, **common))
tile = {"BLOCK_M": p.BLOCK_M[size], "BLOCK_N": p.BLOCK_N[size]}
print(shared_memory(p._prefix, p.NUM_WARPS, p.NUM_STAGES, **tile, EXACT=False, **common))
h = hopper_prefix
if size == 2:
    tile = {"BLOCK_M": h.BLOCK_M, "BLOCK_N": h.BLOCK_N}
    for registers in (None, h.REGISTERS_BESIDE_OTHERS):
        taken = shared_memory(
            h.scheduled_prefix, h.NUM_WARPS, 1, registers=registers, **tile, HOLDS=True, OVERLAP=True, **common
        )
        print(taken)
    o = own_parts
    own = {"PADDED_QUERIES": 16, "BLOCK_N": o.BLOCK_N, "OVERLAP": True, **common}
    beside = shared_memory(o._own_parts, o.NUM_WARPS, o.NUM_STAGES, registers=o.MOST_REGISTERS, **own)
    assert 2 * taken + beside + 3 * RESERVED <= PROCESSOR, "three programs fit"
    assert 32 * (2 * h.NUM_WARPS * h.REGISTERS_BESIDE_OTHERS + o.NUM_WARPS * o.MOST_REGISTERS) <= REGISTERS
    for roles in (divided_prefix.ALONE, divided_prefix.BESIDE_OTHERS):
        parts = {"STAGES": roles.stages, "COMPUTING_REGISTERS": roles.computing, "COPYING_REGISTERS": roles.copying}
        needed = shared_memory(
            divided_prefix.divided_prefix, divided_prefix.WARPS, 1, registers=roles.registers,
            BLOCK_N=roles.positions, OVERLAP=True, **parts, **common,
        )
        print(needed)
    assert needed + beside + 2 * RESERVED <= PROCESSOR, "two programs fit"
    assert 32 * (3 * divided_prefix.WARPS * roles.registers + o.NUM_WARPS * o.MOST_REGISTERS) <= REGISTERS
    b = block_decode
    for kv_heads, queries in ((8, 4), (4, 7)):
        tiles = b.shape_of_tiles(head_dim)
        held = {"KV_HEADS": kv_heads, "HEADS": tiles.heads, "QUERIES_PER_ROW": queries, "HEAD_DIM": head_dim,
                "PADDED_QUERIES": 16, "BLOCK_SIZE": 16, "TILE": tiles.positions, "STAGES": tiles.stages}
        for merges, shared in ((True, True), (True, False), (False, False)):
            needed = shared_memory(
                b._decode, tiles.warps, 1, **held, MERGES=merges, SHARED=shared, OVERLAP=not shared
            )
            assert needed <= tiles.shared_memory(head_dim, size), (needed, tiles)
            print(needed)
print(shared_memory(merge._merge, merge.NUM_WARPS, 3, HEADS=14, HEADS_AT_ONCE=merge.HEADS_AT_ONCE,
                    HEAD_DIM=head_dim, OVERLAP=True))
q = prompt_attention
tile = {"BLOCK_M": q.BLOCK_M[size], "BLOCK_N": q.BLOCK_N[size]}
print(shared_memory(q._attend, q.NUM_WARPS[size], q.NUM_STAGES, **tile, **common))
tile = {"BLOCK_M": EXACT_BLOCK_M[size], "BLOCK_N": EXACT_BLOCK_N[size]}
print(shared_memory(p._prefix, p.NUM_WARPS, p.NUM_STAGES, True, **tile, EXACT=True, **common))
c = causal_attention
print(shared_memory(c._causal, c.NUM_WARPS, c.NUM_STAGES, True, **tile, **common))
"""


@pytest.mark.parametrize(("number", "head_dim"), [("bf16", 128), ("fp16", 64), ("fp32", 32)])
def test_kernels_compile(number: str, head_dim: int) -> None:
    # In a process of its own: here Triton may be interpreting.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, number, str(head_dim)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = 13 if number == "fp32" else 23
    assert [int(line) <= SHARED_MEMORY for line in done.stdout.split()] == [True] * kernels
