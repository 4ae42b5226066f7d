"""The engine on a fake device with exact logits: whatever the schedule, every request gets what it would get alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import InvalidInputError, Request, SamplingParams
from ramify.engine.core import EngineCore
from ramify.engine.plan import NOT_FINITE
from ramify.outputs import FinishReason, RequestOutput
from tests.fake import FakeDevice, fake_engine

Tokens = list[tuple[int, ...]]


def tokens_of(output: RequestOutput) -> Tokens:
    return [completion.token_ids for completion in output.outputs]


def run_all(engine: EngineCore) -> dict[str, RequestOutput]:
    finished: dict[str, RequestOutput] = {}
    for _ in range(10_000):
        if not engine.has_unfinished():
            return finished
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        check(engine)
    raise AssertionError("the engine does not come to an end")


def check(engine: EngineCore) -> None:
    """What must hold after every act."""
    scheduler, device = engine.scheduler, engine.device
    assert isinstance(device, FakeDevice)
    for manager in scheduler.managers:
        manager.check()
    assert scheduler.num_running <= scheduler.max_num_seqs
    assert scheduler.running == sorted(scheduler.running, key=lambda gang: gang.order)
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda gang: gang.order)
    if device.plans:
        plan = device.plans.pop()
        assert device.num_tokens(plan) <= scheduler.max_num_batched_tokens
        assert len(plan.works[0].chunks) <= scheduler.max_num_seqs
        device.plans.clear()


def alone(prompt: list[int], params: SamplingParams, **options: Any) -> Tokens:
    """The truth: the request by itself, with room for everything."""
    engine = fake_engine(num_blocks=512, block_size=4, max_num_seqs=64, max_num_batched_tokens=512, **options)
    engine.add_request(Request("alone", None, prompt, params))
    return tokens_of(run_all(engine)["alone"])


@dataclass(frozen=True)
class Setting:
    block_size: int
    spare_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    swap: bool
    num_host_blocks: int
    runs_ahead: bool
    requests: list[tuple[list[int], SamplingParams, int]] = field(default_factory=list)


CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"presence_penalty": 1.0},
    {"logit_bias": {5: 9.0, 0: 4.0}, "min_tokens": 1},
    {"allowed_token_ids": [0, 1, 2, 9, 100, 299], "repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 2, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"typical_p": 0.8, "top_n_sigma": 3.0, "smoothing_factor": 0.3},
]
OF_DRAWS: list[dict[str, Any]] = [{"mirostat_tau": 2.0}, {"xtc_probability": 0.5, "epsilon_cutoff": 1e-4}]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int]:
    # A small alphabet and repeated beginnings, so that prefixes meet.
    prompt = draw(st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [9]])) + draw(
        st.lists(st.integers(1, 2), max_size=9)
    )
    n = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["parallel", "best_of", "beams", "groups", "diverse", "arithmetic", "distinct"]))
    options: dict[str, Any] = {"n": n, "max_tokens": draw(st.integers(1, 9))}
    if kind == "beams":
        options |= {"strategy": "beam_search", "early_stopping": draw(st.sampled_from([True, False, "never"]))}
    elif kind == "groups":
        options |= {"strategy": "beam_search", "n": 2, "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 1.5}
    elif kind == "distinct":
        options |= {"strategy": "without_replacement", "seed": draw(st.integers(0, 3))}
    else:
        options["seed"] = draw(st.integers(0, 3))
        options["temperature"] = 0.0 if n == 1 and draw(st.booleans()) else 1.0
        if kind == "diverse":
            options |= {"strategy": "diverse", "diversity_penalty": 2.0}
        elif kind == "arithmetic":
            options["strategy"] = "arithmetic"
        elif kind == "best_of" and options["temperature"]:
            options["best_of"] = n + draw(st.integers(0, 2))
    of_draws = OF_DRAWS if kind in ("parallel", "best_of", "diverse", "arithmetic") else []
    options |= draw(st.sampled_from([{}, {}, *CONTROLS, *of_draws]))
    return prompt, SamplingParams(**options), draw(st.integers(-1, 1))


@st.composite
def worlds(draw: st.DrawFn) -> Setting:
    asked = draw(st.lists(requests(), min_size=1, max_size=6))
    together = max(params.num_together or 1 for _, params, _ in asked)  # what steps together must fit whole
    return Setting(
        block_size=draw(st.integers(1, 5)),
        spare_blocks=draw(st.sampled_from([0, 1, 3, 50])),
        max_num_seqs=max(together, draw(st.integers(1, 6))),
        max_num_batched_tokens=max(together, draw(st.sampled_from([1, 2, 3, 7, 64]))),
        enable_prefix_caching=draw(st.booleans()),
        swap=draw(st.booleans()),
        num_host_blocks=draw(st.sampled_from([0, 2, 40])),
        runs_ahead=draw(st.booleans()),
        requests=asked,
    )


def engine_for(world: Setting, **changes: Any) -> EngineCore:
    """As small a cache as the largest request may have, and a few spare blocks."""
    needed = 0
    for prompt, params, _ in world.requests:
        together, common = params.num_together or 1, len(prompt) // world.block_size
        whole = -(-(len(prompt) + (params.max_tokens or 0)) // world.block_size)
        needed = max(needed, common + together * (whole - common) + (together == 1 < params.num_samples))
    options: dict[str, Any] = {
        "num_blocks": needed + world.spare_blocks,
        "block_size": world.block_size,
        "max_num_seqs": world.max_num_seqs,
        "max_num_batched_tokens": world.max_num_batched_tokens,
        "enable_prefix_caching": world.enable_prefix_caching,
        "preemption_mode": "swap" if world.swap else "recompute",
        "num_host_blocks": world.num_host_blocks if world.swap else 0,
        "runs_ahead": world.runs_ahead,
    }
    return fake_engine(**{**options, **changes})


def run_schedule(world: Setting, data: st.DataObject) -> None:
    engine = engine_for(world)
    pending = list(enumerate(world.requests))
    finished: dict[str, RequestOutput] = {}
    steps = 0
    while pending or engine.has_unfinished():
        if pending and (not engine.has_unfinished() or data.draw(st.booleans(), label="arrives")):
            number, (prompt, params, priority) = pending.pop(0)
            engine.add_request(Request(str(number), None, prompt, params, priority=priority))
        for output in engine.step():
            finished[output.request_id] = output
        check(engine)
        steps += 1
        assert steps < 5_000, "the engine does not come to an end"
    for number, (prompt, params, _) in enumerate(world.requests):
        assert tokens_of(finished[str(number)]) == alone(prompt, params)
    assert engine.stats()["blocks_in_use"] == 0
    assert engine.scheduler.managers[0].num_host_blocks == len(engine.scheduler.managers[0]._free_host)


@given(world=worlds(), data=st.data())
@settings(max_examples=60)
def test_every_schedule_gives_what_each_request_would_get_alone(world: Setting, data: st.DataObject) -> None:
    run_schedule(world, data)


@pytest.mark.long
@given(world=worlds(), data=st.data())
@settings(max_examples=250)
def test_many_schedules_do(world: Setting, data: st.DataObject) -> None:
    run_schedule(world, data)


@given(world=worlds(), data=st.data())
@settings(max_examples=30)
def test_aborts_at_any_moment_free_everything_and_disturb_nobody(world: Setting, data: st.DataObject) -> None:
    engine = engine_for(world)
    for number, (prompt, params, priority) in enumerate(world.requests):
        engine.add_request(Request(str(number), None, prompt, params, priority=priority))
    doomed = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=4), label="aborts")
    finished: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    for step in range(5_000):
        for moment, number in doomed:
            if moment == step:
                output = engine.abort(str(number))
                check(engine)
                if output is not None:
                    finished[output.request_id] = output
                    aborted.add(output.request_id)
        if not engine.has_unfinished():
            break
        for output in engine.step():
            finished[output.request_id] = output
        check(engine)
    assert engine.stats()["blocks_in_use"] == 0
    for number, (prompt, params, _) in enumerate(world.requests):
        output = finished[str(number)]
        expected = alone(prompt, params)
        if str(number) not in aborted:
            assert tokens_of(output) == expected
        elif params.strategy != "beam_search" and params.num_samples == params.n:
            assert all(
                expected[completion.index][: len(completion.token_ids)] == completion.token_ids
                for completion in output.outputs
            ), "an aborted output is a beginning of the whole one"


# -- single facts ----------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_once_and_blocks_are_prompt_plus_suffixes() -> None:
    engine = fake_engine(num_blocks=512, block_size=4, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=256)
    params = SamplingParams(n=16, max_tokens=9, ignore_eos=True)
    engine.add_request(Request("r", None, list(range(1, 41)), params))
    run_all(engine)
    stats = engine.stats()
    assert stats["prompt_tokens_computed"] == 40
    assert stats["generated_tokens"] == 16 * 9
    assert stats["blocks_in_use_peak"] == 10 + 16 * 2  # 8 of 9 tokens are ever written: two blocks a child


def test_a_shared_partial_block_is_copied_by_all_but_one() -> None:
    engine = fake_engine(num_blocks=64, block_size=4, max_num_seqs=8)
    engine.add_request(Request("r", None, [1, 2, 3, 4, 5, 6], SamplingParams(n=4, max_tokens=2, ignore_eos=True)))
    engine.step()
    assert isinstance(engine.device, FakeDevice)
    engine.step()
    [work] = engine.device.plans[-1].works
    assert len(work.copies) == 3
    assert [len(prefix.sharers) for prefix in work.shared] == [4]


def test_sequences_that_come_back_in_a_search_keep_their_place() -> None:
    """A draw without replacement, or a beam, may be given up and another fork instead, steps later.

    Found by the schedules above: someone else had taken the place in the meantime, one more than may run.
    """
    engine = fake_engine(num_blocks=512, block_size=4, max_num_seqs=5)
    few: dict[str, Any] = {"allowed_token_ids": [0, 1]}  # two beams after the first token, four after the second
    for seed in range(12):
        params = SamplingParams(n=3, seed=seed, max_tokens=9, strategy="without_replacement")
        engine.add_request(Request(f"drawn {seed}", None, [1, 2, 3], params))
        engine.add_request(Request(f"alone {seed}", None, [1, 2, 4], SamplingParams(seed=seed, max_tokens=3)))
        beams = SamplingParams(n=4, strategy="beam_search", max_tokens=6, ignore_eos=True, **few)
        engine.add_request(Request(f"beams {seed}", None, [1, 2, 5, seed], beams))
    while engine.has_unfinished():
        engine.step()
        check(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_hits_are_counted_and_leave_one_token_to_compute(caching: bool) -> None:
    engine = fake_engine(block_size=4, enable_prefix_caching=caching)
    prompt = list(range(1, 13))  # three full blocks
    outputs = []
    for name in ("first", "again", "longer"):
        ids = prompt if name != "longer" else [*prompt, 50, 51, 52]
        engine.add_request(Request(name, None, ids, SamplingParams(max_tokens=1, temperature=0)))
        outputs.append(run_all(engine)[name])
    assert [output.num_cached_tokens for output in outputs] == ([0, 8, 12] if caching else [0, 0, 0])
    assert engine.stats()["prompt_tokens_cached"] == (20 if caching else 0)
    assert engine.stats()["prompt_tokens_computed"] == 12 + 12 + 15 - (20 if caching else 0)
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    engine.reset_prefix_cache()
    engine.add_request(Request("after", None, prompt, SamplingParams(max_tokens=1)))
    assert run_all(engine)["after"].num_cached_tokens == 0


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine = fake_engine(block_size=4, max_num_batched_tokens=256)
    for number in range(5):
        engine.add_request(Request(str(number), None, list(range(1, 34)), SamplingParams(max_tokens=2)))
    run_all(engine)
    assert engine.stats()["prompt_tokens_computed"] == 33 + 4


def test_the_oldest_unused_prefix_goes_first() -> None:
    engine = fake_engine(num_blocks=9, block_size=4, max_model_len=32)
    prompts = {name: [base] * 9 for name, base in (("a", 1), ("b", 2), ("c", 3))}  # two full blocks each, and one more
    for name in ("a", "b", "a", "c"):
        engine.add_request(Request(name, None, prompts[name], SamplingParams(max_tokens=1)))
        run_all(engine)
    engine.add_request(Request("big", None, [7] * 12, SamplingParams(max_tokens=4)))  # needs room: b goes before a
    run_all(engine)
    hits = {}
    for name in ("c", "a", "b"):
        engine.add_request(Request(name, None, prompts[name], SamplingParams(max_tokens=1)))
        hits[name] = run_all(engine)[name].num_cached_tokens
    assert hits["c"] == 8
    assert hits["a"] == 8
    assert hits["b"] < 8


def test_priorities_go_first_and_ties_by_arrival() -> None:
    engine = fake_engine(max_num_seqs=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -5)):
        engine.add_request(
            Request(name, None, [1, 2], SamplingParams(max_tokens=2, ignore_eos=True), priority=priority)
        )
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["urgent", "first", "second", "late"]


def test_a_fault_in_one_row_ends_that_request_alone() -> None:
    engine = fake_engine()
    assert isinstance(engine.device, FakeDevice)
    engine.device.poison(lambda tokens: tokens[0] == 66 and len(tokens) > 4)
    for name, first in (("good", 1), ("bad", 66), ("also good", 2)):
        engine.add_request(Request(name, None, [first, 5], SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True)))
    outputs = run_all(engine)
    assert outputs["bad"].error == NOT_FINITE
    assert {completion.finish_reason for completion in outputs["bad"].outputs} == {FinishReason.ERROR}
    assert tokens_of(outputs["good"]) == alone([1, 5], SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True))
    assert engine.stats()["blocks_in_use"] == 0


def test_a_step_that_breaks_leaves_nothing_behind() -> None:
    engine = fake_engine()
    assert isinstance(engine.device, FakeDevice)
    engine.add_request(Request("r", None, list(range(1, 20)), SamplingParams(n=3, max_tokens=6)))
    engine.step()
    launch = engine.device.launch

    def broken(_plan: Any) -> Any:
        raise RuntimeError("the device fell over")

    engine.device.launch = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="fell over"):
        engine.step()
    check(engine)
    assert not engine.has_unfinished()
    assert engine.stats()["blocks_in_use"] == 0
    engine.device.launch = launch  # type: ignore[method-assign]
    engine.add_request(Request("r", None, list(range(1, 20)), SamplingParams(n=3, max_tokens=6, seed=2)))
    output = run_all(engine)["r"]
    assert output.num_cached_tokens == 0
    assert tokens_of(output) == alone(list(range(1, 20)), SamplingParams(n=3, max_tokens=6, seed=2))


def test_what_can_never_fit_is_refused_at_submission() -> None:
    engine = fake_engine(num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(InvalidInputError, match="needs 5 KV blocks, the cache has 4"):
        engine.add_request(Request("r", None, [1] * 10, SamplingParams(max_tokens=7)))
    with pytest.raises(InvalidInputError, match="must fit max_model_len = 64"):
        engine.add_request(Request("r", None, [1] * 60, SamplingParams(max_tokens=7)))
    with pytest.raises(InvalidInputError, match="must fit max_model_len = 64"):
        engine.add_request(Request("r", None, [1] * 64, SamplingParams(max_tokens=None)))
    unchunked = fake_engine(enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(InvalidInputError, match="at most max_num_batched_tokens = 8 tokens"):
        unchunked.add_request(Request("r", None, [1] * 9, SamplingParams()))
    assert not engine.has_unfinished()
    engine.add_request(Request("r", None, [1] * 9, SamplingParams(max_tokens=7)))
    with pytest.raises(InvalidInputError, match="'r' is in use"):
        engine.add_request(Request("r", None, [1], SamplingParams(max_tokens=1)))


def test_without_chunking_a_prompt_is_computed_in_one_step() -> None:
    engine = fake_engine(enable_chunked_prefill=False, max_num_batched_tokens=16, max_num_seqs=8)
    assert isinstance(engine.device, FakeDevice)
    for name in "abc":
        engine.add_request(Request(name, None, [ord(name)] * 12, SamplingParams(max_tokens=5)))
    while engine.has_unfinished():
        engine.step()
    first = [chunk for plan in engine.device.plans for chunk in plan.works[0].chunks if chunk.start == 0]
    assert [len(chunk.token_ids) for chunk in first] == [12, 12, 12]


def test_without_chunking_those_that_come_back_do_not_wait_for_all_who_come() -> None:
    """A set that gave way computes its outputs again in one step of its own, if nothing else runs; something did."""
    engine = fake_engine(
        num_blocks=56,
        block_size=2,
        max_num_seqs=8,
        max_num_batched_tokens=60,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    engine.add_request(Request("long", None, [9] * 6, SamplingParams(max_tokens=64, ignore_eos=True, seed=1)))
    for _ in range(30):
        engine.step()
    together = SamplingParams(n=4, strategy="diverse", diversity_penalty=1.0, max_tokens=24, ignore_eos=True, seed=2)
    engine.add_request(Request("set", None, [1, 2, 3, 4], together))
    finished: dict[str, RequestOutput] = {}
    for step in range(100):
        if engine.stats()["preemptions"] and len(engine.scheduler.waiting) < 3:  # somebody always comes
            engine.add_request(Request(f"short {step}", None, [3], SamplingParams(max_tokens=5, ignore_eos=True)))
        finished |= {output.request_id: output for output in engine.step()}
        check(engine)
        if "set" in finished:
            break
    assert tokens_of(finished["set"]) == alone([1, 2, 3, 4], together)
    assert len(finished) < 15


@pytest.mark.parametrize("strategy", ["diverse", "beam_search"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_set_gets_its_turn_though_others_always_come(runs_ahead: bool, strategy: str) -> None:
    """It needs a position for each of its members at once. Where steps ran ahead, who just went on took theirs first,
    and who came took the rest."""
    engine = fake_engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=8, runs_ahead=runs_ahead)
    engine.add_request(Request("first", None, [3] * 3, SamplingParams(max_tokens=12, ignore_eos=True, seed=5)))
    engine.step()
    drawn: dict[str, Any] = {"diversity_penalty": 1.0, "seed": 2} if strategy == "diverse" else {}
    together = SamplingParams(n=7, strategy=strategy, max_tokens=10, ignore_eos=True, **drawn)
    engine.add_request(Request("set", None, [1, 2, 3, 4], together))
    finished: dict[str, RequestOutput] = {}
    for step in range(40):
        if len(engine.scheduler.waiting) < 3:
            params = SamplingParams(max_tokens=5, ignore_eos=True, seed=step)
            engine.add_request(Request(str(step), None, [3], params))
        finished |= {output.request_id: output for output in engine.step()}
        check(engine)
        if "set" in finished:
            break
    assert tokens_of(finished["set"]) == alone([1, 2, 3, 4], together)
    for name, output in finished.items():
        if name.isdigit():
            assert tokens_of(output) == alone([3], SamplingParams(max_tokens=5, ignore_eos=True, seed=int(name)))


def test_statistics_follow_the_clock() -> None:
    now = [100.0]
    engine = fake_engine(clock=lambda: now[0])
    engine.add_request(Request("r", None, [1, 2, 3], SamplingParams(n=2, max_tokens=3, ignore_eos=True)))
    now[0] = 103.0
    engine.step()
    assert engine.last_step.queue_times == [3.0]
    assert engine.last_step.time_to_first_tokens == [3.0]
    assert engine.last_step.num_prompt_tokens == 3
    assert engine.last_step.num_generation_tokens == 2
    now[0] = 105.5
    engine.step()
    assert engine.last_step.inter_token_latencies == [2.5, 2.5]
    now[0] = 106.0
    output = engine.step()[0]
    done = engine.last_step.finished_requests[0]
    assert (done.e2e_latency, done.num_prompt_tokens, done.num_generation_tokens) == (6.0, 3, 6)
    assert done.finish_reason == "length"
    assert output.metrics is not None
    assert (output.metrics.arrival_time, output.metrics.first_scheduled_time) == (100.0, 103.0)
    assert (output.metrics.first_token_time, output.metrics.finished_time) == (103.0, 106.0)
    assert engine.last_step.n_params == [2]
    assert engine.last_step.max_num_generation_tokens == [3]


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_prompt_may_be_all_that_is_asked_about(length: int, runs_ahead: bool) -> None:
    """A prompt of one token has nothing to report, and still ends."""
    engine = fake_engine(runs_ahead=runs_ahead, max_num_batched_tokens=4)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    engine.add_request(Request("r", None, list(range(1, length + 1)), params))
    output = run_all(engine)["r"]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == length
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason == "length"
    assert engine.stats()["blocks_in_use"] == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_happens_and_changes_nothing(mode: Any) -> None:
    params = SamplingParams(n=3, max_tokens=16, seed=5, ignore_eos=True)
    engine = fake_engine(
        num_blocks=9, block_size=4, preemption_mode=mode, num_host_blocks=16, enable_prefix_caching=False
    )
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), None, prompt, params))
    assert isinstance(engine.device, FakeDevice)
    swapped = 0
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
        swapped += len(engine.device.plans[-1].works[0].swaps_out)
        check(engine)
    assert engine.stats()["preemptions"] > 0
    assert (swapped > 0) == (mode == "swap")
    for number, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(number)]) == alone(prompt, params)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_give_way_whole_and_come_back_whole(mode: Any) -> None:
    """A search that started later loses its blocks to one before it: all beams of it, and no block is moved twice."""
    params = SamplingParams(strategy="beam_search", n=3, beam_width=3, max_tokens=12, ignore_eos=True)
    engine = fake_engine(
        num_blocks=24, block_size=2, preemption_mode=mode, num_host_blocks=40, enable_prefix_caching=False
    )
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9]]
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), None, prompt, params))
    assert isinstance(engine.device, FakeDevice)
    outputs = {}
    swapped = []
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
        plan = engine.device.plans[-1]
        swapped += [copy.source for copy in plan.works[0].swaps_out]
        by_request = {draw.request_id for draw in plan.draws}
        for request_id in by_request:
            beams = [draw for draw in plan.draws if draw.request_id == request_id]
            assert len({draw.position for draw in beams}) == 1
            assert len(beams) == 3 or beams[0].position == 0
        check(engine)
    assert engine.stats()["preemptions"] > 0
    assert bool(swapped) == (mode == "swap")
    for number, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(number)]) == alone(prompt, params)


def test_a_fork_takes_the_place_of_one_that_goes_no_further() -> None:
    """It goes by that one's name: on the device it has its row, and most of its blocks."""
    params = SamplingParams(strategy="beam_search", n=4, max_tokens=24, ignore_eos=True)
    engine = fake_engine(num_blocks=64, block_size=4)
    engine.add_request(Request("search", None, [1, 2, 3], params))
    assert isinstance(engine.device, FakeDevice)
    names: set[str] = set()
    children: set[int] = set()
    while engine.has_unfinished():
        outputs = engine.step()
        plan = engine.device.plans[-1]
        names |= {chunk.key for chunk in plan.works[0].chunks}
        children |= {draw.child for draw in plan.draws}
        check(engine)
    assert len(names) == 4
    assert len(children) > 8
    assert tokens_of(outputs[0]) == alone([1, 2, 3], params)


