"""An engine for TRL's asynchronous GRPO trainer: a worker that draws and scores, and the way that weights take to it.

    worker = RolloutWorker(llm, dataset, reward_funcs, tokenizer, num_generations=8, params=SamplingParams(…))
    AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=worker.weight_transfer)

The worker is a thread of this process. While weights change, no round runs: samples are of one version of the policy,
and say which.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from ramify import validation as check
from ramify.integrations.trl.draws import Drawn, check_logprobs, draw, token_ids_of
from ramify.llm import LLM
from ramify.sampling_params import SamplingParams

SECONDS_BETWEEN_LOOKS = 0.1  # at whether to stop, while the trainer has enough samples
LEAST_DEVIATION = 1e-8  # of rewards, so that samples that are all alike have no advantage

RewardFunction = Callable[..., Sequence[float | None]]


class WeightTransfer:
    """TRL's WeightTransferProtocol. Between `pause` and `resume` nobody draws."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.drawing = threading.Lock()  # held by whoever draws, or changes weights
        self._is_paused = False

    def init_weight_transfer(self) -> None:
        """There is nothing to set up: both are in one process."""

    def pause(self) -> None:
        """Waits for the end of the round that is under way."""
        self.drawing.acquire()
        self._is_paused = True

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._llm.load_weights((name, tensor.detach()) for name, tensor in iterator)

    def resume(self) -> None:
        """What is not paused stays as it is: the lock may be that of a round."""
        if self._is_paused:
            self._is_paused = False
            self.drawing.release()

    def destroy(self) -> None:
        self.resume()


class RolloutWorker:
    """TRL's RolloutWorkerProtocol, over the rows of a dataset, again and again, until it is stopped.

    Rows have a `prompt`, a text or a conversation; their other columns go to the reward functions, as TRL's own worker
    hands them over. `prompts_at_once` prompts are a round, each with `num_generations` samples.
    """

    def __init__(
        self,
        llm: LLM,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        processing_class: Any,
        *,
        num_generations: int = 8,
        prompts_at_once: int = 8,
        params: SamplingParams | None = None,
        queue_maxsize: int = 1024,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self._sample = RolloutSample
        self.params = SamplingParams(max_tokens=256) if params is None else params
        check_logprobs(llm, self.params)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(check.integer("queue_maxsize", queue_maxsize, 1))
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.weight_transfer = WeightTransfer(llm)
        self._llm = llm
        self._rows = list(dataset)
        self._rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._tokenizer = processing_class
        self._num_generations = check.integer("num_generations", num_generations, 2)
        self._prompts_at_once = check.integer("prompts_at_once", prompts_at_once, 1)
        self._chat_options = dict(chat_template_kwargs or {})
        self._version = 0
        self._num_groups = 0
        self._last_sign = time.monotonic()
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the protocol ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ramify-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Also between `pause` and `resume`: a trainer that fails there, or is interrupted, stops the worker first."""
        self._stopping.set()
        self.weight_transfer.resume()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises if the thread has failed, has ended, or has not been heard of for so long."""
        if self._error is not None:
            raise RuntimeError(f"the rollout worker failed: {self._error}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the rollout worker is not running")
        silent = time.monotonic() - self._last_sign
        if silent > stale_after_s:
            raise RuntimeError(f"the rollout worker has been silent for {silent:.0f} s, more than {stale_after_s:g}")

    # -- rounds ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            place = 0
            while not self._stopping.is_set():
                rows = [self._rows[(place + index) % len(self._rows)] for index in range(self._prompts_at_once)]
                place += len(rows)
                for sample in self._round(rows):
                    self._hand_over(sample)
        except BaseException as error:
            self._error = error

    def _round(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        prompt_ids = token_ids_of([row["prompt"] for row in rows], self._tokenizer, **self._chat_options)
        count = self._num_generations
        begun = time.monotonic()
        with self.weight_transfer.drawing:
            if self._stopping.is_set():
                return  # the weights may be of two kinds
            version = self._version
            drawn = draw(self._llm, [ids for ids in prompt_ids for _ in range(count)], self.params)
        seconds = max(time.monotonic() - begun, 1e-9)
        num_tokens = sum(len(each.token_ids) for each in drawn)
        self.metrics_queue.put({"rollout/seconds": seconds, "rollout/tokens_per_second": num_tokens / seconds})
        for index, (row, ids) in enumerate(zip(rows, prompt_ids, strict=True)):
            yield from self._scored(row, ids, drawn[index * count : (index + 1) * count], version)

    def _scored(self, row: Mapping[str, Any], prompt_ids: list[int], drawn: Sequence[Drawn], version: int) -> list[Any]:
        """The samples of one prompt, each with how much better than its siblings it is."""
        texts = self._tokenizer.batch_decode([each.token_ids for each in drawn], skip_special_tokens=True)
        is_chat = not isinstance(row["prompt"], str)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
        columns = {name: [value] * len(drawn) for name, value in row.items() if name not in ("prompt", "completion")}
        by_function = [
            function(
                prompts=[row["prompt"]] * len(drawn),
                completions=completions,
                completion_ids=[each.token_ids for each in drawn],
                **columns,
            )
            for function in self._rewards
        ]
        rewards = [_added_up(own) for own in zip(*by_function, strict=True)]
        advantages = _advantages(rewards)
        group = self._num_groups
        self._num_groups += 1
        return [
            self._sample(
                prompt=row["prompt"],
                completion=completion,
                input_ids=np.asarray([*prompt_ids, *each.token_ids], dtype=np.int64),
                completion_mask=np.asarray([0] * len(prompt_ids) + [1] * len(each.token_ids), dtype=np.int64),
                old_log_probs=np.asarray([0.0] * len(prompt_ids) + each.logprobs, dtype=np.float32),
                advantage=advantage,
                model_version=version,
                group_id=group,
                metrics={"reward": reward},
                enqueued_at=time.time(),
            )
            for completion, each, reward, advantage in zip(completions, drawn, rewards, advantages, strict=True)
        ]

    def _hand_over(self, sample: Any) -> None:
        while not self._stopping.is_set():
            self._last_sign = time.monotonic()
            try:
                self.rollout_buffer.put(sample, timeout=SECONDS_BETWEEN_LOOKS)
                return
            except queue.Full:
                continue


def _added_up(rewards: Iterable[float | None]) -> float:
    """NaN where no function could tell."""
    known = [float(reward) for reward in rewards if reward is not None and not math.isnan(reward)]
    return math.fsum(known) if known else math.nan


def _advantages(rewards: Sequence[float]) -> list[float]:
    """By how many standard deviations each is better than its siblings; 0 where no reward is known."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    if not known:
        return [0.0] * len(rewards)
    mean, deviation = fmean(known), pstdev(known)
    return [0.0 if math.isnan(reward) else (reward - mean) / (deviation + LEAST_DEVIATION) for reward in rewards]
