"""The mixture of two models on the GPU; the truth is `sampling/mixture.py`, whose steps these are.

    survey    (rows x splits)   both logit rows once: normalisers, the mean and range of teacher − theta, supports
    grow      (rows x splits)   the difference of the normalisers as one sum, where the models nearly agree
    settle    (rows)            what holds for the whole search, and where it starts
    seek      (rows x splits)   sums at the present α; launched a fixed number of times, and each launch first takes the
                                step that the previous one's sums call for. Rows that have arrived read nothing more
    bound     (rows)            the last of these steps, then alpha_min, alpha_max and rows forced to the teacher
    refine    (rows x splits)   the same sums, from exponents in float64
    weigh     (rows x splits)   the sums at the final α, and those of both effective sample sizes
    write     (rows x splits)   log q*, and the row's numbers

A row is split over several programs; each leaves sums relative to its own largest exponent, and whoever needs the whole
merges them, always in the same order: a row's bits do not depend on its neighbours. The number of launches is fixed and
no number is read back, so all of it stands in a CUDA graph. What torch's operators do before (the teacher's support,
the entropies) they do for all rows at once, or for each alone where no sum's order may depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import triton
from torch import Tensor

from ramify.config import MixtureConfig
from ramify.gpu.kernels.alpha_search import NUM_STATES, bound, refine, seek, settle
from ramify.gpu.kernels.mixed_rows import weigh, write
from ramify.gpu.kernels.pair_sums import NUM_SUMS
from ramify.gpu.kernels.pair_survey import NUM_FACTS, grow, survey
from ramify.sampling import alpha as methods
from ramify.sampling.mixing import Mixer
from ramify.sampling.mixture import NUMBERS, Mixed, forced_rows, on_support
from ramify.sampling.pair import Pair

BLOCK = 1024
SPLIT = 8192  # ids a program reads: 19 programs for a row of 151,936


def row_by_row(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Of rows (R, ...) each: what is computed for each alone, at an aligned address."""
    count = rows[0].shape[0]
    return torch.cat([compute(*(each[row : row + 1].clone() for each in rows)) for row in range(count)])


