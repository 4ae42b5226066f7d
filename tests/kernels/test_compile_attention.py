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
from ramify.gpu.kernels import decode_attention
from ramify.gpu.kernels import merge
from ramify.gpu.kernels import prefix_attention

number, head_dim = sys.argv[1], int(sys.argv[2])
size = 4 if number == "fp32" else 2
TYPES = {"queries": f"*{number}", "kv": f"*{number}", "out": f"*{number}", "partials": "*fp32", "lse": "*fp32",
         "rows": "i32", "query_stride": "i32", "table_stride": "i32", "out_stride": "i32", "scale": "fp32"}


def shared_memory(kernel, warps, stages, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*i32") for name in names}
    strides = ("query_stride", "out_stride")
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in strides]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


common = {"KV_HEADS": 2, "QUERIES_PER_ROW": 7, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
d, p = decode_attention, prefix_attention
for merges in (True, False):
    own = {"PADDED_QUERIES": 16, "BLOCK_N": d.BLOCK_N, "MERGES": merges, "PER_LINE": 128 // size, "OVERLAP": True}
    print(shared_memory(d._decode, d.NUM_WARPS, d.NUM_STAGES, **own, **common))
print(shared_memory(p._prefix, p.NUM_WARPS, p.NUM_STAGES, BLOCK_M=p.BLOCK_M[size], BLOCK_N=p.BLOCK_N[size], **common))
print(shared_memory(merge._merge, merge.NUM_WARPS, 3, HEADS=14, HEAD_DIM=head_dim, PARTS=merge.PARTS))
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
    assert [int(line) <= SHARED_MEMORY for line in done.stdout.split()] == [True] * 4
