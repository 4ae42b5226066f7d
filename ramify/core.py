"""The engine: requests in, steps, outputs out. Knows no thread, no socket, no progress bar; drivers call `step`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ramify.errors import InvalidInputError
from ramify.metrics import EngineMetrics, IterationStats
from ramify.outputs import FinishReason, RequestOutput
from ramify.plan import Draw, Plan, StepResult
from ramify.request import Request
from ramify.sampling_params import SamplingParams
from ramify.scheduler import Schedule, Scheduler
from ramify.search.group import Candidate, Group
from ramify.text.stream import TextStream


class Device(Protocol):
    """What runs a plan: the real device step, or a fake one in tests."""

    def run(self, plan: Plan) -> StepResult: ...


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
        make_text: Callable[[SamplingParams], TextStream],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.make_text = make_text
        self.clock = clock
        self.metrics = EngineMetrics()
        self.last_step = IterationStats()  # what the latest step did
        self._groups: dict[str, Group] = {}
        self._num_arrived = 0

    # -- requests --------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queues a request, or raises InvalidInputError if it can never be scheduled; nothing is kept then."""
        if request.request_id in self._groups:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        self.scheduler.check_fits(request)
        params = request.sampling_params
        request.arrival_time = self.clock()
        self._groups[request.request_id] = Group(
            request,
            seed=params.seed if params.seed is not None else request_seed(self.seed, self._num_arrived),
            longest_output=self.scheduler.longest_output(request.root),
            eos_token_ids=self.eos_token_ids,
            make_text=lambda: self.make_text(params),
        )
        self._num_arrived += 1
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in whatever state it is and frees its blocks at once; None if it is not there any more."""
        group = self._groups.get(request_id)
        return None if group is None else self._stop(group, FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Decide, compute, record. Returns the outputs that are due."""
        self.last_step = IterationStats(timestamp=self.clock())
        schedule = self.scheduler.schedule()
        plan = self._plan(schedule)
        try:
            result = self.device.run(plan)
        except BaseException:
            self._abandon()
            raise
        return self._record(schedule, plan, result)

    def _plan(self, schedule: Schedule) -> Plan:
        now = self.last_step.timestamp
        draws = []
        for item in schedule.sequences:
            sequence = item.sequence
            group = self._groups[sequence.request_id or ""]
            if group.metrics.first_scheduled_time is None:
                group.metrics = replace(group.metrics, first_scheduled_time=now)
                self.last_step.record_queue_time(now - group.metrics.arrival_time)
            if not item.caught_up:
                continue
            chunks = tuple(range(item.first_chunk, item.first_chunk + len(sequence.tracks)))
            position = len(sequence.output_token_ids)
            for child in group.children_of(sequence):
                draws.append(
                    Draw(
                        request_id=group.request.request_id,
                        seq_id=sequence.seq_id,
                        child=child,
                        position=position,
                        seed=group.seed,
                        chunks=chunks,
                        params=group.params,
                        end_token_ids=group.end_token_ids,
                    )
                )
        return Plan(
            tuple(schedule.chunks),
            tuple(draws),
            tuple(schedule.copies),
            tuple(schedule.swaps_out),
            tuple(schedule.swaps_in),
            tuple(schedule.shared),
        )

    def _record(self, schedule: Schedule, plan: Plan, result: StepResult) -> list[RequestOutput]:
        now = self.clock()
        self._count(schedule)
        drawn: dict[str, list[Candidate]] = {}
        for index, draw in enumerate(plan.draws):
            candidate = Candidate(draw.seq_id, draw.child, result.token_ids[index], result.logprobs[index])
            drawn.setdefault(draw.request_id, []).append(candidate)
        faults = {plan.draws[index].request_id: fault for index, fault in result.faults.items()}
        outputs = []
        for request_id, candidates in drawn.items():
            group = self._groups[request_id]
            if request_id in faults:
                outputs.append(self._stop(group, FinishReason.ERROR, faults[request_id]))
                continue
            if group.metrics.first_token_time is None:
                group.metrics = replace(group.metrics, first_token_time=now)
                self.last_step.record_first_token(now - group.metrics.arrival_time)
            self._advance(group, candidates, now)
            due = self._output(group)
            if due is not None:
                outputs.append(due)
        self.metrics.add(self.last_step, sum(manager.num_in_use for manager in self.scheduler.managers))
        return outputs

    def _advance(self, group: Group, candidates: list[Candidate], now: float) -> None:
        changes = group.advance(candidates, now)
        self.last_step.num_generation_tokens += len(candidates)
        self.last_step.inter_token_latencies += changes.latencies
        for parent, child in changes.forks:
            for source, target in zip(parent.tracks, child.tracks, strict=True):
                self.scheduler.managers[source.model].fork(source.key, target.key)
        for sequence in changes.ended:
            self.scheduler.remove(sequence)
        self.scheduler.adopt(child for _, child in changes.forks if not child.is_finished())

    # -- ends ------------------------------------------------------------------------------------------------

    def _output(self, group: Group) -> RequestOutput | None:
        if group.finished:
            now = self.clock()
            group.metrics = replace(group.metrics, finished_time=now)
            del self._groups[group.request.request_id]
            group.observe(self.last_step, now)
        return group.output()

    def _stop(self, group: Group, reason: FinishReason, error: str | None = None) -> RequestOutput:
        for sequence in group.stop_all(reason, error):
            self.scheduler.remove(sequence)
        output = self._output(group)
        assert output is not None, "a finished group always has an output"
        return output

    def _abandon(self) -> None:
        """A step broke off: what it should have computed is counted on, so nothing of it may stay."""
        for group in list(self._groups.values()):
            self._stop(group, FinishReason.ABORT)
        self.reset_prefix_cache()

    # -- state -----------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones; running requests go on undisturbed."""
        for manager in self.scheduler.managers:
            manager.reset_prefix_cache()

    def stats(self) -> dict[str, int]:
        managers = self.scheduler.managers
        return {
            **self.metrics.as_dict(),
            "blocks_total": sum(manager.num_blocks for manager in managers),
            "blocks_in_use": sum(manager.num_in_use for manager in managers),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
        }

    def _count(self, schedule: Schedule) -> None:
        step = self.last_step
        step.num_preempted = schedule.num_preempted
        for request_id, cached in schedule.num_cached_tokens.items():
            self._groups[request_id].num_cached_tokens = cached
            step.num_cached_tokens += cached
        for item in schedule.sequences:
            for chunk, track in zip(schedule.chunks[item.first_chunk :], item.sequence.tracks, strict=False):
                prompt = len(track.prompt_token_ids)
                if chunk.start < prompt:
                    step.num_prompt_tokens += min(chunk.end, prompt) - chunk.start


def request_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that brought none: a fixed function of the engine's seed and its place in the queue."""
    digest = hashlib.blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
