"""ChunkWriter: outputs as the chunks of a stream, in bytes.

Most chunks differ from the last one of their choice in text and tokens alone, so the rest is made once, as a frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import Any, Protocol

from ramify.outputs import CompletionOutput, RequestOutput
from ramify.server.events import event_of

_TEXT = "\ue000text\ue000"  # stand where text and tokens go; whatever names a model has, they come before these
_TOKEN_ID = -1


class Shape(Protocol):
    """How outputs look to the client: one for completions, one for chats."""

    @property
    def is_framed(self) -> bool:
        """Whether chunks of a choice differ in text and tokens alone."""
        ...

    def reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole reply, without the usage."""
        ...

    def chunks(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> Iterable[dict[str, Any]]:
        """What is new of one sample of one of the prompts."""
        ...

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk around these choices."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """A chunk around a text and, if they are told, the tokens: `(before) text (between) tokens (after)`."""

    before: bytes
    between: bytes
    after: bytes | None  # None: tokens are not told

    def event(self, sample: CompletionOutput) -> bytes:
        text = encode_basestring(sample.text).encode()
        if self.after is None:
            return b"%b%b%b" % (self.before, text, self.between)
        token_ids = ",".join(map(str, sample.token_ids)).encode()
        return b"%b%b%b%b%b" % (self.before, text, self.between, token_ids, self.after)


class ChunkWriter:
    def __init__(self, shape: Shape, *, with_token_ids: bool, include_usage: bool) -> None:
        self._shape = shape
        self._with_token_ids = with_token_ids
        self._more: dict[str, Any] = {"usage": None} if include_usage else {}
        self._frames: dict[tuple[int, int], Frame | None] = {}  # by prompt and sample; None: once it has begun

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        samples = output.outputs
        if len(samples) == 1:
            return self._event(prompt_index, output, samples[0])
        return b"".join([self._event(prompt_index, output, sample) for sample in samples])

    def _event(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> bytes:
        which = prompt_index, sample.index
        # This is on the way of every token.
        if (
            sample.finish_reason is None
            and sample.logprobs is None
            and sample.mixture is None
            and sample.score is None
            and sample.inclusion is None
            and which in self._frames
        ):
            if not sample.text and not (self._with_token_ids and sample.token_ids):
                return b""
            frame = self._frames[which]
            if frame is None:
                frame = self._frames[which] = self._frame(prompt_index, output, sample)
            return frame.event(sample)
        made = [event_of({**chunk, **self._more}) for chunk in self._shape.chunks(prompt_index, output, sample)]
        if made and self._shape.is_framed:
            self._frames.setdefault(which, None)
        return b"".join(made)

    def _frame(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> Frame:
        """Cut out of the chunk that the shape makes of a sample with marks in the places of text and tokens."""
        marked = replace(sample, text=_TEXT, token_ids=(_TOKEN_ID,))
        [chunk] = self._shape.chunks(prompt_index, output, marked)
        whole = event_of({**chunk, **self._more})
        before, _, rest = whole.rpartition(encode_basestring(_TEXT).encode())
        if not self._with_token_ids:
            return Frame(before, rest, None)
        between, _, after = rest.rpartition(b"%d" % _TOKEN_ID)
        return Frame(before, between, after)
