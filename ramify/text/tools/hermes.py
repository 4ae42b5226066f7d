"""Calls as Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once or more."""

from __future__ import annotations

from enum import Enum, auto

from ramify.text.tools.events import Event
from ramify.text.tools.teller import Teller

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


class _Where(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class HermesParser:
    """A call is whole with its object; a closing tag that is missing changes nothing. Any name may be called."""

    def __init__(self, *, most_calls: int | None = None) -> None:
        self._teller = Teller(most_calls=most_calls)
        self._where = _Where.TEXT
        self._held = ""  # may be the beginning of a tag

    def feed(self, text: str) -> list[Event]:
        text, at, self._held = self._held + text, 0, ""
        while at < len(text):
            match self._where:
                case _Where.TEXT:
                    at = self._read_text(text, at)
                case _Where.CALL:
                    at, is_whole = self._teller.read(text, at)
                    if is_whole is not None:
                        self._where = _Where.AFTER_CALL if is_whole else _Where.TEXT
                case _Where.AFTER_CALL:
                    at = self._read_closing(text, at)
        return self._teller.take()

    def finish(self) -> list[Event]:
        if self._where is _Where.CALL:
            self._teller.abandon()
        elif self._where is _Where.TEXT:
            self._teller.content(self._held)
        self._teller.end()
        return self._teller.take()

    def _read_text(self, text: str, at: int) -> int:
        tag = text.find(OPENING, at)
        if tag < 0:
            tag = len(text) - length_held(text, at, OPENING)
            self._held = text[tag:]
            self._teller.content(text[at:tag])
            return len(text)
        self._teller.content(text[at:tag])
        self._teller.attempt(OPENING)
        self._where = _Where.CALL
        return tag + len(OPENING)

    def _read_closing(self, text: str, at: int) -> int:
        rest = text[at:].lstrip()
        self._teller.content(text[at : len(text) - len(rest)])
        if len(rest) < len(CLOSING) and CLOSING.startswith(rest):
            self._held = rest
            return len(text)
        self._where = _Where.TEXT
        if not rest.startswith(CLOSING):
            return len(text) - len(rest)
        self._teller.drop_space()
        return len(text) - len(rest) + len(CLOSING)


def length_held(text: str, begin: int, tag: str) -> int:
    """How many characters at the end of `text[begin:]` may be the beginning of a tag that is not yet whole."""
    longest = min(len(tag) - 1, len(text) - begin)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
