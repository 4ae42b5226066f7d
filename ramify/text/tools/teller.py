"""Teller: what a parser finds in a text, as events. It knows what a call is, and no format's tags."""

from __future__ import annotations

from collections.abc import Collection

from ramify.text.tools.call_object import CallObject
from ramify.text.tools.events import ArgumentsGrown, CallClosed, CallOpened, Content, Event
from ramify.text.tools.json_value import BrokenJsonError


class Teller:
    """White space around a call belongs to it and is told to nobody; text that turns out to be no call is told whole.

    With `most_calls`, further calls are left out.
    """

    def __init__(self, *, known: Collection[str] | None = None, most_calls: int | None = None) -> None:
        self._known = known
        self._most_calls = most_calls
        self._events: list[Event] = []
        self._space: list[str] = []  # at the end of the content so far
        self._has_content = False
        self._num_opened = 0
        self._num_closed = 0
        self._attempt: list[str] = []  # all that was read of what may become a call
        self._call = CallObject()
        self._index: int | None = None  # of that call, once it has been opened

    def content(self, text: str) -> None:
        said = text.rstrip()
        if said:
            whole = "".join(self._space) + said
            self._events.append(Content(whole if self._has_content or not self._num_closed else whole.lstrip()))
            self._has_content, self._space = True, []
        self._space.append(text[len(said) :])

    def drop_space(self) -> None:
        """What stood there belonged to a call."""
        self._space = []

    def attempt(self, opening: str) -> None:
        """A call may begin here, after the text that announces it."""
        self._attempt = [opening]
        self._call = CallObject(self._known)
        self._index = None

    def announce(self, text: str) -> None:
        """More of what stands before the call's object."""
        self._attempt.append(text)

    def read(self, text: str, begin: int) -> tuple[int, bool | None]:
        """Reads the call's object on. Where it stopped, and whether it is whole; None: it goes on."""
        try:
            end = self._call.feed(text, begin)
        except BrokenJsonError as error:
            self._attempt.append(text[begin : error.position])
            self.abandon()
            return error.position, False
        self._attempt.append(text[begin:end])
        self._tell_call(is_whole=end is not None)
        return (len(text), None) if end is None else (end, True)

    def abandon(self) -> None:
        """It was no call: its text is content."""
        text, self._attempt = "".join(self._attempt), []
        self.content(text)

    def end(self) -> None:
        space = "".join(self._space)
        if space and not self._num_closed:
            self._events.append(Content(space))
        self._space = []

    def take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _tell_call(self, *, is_whole: bool) -> None:
        call = self._call
        is_wanted = self._most_calls is None or self._num_closed < self._most_calls
        if is_wanted and call.name is not None and (call.has_arguments or is_whole):
            if self._index is None:
                self._index = self._num_opened
                self._num_opened += 1
                self._events.append(CallOpened(self._index, call.name))
            piece = call.take_arguments()
            if piece:
                self._events.append(ArgumentsGrown(self._index, piece))
            if is_whole:
                self._events.append(CallClosed(self._index))
                self._num_closed += 1
        if is_whole:
            self._space, self._attempt = [], []
