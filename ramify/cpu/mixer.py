"""Two models' logits to one distribution by a kernel (mixture.cpp); the truth is `sampling/mixture.py`.

A thread takes a row at a time, which it reads some ten times from its second cache. The teacher's support is found
before, by what the sampler's filters use.
"""

from __future__ import annotations

from torch import Tensor

from ramify.config import AlphaMethod
from ramify.cpu.sampler_operators import CpuOperators
from ramify.sampling.mixing import Mixer
from ramify.sampling.mixture import NUMBERS, Mixed, forced_rows, on_support

# As in mixture.cpp.
METHODS: dict[AlphaMethod, int] = {"fixed": 0, "kl_symmetry": 1, "ess_balance": 2, "entropy": 3, "kl_budget": 4}


class CpuMixer(Mixer):
    def __init__(self, mixer: Mixer, operators: CpuOperators) -> None:
        super().__init__(mixer.config, mixer.special_ids)
        self._operators = operators

    def combine(self, teacher: Tensor, theta: Tensor, is_first: Tensor) -> Mixed:
        config = self.config
        forced = forced_rows(teacher, config, is_first, self.special_token_ids(theta.device))
        teacher, theta = on_support(teacher, theta, config)
        given = config.kl_budget if config.alpha_method == "kl_budget" else config.alpha
        logits, numbers = self._operators.mix(
            theta,
            teacher,
            forced,
            method=METHODS[config.alpha_method],
            given=given or 0.0,
            bounds=(config.alpha_min, config.alpha_max),
            num_numbers=len(NUMBERS),
        )
        return Mixed.of(logits, numbers)
