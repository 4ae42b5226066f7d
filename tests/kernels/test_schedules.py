"""Random schedules with the sampler's kernels: the same device step as everywhere, its fast path over exact logits.

Rows persist, tokens stay in the device's buffers, and steps are launched before the last one is known. Every request
must get what it would get alone, drawn by torch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import MixtureConfig, Request, RequestOutput, SamplingParams
from ramify.device.graphs import padded
from ramify.device.last_draws import LastDraws
from ramify.device.step import Capture, DeviceStep
from ramify.engine.demands import Demands, SamplerChoice
from ramify.engine.drafting.drafter import Drafter
from ramify.engine.plan import Onward, Work
from ramify.gpu.sampler import KernelSampler
from ramify.sampling import columns as column
from ramify.sampling.draw import NoiseKeys, draw
from ramify.sampling.mixing import Mixer
from tests.fake import VOCAB, fake_engine
from tests.unit.test_engine import Setting, alone, check, engine_for, tokens_of, worlds
from tests.unit.test_speculation import Prophet
from tests.unit.test_two_models import Asked, by_hand, run_both, told_by

# The interpreter takes some 20 ms a draw; layers that read tokens back are on the CPU everywhere.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fake layers are on the CPU, kernels on the GPU here")
CPU = torch.device("cpu")


class TorchKernels(KernelSampler):
    """The host's side of the kernels over torch's operators, which take no time. Not for controls: what they look at is
    on the device, and not known to torch's sampler where a step runs ahead."""

    def serves(self, asked: SamplerChoice) -> bool:
        return asked == SamplerChoice("plain", reports=asked.reports)

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        assert choice == SamplerChoice("plain", reports=choice.reports)
        drawn, temperatures = self._drawn.of(logits[0].shape[0]), floats[column.TEMPERATURE]
        words = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.POSITION)
        raced = draw(logits[0] / temperatures[:, None], NoiseKeys(*(integers[word][:, None] for word in words)))
        drawn.token_ids.copy_(torch.where(temperatures > 0, raced, logits[0].argmax(-1)))
        drawn.logprobs.copy_(logits[0].log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0])


def run(
    world: Setting,
    data: st.DataObject,
    kernels: KernelSampler | None = None,
    drafter: Drafter | None = None,
    elsewhere: dict[int, Capture] | None = None,
) -> None:
    if kernels is None:
        kernels = KernelSampler(padded(world.max_num_seqs), VOCAB, CPU, "raw")
    engine = engine_for(world, kernels=kernels, drafter=drafter, elsewhere=elsewhere)
    pending = list(enumerate(world.requests))
    finished: dict[str, RequestOutput] = {}
    while pending or engine.has_unfinished():
        if pending and (not engine.has_unfinished() or data.draw(st.booleans(), label="arrives")):
            number, (prompt, params, priority) = pending.pop(0)
            engine.add_request(Request(str(number), None, prompt, params, priority=priority))
        for output in engine.step():
            finished[output.request_id] = output
        check(engine)
    for number, (prompt, params, _) in enumerate(world.requests):
        demands = Demands(params)
        own: dict[str, Any] = {}
        if demands.is_arithmetic and kernels.serves(demands.choice):
            # A code's error grows with every token that it is read for: a few tokens on, only kernels read as kernels.
            own["kernels"] = KernelSampler(padded(64), VOCAB, CPU, "raw")
        assert tokens_of(finished[str(number)]) == alone(prompt, params, **own)
    assert engine.stats()["blocks_in_use"] == 0


@given(world=worlds(), data=st.data())
@settings(max_examples=4, deadline=None)
def test_every_schedule_gives_what_each_request_would_get_alone(world: Setting, data: st.DataObject) -> None:
    run(world, data)


@pytest.mark.long
@given(world=worlds(), data=st.data())
@settings(max_examples=5, deadline=None)
def test_many_schedules_do(world: Setting, data: st.DataObject) -> None:
    run(world, data)


@given(world=worlds(), data=st.data())
@settings(max_examples=30, deadline=None)
def test_rows_that_go_on_are_found_in_every_schedule(world: Setting, data: st.DataObject) -> None:
    """Many more schedules, of plain draws beside beams and siblings that torch's sampler serves."""
    keeps_all = data.draw(st.booleans(), label="others beside plain draws")
    asked = [
        (prompt, params if keeps_all and not Demands(params).is_controlled else _plain(params), priority)
        for prompt, params, priority in world.requests
    ]
    world = replace(world, runs_ahead=True, requests=asked)
    run(world, data, TorchKernels(padded(world.max_num_seqs), VOCAB, CPU, "raw"))


