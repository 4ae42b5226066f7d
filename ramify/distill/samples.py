"""Samples as they are written to the journal, and the reasons to reject one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ramify.distill.answers import is_match, reference_answer, sample_answer
from ramify.distill.author import Entry
from ramify.distill.problems import Problem
from ramify.distill.recipe import Recipe
from ramify.distill.template import Template
from ramify.engine.core import EngineCore
from ramify.engine.request import Request
from ramify.outputs import CompletionOutput, FinishReason, MixtureReport, RequestOutput
from ramify.text.detokenizer import token_texts

if TYPE_CHECKING:
    from ramify.optimal import OptimalSampling

DIGITS = 6  # after the point: more than float32 computes exactly


class SampleAuthor:
    """Teacher and student, who write a problem's samples."""

    def __init__(self, sampler: OptimalSampling, recipe: Recipe) -> None:
        self._sampler = sampler
        self._recipe = recipe

    @property
    def core(self) -> EngineCore:
        return self._sampler.core

    @property
    def num_tokens(self) -> int:
        return self._sampler.generated_tokens

    @property
    def most_at_once(self) -> int:
        return max(2, -(-2 * self._sampler.config.most_sequences // self._recipe.n))

    def request(self, problem: Problem) -> Request:
        params = self._recipe.sampling(self._recipe.problem_seed(problem.line, problem.digest))
        return self._sampler.request(*prompts_of(problem, self._recipe), params)

    def entries(self, problem: Problem, output: RequestOutput) -> list[Entry]:
        return as_samples(problem, output, self._recipe, self._sampler)

    def finish(
        self, requests: Iterable[Request], *, most_at_once: int, after_step: Callable[[], None]
    ) -> Iterator[RequestOutput]:
        return self._sampler.finish(requests, most_at_once=most_at_once, after_step=after_step)


def prompts_of(problem: Problem, recipe: Recipe) -> tuple[str, str]:
    """The teacher's prompt and the student's."""
    values = {"question": problem.question, "answer": problem.solution}
    values["final_answer"] = reference_answer(problem.solution, recipe)
    teacher = Template("teacher_prompt", recipe.teacher_prompt).fill(values)
    return teacher, Template("theta_prompt", recipe.theta_prompt).fill({"question": problem.question})


def as_samples(problem: Problem, output: RequestOutput, recipe: Recipe, sampler: OptimalSampling) -> list[Entry]:
    """One entry per sample, in order. Its `prompt` is the student's: what comes before `text` in training."""
    [(_, theta)] = sampler.render(*prompts_of(problem, recipe))
    wanted = reference_answer(problem.solution, recipe)
    made = []
    for sample in sorted(output.outputs, key=lambda sample: sample.index):
        found = sample_answer(sample.text, recipe)
        why = rejection(sample, found, wanted, recipe)
        mixture = sample.mixture or ()
        made.append(
            {
                "line": problem.line,
                "problem": problem.digest,
                "sample": sample.index,
                "accepted": why is None,
                "rejected_because": why,
                "question": problem.question,
                "answer": wanted,
                "answer_by": "file" if problem.answer is not None else "oracle",
                "sample_answer": found,
                "prompt": theta.text,
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "error": output.error,
                "prompt_token_ids": theta.token_ids,
                "token_ids": list(sample.token_ids),
                "tokens": token_texts(sample.token_ids, sampler.tokenizer),
                "logprobs_teacher": [_number(report.logprob_teacher) for report in mixture],
                "logprobs_theta": [_number(report.logprob_theta) for report in mixture],
                "logprobs_mixture": [_number(mixture_logprob(report)) for report in mixture],
                "alpha": [_number(report.alpha) for report in mixture],
            }
        )
    return made


def rejection(sample: CompletionOutput, found: str | None, wanted: str, recipe: Recipe) -> str | None:
    """Why a sample is not accepted; None if it is."""
    if sample.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        return "error"
    if len(sample.token_ids) < recipe.min_length:
        return "too short"
    if recipe.require_finished and sample.finish_reason is not FinishReason.STOP:
        return "not finished"
    if recipe.match != "none":
        if found is None:
            return "no answer"
        if not is_match(found, wanted, recipe.match):
            return "another answer"
    return None


def mixture_logprob(report: MixtureReport) -> float:
    """log q* of the token: both models' logprobs, weighted, minus log Z."""
    if report.alpha in (0, 1):
        return report.logprob_teacher if report.alpha else report.logprob_theta
    return (1 - report.alpha) * report.logprob_theta + report.alpha * report.logprob_teacher - report.log_z


def _number(value: float) -> float | None:
    """JSON has no infinity: the logprob of a token that a model rules out is null."""
    return round(value, DIGITS) if math.isfinite(value) else None
