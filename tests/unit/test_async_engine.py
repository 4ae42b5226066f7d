"""AsyncEngine over the fake device: streams, slow readers, aborts, faults and shutdown, with exact tokens."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import AsyncEngine, EngineClosedError, EngineFaultError, InvalidInputError, Request, SamplingParams
from ramify.drive.mailroom import Mailroom, RequestStream
from ramify.drive.merging import merged
from ramify.engine.core import EngineCore
from ramify.engine.metrics import IterationStats
from ramify.outputs import FinishReason, RequestOutput
from tests.drive import finish, tokens_of
from tests.fake import FakeDevice, fake_engine


def use_launch(core: EngineCore, launch: Callable[[Any], Any]) -> None:
    """Puts another launch in place of the device's own."""
    core.device.launch = launch  # type: ignore[method-assign, assignment]


class Gate:
    """A device's launch that waits until it is let through, so that tests decide when steps happen."""

    def __init__(self, core: EngineCore) -> None:
        self.steps_allowed = threading.Semaphore(0)
        self._launch = core.device.launch
        use_launch(core, self.launch)

    def launch(self, plan: Any) -> Any:
        self.steps_allowed.acquire()
        return self._launch(plan)

    def let(self, steps: int) -> None:
        self.steps_allowed.release(steps)


def request(name: str, **params: Any) -> Request:
    return Request(name, None, [1, 2, 3, len(name)], SamplingParams(**{"max_tokens": 8, "seed": 7, **params}))


async def until(true: Callable[[], bool]) -> None:
    """Waits for the engine thread; a test that waits in vain fails by its time limit, not by a wrong answer."""
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


def expected(name: str, **params: Any) -> list[tuple[int, ...]]:
    asked = request(name, **params)
    return tokens_of(finish(fake_engine(), [(asked.prompt_token_ids, asked.sampling_params)])[0])


def test_streams_of_many_requests_hold_what_each_would_give_alone() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())

        async def read(name: str) -> list[tuple[int, ...]]:
            folded: RequestOutput | None = None
            async for output in engine.submit(request(name, n=2, output_kind="delta")):
                folded = merged(folded, output, output_kind_of(output))
            assert folded is not None
            return tokens_of(folded)

        names = ["x" * length for length in range(1, 30)]
        got = await asyncio.gather(*map(read, names))
        await engine.shutdown()
        assert got == [expected(name, n=2) for name in names]
        assert engine.stats()["blocks_in_use"] == 0

    def output_kind_of(_output: RequestOutput) -> Any:
        return request("x", output_kind="delta").sampling_params.output_kind

    run(body)


def test_a_slow_reader_gets_several_tokens_in_one_output_and_loses_none() -> None:
    async def body() -> None:
        core = fake_engine()
        gate = Gate(core)
        engine = AsyncEngine(core)
        stream = engine.submit(request("slow", output_kind="delta", logprobs=2, ignore_eos=True))
        gate.let(1)
        first = await anext(stream)
        gate.let(5)
        await until(lambda: core.metrics.steps == 6)
        second = await anext(stream)
        gate.let(100)
        rest = [output async for output in stream]
        assert [len(each.outputs[0].token_ids) for each in (first, second)] == [1, 5]
        outputs = [first, second, *rest]
        assert rest[-1].finished
        tokens = sum((each.outputs[0].token_ids for each in outputs), ())
        rows = [row for each in outputs for row in each.outputs[0].logprobs or ()]
        [whole] = finish(
            fake_engine(), [([1, 2, 3, 4], SamplingParams(max_tokens=8, seed=7, logprobs=2, ignore_eos=True))]
        )
        assert tokens == whole.outputs[0].token_ids
        assert rows == list(whole.outputs[0].logprobs or ())
        await engine.shutdown()

    run(body)


def test_a_second_reader_of_a_stream_is_refused_and_the_first_gets_all() -> None:
    """The last output comes once, so one of two waited for ever."""

    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        stream = engine.submit(request("a"))
        first = asyncio.create_task(stream.final())
        await asyncio.sleep(0)
        with pytest.raises(InvalidInputError, match="read by another task"):
            await anext(stream)
        assert tokens_of(await first) == expected("a")
        assert engine.num_unfinished == 0
        await engine.shutdown()

    run(body)


