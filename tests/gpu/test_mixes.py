"""Random mixes of requests on the GPU: the tokens of the CPU path; and how often controlled rows draw what."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ramify import LLM, SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.gpu.sampler import KernelSampler
from tests.conftest import CheckpointMaker
from tests.equivalence.test_more_controls import Case
from tests.equivalence.test_sampler_reference import chi_square_limit
from tests.gpu.engines import OPTIONS, PROMPTS, engine
from tests.kernels.test_controls import by_kernels
from tests.reference_sampler import reference_row

MIXES, MOST_REQUESTS = 200, 6
ROWS, STEPS, VOCAB = 256, 80, 300
# What kernels bend and cut beyond top-k, top-p and min-p.
RULES: dict[str, Any] = {
    "top_n_sigma": 1.5,
    "dynatemp_range": 0.5,
    "smoothing_factor": 0.3,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.005,
    "eta_cutoff": 0.01,
    "top_a": 0.2,
    "p_less": True,
    "xtc_probability": 0.5,
}


def random_params(numbers: random.Random) -> SamplingParams:
    """Every strategy, filter and control in some of them; few enough tokens that 200 mixes take a minute."""
    kind = numbers.choice(["greedy", *["drawn"] * 3, "best", "beams", "groups", "diverse", "rules", "distinct"])
    options: dict[str, Any] = {"max_tokens": numbers.randint(1, 8), "ignore_eos": numbers.random() < 0.5}
    if numbers.random() < 0.3:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    if numbers.random() < 0.2:
        options["logit_bias"] = {5: 3.0, 9: -100.0}
    if numbers.random() < 0.2:
        options["allowed_token_ids"] = list(range(0, 200, 3))
    if numbers.random() < 0.2:
        options["min_tokens"] = 1
    if numbers.random() < 0.3:
        options["logprobs"] = numbers.choice([0, 3, 20])
    if kind == "greedy":
        return SamplingParams(temperature=0, **options)
    if kind in ("beams", "groups"):
        groups: dict[str, Any] = {"num_beam_groups": 2, "diversity_penalty": 0.5} if kind == "groups" else {}
        return SamplingParams(strategy="beam_search", n=2, beam_width=4, **groups, **options)
    options |= {"seed": numbers.getrandbits(30), "n": numbers.randint(1, 4)}
    if kind == "distinct":
        return SamplingParams(strategy="without_replacement", **options)
    options["temperature"] = numbers.choice([0.6, 1.0, 1.4])
    options |= numbers.choice([{}, {"top_p": 0.9}, {"top_k": 12}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.05}])
    if kind == "best":
        options["best_of"] = options["n"] + 2
    elif kind == "diverse":
        options |= {"strategy": "diverse", "diversity_penalty": 1.5}
    elif kind == "rules":
        options |= numbers.choice(
            [*({name: value} for name, value in RULES.items()), {"dry_multiplier": 1.0}, {"no_repeat_ngram_size": 2}]
        )
    return SamplingParams(**options)


def test_random_mixes_draw_what_the_cpu_draws(
    make_checkpoint: CheckpointMaker, record_property: Callable[[str, object], None]
) -> None:
    """Near-ties may fall otherwise where logits differ in the last digits: such requests are counted, and few."""
    folder = make_checkpoint("qwen3")
    on_cpu = LLM(str(folder), device="cpu", dtype="float32", **OPTIONS)
    on_gpu = engine(folder, "float32")
    numbers = random.Random(20)
    requests = different = 0
    for _ in range(MIXES):
        count = numbers.randint(1, MOST_REQUESTS)
        prompts = [numbers.choice(PROMPTS) for _ in range(count)]
        params = [random_params(numbers) for _ in range(count)]
        expected = on_cpu.generate(prompts, params, use_tqdm=False)
        for made, wanted in zip(on_gpu.generate(prompts, params, use_tqdm=False), expected, strict=True):
            requests += 1
            assert made.error == wanted.error
            different += [each.token_ids for each in made.outputs] != [each.token_ids for each in wanted.outputs]
    record_property("requests", requests)
    record_property("different", different)
    assert on_gpu.stats()["blocks_in_use"] == 0
    assert different <= requests // 200


def test_what_kernels_serve_never_waits_for_torchs_sampler(
    make_checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules, diverse sets, and beams that report logprobs."""
    on_gpu = engine(make_checkpoint("qwen3"), "float32")

    def refuse(*_: object) -> None:
        raise AssertionError("torch's sampler was asked")

    monkeypatch.setattr("ramify.sampling.pipeline.Sampler.sample", refuse)
    params = [SamplingParams(max_tokens=6, seed=1, **{name: value}) for name, value in RULES.items()]
    params.append(SamplingParams(max_tokens=6, seed=1, n=4, strategy="diverse", diversity_penalty=1.5, logprobs=2))
    params.append(SamplingParams(max_tokens=6, n=2, beam_width=4, strategy="beam_search", logprobs=3))
    outputs = on_gpu.generate([PROMPTS[0]] * len(params), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(params)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.4},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3, "presence_penalty": 0.8},
        {"min_p": 0.05, "logit_bias": {3: 2.0, 7: -1.5}, "temperature": 0.7},
        {"allowed_token_ids": list(range(0, 300, 7)), "repetition_penalty": 0.8, "top_p": 0.95},
    ],
    ids=str,
)
def test_controlled_rows_are_drawn_as_often_as_the_reference_says(
    options: dict[str, Any], device: torch.device
) -> None:
    """20,480 draws; right samplers exceed the limit once in a million tests."""
    params = SamplingParams(**options, max_tokens=None)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    prompt, output = [1, 2, 3, 40, 299], [7, 7, 9, 40]
    expected = reference_row(logits.tolist(), params, prompt=prompt, output=output)
    assert not expected.undecided
    sampler = KernelSampler(ROWS, VOCAB, device, "raw")
    counted = np.zeros(VOCAB, np.int64)
    for step in range(STEPS):
        # A request each: what a row draws is counted for the next one of the same request.
        draws = [
            Draw(str(row), 0, row, len(output), (), Demands(params, step * ROWS + row, step, (prompt,)), tuple(output))
            for row in range(ROWS)
        ]
        result = by_kernels(sampler, [logits.expand(ROWS, -1).contiguous()], draws, device)
        assert not result.faults
        counted += np.bincount(result.token_ids, minlength=VOCAB)
    check_counts(counted, np.array(expected.probabilities) * ROWS * STEPS)


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_are_drawn_as_often_as_the_reference_says(name: str, device: torch.device) -> None:
    """The same against the slow reference of these rules; coins fall anew for each draw."""
    numbers = random.Random(f"counted {name}")
    probabilities = None
    while probabilities is None:
        case = Case(numbers, 40, name)
        plain, excluding = case.reference(excludes=False), case.reference(excludes=True)
        share = case.params.xtc_probability
        likely = np.exp(plain.logprobs) * (1 - share) + (np.exp(excluding.logprobs) * share if share else 0.0)
        if not (plain.undecided or excluding.undecided) and (likely * ROWS * STEPS >= 5).sum() > 2:
            probabilities = likely
    demands = replace(case.draw().demands, params=replace(case.params, logprobs=None))
    assert demands.sampler == "shaped"
    sampler = KernelSampler(ROWS, 40, device, "raw")
    logits = torch.tensor([case.logits]).expand(ROWS, -1).contiguous()
    counted = np.zeros(40, np.int64)
    for step in range(STEPS):
        draws = [Draw("r", row, row, step, (), demands, case.output) for row in range(ROWS)]
        counted += np.bincount(by_kernels(sampler, [logits], draws, device).token_ids, minlength=40)
    check_counts(counted, probabilities * ROWS * STEPS)


def check_counts(counted: NDArray[np.int64], means: NDArray[np.float64]) -> None:
    """Chi-square; what cannot be drawn never was."""
    assert not counted[means == 0].any()
    large = means >= 5
    cells = [*zip(counted[large], means[large], strict=True)]
    if means[~large].sum() >= 5:
        cells.append((counted[~large].sum(), means[~large].sum()))
    assert sum((count - mean) ** 2 / mean for count, mean in cells) < chi_square_limit(len(cells) - 1)
