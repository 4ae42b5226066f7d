"""Callers' own logits processors: what they are given, what they may do, and that their faults are theirs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import FinishReason, RequestOutput, SamplingParams
from tests.drive import Asked, finish, tokens_of
from tests.fake import VOCAB, fake_engine, logits_after

Processor = Callable[[Sequence[int], Tensor], Any]


class Batched:
    """The batched form: remembers its calls and does what it is told to each row."""

    def __init__(self, change: Processor) -> None:
        self.change = change
        self.calls: list[list[list[int]]] = []

    def __call__(self, _token_ids: Sequence[int], _logits: Tensor) -> Tensor:
        raise AssertionError("process_batch is what is called")

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        self.calls.append([list(row) for row in token_ids])
        assert logits.shape == (len(token_ids), VOCAB)
        return torch.stack([self.change(ids, row) for ids, row in zip(token_ids, logits, strict=True)])


def favour_seven(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
    changed = logits.clone()
    changed[7] += 3.0
    return changed


def favour_seven_in_place(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
    logits[7] += 3.0
    return logits


# Every way to generate, and a mix of controls beside the processor.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "n": 4, "temperature": 0.7, "top_p": 0.9},
    {"seed": 3, "n": 2, "best_of": 5, "frequency_penalty": 1.0},
    {"n": 3, "beam_width": 3, "strategy": "beam_search"},
    {"n": 2, "beam_width": 4, "strategy": "beam_search", "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"seed": 4, "n": 3, "strategy": "diverse", "diversity_penalty": 2.0},
]


def run(asked: Sequence[Asked], **options: Any) -> list[RequestOutput]:
    return finish(fake_engine(**{"num_blocks": 256, "max_num_seqs": 64, **options}), asked)


def alone(asked: Asked) -> RequestOutput:
    return run([asked])[0]


def results(output: RequestOutput) -> list[Any]:
    return [
        (completion.token_ids, completion.cumulative_logprob, completion.score, completion.finish_reason)
        for completion in output.outputs
    ]


# -- what they are given ----------------------------------------------------------------------------------------


def test_a_processor_sees_prompt_and_output_so_far_and_the_rows_logits() -> None:
    seen: list[tuple[Sequence[int], Tensor]] = []

    def watch(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append((token_ids, logits.clone()))
        return logits

    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True, logits_processors=[watch])
    output = alone(([3, 4, 5], params)).outputs[0]
    expected = [[3, 4, 5, *output.token_ids[:place]] for place in range(5)]
    assert [token_ids for token_ids, _ in seen] == expected
    for token_ids, logits in seen:
        assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (VOCAB,))
        assert torch.equal(logits, logits_after(list(token_ids)))


def test_every_sample_is_seen_with_its_own_tokens() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(tuple(token_ids))
        return logits

    params = SamplingParams(n=4, max_tokens=4, seed=1, ignore_eos=True, logits_processors=[watch])
    outputs = alone(([3, 4], params)).outputs
    expected = [(3, 4, *completion.token_ids[:place]) for completion in outputs for place in range(4)]
    assert sorted(seen) == sorted(expected)


def test_every_beam_is_seen_with_its_own_tokens() -> None:
    seen: set[tuple[int, ...]] = set()

    def watch(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.add(tuple(token_ids))
        return logits

    params = SamplingParams(strategy="beam_search", n=3, beam_width=3, max_tokens=4, logits_processors=[watch])
    outputs = alone(([3, 4], params)).outputs
    assert {
        (3, 4, *completion.token_ids[:place]) for completion in outputs for place in range(len(completion.token_ids))
    } <= seen
    assert len(seen) <= 1 + 3 * 3, "one beam, then three at a time"


def test_a_preempted_request_shows_its_processor_every_place_once() -> None:
    """What is computed again was drawn before: a processor with a memory must not meet it twice."""
    seen: list[tuple[int, ...]] = []

    def watch(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(tuple(token_ids))
        return logits

    asked = [
        ([base], SamplingParams(n=2, max_tokens=14, seed=base, ignore_eos=True, logits_processors=[watch]))
        for base in (1, 2, 3)
    ]
    engine = fake_engine(num_blocks=9, enable_prefix_caching=False)
    outputs = finish(engine, asked)
    assert engine.stats()["preemptions"] > 0
    places = [
        (*output.prompt_token_ids, *completion.token_ids[:place])
        for output in outputs
        for completion in output.outputs
        for place in range(14)
    ]
    assert sorted(seen) == sorted(places)


# -- what they may do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("form", ["plain", "in place", "batched", "batched in place"])
def test_a_processor_that_adds_is_a_bias(way: dict[str, Any], form: str) -> None:
    """The same change made by logit_bias must give the same outputs, in every form and every way to generate."""
    change = favour_seven_in_place if "in place" in form else favour_seven
    processor: Any = Batched(change) if "batched" in form else change
    with_processor = SamplingParams(max_tokens=6, **way, logits_processors=[processor])
    with_bias = SamplingParams(max_tokens=6, **way, logit_bias={7: 3.0})
    plain = SamplingParams(max_tokens=6, **way)
    outputs = run([([5, 6], with_processor), ([5, 6], plain), ([5, 6], with_bias)])
    if "frequency_penalty" not in way:  # a bias comes before penalties and a processor after: here that is one sum
        assert results(outputs[0]) == results(outputs[2])
    assert tokens_of(outputs[0]) == tokens_of(outputs[2])
    assert results(outputs[1]) == results(alone(([5, 6], plain))), "the neighbour on the same prompt saw nothing of it"


def test_processors_run_in_the_order_given() -> None:
    def double(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits * 2

    def only_nine(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([9]), 1.0)

    def nine_to_eight(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits.roll(-1)

    batched = Batched(nine_to_eight)
    orders: list[tuple[list[Any], int]] = [([double, only_nine, batched], 8), ([batched, double, only_nine], 9)]
    for order, token in orders:
        params = SamplingParams(max_tokens=3, seed=1, logits_processors=order)
        assert tokens_of(alone(([1], params))) == [(token,) * 3]


def test_other_kinds_of_numbers_are_taken_as_they_are() -> None:
    def whole(_token_ids: Sequence[int], _logits: Tensor) -> Tensor:
        return torch.arange(VOCAB)

    def precise(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits.double()

    assert tokens_of(alone(([1], SamplingParams(max_tokens=2, temperature=0, logits_processors=[whole])))) == [
        (VOCAB - 1,) * 2
    ]
    params = SamplingParams(max_tokens=4, seed=1, logits_processors=[precise])
    assert tokens_of(alone(([1], params))) == tokens_of(alone(([1], SamplingParams(max_tokens=4, seed=1))))


def test_what_a_processor_keeps_of_its_row_does_not_reach_back() -> None:
    kept: list[Tensor] = []

    def keep_and_spoil(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        for row in kept:
            row.fill_(torch.nan)
        kept.append(logits)
        return logits.clone()

    params = SamplingParams(n=3, max_tokens=4, seed=1, logits_processors=[keep_and_spoil])
    plain = SamplingParams(n=3, max_tokens=4, seed=1)
    assert results(alone(([1, 2], params))) == results(alone(([1, 2], plain)))


def test_cumulative_logprob_stays_the_models_own() -> None:
    def only_seven(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        logits[:7] = logits[8:] = -torch.inf
        return logits

    params = SamplingParams(max_tokens=2, seed=1, logits_processors=[only_seven])
    output = alone(([1, 2], params)).outputs[0]
    total = sum(float(logits_after(tokens).log_softmax(-1)[7]) for tokens in ([1, 2], [1, 2, 7]))
    assert output.token_ids == (7, 7)
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-5)


# -- the batched form --------------------------------------------------------------------------------------------


def test_the_batched_form_is_called_for_several_rows_at_once() -> None:
    batched = Batched(favour_seven)
    asked = [
        ([base], SamplingParams(n=2, max_tokens=3, seed=base, ignore_eos=True, logits_processors=[batched]))
        for base in (1, 2, 3)
    ]
    outputs = run(asked)
    assert [len(call) for call in batched.calls] == [6, 6, 6], "three steps of six samples"
    places = [
        [*output.prompt_token_ids, *completion.token_ids[:place]]
        for output in outputs
        for completion in output.outputs
        for place in range(3)
    ]
    assert sorted(row for call in batched.calls for row in call) == sorted(places)


def test_one_batched_object_serves_requests_of_every_kind_among_strangers() -> None:
    batched = Batched(favour_seven)
    asked: list[Asked] = []
    for number, way in enumerate(WAYS):
        asked.append(([number + 1, 2], SamplingParams(max_tokens=5, **way, logits_processors=[batched])))
        asked.append(([number + 1, 2], SamplingParams(max_tokens=5, **way)))
    for output, each in zip(run(asked), asked, strict=True):
        expected = each
        if each[1].logits_processors is not None:
            expected = (each[0], SamplingParams(max_tokens=5, **WAYS[each[0][0] - 1], logits_processors=[favour_seven]))
        assert results(output) == results(alone(expected))


@given(
    kinds=st.lists(st.sampled_from(["none", "plain", "batched"]), min_size=1, max_size=12),
    ways=st.lists(st.integers(0, len(WAYS) - 1), min_size=12, max_size=12),
    budget=st.sampled_from([9, 64]),
)
@settings(max_examples=15)
def test_any_mix_in_a_batch_gives_each_request_what_it_gets_alone(
    kinds: list[str], ways: list[int], budget: int
) -> None:
    processors: dict[str, Any] = {"none": None, "plain": [favour_seven], "batched": [Batched(favour_seven_in_place)]}
    asked = [
        ([number + 1], SamplingParams(max_tokens=3, **WAYS[way], logits_processors=processors[kind]))
        for number, (kind, way) in enumerate(zip(kinds, ways, strict=False))
    ]
    outputs = run(asked, max_num_batched_tokens=budget)
    assert [results(output) for output in outputs] == [results(alone(each)) for each in asked]


# -- their faults ------------------------------------------------------------------------------------------------


def raises(_token_ids: Sequence[int], _logits: Tensor) -> Any:
    raise ValueError("not today")


def returns_nothing(_token_ids: Sequence[int], logits: Tensor) -> Any:
    logits += 1


def returns_a_list(_token_ids: Sequence[int], logits: Tensor) -> Any:
    return logits.tolist()


def returns_too_few(_token_ids: Sequence[int], logits: Tensor) -> Any:
    return logits[..., :-1]


def returns_one_row_too_many(_token_ids: Sequence[int], logits: Tensor) -> Any:
    return logits[None]


def returns_nan(_token_ids: Sequence[int], logits: Tensor) -> Any:
    logits[..., 11] = torch.nan
    return logits


def returns_infinity(_token_ids: Sequence[int], logits: Tensor) -> Any:
    logits[..., 11] = torch.inf
    return logits


def returns_more_than_float32_holds(_token_ids: Sequence[int], logits: Tensor) -> Any:
    return logits.double() * 1e300


def forbids_all(_token_ids: Sequence[int], logits: Tensor) -> Any:
    return torch.full_like(logits, -torch.inf)


FAULTS: list[tuple[Processor, str]] = [
    (raises, "a logits processor failed: ValueError: not today"),
    (returns_nothing, "must return a tensor, got NoneType"),
    (returns_a_list, "must return a tensor, got list"),
    (returns_too_few, "must return shape"),
    (returns_one_row_too_many, "must return shape"),
    (returns_nan, "NaN or plus infinity"),
    (returns_infinity, "NaN or plus infinity"),
    (returns_more_than_float32_holds, "NaN or plus infinity"),
    (forbids_all, "no token is left to draw"),
]
FAULT_NAMES = [processor.__name__ for processor, _ in FAULTS]


def from_length(length: int, fault: Processor) -> Processor:
    """Behaves until prompt and output have this length."""

    def processor(token_ids: Sequence[int], logits: Tensor) -> Any:
        return fault(token_ids, logits) if len(token_ids) >= length else logits

    return processor


def check_ended_alone(asked: list[Asked], guilty: int, message: str, calm: SamplingParams, **options: Any) -> None:
    """The guilty request ends with its error and what it had; the others are as if it had never been."""
    outputs = run(asked, **options)
    ended = outputs[guilty]
    assert ended.error is not None
    assert message in ended.error
    assert ended.finished
    assert ended.outputs
    assert FinishReason.ERROR in {completion.finish_reason for completion in ended.outputs}
    before = tokens_of(alone((asked[guilty][0], calm)))
    if calm.resolved_strategy == "parallel":
        assert all(
            before[completion.index][: len(completion.token_ids)] == completion.token_ids
            for completion in ended.outputs
        )
    others = [each for number, each in enumerate(asked) if number != guilty]
    kept = [output for number, output in enumerate(outputs) if number != guilty]
    assert all(output.error is None for output in kept)
    assert [results(output) for output in kept] == [results(output) for output in run(others, **options)]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=FAULT_NAMES)
@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[4], WAYS[6]], ids=str)
def test_a_fault_ends_its_request_alone(fault: Processor, message: str, length: int, way: dict[str, Any]) -> None:
    def with_processor(processor: Any) -> SamplingParams:
        return SamplingParams(max_tokens=5, ignore_eos=True, **way, logits_processors=[processor])

    asked: list[Asked] = [
        ([1, 2], SamplingParams(max_tokens=6, seed=5, n=2, ignore_eos=True)),
        ([3, 4], with_processor(from_length(length, fault))),
        ([5, 6], SamplingParams(max_tokens=6, seed=6, logits_processors=[favour_seven])),
        ([3, 4], SamplingParams(max_tokens=6, strategy="beam_search", n=2)),
    ]
    check_ended_alone(asked, 1, message, with_processor(lambda _ids, logits: logits))


class Faulty(Batched):
    """Spoils the whole call as soon as one row is the guilty request's."""

    def __init__(self, fault: Processor) -> None:
        super().__init__(favour_seven)
        self.fault = fault

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Tensor) -> Any:
        guilty = any(66 in row and len(row) >= 4 for row in token_ids)
        return self.fault([], logits) if guilty else super().process_batch(token_ids, logits)


