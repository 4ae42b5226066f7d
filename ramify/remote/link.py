"""Link: a front's end of its connection to the engine's process.

    any thread: send(message) -- queue --> writer thread -- one frame for all that waits --> engine's process
    receivers, one per model <-- reader thread <-- one frame a step <-- engine's process

The reader notices the end of the engine's process at once, whatever ended it: the socket ends with it.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Protocol

import msgspec

from ramify.engine.observations import EngineState
from ramify.errors import EngineLostError, InvalidInputError, ProtocolError
from ramify.remote.engine_process import EngineProcess
from ramify.remote.frames import LARGEST, FrameReader, frame_of, read_frame
from ramify.remote.messages import (
    Answer,
    Ask,
    Facts,
    Failed,
    Leave,
    LoadWeights,
    Message,
    NotLoaded,
    Ready,
    Refused,
    ResetPrefixCache,
    Said,
    Soundness,
    ToFront,
    Told,
    encode,
    encoded,
    for_front,
)
from ramify.remote.packing import error_of

_SECONDS_TO_ANSWER = 60.0  # the engine's process answers in the middle of a step; it may be loading kernels
_SECONDS_TO_LEAVE = 30.0
LARGEST_MESSAGE = LARGEST // 3  # so that two, and what surrounds them, fit in a frame


class Receiver(Protocol):
    """What one model's part of the messages is handed to, in the reader's thread."""

    def receive(self, message: Told | Failed | Soundness) -> None: ...

    def lose(self, error: EngineLostError) -> None: ...


class Link:
    """`process` is the engine's process where this one started it; a link ends it when it is closed."""

    def __init__(self, end: socket.socket, process: EngineProcess | None = None) -> None:
        self._socket = end
        self.process = process
        self.error: EngineLostError | None = None  # set once the engine's process is gone
        self._receivers: list[Receiver] = []
        self._outbox: queue.SimpleQueue[msgspec.Raw | None] = queue.SimpleQueue()
        self._tickets = count()
        self._answers: dict[int, queue.SimpleQueue[EngineState | Exception | None]] = {}
        self._lock = threading.Lock()
        self._is_leaving = False
        self._listeners: list[Callable[[EngineLostError], None]] = []
        self._reader = threading.Thread(target=self._read, name="ramify-link-in", daemon=True)
        self._writer = threading.Thread(target=self._write, name="ramify-link-out", daemon=True)

    def wait_ready(self, say: Callable[[str], None]) -> list[Facts]:
        """Waits until the models are loaded; what loading raised there is raised here. Call it once, first."""
        while (content := read_frame(self._socket)) is not None:
            for message in for_front(content):
                match message:
                    case Ready():
                        return message.models
                    case NotLoaded():
                        raise error_of(message.kind, message.text)
                    case Said(logger=None):
                        say(message.text)
                    case Said():
                        _log_said(message)
                    case _:
                        raise ProtocolError(f"{type(message).__name__} came before Ready")
        raise EngineLostError(self._how_it_ended())

    def start(self, receivers: list[Receiver]) -> None:
        self._receivers = receivers
        self._reader.start()
        self._writer.start()

    def when_lost(self, listener: Callable[[EngineLostError], None]) -> None:
        """Calls it, in the reader's thread, if the engine's process ends before it is asked to."""
        self._listeners.append(listener)

    @property
    def is_reader(self) -> bool:
        """Whether the calling thread is the one that reads: it must not wait for answers."""
        return threading.current_thread() is self._reader

    def send(self, message: Message) -> None:
        """Takes no lock, since Python may call it from a destructor at any moment. Refuses what is too large."""
        content = encoded(message)
        if len(content) > LARGEST_MESSAGE:
            raise InvalidInputError(f"prompt is too large to be sent to the engine: {len(content)} bytes")
        self._outbox.put(content)

    def ask(self, model: int) -> EngineState:
        """The engine's state, as it is now. Raises EngineLostError where nobody answers."""
        return self._asked(lambda ticket: Ask(model, ticket))

    def reset_prefix_cache(self, model: int) -> None:
        """Returns when it is done, after the engine's present step."""
        self._asked(lambda ticket: ResetPrefixCache(model, ticket))

    def load_weights(self, model: int, folder: str) -> None:
        """From files as `remote.stored_weights` writes them; returns when it is done, raises what it raised there."""
        self._asked(lambda ticket: LoadWeights(model, ticket, folder), seconds=None)

    def _asked(self, question: Callable[[int], Message], seconds: float | None = _SECONDS_TO_ANSWER) -> EngineState:
        ticket = next(self._tickets)
        answer = self._answers[ticket] = queue.SimpleQueue()
        try:
            if self.error is not None:
                raise self.error
            self.send(question(ticket))
            try:
                state = answer.get(timeout=seconds)
            except queue.Empty:
                raise EngineLostError("the engine's process does not answer") from None
            if state is None:
                raise self.error or EngineLostError("the engine's process is gone")
            if isinstance(state, Exception):
                raise state
            return state
        finally:
            self._answers.pop(ticket, None)

    def close(self) -> None:
        """Has the engine abort what is left, receives the outputs of that, and ends the process if it is ours."""
        with self._lock:
            is_first, self._is_leaving = not self._is_leaving, True
        if is_first and self._reader.is_alive():
            self.send(Leave())
            if not self.is_reader:
                self._reader.join(_SECONDS_TO_LEAVE)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)
        if self.process is not None:
            self.process.stop()

    # -- threads -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """All that waits goes in one frame, unless that is too large."""
        while True:
            waiting = [self._outbox.get()]
            size = len(waiting[0] or b"")
            with suppress(queue.Empty):
                while size < LARGEST_MESSAGE:
                    waiting.append(self._outbox.get_nowait())
                    size += len(waiting[-1] or b"")
            messages = [message for message in waiting if message is not None]
            try:
                if messages:
                    self._socket.sendall(frame_of(encode(messages)))
            except OSError:
                return  # the reader notices, and tells
            if len(messages) < len(waiting):
                return

    def _read(self) -> None:
        how = None
        try:
            frames = FrameReader(self._socket)
            while (contents := frames.read()) is not None:
                for content in contents:
                    for message in for_front(content):
                        self._receive(message)
        except ProtocolError as error:
            how = str(error)
        finally:
            self._lose(how)

    def _receive(self, message: ToFront) -> None:
        match message:
            case Told() | Failed() | Soundness():
                if not 0 <= message.model < len(self._receivers):
                    raise ProtocolError(f"there is no model {message.model}")
                self._receivers[message.model].receive(message)
            case Answer():
                waiting = self._answers.get(message.ticket)
                if waiting is not None:
                    waiting.put(message.state)
            case Refused():
                waiting = self._answers.get(message.ticket)
                if waiting is not None:
                    waiting.put(error_of(message.kind, message.text))
            case Said():
                _log_said(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} came a second time")

    def _lose(self, how: str | None) -> None:
        """The connection is over: nobody may wait any more."""
        was_asked = self._is_leaving
        self.error = EngineLostError("the engine has been shut down" if was_asked else how or self._how_it_ended())
        for receiver in self._receivers:
            receiver.lose(self.error)
        for waiting in list(self._answers.values()):
            waiting.put(None)
        self._outbox.put(None)
        if not was_asked:
            for listener in self._listeners:
                listener(self.error)

    def _how_it_ended(self) -> str:
        return self.process.end() if self.process is not None else "the engine's process has ended"


def _log_said(said: Said) -> None:
    logging.getLogger(said.logger).log(said.level, "%s", said.text)
