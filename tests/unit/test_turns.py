"""Calls of one engine take turns, whichever thread they come from; a call from inside another is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from ramify import AsyncEngine, EngineBusyError, Request, RequestOutput, SamplingParams
from ramify.drive.loops import Calls
from ramify.engine.core import EngineCore
from tests.fake import fake_engine

SECONDS = 60  # nothing here waits so long unless it waits for ever


def request(name: str, **params: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": 5, "seed": 7, **params}
    return Request(name, None, [1, 2, 3, len(name)], SamplingParams(**fields))


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


def alone(name: str, **params: Any) -> list[tuple[int, ...]]:
    return tokens(Calls(fake_engine()).run([request(name, **params)], use_tqdm=False)[0])


def assert_is_clean(core: EngineCore) -> None:
    assert not core.has_unfinished()
    assert core.stats()["blocks_in_use"] == 0
    for manager in core.scheduler.managers:
        manager.check()


# -- from inside -----------------------------------------------------------------------------------------------


def as_processor(act: Callable[[], object]) -> dict[str, Any]:
    def processor(_token_ids: list[int], logits: Tensor) -> Tensor:
        act()
        return logits

    return {"logits_processors": [processor]}


def as_score(act: Callable[[], object]) -> dict[str, Any]:
    def score(_output: object) -> float:
        act()
        return 0.0

    return {"n": 1, "best_of": 2, "score": score}


@pytest.mark.parametrize("way", [as_processor, as_score])
@pytest.mark.parametrize("entry", ["run", "steps", "finish", "between"])
def test_what_runs_inside_a_call_cannot_call_the_same_engine(way: Callable[..., dict[str, Any]], entry: str) -> None:
    core = fake_engine()
    calls = Calls(core)
    inner: dict[str, Callable[[], object]] = {
        "run": lambda: calls.run([request("inner")], use_tqdm=False),
        "steps": lambda: list(calls.steps([request("inner")])),
        "finish": lambda: list(calls.finish([request("inner")], most_at_once=1)),
        "between": lambda: calls.between(core.reset_prefix_cache),
    }
    outer, other = calls.run([request("outer", **way(inner[entry])), request("other")], use_tqdm=False)
    assert "EngineBusyError: this engine is in the middle of a call" in str(outer.error)
    assert (other.error, tokens(other)) == (None, alone("other"))  # the fault is its request's alone
    assert_is_clean(core)


def test_a_second_engine_may_be_called_from_inside() -> None:
    inner: list[RequestOutput] = []
    second = Calls(fake_engine())
    ask = as_score(lambda: inner.extend(second.run([request("inner", max_tokens=1)], use_tqdm=False)))
    [outer] = Calls(fake_engine()).run([request("outer", **ask)], use_tqdm=False)
    assert outer.error is None
    assert {tokens(output)[0] for output in inner} == set(alone("inner", max_tokens=1))


def test_a_stream_is_read_or_closed_before_the_next_call() -> None:
    core = fake_engine()
    calls = Calls(core)
    stream = calls.steps([request("streamed", output_kind="delta")])
    got = next(stream)
    with pytest.raises(EngineBusyError, match="must be read to its end or closed"):
        calls.run([request("next")], use_tqdm=False)
    got += [output for outputs in stream for output in outputs]  # the refusal did it no harm
    assert [sum((tokens(output)[0] for output in got), ())] == alone("streamed")
    assert [tokens(output) for output in calls.run([request("next")], use_tqdm=False)] == [alone("next")]

    left = calls.steps([request("left", output_kind="delta")])
    next(left)
    left.close()
    assert_is_clean(core)
    assert [tokens(output) for output in calls.run([request("next")], use_tqdm=False)] == [alone("next")]


@pytest.mark.parametrize("way", [as_processor, as_score])
def test_what_runs_inside_an_asynchronous_engine_cannot_wait_for_it(way: Callable[..., dict[str, Any]]) -> None:
    async def body() -> None:
        core = fake_engine()
        engine = AsyncEngine(core)

        async def inner() -> None:
            await engine.submit(request("inner")).final()

        outer = engine.submit(request("outer", **way(lambda: asyncio.run(inner()))))
        other = engine.submit(request("other"))
        assert "EngineBusyError: the engine thread cannot wait for itself" in str((await outer.final()).error)
        assert tokens(await other.final()) == alone("other")

        stopping = engine.submit(request("stopping", **way(lambda: asyncio.run(engine.shutdown()))))
        assert "EngineBusyError" in str((await stopping.final()).error)
        await engine.shutdown()
        assert_is_clean(core)

    asyncio.run(asyncio.wait_for(body(), SECONDS))


# -- from several threads --------------------------------------------------------------------------------------


def test_threads_take_turns_and_each_gets_what_it_would_get_alone() -> None:
    core = fake_engine()
    calls = Calls(core)
    together, most_together = 0, 0
    step = core.step

    def counted() -> list[RequestOutput]:
        nonlocal together, most_together
        together += 1
        most_together = max(most_together, together)
        outputs = step()
        together -= 1
        return outputs

    core.step = counted  # type: ignore[method-assign]
    names = ["x" * length for length in range(1, 13)]

    def one(name: str) -> list[list[tuple[int, ...]]]:
        asked = [request(f"{name}{child}", n=2) for child in "ab"]
        if len(name) % 3 == 0:
            return sorted(tokens(output) for output in calls.finish(asked, most_at_once=1))
        if len(name) % 3 == 1:
            outputs = [output for outputs in calls.steps(asked) for output in outputs]
            return sorted(tokens(output) for output in outputs)
        calls.between(core.reset_prefix_cache)
        return sorted(tokens(output) for output in calls.run(asked, use_tqdm=False))

    with ThreadPoolExecutor(len(names)) as pool:
        got = list(pool.map(one, names, timeout=SECONDS))
    assert got == [sorted(alone(f"{name}{child}", n=2) for child in "ab") for name in names]
    assert most_together == 1
    assert_is_clean(core)


def test_a_call_that_breaks_off_takes_nobody_elses_requests_with_it() -> None:
    """Every second thread's call fails in the middle: while a step is recorded, or because its reader leaves."""
    core = fake_engine()
    calls = Calls(core)

    class Leaving(BaseException):
        pass

    def leave() -> None:
        raise Leaving

    def one(number: int) -> list[tuple[int, ...]] | str:
        name = "y" * number
        if number % 4 == 1:
            with pytest.raises(Leaving):
                calls.run([request(name, **as_score(leave))], use_tqdm=False)
            return "left"
        if number % 4 == 3:
            stream = calls.steps([request(name, output_kind="delta")])
            next(stream)
            stream.close()
            return "left"
        return tokens(calls.run([request(name, n=2)], use_tqdm=False)[0])

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(one, range(12), timeout=SECONDS))
    assert got == ["left" if number % 2 else alone("y" * number, n=2) for number in range(12)]
    assert_is_clean(core)


def test_a_stream_may_be_dropped_by_another_thread_than_the_one_that_read_it() -> None:
    core = fake_engine()
    calls = Calls(core)
    streams = [calls.steps([request("streamed", output_kind="delta")])]
    reader = threading.Thread(target=lambda: next(streams[0]))
    reader.start()
    reader.join()
    streams.clear()
    assert_is_clean(core)
    assert [tokens(output) for output in calls.run([request("next")], use_tqdm=False)] == [alone("next")]
