"""What holds for every rule that leaves tokens out: rows do not see each other, and what stays keeps its bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify import SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.sampling import processors, truncation
from ramify.sampling.columns import numbers_of
from tests.drive import finish
from tests.fake import fake_engine

RULES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "top_n_sigma": (truncation.top_n_sigma, 1.5),
    "typical_p": (truncation.typical_p, 0.8),
    "epsilon_cutoff": (truncation.epsilon_cutoff, 1e-3),
    "eta_cutoff": (truncation.eta_cutoff, 1e-2),
    "top_a": (truncation.top_a, 0.3),
    "p_less": (lambda logits, _: truncation.p_less(logits), 0.0),
    "mirostat": (truncation.mirostat, 7.0),
    "xtc": (truncation.xtc, 0.01),
}


def _rows() -> Tensor:
    """Sharp, flat, with a few forbidden tokens, with nearly all forbidden, all equal, and no numbers at all."""
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2))
    logits[0] *= 6
    logits[2, ::3] = -math.inf
    logits[3, 2:] = -math.inf
    logits[4] = -5.0
    logits[5] = math.nan
    return logits


@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_see_each_other(name: str) -> None:
    rule, value = RULES[name]
    logits, asked = _rows(), torch.full((6,), value)
    before = logits.clone()
    together = rule(logits, asked)
    for row in range(6):
        alone = rule(logits[row : row + 1], asked[row : row + 1])[0]
        assert torch.equal(together[row].nan_to_num(nan=1.0), alone.nan_to_num(nan=1.0)), f"row {row}"
    assert torch.equal(logits.nan_to_num(nan=1.0), before.nan_to_num(nan=1.0)), "logits are not the rule's to change"


@pytest.mark.parametrize("name", RULES)
def test_what_stays_keeps_its_bits_and_something_stays(name: str) -> None:
    rule, value = RULES[name]
    logits = _rows()[:5]
    kept = rule(logits, torch.full((5,), value))
    stays = kept > -math.inf
    assert torch.equal(kept[stays], logits[stays])
    assert bool(stays.any(-1).all())
    assert not bool((stays & (logits == -math.inf)).any())
    assert not bool(stays[0].all()), "a sharp row loses tokens"
    assert bool(stays[4].all()), "ties stay together"


@pytest.mark.parametrize("name", RULES)
def test_a_row_of_no_numbers_stays_one(name: str) -> None:
    """It is the model's fault, and must be told as such."""
    rule, value = RULES[name]
    assert bool(rule(_rows()[5:], torch.full((1,), value)).isnan().all())


def test_rows_are_left_with_what_they_are_allowed() -> None:
    logits = torch.arange(12.0).view(3, 4)
    rows, token_ids = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 3, 0, 0, 2])
    allowed = processors.allow_only(logits, rows, token_ids)
    never = -math.inf
    assert allowed.tolist() == [[never, 1.0, never, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, never, 10.0, never]]
    assert logits.tolist() == torch.arange(12.0).view(3, 4).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"smoothing_factor": 1e39},
        {"smoothing_factor": 1e308, "temperature": 1e39},
        {"temperature": 1e39, "dynatemp_range": 1e39, "dynatemp_exponent": 1e39},
        {"top_n_sigma": 1e39},
        {"mirostat_tau": 1e308, "mirostat_eta": 1.0},
        {"dry_multiplier": 1e39, "dry_base": 1e39},
        {"strategy": "diverse", "n": 3, "diversity_penalty": 1e39},
    ],
    ids=lambda options: next(reversed(options)),
)
@pytest.mark.parametrize("allowed", [[3], [3, 4]])
def test_what_float32_has_no_room_for_is_as_much_as_it_has(allowed: list[int], options: dict[str, Any]) -> None:
    """Infinity times nothing is no number: tokens were drawn that are not allowed, with logprobs that were none."""
    params = SamplingParams(allowed_token_ids=allowed, max_tokens=4, seed=1, logprobs=2, ignore_eos=True, **options)
    [output] = finish(fake_engine(logprobs_mode="processed"), [([1, 2, 1, 2, 1], params)])
    assert output.error is None
    for completion in output.outputs:
        assert set(completion.token_ids) <= set(allowed)
        assert completion.logprobs is not None
        told = [row[token] for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert all(math.isfinite(each.logprob) for each in told)
    demands = Demands(params)
    floats = numbers_of(Draw("0", 0, 0, 0, (), demands))[1]
    assert torch.isfinite(torch.tensor(floats, dtype=torch.float32)).all(), "what kernels are given"
