"""Which outputs are best: the scores that rank best-of-n."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ramify.outputs import CompletionOutput
from ramify.sampling_params import Score

ScoreFunction = Callable[[CompletionOutput], float]


def score_function(score: Score) -> ScoreFunction:
    if callable(score):
        return score
    return _mean_logprob if score == "mean_logprob" else _cumulative_logprob


def rank(outputs: Iterable[tuple[CompletionOutput, bool]], score: Score) -> list[CompletionOutput]:
    """All of (output, is empty), best first, each with its score; of equals the lower index goes first.

    An output with no token before its end has lost nothing and says nothing: it ranks last, whatever its logprob.
    """
    function = score_function(score)
    scored = [replace(output, score=float("-inf") if empty else float(function(output))) for output, empty in outputs]
    return sorted(scored, key=lambda output: (-(output.score or 0.0), output.index))


def _cumulative_logprob(output: CompletionOutput) -> float:
    return output.cumulative_logprob


def _mean_logprob(output: CompletionOutput) -> float:
    return output.cumulative_logprob / len(output.token_ids)
