"""Two models in the sampler: how their rows are mixed, and what is told of each token that is drawn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.config import MixtureConfig
from ramify.outputs import MixtureReport
from ramify.sampling.mixture import Mixed, mix, scale

NUM_MIXTURE_NUMBERS = len(MixtureReport._fields)


@dataclass(frozen=True, slots=True)
class MixedRows:
    """A few rows of two models, at their temperature, and their mixture."""

    mixed: Mixed
    teacher: Tensor  # (R, vocabulary)
    theta: Tensor

    @property
    def logits(self) -> Tensor:
        return self.mixed.logits

    def numbers(self, token_ids: Tensor) -> Tensor:
        """What is told of one token of each row, token_ids (R,), as columns (R, 9): a MixtureReport each."""
        mixed, where = self.mixed, token_ids[:, None]
        columns = (
            mixed.alpha,
            mixed.log_z,
            mixed.kl_theta,
            mixed.kl_teacher,
            mixed.ess_theta,
            mixed.ess_teacher,
            self.theta.gather(1, where)[:, 0] - mixed.normaliser_theta,
            self.teacher.gather(1, where)[:, 0] - mixed.normaliser_teacher,
            mixed.clamped,
        )
        return torch.stack([column.double() for column in columns], dim=1)

    def reports(self, token_ids: Tensor) -> list[list[MixtureReport]]:
        """Of every row, for each of its token_ids (R, m)."""
        by_token = [as_reports(self.numbers(token_ids[:, place])) for place in range(token_ids.shape[1])]
        return [list(row) for row in zip(*by_token, strict=True)]


class Mixer:
    """An engine's way to mix, for all its requests."""

    def __init__(self, config: MixtureConfig, special_token_ids: Collection[int] = ()) -> None:
        self.config = config
        self.special_ids = sorted(special_token_ids)
        self._on: dict[torch.device, Tensor] = {}

    def special_token_ids(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = torch.tensor(self.special_ids, dtype=torch.long, device=device)
        return self._on[device]

    def mix(self, teacher: Tensor, theta: Tensor, temperatures: Tensor | None, is_first: Tensor) -> MixedRows:
        """Logits (R, vocabulary) after controls; temperatures (R,), None: all are 1; is_first (R,): of its output."""
        if temperatures is not None:
            teacher, theta = scale(teacher, temperatures), scale(theta, temperatures)
        return MixedRows(self.combine(teacher, theta, is_first), teacher, theta)

    def combine(self, teacher: Tensor, theta: Tensor, is_first: Tensor) -> Mixed:
        """Of logits that have their temperature."""
        special = self.special_token_ids(theta.device)
        return mix(teacher, theta, self.config, temperature=1.0, first=is_first, special_token_ids=special)


def as_reports(numbers: Tensor) -> list[MixtureReport]:
    """From columns (R, 9)."""
    return [MixtureReport(*row)._replace(is_clamped=bool(row[-1])) for row in numbers.tolist()]