def test_what_beams_have_in_common_is_recomputed_once() -> None:
    """After a preemption the prompt is computed by one of them, even without a prefix cache."""
    beams = SamplingParams(strategy="beam_search", n=4, beam_width=4, max_tokens=8, ignore_eos=True)
    engine = fake_engine(num_blocks=22, block_size=4, enable_prefix_caching=False, max_model_len=64)
    prompt = list(range(1, 33))
    engine.add_request(Request("long", None, [9] * 8, SamplingParams(max_tokens=48, ignore_eos=True, seed=1)))
    for _ in range(30):
        engine.step()
    engine.add_request(Request("beams", None, prompt, beams))
    outputs = run_all(engine)
    assert engine.stats()["preemptions"] == 1
    assert tokens_of(outputs["beams"]) == alone(prompt, beams)
    # The other prompt, this one, and this one once more; four beams each computing it would be 32 * 4.
    assert engine.stats()["prompt_tokens_computed"] == 8 + 32 + 32


def random_params(numbers: random.Random, seed: int) -> SamplingParams:
    n, max_tokens = numbers.choice([1, 1, 2, 7]), numbers.randint(1, 10)
    strategy = numbers.choice(["parallel", "parallel", "parallel", "beam_search", "diverse"])
    if strategy == "beam_search":
        return SamplingParams(n=n, max_tokens=max_tokens, strategy=strategy, early_stopping=numbers.random() < 0.5)
    penalty = 1.0 if strategy == "diverse" else 0.0
    return SamplingParams(n=n, max_tokens=max_tokens, seed=seed, strategy=strategy, diversity_penalty=penalty)


