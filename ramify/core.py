"""The engine: requests in, steps, outputs out. Knows no thread, no socket, no progress bar; drivers call `step`."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Protocol

from ramify.errors import InvalidInputError
from ramify.metrics import EngineMetrics, IterationStats
from ramify.outputs import FinishReason, RequestOutput
from ramify.plan import NOT_FINITE, Draw, Plan, PromptReport, StepResult, Ticket, quickly
from ramify.request import Request
from ramify.sampling_params import SamplingParams
from ramify.schedule import Schedule, ScheduledSequence
from ramify.scheduler import Scheduler
from ramify.search.advance import Candidate
from ramify.search.group import Group
from ramify.search.reports import Decode
from ramify.sequence import Sequence
from ramify.text.stream import TextStream

EncodeWords = Callable[[Items[str]], tuple[tuple[int, ...], ...]]


class Device(Protocol):
    """What runs plans, in the order they are launched: the real device step, or a fake one in tests."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a plan may be launched before the result of the one before it is known.

        Tokens that the host does not know yet are PENDING in it; the device has them.
        """
        ...

    def launch(self, plan: Plan) -> Ticket: ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: what it was scheduled for, whose draws it makes, and where its result will be."""

    schedule: Schedule
    plan: Plan
    drawn_from: list[Sequence]  # for every draw, the sequence it continues
    only_read: list[Sequence]  # whose prompt is all that was asked about
    ticket: Ticket


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        *,
        seed: int,
        eos_token_ids: frozenset[int],
        make_text: Callable[[SamplingParams], TextStream],
        encode_words: EncodeWords | None = None,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.make_text = make_text
        self.encode_words = encode_words
        self.decode = decode
        self.clock = clock
        self.metrics = EngineMetrics()
        self.last_step = IterationStats()  # what the latest step did
        self._groups: dict[str, Group] = {}
        self._under_way: Launched | None = None
        self._num_arrived = 0

    # -- requests --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that cannot be served; asks, and does nothing."""
        if request.request_id in self._groups:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        if request.sampling_params.bad_words and self.encode_words is None:
            raise InvalidInputError("bad_words need a tokenizer, and this model has none: use logit_bias")
        self.scheduler.check_fits(request)

    def add_request(self, request: Request) -> None:
        """Queues a request, or raises InvalidInputError if it can never be scheduled; nothing is kept then."""
        self.check(request)
        params = request.sampling_params
        request.arrival_time = self.clock()
        self._groups[request.request_id] = Group(
            request,
            seed=params.seed if params.seed is not None else request_seed(self.seed, self._num_arrived),
            longest_output=self.scheduler.longest_output(request.root),
            eos_token_ids=self.eos_token_ids,
            make_text=lambda: self.make_text(params),
            bad_words=self.encode_words(params.bad_words) if params.bad_words and self.encode_words else (),
            decode=self.decode,
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
        """Decide, compute, record. Returns the outputs that are due.

        Where the device can, the step after is decided and launched before this one is recorded, so that the host works
        while the device does. What that step computes for a sequence that turns out to have ended is dropped.
        """
        self.last_step = IterationStats(timestamp=self.clock())
        try:
            now, self._under_way = self._under_way or self._launch(self.scheduler.schedule()), None
            if self.device.runs_ahead and now.plan.chunks and not now.schedule.is_short:
                self._expect(now)
                ahead = self.scheduler.schedule(may_preempt=False)
                self._under_way = self._launch(ahead) if ahead.chunks else None
            result = now.ticket()
        except BaseException:
            self._abandon()
            raise
        return self._record(now, result)

    def _launch(self, schedule: Schedule) -> Launched:
        plan, drawn_from, only_read = self._plan(schedule)
        return Launched(schedule, plan, drawn_from, only_read, self.device.launch(plan))

    def _expect(self, launched: Launched) -> None:
        """Before the result is known: one more token for those that just go on, a pause for those that may change."""
        for item in launched.schedule.sequences:
            sequence = item.sequence
            if not item.caught_up or sequence.is_finished():
                continue
            group = self._groups[sequence.request_id or ""]
            length = len(sequence.data.output_token_ids)
            forks = not length and group.params.num_samples > 1
            if group.may_run_ahead and not forks and length + 1 < group.ends.longest_output:
                sequence.num_pending = 1
            else:
                sequence.is_blocked = True

    def _plan(self, schedule: Schedule) -> tuple[Plan, list[Sequence], list[Sequence]]:
        now = self.last_step.timestamp
        draws: list[Draw] = []
        drawn_from: list[Sequence] = []
        only_read: list[Sequence] = []
        reports: list[PromptReport] = []
        for item in schedule.sequences:
            sequence = item.sequence
            group = self._groups[sequence.request_id or ""]
            if group.metrics.first_scheduled_time is None:
                group.metrics = replace(group.metrics, first_scheduled_time=now)
                self.last_step.record_queue_time(now - group.metrics.arrival_time)
            if group.asks_about_prompt:
                reports += _prompt_report(group, schedule, item)
            if not item.caught_up:
                continue
            if group.ends.longest_output == 0:
                only_read.append(sequence)
                continue
            output, first = sequence.data.output_token_ids, item.first_chunk
            position = len(output) + sequence.num_pending
            chunks = (first,) if len(sequence.tracks) == 1 else tuple(range(first, first + len(sequence.tracks)))
            parent = sequence.child
            for child in (parent,) if position else group.children_of(sequence):
                fields = (sequence.request_id, parent, child, position, group.seed, chunks, group.rules, output)
                draws.append(quickly(Draw, fields))
                drawn_from.append(sequence)
        plan = Plan(
            tuple(schedule.chunks),
            tuple(draws),
            tuple(schedule.copies),
            tuple(schedule.swaps_out),
            tuple(schedule.swaps_in),
            tuple(schedule.late_copies),
            tuple(schedule.shared),
            tuple(reports),
        )
        return plan, drawn_from, only_read

    def _record(self, launched: Launched, result: StepResult) -> list[RequestOutput]:
        now = self.clock()
        schedule, plan = launched.schedule, launched.plan
        for item in schedule.sequences:
            item.sequence.num_pending, item.sequence.is_blocked = 0, False
        self._count(schedule)
        outputs = self._record_prompts(launched, result)
        drawn: dict[str, list[Candidate]] = {}
        faults: dict[str, str] = {}
        for index, draw in enumerate(plan.draws):
            sequence = launched.drawn_from[index]
            if sequence.is_finished():
                continue  # it ended while this step was under way
            group = self._groups[draw.request_id]
            if group.children_go_alone and draw.position and not result.faults:
                outputs += self._go_on(group, sequence, _candidate(draw, index, result), now)
                continue
            candidates = drawn.setdefault(draw.request_id, [])
            if index in result.faults:
                faults.setdefault(draw.request_id, result.faults[index])
            elif index in result.expansions:
                candidates += [Candidate(draw.parent, draw.child, *item) for item in result.expansions[index]]
            else:
                candidates.append(_candidate(draw, index, result))
        for request_id, candidates in drawn.items():
            group = self._groups[request_id]
            if request_id in faults:
                outputs.append(self._stop(group, FinishReason.ERROR, faults[request_id]))
                continue
            if group.metrics.first_token_time is None:
                group.metrics = replace(group.metrics, first_token_time=now)
                self.last_step.record_first_token(now - group.metrics.arrival_time)
            self._advance(group, candidates, now)
            outputs += self._due(group)
        self.metrics.add(self.last_step, sum(manager.num_in_use for manager in self.scheduler.managers))
        return outputs

    def _record_prompts(self, launched: Launched, result: StepResult) -> list[RequestOutput]:
        """Files what was reported of prompts; a request that wanted nothing more ends here."""
        outputs: list[RequestOutput] = []
        for asked, reports in zip(launched.plan.prompt_reports, result.prompts, strict=True):
            group = self._groups.get(asked.request_id)
            if group is None:
                continue
            if any(math.isnan(item.logprob) for item in reports):
                outputs.append(self._stop(group, FinishReason.ERROR, NOT_FINITE))
                continue
            first = launched.plan.chunks[asked.chunk].start + asked.first
            group.prompt_reports += reports[len(group.prompt_reports) - first :]
        for sequence in launched.only_read:
            group = self._groups.get(sequence.request_id or "")
            if group is not None:
                group.finish_unread()
                self.scheduler.remove(sequence)
                outputs += self._due(group)
        return outputs

    def _go_on(self, group: Group, sequence: Sequence, token: Candidate, now: float) -> list[RequestOutput]:
        """What `_advance` comes to where children do not look at each other: most of them, in most steps."""
        latency, ended = group.go_on(token, now)
        self.last_step.num_generation_tokens += 1
        if latency is not None:
            self.last_step.inter_token_latencies.append(latency)
        if ended:
            self.scheduler.remove(sequence)
        return self._due(group) if ended or group.is_streamed else []

    def _advance(self, group: Group, candidates: list[Candidate], now: float) -> None:
        changes = group.advance(candidates, now)
        self.last_step.num_generation_tokens += len(changes.latencies)
        self.last_step.inter_token_latencies += [item for item in changes.latencies if item is not None]
        self.scheduler.adopt(changes.forks)
        for sequence in changes.left:
            self.scheduler.remove(sequence)

    # -- ends ------------------------------------------------------------------------------------------------

    def _due(self, group: Group) -> list[RequestOutput]:
        due = self._output(group)
        return [] if due is None else [due]

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
        self._under_way = None
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
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
        }

    def _count(self, schedule: Schedule) -> None:
        step = self.last_step
        step.num_preempted = schedule.num_preempted
        for request_id, cached in schedule.num_cached_tokens.items():
            if request_id in self._groups:
                self._groups[request_id].num_cached_tokens = sum(cached)
            for role, count in enumerate(cached):
                step.tracks[role].num_cached_tokens += count
        for chunk, track in zip(schedule.chunks, schedule.tracks, strict=True):
            counts = step.tracks[track.role]
            counts.num_positions += len(chunk.token_ids)
            prompt = len(track.prompt_token_ids)
            if chunk.start < prompt:
                counts.num_prompt_tokens += min(chunk.end, prompt) - chunk.start


def _candidate(draw: Draw, index: int, result: StepResult) -> Candidate:
    report = result.reports.get(index) if result.reports else None
    mixture = result.mixtures.get(index) if result.mixtures else None
    fields = (draw.parent, draw.child, result.token_ids[index], result.logprobs[index], 0.0, report, mixture)
    return quickly(Candidate, fields)


def _prompt_report(group: Group, schedule: Schedule, item: ScheduledSequence) -> list[PromptReport]:
    """What this step can tell about prompt tokens not told about yet; each is told by the row before it."""
    prompt = group.request.prompt_token_ids
    chunk = schedule.chunks[item.first_chunk]
    # What lies before the chunk was asked for by an earlier step, which may still be under way.
    told = max(len(group.prompt_reports), chunk.start)
    last = min(chunk.end, len(prompt) - 1)
    if item.sequence.child != 0 or told >= last or group.params.prompt_logprobs is None:
        return []
    return [
        PromptReport(
            group.request.request_id,
            item.first_chunk,
            told - chunk.start,
            prompt[told + 1 : last + 1],
            group.params.prompt_logprobs,
        )
    ]


def request_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that brought none: a fixed function of the engine's seed and its place in the queue."""
    digest = hashlib.blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
