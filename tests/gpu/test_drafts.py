"""A student's drafts on the GPU, chained and checked in graphs: requests get the tokens that they get without."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ramify import LLM, OptimalSampling, Request, SamplingParams
from ramify.config import MixtureConfig
from ramify.device.step import DeviceStep
from ramify.engine.drafting.tempo import Tempo
from ramify.engine.drafting.together import Together
from ramify.sampling.mixing import Mixer
from tests.conftest import CheckpointMaker
from tests.equal import MARGIN, race

VOCABULARY = 320
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 2048, "max_num_seqs": 32}
# Near the student, so that it is often right.
MIXTURE: dict[str, Any] = {"alpha_method": "fixed", "alpha": 0.2}
Asked = tuple[list[int], list[int], SamplingParams]
Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(make_checkpoint: CheckpointMaker) -> tuple[Path, Path]:
    return make_checkpoint("llama"), make_checkpoint("qwen2")


def pair(
    folders: tuple[Path, Path], *, device: str = "cuda", dtype: Any = "float32", **options: Any
) -> OptimalSampling:
    return OptimalSampling(*map(str, folders), device=device, dtype=dtype, **{**OPTIONS, **MIXTURE, **options})


def random_requests(count: int, numbers: random.Random) -> list[Asked]:
    """With filters, logprobs, penalties, and several samples; some begin alike."""
    beginning = [numbers.randrange(VOCABULARY) for _ in range(40)]
    asked = []
    for _ in range(count):
        own = [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 50))]
        teacher = beginning[: numbers.choice([0, 0, 33, 40])] + own
        theta = [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 20))] + own
        options: dict[str, Any] = {"seed": numbers.randrange(2**32), "n": numbers.choice([1, 1, 1, 1, 3])}
        options["max_tokens"] = numbers.randint(1, 28)
        options["temperature"] = numbers.choice([0.7, 1.0, 1.0] if options["n"] > 1 else [0.0, 0.7, 1.0, 1.0])
        if numbers.random() < 0.2:
            options |= numbers.choice([{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}, {"typical_p": 0.9}])
        if numbers.random() < 0.1:
            options |= numbers.choice([{"repetition_penalty": 1.2}, {"logit_bias": {5: 2.0}}, {"speculate": False}])
        if numbers.random() < 0.2:
            options["logprobs"] = 2
        asked.append((teacher, theta, SamplingParams(ignore_eos=True, detokenize=False, **options)))
    return asked


def run(both: OptimalSampling, asked: list[Asked], *, at_once: int = 8) -> list[Tokens]:
    """So many requests at a time."""
    core, pending = both.core, list(enumerate(asked))
    told: dict[str, Tokens] = {}
    num_open = 0
    while pending or core.has_unfinished():
        while pending and num_open < at_once:
            number, (teacher, theta, params) = pending.pop(0)
            core.add_request(Request(str(number), None, teacher, params, other_prompts=[(1, theta)]))
            num_open += 1
        for output in core.step():
            assert output.error is None
            told[output.request_id] = [tuple(sample.token_ids) for sample in output.outputs]
            num_open -= 1
    assert core.stats()["blocks_in_use"] == 0
    return [told[str(number)] for number in range(len(asked))]


def drafting(lengths: list[int]) -> Any:
    """Drafts of these lengths by turns, whatever they cost."""
    chosen = itertools.cycle(lengths)
    return patch.object(Tempo, "length", lambda _self, _size, most, _share: min(next(chosen), max(0, most)))


def margin(folders: tuple[Path, Path], asked: Asked, output: tuple[int, ...], child: int, place: int) -> float:
    """How narrowly the token of this place won its race, in float64."""
    import transformers

    logits = []
    for folder, prompt in zip(folders, asked[:2], strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            logits.append(model(torch.tensor([[*prompt, *output[:place]]])).logits[0, -1:])
    params = asked[2]
    temperature = torch.tensor([params.temperature or 1.0], dtype=torch.float64)
    mixed = (
        Mixer(MixtureConfig(**MIXTURE))
        .mix(logits[0], logits[1], temperature, torch.tensor([place == 0]))
        .logits[0]
        .double()
    )
    if not params.temperature:
        first, second = mixed.topk(2).values.tolist()
        return float(first - second)
    assert params.seed is not None
    return race(mixed.tolist(), (params.seed, child, place))[1]


def check(folders: tuple[Path, Path], asked: list[Asked], plain: list[Tokens], drafted: list[Tokens]) -> int:
    """Equal up to where the race was nearly undecided; returns how many places that were."""
    num_ties = 0
    for each, ours, theirs in zip(asked, plain, drafted, strict=True):
        for child, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert len(one) == len(other)
            if one == other:
                continue
            place = next(place for place, both in enumerate(zip(one, other, strict=True)) if both[0] != both[1])
            how_narrow = margin(folders, each, one, child, place)
            print(f"{each[2]}: token {place} of child {child} differs, margin {how_narrow}")
            assert how_narrow < MARGIN
            num_ties += 1
    return num_ties


def test_a_thousand_requests_get_the_same_tokens(folders: tuple[Path, Path]) -> None:
    asked = random_requests(1_000, random.Random(5))
    plain = run(pair(folders), asked)
    both = pair(folders, speculation="student")
    assert isinstance(both.core.scheduler.speculation, Together)
    with drafting([3, 3, 3, 0, 2, 2]):
        drafted = run(both, asked)
    stats = both.stats()["engine"]
    print(f"{stats['accepted_tokens']} of {stats['drafted_tokens']} drafted tokens were drawn")
    assert check(folders, asked, plain, drafted) <= 5
    assert 2_000 < stats["accepted_tokens"] < stats["drafted_tokens"]
    step = both.core.device
    assert isinstance(step, DeviceStep)
    assert {"drafts", "decodes", "with prompts", "draws"} <= {shape.kind for shape in step.graphs.captured}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_the_same_where_they_are_batch_invariant(folders: tuple[Path, Path], dtype: str) -> None:
    numbers = random.Random(6)
    asked = [
        (teacher, theta, SamplingParams(seed=3, max_tokens=24, ignore_eos=True, n=number % 3 + 1))
        for number, (teacher, theta, _) in enumerate(random_requests(12, numbers))
    ]
    options: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
    plain = run(pair(folders, **options), asked)
    both = pair(folders, speculation="student", **options)
    with drafting([3]):
        assert run(both, asked) == plain
    assert both.stats()["engine"]["accepted_tokens"] > 20


def test_one_request_at_a_time(folders: tuple[Path, Path]) -> None:
    asked = random_requests(12, random.Random(7))
    alone, both = pair(folders, max_num_seqs=3), pair(folders, max_num_seqs=3, speculation="student")
    with drafting([8, 1, 4]):
        for each in asked:
            check(folders, [each], run(alone, [each]), run(both, [each]))
    assert both.stats()["engine"]["drafted_tokens"] > 0


def test_a_draft_model_of_its_own(folders: tuple[Path, Path]) -> None:
    """One model, and one with other kernels' shapes that drafts for it; and the same model for itself."""
    params = SamplingParams(n=2, seed=3, max_tokens=30, ignore_eos=True)
    prompts = [[number, *range(5, 5 + 3 * number)] for number in range(8)]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", **OPTIONS}
    expected = [output.outputs for output in LLM(str(folders[0]), **options).generate(prompts, params, use_tqdm=False)]
    for name in folders:
        llm = LLM(str(folders[0]), speculation=str(name), **options)
        assert isinstance(llm.core.scheduler.speculation, Together)
        with drafting([3]):
            told = llm.generate(prompts, params, use_tqdm=False)
        for output, samples in zip(told, expected, strict=True):
            assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in samples]
        stats = llm.stats()
        assert stats["drafted_tokens"] > 100
        if name == folders[0]:
            assert stats["accepted_tokens"] > 0.8 * stats["drafted_tokens"]  # the others are behind an end


def test_two_models_at_once_draw_the_same(folders: tuple[Path, Path]) -> None:
    """What runs beside the rest has memory of its own: to the bit."""
    asked = random_requests(60, random.Random(8))
    in_turn, at_once = pair(folders), pair(folders)
    step = in_turn.core.device
    assert isinstance(step, DeviceStep)
    assert step.computes_both
    step.computes_both = False
    assert run(at_once, asked, at_once=20) == run(in_turn, asked, at_once=20)


def test_look_ups(folders: tuple[Path, Path]) -> None:
    """Greedy outputs of a tiny model soon repeat themselves."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", **OPTIONS}
    told = []
    for speculation in (None, "ngram"):
        llm = LLM(str(folders[0]), speculation=speculation, **options)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in ([5, 6, 7], [9] * 20)]
        told.append([output.outputs[0].token_ids for output in outputs])
    assert told[0] == told[1]
    assert llm.stats()["accepted_tokens"] > 5
