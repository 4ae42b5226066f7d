"""The scores that rank best-of-n."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ramify import validation as check
from ramify.outputs import CompletionOutput, FinishReason, Standing
from ramify.sampling_params import Score

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)

ScoreFunction = Callable[[CompletionOutput], float]


def score_function(score: Score) -> ScoreFunction:
    if callable(score):
        return score
    return _mean_logprob if score == "mean_logprob" else _cumulative_logprob


def rank(outputs: Iterable[tuple[CompletionOutput, bool]], score: Score) -> list[CompletionOutput]:
    """All outputs, given as (output, is empty), best first, each with its score; ties go to the lower index.

    An empty output (no token before its end) would often have the best logprob, but says nothing: it ranks last.
    """
    function = score_function(score)
    scored = [
        replace(output, score=float("-inf") if empty else _checked(function(output))) for output, empty in outputs
    ]
    return sorted(scored, key=lambda output: (-(output.score or 0.0), output.index))


@dataclass(frozen=True, slots=True)
class BestOf:
    """The outputs to return, best first, and how all stand; or, where a score could not be had, why not."""

    outputs: list[CompletionOutput]
    standings: list[Standing] | None
    error: str | None = None


def best_of(outputs: Sequence[tuple[CompletionOutput, bool]], score: Score, n: int) -> BestOf:
    """The n best of all children's outputs, given as (output, is empty) in the children's order.

    A score that cannot be had is an error once all outputs are whole. It may need a whole text, the answer at its end
    say: before, and where something else broke an output off, outputs keep the children's order.
    """
    try:
        ranked = rank(outputs, score)
    except Exception as error:  # a caller's own function may raise anything: it ends this request alone
        if any(output.finish_reason not in WHOLE for output, _ in outputs):
            return BestOf([output for output, _ in outputs[:n]], None)
        failed = [replace(output, finish_reason=FinishReason.ERROR) for output, _ in outputs]
        return BestOf(failed[:n], None, f"the score function failed: {type(error).__name__}: {error}")
    standings = [Standing(output.index, output.score or 0.0, output.finished()) for output in ranked]
    return BestOf([replace(output, index=index) for index, output in enumerate(ranked[:n])], standings)


class BestOfNFilter:
    """Selects the best finished outputs, as `best_of` does inside the engine.

    `score_fn` is what `SamplingParams.score` may be: a function of an output, or the name of one.
    """

    def __init__(self, score_fn: Score | None = None) -> None:
        if score_fn is not None and not callable(score_fn):
            check.choice("score_fn", score_fn, ("cumulative_logprob", "mean_logprob"))
        self.score_fn: Score = score_fn if score_fn is not None else self._default_score

    def _default_score(self, output: CompletionOutput) -> float:
        """The model's logprob of the whole output."""
        return _cumulative_logprob(output)

    def select_best(self, outputs: Iterable[CompletionOutput], n: int = 1) -> list[CompletionOutput]:
        """The n best, best first; `index` becomes the rank and `score` what was ranked by. Empty outputs come last."""
        check.integer("n", n, 1)
        ranked = rank([(output, output.is_empty()) for output in outputs], self.score_fn)
        return [replace(output, index=index) for index, output in enumerate(ranked[:n])]


def _checked(score: float) -> float:
    """Refuses NaN, which compares with nothing: a single one would spoil the whole order."""
    if math.isnan(score):
        raise check.refuse("score", score, "a number that can be compared")
    return float(score)


def _cumulative_logprob(output: CompletionOutput) -> float:
    return output.cumulative_logprob


def _mean_logprob(output: CompletionOutput) -> float:
    return output.cumulative_logprob / len(output.token_ids)
