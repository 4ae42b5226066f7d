"""The noise of rows, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ramify.sampling.draw import NoiseKeys


def noise_keys(keys: Sequence[tuple[int, int, int]], device: torch.device) -> NoiseKeys:
    """From (seed, child, position) of each row."""
    return NoiseKeys.of(keys, device)