@pytest.mark.long
def test_ten_thousand_random_acts_leak_nothing_and_starve_nobody() -> None:
    """Add, step and abort at random on small caches of every kind, invariants checked after each act."""
    numbers = random.Random(0)
    acts = finished = aborted = 0
    while acts < 10_000:
        swap = numbers.random() < 0.5
        engine = fake_engine(
            num_blocks=numbers.randint(8, 40),
            block_size=numbers.randint(1, 5),
            max_num_seqs=numbers.randint(1, 9),
            max_num_batched_tokens=numbers.choice([1, 3, 8, 40]),
            enable_prefix_caching=numbers.random() < 0.7,
            preemption_mode="swap" if swap else "recompute",
            num_host_blocks=numbers.choice([0, 4, 50]) if swap else 0,
        )
        live: set[str] = set()
        for number in range(400):
            acts += 1
            if numbers.random() < 0.25:
                prompt = [numbers.randint(1, 3) for _ in range(numbers.randint(1, 12))]
                params = random_params(numbers, number)
                try:
                    engine.add_request(Request(str(number), None, prompt, params, priority=numbers.choice([0, 0, 1])))
                    live.add(str(number))
                except InvalidInputError:
                    pass
            elif live and numbers.random() < 0.1:
                name = numbers.choice(sorted(live))
                assert engine.abort(name) is not None
                live.remove(name)
                aborted += 1
            elif engine.has_unfinished():
                for output in engine.step():
                    live.remove(output.request_id)
                    finished += 1
            check(engine)
        for output in run_all(engine).values():
            live.remove(output.request_id)
            finished += 1
        assert live == set()
        assert engine.stats()["blocks_in_use"] == 0
    assert finished > 1_000
    assert aborted > 100