def test_a_listener_takes_outputs_one_by_one_or_joined() -> None:
    """What came while an event loop was late stays apart; what a client could not take is joined."""

    async def body() -> None:
        core = fake_engine()
        gate = Gate(core)
        engine = AsyncEngine(core)
        stream = engine.submit(request("watched", output_kind="delta", ignore_eos=True))
        calls = []
        stream.listen(lambda: calls.append(core.metrics.steps))
        waiting = engine.room.mailboxes["watched"]
        gate.let(3)
        await until(lambda: len(waiting.outputs) == 3 and bool(calls))
        assert [len(each.outputs[0].token_ids) for each in stream.take()] == [1, 1, 1]
        assert stream.take() == []
        gate.let(3)
        await until(lambda: len(waiting.outputs) == 3)
        assert [len(each.outputs[0].token_ids) for each in stream.take(joined=True)] == [3]
        gate.let(100)
        await until(lambda: engine.num_unfinished == 0)
        assert [len(each.outputs[0].token_ids) for each in stream.take()] == [1, 1]
        assert stream.is_over
        await engine.shutdown()

    run(body)


def test_a_listener_is_told_of_a_failure() -> None:
    class Engine:
        room = Mailroom()

        def abort(self, request_id: str) -> None: ...

        def check_thread(self) -> None: ...

    async def body() -> None:
        engine = Engine()
        stream = RequestStream(engine, engine.room.open(request("unlucky")))
        heard = asyncio.Event()
        stream.listen(heard.set)
        engine.room.fail(list(engine.room.mailboxes.values()), EngineFaultError("gone"))
        await heard.wait()
        with pytest.raises(EngineFaultError, match="gone"):
            stream.take()
        assert stream.is_over
        assert stream.take() == []
        assert not engine.room.mailboxes

    run(body)


def test_what_waits_for_a_reader_who_never_comes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.drive.mailroom.MOST_WAITING", 8)

    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        stream = engine.submit(request("idle", max_tokens=60, output_kind="delta", ignore_eos=True))
        await until(lambda: engine.num_unfinished == 0)
        outputs = stream.take()
        assert len(outputs) <= 8
        assert sum(len(each.outputs[0].token_ids) for each in outputs) == 60
        await engine.shutdown()

    run(body)


def test_a_reader_who_comes_late_gets_one_output() -> None:
    async def body() -> None:
        core = fake_engine()
        engine = AsyncEngine(core)
        stream = engine.submit(request("idle", max_tokens=60, output_kind="delta", ignore_eos=True))
        await until(lambda: engine.num_unfinished == 0)
        assert core.stats()["blocks_in_use"] == 0, "its blocks do not wait for the reader"
        only = [output async for output in stream]
        assert [len(each.outputs[0].token_ids) for each in only] == [60]
        await engine.shutdown()

    run(body)


def test_cumulative_outputs_are_replaced_by_later_ones() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        stream = engine.submit(request("all", output_kind="cumulative", ignore_eos=True))
        await until(lambda: engine.num_unfinished == 0)
        [output] = [output async for output in stream]
        assert tokens_of(output) == expected("all", ignore_eos=True)
        await engine.shutdown()

    run(body)


@pytest.mark.parametrize("leave", ["close", "drop", "cancel", "abort"])
def test_whoever_leaves_frees_the_blocks_before_the_next_step(leave: str) -> None:
    async def body() -> None:
        core = fake_engine()
        gate = Gate(core)
        engine = AsyncEngine(core)
        other = engine.submit(request("other", output_kind="delta", ignore_eos=True))
        stream = engine.submit(request("gone", max_tokens=60, output_kind="delta", ignore_eos=True))
        gate.let(2)
        await anext(stream)
        await anext(other)
        held = core.stats()["blocks_in_use"]
        if leave == "close":
            await stream.aclose()
        elif leave == "abort":
            engine.abort("gone")
        elif leave == "cancel":
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            del stream
            gc.collect()
        gate.let(2)  # the step that may be under way, and one more
        await until(lambda: "gone" not in core.requests.groups)
        assert core.metrics.steps <= 4
        assert core.stats()["blocks_in_use"] < held
        if leave == "abort":
            last = [output async for output in stream][-1]
            assert last.outputs[0].finish_reason is FinishReason.ABORT
        gate.let(100)
        await other.final()
        await engine.shutdown()
        assert core.stats()["blocks_in_use"] == 0

    run(body)


def test_an_abort_of_one_changes_nothing_for_others() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        kept = [engine.submit(request("k" * size, n=2)) for size in range(1, 9)]
        for size in range(1, 9):
            engine.submit(request("gone" * size, max_tokens=90)).close()
        finals = await asyncio.gather(*(stream.final() for stream in kept))
        assert list(map(tokens_of, finals)) == [expected("k" * size, n=2) for size in range(1, 9)]
        await engine.shutdown()
        assert engine.stats()["blocks_in_use"] == 0

    run(body)


