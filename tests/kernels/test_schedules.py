"""Random schedules with the sampler's kernels: the same device step as everywhere, its fast path over exact logits.

Rows persist, tokens stay in the device's buffers, and steps are launched before the last one is known. Every request
must get what it would get alone, drawn by torch's operators.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import MixtureConfig, Request, RequestOutput, SamplingParams
from ramify.device.graphs import padded
from ramify.device.step import DeviceStep
from ramify.gpu.sampler import KernelSampler
from ramify.sampling.mixing import Mixer
from tests.fake import VOCAB, fake_engine
from tests.unit.test_engine import Setting, alone, check, engine_for, tokens_of, worlds
from tests.unit.test_two_models import Asked, by_hand, run_both, told_by

# The interpreter takes some 20 ms a draw; layers that read tokens back are on the CPU everywhere.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fake layers are on the CPU, kernels on the GPU here")
CPU = torch.device("cpu")


def run(world: Setting, data: st.DataObject) -> None:
    kernels = KernelSampler(padded(world.max_num_seqs), VOCAB, CPU, "raw")
    engine = engine_for(world, kernels=kernels)
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
        assert tokens_of(finished[str(number)]) == alone(prompt, params)
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


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_goes_on_is_not_placed_again(runs_ahead: bool) -> None:
    """While the same tracks just go on, rows are neither given nor filled anew; what is drawn is the same."""
    world = Setting(4, 50, 4, 64, True, False, 0, runs_ahead)
    params = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    world.requests.extend(([number, 5], params, 0) for number in range(1, 4))
    engine = engine_for(world, kernels=KernelSampler(4, VOCAB, CPU, "raw"))
    step = engine.device
    assert isinstance(step, DeviceStep)
    begun, begin = [], step.lanes[0].begin

    def counted(*arguments: object) -> None:
        begun.append(arguments)
        begin(*arguments)  # type: ignore[arg-type]

    step.lanes[0].begin = counted  # type: ignore[method-assign, assignment]
    for number, (prompt, asked, _) in enumerate(world.requests):
        engine.add_request(Request(str(number), None, prompt, asked))
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        finished |= {output.request_id: output for output in engine.step()}
    for number, (prompt, asked, _) in enumerate(world.requests):
        assert tokens_of(finished[str(number)]) == alone(prompt, asked)
    assert len(begun) == (2 if runs_ahead else 9)


@pytest.mark.parametrize("models", [1, 2])
def test_two_tracks_by_kernels(models: int) -> None:
    """A teacher and a student, as two models and as one: rows of their own, one row of draws."""
    mixer = Mixer(MixtureConfig())
    kernels = KernelSampler(padded(16), VOCAB, CPU, "raw", mixer)
    engine = fake_engine(num_models=models, mixer=mixer, kernels=kernels, runs_ahead=True)
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
