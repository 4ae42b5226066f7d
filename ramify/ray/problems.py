"""`distill` over a cluster: problems in, samples of teacher and student out, one engine an actor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ramify import validation as check
from ramify.config import EngineConfig, EngineOptions
from ramify.distill.author import Author, Refusals
from ramify.distill.problems import Malformed, Problem
from ramify.distill.recipe import Recipe, load_preset
from ramify.errors import InvalidInputError, RamifyError
from ramify.ray.cluster import ray_module, reason_of
from ramify.ray.pool import Pool, check_options
from ramify.ray.row_journal import RowJournal, row_name
from ramify.ray.rows import Entry, all_of, check_columns, extended

if TYPE_CHECKING:
    from ramify.distill.writer import Writer  # brings torch

FIELDS = {
    "problem": "text",
    "sample": "int",
    "accepted": "bool",
    "rejected_because": "text",
    "final_answer": "text",
    "sample_answer": "text",
    "prompt": "text",
    "text": "text",
    "finish_reason": "text",
    "error": "text",
    "prompt_token_ids": "[int]",
    "token_ids": "[int]",
    "tokens": "[text]",
    "logprobs_teacher": "[float]",
    "logprobs_theta": "[float]",
    "logprobs_mixture": "[float]",
    "alpha": "[float]",
}
_WHOLE_FIELDS = {"refused": "text", "entries": "text"}
_MOST_BLOCKS = 4096  # of problems: Ray keeps account of each


def distill(
    dataset: Any,
    recipe: Recipe | str | Path,
    *,
    journal: str | None = None,
    on_refused: Literal["stop", "skip"] = "stop",
    pool: Pool | None = None,
    **options: Unpack[EngineOptions],
) -> Any:
    """A dataset with n rows for each problem of `dataset`: its columns, and those of a sample (docs/ray.md).

    A problem is a row with `question` and `answer`. A column `line` with the problem's number makes its samples those
    of `ramify distill`; without it a problem's seed is made from the recipe's and its content alone. `recipe` is a
    Recipe, a preset or a YAML file; what is left out of `options` is as in `OptimalSampling`, and `journal` and
    `on_refused` are as in `generate`.
    """
    check.choice("on_refused", on_refused, ("stop", "skip"))
    recipe = recipe if isinstance(recipe, Recipe) else load_preset(recipe)
    check_options(recipe.model_teacher, options, how_many="Pool(num_engines=…)")
    names = dataset.columns(fetch_if_missing=False)
    if names is not None:
        check_columns(names, ["question", "answer"], FIELDS)
    arguments = {"recipe": recipe, "options": dict(options), "journal": journal, "on_refused": on_refused}
    return (pool or Pool()).stage(dataset, DistillStage, arguments, options=options, n=recipe.n)


class _Desk:
    """An author on an engine of this actor's, for as many problems at a time as come."""

    def __init__(self, author: Author) -> None:
        from ramify.drive.async_engine import AsyncEngine

        self._author = author
        self._engine = AsyncEngine(author.core)

    async def entries(self, problem: Problem) -> list[Entry]:
        """Raises InvalidInputError if the models cannot take it."""
        output = await self._engine.submit(self._author.request(problem)).final()
        return self._author.entries(problem, output)


def _sample_desk(recipe: Recipe, options: Mapping[str, Any]) -> _Desk:
    from ramify.distill.samples import SampleAuthor
    from ramify.optimal import OptimalSampling

    return _Desk(SampleAuthor(OptimalSampling(preset=recipe, **options), recipe))


def _oracle_desk(recipe: Recipe, options: Mapping[str, Any]) -> _Desk:
    from ramify.distill.oracle import OracleAuthor
    from ramify.drive.build import build_engine

    config = EngineConfig.from_options(model=recipe.oracle or "", **options)
    return _Desk(OracleAuthor(build_engine(config, lambda _: None), recipe))