@pytest.mark.long
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    engine = fake_engine(num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64)
    numbers = random.Random(1)
    finished = 0
    for number in range(10_000):
        prompt = [numbers.randint(1, 9) for _ in range(numbers.randint(1, 8))]
        engine.add_request(Request(str(number), None, prompt, SamplingParams(n=numbers.randint(1, 3), max_tokens=2)))
        if number % 8 == 7:
            finished += len(engine.step())
    finished += len(run_all(engine))
    assert finished == 10_000
    assert engine.requests.groups == {}
    assert engine.scheduler.running == engine.scheduler.waiting == []
    manager = engine.scheduler.managers[0]
    assert not manager._tables
    assert not manager._chains
    assert not manager._swapped
    assert engine.stats()["requests_finished"] == 10_000


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_nan_in_a_prompt_that_is_scored_ends_that_request_alone(max_tokens: int) -> None:
    engine = fake_engine()
    assert isinstance(engine.device, FakeDevice)
    engine.device.poison(lambda tokens: tokens[:3] == [1, 2, 3] and len(tokens) < 6)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1)
    engine.add_request(Request("bad", None, [1, 2, 3, 4, 5, 6, 7], params))
    engine.add_request(Request("good", None, [2, 2, 3, 4, 5, 6, 7], params))
    outputs = run_all(engine)
    assert outputs["bad"].error == NOT_FINITE
    assert outputs["good"].error is None
    assert len(outputs["good"].prompt_logprobs or ()) == 7
    assert engine.stats()["blocks_in_use"] == 0


