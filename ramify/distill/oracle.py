"""The oracle: a model that writes the answers of problems that have none, before anything is sampled.

Its answers are kept in `answers.jsonl`, each written as soon as it is there, so that a run that is stopped goes on with
the answers it has. The file of problems is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ramify.config import EngineConfig
from ramify.distill.answers import holds_final_answer
from ramify.distill.author import Entry
from ramify.distill.files import ANSWERS
from ramify.distill.problem_lines import ProblemLines
from ramify.distill.problems import Malformed, Problem
from ramify.distill.recipe import Recipe
from ramify.distill.template import Template
from ramify.drive.intake import Intake
from ramify.drive.loops import Calls, Driven
from ramify.drive.pair_intake import Side
from ramify.engine.core import EngineCore
from ramify.engine.request import Request
from ramify.errors import InvalidInputError, UnsupportedError
from ramify.outputs import CompletionOutput, FinishReason, RequestOutput
from ramify.text.codec import TextCodec


class Oracle(Protocol):
    """A model that can be asked: an engine in this process, or several in processes of their own."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def codec(self) -> TextCodec: ...

    @property
    def core(self) -> Driven: ...

    @property
    def intake(self) -> Intake: ...


class OracleAuthor:
    """The oracle, which writes the answer of a problem that has none."""

    def __init__(self, engine: Oracle, recipe: Recipe) -> None:
        self._engine = engine
        self._recipe = recipe
        self._calls = Calls(engine.core)
        self._side = Side(engine.codec, recipe.oracle_system_prompt, recipe.enable_chat_template)
        self._template = Template("oracle_prompt", recipe.oracle_prompt)

    @property
    def core(self) -> EngineCore:
        if not isinstance(self._engine.core, EngineCore):
            raise UnsupportedError("the oracle's engines are in processes of their own: data_parallel_size must be 1")
        return self._engine.core

    @property
    def num_tokens(self) -> int:
        return self._engine.core.generated_tokens

    @property
    def most_at_once(self) -> int:
        return 2 * self._engine.config.most_sequences

    def request(self, problem: Problem) -> Request:
        params = self._recipe.oracle_sampling(self._recipe.problem_seed(problem.line, problem.digest))
        try:
            _, token_ids = self._side.render(self._template.fill({"question": problem.question}))
            return self._engine.intake.request(token_ids, params)
        except InvalidInputError as error:
            raise InvalidInputError(f"the oracle cannot be asked: {error}") from None

    def entries(self, problem: Problem, output: RequestOutput) -> list[Entry]:
        return [_entry(problem, output, self._recipe)]

    def finish(
        self, requests: Iterable[Request], *, most_at_once: int, after_step: Callable[[], None]
    ) -> Iterator[RequestOutput]:
        return self._calls.finish(requests, most_at_once=most_at_once, after_step=after_step)


class Answers:
    """The answers of one run's folder."""

    def __init__(self, folder: Path, problems: Sequence[Problem]) -> None:
        self._lacking = [problem for problem in problems if problem.answer is None]
        self._lines = ProblemLines(folder / ANSWERS)
        try:
            self._lines.recover({problem.line: problem.digest for problem in self._lacking}, 1)
        except BaseException:
            self.close()
            raise

    def missing(self) -> list[Problem]:
        return [problem for problem in self._lacking if problem.line not in self._lines.done]

    @property
    def num_needed(self) -> int:
        """How many the file of problems lacks."""
        return len(self._lacking)

    @property
    def num_written(self) -> int:
        return len(self._lines.done)

    def append(self, entries: Sequence[Entry]) -> None:
        """Writes the answer of one problem: it is on the disk when this returns."""
        self._lines.append(entries)

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


def _entry(problem: Problem, output: RequestOutput, recipe: Recipe) -> Entry:
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