class DistillStage:
    """Problems as rows, samples as rows."""

    def __init__(self, *, recipe: Recipe, options: Mapping[str, Any], journal: str | None, on_refused: str) -> None:
        self._desk = _sample_desk(recipe, options)
        self._settings = [recipe.as_dict(), dict(options)]
        self._journal = None if journal is None else RowJournal(journal)
        self._skips = on_refused == "skip"

    async def __call__(self, table: Any) -> Any:
        check_columns(table.column_names, ["question", "answer"], FIELDS)
        problems = [_problem(row) for row in table.to_pylist()]
        return extended(table, await all_of([self._samples(problem) for problem in problems]), FIELDS)

    async def _samples(self, problem: Problem) -> list[Entry]:
        if not isinstance(problem.question, str) or not isinstance(problem.answer, str):
            return self._refused(InvalidInputError("a problem needs question and answer, both text"), None)
        name = row_name(self._settings, problem.line, problem.digest)
        if self._journal is not None and (found := self._journal.find(name)) is not None:
            return found
        try:
            entries = await self._desk.entries(problem)
        except InvalidInputError as error:
            return self._refused(error, problem.digest)
        rows = [{**entry, "final_answer": entry["answer"]} for entry in entries]
        rows = [{name: row[name] for name in FIELDS} for row in rows]
        if self._journal is not None and all(row["error"] is None for row in rows):
            self._journal.append(name, rows)
        return rows

    def _refused(self, error: InvalidInputError, digest: str | None) -> list[Entry]:
        """Whose row has no digest either where it holds what is no text: of that none is made."""
        if not self._skips:
            raise error
        return [{"problem": digest, "error": str(error)}]


class WholeProblemStage:
    """Problems as rows, each row with all that was written of it, as JSON: what a run's journal takes."""

    def __init__(self, *, recipe: Recipe, options: Mapping[str, Any], asks_oracle: bool) -> None:
        self._desk = (_oracle_desk if asks_oracle else _sample_desk)(recipe, options)

    async def __call__(self, table: Any) -> Any:
        problems = [Problem(**row) for row in table.to_pylist()]
        written = await all_of([self._written(problem) for problem in problems])
        return extended(table, [[entry] for entry in written], _WHOLE_FIELDS)

    async def _written(self, problem: Problem) -> Entry:
        try:
            entries = await self._desk.entries(problem)
        except InvalidInputError as error:
            return {"refused": str(error)}
        return {"entries": json.dumps(entries, ensure_ascii=False)}


class _ClusterWriter:
    def __init__(self, recipe: Recipe, options: Mapping[str, Any], pool: Pool, *, asks_oracle: bool) -> None:
        self.num_tokens = 0  # of the problems that are done: what an engine draws meanwhile is not known here
        self._recipe, self._options, self._pool = recipe, options, pool
        self._asks_oracle = asks_oracle

    def write(
        self, problems: Sequence[Problem], refusals: Refusals, after_step: Callable[[], None]
    ) -> Iterator[list[Entry]]:
        try:
            for row in self._rows(problems):
                if row["refused"] is not None:
                    refusals.add(Malformed(row["line"], row["refused"]))
                else:
                    entries: list[Entry] = json.loads(row["entries"])
                    self.num_tokens += sum(len(entry["token_ids"]) for entry in entries)
                    yield entries
                after_step()
        except ray_module("ray.exceptions").RayError as error:
            raise RamifyError(f"the work on the cluster failed: {reason_of(error)}") from error

    def close(self) -> None:
        """The actors have ended with the last row."""

    def _rows(self, problems: Sequence[Problem]) -> Iterator[dict[str, Any]]:
        data = ray_module("ray.data")
        data.DataContext.get_current().enable_progress_bars = False  # the run shows its own
        for handler in logging.getLogger("ray.data").handlers:
            handler.addFilter(_is_warning)
        n = 1 if self._asks_oracle else self._recipe.n
        # A block is what is handed over and comes back as a whole: small ones, so that little is lost with one.
        size = min(self._pool.rows_at_a_time(self._options, n), max(1, len(problems) // 8))
        blocks = min(-(-len(problems) // size), _MOST_BLOCKS)
        items = [
            {
                "line": problem.line,
                "question": problem.question,
                "answer": problem.answer,
                "oracle_answer": problem.oracle_answer,
            }
            for problem in problems
        ]
        arguments = {"recipe": self._recipe, "options": dict(self._options), "asks_oracle": self._asks_oracle}
        dataset = data.from_items(items, override_num_blocks=blocks)
        stage = self._pool.stage(dataset, WholeProblemStage, arguments, options=self._options, n=n)
        yield from stage.iter_rows()


@dataclass(frozen=True)
class ClusterWriters:
    """The models of a recipe on the engines of a cluster that this process has joined."""

    recipe: Recipe
    options: Mapping[str, Any]
    pool: Pool

    def samples(self) -> Writer:
        return _ClusterWriter(self.recipe, self.options, self.pool, asks_oracle=False)

    def answers(self) -> Writer:
        return _ClusterWriter(self.recipe, self.options, self.pool, asks_oracle=True)


def _is_warning(record: logging.LogRecord) -> bool:
    """Errors are raised and told in one line; Ray Data would tell before them all that led there."""
    return record.levelno == logging.WARNING


def _problem(row: Mapping[str, Any]) -> Problem:
    return Problem(int(row.get("line") or 0), row["question"], row["answer"])
