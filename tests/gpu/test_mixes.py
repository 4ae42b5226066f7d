"""Random mixes of requests on the GPU: the tokens of the CPU path; and how often controlled rows draw what."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ramify import LLM, SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.gpu.sampler import KernelSampler
from tests.conftest import CheckpointMaker
from tests.equivalence.test_sampler_reference import chi_square_limit
from tests.gpu.engines import OPTIONS, PROMPTS, engine
from tests.kernels.test_controls import by_kernels
from tests.reference_sampler import reference_row

MIXES, MOST_REQUESTS = 200, 6
ROWS, STEPS, VOCAB = 256, 80, 300


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
            [{"typical_p": 0.9}, {"xtc_probability": 0.5}, {"dry_multiplier": 1.0}, {"no_repeat_ngram_size": 2}]
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
    means = np.array(expected.probabilities) * ROWS * STEPS
    assert not counted[means == 0].any()
    large = means >= 5
    cells = [*zip(counted[large], means[large], strict=True)]
    if means[~large].sum() >= 5:
        cells.append((counted[~large].sum(), means[~large].sum()))
    assert sum((count - mean) ** 2 / mean for count, mean in cells) < chi_square_limit(len(cells) - 1)
