"""Connection: the engine's end of a socket to one front process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ramify.errors import ProtocolError
from ramify.remote.frames import FrameReader, frame_of
from ramify.remote.messages import ToEngine, encode, for_engine

MOST_WAITING = 2**28  # bytes that a front has not read yet; it is dropped then, and its requests with it


class Connection:
    """Sends without waiting: what the system does not take at once, a thread writes that exists only meanwhile.

    `hear` is called with every message, in a thread of the connection; `leave` once when there will be no more.
    """

    def __init__(self, end: socket.socket, key: int) -> None:
        self.key = key
        self._socket = end
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._is_open = True

    def start(
        self, hear: Callable[[Connection, ToEngine], None], leave: Callable[[Connection], None]
    ) -> threading.Thread:
        thread = threading.Thread(target=self._read, args=(hear, leave), name=f"ramify-front-{self.key}", daemon=True)
        thread.start()
        return thread

    def send(self, messages: list[Any]) -> None:
        """From any thread; messages to a front that is gone are lost. Raises ProtocolError if they are too large."""
        frame = frame_of(encode(messages))
        with self._lock:
            if not self._is_open:
                return
            if self._waiting:
                self._waiting += frame
                if len(self._waiting) > MOST_WAITING:
                    self._close()
                return
            try:
                sent = self._socket.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._close()
                return
            if sent < len(frame):
                self._waiting += frame[sent:]
                threading.Thread(target=self._write_rest, name=f"ramify-late-{self.key}", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._is_open = False
        self._waiting = bytearray()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever reads or writes

    def _write_rest(self) -> None:
        while True:
            with self._lock:
                piece = bytes(self._waiting[: 2**20])
            if not piece:
                return
            try:
                sent = self._socket.send(piece)
            except OSError:
                self.close()
                return
            with self._lock:
                del self._waiting[:sent]
                if not self._waiting:
                    return

    def _read(self, hear: Callable[[Connection, ToEngine], None], leave: Callable[[Connection], None]) -> None:
        try:
            frames = FrameReader(self._socket)
            while (contents := frames.read()) is not None:
                for content in contents:
                    for message in for_engine(content):
                        hear(self, message)
        except ProtocolError:
            pass  # a front that does not keep to the protocol is gone, as one that has ended
        finally:
            leave(self)
            self.close()
