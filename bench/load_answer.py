"""What came of one request: when its tokens came, how many they were, and what went wrong."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from bench.load_http import EventReader

MAX_DETAIL = 300  # characters kept of what a server said


class Record(msgspec.Struct, kw_only=True):
    """One request, as the report needs it. Times are seconds on the client's own clock."""

    number: int
    began: float  # when it was due: what a client of a fixed rate waits for begins there
    ended: float = 0.0
    late: float = 0.0  # how long after that it was sent
    first: float | None = None  # when the first token came; None where answers are not streamed
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # None: nothing tells
    from_usage: bool = False  # the server counted them; else they are events
    events: int = 0
    seconds_per_token: float | None = None  # after the first, a choice's own
    gaps: bytes = b""  # seconds between events of one choice, float32
    error: str | None = None  # its kind
    detail: str = ""  # what was said of it


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class Answer:
    """Reads one answer as it comes, and fills its record."""

    def __init__(self, record: Record, n: int) -> None:
        self.record = record
        self._n = n
        self._events: EventReader | None = None
        self._body: list[bytes] = []
        self._seen: dict[int, tuple[float, float]] = {}  # by choice: when its first and its last event came
        self._gaps = array("f")
        self._status = 0
        self._ended_well = False  # a stream says so itself

    def begin(self, status: int, content_type: str) -> None:
        self._status = status
        if status == 200 and content_type.startswith("text/event-stream"):
            self._events = EventReader()

    def feed(self, piece: bytes, now: float) -> None:
        if self._events is None:
            self._body.append(piece)
            return
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self._ended_well = True
            else:
                self._take(data, now)

    def finish(self, now: float) -> None:
        """The whole answer is there."""
        record = self.record
        record.ended = now
        if record.error is None:
            if self._status != 200:
                body = b"".join(self._body)
                self.fail(f"HTTP {self._status}", said(body), now)
            elif self._events is None:
                self._take(b"".join(self._body), now)
                record.first, record.events = None, 0
                self._seen.clear()
                self._gaps = array("f")
            elif not self._ended_well:
                self.fail("cut off", "the stream ended without [DONE]", now)
            elif not self._seen:
                self.fail("empty answer", "the stream held no tokens", now)
        self._count()

    def fail(self, kind: str, detail: str, now: float) -> None:
        """The first failure counts: what follows is mostly its consequence."""
        record = self.record
        if record.error is None:
            record.ended, record.error, record.detail = now, kind, detail[:MAX_DETAIL]

    def _take(self, data: bytes, now: float) -> None:
        record = self.record
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            self.fail("malformed answer", f"{error}: {data[:80]!r}", now)
            return
        if event.error is not None:
            self.fail("error in the answer", said(data), now)
        if event.usage is not None:  # some servers send a running count with every event: the last one stays
            record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            record.from_usage = True
        for choice in event.choices or ():
            delta = choice.delta
            # A chat's first event only names the role, its last may only say why it ended.
            if delta is not None and not (delta.content or delta.reasoning_content or delta.reasoning):
                continue
            record.events += 1
            if record.first is None:
                record.first = now
            seen = self._seen.get(choice.index)
            if seen is None:
                self._seen[choice.index] = now, now
            else:
                self._gaps.append(now - seen[1])
                self._seen[choice.index] = seen[0], now

    def _count(self) -> None:
        record = self.record
        record.gaps = self._gaps.tobytes()
        if record.output_tokens is None and self._events is not None:
            record.output_tokens = record.events
        steps = (record.output_tokens or 0) / self._n - 1  # after the first token of each choice
        if self._gaps and steps > 0:  # a stream in one event tells nothing of the time between its tokens
            spans = [last - first for first, last in self._seen.values()]
            record.seconds_per_token = sum(spans) / len(spans) / steps


def said(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or in others' shapes, or what there is."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:MAX_DETAIL]
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return (value if isinstance(value, str) else msgspec.json.encode(value).decode())[:MAX_DETAIL]
