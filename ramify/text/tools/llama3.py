"""Calls as Llama 3 writes them: `{"name": "f", "parameters": {...}}`, perhaps after `<|python_tag|>`, parted by `;`."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from ramify.text.tools.events import Event
from ramify.text.tools.teller import Teller

TAG = "<|python_tag|>"


class _Where(Enum):
    TEXT = auto()
    TAGGED = auto()
    CALL = auto()
    AFTER_CALL = auto()


class Llama3Parser:
    """A call opens a line, or follows the tag or another call, and its name is `known`: no tag says for sure.

    Other JSON is an answer like any other, and is told as one.
    """

    def __init__(self, known: Collection[str], *, most_calls: int | None = None) -> None:
        self._teller = Teller(known=frozenset(known), most_calls=most_calls)
        self._where = _Where.TEXT
        self._opens_line = True
        self._held = ""  # may be the beginning of the tag

    def feed(self, text: str) -> list[Event]:
        text, at, self._held = self._held + text, 0, ""
        while at < len(text):
            match self._where:
                case _Where.TEXT:
                    at = self._read_text(text, at)
                case _Where.TAGGED:
                    at = self._read_tagged(text, at)
                case _Where.CALL:
                    at, is_whole = self._teller.read(text, at)
                    if is_whole is not None:
                        self._where = _Where.AFTER_CALL if is_whole else _Where.TEXT
                        self._opens_line = False
                case _Where.AFTER_CALL:
                    at = self._read_between(text, at)
        return self._teller.take()

    def finish(self) -> list[Event]:
        if self._where in (_Where.CALL, _Where.TAGGED):
            self._teller.abandon()
        elif self._where is _Where.TEXT:
            self._teller.content(self._held)
        self._teller.end()
        return self._teller.take()

    def _read_text(self, text: str, begin: int) -> int:
        for at in range(begin, len(text)):
            character = text[at]
            if character == "{" and self._opens_line:
                self._teller.content(text[begin:at])
                self._teller.attempt("")
                self._where = _Where.CALL
                return at
            if character == "<" and text.startswith(TAG, at):
                self._teller.content(text[begin:at])
                self._teller.attempt(TAG)
                self._where = _Where.TAGGED
                return at + len(TAG)
            if character == "<" and TAG.startswith(text[at:]):
                self._teller.content(text[begin:at])
                self._held = text[at:]
                return len(text)
            if character == "\n":
                self._opens_line = True
            elif not character.isspace():
                self._opens_line = False
        self._teller.content(text[begin:])
        return len(text)

    def _read_tagged(self, text: str, at: int) -> int:
        rest = text[at:].lstrip()
        call = len(text) - len(rest)
        self._teller.announce(text[at:call])
        if rest.startswith("{"):
            self._where = _Where.CALL
        elif rest:
            self._teller.abandon()
            self._where, self._opens_line = _Where.TEXT, False
        return call

    def _read_between(self, text: str, at: int) -> int:
        rest = text[at:].lstrip()
        self._teller.content(text[at : len(text) - len(rest)])
        if rest:
            self._where, self._opens_line = _Where.TEXT, True
        if not rest.startswith(";"):
            return len(text) - len(rest)
        self._teller.drop_space()
        return len(text) - len(rest) + 1
