"""Random schedules in which requests leave at any moment, by themselves or all at once, while a step is under way:
nobody reads what they leave half written, nor writes where they still do. The fake layers look at all that is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import Request, SamplingParams
from ramify.engine.core import EngineCore
from ramify.engine.demands import Demands
from ramify.engine.plan import Chunk, Plan, Work
from tests.fake import FakeDevice
from tests.unit.test_engine import Setting, alone, check, engine_for, tokens_of, worlds

MOST_STEPS = 2_000
ACTS = ["arrive", "arrive", "step", "step", "step", "abort", "come again", "forget prefixes", "break off", "give back"]


@dataclass
class Comings:
    """Requests on their way through an engine, and those that begin with what they left."""

    engine: EngineCore
    pending: list[tuple[str, list[int], SamplingParams, int]]
    keeps_some: bool = False
    open: dict[str, tuple[Request, int]] = field(default_factory=dict)
    num_followers: int = 0

    def arrive(self, begins_with: str | None = None) -> None:
        name, prompt, params, priority = self.pending.pop(0)
        keeps = self.keeps_some and not Demands(params).is_search and len(prompt) % 2 == 0
        request = Request(name, None, prompt, params, priority=priority, keeps=keeps, begins_with=begins_with)
        self.engine.add_request(request)
        self.open[name] = (request, priority)

    def leave(self, name: str, *, comes_again: bool) -> None:
        assert self.engine.abort(name) is not None
        self.put_back(name)
        if comes_again:  # at once, by the same name
            self.pending.insert(0, self.pending.pop())
            self.arrive()

    def put_back(self, name: str) -> None:
        request, priority = self.open.pop(name)
        self.pending.append((name, list(request.prompt_token_ids), request.sampling_params, priority))

    def break_off(self) -> None:
        self.engine.reset()
        for name in list(self.open):
            self.put_back(name)

    def step(self) -> None:
        for output in self.engine.step():
            if not output.finished:
                continue
            request, _ = self.open.pop(output.request_id)
            assert output.error is None
            expected = alone(list(request.prompt_token_ids), request.sampling_params)
            assert tokens_of(output) == expected
            self.follow(request)

    def follow(self, request: Request) -> None:
        """Somebody begins where one of its children ended, if that is kept."""
        names = [name for name in request.sequences if name in self.engine.kept]
        if not names or self.num_followers == 3:
            return
        self.num_followers += 1
        prompt = [*request.sequences[names[-1]].get_token_ids(), 1]
        params = SamplingParams(seed=4, max_tokens=3)
        self.pending.insert(0, (f"after {self.num_followers}", prompt, params, 0))
        self.arrive(begins_with=names[-1])


def run(world: Setting, data: st.DataObject, **changes: Any) -> None:
    keeps_some = data.draw(st.booleans(), label="keeps some")  # which needs room beside those that run
    engine = engine_for(world, **({"num_blocks": 400} if keeps_some else {}), **changes)
    asked = enumerate(world.requests)
    comings = Comings(engine, [(str(number), *each) for number, each in asked], keeps_some)
    num_acts = 0
    for _ in range(MOST_STEPS):
        if not comings.pending and not comings.open:
            break
        act = "step"
        if num_acts < 60:
            act = data.draw(st.sampled_from(ACTS), label="act")
            num_acts += 1
        if comings.pending and (act == "arrive" or not comings.open):
            comings.arrive()
        elif act in ("abort", "come again") and comings.open:
            name = data.draw(st.sampled_from(sorted(comings.open)), label="who")
            comings.leave(name, comes_again=act == "come again")
        elif act == "forget prefixes":
            engine.reset_prefix_cache()
        elif act == "break off" and num_acts % 3 == 0:
            comings.break_off()
        elif act == "give back":
            engine.release_all_kept()
        elif comings.open:
            comings.step()
        check(engine)
    assert not comings.pending
    assert not comings.open
    engine.release_all_kept()
    assert engine.stats()["blocks_in_use"] == 0
    for manager in engine.scheduler.managers:
        assert manager.num_host_blocks == len(manager._free_host)


def test_the_fake_layers_see_what_was_computed_after_another_prefix() -> None:
    device = FakeDevice(4, 2)
    for tokens, table in ([1, 2, 3, 4], (0, 1)), ([8, 9], (2,)):
        device.launch(Plan([Work([Chunk(tokens, 0, table)])]))
    device.launch(Plan([Work([Chunk([5], 4, (0, 1, 3))])]))
    with pytest.raises(AssertionError, match="computed after another past"):
        device.launch(Plan([Work([Chunk([5], 4, (2, 1, 3))])]))


@given(world=worlds(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_who_leaves_in_the_midst_of_a_step_disturbs_nobody(world: Setting, data: st.DataObject) -> None:
    run(world, data)


@pytest.mark.long
@given(world=worlds(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_many_schedules_do(world: Setting, data: st.DataObject) -> None:
    run(world, data)
