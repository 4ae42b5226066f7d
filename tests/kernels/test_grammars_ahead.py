"""Rows of grammars one step ahead of the host: their masks come between what the device computes and its draws.

Every request must get what it would get alone, drawn by torch's operators in steps that wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import MixtureConfig, Request, RequestOutput, SamplingParams
from ramify.device.graphs import padded
from ramify.engine.core import EngineCore
from ramify.engine.demands import SamplerChoice
from ramify.gpu.kernels.race import NOT_FINITE, NOTHING_LEFT
from ramify.gpu.sampler import KernelSampler
from ramify.sampling import columns as column
from ramify.sampling.mixing import Mixer
from ramify.structured.grammars import Grammars
from ramify.structured.mask_workers import MaskWorkers
from ramify.structured.matcher import flags_of
from tests.fake import VOCAB, FakeDevice, fake_engine, letters
from tests.kernels.test_schedules import TorchKernels
from tests.masks import begin_sevenths, fits
from tests.unit.test_engine import Setting, Tokens, check, engine_for, run_all, tokens_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fake layers are on the CPU, kernels on the GPU here")
CPU = torch.device("cpu")
LENGTH = 5  # tokens before the end
STRUCTURE: dict[str, Any] = {"regex": "any"}


class MaskedTorchKernels(TorchKernels):
    """Plain draws and masks, by torch's operators from the tables that kernels read."""

    def serves(self, asked: SamplerChoice) -> bool:
        return asked == SamplerChoice("plain", reports=asked.reports, controls=asked.controls)

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        [raw] = logits
        tables, masked = self._slots.tables, raw.clone()
        for row, slot in enumerate(integers[column.SLOT].tolist()):
            if slot >= 0 and tables.flags[slot]:
                allowed = flags_of(tables.allowed[slot].numpy().view(np.uint32), VOCAB)
                masked[row, torch.from_numpy(~allowed)] = -torch.inf
        super().draw([masked], integers, floats, choice._replace(controls=False))
        drawn = self._drawn.of(len(raw))
        drawn.faults.copy_(torch.where(masked.isneginf().all(-1), NOTHING_LEFT, 0))
        drawn.faults.masked_fill_(raw.isnan().any(-1), NOT_FINITE)
        drawn.logprobs.copy_(raw.log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0])


def following(core: EngineCore) -> EngineCore:
    core.begin_matcher = begin_sevenths(VOCAB, LENGTH)
    return core


def alone(prompt: list[int], params: SamplingParams) -> Tokens:
    core = following(fake_engine(num_blocks=512, max_num_seqs=64, max_num_batched_tokens=512))
    core.add_request(Request("alone", None, prompt, params))
    return tokens_of(run_all(core)["alone"])


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int]:
    prompt = [1, 2, 3, 4][: draw(st.integers(1, 4))] + draw(st.lists(st.integers(1, 2), max_size=9))
    n = draw(st.integers(1, 4))
    options: dict[str, Any] = {"n": n, "seed": draw(st.integers(0, 3)), "max_tokens": draw(st.integers(1, 9))}
    if draw(st.booleans()):
        options["structured_outputs"] = STRUCTURE
    options |= draw(st.sampled_from([{}, {"stop_token_ids": [7, 9]}, {"output_kind": "cumulative"}]))
    if n > 1 and "output_kind" not in options:
        options |= draw(st.sampled_from([{}, {"best_of": n + 1}, {"strategy": "beam_search"}]))
    if options.get("strategy"):
        del options["seed"]
    return prompt, SamplingParams(**options), draw(st.integers(-1, 1))


@st.composite
def worlds(draw: st.DrawFn) -> Setting:
    requests = draw(st.lists(asked(), min_size=1, max_size=6))
    together = max(params.num_together or 1 for _, params, _ in requests)
    return Setting(
        block_size=draw(st.integers(1, 5)),
        spare_blocks=draw(st.sampled_from([0, 1, 3, 50])),
        max_num_seqs=max(together, draw(st.integers(1, 6))),
        max_num_batched_tokens=max(together, draw(st.sampled_from([1, 3, 7, 64]))),
        enable_prefix_caching=draw(st.booleans()),
        swap=draw(st.booleans()),
        num_host_blocks=draw(st.sampled_from([0, 2, 40])),
        runs_ahead=True,
        requests=requests,
    )


