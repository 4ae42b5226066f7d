"""A student's drafts, chained on the device: tokens stay there, and every request gets what it gets without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import MixtureConfig, Request, SamplingParams
from ramify.device.aside import Aside
from ramify.device.graphs import padded
from ramify.device.layers import Batch
from ramify.drive.chained_model import ChainedModel
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.demands import SamplerChoice
from ramify.engine.drafting.tempo import Tempo
from ramify.engine.drafting.together import Together
from ramify.engine.plan import MOST_DRAFTED, Chunk, Plan, Work
from ramify.gpu.sampler import KernelSampler
from ramify.outputs import RequestOutput
from ramify.sampling import columns as column
from ramify.sampling.draw import NoiseKeys, draw
from ramify.sampling.mixing import Mixer
from tests.fake import VOCAB, FakeDevice, FakeLayers, fake_engine, logits_after

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fake layers are on the CPU, kernels on the GPU here")
CPU = torch.device("cpu")
ROWS = 16
Asked = tuple[list[int], list[int], SamplingParams]


class Quick(KernelSampler):
    """The host's side of the kernels over torch's operators, which take no time: plain draws, of two models half of
    each."""

    def serves(self, asked: SamplerChoice) -> bool:
        return asked == SamplerChoice("plain", reports=asked.reports)

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        assert choice.kind == "plain"
        drawn, temperatures = self._drawn.of(logits[0].shape[0]), floats[column.TEMPERATURE]
        mixed = sum(part.log_softmax(-1) for part in logits) / len(logits)
        assert isinstance(mixed, Tensor)
        words = (column.SEED_LOW, column.SEED_HIGH, column.CHILD, column.POSITION)
        raced = draw(mixed / temperatures[:, None], NoiseKeys(*(integers[word][:, None] for word in words)))
        drawn.token_ids.copy_(torch.where(temperatures > 0, raced, mixed.argmax(-1)))
        drawn.logprobs.copy_(mixed.log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0])


def engine(*, drafts: bool, kind: type[KernelSampler] = Quick, **options: Any) -> EngineCore:
    rows = padded(options.setdefault("max_num_seqs", ROWS))
    mixer = Mixer(MixtureConfig())
    kernels = kind(rows, VOCAB, CPU, "raw", mixer, num_drafts=rows * MOST_DRAFTED if drafts else 0)
    drafting = kind(rows, VOCAB, CPU, "raw") if drafts else None
    core = fake_engine(num_models=2, mixer=mixer, kernels=kernels, drafting=drafting, runs_ahead=True, **options)
    assert isinstance(core.device, FakeDevice)
    for layers in core.device.layers:  # the student errs now and then
        layers.logits_of = lambda seen, student=layers is core.device.layers[-1]: _logits(seen, student=student)  # type: ignore[misc]
    return core


def _logits(seen: list[int], *, student: bool) -> Tensor:
    """Of what comes last, since prompts differ: the same for both models, but for every fourth sum."""
    last = seen[-4:]
    return logits_after(last, model=int(student and sum(last) % 4 == 0))


def run(core: EngineCore, asked: Sequence[Asked], arrives: Any = None) -> Any:
    pending = list(enumerate(asked))
    finished: dict[str, RequestOutput] = {}
    for _ in range(5_000):
        if not pending and not core.has_unfinished():
            break
        while pending and (not core.has_unfinished() or arrives is None or arrives()):
            number, (teacher, theta, params) = pending.pop(0)
            others = [(1, theta)] if theta else []
            core.add_request(Request(str(number), None, teacher, params, other_prompts=others))
        for output in core.step():
            finished[output.request_id] = output
        for manager in core.scheduler.managers:
            manager.check()
    assert core.stats()["blocks_in_use"] == 0
    return [[sample.token_ids for sample in finished[str(number)].outputs] for number in range(len(asked))]


def always(lengths: Any) -> Any:
    """Drafts of these lengths, whatever they cost."""
    chosen = itertools.cycle(lengths)
    return patch.object(Tempo, "length", lambda _self, _size, most, _share: min(next(chosen), max(0, most)))


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    start = draw(st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [9]]))
    theirs = start + draw(st.lists(st.integers(1, 2), max_size=9))
    own = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    options: dict[str, Any] = {
        "n": draw(st.integers(1, 4)),
        "max_tokens": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 3)),
        "speculate": draw(st.sampled_from([True, True, True, False])),
    }
    if options["n"] == 1 and draw(st.booleans()):
        options["temperature"] = 0.0
    if draw(st.integers(0, 3)) == 0:
        options["repetition_penalty"] = 1.3
    return theirs, own, SamplingParams(**options)


@given(
    asked=st.lists(requests(), min_size=1, max_size=5),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), min_size=1, max_size=4),
    num_blocks=st.sampled_from([30, 64, 300]),
    max_num_batched_tokens=st.sampled_from([12, 64]),
    swap=st.booleans(),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_every_schedule_gives_the_same_tokens(
    asked: list[Asked],
    lengths: list[int],
    num_blocks: int,
    max_num_batched_tokens: int,
    swap: bool,
    data: st.DataObject,
) -> None:
    options: dict[str, Any] = {"num_blocks": num_blocks, "max_num_batched_tokens": max_num_batched_tokens}
    if swap:
        options |= {"preemption_mode": "swap", "num_host_blocks": 40}
    plain = run(engine(drafts=False, **options), asked)
    with always(lengths):
        drafted = run(engine(drafts=True, **options), asked, lambda: data.draw(st.booleans(), label="arrives"))
    assert drafted == plain


def test_right_drafts_save_steps() -> None:
    asked = [
        ([1, 2, number], [number], SamplingParams(seed=number, max_tokens=40, ignore_eos=True)) for number in (4, 5, 6)
    ]
    plain, core = run(engine(drafts=False), asked), engine(drafts=True)
    with always([3]):
        assert run(core, asked) == plain
    stats = core.stats()
    assert 0.4 < stats["accepted_tokens"] / stats["drafted_tokens"] < 1
    assert stats["steps"] < 25
    assert isinstance(core.scheduler.speculation, Together)


def test_who_comes_later_is_drafted_for_too() -> None:
    """Drafts begin before a step is recorded, for those who had some; whoever comes gets some all the same."""
    core = engine(drafts=True)
    params = [SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True) for number, tokens in enumerate((60, 40))]
    asked = [([1, 2, 3], [4], params[0]), ([5, 6], [7], params[1])]
    turns = iter([False] * 4)
    with always([3]):
        told = run(core, asked, lambda: next(turns, True))
    assert told == run(engine(drafts=False), asked)
    assert core.stats()["steps"] < 25


# -- a model of its own ------------------------------------------------------------------------------------------------


class Smaller(FakeLayers):
    """Of the same tokenizer as what it drafts for, and padded to fewer entries."""

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        assert int(batch.token_ids.max()) < self.vocab_size, "it has no embedding of that token"
        return super().forward(batch, rows)


def engine_with_model(own_blocks: int, own_budget: int, *, num_known: int = VOCAB, **options: Any) -> EngineCore:
    """One model, and another one on the same device that is nearly the same and drafts for it."""
    rows = padded(ROWS)
    kernels = Quick(rows, VOCAB, CPU, "raw", num_drafts=rows * MOST_DRAFTED)
    core = fake_engine(kernels=kernels, runs_ahead=True, **options)
    own = FakeDevice(own_blocks, 4, kernels=Quick(rows, VOCAB, CPU, "raw"), runs_ahead=True)
    step = core.device
    assert isinstance(step, FakeDevice)
    layers = Smaller(own.pools[0], 0)
    layers.vocab_size = num_known
    unknown = torch.arange(num_known, VOCAB)
    layers.logits_of = lambda seen: logits_after(seen, model=int(sum(seen[-4:]) % 4 == 0)).index_fill(
        0, unknown, -torch.inf
    )
    own.layers[0] = own.lanes[0].layers = layers
    step.check_drafts_of(own)
    manager = BlockManager(own_blocks, 4, enable_prefix_caching=True)
    limits = {"max_model_len": 128, "max_num_batched_tokens": own_budget, "num_known": num_known}
    core.scheduler.speculation = Together(ChainedModel(step, own, manager, cost=0.2, role=0, **limits))
    return core


@given(
    asked=st.lists(requests(), min_size=1, max_size=5),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), min_size=1, max_size=4),
    own_blocks=st.sampled_from([6, 30, 300]),
    own_budget=st.sampled_from([3, 64]),
    max_num_batched_tokens=st.sampled_from([12, 64]),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_every_schedule_with_a_model_gives_the_same_tokens(
    asked: list[Asked],
    lengths: list[int],
    own_blocks: int,
    own_budget: int,
    max_num_batched_tokens: int,
    data: st.DataObject,
) -> None:
    alone: list[Asked] = [([*theirs, *own], [], params) for theirs, own, params in asked]
    options: dict[str, Any] = {"num_blocks": 100, "max_num_batched_tokens": max_num_batched_tokens}
    plain = run(fake_engine(kernels=Quick(padded(ROWS), VOCAB, CPU, "raw"), **options), alone)
    core = engine_with_model(own_blocks, own_budget, **options)
    with always(lengths):
        assert run(core, alone, lambda: data.draw(st.booleans(), label="arrives")) == plain
    drafter = core.scheduler.speculation.drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ChainedModel)
    drafter._manager.check()
    assert drafter._manager.num_in_use == 0


def test_a_model_of_its_own_saves_steps() -> None:
    """Also where it has to catch up with what was drawn without drafts."""
    params = [SamplingParams(seed=number, max_tokens=40, ignore_eos=True) for number in range(3)]
    asked: list[Asked] = [([1, 2, 3, 4, 5, 6, number], [], each) for number, each in enumerate(params)]
    core = engine_with_model(200, 64)
    with always([3]):
        told = run(core, asked)
    assert told == run(fake_engine(), asked)
    stats = core.stats()
    assert 0.4 < stats["accepted_tokens"] / stats["drafted_tokens"] < 1
    assert stats["steps"] < 25
    with always([0, 0, 3, 3, 3]):
        assert run(core, [([9, *prompt], none, each) for prompt, none, each in asked])
    assert core.stats()["accepted_tokens"] > stats["accepted_tokens"]


def test_a_model_computes_what_comes_next_behind_its_last_pass() -> None:
    """That pass has a stream of its own, and reads the buffers in which the rows of the model's next step are written.

    It begins one before any drafts are checked if all whom it drafted for have ended, and somebody is swapped in.
    """
    core = engine_with_model(200, 64)
    drafter = core.scheduler.speculation.drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ChainedModel)
    own = drafter._step
    assert isinstance(own, FakeDevice)
    beside: set[int] = set()  # asides with a pass under way
    running, join = Aside.running, Aside.join

    @contextmanager
    def noted(self: Aside) -> Iterator[None]:
        beside.add(id(self))
        with running(self):
            yield

    def joined(self: Aside) -> None:
        beside.discard(id(self))
        join(self)

    with always([2]), patch.object(Aside, "running", noted), patch.object(Aside, "join", joined):
        core.add_request(Request("0", None, [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True)))
        while not drafter.is_ahead:
            core.step()
        assert beside, "the last pass for the next step's drafts is under way"
        own.launch(Plan([Work([Chunk([5, 6], 0, (199,), "another")])]))
        assert not beside


def test_a_model_is_asked_for_no_token_that_it_does_not_know() -> None:
    """Models of one tokenizer may be padded to different sizes: what is drawn beyond the smaller one's is not drafted
    behind, and prompts with such tokens are not drafted for."""
    params = [SamplingParams(seed=number, max_tokens=60, ignore_eos=True) for number in range(6)]
    asked: list[Asked] = [([1, 2, 3, number], [], each) for number, each in enumerate(params)]
    asked.append(([1, 295, 3], [], SamplingParams(seed=9, max_tokens=20, ignore_eos=True)))
    core = engine_with_model(400, 64, num_known=290, num_blocks=400)
    with always([3]):
        told = run(core, asked)
    assert told == run(fake_engine(num_blocks=400), asked)
    assert any(token_id >= 290 for samples in told for tokens in samples for token_id in tokens)
    assert core.stats()["accepted_tokens"] > 0
