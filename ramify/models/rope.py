"""Rotary positions: the inverse frequencies that a checkpoint's scaling gives, and the rotation itself."""

from __future__ import annotations

import math

import torch

from ramify.models.rope_config import RopeConfig

# Cosines (the same in both halves) and sines (negated in the first half), for every position and dimension.
Rotations = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """(head_dim / 2,) float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "factors":
            return frequencies / torch.tensor(rope.factors, dtype=torch.float32)
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, head_dim)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """High frequencies stay, low ones are divided by the factor, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    num_rotations = rope.original_max_position_embeddings / wavelengths
    blend = (num_rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    divided = frequencies / rope.factor
    scaled = torch.where(num_rotations < rope.low_freq_factor, divided, blended)
    return torch.where(num_rotations > rope.high_freq_factor, frequencies, scaled)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, those between are blended."""

    def dimension_of(num_rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return frequencies / rope.factor * (1 - keep) + frequencies * keep


def rotate(x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
    """x (tokens, heads, head_dim) rotated by its positions; cosines and sines are (tokens, 1, head_dim) each.

    Pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints. Rolling by half a head swaps the members of each
    pair, and the sines carry the sign.
    """
    cosines, sines = rotations
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, dims=-1), sines)