def mix(
    teacher: Tensor,
    theta: Tensor,
    config: MixtureConfig,
    *,
    first: Tensor,
    special_token_ids: Tensor,
    each_alone: bool = False,
) -> Mixed:
    """As `sampling.mixture.mix` of logits teacher, theta (R, V) float32 that have their temperature already."""
    forced = forced_rows(teacher, config, first, special_token_ids)
    if not each_alone:
        teacher, theta = on_support(teacher, theta, config)
    elif config.teacher_top_k > 0 or config.teacher_top_p < 1:
        both = row_by_row(lambda t, s: torch.stack(on_support(t, s, config), 1), teacher, theta)
        teacher, theta = both[:, 0].contiguous(), both[:, 1].contiguous()

    def each(method: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(R,) by a method of torch's operators."""
        return row_by_row(method, theta, teacher) if each_alone else method(theta, teacher)

    given = None
    if config.alpha_method == "fixed":
        assert config.alpha is not None, "checked by the configuration"
        given = torch.full((theta.shape[0],), config.alpha, dtype=torch.float64, device=theta.device)
    elif config.alpha_method == "entropy":
        given = each(methods.entropy)
    elif config.alpha_method == "kl_budget":
        assert config.kl_budget is not None, "checked by the configuration"
        budget = config.kl_budget
        given = each(lambda own, teachers: methods.kl_budget(Pair.of(own, teachers), budget))
    is_balance = config.alpha_method == "ess_balance"
    search = _Search(teacher, theta, given, is_balance=is_balance)
    if given is None:
        for step in range(methods.BALANCE_STEPS if is_balance else methods.STEPS):
            search.seek(step)
    return search.finish(forced, config.alpha_min, config.alpha_max)


class KernelMixer(Mixer):
    """A mixer that works with these kernels."""

    def __init__(
        self, config: MixtureConfig, special_token_ids: Collection[int] = (), *, each_alone: bool = False
    ) -> None:
        super().__init__(config, special_token_ids)
        self._each_alone = each_alone

    @classmethod
    def of(cls, mixer: Mixer, *, each_alone: bool = False) -> KernelMixer:
        return cls(mixer.config, mixer.special_ids, each_alone=each_alone)

    def combine(self, teacher: Tensor, theta: Tensor, is_first: Tensor) -> Mixed:
        special = self.special_token_ids(theta.device)
        return mix(teacher, theta, self.config, first=is_first, special_token_ids=special, each_alone=self._each_alone)


class _Search:
    """The buffers of one call, and its launches in their order."""

    def __init__(self, teacher: Tensor, theta: Tensor, given: Tensor | None, *, is_balance: bool) -> None:
        rows, vocab_size = theta.shape
        self._logits = (theta, teacher, theta.stride(0), teacher.stride(0))
        self._rows, self._splits = rows, triton.cdiv(vocab_size, SPLIT)
        self._grid = (rows, self._splits)
        self._whole = {"vocab_size": vocab_size, "splits": self._splits, "block": BLOCK, "split": SPLIT}
        self._sizes = self._whole | {"width": triton.next_power_of_2(self._splits)}
        self._is_balance, self._is_sought = is_balance, given is None
        most_steps = max(methods.STEPS, methods.BALANCE_STEPS)
        self.facts = self._empty(rows, NUM_FACTS.value)
        self._states = self._empty(most_steps + 1, rows, NUM_STATES.value)  # the last: what `bound` makes of them
        self._sums = self._empty(most_steps, rows, self._splits, NUM_SUMS.value)
        surveyed, grown = self._empty(rows, self._splits, NUM_SUMS.value), self._empty(rows, self._splits)
        survey[self._grid](*self._logits, surveyed, **self._whole, num_warps=4)
        grow[self._grid](*self._logits, surveyed, grown, **self._sizes, num_warps=4)
        settle[(rows,)](
            surveyed,
            grown,
            surveyed if given is None else given,
            self.facts,
            self._states,
            has_given=given is not None,
            is_balance=is_balance,
            splits=self._splits,
            width=self._sizes["width"],
            num_warps=1,
        )
        self._taken = 0

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self._logits[0].device)

    def seek(self, step: int) -> None:
        seek[self._grid](
            *self._logits,
            self.facts,
            self._states[max(step - 1, 0)],
            self._sums[max(step - 1, 0)],
            self._states[step],
            self._sums[step],
            is_first=step == 0,
            is_balance=self._is_balance,
            **self._sizes,
            num_warps=4,
        )
        self._taken = step + 1

    def finish(self, forced: Tensor, alpha_min: float, alpha_max: float) -> Mixed:
        refined, weighed = (self._empty(self._rows, self._splits, NUM_SUMS.value) for _ in range(2))
        numbers = self._empty(self._rows, len(NUMBERS))
        logits = torch.empty(self._rows, self._sizes["vocab_size"], device=self.facts.device)
        last = max(self._taken - 1, 0)
        bounds = {"alpha_min": alpha_min, "alpha_max": alpha_max}
        bound[(self._rows,)](
            self.facts,
            self._states[last],
            self._sums[last],
            forced.to(torch.int32),
            self._states[-1],
            **bounds,
            is_sought=self._is_sought,
            is_balance=self._is_balance,
            splits=self._splits,
            width=self._sizes["width"],
            num_warps=1,
        )
        refines = self._is_sought and not self._is_balance
        if refines:
            refine[self._grid](*self._logits, self.facts, self._states[-1], refined, **self._whole, num_warps=4)
        weigh[self._grid](
            *self._logits,
            self.facts,
            self._states[-1],
            refined,
            weighed,
            **bounds,
            refines=refines,
            **self._sizes,
            num_warps=4,
        )
        write[self._grid](
            *self._logits,
            self.facts,
            self._states[-1],
            weighed,
            logits,
            numbers,
            logits.stride(0),
            **self._sizes,
            num_warps=4,
        )
        return Mixed.of(logits, numbers)
