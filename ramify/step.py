"""The device's part of a step: runner, sampler; a Plan down, a StepResult up."""

from __future__ import annotations

from ramify.plan import Plan, StepResult
from ramify.runner import Runner
from ramify.sampling.pipeline import sample


class DeviceStep:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self, plan: Plan) -> StepResult:
        drawn_chunks = sorted({item.chunks[0] for item in plan.draws})
        logits = self.runner.run(plan, drawn_chunks)
        if not plan.draws:
            return StepResult([], [])
        row_of = {chunk: row for row, chunk in enumerate(drawn_chunks)}
        drawn = sample(logits, [row_of[item.chunks[0]] for item in plan.draws], plan.draws)
        faults = {
            index: "the model's logits are not finite (NaN or infinity)"
            for index, sound in enumerate(drawn.sound.tolist())
            if not sound
        }
        return StepResult(drawn.token_ids.tolist(), drawn.logprobs.tolist(), faults)
