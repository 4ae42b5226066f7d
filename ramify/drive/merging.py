"""Two outputs of one request merged into one, for a reader who has not fetched the first yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.engine.search.logprob_rows import LogprobRows
from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput
from ramify.sampling_params import OutputKind


def merged(earlier: RequestOutput | None, later: RequestOutput, kind: OutputKind | str) -> RequestOutput:
    """Deltas and growth steps are joined; of cumulative outputs the later one already holds everything."""
    if earlier is None:
        return later
    if kind is OutputKind.GROWTH:
        return replace(later, growth=earlier.growth + later.growth)
    if kind is not OutputKind.DELTA:
        return later
    by_index = {delta.index: delta for delta in earlier.outputs}
    for delta in later.outputs:
        by_index[delta.index] = _joined(by_index[delta.index], delta) if delta.index in by_index else delta
    return replace(later, outputs=tuple(by_index[index] for index in sorted(by_index)))


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    """Texts and tokens of both; finish reason, score and cumulative logprob of the later one."""
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=_rows(earlier.logprobs, later.logprobs),
        mixture=None if later.mixture is None else (earlier.mixture or ()) + later.mixture,
        kept=None if later.kept is None else (earlier.kept or ()) + later.kept,
        processed_logprobs=_rows(earlier.processed_logprobs, later.processed_logprobs) or earlier.processed_logprobs,
    )


def _rows(earlier: Sequence[LogprobRow] | None, later: Sequence[LogprobRow] | None) -> Sequence[LogprobRow] | None:
    if earlier is None or later is None:
        return later
    if isinstance(earlier, LogprobRows) and isinstance(later, LogprobRows):
        return earlier.followed_by(later)  # its dicts are made when somebody reads them
    return [*earlier, *later]
