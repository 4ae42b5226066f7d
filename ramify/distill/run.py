"""Run: problems to samples, going on where the last run stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.distill.advice import advice
from ramify.distill.author import Refusals
from ramify.distill.files import DATA, REPORT
from ramify.distill.journal import Journal
from ramify.distill.oracle import Answers
from ramify.distill.problems import Malformed, Problem
from ramify.distill.progress import Progress
from ramify.distill.recipe import Recipe
from ramify.distill.report import page
from ramify.distill.tally import Tally
from ramify.distill.writer import Writer, Writers, WritersHere
from ramify.drive.build import Engine
from ramify.drive.intake import Intake
from ramify.errors import InvalidInputError
from ramify.files.disk import write_whole

if TYPE_CHECKING:
    from ramify.optimal import OptimalSampling


@dataclass(frozen=True, slots=True)
class Summary:
    problems: int  # with all their samples, from this run and earlier ones
    sampled_now: int
    samples: int
    accepted: int
    interval: tuple[float, float]  # of the share of accepted samples, at 95 % confidence
    rejected: Counter[str]  # how many for which reason
    advice: tuple[str, ...]  # what to change, where few were accepted
    refused: tuple[Malformed, ...]  # problems that the models cannot take, or whose answer the oracle did not give


class Run:
    """Fills one folder with samples. `load` loads the models, if anything is left to do, and `load_oracle` the oracle.

    `writers` are given instead where the models are elsewhere. `preset` is what the report calls the recipe.
    """

    def __init__(
        self,
        recipe: Recipe,
        problems: Sequence[Problem],
        folder: Path,
        load: Callable[[], OptimalSampling] | None = None,
        *,
        load_oracle: Callable[[], Engine[Intake]] | None = None,
        writers: Writers | None = None,
        preset: str | None = None,
        stops_at_refused: bool = True,
        show_progress: bool = False,
    ) -> None:
        if load is not None and writers is None:
            writers = WritersHere(recipe, load, load_oracle)
        elif writers is None or load is not None:
            raise InvalidInputError("either load or writers must be given: who writes the samples")
        self.recipe = recipe
        self.problems = problems
        self.folder = folder
        self._writers = writers
        self._preset = preset
        self._stops = stops_at_refused
        self._shows = show_progress
        self._refused: list[Malformed] = []

    def __call__(self) -> Summary:
        """Samples what is missing, then writes the accepted samples and the report."""
        with Journal(self.folder, self.recipe, self.problems) as journal:
            before = len(journal.done)
            problems = self._answered(journal.done)
            left = [problem for problem in problems if problem.line not in journal.done]
            if left:
                self._sample(self._writers.samples(), journal, left)
            tally = self._write_data(journal)
            advised = tuple(advice(tally, self.recipe))
            content = page(tally, self.recipe, len(self.problems), preset=self._preset, advised=advised)
            write_whole(self.folder / REPORT, content)
            return Summary(
                problems=len(journal.done),
                sampled_now=len(journal.done) - before,
                samples=tally.samples,
                accepted=tally.accepted,
                interval=tally.interval(),
                rejected=tally.rejected(),
                advice=advised,
                refused=tuple(self._refused),
            )

    def _answered(self, sampled: set[int]) -> Sequence[Problem]:
        """All problems that have an answer, once the oracle has been asked for those that the file lacks."""
        if all(problem.answer is not None for problem in self.problems):
            return self.problems
        with Answers(self.folder, self.problems) as answers:
            answers.check_kept(sampled)
            if answers.missing():
                self._answer(self._writers.answers(), answers)
            filled, unusable = answers.fill(self.problems)
        self._refused += unusable
        return filled

    def _answer(self, writer: Writer, answers: Answers) -> None:
        """Has the missing answers written, and gives the oracle's memory back before the other models are loaded."""
        refusals = Refusals(stops=self._stops)
        with Progress(
            "Answers",
            problems=answers.num_needed,
            done=answers.num_written,
            tokens_of_problem=self.recipe.oracle_max_tokens,
            count_tokens=lambda: writer.num_tokens,
            visible=self._shows,
        ) as progress:
            for entries in writer.write(answers.missing(), refusals, progress.tick):
                answers.append(entries)
                progress.ended(tokens=sum(len(entry["token_ids"]) for entry in entries))
        writer.close()
        self._refused += refusals.found

    def _sample(self, writer: Writer, journal: Journal, left: Sequence[Problem]) -> None:
        refusals = Refusals(stops=self._stops)
        with Progress(
            "Samples",
            problems=len(left) + len(journal.done),
            done=len(journal.done),
            tokens_of_problem=self.recipe.n * self.recipe.max_tokens,
            count_tokens=lambda: writer.num_tokens,
            visible=self._shows,
        ) as progress:
            for samples in writer.write(left, refusals, progress.tick):
                journal.append(samples)
                progress.ended(
                    tokens=sum(len(sample["token_ids"]) for sample in samples),
                    samples=len(samples),
                    accepted=sum(sample["accepted"] for sample in samples),
                )
        self._refused += refusals.found

    def _write_data(self, journal: Journal) -> Tally:
        """The accepted samples in the problems' order, whatever order they were made in."""
        tally = Tally()
        kept: list[tuple[int, int, str]] = []
        for sample in journal.samples():
            tally.add(sample)
            if sample["accepted"]:
                kept.append((sample["line"], sample["sample"], json.dumps(sample, ensure_ascii=False)))
        write_whole(self.folder / DATA, "".join(f"{content}\n" for _, _, content in sorted(kept)))
        return tally
