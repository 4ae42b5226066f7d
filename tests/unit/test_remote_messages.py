"""Messages between processes: every one comes back as it was, and damaged ones end no more than they must."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import (
    FinishReason,
    Request,
    SamplingParams,
)
from ramify.errors import EngineLostError, ProtocolError
from ramify.remote.frames import LARGEST, LENGTH, FrameReader, frame_of, read_frame
from ramify.remote.link import Link
from ramify.remote.messages import (
    Abort,
    Add,
    Build,
    Failed,
    Ready,
    Report,
    ToEngine,
    ToFront,
    Told,
    build_of,
    encode,
    floats,
    for_engine,
    for_front,
)
from ramify.remote.packing import capacity_of, facts_of
from ramify.remote.remote_engine import RemoteEngine
from tests.fake import fake_engine, letters
from tests.remote import connected, hosting

CODEC = letters()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 60))


def request() -> Request:
    return Request("asked", None, [5, 6, 7], SamplingParams(max_tokens=6, seed=1))


# -- damaged messages -------------------------------------------------------------------------------------------------


DAMAGED = {
    "too large": LENGTH.pack(LARGEST + 1),
    "no message": frame_of(b"\xc1"),
    "another type": frame_of(msgspec.msgpack.encode([["Add", "zero"]])),
    "an unknown name": frame_of(msgspec.msgpack.encode([["Import", "os"]])),
    "no such model": frame_of(encode([Abort(7, 0)])),
    "half a number": frame_of(encode([Add(0, 0, b"123", {})])),
    "an unknown field": frame_of(encode([Add(0, 0, bytes(8), {"nonsense": 1})])),
    "a wrong value": frame_of(encode([Add(0, 0, bytes(8), {"n": "many"})])),
    "a deep one": frame_of(b"\x91" * 100_000),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_messages_end_their_connection_or_request_and_nothing_else(name: str) -> None:
    async def body() -> None:
        with hosting([fake_engine()]) as server:
            [other] = connected(server, CODEC)
            ours, theirs = socket.socketpair()
            server.admit(theirs)
            assert for_front(read_frame(ours) or b"")[0] == Ready([facts_of(fake_engine().capacity)])
            ours.sendall(DAMAGED[name])
            answer = await asyncio.to_thread(read_frame, ours)
            assert answer is None or isinstance(for_front(answer)[0], Failed)
            ours.close()
            assert (await other.submit(request()).final()).finished
            other.stop()

    run(body)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 9))
def test_frames_come_whole_however_they_are_cut(contents: list[bytes], size: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, got = FrameReader(ours), []
        stream = b"".join(map(frame_of, contents))
        for start in range(0, len(stream), size):
            theirs.sendall(stream[start : start + size])
        theirs.close()
        while (frames := reader.read()) is not None:
            assert frames
            got += frames
    assert got == contents


def test_an_engine_that_sends_nonsense_is_lost() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        link = Link(ours)
        theirs.sendall(frame_of(encode([Ready([facts_of(fake_engine().capacity)])])))
        [facts] = link.wait_ready(print)
        engine = RemoteEngine(link, 0, CODEC, capacity_of(facts))
        lost: list[EngineLostError] = []
        link.when_lost(lost.append)
        link.start([engine])
        stream = engine.submit(request())
        theirs.sendall(frame_of(msgspec.msgpack.encode([["Told", 0, "text"]])))
        with pytest.raises(EngineLostError, match="a message cannot be read"):
            await stream.final()
        assert not engine.is_sound
        assert [str(error) for error in lost] == [str(link.error)]
        with pytest.raises(EngineLostError):
            engine.submit(request())
        with pytest.raises(EngineLostError):
            engine.stats()
        engine.stop()

    run(body)


# -- every message ----------------------------------------------------------------------------------------------------

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(), st.lists(st.integers(0, 9))),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold."""
    if kind in SCALARS:
        return SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, FinishReason):
        return st.sampled_from(kind)
    arguments = get_args(kind)
    if get_origin(kind) is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if arguments:
        return st.one_of(*map(values_of, arguments))
    # Later: a part may hold another of its kind.
    return st.deferred(
        lambda: st.builds(kind, **{name: values_of(hint) for name, hint in get_type_hints(kind).items()})
    )


@pytest.mark.parametrize("kind", [*get_args(ToEngine), *get_args(ToFront)], ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: Any) -> None:
    read = for_engine if kind in get_args(ToEngine) else for_front

    @settings(max_examples=12)
    @given(st.lists(values_of(kind), min_size=1, max_size=2))
    def check(messages: list[Any]) -> None:
        assert read(encode(messages)) == messages

    check()


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    report = Report(np.float32(-0.5), np.int64(3), b"", b"")  # type: ignore[arg-type]
    [told] = for_front(encode([Told(0, logprobs=floats(np.asarray([-0.25], np.float32)), reports=[(0, report)])]))
    assert told == Told(0, logprobs=floats([-0.25]), reports=[(0, Report(-0.5, 3, b"", b""))])
    with pytest.raises(TypeError, match="a function is no part of a message"):
        encode([Add(0, 0, b"", {"score": run})])


@settings(max_examples=12)
@given(values_of(Build))
def test_so_does_what_an_engine_is_built_from(build: Build) -> None:
    assert build_of(encode(build)) == build


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(content: bytes) -> None:
    for read in (for_engine, for_front, build_of):
        with suppress(ProtocolError):
            read(content)
