"""The device's part of a step: runners, mixture, sampler; a Plan down, a StepResult up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.plan import Plan, StepResult, Ticket, TokenReport
from ramify.runner import Runner
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from ramify.sampling.reports import report

PROMPT_ROWS_AT_ONCE = 64  # what prompt logprobs need of the vocabulary at a time


class DeviceStep:
    """One runner per model. Where draws have two tracks, the first is the teacher's, the second the student's."""

    def __init__(
        self,
        runners: Sequence[Runner],
        logprobs_mode: LogprobsMode = "raw",
        mixer: Mixer | None = None,
    ) -> None:
        self.runners = runners
        self.sampler = Sampler(logprobs_mode, mixer)

    runs_ahead = False

    def launch(self, plan: Plan) -> Ticket:
        result = self.run(plan)
        return lambda: result

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        first, last = [0] * len(plan.chunks), [0] * len(plan.chunks)  # rows of each chunk among its model's
        models = []
        for model, runner in enumerate(self.runners):
            work = plan.of_model(model)
            total = 0
            for place, chunk in zip(work.places, work.chunks, strict=True):
                first[place] = total
                total += len(chunk.token_ids)
                last[place] = total - 1
            drawn = sorted({place for item in plan.draws for place in item.chunks if plan.chunks[place].model == model})
            wanted = {last[place] for place in drawn}
            if model == 0:
                for asked in plan.prompt_reports:
                    row = first[asked.chunk] + asked.first
                    wanted.update(range(row, row + len(asked.targets)))
            rows = sorted(wanted)
            models.append(_Computed(runner, runner.forward(work, rows), rows, drawn))
        prompts = prompt_reports(plan, first, models[0].logits)
        if not plan.draws:
            return StepResult([], [], prompts=prompts)
        result = self.sampler.sample(_sources(plan, models, last), plan.draws)
        result.prompts.extend(prompts)
        return result


class _Computed:
    """The hidden states (len(rows), hidden) that a model's step gave after some rows, and the chunks drawn from."""

    def __init__(self, runner: Runner, hidden: Tensor, rows: Sequence[int], drawn: Sequence[int]) -> None:
        self.drawn = drawn
        self._runner = runner
        self._hidden = hidden
        self._place = {row: place for place, row in enumerate(rows)}

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Float32 logits (len(rows), vocabulary) after these rows; rows ascend."""
        hidden = self._hidden
        if len(rows) < len(hidden):
            hidden = hidden[torch.tensor([self._place[row] for row in rows], device=hidden.device)]
        return self._runner.logits(hidden)


def _sources(plan: Plan, models: Sequence[_Computed], last: Sequence[int]) -> list[Source]:
    """For each track of the draws: the logits they are from. Two tracks of one model share a product."""
    logits, row_of = [], {}
    for computed in models:
        row_of.update({place: row for row, place in enumerate(computed.drawn)})
        logits.append(computed.logits([last[place] for place in computed.drawn]))
    return [
        Source(logits[plan.chunks[places[0]].model], [row_of[place] for place in places])
        for places in zip(*(item.chunks for item in plan.draws), strict=True)
    ]


def prompt_reports(
    plan: Plan, first_rows: Sequence[int], logits_after: Callable[[Sequence[int]], Tensor]
) -> list[list[TokenReport]]:
    """What is asked about prompts, a few rows at a time: a prompt's logits may be larger than the model.

    first_rows: of each chunk; logits_after gives the logits after some rows of the step.
    """
    told = []
    for asked in plan.prompt_reports:
        first = first_rows[asked.chunk] + asked.first
        reports: list[TokenReport] = []
        for start in range(0, len(asked.targets), PROMPT_ROWS_AT_ONCE):
            targets = asked.targets[start : start + PROMPT_ROWS_AT_ONCE]
            rows = range(first + start, first + start + len(targets))
            logits = logits_after(rows)
            reports += [
                row[0] for row in report(logits, torch.tensor(targets, device=logits.device)[:, None], asked.num_top)
            ]
        told.append(reports)
    return told
