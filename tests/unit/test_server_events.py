"""Events on their way: a token an event, a write a step; joined only for clients that read too slowly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.drive.async_engine import AsyncEngine
from ramify.drive.intake import Intake
from ramify.drive.mailroom import Mailroom, RequestStream
from ramify.engine.request import Request
from ramify.errors import EngineFaultError
from ramify.outputs import CompletionOutput, FinishReason, Inclusion, RequestOutput
from ramify.sampling_params import SamplingParams
from ramify.server.chat import ChatShape
from ramify.server.chunks import ChunkWriter, Shape
from ramify.server.completions import CompletionShape
from ramify.server.connection import EventStream
from ramify.server.events import EventSource, event_of
from ramify.server.listening import SocketPipe
from ramify.server.pipe import Pipe, give_pipe
from ramify.server.protocol import ChatCompletionRequest, CompletionRequest
from ramify.server.service import ServedModel
from ramify.text.codec import TextCodec
from tests.fake import fake_engine


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


def output(*samples: CompletionOutput, name: str = "0", finished: bool = False) -> RequestOutput:
    return RequestOutput(name, None, (1, 2), samples, finished)


# -- frames ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    core = fake_engine()
    engine = AsyncEngine(core)
    intake = Intake(TextCodec(None), vocab_size=64, max_logprobs=20, check_request=core.check)
    yield ServedModel('names may hold "quotes", \ue000text\ue000 and -1', engine, intake, 64)
    engine.stop()


def shape_of(kind: str, model: ServedModel, *, with_token_ids: bool) -> Shape:
    params = SamplingParams(n=2)
    told = {"return_token_ids": with_token_ids}
    if kind == "chat":
        chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **told})
        return ChatShape("name", model, chat, params)
    return CompletionShape("name", model, CompletionRequest.model_validate({"prompt": ["x"], **told}), params)


SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.text(max_size=4), st.lists(st.integers(0, 99), max_size=2)), max_size=3),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(steps=SAMPLES, with_token_ids=st.booleans(), include_usage=st.booleans())
def test_a_frame_holds_what_the_whole_chunk_would(
    kind: str,
    model: ServedModel,
    steps: list[list[tuple[int, str, list[int]]]],
    with_token_ids: bool,
    include_usage: bool,
) -> None:
    """Byte by byte: what is made once and filled in is what would have been made anew each time."""
    whole, filled = (shape_of(kind, model, with_token_ids=with_token_ids) for _ in range(2))
    vars(filled)["_head"] = vars(whole)["_head"]  # made in the same second
    writer = ChunkWriter(filled, with_token_ids=with_token_ids, include_usage=include_usage)
    more = {"usage": None} if include_usage else {}
    for number, step in enumerate(steps):
        ends = number == len(steps) - 1
        samples = {index: CompletionOutput(index, text, tuple(ids), 0.0) for index, text, ids in step}
        if number % 3 == 2:  # what is told of few samples is told of these too
            samples = {i: replace(sample, inclusion=Inclusion(-1.0, -2.0)) for i, sample in samples.items()}
        if ends:
            samples = {i: replace(sample, finish_reason=FinishReason.LENGTH) for i, sample in samples.items()}
        came = output(*samples.values(), finished=ends)
        chunks = [chunk for sample in came.outputs for chunk in whole.chunks(0, came, sample)]
        assert writer.events(0, came) == b"".join(event_of({**chunk, **more}) for chunk in chunks)


# -- events of streams ----------------------------------------------------------------------------------------


class Post:
    """An engine whose outputs the test delivers itself."""

    def __init__(self) -> None:
        self.room = Mailroom()
        self.aborted: list[str] = []

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def check_thread(self) -> None: ...

    def stream(self, name: str) -> RequestStream:
        return RequestStream(
            self, self.room.open(Request(name, None, [1], SamplingParams(output_kind="delta", max_tokens=64)))
        )

    def step(self, *names: str, text: str = "a", finished: bool = False) -> None:
        """What one step of an engine delivers: an output for each of these."""
        self.room.deliver(
            [output(CompletionOutput(0, text, (1,), 0.0), name=name, finished=finished) for name in names]
        )


class FakePipe:
    def __init__(self) -> None:
        self.is_full = False
        self.written: list[bytes] = []
        self._room = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def drained(self) -> None:
        if self.is_full:
            await self._room.wait()

    def drain(self) -> None:
        self.is_full = False
        self._room.set()


def texts(index: int, came: RequestOutput) -> bytes:
    return f"({index}:{came.outputs[0].text})".encode()


class Exchange:
    """A response on its way, as the server has it: by a pipe, or by ASGI alone."""

    def __init__(self, source: EventSource, pipe: Pipe | None, *, seconds: float = 30) -> None:
        self.sent: list[bytes] = []
        self.released = False
        self.clients_patience = asyncio.Event()
        self.holds_up: asyncio.Event | None = None
        scope: dict[str, Any] = {}
        if pipe is not None:
            give_pipe(scope, pipe)
        response = EventStream(source, seconds=seconds, release=self.release)
        self.task = asyncio.ensure_future(response(scope, self.receive, self.send))

    def release(self) -> None:
        self.released = True

    async def receive(self) -> dict[str, Any]:
        await self.clients_patience.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.holds_up is not None:
            await self.holds_up.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_token_an_event_and_a_write_a_step() -> None:
    async def body() -> None:
        post, pipe = Post(), FakePipe()
        source = EventSource([post.stream("a"), post.stream("b")], texts, first=b"!", last=lambda: b"?")
        post.step("a", text="early")  # before anybody listens
        exchange = Exchange(source, pipe)
        await turns()
        post.step("a", "b")
        await turns()
        post.step("a", text="1")  # three steps while the event loop does something else: still an event a token
        post.step("a", "b", text="2")
        post.step("b", text="3")
        await turns()
        post.step("a", "b", text="", finished=True)
        await exchange.task
        assert pipe.written == [b"!(0:early)", b"(0:a)(1:a)", b"(0:1)(0:2)(1:2)(1:3)"]
        assert exchange.sent == [b"(0:)(1:)?data: [DONE]\n\n"]
        assert exchange.released
        assert post.aborted == []

    run(body)


def test_what_a_slow_client_could_not_take_is_joined() -> None:
    async def body() -> None:
        post, pipe = Post(), FakePipe()
        exchange = Exchange(EventSource([post.stream("a")], texts), pipe)
        await turns()
        pipe.is_full = True
        for text in "abcde":
            post.step("a", text=text)
            await turns()
        assert pipe.written == [], "nothing piles up behind a client that does not read"
        pipe.drain()
        await turns()
        post.step("a", text="f")
        post.step("a", text="g")
        await turns()
        assert pipe.written == [b"(0:abcde)", b"(0:f)(0:g)"]
        pipe.is_full = True
        post.step("a", text="h")
        post.step("a", text="i", finished=True)
        await turns()
        pipe.drain()
        await exchange.task
        assert exchange.sent == [b"(0:hi)data: [DONE]\n\n"]

    run(body)


@pytest.mark.parametrize("by_pipe", [True, False])
def test_a_failure_in_the_middle_is_told_after_what_came_before(by_pipe: bool) -> None:
    async def body() -> None:
        post = Post()
        exchange = Exchange(EventSource([post.stream("a"), post.stream("b")], texts), FakePipe() if by_pipe else None)
        await turns()
        post.step("a", text="before")
        post.room.fail([post.room.mailboxes["b"]], EngineFaultError("the engine is gone"))
        await exchange.task
        [*_, last] = exchange.sent
        events = last.decode().split("\n\n")
        assert events[0].startswith("(0:before)data: ")
        assert json.loads(events[0].removeprefix("(0:before)data: "))["error"]["code"] == "engine_fault"
        assert events[1:] == ["data: [DONE]", ""]

    run(body)


@pytest.mark.parametrize("by_pipe", [True, False])
def test_a_mistake_of_ours_in_a_stream_is_in_the_log(by_pipe: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The client is told that the log says more, and it said nothing."""

    def wrong(_index: int, _came: RequestOutput) -> bytes:
        raise KeyError("of the machine")

    async def body() -> None:
        post = Post()
        exchange = Exchange(EventSource([post.stream("a")], wrong), FakePipe() if by_pipe else None)
        post.step("a")
        await exchange.task
        assert (
            json.loads(exchange.sent[-1].split(b"\n\n")[0].removeprefix(b"data: "))["error"]["code"] == "internal_error"
        )
        assert exchange.released

    run(body)
    [record] = caplog.records
    assert record.exc_info is not None
    assert "of the machine" in str(record.exc_info[1])


