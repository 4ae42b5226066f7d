"""StringPosition: whether a text of JSON stands inside a string, and what that string has so far."""

from __future__ import annotations

OUTSIDE, INSIDE, ESCAPED = range(3)
HEXADECIMAL = 4  # digits of an escape that are still to come stand for themselves, behind these
_QUOTE, _BACKSLASH, _U = b'"\\u'


class StringPosition:
    __slots__ = ("_place", "content", "num_characters")

    def __init__(self) -> None:
        self._place = OUTSIDE
        self.content = b""
        self.num_characters = 0

    def copy(self) -> StringPosition:
        other = StringPosition()
        other._place, other.content, other.num_characters = self._place, self.content, self.num_characters
        return other

    @property
    def is_inside(self) -> bool:
        """And not in the middle of an escape."""
        return self._place == INSIDE

    def take(self, spelled: bytes, num_plain: int) -> None:
        """num_plain: how many characters that is, if all of them are plain."""
        if num_plain and self._place == INSIDE:
            self.content += spelled
            self.num_characters += num_plain
        elif self._place != OUTSIDE or _QUOTE in spelled:
            for byte in spelled:
                self._take(byte)

    def _take(self, byte: int) -> None:
        if self._place == OUTSIDE:
            if byte == _QUOTE:
                self._place, self.content, self.num_characters = INSIDE, b"", 0
            return
        if self._place == INSIDE and byte == _QUOTE:
            self._place, self.content = OUTSIDE, b""
            return
        self.content += bytes([byte])
        if self._place == INSIDE:
            self.num_characters += byte & 0xC0 != 0x80
            self._place = ESCAPED if byte == _BACKSLASH else INSIDE
        elif self._place == ESCAPED:
            self._place = HEXADECIMAL + 3 if byte == _U else INSIDE
        else:
            self._place = INSIDE if self._place == HEXADECIMAL else self._place - 1
