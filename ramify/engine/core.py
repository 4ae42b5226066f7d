"""The engine: requests in, steps, outputs out. Knows no thread, no socket, no progress bar; drivers call `step`."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ramify.engine.capacity import Capacity
from ramify.engine.demands import Demands
from ramify.engine.kept import KeptPrefixes
from ramify.engine.metrics import EngineMetrics, IterationStats
from ramify.engine.plan import NOT_FINITE, Draw, Plan, PromptReport, Row, StepResult, Ticket, quickly
from ramify.engine.request import Request
from ramify.engine.schedule import GoingOn, Schedule
from ramify.engine.scheduler import Scheduler
from ramify.engine.search.advance import Candidates, Continuation
from ramify.engine.search.child import Child, Ledger, append_all
from ramify.engine.search.group import Group
from ramify.engine.search.logprob_rows import Decode
from ramify.engine.sequence import Sequence
from ramify.errors import InvalidInputError
from ramify.outputs import FinishReason, RequestOutput
from ramify.sampling_params import SamplingParams
from ramify.text.stream import TextStream

CACHE_FULL = "the cache has no room for this request"

EncodeWords = Callable[[Items[str]], tuple[tuple[int, ...], ...]]


class Device(Protocol):
    """What runs plans, in the order they are launched: the real device step, or a fake one in tests."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a plan may be launched before the result of the one before it is known.

        Tokens that the host does not know yet are PENDING in it; the device has them.
        """
        ...

    @property
    def looks_back(self) -> bool:
        """Whether it keeps what was drawn for controls that depend on it, where its kernels serve them."""
        ...

    def launch(self, plan: Plan) -> Ticket: ...

    def reset(self) -> None:
        """Forgets what earlier plans left, in whatever state a broken launch left it: all that comes is new."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: what it was scheduled for, what was asked of the device, and where its result will be."""

    schedule: Schedule
    plan: Plan
    drawing: list[Sequence]  # of each of the plan's own draws, the sequence that it continues
    ticket: Ticket

    @property
    def num_going_on(self) -> int:
        """Whose draws come before the plan's own in the result."""
        return 0 if self.plan.onward is None else len(self.plan.onward.members)

    def draws_one_by_one(self, result: StepResult) -> Iterator[tuple[int, Draw]]:
        """Draws that are recorded by themselves, with their places in the result: all of them if some failed."""
        going_on = self.schedule.going_on
        if going_on is not None:
            onward = going_on.onward
            for index in range(len(onward.members)) if result.faults else sorted(going_on.apart):
                yield index, onward.draw(index)
        yield from enumerate(self.plan.draws, start=self.num_going_on)


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
        self.capacity = Capacity(
            max_model_len=scheduler.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            block_size=scheduler.managers[0].block_size,
            num_blocks=tuple(manager.num_blocks for manager in scheduler.managers),
            has_words=encode_words is not None,
        )
        self.kept = KeptPrefixes(scheduler.managers)
        self.metrics = EngineMetrics()
        self.last_step = IterationStats()  # what the latest step did
        self._groups: dict[str, Group] = {}
        self._under_way: Launched | None = None
        self._num_arrived = 0
        # While an act changes requests, blocks and rows. Still true when the next begins: something broke that one off.
        self._is_torn = False

    # -- requests --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that cannot be served; asks, and does nothing."""
        if request.request_id in self._groups:
            raise InvalidInputError(f"request_id {request.request_id!r} is in use")
        self.capacity.check(request)

    def add_request(self, request: Request, ledger: Ledger | None = None) -> None:
        """Queues a request, or raises InvalidInputError if it can never be scheduled; nothing is kept then.

        Every token that one of its children takes is entered in the ledger, if there is one.
        """
        self._mend()
        self.check(request)
        params, number = request.sampling_params, self._num_arrived
        request.arrival_time = self.clock()
        demands = Demands(
            params,
            number=number,
            seed=params.seed if params.seed is not None else request_seed(self.seed, number),
            prompts=tuple(track.prompt_token_ids for track in request.root.tracks),
            eos_token_ids=self.eos_token_ids,
            bad_words=self._words(params.bad_words),
            breakers=frozenset(word[-1] for word in self._words([f"a{text}" for text in params.sequence_breakers])),
            longest_output=self.capacity.longest_output(request.root),
        )
        group = Group(request, demands, self.make_text(params), decode=self.decode, ledger=ledger)
        self._is_torn = True
        self._groups[request.request_id] = group
        self._num_arrived += 1
        self.scheduler.add(request)
        if request.begins_with is not None:
            group.prompt_reports += [None] * self.kept.begin(request.begins_with, request.root)
        self._is_torn = False

    def _words(self, words: Items[str] | None) -> tuple[tuple[int, ...], ...]:
        """As token ids, in each of their spellings; a model without a tokenizer has none."""
        return self.encode_words(words) if words and self.encode_words else ()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request in whatever state it is and frees its blocks at once; None if it is not there any more."""
        self._mend()
        group = self._groups.get(request_id)
        if group is None:
            return None
        self._is_torn = True
        output = self._stop(group, FinishReason.ABORT)
        self._is_torn = False
        return output

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Decide, compute, record. Returns the outputs that are due.

        Where the device can, the step after is decided and launched before this one is recorded, so that the host works
        while the device does. What that step computes for a sequence that turns out to have ended is dropped.

        All or nothing: whatever breaks a step off, at whatever line, ends every request, and the engine is as new.
        """
        self._mend()
        self._is_torn = True
        try:
            self.last_step = IterationStats(timestamp=self.clock())
            now, self._under_way = self._under_way or self._launch(self.scheduler.schedule()), None
            if self.device.runs_ahead and not now.schedule.is_empty and not now.schedule.is_short:
                self._expect(now)
                if self.scheduler.has_any_to_go_on():
                    ahead = self.scheduler.schedule(may_preempt=False)
                    self._under_way = None if ahead.is_empty else self._launch(ahead)
            outputs = self._record(now, now.ticket())
            if now.schedule.is_empty and self.scheduler.waiting and not self.scheduler.running:
                outputs.append(self._give_up(self.scheduler.waiting[0].sequences[0]))
        except BaseException:
            with suppress(Exception):  # the caller hears what broke the step; the next act tries this again
                self.reset()
            raise
        self._is_torn = False
        return outputs

    def _launch(self, schedule: Schedule) -> Launched:
        plan, drawing = self._plan(schedule)
        return Launched(schedule, plan, drawing, self.device.launch(plan))

    def _expect(self, launched: Launched) -> None:
        """Before the result is known: one more token for those that just go on, a pause for those that may change."""
        by_kernels = self.device.looks_back
        self.scheduler.stop_those_at_their_end()
        drawn = zip(launched.plan.draws, launched.drawing, strict=True)
        for number, (draw, sequence) in enumerate(drawn, start=launched.num_going_on):
            if sequence.is_finished():
                continue
            demands = draw.demands
            forks = not draw.position and demands.num_first_draws > 1
            may_run_ahead = demands.may_run_ahead_by_kernels if by_kernels else demands.may_run_ahead
            if may_run_ahead and not forks and draw.position + 1 < demands.longest_output:
                child = self._groups[sequence.request_id].children[sequence.child]
                self.scheduler.go_on_unseen(sequence, child, demands, number, is_quiet=demands.is_quiet)
            else:
                sequence.is_blocked = True

    def _plan(self, schedule: Schedule) -> tuple[Plan, list[Sequence]]:
        """What is asked of the device, and the sequences that its draws continue."""
        now = self.last_step.timestamp
        draws: list[Draw] = []
        drawing: list[Sequence] = []
        reports: list[PromptReport] = []
        for sequence, rows, caught_up in schedule.sequences:
            request_id = sequence.request_id
            group = self._groups[request_id]
            demands = group.demands
            if group.metrics.first_scheduled_time is None:
                group.metrics = replace(group.metrics, first_scheduled_time=now)
                self.last_step.record_queue_time(now - group.metrics.arrival_time)
            if demands.params.prompt_logprobs is not None:
                reports += _prompt_report(group, sequence, rows[0], schedule)
            if not caught_up or demands.longest_output == 0:
                continue
            output, parent = sequence.data.output_token_ids, sequence.child
            position = len(output) + sequence.num_pending
            for child in (parent,) if position else range(demands.num_first_draws):
                draws.append(quickly(Draw, (request_id, parent, child, position, rows, demands, output)))
                drawing.append(sequence)
        onward = None if schedule.going_on is None else schedule.going_on.onward
        return Plan(schedule.works, draws, reports, onward), drawing

    def _record(self, launched: Launched, result: StepResult) -> list[RequestOutput]:
        now = self.clock()
        for sequence, _, _ in launched.schedule.sequences:
            sequence.num_pending, sequence.is_blocked = 0, False
        self._count(launched.schedule)
        outputs = self._record_prompts(launched, result)
        if launched.schedule.going_on is not None:
            outputs += self._record_going_on(launched.schedule.going_on, result, now)
        drawn: dict[str, list[Candidates]] = {}
        faults: dict[str, str] = {}
        for index, draw in launched.draws_one_by_one(result):
            group = self._groups.get(draw.request_id)
            parent = None if group is None else group.awaits(draw)
            if group is None or parent is None:
                continue  # it ended while this step was under way
            if draw.position and draw.demands.children_go_alone and not result.faults:
                outputs += self._go_on(group, parent, _continuation(draw, index, result), now)
                continue
            candidates = drawn.setdefault(draw.request_id, [])
            if index in result.faults:
                faults.setdefault(draw.request_id, result.faults[index])
            elif index in result.expansions:
                candidates.append(quickly(Candidates, (draw.parent, draw.child, *result.expansions[index])))
            else:
                candidates.append(_only_candidate(_continuation(draw, index, result)))
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
        in_use = sum(manager.num_in_use for manager in self.scheduler.managers)
        self.metrics = self.metrics.after(self.last_step, in_use)
        return outputs

    def _record_going_on(self, going_on: GoingOn, result: StepResult, now: float) -> list[RequestOutput]:
        """The tokens of those who just go on: all at once, and then only who may have ended is looked at."""
        for child in going_on.children:
            child.sequence.num_pending, child.sequence.is_blocked = 0, False
        if result.faults:
            return []
        count, latency = append_all(going_on.quiet(), result, now)
        self.last_step.num_generation_tokens += count
        self.last_step.inter_token_latencies += [latency] * count
        outputs: list[RequestOutput] = []
        for index in going_on.may_end(result.token_ids):
            child, demands = going_on.children[index], going_on.onward.members[index].demands
            if child.finish_reason is None and child.check_end(result.token_ids[index], demands):
                group = self._groups[child.sequence.request_id]
                group.note_end(child)
                self._leave(group, child.sequence)
                outputs += self._due(group)
        return outputs

    def _record_prompts(self, launched: Launched, result: StepResult) -> list[RequestOutput]:
        """Files what was reported of prompts; a request that wanted nothing more ends here."""
        outputs: list[RequestOutput] = []
        schedule, plan = launched.schedule, launched.plan
        for asked, reports in zip(plan.prompt_reports, result.prompts, strict=True):
            group = self._groups.get(asked.request_id)
            if group is None or group.demands.number != asked.demands.number:
                continue  # it ended while this step was under way
            if any(math.isnan(report.logprob) for report in reports):
                outputs.append(self._stop(group, FinishReason.ERROR, NOT_FINITE))
                continue
            first = plan.works[asked.first.model].chunks[asked.first.chunk].start + asked.first.offset
            group.prompt_reports += reports[len(group.prompt_reports) - first :]
        for sequence, _, caught_up in schedule.sequences:
            if caught_up and sequence.sampling_params.max_tokens == 0 and not sequence.is_finished():
                group = self._groups[sequence.request_id]
                group.finish_unread()
                self._leave(group, sequence)
                outputs += self._due(group)
        return outputs

    def _go_on(self, group: Group, child: Child, token: Continuation, now: float) -> list[RequestOutput]:
        """What `_advance` comes to where children do not look at each other: most of them, in most steps.

        For 256 requests of one sample it saves the host 1.7 ms of 3.4 a step.
        """
        latency = group.append(child, token, now)
        self.last_step.num_generation_tokens += 1
        if latency is not None:
            self.last_step.inter_token_latencies.append(latency)
        has_ended = child.finish_reason is not None
        if has_ended:
            self._leave(group, child.sequence)
        return self._due(group) if has_ended or group.demands.is_streamed else []

    def _advance(self, group: Group, candidates: list[Candidates], now: float) -> None:
        changes = group.advance(candidates, now)
        self.last_step.num_generation_tokens += len(changes.latencies)
        self.last_step.inter_token_latencies += [latency for latency in changes.latencies if latency is not None]
        self.scheduler.adopt(changes.forks)
        if group.request.keeps:
            self._keep_the_shortest(group)
        for sequence in changes.left:
            self._leave(group, sequence)

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

    def _leave(self, group: Group, sequence: Sequence) -> None:
        """It computes nothing more: its blocks are kept, if that was asked for, else free."""
        if group.request.keeps and sequence.is_finished():
            self.kept.keep(sequence.seq_id, sequence, sequence)
        self.scheduler.remove(sequence)

    def _keep_the_shortest(self, group: Group) -> None:
        """Children that ended with their first token never held blocks: the root, not yet past it, holds theirs."""
        root = group.request.root
        for child in group.children.values():
            sequence = child.sequence
            is_short = sequence.is_finished() and len(sequence.output_token_ids) == 1
            if is_short and sequence is not root and sequence.seq_id not in self.kept:
                self.kept.keep(sequence.seq_id, sequence, root)

    def _give_up(self, sequence: Sequence) -> RequestOutput:
        """Ends a request that waits for blocks which nobody will free: nothing runs, and what is kept stays."""
        total = sum(manager.num_blocks for manager in self.scheduler.managers)
        error = f"{CACHE_FULL}: {self.kept.num_blocks} of {total} KV blocks are kept for nodes of trees"
        return self._stop(self._groups[sequence.request_id], FinishReason.ERROR, error)

    def _stop(self, group: Group, reason: FinishReason, error: str | None = None) -> RequestOutput:
        for sequence in group.stop_all(reason, error):
            self.scheduler.remove(sequence)
        output = self._output(group)
        assert output is not None, "a finished group always has an output"
        return output

    # -- state -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drops every request and all that the caches hold.

        Asks nobody what state they are in, since what was broken off may have left them in any: queues, blocks and rows
        are made anew. Breaking it off too does no harm, for the next act begins with it.
        """
        self._is_torn = True
        self._under_way = None
        self._groups = {}
        self.scheduler.reset()
        self.kept.forget()
        self.device.reset()
        self._is_torn = False

    def _mend(self) -> None:
        if self._is_torn:
            self.reset()
        self.kept.sweep()

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing of earlier ones; running requests go on undisturbed."""
        self._mend()
        self._is_torn = True
        for manager in self.scheduler.managers:
            manager.reset_prefix_cache()
        self._is_torn = False

    def release(self, names: Items[str]) -> None:
        """Frees what is kept under these names."""
        self._mend()
        self._is_torn = True
        self.kept.release(names)
        self._is_torn = False

    def release_all_kept(self) -> None:
        """What begins with a kept prefix from now on computes it anew."""
        self.release(self.kept.names())

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
        stats = self.last_step
        stats.num_preempted = schedule.num_preempted
        for role, counts in schedule.tracks.items():
            stats.tracks[role].add(counts)
        for request_id, count in schedule.num_cached_tokens.items():
            if request_id in self._groups:
                self._groups[request_id].num_cached_tokens = count