@given(world=worlds(), is_late=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_schedule_gives_what_each_request_would_get_alone(
    world: Setting, is_late: bool, data: st.DataObject
) -> None:
    """Late: draws wait for the next step to be scheduled, as where others find their masks."""
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr("ramify.engine.launched.ask_early", bool)
        run(world, data)


def run(world: Setting, data: st.DataObject) -> None:
    kernels = MaskedTorchKernels(padded(world.max_num_seqs), VOCAB, CPU, "raw")
    engine = following(engine_for(world, kernels=kernels))
    pending = list(enumerate(world.requests))
    finished: dict[str, RequestOutput] = {}
    aborted = set()
    while pending or engine.has_unfinished():
        if pending and (not engine.has_unfinished() or data.draw(st.booleans(), label="arrives")):
            number, (prompt, params, priority) = pending.pop(0)
            engine.add_request(Request(str(number), None, prompt, params, priority=priority))
        elif engine.has_unfinished() and data.draw(st.integers(0, 30), label="aborts") == 30:
            name = next(iter(engine.requests.groups))
            engine.abort(name)
            aborted.add(name)
        for output in engine.step():
            finished[output.request_id] = output
        check(engine)
    for number, (prompt, params, _) in enumerate(world.requests):
        if str(number) not in aborted:
            assert finished[str(number)].error is None
            assert tokens_of(finished[str(number)]) == alone(prompt, params)
    assert engine.stats()["blocks_in_use"] == 0


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_they_run_ahead_beside_rows_without_a_grammar(kind: str) -> None:
    """And nothing is amiss where one ends while the step after is under way."""
    make = MaskedTorchKernels if kind == "torch" else KernelSampler
    core = following(fake_engine(runs_ahead=True, kernels=make(16, VOCAB, CPU, "raw")))
    requests = []
    for number in range(6):
        options: dict[str, Any] = {"structured_outputs": STRUCTURE} if number % 3 else {}
        params = SamplingParams(seed=number, n=1 + number % 2, max_tokens=4 + 2 * number, ignore_eos=False, **options)
        requests.append(([number + 1, 2, 3], params))
        core.add_request(Request(str(number), None, *requests[-1]))
    finished: dict[str, RequestOutput] = {}
    followed, num_ahead = 0, 0
    while core.has_unfinished():
        finished |= {output.request_id: output for output in core.step()}
        under_way = core._under_way
        if under_way is not None:
            assert under_way.ticket is not None, "its draws were made"  # no others find its masks
            num_ahead += 1
            onward = under_way.plan.onward
            followed = max(followed, 0 if onward is None else len(onward.following))
    assert num_ahead > 8
    assert followed > 3
    for number, (prompt, params) in enumerate(requests):
        output = finished[str(number)]
        assert output.error is None
        assert tokens_of(output) == alone(prompt, params)
        if params.structured_outputs is not None:
            assert all(fits(tokens, VOCAB, [0], LENGTH) for tokens in tokens_of(output))
            assert any(each.finish_reason == "stop" for each in output.outputs) or number == 0


def test_a_poisoned_row_ends_alone() -> None:
    """Its logits are not finite: the step after, which awaits its token, goes on without it."""
    core = following(fake_engine(runs_ahead=True, kernels=MaskedTorchKernels(16, VOCAB, CPU, "raw")))
    assert isinstance(core.device, FakeDevice)
    core.device.poison(lambda seen: len(seen) == 5 and seen[0] == 2)
    params = SamplingParams(seed=1, max_tokens=9, structured_outputs=STRUCTURE)
    for number in range(1, 4):
        core.add_request(Request(str(number), None, [number, 4], params))
    finished = run_all(core)
    assert finished["2"].outputs[0].finish_reason == "error"
    for number in (1, 3):
        assert tokens_of(finished[str(number)]) == alone([number, 4], params)


def test_two_models_follow_one_grammar_a_step_ahead() -> None:
    """Sequences of two tracks are in no cohort: each awaits its own token."""
    params = [
        SamplingParams(n=2, seed=3, max_tokens=8, structured_outputs=STRUCTURE),
        SamplingParams(seed=4, max_tokens=6),
        SamplingParams(seed=5, max_tokens=8, structured_outputs=STRUCTURE),
    ]
    found = []
    ahead: dict[str, Any] = {"runs_ahead": True, "kernels": KernelSampler(8, VOCAB, CPU, "raw", Mixer(MixtureConfig()))}
    for options in ({}, ahead):
        core = following(fake_engine(num_models=2, mixer=Mixer(MixtureConfig()), **options))
        for number, each in enumerate(params):
            core.add_request(Request(str(number), None, [1, 2, 3], each, other_prompts=[(1, [4, 5 + number])]))
        awaited = 0
        finished: dict[str, RequestOutput] = {}
        while core.has_unfinished():
            finished |= {output.request_id: output for output in core.step()}
            under_way = core._under_way
            awaited += under_way is not None and any(draw.matcher is not None for draw in under_way.plan.draws)
        assert bool(awaited) == bool(options)
        found.append([tokens_of(finished[str(number)]) for number in range(3)])
    assert found[0] == found[1]


def test_nothing_is_left_to_draw_when_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws wait for the next act, in which the host goes on while others find masks; but not for one that may never
    come."""
    monkeypatch.setattr("ramify.engine.launched.ask_early", bool)  # as if they were found elsewhere
    core = following(fake_engine(runs_ahead=True, kernels=MaskedTorchKernels(16, VOCAB, CPU, "raw")))
    params = SamplingParams(seed=1, max_tokens=9, structured_outputs=STRUCTURE)
    core.add_request(Request("a", None, [1, 2], params))
    for _ in range(3):
        core.step()

    def is_drawn() -> bool:
        assert core._under_way is not None
        return core._under_way.ticket is not None

    assert not is_drawn()
    core.abort("a")
    assert is_drawn()
    core.add_request(Request("b", None, [1, 2], params))
    assert tokens_of(run_all(core)["b"]) == alone([1, 2], params)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_texts_of_llguidance_a_step_ahead(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the masks. Workers are asked while the step before is recorded, and nothing is asked twice."""
    pytest.importorskip("llguidance")
    own = Grammars(letters())
    counts = Counter[str]()

    def count(name: str) -> None:
        original = getattr(MaskWorkers, name)

        def counted(self: MaskWorkers, matchers: Sequence[Any], *others: Any) -> Any:
            counts[name] += len(matchers)
            return original(self, matchers, *others)

        monkeypatch.setattr(MaskWorkers, name, counted)

    for name in ("ask_early", "find", "_send"):
        count(name)
    asked = [
        (
            [number + 1, 3],
            SamplingParams(
                n=1 + number % 3, seed=number, max_tokens=24, structured_outputs={"regex": "((ab|ba)c){2,6}"}
            ),
        )
        for number in range(6)
    ]
    asked.append(([9], SamplingParams(seed=1, max_tokens=9)))
    found = []
    for options in ({}, {"runs_ahead": True, "kernels": MaskedTorchKernels(16, VOCAB, CPU, "raw")}):
        core = fake_engine(**options)  # type: ignore[arg-type]
        core.begin_matcher = own.begin
        for number, (prompt, params) in enumerate(asked):
            core.add_request(Request(str(number), None, prompt, params))
        finished = run_all(core)
        assert not any(output.error for output in finished.values())
        found.append([tokens_of(finished[str(number)]) for number in range(len(asked))])
        own.use_workers(num_workers)
    assert found[0] == found[1]
    assert (own._workers is None) == (num_workers == 0)
    assert counts["_send"] == counts["find"]
    assert 2 * counts["ask_early"] >= counts["find"]
    if own._workers is not None:
        own._workers.close()