@given(world=worlds(), who=st.sampled_from(["layers", "nobody"]), data=st.data())
@settings(max_examples=10, deadline=None)
def test_layers_elsewhere_are_found_in_every_schedule(world: Setting, who: Capture, data: st.DataObject) -> None:
    """On another GPU, which captures by itself, or on a CPU: plain draws, many schedules."""
    asked = [(prompt, _plain(params), priority) for prompt, params, priority in world.requests]
    world = replace(world, runs_ahead=True, requests=asked)
    kernels = TorchKernels(padded(world.max_num_seqs), VOCAB, CPU, "raw")
    run(world, data, kernels, elsewhere={0: who})


@given(world=worlds(), acceptance=st.sampled_from([0.3, 0.9, 1.0]), data=st.data())
@settings(max_examples=8, deadline=None)
def test_drafts_change_nothing_where_steps_run_ahead(world: Setting, acceptance: float, data: st.DataObject) -> None:
    """Who is drafted for, and who goes on unseen: the same tracks, by turns."""
    asked = [(prompt, _plain(params), priority) for prompt, params, priority in world.requests]
    world = replace(world, runs_ahead=True, requests=asked)
    truths = {str(number): alone(prompt, params) for number, (prompt, params, _) in enumerate(asked)}
    run(world, data, TorchKernels(padded(world.max_num_seqs), VOCAB, CPU, "raw"), Prophet(truths, acceptance))


def test_kernels_draw_after_drafted_tokens() -> None:
    """Plain rows in the interpreter; what looks back at drafted tokens is drawn by torch's operators."""
    world = Setting(4, 50, 4, 64, True, False, 0, True)
    asked: list[dict[str, Any]] = [{"logprobs": 2}, {"repetition_penalty": 1.5, "frequency_penalty": 0.5}]
    world.requests.extend(
        ([number + 1, 5], SamplingParams(seed=3, max_tokens=6, ignore_eos=True, **options), 0)
        for number, options in enumerate(asked)
    )
    truths = {str(number): alone(prompt, params) for number, (prompt, params, _) in enumerate(world.requests)}
    engine = engine_for(world, kernels=KernelSampler(4, VOCAB, CPU, "raw"), drafter=Prophet(truths, 0.7))
    for number, (prompt, params, _) in enumerate(world.requests):
        engine.add_request(Request(str(number), None, prompt, params))
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step()}
    assert {number: tokens_of(output) for number, output in finished.items()} == truths
    assert 0 < engine.stats()["accepted_tokens"] < engine.stats()["drafted_tokens"]


def _plain(params: SamplingParams) -> SamplingParams:
    return SamplingParams(n=params.n, seed=3, temperature=params.temperature, max_tokens=params.max_tokens)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_goes_on_is_not_placed_again(runs_ahead: bool) -> None:
    """While the same tracks just go on, none is given a row of its own anew; what is drawn is the same."""
    world = Setting(4, 50, 4, 64, True, False, 0, runs_ahead)
    params = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    world.requests.extend(([number, 5], params, 0) for number in range(1, 4))
    engine = engine_for(world, kernels=TorchKernels(4, VOCAB, CPU, "raw"))
    step = engine.device
    assert isinstance(step, DeviceStep)
    begun, begin = [], step.lanes[0].begin

    def counted(work: Work, last: LastDraws, onward: Onward | None, **options: Any) -> None:
        if work.chunks:
            begun.append(work)
        begin(work, last, onward, **options)

    step.lanes[0].begin = counted  # type: ignore[method-assign, assignment]
    for number, (prompt, asked, _) in enumerate(world.requests):
        engine.add_request(Request(str(number), None, prompt, asked))
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step()}
    for number, (prompt, asked, _) in enumerate(world.requests):
        assert tokens_of(finished[str(number)]) == alone(prompt, asked)
    assert len(begun) == (1 if runs_ahead else 9)


def drawn_by_torch(asked: Sequence[dict[str, Any]]) -> set[str]:
    """Runs these requests together, each with the tokens that it gets alone; returns whose rows torch drew."""
    world = Setting(4, 80, 12, 64, True, False, 0, True)
    world.requests.extend(
        ([number + 1, 5], SamplingParams(max_tokens=3, ignore_eos=True, **options), 0)
        for number, options in enumerate(asked)
    )
    engine = engine_for(world, kernels=KernelSampler(padded(12), VOCAB, CPU, "raw"))
    step = engine.device
    assert isinstance(step, DeviceStep)
    by_torch: set[str] = set()
    sample = step.sampler.sample

    def counted(sources: Any, draws: Any) -> Any:
        by_torch.update(draw.request_id for draw in draws)
        return sample(sources, draws)

    step.sampler.sample = counted  # type: ignore[method-assign]
    for number, (prompt, params, _) in enumerate(world.requests):
        engine.add_request(Request(str(number), None, prompt, params))
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step()}
    for number, (prompt, params, _) in enumerate(world.requests):
        assert tokens_of(finished[str(number)]) == alone(prompt, params)
    return by_torch


