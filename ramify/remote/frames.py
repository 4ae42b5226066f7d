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


def read_frame(source: socket.socket) -> bytes | None:
    """The next frame's content; None if the other end is gone, in whatever way it went."""
    head = _read(source, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > LARGEST:
        raise ProtocolError(f"a message of {length} bytes is too large: {LARGEST} are allowed")
    return _read(source, length)


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
