"""Two outputs of one request as one: what a reader gets who did not come for the first in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput
from ramify.sampling_params import OutputKind
from ramify.search.reports import LogprobRows


def merged(earlier: RequestOutput | None, later: RequestOutput, kind: OutputKind | str) -> RequestOutput:
    """Deltas are joined, and so are steps of growth; of outputs that hold everything the later one says it all."""
    if earlier is None:
        return later
    if kind is OutputKind.GROWTH:
        return replace(later, growth=earlier.growth + later.growth)
    if kind is not OutputKind.DELTA:
        return later
    known = {item.index: item for item in earlier.outputs}
    for item in later.outputs:
        known[item.index] = _joined(known[item.index], item) if item.index in known else item
    return replace(later, outputs=tuple(known[index] for index in sorted(known)))


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    """The later output's end, score and sum, after both texts and all tokens."""
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=_rows(earlier.logprobs, later.logprobs),
        mixture=None if later.mixture is None else (earlier.mixture or ()) + later.mixture,
    )


def _rows(earlier: Sequence[LogprobRow] | None, later: Sequence[LogprobRow] | None) -> Sequence[LogprobRow] | None:
    if earlier is None or later is None:
        return later
    if isinstance(earlier, LogprobRows) and isinstance(later, LogprobRows):
        return earlier.followed_by(later)  # no dict is made before somebody reads it
    return [*earlier, *later]
