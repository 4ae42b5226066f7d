"""Document 2's sampler: logits and temperatures in, one token id a row out, drawn by the engine's own race."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ramify import validation as check
from ramify.config import SEED_HIGH, SEED_LOW
from ramify.engine.demands import LARGEST
from ramify.engine.plan import NOT_FINITE
from ramify.errors import InvalidInputError
from ramify.sampling.draw import NoiseKeys, draw
from ramify.sampling.mixture import scale


class Sampler(nn.Module):
    """Draws a token from every row of logits at that row's temperature; 0 takes the likeliest.

    The noise of a call is named by the seed, the number of the call and the row, so a sampler made anew with the same
    seed repeats itself. Without a seed one is drawn from torch's generator: `torch.manual_seed` governs it, as it
    governs the document's. Whoever keeps count of sequences passes their own keys.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        self.seed = check.integer("seed", seed, SEED_LOW, SEED_HIGH)
        self._num_calls = 0

    @torch.inference_mode()
    def forward(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys | None = None) -> Tensor:
        """logits (R, vocabulary) and temperatures (R,) to token ids (R,); what was given is not changed."""
        _check(logits, temperatures)
        if keys is None:
            rows = [(self.seed, row, self._num_calls) for row in range(logits.shape[0])]
            keys = NoiseKeys.of(rows, logits.device)
            self._num_calls += 1
        at = temperatures.to(logits.device, torch.float32)
        at = torch.where(at == 0, at, at.clamp(1 / LARGEST, LARGEST))
        values = logits.float()
        drawn = draw(scale(values, at), keys)
        return torch.where(at == 0, values.argmax(-1), drawn)


def _check(logits: Tensor, temperatures: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point() or not logits.shape[1]:
        raise check.refuse("logits", _shown(logits), "a floating-point tensor (rows, vocabulary)")
    if not isinstance(temperatures, Tensor) or temperatures.shape != logits.shape[:1]:
        raise check.refuse("temperatures", _shown(temperatures), f"a tensor ({logits.shape[0]},), one for each row")
    if not bool(((temperatures >= 0) & temperatures.isfinite()).all()):
        raise InvalidInputError("temperatures must be finite and at least 0")
    # Minus infinity rules a token out. A row of nothing else, a NaN or plus infinity is nothing to draw from.
    if not bool(logits.amax(1).isfinite().all()):
        raise InvalidInputError(NOT_FINITE)


def _shown(value: object) -> object:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