def test_a_fault_while_a_step_is_recorded_ends_all_requests_and_the_next_ones_are_served() -> None:
    async def body() -> None:
        core = fake_engine()
        engine = AsyncEngine(core)
        adopt = core.scheduler.adopt

        def broken(_forks: Any) -> None:
            raise MemoryError

        core.scheduler.adopt = broken  # type: ignore[method-assign, assignment]
        streams = [engine.submit(request(name, n=3)) for name in ("a", "bb")]
        got = await asyncio.gather(*(stream.final() for stream in streams), return_exceptions=True)
        assert [type(error) for error in got] == [EngineFaultError] * 2
        assert engine.stats()["blocks_in_use"] == engine.stats()["running"] == 0
        core.scheduler.adopt = adopt  # type: ignore[method-assign]
        assert tokens_of(await engine.submit(request("a", n=3)).final()) == expected("a", n=3)
        await engine.shutdown()

    run(body)


def test_a_fault_of_the_engine_ends_all_requests_and_the_next_ones_are_served() -> None:
    async def body() -> None:
        core = fake_engine()
        assert isinstance(core.device, FakeDevice)
        engine = AsyncEngine(core)
        launch = core.device.launch

        def broken(_plan: Any) -> Any:
            raise MemoryError("secret path")

        use_launch(core, broken)
        streams = [engine.submit(request(name)) for name in ("a", "bb")]
        got = await asyncio.gather(*(stream.final() for stream in streams), return_exceptions=True)
        assert [type(error) for error in got] == [EngineFaultError] * 2
        assert "MemoryError" in str(got[0])
        assert "secret" not in str(got[0])
        after_fault = engine.is_sound
        assert not after_fault
        use_launch(core, launch)
        assert tokens_of(await engine.submit(request("a")).final()) == expected("a")
        after_success = engine.is_sound
        assert after_success
        assert engine.stats()["blocks_in_use"] == 0
        await engine.shutdown()

    run(body)


def test_a_fault_outside_a_step_closes_the_engine_and_nobody_waits_for_ever() -> None:
    async def body() -> None:
        core = fake_engine()
        engine = AsyncEngine(core)

        class Broken:
            def stepped(self, _step: IterationStats) -> None:
                raise KeyError("an observer's own mistake")

            def ended(self, _output: RequestOutput) -> None: ...

        engine.observe(Broken())
        with pytest.raises(EngineFaultError):
            await engine.submit(request("a")).final()
        await until(lambda: not engine.is_sound)
        with pytest.raises(EngineClosedError):
            engine.submit(request("b"))

    run(body)


def test_a_request_that_the_core_refuses_fails_alone() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        bad = engine.submit(request("bad", max_tokens=100_000))
        good = engine.submit(request("good"))
        with pytest.raises(InvalidInputError, match="max_model_len"):
            await bad.final()
        assert tokens_of(await good.final()) == expected("good")
        await engine.shutdown()

    run(body)


def test_a_name_in_use_is_refused_and_free_again_after_the_end() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        stream = engine.submit(request("twice"))
        with pytest.raises(InvalidInputError, match="'twice' is in use"):
            engine.submit(request("twice"))
        await stream.final()
        await engine.submit(request("twice")).final()
        await engine.shutdown()

    run(body)


def test_shutdown_aborts_what_is_left_and_refuses_what_comes() -> None:
    async def body() -> None:
        core = fake_engine()
        gate = Gate(core)
        engine = AsyncEngine(core)
        streams = [engine.submit(request("s" * size, max_tokens=50, ignore_eos=True)) for size in (1, 2, 3)]
        gate.let(2)
        await until(lambda: core.metrics.steps == 2)
        gate.let(100)
        await engine.shutdown()
        finals = await asyncio.gather(*(stream.final() for stream in streams))
        assert {final.outputs[0].finish_reason for final in finals} <= {FinishReason.ABORT, FinishReason.LENGTH}
        assert core.stats()["blocks_in_use"] == 0
        with pytest.raises(EngineClosedError):
            engine.submit(request("late"))
        assert "ramify-engine" not in {thread.name for thread in threading.enumerate() if thread is engine._thread}

    run(body)