@pytest.mark.parametrize(("fault", "message"), FAULTS[:-1], ids=FAULT_NAMES[:-1])
@pytest.mark.parametrize("n", [1, 3])
def test_in_a_batched_call_only_the_guilty_request_ends(fault: Processor, message: str, n: int) -> None:
    batched = Faulty(fault)
    asked: list[Asked] = [
        ([first, 5], SamplingParams(max_tokens=6, n=n, seed=3, ignore_eos=True, logits_processors=[batched]))
        for first in (1, 66, 2)
    ]
    asked.append(([1, 5], SamplingParams(max_tokens=6, seed=3, ignore_eos=True)))
    calm = SamplingParams(max_tokens=6, n=n, seed=3, ignore_eos=True, logits_processors=[favour_seven])
    check_ended_alone(asked, 1, message, calm)


def test_after_a_fault_no_further_processor_sees_the_row() -> None:
    seen: list[Sequence[int]] = []

    def watch(token_ids: Sequence[int], _logits: Tensor) -> Tensor:
        seen.append(token_ids)
        raise KeyError("never reached")

    output = alone(([1], SamplingParams(seed=1, logits_processors=[raises, watch])))
    assert output.error == "a logits processor failed: ValueError: not today"
    assert seen == []


def test_faults_free_their_blocks_and_leave_the_engine_usable() -> None:
    engine = fake_engine(num_blocks=16)
    for _ in range(3):
        params = SamplingParams(n=3, max_tokens=6, seed=1, logits_processors=[from_length(6, raises)])
        assert finish(engine, [([1, 2, 3, 4], params)])[0].error is not None
        assert engine.stats()["blocks_in_use"] == 0
    calm = SamplingParams(n=3, max_tokens=6, seed=1)
    assert results(finish(engine, [([1, 2, 3, 4], calm)])[0]) == results(alone(([1, 2, 3, 4], calm)))


def test_samples_that_had_ended_before_the_fault_keep_their_end() -> None:
    def end_child_with_eight(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Sends the request's samples to 8 or 9 first; then those with 8 end, and a step later the others fail."""
        allowed = [8, 9] if len(token_ids) == 1 else [0] if token_ids[1] == 8 else [9]
        if len(token_ids) == 3:
            raise RuntimeError("too late")
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(allowed), 0.0)

    params = SamplingParams(n=8, max_tokens=5, seed=2, logits_processors=[end_child_with_eight])
    output = alone(([1], params))
    assert {(completion.token_ids, completion.finish_reason) for completion in output.outputs} == {
        ((8, 0), FinishReason.STOP),
        ((9, 9), FinishReason.ERROR),
    }
    assert output.error == "a logits processor failed: RuntimeError: too late"
