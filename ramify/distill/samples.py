"""Samples as they are written: what can be trained on, and why one is not accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ramify.distill.answers import is_match, reference_answer, sample_answer
from ramify.distill.problems import Problem
from ramify.distill.recipe import Recipe
from ramify.distill.template import Template
from ramify.outputs import CompletionOutput, FinishReason, MixtureReport, RequestOutput
from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ramify.optimal import OptimalSampling

DIGITS = 6  # of what float32 computed


def prompts_of(problem: Problem, recipe: Recipe) -> tuple[str, str]:
    """The teacher's and the student's."""
    values = {"question": problem.question, "answer": problem.answer}
    values["final_answer"] = reference_answer(problem.answer, recipe)
    teacher = Template("teacher_prompt", recipe.teacher_prompt).fill(values)
    return teacher, Template("theta_prompt", recipe.theta_prompt).fill({"question": problem.question})


def as_samples(
    problem: Problem, output: RequestOutput, recipe: Recipe, sampler: OptimalSampling
) -> list[dict[str, Any]]:
    """One entry per sample, in the order of their numbers. `prompt` is the student's: what comes before `text`."""
    [(_, theta)] = sampler.render(*prompts_of(problem, recipe))
    wanted = reference_answer(problem.answer, recipe)
    made = []
    for item in sorted(output.outputs, key=lambda item: item.index):
        found = sample_answer(item.text, recipe)
        why = rejection(item, found, wanted, recipe)
        mixture = item.mixture or ()
        made.append(
            {
                "line": problem.line,
                "problem": problem.digest,
                "sample": item.index,
                "accepted": why is None,
                "rejected_because": why,
                "question": problem.question,
                "answer": wanted,
                "sample_answer": found,
                "prompt": theta.text,
                "text": item.text,
                "finish_reason": None if item.finish_reason is None else item.finish_reason.value,
                "error": output.error,
                "prompt_token_ids": theta.token_ids,
                "token_ids": list(item.token_ids),
                "tokens": token_texts(item.token_ids, sampler.tokenizer),
                "logprobs_teacher": [_number(entry.logprob_teacher) for entry in mixture],
                "logprobs_theta": [_number(entry.logprob_theta) for entry in mixture],
                "logprobs_mixture": [_number(mixture_logprob(entry)) for entry in mixture],
                "alpha": [_number(entry.alpha) for entry in mixture],
            }
        )
    return made


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """What each token adds to the text, special tokens written out; joined they are the whole."""
    if tokenizer is None:
        return [""] * len(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


def rejection(item: CompletionOutput, found: str | None, wanted: str, recipe: Recipe) -> str | None:
    """Why a sample is not accepted; None if it is."""
    if item.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        return "error"
    if len(item.token_ids) < recipe.min_length:
        return "too short"
    if recipe.require_finished and item.finish_reason is not FinishReason.STOP:
        return "not finished"
    if recipe.match != "none":
        if found is None:
            return "no answer"
        if not is_match(found, wanted, recipe.match):
            return "another answer"
    return None


def mixture_logprob(entry: MixtureReport) -> float:
    """log q* of the token: the weighted logprobs of both models, less log Z."""
    if entry.alpha in (0, 1):
        return entry.logprob_teacher if entry.alpha else entry.logprob_theta
    return (1 - entry.alpha) * entry.logprob_theta + entry.alpha * entry.logprob_teacher - entry.log_z


def _number(value: float) -> float | None:
    """JSON has no infinity: null stands for a token that a model rules out."""
    return round(value, DIGITS) if math.isfinite(value) else None
