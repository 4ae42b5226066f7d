"""EncodingProcess: text to ids in a process of its own, which ends when a text takes too long or too much memory."""

from __future__ import annotations

import struct
from pathlib import Path

from ramify.errors import InvalidInputError
from ramify.process.bounded import BoundedProcess, FailedError, OutOfMemoryError, OutOfTimeError

MEMORY_BYTES = 4 * 2**30
SECONDS = 5  # of the processor's time for a short text
BYTES_PER_SECOND = 200_000  # a long one gets a second more for each of these


class EncodingProcess:
    """Started with the first text, and again after one that it did not survive. Several threads may ask at once."""

    def __init__(self, tokenizer_json: str, *, seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds = seconds
        self._process = BoundedProcess(
            Path(__file__).with_name("encoding_child.py"),
            tokenizer_json.encode(),
            seconds=seconds,
            memory_bytes=memory_bytes,
            bytes_per_second=BYTES_PER_SECOND,
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            reply = self._process.ask(bytes([add_special_tokens]) + text.encode())
        except FailedError as error:
            cause = str(error)
        except OutOfTimeError:
            cause = f"the model's tokenizer takes more than {self._seconds} seconds for it"
        except OutOfMemoryError:
            cause = "the model's tokenizer takes too much memory for it, or fails at it"
        else:
            return list(struct.unpack(f"<{len(reply) // 4}I", reply))
        raise InvalidInputError(f"text cannot be tokenized: {cause}")

    def close(self) -> None:
        self._process.close()
