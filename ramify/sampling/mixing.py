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
        """A MixtureReport of one token of each row, token_ids (R,), as numbers: (R, NUM_MIXTURE_NUMBERS) float64."""
        mixed, chosen = self.mixed, token_ids[:, None]
        columns = {
            "alpha": mixed.alpha,
            "log_z": mixed.log_z,
            "kl_theta": mixed.kl_theta,
            "kl_teacher": mixed.kl_teacher,
            "ess_theta": mixed.ess_theta,
            "ess_teacher": mixed.ess_teacher,
            "logprob_theta": self.theta.gather(1, chosen)[:, 0] - mixed.normaliser_theta,
            "logprob_teacher": self.teacher.gather(1, chosen)[:, 0] - mixed.normaliser_teacher,
            "is_clamped": mixed.clamped,
        }
        return torch.stack([columns[name].double() for name in MixtureReport._fields], dim=1)

    def reports(self, token_ids: Tensor) -> list[list[MixtureReport]]:
        """Of every row, for each of its token_ids (R, m)."""
        by_token = [as_reports(self.numbers(token_ids[:, index])) for index in range(token_ids.shape[1])]
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
        return mix(teacher, theta, self.config, first=is_first, special_token_ids=special)


def as_reports(numbers: Tensor) -> list[MixtureReport]:
    """From numbers (R, NUM_MIXTURE_NUMBERS), as `MixedRows.numbers` gives them."""
    reports = map(MixtureReport._make, numbers.tolist())
    return [report._replace(is_clamped=bool(report.is_clamped)) for report in reports]
