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

    def leave_out(self) -> None:
        """The last token of the output is no text: it was not pushed."""

    def of_whole(self, token_ids: Sequence[int], *, ended: bool) -> str:
        """The text of an output that begins as this one does and has these tokens; looks for no stop string."""
        if self._detokenizer is None:
            return self.text
        if ended and not self.text:
            return self._detokenizer.whole(token_ids)
        stream = self.fork()
        for token_id in token_ids:
            stream.push(token_id, may_stop=False)
        if ended:
            stream.end(may_stop=False)
        return stream.text

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
        known = len(self.text) + 1
        self.text += piece
        if not may_stop or not self._stop:
            return False
        # What was complete before this piece is not looked for: there it was not to end anything.
        found = [(self.text.find(stop, max(0, known - len(stop))), stop) for stop in self._stop]
        matches = [(start, -len(stop), stop) for start, stop in found if start >= 0]
        if not matches:
            return False
        start, _, self.stopped_by = min(matches)  # the earliest one; of several that begin there, the longest
        self.text = self.text[: start + len(self.stopped_by)] if self._include_stop else self.text[:start]
        return True


class LateText:
    """What a TextStream is, for an output that nobody sees before it has ended and that no stop string ends.

    It reads the list of the output's tokens when it is asked for the text: a whole text costs less than its parts, and
    beams that are outdone never become text.
    """

    __slots__ = ("_empty", "_ended", "_num_unsaid", "_token_ids")

    stopped_by: None = None

    def __init__(self, empty: TextStream, token_ids: Sequence[int]) -> None:
        self._empty = empty  # what the text begins with
        self._token_ids = token_ids  # the output's own: they come there
        self._num_unsaid = 0
        self._ended = False

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """The token that the list ends with."""
        assert not (may_stop and self._empty.has_stop), "it would have to be looked for now"
        assert self._token_ids[-1] == token_id, "its tokens are the output's"
        return False

    def leave_out(self) -> None:
        """The token that the list ends with is no text."""
        self._num_unsaid = 1

    def end(self, *, may_stop: bool = True) -> bool:
        assert not (may_stop and self._empty.has_stop), "it would have to be looked for now"
        self._ended = True
        return False

    @property
    def text(self) -> str:
        """Made whenever it is asked for."""
        return self._empty.of_whole(self._token_ids[: len(self._token_ids) - self._num_unsaid], ended=self._ended)

    visible = text

    def fork(self, token_ids: Sequence[int]) -> LateText:
        """Of an output that has the same tokens so far."""
        return LateText(self._empty, token_ids)
