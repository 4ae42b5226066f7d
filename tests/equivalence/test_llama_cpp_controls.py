"""XTC, DRY and mirostat against llama.cpp's own samplers, whose results `record_llama_cpp.py` has recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.sampling import truncation
from ramify.sampling.pipeline import Sampler, Source

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("llama_cpp_controls.json").read_text())


def left_by_sampler(logits: list[float], params: SamplingParams, seen: list[int]) -> dict[int, float]:
    """The log-probabilities of what a whole sampler draws from."""
    demands = Demands(params, seed=1, prompts=(seen,))
    draw = Draw("request", 0, 0, 0, (), demands, [])
    [report] = Sampler("processed").sample([Source(torch.tensor([logits]), [0])], [draw]).reports.values()
    pairs = zip(report.top_token_ids, report.top_logprobs, strict=True)
    return {int(token): float(logprob) for token, logprob in pairs if logprob > -math.inf}


@pytest.mark.parametrize("case", RECORDED["xtc"])
def test_xtc_keeps_what_llama_cpp_keeps(case: dict[str, Any]) -> None:
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=case["threshold"], logprobs=len(case["logits"]))
    assert sorted(left_by_sampler(case["logits"], params, [])) == case["kept"]


@pytest.mark.parametrize("case", RECORDED["dry"])
def test_dry_costs_what_it_costs_in_llama_cpp(case: dict[str, Any]) -> None:
    options = {name: value for name, value in case.items() if name.startswith("dry_")}
    params = SamplingParams(**options, dry_sequence_breakers=[], logprobs=len(case["logits"]))
    expected = torch.tensor(case["left"]).log_softmax(-1).tolist()
    made = left_by_sampler(case["logits"], params, case["seen"])
    assert [made[token] for token in range(len(expected))] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", RECORDED["mirostat"])
def test_mirostat_follows_surprise_as_llama_cpp_does(case: dict[str, Any]) -> None:
    """The tokens that llama.cpp drew are taken as drawn here, since the two have different random numbers."""
    limit = 2 * case["tau"]
    for step in case["steps"]:
        kept = truncation.mirostat(torch.tensor([step["logits"]]), torch.tensor([limit]))[0]
        assert torch.flatten(torch.nonzero(kept > -math.inf)).tolist() == step["kept"]
        surprise = -float(kept.log_softmax(-1)[step["chosen"]]) / math.log(2)
        limit -= case["eta"] * (surprise - case["tau"])


def test_the_record_says_where_it_is_from_and_has_something_to_tell() -> None:
    assert RECORDED["source"].startswith("llama-cpp-python")
    assert any(len(case["kept"]) < len(case["logits"]) for case in RECORDED["xtc"])
    assert sum(case["left"] != pytest.approx(case["logits"]) for case in RECORDED["dry"]) > 6
    assert any(len(step["kept"]) < 8 for case in RECORDED["mirostat"] for step in case["steps"])
