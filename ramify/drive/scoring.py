"""Given continuations, scored in batches: what was asked, as requests; what they gave, as logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ramify import validation as check
from ramify.drive.intake import Intake, Prompt, as_prompts
from ramify.drive.pair_intake import PairIntake, Rendered
from ramify.engine.core import CACHE_FULL
from ramify.engine.request import Request
from ramify.errors import CacheExhaustedError, InvalidInputError
from ramify.outputs import ContinuationLogprobs, PairLogprobs, RequestOutput


def paired_up(
    intake: Intake, prompts: Prompt | Sequence[Prompt], continuations: object
) -> tuple[list[Prompt], list[list[int]]]:
    """A prompt and the tokens of its continuation, each: one prompt may go before all continuations."""
    given, before = intake.continuations(continuations), as_prompts(prompts)
    if len(before) == 1:
        before = before * len(given)
    if len(before) != len(given):
        raise InvalidInputError(
            f"continuations must be one per prompt, or any number after one prompt: got {len(given)} for "
            f"{len(before)} prompts"
        )
    return before, given


def scoring_requests(
    intake: Intake, prompts: Prompt | Sequence[Prompt], continuations: object, top_k: int
) -> list[Request]:
    """One for each continuation."""
    check.integer("top_k", top_k, 0, intake.max_logprobs)
    before, given = paired_up(intake, prompts, continuations)
    return [intake.scoring_request(prompt, each, top_k) for prompt, each in zip(before, given, strict=True)]


def comparison_requests(
    intake: PairIntake,
    rendered: Sequence[tuple[Rendered, Rendered]],
    continuations: Sequence[list[int]],
    top_k: int,
    *,
    most_at_once: int,
) -> list[list[Request]]:
    """For each continuation its pieces, in their order: both models compute a piece in one step.

    What stands before a piece comes out of the prefix cache, where the piece before it left it.
    """
    check.integer("top_k", top_k, 0, intake.max_logprobs)
    return [
        [
            intake.comparison(
                (teacher.token_ids + token_ids[:start], theta.token_ids + token_ids[:start]),
                token_ids[start : start + most_at_once],
                top_k,
            )
            for start in range(0, len(token_ids), most_at_once)
        ]
        for (teacher, theta), token_ids in zip(rendered, continuations, strict=True)
    ]


def scores(outputs: Sequence[RequestOutput]) -> list[ContinuationLogprobs]:
    raise_first_error(outputs)
    return [output.scored for output in outputs if isinstance(output.scored, ContinuationLogprobs)]


def pair_scores(outputs: Sequence[RequestOutput], num_pieces: Sequence[int]) -> list[PairLogprobs]:
    """Of continuations that were asked about in so many pieces each."""
    raise_first_error(outputs)
    told = [output.scored for output in outputs if isinstance(output.scored, PairLogprobs)]
    ends = list(accumulate(num_pieces))
    return [_joined(told[end - count : end]) for count, end in zip(num_pieces, ends, strict=True)]


def _joined(pieces: Sequence[PairLogprobs]) -> PairLogprobs:
    if len(pieces) == 1:
        return pieces[0]
    return PairLogprobs(
        _end_to_end([piece.teacher for piece in pieces]),
        _end_to_end([piece.theta for piece in pieces]),
        tuple(number for piece in pieces for number in piece.forward_kl),
        tuple(number for piece in pieces for number in piece.reverse_kl),
    )


def _end_to_end(pieces: Sequence[ContinuationLogprobs]) -> ContinuationLogprobs:
    has_alternatives = pieces[0].alternatives is not None
    return replace(
        pieces[0],
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        ranks=tuple(rank for piece in pieces for rank in piece.ranks),
        alternatives=tuple(row for piece in pieces for row in piece.alternatives or ()) if has_alternatives else None,
    )


def raise_first_error(outputs: Sequence[RequestOutput]) -> None:
    """Nobody wants the scores of some: one that failed fails all."""
    error = next((output.error for output in outputs if output.error is not None), None)
    if error is None:
        return
    raise CacheExhaustedError(f"{error}: release some") if error.startswith(CACHE_FULL) else InvalidInputError(error)