def test_what_kernels_do_not_serve_costs_its_own_rows_alone() -> None:
    """A caller's own processor, and what no kernel tells: the others' rows are drawn by kernels beside them."""

    def first_half(_token_ids: object, logits: torch.Tensor) -> torch.Tensor:
        logits[VOCAB // 2 :] = -torch.inf
        return logits

    asked: list[dict[str, Any]] = [
        {"seed": 3},
        {"seed": 3, "logits_processors": [first_half]},
        {"seed": 3, "repetition_penalty": 1.3},
        {"seed": 3, "return_kept": "mass"},
    ]
    assert drawn_by_torch(asked) == {"1", "3"}


def test_rules_sets_codes_and_reported_beams_need_no_torch() -> None:
    """Several of them in one step, as they come, and beside rows that go on unseen."""
    asked: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "typical_p": 0.7, "logprobs": 1},
        {"seed": 3, "n": 3, "strategy": "diverse", "diversity_penalty": 4.0},
        {"seed": 4, "n": 2, "strategy": "arithmetic"},
        {"seed": 5, "mirostat_tau": 2.0},
        {"seed": 6, "no_repeat_ngram_size": 2},
        {"strategy": "beam_search", "n": 2, "logprobs": 2},
    ]
    assert drawn_by_torch(asked) == set()


@pytest.mark.parametrize(
    ("models", "elsewhere"),
    [
        (1, {}),
        (2, {}),
        *(pytest.param(2, places, marks=pytest.mark.long) for places in ({0: "layers"}, {1: "layers"}, {1: "nobody"})),
    ],
)
def test_two_tracks_by_kernels(models: int, elsewhere: dict[int, Capture]) -> None:
    """A teacher and a student, as two models and as one, and one of them on a device of its own, another GPU (which
    captures by itself) or a CPU: rows of their own, one row of draws."""
    mixer = Mixer(MixtureConfig())
    kernels = KernelSampler(padded(16), VOCAB, CPU, "raw", mixer)
    engine = fake_engine(num_models=models, mixer=mixer, kernels=kernels, runs_ahead=True, elsewhere=elsewhere)
    asked = [
        Asked([1, 2, 3, 4, 5], [9], SamplingParams(seed=1, n=2, max_tokens=3)),
        Asked([7], [1, 2, 3, 4, 5, 6], SamplingParams(seed=2, max_tokens=5, ignore_eos=True)),
    ]
    for number, each in enumerate(asked):
        engine.add_request(each.request(str(number), models=models))
    finished = run_both(engine)
    for number, each in enumerate(asked):
        told, expected = told_by(finished[str(number)]), by_hand(each, models=models)
        assert [[token for token, _ in child] for child in told] == [
            [token for token, _ in child] for child in expected
        ]
        for ours, theirs in zip(told, expected, strict=True):
            for (_, one), (_, other) in zip(ours, theirs, strict=True):
                assert one == pytest.approx(other, abs=2e-4)


def test_rows_that_ask_what_was_kept_go_beside_kernels_and_change_nobody() -> None:
    """They, and rows that want both kinds of logprobs, are drawn by torch's operators, in whatever company."""
    kernels = KernelSampler(8, VOCAB, CPU, "both")
    assert not kernels.serves(SamplerChoice("plain", reports=True))
    assert all(kernels.serves(choice) and not choice.reports for choice in kernels.every_choice())
    asked = [
        SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True, top_k=4, return_kept="ids"),
        SamplingParams(seed=2, max_tokens=3, ignore_eos=True, logprobs=1, top_p=0.7),
        SamplingParams(seed=3, max_tokens=3, ignore_eos=True),
    ]
    assert not kernels.serves(Demands(asked[0]).choice)

    def outputs(**options: Any) -> list[RequestOutput]:
        engine = fake_engine(logprobs_mode="both", **options)
        for number, params in enumerate(asked):
            engine.add_request(Request(str(number), None, [1, 2, 3, number], params))
        finished: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        return [finished[str(number)] for number in range(len(asked))]

    for mixed, plain in zip(outputs(kernels=kernels, runs_ahead=True), outputs(), strict=True):
        for one, other in zip(mixed.outputs, plain.outputs, strict=True):
            assert (one.token_ids, one.kept, one.processed_logprobs) == (
                other.token_ids,
                other.kept,
                other.processed_logprobs,
            )


def test_rows_that_look_back_wait_where_kernels_do_not_serve_them() -> None:
    """Both kinds of logprobs are told by torch's sampler, which must know what was drawn before it draws again."""
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        ignore_eos=True,
        logprobs=1,
        logit_bias={5: 9.0},
        presence_penalty=2.0,
        frequency_penalty=2.0,
    )

    def tokens(**options: Any) -> list[tuple[int, ...]]:
        engine = fake_engine(logprobs_mode="both", **options)
        engine.add_request(Request("0", None, [1, 2, 3], params))
        finished: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        return tokens_of(finished["0"])

    assert tokens(kernels=KernelSampler(8, VOCAB, CPU, "both"), runs_ahead=True) == tokens()
