"""What a load client must read of HTTP/1.1 and of server-sent events: bytes in, cut anywhere, and what they say out.

No sockets and no clocks here. A response is read as it comes, whether its body has a length, comes in chunks or ends
with the connection.
"""

from __future__ import annotations

MAX_HEAD = 64 * 2**10
MAX_SIZE_LINE = 2**10  # a chunk's size in hexadecimal, and extensions that nobody reads
CHUNKED, UNTIL_CLOSE = -1, -2  # how much of a body is left, where that is no number


class WireError(Exception):
    """The peer does not speak HTTP as it should."""


class EventReader:
    """Server-sent events: the data of each, as soon as the empty line that ends it has come."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_return = False  # a line ended with \r at the end of a piece: a \n that follows belongs to it

    def feed(self, piece: bytes) -> list[bytes]:
        if self._after_return and piece:
            self._after_return = False
            if piece.startswith(b"\n"):
                piece = piece[1:]
        if not piece:
            return []
        self._after_return = piece.endswith(b"\r")
        text = self._rest + piece
        lines = text.splitlines()  # of bytes: at \n, \r and \r\n and nowhere else
        self._rest = b"" if text.endswith((b"\n", b"\r")) else lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class ResponseReader:
    """One response: `feed` returns the pieces of its body; `status`, `headers` and `is_complete` tell the rest."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.stays_open = False  # whether the connection may carry another request afterwards
        self._buffer = b""
        self._left = 0
        self._in_head = True
        self._chunk_left = 0  # bytes of a chunk, with the line end after it
        self._in_trailers = False

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        while self._in_head:
            if not self._read_head():
                return []
        if self._left == CHUNKED:
            return self._read_chunks()
        taken, self._buffer = self._buffer, b""
        if self._left != UNTIL_CLOSE:
            if len(taken) > self._left:
                raise WireError("more came than the response's length")
            self._left -= len(taken)
            self.is_complete = self._left == 0
        return [taken] if taken else []

    def close(self) -> None:
        """The connection has ended: so has a body without a length, and every other response is incomplete."""
        if not self._in_head and self._left == UNTIL_CLOSE:
            self.is_complete = True

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > MAX_HEAD:
                raise WireError("a response's head is too long")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, status = first.partition(" ")
        if not protocol.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise WireError(f"no HTTP response: {first[:80]!r}")
        self._buffer = rest
        self.status = int(status[:3])
        if 100 <= self.status < 200:
            return True  # only a word in between: another head follows
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self._in_head = False
        self._left = self._body_length()
        connection = self.headers.get("connection", "").lower()
        closes = "close" in connection or (protocol == "HTTP/1.0" and "keep-alive" not in connection)
        self.stays_open = self._left != UNTIL_CLOSE and not closes
        self.is_complete = self._left == 0
        return True

    def _body_length(self) -> int:
        if self.status in {204, 304}:
            return 0
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return CHUNKED
        length = self.headers.get("content-length")
        if length is None:
            return UNTIL_CLOSE
        if not length.isdecimal():
            raise WireError(f"no length: {length[:80]!r}")
        return int(length)

    def _read_chunks(self) -> list[bytes]:
        pieces = []
        buffer, at = self._buffer, 0  # many chunks may come at once: the buffer is cut only at the end
        while not self.is_complete:
            if self._chunk_left:
                taken = buffer[at : at + self._chunk_left]
                if not taken:
                    break
                at += len(taken)
                kept = max(min(len(taken), self._chunk_left - 2), 0)
                self._chunk_left -= len(taken)
                if kept:
                    pieces.append(taken[:kept])
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > MAX_SIZE_LINE:
                    raise WireError("a chunk's size is too long")
                break
            line, at = buffer[at:end], end + 2
            if self._in_trailers:
                self.is_complete = not line
            else:
                size = _chunk_size(line)
                self._in_trailers = size == 0
                self._chunk_left = size + 2 if size else 0
        self._buffer = buffer[at:]
        return pieces


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits if digits.isalnum() else b"", 16)  # int() would take signs and underscores too
    except ValueError:
        raise WireError(f"no size of a chunk: {line[:80]!r}") from None
