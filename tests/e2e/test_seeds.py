"""Same seed, same prompt, same tokens: alone or in a crowd, early or late, in any chunks, preempted, from the cache.

With exact logits the tokens are the same to the last one. With a real model they are the same up to the first place
where the reference itself is nearly undecided: transformers' logits, the slow pipeline, and a margin in the race below
1e-3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import LLM, RequestOutput, SamplingParams
from ramify.engine.core import EngineCore
from tests.conftest import CheckpointMaker
from tests.drive import Asked, finish, tokens_of
from tests.equal import MARGIN, race
from tests.fake import fake_engine
from tests.reference_sampler import reference_row

PLAIN: dict[str, Any] = {}
FILTERED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
CONTROLLED: dict[str, Any] = {
    "temperature": 1.2,
    "top_p": 0.95,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {5: 5.0, 6: 5.0, 4: -2.0},  # likely enough that the words below are begun
    "bad_words": ["3", "5 6", "6 6 5"],
    "min_tokens": 3,
}
MIXES = [PLAIN, FILTERED, CONTROLLED]
MIX_NAMES = ["plain", "filtered", "controlled"]
PROMPT = list(range(11, 31))


def words_as_numbers(words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """A tokenizer for tests: a word is the token ids it spells."""
    return tuple(tuple(int(part) for part in word.split()) for word in words)


def engine(**options: Any) -> EngineCore:
    made = fake_engine(**{"num_blocks": 1024, "max_num_seqs": 80, "max_num_batched_tokens": 256, **options})
    made.encode_words = words_as_numbers
    return made


def strangers(count: int) -> list[Asked]:
    """Requests of every kind, with prompts that begin like ours and prompts that do not, with seeds and without."""
    asked: list[Asked] = []
    for number in range(count):
        prompt = [*PROMPT[: number % 21], number + 1]
        if number % 5 == 4:
            params = SamplingParams(strategy="beam_search", n=2, max_tokens=4)
        else:
            seed = None if number % 3 == 0 else number
            params = SamplingParams(n=1 + number % 3, seed=seed, max_tokens=3 + number % 9, **MIXES[number % 3])
        asked.append((prompt, params))
    return asked


# -- exact logits: to the last token -----------------------------------------------------------------------------


@pytest.fixture(params=MIXES, ids=MIX_NAMES)
def ours(request: pytest.FixtureRequest) -> Asked:
    return PROMPT, SamplingParams(n=4, seed=7, max_tokens=12, **request.param)


@pytest.fixture
def expected(ours: Asked) -> list[tuple[int, ...]]:
    return tokens_of(finish(engine(), [ours])[0])


@pytest.mark.parametrize("room", [3, 80])
def test_the_same_among_sixty_four_strangers(ours: Asked, expected: list[tuple[int, ...]], room: int) -> None:
    crowd = strangers(64)
    for place in (0, 31, 64):
        outputs = finish(engine(max_num_seqs=room), [*crowd[:place], ours, *crowd[place:]])
        assert tokens_of(outputs[place]) == expected


def test_the_same_when_all_arrive_in_reverse() -> None:
    """Every request with a seed, not only ours; those without one have their place in the queue instead."""
    asked = [(prompt, params) for prompt, params in strangers(40) if params.seed is not None]
    forward = [tokens_of(output) for output in finish(engine(), asked)]
    backward = [tokens_of(output) for output in finish(engine(), asked[::-1])]
    assert len(asked) > 20
    assert backward[::-1] == forward


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 256])
def test_the_same_in_chunks_of_any_size(ours: Asked, expected: list[tuple[int, ...]], budget: int) -> None:
    assert tokens_of(finish(engine(max_num_batched_tokens=budget), [ours])[0]) == expected
    crowd = [each for each in strangers(8) if each[1].strategy is None]
    assert tokens_of(finish(engine(max_num_batched_tokens=budget), [*crowd, ours])[-1]) == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caches", [True, False])
def test_the_same_after_preemption(ours: Asked, expected: list[tuple[int, ...]], mode: Any, caches: bool) -> None:
    small = engine(num_blocks=20, block_size=2, preemption_mode=mode, num_host_blocks=64, enable_prefix_caching=caches)
    first = [1, 2, 3], SamplingParams(n=3, seed=1, max_tokens=16, ignore_eos=True)
    outputs = finish(small, [first, ours])
    assert small.stats()["preemptions"] > 2
    assert tokens_of(outputs[1]) == expected


def test_the_same_with_a_prefix_hit(ours: Asked, expected: list[tuple[int, ...]]) -> None:
    warm = engine()
    assert [tokens_of(finish(warm, [ours])[0]) for _ in range(2)] == [expected, expected]
    longer = ([*PROMPT[:16], 99], SamplingParams(max_tokens=2, seed=1))
    finish(warm, [longer])
    again = finish(warm, [ours])[0]
    assert again.num_cached_tokens == 16
    assert tokens_of(again) == expected


@pytest.mark.parametrize("mix", MIXES, ids=MIX_NAMES)
def test_child_i_is_the_same_whatever_n_is(mix: dict[str, Any]) -> None:
    children = {
        n: tokens_of(finish(engine(), [(PROMPT, SamplingParams(n=n, seed=7, max_tokens=10, **mix))])[0])
        for n in (1, 4, 64)
    }
    assert children[64][:4] == children[4]
    assert children[4][:1] == children[1]
    later = SamplingParams(n=4, child=60, seed=7, max_tokens=10, **mix)
    assert tokens_of(finish(engine(), [(PROMPT, later)])[0]) == children[64][60:]


@pytest.mark.parametrize("mix", MIXES, ids=MIX_NAMES)
def test_the_twelve_that_best_of_draws_are_the_twelve_of_n(mix: dict[str, Any]) -> None:
    """A score that ranks by number shows them in their order; the ordinary one ranks the same twelve."""
    options: dict[str, Any] = {"seed": 7, "max_tokens": 10, "ignore_eos": True, **mix}
    twelve = finish(engine(), [(PROMPT, SamplingParams(n=12, **options))])[0].outputs
    by_number = SamplingParams(n=11, best_of=12, score=lambda completion: -completion.index, **options)
    assert tokens_of(finish(engine(), [(PROMPT, by_number)])[0]) == [completion.token_ids for completion in twelve[:11]]
    best = finish(engine(), [(PROMPT, SamplingParams(n=5, best_of=12, **options))])[0]
    ranked = sorted(twelve, key=lambda completion: -completion.cumulative_logprob)
    assert tokens_of(best) == [completion.token_ids for completion in ranked[:5]]


@given(
    seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5),
    mixes=st.lists(st.sampled_from(MIXES), min_size=5, max_size=5),
    counts=st.lists(st.integers(1, 5), min_size=5, max_size=5),
    budget=st.sampled_from([1, 4, 256]),
    spare=st.sampled_from([0, 3, 500]),
    room=st.integers(1, 12),
    swaps=st.booleans(),
)
@settings(max_examples=25)
def test_the_same_in_every_world(
    *,
    seeds: list[int],
    mixes: list[dict[str, Any]],
    counts: list[int],
    budget: int,
    spare: int,
    room: int,
    swaps: bool,
) -> None:
    asked: list[Asked] = [
        (PROMPT[: 3 * number + 2], SamplingParams(n=n, seed=seed, max_tokens=7, **mix))
        for number, (seed, mix, n) in enumerate(zip(seeds, mixes, counts, strict=False))
    ]
    world = engine(
        num_blocks=7 + spare,  # the longest prompt and its output, and one block to copy
        max_num_seqs=room,
        max_num_batched_tokens=budget,
        preemption_mode="swap" if swaps else "recompute",
        num_host_blocks=30 if swaps else 0,
    )
    for output, each in zip(finish(world, asked), asked, strict=True):
        assert tokens_of(output) == tokens_of(finish(engine(), [each])[0])


# -- streams ----------------------------------------------------------------------------------------------------

SEEDS = [0, 1, 2, -1, -2, 2**32, 2**32 + 1, -(2**63), 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2]


def flat(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
    """Every token alike: what is drawn is the noise and nothing else."""
    return torch.zeros_like(logits)


def noise_of(prompt: list[int], **options: Any) -> RequestOutput:
    params = SamplingParams(ignore_eos=True, logits_processors=[flat], **options)
    return finish(engine(), [(prompt, params)])[0]


def test_no_two_seeds_and_no_two_children_share_a_stream() -> None:
    """Of 12 x 16 streams of 16 tokens no two have four tokens in a row in common, wherever they stand."""
    runs: list[tuple[int, ...]] = []
    for seed in SEEDS:
        for tokens in tokens_of(noise_of([1, 2], n=16, seed=seed, max_tokens=16)):
            runs += [tokens[place : place + 4] for place in range(13)]
    assert len(runs) == 12 * 16 * 13
    assert len(set(runs)) == len(runs)


def test_the_noise_knows_the_place_in_the_output_and_not_the_prompt() -> None:
    short, long = (noise_of(prompt, n=3, seed=5, max_tokens=8) for prompt in ([9], PROMPT))
    assert tokens_of(short) == tokens_of(long)
    assert len(set(tokens_of(short))) == 3


# -- requests without a seed ------------------------------------------------------------------------------------


def test_requests_without_a_seed_repeat_with_the_engines() -> None:
    asked: list[Asked] = [(PROMPT, SamplingParams(n=2, max_tokens=8))] * 3

    def tokens(**options: Any) -> list[list[tuple[int, ...]]]:
        return [tokens_of(output) for output in finish(engine(**options), asked)]

    first = tokens(seed=3)
    assert tokens(seed=3) == first
    assert tokens(seed=3, max_num_batched_tokens=3, max_num_seqs=2, num_blocks=16) == first
    assert tokens(seed=4) != first
    assert len({tuple(children) for children in first}) == 3, "each has a seed of its own"


def test_a_request_without_a_seed_depends_on_its_place_in_the_queue_alone() -> None:
    unseeded = PROMPT, SamplingParams(max_tokens=8)
    others: list[list[Asked]] = [
        [([1], SamplingParams(max_tokens=2, seed=1)), ([2], SamplingParams(max_tokens=2))],
        [([3, 4], SamplingParams(n=3, max_tokens=5)), ([2], SamplingParams(temperature=0, max_tokens=9))],
    ]
    assert len({tokens_of(finish(engine(), [*some, unseeded])[2])[0] for some in others}) == 1
    assert tokens_of(finish(engine(), [unseeded])[0]) != tokens_of(finish(engine(), [*others[0], unseeded])[2])


# -- a real model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certain:
    """One child's tokens, as far as the reference is sure of them."""

    token_ids: tuple[int, ...]
    length: int


