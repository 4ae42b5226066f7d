"""Server-sent events: values as bytes, and EventSource: what the streams of one response bring, as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ramify.drive.mailroom import RequestStream
from ramify.outputs import RequestOutput

DONE = b"data: [DONE]\n\n"


def event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventSource:
    """The events of one response. Everything that one step of the engine brought comes out together.

    `tell` makes the events of one output of the stream with that index, and raises if it shows that the request failed;
    `first` and `last` are the events before and after all others. Whatever goes wrong ends the source and is its
    `failure`; what came before it is told.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        tell: Callable[[int, RequestOutput], bytes],
        *,
        first: bytes = b"",
        last: Callable[[], bytes] = bytes,
    ) -> None:
        self.failure: Exception | None = None
        self.is_over = False
        self._streams = streams
        self._tell = tell
        self._first = first
        self._last = last
        self._due = dict.fromkeys(range(len(streams)))  # streams that may have brought something
        self._num_open = len(streams)
        self._listener: Callable[[], None] | None = None
        self._is_called = False

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls it in the event loop whenever there may be news."""
        self._listener = listener
        if len(self._streams) == 1:
            self._streams[0].listen(listener)
            return
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._came, index))

    def hush(self) -> None:
        """Nobody is called any more."""
        self._listener = None
        for stream in self._streams:
            stream.listen(None)

    def news(self, *, joined: bool = False) -> bytes:
        """The events of what came since the last time; `joined`: a sample's tokens in one event."""
        if self.is_over:
            return b""
        pieces, self._first = [self._first], b""
        due = self._due
        if len(self._streams) > 1:
            self._due = {}
        try:
            for index in due:
                stream = self._streams[index]
                if stream.is_over:
                    continue
                for output in stream.take(joined=joined):
                    pieces.append(self._tell(index, output))
                self._num_open -= stream.is_over
            if not self._num_open:
                self.is_over = True
                pieces.append(self._last())
        except Exception as error:  # told to the client by whoever writes the events
            self.failure, self.is_over = error, True
        return b"".join(pieces)

    def _came(self, index: int) -> None:
        """Of several streams: the others of this step come in the same turn of the event loop."""
        self._due[index] = None
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._is_called = False
        if self._listener is not None:
            self._listener()