def test_shutdown_with_grace_lets_requests_end() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        stream = engine.submit(request("patient"))
        await engine.shutdown(grace_seconds=30)
        assert tokens_of(await stream.final()) == expected("patient")

    run(body)


class Counting:
    def __init__(self) -> None:
        self.tokens = 0
        self.ended_ids: list[str] = []

    def stepped(self, step: IterationStats) -> None:
        self.tokens += step.num_generation_tokens

    def ended(self, output: RequestOutput) -> None:
        self.ended_ids.append(output.request_id)


def test_observers_hear_of_every_step_and_every_end() -> None:
    async def body() -> None:
        engine = AsyncEngine(fake_engine())
        seen = Counting()
        engine.observe(seen)
        await asyncio.gather(*(engine.submit(request("o" * size, ignore_eos=True)).final() for size in (1, 2, 3)))
        engine.submit(request("gone", max_tokens=60)).close()
        await engine.shutdown()
        assert sorted(seen.ended_ids) == ["gone", "o", "oo", "ooo"]
        assert seen.tokens >= 24

    run(body)


ACTS = st.lists(st.sampled_from(["submit", "read", "drop", "abort", "pause", "fail"]), min_size=5, max_size=60)


@settings(max_examples=40)
@given(acts=ACTS, data=st.data())
def test_random_acts_leave_nothing_behind(acts: list[str], data: st.DataObject) -> None:
    """Whatever readers do in whatever order: every stream ends, tokens are those of a lone run, blocks return."""

    async def body() -> None:
        core = fake_engine(num_blocks=24)
        engine = AsyncEngine(core)
        launch = core.device.launch
        streams: dict[str, Any] = {}
        for number, act in enumerate(acts):
            if act == "submit":
                name = f"r{number}"
                streams[name] = engine.submit(request(name, output_kind="delta", ignore_eos=True))
            elif act == "pause":
                await asyncio.sleep(0.001)
            elif act == "fail":

                def broken(_plan: Any) -> Any:
                    use_launch(core, launch)
                    raise MemoryError

                use_launch(core, broken)
            elif streams:
                name = data.draw(st.sampled_from(sorted(streams)))
                stream = streams.pop(name)
                if act == "abort":
                    engine.abort(name)
                if act == "drop":
                    stream.close()
                    continue
                try:
                    final = await stream.final()
                except EngineFaultError:
                    continue
                wanted = expected(name, ignore_eos=True)[0]
                got = final.outputs[0].token_ids
                assert got == wanted[: len(got)]
                assert len(got) == 8 or final.outputs[0].finish_reason is FinishReason.ABORT
        await asyncio.gather(*(stream.final() for stream in streams.values()), return_exceptions=True)
        await engine.shutdown()
        assert engine.num_unfinished == 0
        assert core.stats()["blocks_in_use"] == 0

    run(body)


class DeafEngine(AsyncEngine):
    """Does not look into its inbox again before it stops, as when request and stop come between two looks."""

    def _do_inbox(self) -> bool:
        with self._lock:
            while not self._stops:
                self._called.wait()
        return False


def test_a_request_that_comes_with_the_stop_does_not_wait_for_ever() -> None:
    """Its reader waited for a mailbox that nobody would fill: the core had never seen the request."""

    async def body() -> None:
        engine = DeafEngine(fake_engine())
        stream = engine.submit(request("late"))
        await asyncio.to_thread(engine.stop)
        with pytest.raises(EngineClosedError):
            await anext(stream)

    run(body)


def test_what_metrics_tell_counts_all_tokens_of_streams_and_of_aborted_requests() -> None:
    """Of a stream only the tokens of its last output were counted."""

    async def body() -> None:
        core = fake_engine()
        gate = Gate(core)
        engine = AsyncEngine(core)
        streams = [engine.submit(request(name, output_kind="delta", ignore_eos=True)) for name in ("whole", "cut")]
        gate.let(4)
        await until(lambda: engine.stats()["steps"] == 4)
        engine.abort("cut")
        gate.let(100)
        ends = [await stream.final() for stream in streams]
        lengths = [len(output.outputs[0].token_ids) for output in ends]
        assert lengths[0] == 8
        await engine.shutdown()
        seen = engine.observations
        assert seen.ends == {"abort": 1, "length": 1}
        assert [seen.outputs.total, seen.prompts.total] == [sum(lengths), 8]
        assert [sum(seen.whole.counts), sum(seen.first.counts)] == [2, 2]
        assert sum(seen.between.counts) == sum(lengths) - 2

    run(body)
