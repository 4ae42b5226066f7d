"""CallObject: a call as models write it, `{"name": "f", "arguments": {...}}`, read while it arrives."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from ramify.text.tools.json_value import BrokenJsonError, JsonValue

# Names that models use for the parts of a call, and what a part's value may begin with.
PARTS = {"name": "name", "function": "name", "arguments": "arguments", "parameters": "arguments", "type": "type"}
_BEGINNINGS = {"name": '"', "arguments": "{n", "type": '"'}
_SPACE = " \t\r\n"


class _Due(Enum):
    BRACE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallObject:
    """`feed` raises BrokenJsonError at the first character that makes it something else than a call.

    The name may come before the arguments or after them, and these may be left out or null: `{}` then. With `known`, a
    name must be one of those.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self.name: str | None = None
        self.has_arguments = False  # whether some of them can be told
        self._known = known
        self._due = _Due.BRACE
        self._part: str | None = None  # whose value is being read; None: of a key
        self._seen: set[str] = set()
        self._value: JsonValue | None = None
        self._is_told = False  # whether the value is the arguments' object
        self._new: list[str] = []  # of that, not taken yet
        self._raw: list[str] = []  # of any other value

    def feed(self, text: str, begin: int = 0) -> int | None:
        """Where the object ends in the text, read from `begin` on; None: it goes on."""
        at = begin
        while at < len(text):
            if self._value is not None:
                end = self._value.feed(text, at)
                piece = text[at:end]
                (self._new if self._is_told else self._raw).append(piece)
                if end is None:
                    return None
                at = end
                self._take_value(at)
            elif text[at] in _SPACE:
                at += 1
            elif self._due in (_Due.FIRST_KEY, _Due.KEY, _Due.VALUE) and self._may_begin(text[at]):
                self._value = JsonValue()
                self._is_told = self._part == "arguments" and text[at] == "{"
                self.has_arguments |= self._is_told
            elif self._take_mark(text[at], at):
                return at + 1
            else:
                at += 1
        return None

    def take_arguments(self) -> str:
        """What came of the arguments since the last time, exactly as it was written."""
        taken, self._new = "".join(self._new), []
        return taken

    def _may_begin(self, character: str) -> bool:
        return character in (_BEGINNINGS[self._part] if self._part is not None else '"')

    def _take_mark(self, character: str, at: int) -> bool:
        """A brace, colon or comma; whether it ends the object."""
        if character == "{" and self._due is _Due.BRACE:
            self._due = _Due.FIRST_KEY
        elif character == ":" and self._due is _Due.COLON:
            self._due = _Due.VALUE
        elif character == "," and self._due is _Due.COMMA:
            self._due = _Due.KEY
        elif character == "}" and self._due is _Due.COMMA and self.name is not None:
            if not self.has_arguments:
                self._new = ["{}"]
            return True
        else:
            raise BrokenJsonError(at)
        return False

    def _take_value(self, end: int) -> None:
        """A key, or a part's value, has been read up to `end`."""
        self._value = None
        raw, self._raw = "".join(self._raw), []
        if self._due is not _Due.VALUE:
            self._part = PARTS.get(json.loads(raw))
            if self._part is None or self._part in self._seen:
                raise BrokenJsonError(end)
            self._seen.add(self._part)
            self._due = _Due.COLON
            return
        if self._part == "name":
            self.name = json.loads(raw)
            if not self.name or (self._known is not None and self.name not in self._known):
                raise BrokenJsonError(end)
        elif self._part == "type" and json.loads(raw) != "function":
            raise BrokenJsonError(end)
        self._part, self._due = None, _Due.COMMA
