"""An engine behind a connection gives what it gives in the same process, to the letter and the last bit."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ramify import (
    AsyncEngine,
    EngineClosedError,
    EngineFaultError,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from ramify.config import MixtureConfig
from ramify.engine.core import EngineCore
from ramify.errors import InvalidInputError, ProtocolError, UnsupportedError
from ramify.process.search_path import told_search_path
from ramify.remote.frames import LARGEST
from ramify.remote.remote_engine import RemoteEngine
from ramify.sampling.mixing import Mixer
from tests.fake import fake_engine, letters
from tests.remote import connected, hosting, remote

CODEC = letters()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 60))


class Gate:
    """A device's launch that waits until it is let through, so that tests decide when steps happen."""

    def __init__(self, core: EngineCore) -> None:
        self._allowed = threading.Semaphore(0)
        self._launch = core.device.launch
        core.device.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Any) -> Any:
        self._allowed.acquire()
        return self._launch(plan)

    def let(self, steps: int) -> None:
        self._allowed.release(steps)


async def until(true: Callable[[], bool]) -> None:
    """Waits for other threads; a test that waits in vain fails by its time limit, not by a wrong answer."""
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


def core(**options: Any) -> EngineCore:
    made = fake_engine(**options)
    made.make_text, made.decode, made.encode_words = CODEC.make_stream, CODEC.decode_token, CODEC.encode_words
    return made


def requests(params: SamplingParams, *, num_models: int = 1) -> list[Request]:
    others = [(1, [9, 8, 7])] if num_models == 2 else []
    return [Request("asked", None, [5, 6, 7, 8, 9], params, other_prompts=others)]


async def outputs(engine: AsyncEngine | RemoteEngine, asked: list[Request]) -> list[RequestOutput]:
    streams = [engine.submit(request) for request in asked]
    return [await stream.final() for stream in streams]


def both(params: SamplingParams, *, num_models: int = 1, **options: Any) -> tuple[Any, Any]:
    """What a request gives in the same process and behind a connection."""
    if num_models == 2:
        options |= {"num_models": 2, "mixer": Mixer(MixtureConfig(), frozenset())}

    async def here() -> list[RequestOutput]:
        engine = AsyncEngine(core(**options))
        try:
            return await outputs(engine, requests(params, num_models=num_models))
        finally:
            await engine.shutdown()

    async def there() -> list[RequestOutput]:
        with remote(core(**options), CODEC) as engine:
            return await outputs(engine, requests(params, num_models=num_models))

    return run(here), run(there)


def even(output: Any) -> float:
    """A caller's own score: it reads the text."""
    return float(output.text.count("a")) - len(output.text) / 7


def of_whole_texts(output: Any) -> float:
    """One that looks for an end, which outputs on their way have not."""
    if output.finish_reason is None:
        raise ValueError("no end")
    return float(len(output.text))


PARAMS: dict[str, dict[str, Any]] = {
    "one": {},
    "greedy": {"temperature": 0},
    "samples": {"n": 5, "logprobs": 3},
    "samples with controls": {"n": 2, "top_k": 40, "top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": {7: 3.5}},
    "stop strings": {"n": 4, "stop": ["ab", "cc"]},
    "stop strings that stay": {"n": 4, "stop": ["ab", "cc"], "include_stop_str_in_output": True, "min_tokens": 3},
    "stop ids": {"n": 3, "stop_token_ids": list(range(40, 90)), "include_stop_str_in_output": True},
    "no text": {"detokenize": False, "logprobs": 0},
    "best of": {"best_of": 4, "n": 2, "logprobs": 1},
    "best by the mean": {"best_of": 4, "score": "mean_logprob"},
    "best by a function": {"best_of": 4, "n": 2, "score": even, "stop": ["cab"]},
    "best by a function that fails": {"best_of": 3, "score": lambda _: 1 / 0},
    "best by a function of whole texts": {"best_of": 4, "n": 2, "score": of_whole_texts},
    "beams": {"strategy": "beam_search", "beam_width": 4, "n": 3, "logprobs": 2},
    "groups of beams": {
        "strategy": "beam_search", "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "n": 4,
    },
    "diverse": {"strategy": "diverse", "n": 3, "diversity_penalty": 2.0},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 2},
    "prompt alone": {"prompt_logprobs": 2, "max_tokens": 0},
    "a child by itself": {"child": 5},
    "what was kept": {"n": 2, "top_k": 5, "return_kept": "ids"},
}  # fmt: skip


def kinds_of(name: str) -> list[str]:
    """The kinds of outputs that these parameters can be asked for."""
    kinds = []
    for kind in ("final_only", "delta", "cumulative", "growth"):
        try:
            SamplingParams(**{"max_tokens": 12, "seed": 7, **PARAMS[name], "output_kind": kind, **beams(name)})
            kinds.append(kind)
        except ValueError:
            pass
    return kinds


def beams(name: str) -> dict[str, Any]:
    return {"seed": None} if "beam" in name else {}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PARAMS for kind in kinds_of(name)], ids=str)
