"""TextStream: the text of one output as it grows, cut where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.text.detokenizer import IncrementalDetokenizer


class TextStream:
    """Detokenises, finds stop strings even across token borders, and knows how much may be shown already.

    Without a detokenizer (no tokenizer, or detokenize=False) the text stays empty.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        # So many characters at the end may be the beginning of a stop string, so they are not certain yet.
        self._held = max(map(len, self._stop), default=1) - 1
        self._ended = False
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Takes a token; returns whether it completed a stop string, where the text is then cut."""
        if self._detokenizer is None:
            return False
        return self._append(self._detokenizer.push(token_id), may_stop)

    def end(self, *, may_stop: bool = True) -> bool:
        """Ends the text, to which what was held back is added; returns whether that completed a stop string."""
        stopped = False
        if self._detokenizer is not None and not self._ended and self.stopped_by is None:
            stopped = self._append(self._detokenizer.flush(), may_stop)
        self._ended = True
        return stopped

    @property
    def has_stop(self) -> bool:
        return bool(self._stop)

    @property
    def visible(self) -> str:
        """The part of the text that no later token can change."""
        if self._ended or self.stopped_by is not None or self._held == 0:
            return self.text
        return self.text[: -self._held]

    def fork(self) -> TextStream:
        copy = TextStream(
            None if self._detokenizer is None else self._detokenizer.fork(),
            self._stop,
            include_stop=self._include_stop,
        )
        copy.text = self.text
        return copy

    def _append(self, piece: str, may_stop: bool) -> bool:
        if not piece:
            return False
        searched = max(0, len(self.text) - self._held)
        self.text += piece
        if not may_stop or not self._stop:
            return False
        found = [(self.text.find(stop, searched), stop) for stop in self._stop]
        matches = [(start, -len(stop), stop) for start, stop in found if start >= 0]
        if not matches:
            return False
        start, _, self.stopped_by = min(matches)  # the earliest one; of several that begin there, the longest
        self.text = self.text[: start + len(self.stopped_by)] if self._include_stop else self.text[:start]
        return True


class LateText:
    """What a TextStream is, for an output that nobody sees before it has ended and that no stop string ends: a beam.

    Tokens wait until the text is read. Most beams are outdone before that, and their tokens never become text.
    """

    __slots__ = ("_empty", "_ended", "_token_ids")

    stopped_by: None = None

    def __init__(self, empty: TextStream, token_ids: Sequence[int] = ()) -> None:
        self._empty = empty  # what the text begins with
        self._token_ids = list(token_ids)
        self._ended = False

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        assert not (may_stop and self._empty.has_stop), "it would have to be looked for now"
        self._token_ids.append(token_id)
        return False

    def end(self, *, may_stop: bool = True) -> bool:
        assert not (may_stop and self._empty.has_stop), "it would have to be looked for now"
        self._ended = True
        return False

    @property
    def text(self) -> str:
        """Made whenever it is asked for."""
        stream = self._empty.fork()
        for token_id in self._token_ids:
            stream.push(token_id, may_stop=False)
        if self._ended:
            stream.end(may_stop=False)
        return stream.text

    visible = text

    def fork(self) -> LateText:
        return LateText(self._empty, self._token_ids)
