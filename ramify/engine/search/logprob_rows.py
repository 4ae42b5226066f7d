"""Logprobs as callers see them: a read-only sequence over what the device reported, each dict made when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from ramify.engine.plan import TokenReport
from ramify.outputs import Logprob, LogprobRow

Decode = Callable[[int], str]


class LogprobRows(Sequence[LogprobRow]):
    """One dict per token: the likeliest tokens at its place and the token itself, by token id."""

    __slots__ = ("_decode", "_reports", "_token_ids")

    def __init__(self, token_ids: Sequence[int], reports: Sequence[TokenReport], decode: Decode | None) -> None:
        self._token_ids = tuple(token_ids)
        self._reports = tuple(reports)
        self._decode = decode

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> LogprobRow: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...

    def __getitem__(self, index: int | slice) -> LogprobRow | LogprobRows:
        if isinstance(index, slice):
            return LogprobRows(self._token_ids[index], self._reports[index], self._decode)
        return logprob_row(self._token_ids[index], self._reports[index], self._decode)

    @property
    def reports(self) -> Sequence[TokenReport]:
        """What the rows are made of, one report per token."""
        return self._reports

    @property
    def processed(self) -> LogprobRows | None:
        """The same of the distribution that each token was drawn from, where the engine tells both."""
        told = [report.processed for report in self._reports if report.processed is not None]
        return LogprobRows(self._token_ids, told, self._decode) if told else None

    def followed_by(self, later: LogprobRows) -> LogprobRows:
        """The rows of this output, then those of what came after it."""
        return LogprobRows(self._token_ids + later._token_ids, self._reports + later._reports, self._decode)

    def __reduce__(self) -> tuple[type[LogprobRows], tuple[Sequence[int], Sequence[TokenReport], Decode | None]]:
        """Copied, or sent to another process, with the texts of its tokens in place of a whole tokenizer."""
        decode = self._decode
        if decode is not None:
            decode = {token_id: decode(token_id) for token_id in self._told_ids()}.__getitem__
        return LogprobRows, (self._token_ids, self._reports, decode)

    def _told_ids(self) -> set[int]:
        told = set(self._token_ids)
        for report in self._reports:
            for each in filter(None, (report, report.processed)):
                told.update(each.top_token_ids.tolist())
        return told

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self._token_ids)

    def __repr__(self) -> str:
        return repr(list(self))


def logprob_row(token_id: int, report: TokenReport, decode: Decode | None) -> LogprobRow:
    """Tokens that cannot be drawn at all (minus infinity) are not among the likeliest. Those that tie share a rank."""

    def entry(identity: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if decode is None else decode(identity))

    row: LogprobRow = {}
    above, rank = float("inf"), 0
    likeliest = zip(report.top_token_ids.tolist(), report.top_logprobs.tolist(), strict=True)
    for place, (top_id, logprob) in enumerate(likeliest, start=1):
        if logprob == float("-inf"):
            break
        above, rank = logprob, rank if logprob == above else place
        # Logits may differ where logprobs do not: the token's own rank was told from its logit.
        row[top_id] = entry(top_id, logprob, report.rank if top_id == token_id else rank)
    if token_id not in row:
        row[token_id] = entry(token_id, report.logprob, report.rank)
    return row
