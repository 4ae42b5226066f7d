"""What is asked for ahead changes nothing: layers in a graph with it and without it, to the bit."""

from __future__ import annotations

import pytest
import torch

from ramify.gpu.kernels.ahead import Ahead
from ramify.gpu.kernels.overlap import can_overlap
from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.rope_write import rope_and_write


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shape", [(22_016, 2048), (1376, 16, 2, 32, 4)], ids=["dense", "packed"])
def test_rows_are_turned_and_written_as_without(
    device: torch.device, rows: int, by_row: bool, shape: tuple[int, ...]
) -> None:
    if not can_overlap(device):
        pytest.skip("kernels do not overlap on this GPU")
    torch.manual_seed(rows)
    heads, kv_heads, head_dim = 16, 2, 128
    weight = torch.zeros(shape, dtype=torch.bfloat16 if len(shape) == 2 else torch.int32, device=device)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device, dtype=torch.bfloat16)
    numbers, frequencies = torch.arange(rows, device=device), torch.rand(head_dim // 2, device=device)
    seen = []
    for ahead in (None, *(Ahead.of(weight, size * 2**20, by_row=by_row) for size in (8, 64))):
        queries = torch.full((rows, heads, head_dim), torch.nan, device=device, dtype=torch.bfloat16)
        kv = torch.full((rows, 2, kv_heads, head_dim), torch.nan, device=device, dtype=torch.bfloat16)
        of = (numbers, numbers, frequencies, 1.0, queries, kv)
        rope_and_write(Parts.whole(qkv), *of, ahead=ahead, overlap=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rope_and_write(Parts.whole(qkv), *of, ahead=ahead, overlap=True)
        graph.replay()
        torch.cuda.synchronize()
        seen.append((queries, kv))
    for queries, kv in seen[1:]:
        assert torch.equal(queries, seen[0][0])
        assert torch.equal(kv, seen[0][1])
    assert not seen[0][0].isnan().any()
