"""Rollouts: the `rollout_func` of TRL's GRPOTrainer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ramify.integrations.trl.draws import draw, params_of, token_ids_of
from ramify.integrations.trl.policy import policy_weights
from ramify.llm import LLM


class Rollouts:
    """Before each round the trainer's weights are streamed into the engine; a prompt's samples are one request.

    How samples are drawn is what the trainer's arguments say (temperature, top_p, top_k, min_p, repetition_penalty,
    max_completion_length, generation_kwargs); `fields` are further fields of SamplingParams. With `sleep_level`, the
    engine sleeps while the trainer trains, and gives it its memory.
    """

    def __init__(self, llm: LLM, *, sleep_level: int | None = None, **fields: Any) -> None:
        self.llm = llm
        self.sleep_level = sleep_level
        self.seconds_syncing = 0.0
        self.seconds_drawing = 0.0
        self._fields = fields
        self._step: int | None = None  # of the trainer, whose weights the engine has

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """One completion for each entry of `prompts`, as TRL asks for them: repeated, once for each."""
        params = params_of(trainer.args, self._fields)
        prompt_ids = token_ids_of(
            prompts,
            trainer.processing_class,
            tools=getattr(trainer, "tools", None),
            chat_template=getattr(trainer, "chat_template", None),
            **(getattr(trainer, "chat_template_kwargs", None) or {}),
        )
        if self.sleep_level is not None:
            self.llm.wake_up()
        self.sync(trainer)
        begun = time.monotonic()
        drawn = draw(self.llm, prompt_ids, params)
        self.seconds_drawing += time.monotonic() - begun
        if self.sleep_level is not None:
            self.llm.sleep(self.sleep_level)
            self._step = None if self.sleep_level > 1 else self._step
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [each.token_ids for each in drawn],
            "logprobs": [each.logprobs for each in drawn],
        }

    def sync(self, trainer: Any) -> None:
        """The engine's weights become the trainer's, unless they are: a trainer may draw several times in a step."""
        if self._step == trainer.state.global_step:
            return
        begun = time.monotonic()
        with policy_weights(trainer.accelerator.unwrap_model(trainer.model)) as weights:
            self.llm.load_weights(weights)
        self._step = trainer.state.global_step
        self.seconds_syncing += time.monotonic() - begun
