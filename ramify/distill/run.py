"""Run: problems to samples, going on where the last run stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ramify.disk import write_whole
from ramify.distill.journal import Journal
from ramify.distill.problems import Malformed, Problem
from ramify.distill.recipe import Recipe
from ramify.distill.report import write_report
from ramify.distill.samples import as_samples, prompts_of
from ramify.errors import InvalidInputError

if TYPE_CHECKING:
    from ramify.engine.request import Request
    from ramify.optimal import OptimalSampling

DATA, REPORT = "data.jsonl", "report.html"


@dataclass(frozen=True, slots=True)
class Summary:
    problems: int  # with all their samples, from this run and earlier ones
    sampled_now: int
    samples: int
    accepted: int
    refused: tuple[Malformed, ...]  # problems whose prompts the models cannot take


class Run:
    """Fills one folder with samples. `load` loads the models, if anything is left to do."""

    def __init__(
        self,
        recipe: Recipe,
        problems: Sequence[Problem],
        folder: Path,
        load: Callable[[], OptimalSampling],
        *,
        stops_at_refused: bool = True,
        show_progress: bool = False,
    ) -> None:
        self.recipe = recipe
        self.problems = problems
        self.folder = folder
        self._load = load
        self._stops = stops_at_refused
        self._shows = show_progress
        self._refused: list[Malformed] = []

    def __call__(self) -> Summary:
        """Samples what is missing, then writes the accepted samples and the report."""
        with Journal(self.folder, self.recipe, self.problems) as journal:
            before = len(journal.done)
            left = [problem for problem in self.problems if problem.line not in journal.done]
            if left:
                self._sample(self._load(), journal, left)
            counts = self._write_data(journal)
            write_report(self.folder / REPORT, journal, self.recipe, len(self.problems))
            return Summary(
                len(journal.done), len(journal.done) - before, counts["all"], counts["accepted"], tuple(self._refused)
            )

    def _sample(self, sampler: OptimalSampling, journal: Journal, left: Sequence[Problem]) -> None:
        asked: dict[str, Problem] = {}
        # Twice what the engine runs at a time, so that it stays full while some of them end.
        most_at_once = max(2, -(-2 * sampler.config.scheduler_config.max_num_seqs // self.recipe.n))
        accepted = made = 0
        with tqdm(
            total=len(self.problems),
            initial=len(journal.done),
            desc="Problems",
            unit="problem",
            disable=not self._shows,
        ) as bar:
            for output in sampler.finish(self._requests(sampler, left, asked), most_at_once=most_at_once):
                samples = as_samples(asked.pop(output.request_id), output, self.recipe, sampler)
                journal.append(samples)
                made += len(samples)
                accepted += sum(sample["accepted"] for sample in samples)
                bar.set_postfix_str(f"{accepted / made:.0%} of samples accepted", refresh=False)
                bar.update()

    def _requests(
        self, sampler: OptimalSampling, left: Sequence[Problem], asked: dict[str, Problem]
    ) -> Iterator[Request]:
        for problem in left:
            params = self.recipe.sampling(self.recipe.problem_seed(problem.line, problem.digest))
            try:
                request = sampler.request(*prompts_of(problem, self.recipe), params)
            except InvalidInputError as error:
                refused = Malformed(problem.line, str(error))
                if self._stops:
                    raise InvalidInputError(f"the problem in {refused}") from None
                self._refused.append(refused)
                continue
            asked[request.request_id] = problem
            yield request

    def _write_data(self, journal: Journal) -> Counter[str]:
        """The accepted samples in the problems' order, whatever order they were made in."""
        counts: Counter[str] = Counter(all=0, accepted=0)
        kept: list[tuple[int, int, str]] = []
        for sample in journal.samples():
            counts["all"] += 1
            if sample["accepted"]:
                counts["accepted"] += 1
                kept.append((sample["line"], sample["sample"], json.dumps(sample, ensure_ascii=False)))
        write_whole(self.folder / DATA, "".join(f"{content}\n" for _, _, content in sorted(kept)))
        return counts