def test_a_delta_holds_the_samples_that_have_something_new() -> None:
    """Of thousands that ran in waves each was told in every output, also those that waited or had ended."""
    options: dict[str, Any] = {"n": 8, "max_tokens": 5, "seed": 1}
    whole = run_all(asked_of(fake_engine(max_num_seqs=2), **options))["r"]
    engine = asked_of(fake_engine(max_num_seqs=2), **options, output_kind="delta")
    told: list[RequestOutput] = []
    while engine.has_unfinished():
        told += engine.step()
    assert [sample.index for sample in told[-1].outputs] == list(range(8)), "the last one holds all"
    assert all(sample.token_ids for output in told[:-1] for sample in output.outputs)
    assert max(len(output.outputs) for output in told[1:-1]) <= 2
    pieces = [sample for output in told for sample in output.outputs]
    assert tokens_of(whole) == [
        sum((piece.token_ids for piece in pieces if piece.index == index), ()) for index in range(8)
    ]
    ends = {piece.index: piece.finish_reason for piece in pieces if piece.finish_reason is not None}
    assert [ends[sample.index] for sample in whole.outputs] == [sample.finish_reason for sample in whole.outputs]


def asked_of(engine: EngineCore, **options: Any) -> EngineCore:
    engine.add_request(Request("r", None, [1, 2, 3], SamplingParams(**options)))
    return engine
