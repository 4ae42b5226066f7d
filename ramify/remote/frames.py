"""Frames: messages on a stream socket, each after its length; one that is too long is refused before it is read."""

from __future__ import annotations

import socket
import struct

from ramify.errors import ProtocolError

LENGTH = struct.Struct("<I")
LARGEST = 2**28  # bytes of one frame: some 60 million token ids


def frame_of(content: bytes) -> bytes:
    """The bytes of a frame. A message that is too large must be refused where it is made."""
    if len(content) > LARGEST:
        raise ProtocolError(f"a message of {len(content)} bytes is too large: {LARGEST} are allowed")
    return LENGTH.pack(len(content)) + content


class FrameReader:
    """Reads all that has come in one go. A thread that shares its interpreter with a busy one waits for its turn after
    every call into the system, so that reading frame by frame would be slow exactly when many come."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._buffer = bytearray()

    def read(self) -> list[bytes] | None:
        """The contents of the frames that are there, at least one; None if the other end is gone."""
        while not (frames := self._whole()):
            try:
                piece = self._source.recv(2**18)
            except OSError:
                return None
            if not piece:
                return None
            self._buffer += piece
        return frames

    def _whole(self) -> list[bytes]:
        frames, start = [], 0
        while len(self._buffer) - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + _checked(LENGTH.unpack_from(self._buffer, start)[0])
            if end > len(self._buffer):
                break
            frames.append(bytes(self._buffer[begin:end]))
            start = end
        del self._buffer[:start]
        return frames


def read_frame(source: socket.socket) -> bytes | None:
    """The next frame's content, and nothing beyond it; None if the other end is gone, in whatever way it went."""
    head = _read(source, LENGTH.size)
    return None if head is None else _read(source, _checked(LENGTH.unpack(head)[0]))


def _checked(length: int) -> int:
    if length > LARGEST:
        raise ProtocolError(f"a message of {length} bytes is too large: {LARGEST} are allowed")
    return length


def _read(source: socket.socket, count: int) -> bytes | None:
    """So many bytes. Room is made as they come, so that a length alone costs nothing."""
    pieces = bytearray()
    while len(pieces) < count:
        try:
            piece = source.recv(min(count - len(pieces), 2**20))
        except OSError:
            return None
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)
