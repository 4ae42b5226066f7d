"""The device's part of a step: runner, sampler; a Plan down, a StepResult up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.plan import Plan, StepResult, Ticket, TokenReport
from ramify.runner import Runner
from ramify.sampling.pipeline import Sampler
from ramify.sampling.reports import report

PROMPT_ROWS_AT_ONCE = 64  # what prompt logprobs need of the vocabulary at a time


class DeviceStep:
    def __init__(self, runner: Runner, logprobs_mode: LogprobsMode = "raw") -> None:
        self.runner = runner
        self.sampler = Sampler(logprobs_mode)

    runs_ahead = False

    def launch(self, plan: Plan) -> Ticket:
        result = self.run(plan)
        return lambda: result

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        hidden = self.runner.forward(plan)
        ends = list(accumulate(len(chunk.token_ids) for chunk in plan.chunks))  # one past each chunk's last row
        prompts = prompt_reports(plan, [0, *ends], partial(self.runner.logits, hidden))
        if not plan.draws:
            return StepResult([], [], prompts=prompts)
        chunks = sorted({item.chunks[0] for item in plan.draws})
        logits = self.runner.logits(hidden, [ends[chunk] - 1 for chunk in chunks])
        row_of = {chunk: row for row, chunk in enumerate(chunks)}
        result = self.sampler.sample(logits, [row_of[item.chunks[0]] for item in plan.draws], plan.draws)
        result.prompts.extend(prompts)
        return result


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