def _continuation(draw: Draw, index: int, result: StepResult) -> Continuation:
    report = result.reports.get(index) if result.reports else None
    mixture = result.mixtures.get(index) if result.mixtures else None
    fields = (draw.parent, draw.child, result.token_ids[index], result.logprobs[index], report, mixture)
    return quickly(Continuation, fields)


def _only_candidate(token: Continuation) -> Candidates:
    return Candidates(
        token.parent,
        token.child,
        (token.token_id,),
        (token.logprob,),
        reports=None if token.report is None else (token.report,),
        mixtures=None if token.mixture is None else (token.mixture,),
    )


def _prompt_report(group: Group, sequence: Sequence, last: Row, schedule: Schedule) -> list[PromptReport]:
    """What this step can tell about prompt tokens not told about yet; each is told by the row before it."""
    prompt = group.request.reported_token_ids
    chunk = schedule.works[last.model].chunks[last.chunk]
    # What lies before the chunk was asked for by an earlier step, which may still be under way.
    told = max(len(group.prompt_reports), chunk.start)
    end = min(chunk.end, len(prompt) - 1)
    if sequence.child != 0 or told >= end:
        return []
    first = last._replace(offset=told - chunk.start)
    return [PromptReport(group.request.request_id, first, prompt[told + 1 : end + 1], group.demands)]


def request_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that brought none: a fixed function of the engine's seed and its place in the queue."""
    digest = hashlib.blake2b(f"{engine_seed}:{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