def test_outputs_are_those_of_the_same_process(name: str, kind: str) -> None:
    params = SamplingParams(**{"max_tokens": 12, "seed": 7, **PARAMS[name], "output_kind": kind, **beams(name)})
    here, there = both(params)
    assert there == here


@pytest.mark.parametrize("kind", ["final_only", "delta", "growth"])
def test_two_models_are_mixed_as_in_the_same_process(kind: str) -> None:
    here, there = both(SamplingParams(max_tokens=10, n=2, seed=3, logprobs=1, output_kind=kind), num_models=2)
    assert there == here
    assert len(there[0].outputs[0].mixture) == len(there[0].outputs[0].token_ids) > 1


@pytest.mark.parametrize("kind", ["final_only", "delta", "growth"])
def test_both_kinds_of_logprobs_cross(kind: str) -> None:
    params = SamplingParams(max_tokens=5, n=2, seed=3, logprobs=1, top_p=0.5, output_kind=kind)
    here, there = both(params, logprobs_mode="both")
    assert there == here
    told = there[0].outputs[0].processed_logprobs
    assert len(told) == len(there[0].outputs[0].token_ids) > 1
    assert [list(row.values()) for row in told] != [list(row.values()) for row in there[0].outputs[0].logprobs]


def test_a_callers_processors_are_refused_by_name() -> None:
    async def body() -> None:
        with remote(core(), CODEC) as engine:
            asked = Request("asked", None, [1, 2], SamplingParams(logits_processors=[lambda _ids, logits: logits]))
            with pytest.raises(UnsupportedError, match=r"logits_processors .* engine_process=False"):
                engine.check(asked)
            with pytest.raises(UnsupportedError, match="logits_processors"):
                engine.submit(asked)

    run(body)


def test_what_the_engine_would_refuse_is_refused_before_it_is_sent() -> None:
    made, too_long = core(), Request("asked", None, [1] * 100, SamplingParams(max_tokens=100))
    with pytest.raises(InvalidInputError) as here:
        made.check(too_long)
    with remote(made, CODEC) as engine, pytest.raises(InvalidInputError) as there:
        engine.check(too_long)
    assert str(there.value) == str(here.value)


# -- many requests, several fronts ------------------------------------------------------------------------------------


def many(count: int, **params: Any) -> list[Request]:
    """Different requests, streamed and not, some with stop strings."""
    return [
        Request(
            f"r{place}",
            None,
            [5, 6, 7, 8, place],
            SamplingParams(
                n=1 + place % 3,
                seed=place,
                stop=["ab", "cc"] if place % 4 == 3 else None,
                output_kind=("delta", "final_only", "cumulative")[place % 3],
                **{"max_tokens": 6 + place % 7, "logprobs": 1 if place % 5 == 0 else None, **params},
            ),
        )
        for place in range(count)
    ]


def essence(output: RequestOutput) -> Any:
    """All but what depends on who came when."""
    return replace(output, num_cached_tokens=0, metrics=None)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_many_at_once_are_not_mixed_up(runs_ahead: bool) -> None:
    """Three fronts that name their requests alike, and the same requests in one process."""
    options = {"runs_ahead": runs_ahead, "max_num_seqs": 48, "num_blocks": 400, "max_num_batched_tokens": 256}

    async def here() -> list[RequestOutput]:
        engine = AsyncEngine(core(**options))
        try:
            return await outputs(engine, many(9))
        finally:
            await engine.shutdown()

    async def there() -> list[list[RequestOutput]]:
        made = core(**options)
        with hosting([made]) as server:
            fronts = [connected(server, CODEC)[0] for _ in range(3)]
            got = await asyncio.gather(*(outputs(front, many(9)) for front in fronts))
            assert [(await front.state()).num_unfinished for front in fronts] == [0, 0, 0]
            assert sum((await fronts[0].state()).observations.ends.values()) == 27, "everybody's are counted together"
            for front in fronts:
                front.stop()
        assert made.stats()["blocks_in_use"] == 0
        return got

    wanted = [essence(output) for output in run(here)]
    assert [[essence(output) for output in front] for front in run(there)] == [wanted] * 3


def test_a_front_that_goes_takes_its_own_requests_with_it_and_no_others() -> None:
    async def body() -> None:
        made = core()
        gate = Gate(made)
        with hosting([made]) as server:
            [staying], [going] = connected(server, CODEC), connected(server, CODEC)
            long = SamplingParams(max_tokens=40, ignore_eos=True, output_kind="delta")
            streams = [front.submit(Request("same", None, [1, 2, 3], long)) for front in (staying, going)]
            firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
            while not all(first.done() for first in firsts):  # a request may be a few steps late where cores are busy
                gate.let(1)
                await asyncio.wait(firsts, timeout=0.05)
            going._link._socket.close()
            going._link._socket = socket.socket()  # it is gone as if its process were
            gate.let(1_000)
            assert len((await streams[0].final()).outputs[0].token_ids) < 40
            await until(lambda: staying.stats()["blocks_in_use"] == 0)
            assert (await staying.state()).num_unfinished == 0
            staying.stop()

    run(body)


