"""The oracle: a model that writes the answers of problems that have none, before anything is sampled.

Its answers are kept in `answers.jsonl`, each written as soon as it is there, so that a run that is stopped goes on with
the answers it has. The file of problems is never changed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ramify.distill.answers import holds_final_answer
from ramify.distill.asked import Asked
from ramify.distill.files import ANSWERS
from ramify.distill.problem_lines import ProblemLines
from ramify.distill.problems import Malformed, Problem
from ramify.distill.progress import Progress
from ramify.distill.recipe import Recipe
from ramify.distill.template import Template
from ramify.drive.build import Engine
from ramify.drive.intake import Intake
from ramify.drive.loops import Calls
from ramify.drive.pair_intake import Side
from ramify.engine.request import Request
from ramify.errors import InvalidInputError
from ramify.outputs import CompletionOutput, FinishReason, RequestOutput


class Answers:
    """The answers of one run's folder: those that are there, and those that `write` adds."""

    def __init__(self, folder: Path, recipe: Recipe, problems: Sequence[Problem]) -> None:
        self._recipe = recipe
        self._lacking = [problem for problem in problems if problem.answer is None]
        self._lines = ProblemLines(folder / ANSWERS)
        try:
            self._lines.recover({problem.line: problem.digest for problem in self._lacking}, 1)
        except BaseException:
            self.close()
            raise

    def missing(self) -> list[Problem]:
        return [problem for problem in self._lacking if problem.line not in self._lines.done]

    def write(self, engine: Engine[Intake], *, stops_at_refused: bool, show_progress: bool) -> list[Malformed]:
        """Asks for the missing answers; the problems whose prompts the oracle cannot take are refused or returned."""
        asked = Asked(stops_at_refused=stops_at_refused)
        make = partial(self._request, engine, Template("oracle_prompt", self._recipe.oracle_prompt))
        requests = asked.requests(self.missing(), make, refusal="the oracle cannot be asked: ")
        with Progress(
            "Answers",
            problems=len(self._lacking),
            done=len(self._lines.done),
            tokens_of_problem=self._recipe.oracle_max_tokens,
            count_tokens=lambda: engine.core.metrics.generated_tokens,
            visible=show_progress,
        ) as progress:
            most_at_once = 2 * engine.config.scheduler_config.max_num_seqs  # so that it stays full while some end
            for output in Calls(engine.core).finish(requests, most_at_once=most_at_once, after_step=progress.tick):
                entry = _entry(asked.problem_of(output), output, self._recipe)
                self._lines.append([entry])
                progress.ended(tokens=len(entry["token_ids"]))
        return asked.refused

    def fill(self, problems: Sequence[Problem]) -> tuple[list[Problem], list[Malformed]]:
        """The problems with the oracle's answers in place, and those that it gave no usable answer."""
        entries = {int(entry["line"]): entry for entry in self._lines.entries()}
        filled: list[Problem] = []
        unusable: list[Malformed] = []
        for problem in problems:
            if problem.answer is not None:
                filled.append(problem)
                continue
            entry = entries.get(problem.line)
            if entry is not None and entry["unusable_because"] is None:
                filled.append(replace(problem, oracle_answer=entry["answer"]))
            elif entry is not None:
                unusable.append(Malformed(problem.line, f"no answer: {entry['unusable_because']}"))
        return filled, unusable

    def check_kept(self, sampled: set[int]) -> None:
        """Samples of a problem belong to one answer: where there are some, that answer must be there too."""
        lost = sampled & {problem.line for problem in self.missing()}
        if lost:
            raise InvalidInputError(
                f"{self._lines.path} lacks the answer of line {min(lost)}, of which there are samples: choose another "
                f"folder"
            )

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, engine: Engine[Intake], template: Template, problem: Problem) -> Request:
        recipe = self._recipe
        side = Side(engine.codec, recipe.oracle_system_prompt, recipe.enable_chat_template)
        _, token_ids = side.render(template.fill({"question": problem.question}))
        params = recipe.oracle_sampling(recipe.problem_seed(problem.line, problem.digest))
        return engine.intake.request(token_ids, params)


def ask_and_leave(
    answers: Answers, load: Callable[[], Engine[Intake]], *, stops_at_refused: bool, show_progress: bool
) -> list[Malformed]:
    """Loads the oracle, writes the missing answers, and gives its memory back before the other models are loaded."""
    engine = load()
    refused = answers.write(engine, stops_at_refused=stops_at_refused, show_progress=show_progress)
    del engine
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU is in use
    return refused


def _entry(problem: Problem, output: RequestOutput, recipe: Recipe) -> dict[str, Any]:
    [sample] = output.outputs
    return {
        "line": problem.line,
        "problem": problem.digest,
        "sample": 0,
        "question": problem.question,
        "answer": sample.text.strip(),
        "unusable_because": _unusable(sample, output.error, recipe),
        "finish_reason": sample.finish_reason,
        "token_ids": list(sample.token_ids),
    }


def _unusable(sample: CompletionOutput, error: str | None, recipe: Recipe) -> str | None:
    """Why an answer cannot stand for the right one; None if it can."""
    if error is not None:
        return f"the oracle's ended with an error ({error})"
    if sample.finish_reason is FinishReason.LENGTH:
        return f"the oracle's was cut off at oracle_max_tokens {recipe.oracle_max_tokens} (raise --oracle-max-tokens)"
    if not holds_final_answer(sample.text, recipe):
        sought = recipe.reference_pattern or ("a number" if recipe.match == "number" else "any text")
        return f"the oracle's does not hold {sought} (say so in --oracle-prompt)"
    return None
