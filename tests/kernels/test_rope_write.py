"""rope_and_write against rotate and norms as the decoder composes them, and an indexed write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.kernels.parts import Parts
from ramify.gpu.kernels.rope_write import rope_and_write
from ramify.models.rope import inverse_frequencies, rotate
from ramify.models.rope_config import RopeConfig

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-6
UNTOUCHED = 7.0


def _expected(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, scale: float, norms: tuple[Tensor, Tensor] | None, heads: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys of qkv (T, all heads, head_dim)."""
    dtype, head_dim = qkv.dtype, qkv.shape[-1]
    angles = positions.float()[:, None, None] * frequencies
    cosines, sines = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    rotations = torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)
    queries, keys = qkv[:, :heads], qkv[:, heads:]
    if norms is not None:
        queries = norms[0] * F.rms_norm(queries.float(), (head_dim,), eps=EPS).to(dtype)
        keys = norms[1] * F.rms_norm(keys.float(), (head_dim,), eps=EPS).to(dtype)
    return rotate(queries, rotations), rotate(keys, rotations)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 128), (3, 1, 96), (2, 2, 8)])
def test_rope_and_write(
    device: torch.device,
    dtype: torch.dtype,
    num_parts: int,
    has_norm: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Of a product in one piece, and of one in float32 parts whose bias is still to be added."""
    torch.manual_seed(heads)
    tokens, num_slots, scale = 6, 40, 1.25
    width = (heads + 2 * kv_heads) * head_dim
    if num_parts == 1:
        parts = Parts.whole(torch.randn(tokens, width, device=device).to(dtype))
        qkv = parts.values[0]
    else:
        values, bias = torch.randn(num_parts, tokens, width, device=device), torch.randn(width, device=device).to(dtype)
        parts = Parts(values, bias)
        qkv = (values[0] + values[1] + values[2] + bias.float()).to(dtype)
    positions = torch.tensor([0, 1, 17, 500, 8191, 3], device=device)
    slots = torch.tensor([5, 0, -1, 39, 7, -9], device=device)
    frequencies = inverse_frequencies(RopeConfig(), head_dim).to(device)
    norms = None
    if has_norm:
        norms = torch.randn(head_dim, device=device).to(dtype), torch.randn(head_dim, device=device).to(dtype)
    queries = torch.full((tokens, heads, head_dim), UNTOUCHED, dtype=dtype, device=device)
    kv_layer = torch.full((num_slots, 2, kv_heads, head_dim), UNTOUCHED, dtype=dtype, device=device)
    rope_and_write(
        parts,
        positions,
        slots,
        frequencies,
        scale,
        queries,
        kv_layer,
        query_norm=norms[0] if norms else None,
        key_norm=norms[1] if norms else None,
        eps=EPS,
    )
    packed = qkv.view(tokens, -1, head_dim)
    rotated, keys = _expected(packed[:, :-kv_heads], positions, frequencies, scale, norms, heads)
    real = slots >= 0
    # Angles of far positions are as good as float32's product of position and frequency.
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(queries[real], rotated[real], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv_layer[slots[real], 0], keys[real], atol=tolerance, rtol=tolerance)
    assert torch.equal(kv_layer[slots[real], 1], packed[real, -kv_heads:])
    assert (queries[~real] == UNTOUCHED).all()
    others = torch.ones(num_slots, dtype=torch.bool, device=device)
    others[slots[real]] = False
    assert (kv_layer[others] == UNTOUCHED).all()