def test_an_abort_leaves_what_there_is() -> None:
    async def body() -> None:
        made = core()
        gate = Gate(made)
        with remote(made, CODEC) as engine:
            [told, silent] = (
                Request(kind, None, [1, 2, 3], SamplingParams(max_tokens=40, seed=1, ignore_eos=True, output_kind=kind))
                for kind in ("delta", "final_only")
            )
            streams = [engine.submit(told), engine.submit(silent)]
            gate.let(6)
            first = await anext(streams[0])
            await until(lambda: engine.stats()["steps"] >= 4)
            engine.abort("delta")
            engine.abort("final_only")
            engine.abort("nobody")
            gate.let(1_000)
            rest, whole = [await stream.final() for stream in streams]
            tokens = first.outputs[0].token_ids + rest.outputs[0].token_ids
            assert 4 <= len(tokens) < 40
            assert tokens == whole.outputs[0].token_ids[: len(tokens)]
            assert {rest.outputs[0].finish_reason, whole.outputs[0].finish_reason} == {FinishReason.ABORT}
            assert first.outputs[0].text + rest.outputs[0].text == CODEC.decode(tokens)
            assert engine.stats()["blocks_in_use"] == 0

    run(body)


def test_a_stream_that_is_dropped_aborts_its_request() -> None:
    async def body() -> None:
        with remote(core(), CODEC) as engine:
            stream = engine.submit(Request("dropped", None, [1, 2], SamplingParams(max_tokens=120, ignore_eos=True)))
            await asyncio.sleep(0.01)
            del stream
            await until(lambda: engine.num_unfinished == 0)

    run(body)


def test_a_step_that_fails_ends_all_requests_and_the_next_ones_are_served() -> None:
    async def body() -> None:
        made = core()
        launch = made.device.launch

        def broken(_plan: Any) -> Any:
            raise MemoryError("/home/somebody/secret")

        with hosting([made]) as server:
            fronts = [connected(server, CODEC)[0] for _ in range(2)]
            made.device.launch = broken  # type: ignore[method-assign, assignment]
            streams = [front.submit(many(1)[0]) for front in fronts]
            for stream in streams:
                with pytest.raises(EngineFaultError, match=r"failed in a step \(MemoryError\)$"):
                    await stream.final()
            await until(lambda: not any(front.is_sound for front in fronts))
            made.device.launch = launch  # type: ignore[method-assign]
            await fronts[0].submit(many(1)[0]).final()
            await until(lambda: all(front.is_sound for front in fronts))
            for front in fronts:
                front.stop()

    run(body)


def test_after_the_end_requests_are_refused() -> None:
    async def body() -> None:
        with remote(core(), CODEC) as engine:
            stream = engine.submit(Request("cut", None, [1, 2], SamplingParams(max_tokens=120, ignore_eos=True)))
            await engine.shutdown()
            assert (await stream.final()).outputs[0].finish_reason is FinishReason.ABORT
            with pytest.raises(EngineClosedError):
                engine.submit(many(1)[0])

    run(body)


def test_a_request_that_is_too_large_is_refused_and_many_large_ones_take_several_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Count(int): ...

    async def body() -> None:
        monkeypatch.setattr("ramify.remote.link.LARGEST_MESSAGE", 500)
        with remote(core(), CODEC) as engine:
            with pytest.raises(InvalidInputError, match="prompt is too large"):
                engine.submit(Request("large", None, [1] * 100, SamplingParams(n=Count(2), seed=1)))
            assert engine.num_unfinished == 0
            asked = [Request(f"{place}", None, [1] * 50, SamplingParams(n=Count(2), seed=1)) for place in range(9)]
            assert len(await outputs(engine, asked)) == 9

    run(body)


def test_what_cannot_be_sent_ends_its_request_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        with remote(core(), CODEC) as engine:
            with monkeypatch.context() as patch:
                patch.setattr("ramify.remote.frames.LARGEST", 400)
                with pytest.raises(ProtocolError, match="is too large"):
                    await engine.submit(many(1, logprobs=20)[0]).final()
                patch.setattr("ramify.remote.frames.LARGEST", LARGEST)
                patch.setattr("ramify.remote.host.integers", lambda _: object())
                with pytest.raises(EngineFaultError, match="TypeError"):
                    await engine.submit(many(1)[0]).final()
            assert (await engine.submit(many(1)[0]).final()).finished
            assert engine.stats()["blocks_in_use"] == 0

    run(body)


def test_what_is_no_text_among_the_places_of_modules_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python passes over it, so programs append Paths and never learn; no process could be started beside one."""
    monkeypatch.setattr(sys, "path", ["/a", Path("/b"), b"/c", ""])
    assert json.loads(told_search_path()) == ["/a", ""]