class Reference:
    """Draws as the promises read: transformers' logits, the slow pipeline, the race with the keyed noise."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.num_tokens = 0
        self.num_uncertain = 0

    def check(self, output: RequestOutput, params: SamplingParams) -> list[Certain]:
        """Asserts that every child drew what the reference draws; tells how far that was certain."""
        prompt = list(output.prompt_token_ids)
        return [
            Certain(completion.token_ids, self._check_child(prompt, completion.index, completion.token_ids, params))
            for completion in output.outputs
        ]

    def _check_child(self, prompt: list[int], child: int, token_ids: tuple[int, ...], params: SamplingParams) -> int:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1].tolist()
        for place, token_id in enumerate(token_ids):
            row = reference_row(
                logits[place],
                params,
                prompt=prompt,
                output=token_ids[:place],
                bad_words=words_as_numbers(params.bad_words or ()),
                slack=2e-5,
            )
            winner, margin = race(row.logits, (params.seed or 0, child, place))
            self.num_tokens += 1
            if margin < MARGIN or row.undecided:
                self.num_uncertain += 1
                return place
            assert token_id == winner, f"child {child}, token {place}, margin {margin}"
        return len(token_ids)


def assert_equal(output: RequestOutput, expected: Sequence[Certain]) -> None:
    for completion, certain in zip(output.outputs, expected, strict=False):
        assert completion.token_ids[: certain.length] == certain.token_ids[: certain.length]


REAL_PROMPT = [(7 * place) % 320 for place in range(40)]
WORLDS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 64, "max_num_seqs": 5},
    {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 12},
    {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 12, "preemption_mode": "swap", "swap_space": 0.01},
    {"enable_prefix_caching": False, "block_size": 3},
]


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama", initializer_range=0.15)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def make_llm(folder: Path, **options: Any) -> LLM:
    llm = LLM(str(folder), **options)
    llm.core.encode_words = words_as_numbers
    return llm


def generate(llm: LLM, asked: Sequence[Asked]) -> list[RequestOutput]:
    return llm.generate([list(prompt) for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)


def test_a_real_model_draws_what_the_reference_draws_in_every_world(
    folder: Path, reference: Reference, record_property: Callable[[str, object], None]
) -> None:
    llm = make_llm(folder)
    requests: list[Asked] = [
        (REAL_PROMPT, SamplingParams(n=6, seed=41, max_tokens=14, ignore_eos=True, **mix)) for mix in MIXES
    ]
    certain = [reference.check(generate(llm, [each])[0], each[1]) for each in requests]
    crowd = [(prompt, params) for prompt, params in strangers(64) if params.strategy is None]
    for options in WORLDS:
        world = make_llm(folder, **options)
        for asked in ([*crowd, *requests], [*requests, *crowd][::-1]):
            outputs = generate(world, asked)
            for each, expected in zip(requests, certain, strict=True):
                assert_equal(outputs[[request is each for request in asked].index(True)], expected)
        warm = generate(world, requests)
        for output, expected in zip(warm, certain, strict=True):
            assert_equal(output, expected)
        if world.config.cache_config.enable_prefix_caching and "num_kv_blocks" not in options:
            assert all(output.num_cached_tokens > 0 for output in warm)
        assert (world.stats()["preemptions"] > 0) == ("num_kv_blocks" in options)
        assert world.stats()["blocks_in_use"] == 0
    record_property("uncertain", reference.num_uncertain)
    assert sum(child.length for children in certain for child in children) > 0.8 * 3 * 6 * 14


@pytest.mark.parametrize("mix", MIXES, ids=MIX_NAMES)
def test_child_i_of_a_real_model_is_the_same_whatever_n_is(
    folder: Path, reference: Reference, mix: dict[str, Any]
) -> None:
    llm = make_llm(folder)
    outputs = {}
    for n in (64, 4, 1):
        params = SamplingParams(n=n, seed=5, max_tokens=8, **mix)
        outputs[n] = generate(llm, [(REAL_PROMPT, params)])[0]
    certain = reference.check(outputs[64], SamplingParams(n=64, seed=5, max_tokens=8, **mix))
    assert sum(child.length for child in certain) > 0.8 * 64 * 8
    assert_equal(outputs[4], certain)
    assert_equal(outputs[1], certain)
    best = SamplingParams(n=11, best_of=12, seed=5, max_tokens=8, score=lambda completion: -completion.index, **mix)
    assert_equal(generate(llm, [(REAL_PROMPT, best)])[0], certain)
