"""The noise of rows, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ramify.sampling.draw import NoiseKeys, noise_words


def noise_keys(keys: Sequence[tuple[int, int, int]], device: torch.device) -> NoiseKeys:
    """From (seed, child, position) of each row."""
    words = [noise_words(*key) for key in keys]
    return NoiseKeys(*torch.tensor(words, dtype=torch.int64, device=device).view(-1, 4, 1).unbind(1))
