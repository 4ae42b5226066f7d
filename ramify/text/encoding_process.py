"""EncodingProcess: text to ids in a process of its own, which ends when a text takes too long or too much memory."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from ramify.errors import InvalidInputError
from ramify.text.encoding_child import LENGTH, read_frame

MEMORY_BYTES = 4 * 2**30
SECONDS = 5  # of the processor's time for a short text
BYTES_PER_SECOND = 200_000  # a long one gets a second more for each of these

_PROGRAM = Path(__file__).with_name("encoding_child.py")
_Process = subprocess.Popen[bytes]


class EncodingProcess:
    """Started with the first text, and again after one that it did not survive. Several threads may ask at once."""

    def __init__(self, tokenizer_json: str, *, seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._tokenizer = tokenizer_json.encode()
        self._arguments = [str(memory_bytes), str(seconds), str(BYTES_PER_SECOND)]
        self._seconds = seconds
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            try:
                process = self._process = self._process or self._start()
                reply = _ask(process, bytes([add_special_tokens]) + text.encode())
            except BaseException:  # also an interrupt: the reply to this text must not become that to the next
                self.close()
                raise
            if reply is None:
                raise InvalidInputError(f"text cannot be tokenized: {self._cause(process)}")
        if reply[0]:
            raise InvalidInputError(f"text cannot be tokenized: {reply[1:].decode(errors='replace')}")
        return list(struct.unpack(f"<{len(reply) // 4}I", reply[1:]))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _start(self) -> _Process:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        weakref.finalize(self, _end, process)
        _send(process, self._tokenizer)
        return process

    def _cause(self, process: _Process) -> str:
        self._process = None
        _end(process)
        if process.returncode == -signal.SIGPROF:
            return f"the model's tokenizer takes more than {self._seconds} seconds for it"
        return "the model's tokenizer takes too much memory for it, or fails at it"


def _send(process: _Process, content: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which reading will tell
        process.stdin.write(LENGTH.pack(len(content)))
        process.stdin.write(content)
        process.stdin.flush()


def _ask(process: _Process, request: bytes) -> bytes | None:
    """None if the process has ended."""
    assert process.stdout is not None
    _send(process, request)
    return read_frame(process.stdout)


def _end(process: _Process) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
