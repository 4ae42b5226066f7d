"""RopeConfig: what a checkpoint says of its rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What a checkpoint says; each kind of scaling reads its own fields."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # factors: one divisor per frequency, which is how GGUF files store llama3's


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """By how much attention is sharpened for a longer context (YaRN, equation 22, or DeepSeek's with two scales)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)