def test_what_breaks_while_a_stream_is_written_is_not_swallowed() -> None:
    async def body() -> None:
        post, pipe = Post(), FakePipe()
        exchange = Exchange(EventSource([post.stream("a")], texts), pipe)
        await turns()
        pipe.write = None  # type: ignore[method-assign, assignment]
        post.step("a")
        pipe.is_full = True
        post.step("a")
        await turns()
        pipe.drain()
        with pytest.raises(TypeError):
            await exchange.task
        assert exchange.released

    run(body)


@pytest.mark.parametrize("by_pipe", [True, False])
def test_time_that_is_over_and_clients_that_leave_end_it(by_pipe: bool) -> None:
    async def body() -> None:
        post, pipe = Post(), FakePipe()
        late = Exchange(EventSource([post.stream("a")], texts), pipe if by_pipe else None, seconds=0.01)
        await late.task
        assert b"request_timeout" in late.sent[-1]
        left = Exchange(EventSource([post.stream("b")], texts), pipe if by_pipe else None)
        await turns()
        left.clients_patience.set()
        await left.task
        post.step("a", "b")  # the connection may have been given to another request by now
        await turns()
        assert [pipe.written, left.sent] == [[], []]
        assert [late.released, left.released] == [True, True]

    run(body)


def test_by_asgi_alone_tokens_come_one_by_one_unless_a_write_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        post = Post()
        exchange = Exchange(EventSource([post.stream("a")], texts), None)
        await turns()
        post.step("a", text="1")
        post.step("a", text="2")
        await turns()
        exchange.holds_up = asyncio.Event()
        post.step("a", text="3")
        await turns()
        monkeypatch.setattr("ramify.server.connection._SLOW_SECONDS", -1.0)
        post.step("a", text="4")
        post.step("a", text="5")
        exchange.holds_up.set()
        await turns()
        post.step("a", text="6", finished=True)
        await exchange.task
        assert exchange.sent == [b"(0:1)(0:2)", b"(0:3)", b"(0:45)", b"(0:6)data: [DONE]\n\n"]

    run(body)


@pytest.mark.parametrize(("version", "wanted"), [("1.1", b"b\r\ndata: {}\n\n\n\r\n"), ("1.0", b"data: {}\n\n\n")])
def test_a_pipe_writes_as_the_clients_version_has_it(version: str, wanted: bytes) -> None:
    class Transport:
        written = b""
        is_gone = False

        def write(self, data: bytes) -> None:
            self.written += data

        def is_closing(self) -> bool:
            return self.is_gone

    transport = Transport()
    pipe = SocketPipe(transport, None, version)  # type: ignore[arg-type]
    pipe.write(b"data: {}\n\n\n")
    transport.is_gone = True
    pipe.write(b"too late")
    assert transport.written == wanted
