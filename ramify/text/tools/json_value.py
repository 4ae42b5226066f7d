"""JsonValue: one JSON value, checked character by character while it arrives."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
_MAX_WORD = 400  # characters of a number; Python's own parser takes no more than 4,300 digits
_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_WORD_CHARACTERS = frozenset("0123456789+-.eEtrufalsn")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class BrokenJsonError(Exception):
    """The character at `position` of the text that was fed cannot stand there."""

    def __init__(self, position: int) -> None:
        super().__init__(f"no JSON at {position}")
        self.position = position


class _Due(Enum):
    """What comes next, after white space where that may stand."""

    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    COMMA = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()


class JsonValue:
    """Reads exactly what JSON's grammar allows, with a bound on nesting; white space may come first."""

    def __init__(self) -> None:
        self._due = _Due.VALUE
        self._closers: list[str] = []  # of the lists and objects that are open
        self._in_key = False
        self._word: list[str] = []
        self._num_hex = 0

    def feed(self, text: str, begin: int = 0) -> int | None:
        """Where the value ends in the text, read from `begin` on; None: it goes on. A word ends before what follows."""
        at = begin
        while at < len(text):
            character = text[at]
            match self._due:
                case _Due.STRING:
                    at = _end_of_plain(text, at)
                    if at == len(text):
                        return None
                    if text[at] == "\\":
                        self._due = _Due.ESCAPE
                    elif text[at] == '"':
                        if self._in_key:
                            self._in_key, self._due = False, _Due.COLON
                        elif self._is_over():
                            return at + 1
                    else:
                        raise BrokenJsonError(at)
                case _Due.ESCAPE:
                    if character == "u":
                        self._due, self._num_hex = _Due.HEX, 0
                    elif character in _ESCAPES:
                        self._due = _Due.STRING
                    else:
                        raise BrokenJsonError(at)
                case _Due.HEX:
                    if character not in _HEX:
                        raise BrokenJsonError(at)
                    self._num_hex += 1
                    if self._num_hex == 4:
                        self._due = _Due.STRING
                case _Due.WORD if character in _WORD_CHARACTERS and len(self._word) < _MAX_WORD:
                    self._word.append(character)
                case _Due.WORD:
                    if not _WORD.fullmatch("".join(self._word)):
                        raise BrokenJsonError(at)
                    if self._is_over():
                        return at
                    continue  # the character itself is what comes after the word
                case _ if character in _SPACE:
                    pass
                case _:
                    if self._structure(character, at):
                        return at + 1
            at += 1
        return None

    def _structure(self, character: str, at: int) -> bool:
        """One character outside of strings and words; whether the whole value ends with it."""
        due = self._due
        if due is _Due.COLON and character == ":":
            self._due = _Due.VALUE
        elif due is _Due.COMMA and character == ",":
            self._due = _Due.KEY if self._closers[-1] == "}" else _Due.VALUE
        elif due in (_Due.COMMA, _Due.FIRST_ITEM, _Due.FIRST_KEY) and character == self._closers[-1]:
            self._closers.pop()
            return self._is_over()
        elif due in (_Due.FIRST_KEY, _Due.KEY) and character == '"':
            self._in_key, self._due = True, _Due.STRING
        elif due in (_Due.VALUE, _Due.FIRST_ITEM):
            self._open(character, at)
        else:
            raise BrokenJsonError(at)
        return False

    def _open(self, character: str, at: int) -> None:
        if character == '"':
            self._due = _Due.STRING
        elif character in "{[":
            if len(self._closers) == MAX_DEPTH:
                raise BrokenJsonError(at)
            self._closers.append("}" if character == "{" else "]")
            self._due = _Due.FIRST_KEY if character == "{" else _Due.FIRST_ITEM
        elif character in _WORD_CHARACTERS:
            self._word, self._due = [character], _Due.WORD
        else:
            raise BrokenJsonError(at)

    def _is_over(self) -> bool:
        """After a value: whether it was the whole one."""
        self._due = _Due.COMMA
        return not self._closers


def _end_of_plain(text: str, at: int) -> int:
    run = _PLAIN.match(text, at)
    assert run is not None, "it may be empty"
    return run.end()
