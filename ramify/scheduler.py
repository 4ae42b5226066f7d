"""Who computes what in the next step. Touches no tensor.

There is no prefill or decode phase: each track's computed count catches up with its tokens, within the step's budget of
tokens. Sequences have an order (priority, arrival, child): the first in it is served first, the last gives up its
blocks when others lack some, so the first always gets on and nobody waits for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ramify.config import PreemptionMode
from ramify.errors import InvalidInputError
from ramify.kv.blocks import BlockManager
from ramify.kv.prefix import Entry
from ramify.kv.sharing import best_sharing
from ramify.plan import BlockCopy, Chunk, SharedPrefix
from ramify.request import Request
from ramify.sequence import Sequence, SequenceStatus, Track


class ScheduledSequence(NamedTuple):
    """A sequence, the index of its first chunk in this step, and whether its tracks will have caught up after it."""

    sequence: Sequence
    first_chunk: int
    caught_up: bool


@dataclass(slots=True)
class Schedule:
    """What one step computes and moves; filled while it is made, read-only afterwards."""

    budget: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)  # whose chunk each is
    copies: list[BlockCopy] = field(default_factory=list)
    swaps_out: list[BlockCopy] = field(default_factory=list)
    swaps_in: list[BlockCopy] = field(default_factory=list)
    shared: list[SharedPrefix] = field(default_factory=list)
    num_preempted: int = 0
    num_cached_tokens: dict[str, int] = field(default_factory=dict)  # by request, for prompts that found a prefix


class Scheduler:
    def __init__(
        self,
        managers: list[BlockManager],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
        preemption_mode: PreemptionMode = "recompute",
    ) -> None:
        self.managers = managers
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.preemption_mode = preemption_mode
        self.running: list[Sequence] = []  # both lists stand in order
        self.waiting: list[Sequence] = []
        self._num_arrived = 0
        self._sharing: list[tuple[int, list[Track]]] | None = None  # None: rows changed, find out again

    # -- sequences come and go -------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raises InvalidInputError for a request that could never be scheduled: its prompt and one child must fit."""
        longest = self.longest_output(request.root)
        if len(request.root.tracks) > self.max_num_batched_tokens:
            raise InvalidInputError(
                f"max_num_batched_tokens must be at least {len(request.root.tracks)}, one for each model, "
                f"got {self.max_num_batched_tokens}"
            )
        for track in request.root.tracks:
            prompt = len(track.prompt_token_ids)
            manager = self.managers[track.model]
            if longest < max(1, request.sampling_params.max_tokens or 0):
                raise InvalidInputError(
                    f"prompt of {prompt} tokens plus max_tokens {request.sampling_params.max_tokens} must fit "
                    f"max_model_len = {self.max_model_len}"
                )
            if not self.enable_chunked_prefill and prompt > self.max_num_batched_tokens:
                raise InvalidInputError(
                    f"prompt must have at most max_num_batched_tokens = {self.max_num_batched_tokens} tokens "
                    f"while enable_chunked_prefill is False, got {prompt}"
                )
            # A fork may hold the prompt's last, partly filled block beside its own copy of it for a moment.
            needed = manager.blocks_for(prompt + longest) + (request.sampling_params.num_samples > 1)
            if needed > manager.num_blocks:
                raise InvalidInputError(
                    f"prompt of {prompt} tokens plus an output of up to {longest} needs {needed} KV blocks, "
                    f"the cache has {manager.num_blocks}: lower max_tokens or raise num_kv_blocks"
                )

    def longest_output(self, sequence: Sequence) -> int:
        """How long an output may get: max_tokens, or what the context leaves."""
        room = self.max_model_len - max(len(track.prompt_token_ids) for track in sequence.tracks)
        limit = sequence.sampling_params.max_tokens
        return room if limit is None else min(limit, room)

    def add(self, request: Request) -> None:
        request.root.order = (request.priority, self._num_arrived, 0)
        self._num_arrived += 1
        insort(self.waiting, request.root, key=_order)

    def adopt(self, children: Iterable[Sequence]) -> None:
        """Takes over forks of a running sequence: they run as far as there is room, others wait with their blocks."""
        for child in children:
            child.order = (*child.order[:2], child.child)
            if len(self.running) < self.max_num_seqs:
                self._run(child)
            else:
                self._wait(child)

    def remove(self, sequence: Sequence) -> None:
        """Frees everything a sequence holds, at once, in whatever state it is."""
        for track in sequence.tracks:
            self.managers[track.model].release(track.key)
        if _take_out(self.running, sequence):
            self._sharing = None
        else:
            _take_out(self.waiting, sequence)

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        step = Schedule(self.max_num_batched_tokens)
        shares = self._share_budget(step)
        for sequence in list(self.running):
            if sequence in shares and sequence.status is SequenceStatus.RUNNING:
                self._grow(sequence, shares[sequence], step)
        self._admit(step)
        step.shared = self._find_sharing(step)
        return step

    def _share_budget(self, step: Schedule) -> dict[Sequence, list[int]]:
        """Positions each running sequence may compute per track. Who lacks least goes first: a long prompt waits."""
        shares = {}
        for sequence in sorted(self.running, key=_num_missing):
            if step.budget == 0:
                break
            share = self._share(sequence, step.budget)
            if any(share):
                shares[sequence] = share
                step.budget -= sum(share)
        return shares

    def _share(self, sequence: Sequence, budget: int) -> list[int]:
        missing = [sequence.num_missing(track) for track in sequence.tracks]
        if not self.enable_chunked_prefill and budget < sum(missing) <= self.max_num_batched_tokens:
            return [0] * len(missing)  # it fits a step of its own; what does not (a long recompute) is split anyway
        share = []
        for count in missing:
            share.append(min(count, budget))
            budget -= share[-1]
        if share != missing:  # a token is drawn from all tracks' last positions at once: none goes there alone
            share = [min(count, lacking - 1) for count, lacking in zip(share, missing, strict=True)]
        return share

    def _grow(self, sequence: Sequence, share: list[int], step: Schedule) -> None:
        """Gives a sequence the blocks of its share, taking them from the last in order; it may be the last itself."""
        while not self._has_room(sequence, share):
            victim = self._victim(sequence)
            self._preempt(victim, step)
            if victim is sequence:
                step.budget += sum(share)
                return
        self._place(sequence, share, step)

    def _has_room(self, sequence: Sequence, share: list[int]) -> bool:
        needed = [0] * len(self.managers)  # two tracks may draw on one model's blocks
        for track, count in zip(sequence.tracks, share, strict=True):
            manager = self.managers[track.model]
            needed[track.model] += manager.num_new_blocks(track.key, track.num_computed, track.num_computed + count)
            if needed[track.model] > manager.num_free:
                return False
        return True

    def _place(self, sequence: Sequence, share: list[int], step: Schedule) -> None:
        first = len(step.chunks)
        for track, count in zip(sequence.tracks, share, strict=True):
            if not count:
                continue
            manager = self.managers[track.model]
            start, end = track.num_computed, track.num_computed + count
            copies = manager.extend(track.key, start, end)
            step.copies += [BlockCopy(track.model, source, target) for source, target in copies]
            tokens = sequence.tokens_between(track, start, end)
            step.chunks.append(Chunk(track.model, tokens, start, manager.table(track.key)))
            step.tracks.append(track)
            # True once this step has run, and nothing runs before it: later tracks of this very step may share.
            track.num_computed = end
            if end // manager.block_size > start // manager.block_size:
                manager.publish(track.key, end, partial(sequence.tokens_between, track))
        caught_up = all(sequence.num_missing(track) == 0 for track in sequence.tracks)
        step.sequences.append(ScheduledSequence(sequence, first, caught_up))

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, step: Schedule) -> None:
        """Starts waiting sequences in order, as long as sequences, tokens and blocks allow."""
        while self.waiting and len(self.running) < self.max_num_seqs and step.budget > 0:
            sequence = self.waiting[0]
            found = self._find_prefixes(sequence)
            if not self._has_blocks_for(sequence, found):
                if self.running or not self._release_a_holder(sequence):
                    return
                continue
            self._bring_back(sequence, found, step)
            share = self._share(sequence, step.budget)
            if not any(share):
                return
            self.waiting.pop(0)
            sequence.move(SequenceStatus.RUNNING)
            self._run(sequence)
            step.budget -= sum(share)
            self._place(sequence, share, step)

    def _find_prefixes(self, sequence: Sequence) -> list[list[Entry]]:
        """For each track that must start from nothing: blocks whose content it can take over."""
        return [
            self.managers[track.model].find(sequence.tokens_between(track, 0, sequence.num_tokens(track)))
            if track.num_computed == 0
            else []
            for track in sequence.tracks
        ]

    def _has_blocks_for(self, sequence: Sequence, found: list[list[Entry]]) -> bool:
        """Whether all its tokens would fit, and one more block for each sequence that runs: else it would soon go."""
        wanted: dict[int, int] = {}
        available: dict[int, int] = {}
        for track, entries in zip(sequence.tracks, found, strict=True):
            manager = self.managers[track.model]
            total = sequence.num_tokens(track)
            start = track.num_computed
            new = manager.num_swapped(track.key)
            if entries:
                new += manager.blocks_for(total) - len(entries)
            elif sequence.status is SequenceStatus.SWAPPED:
                new += manager.blocks_for(total) - manager.blocks_for(start)
            else:
                new += manager.num_new_blocks(track.key, start, total)
            wanted[track.model] = wanted.get(track.model, 0) + new
            spare = available.get(track.model, manager.num_free - len(self.running))
            available[track.model] = spare - (manager.num_free - manager.num_free_without(entries))
        return all(wanted[model] <= available[model] for model in wanted)

    def _bring_back(self, sequence: Sequence, found: list[list[Entry]], step: Schedule) -> None:
        for track, entries in zip(sequence.tracks, found, strict=True):
            manager = self.managers[track.model]
            if sequence.status is SequenceStatus.SWAPPED:
                copies = manager.swap_in(track.key)
                step.swaps_in += [BlockCopy(track.model, source, target) for source, target in copies]
            elif entries:
                track.num_computed = manager.adopt(track.key, entries)
                if not sequence.output_token_ids and sequence.request_id is not None:
                    cached = step.num_cached_tokens.get(sequence.request_id, 0)
                    step.num_cached_tokens[sequence.request_id] = cached + track.num_computed

    # -- giving way ------------------------------------------------------------------------------------------

    def _victim(self, sequence: Sequence) -> Sequence:
        """Who gives up blocks so that `sequence` can grow: the last to run, else a later one that waits with some."""
        last = self.running[-1]
        if last is not sequence:
            return last
        holder = self._last_holder()
        return holder if holder is not None and holder.order > sequence.order else sequence

    def _release_a_holder(self, sequence: Sequence) -> bool:
        """Nothing runs, and `sequence` still lacks blocks: others that wait with some recompute theirs later."""
        holder = self._last_holder(but=sequence)
        if holder is None:
            return False
        self._forget_computed(holder)
        return True

    def _last_holder(self, but: Sequence | None = None) -> Sequence | None:
        for sequence in reversed(self.waiting):
            if sequence is not but and any(track.num_computed for track in sequence.tracks):
                return sequence
        return None

    def _preempt(self, sequence: Sequence, step: Schedule) -> None:
        step.num_preempted += 1
        if sequence.status is not SequenceStatus.RUNNING:
            self._forget_computed(sequence)
            return
        _take_out(self.running, sequence)
        self._sharing = None
        if self.preemption_mode == "swap" and all(
            self.managers[track.model].can_swap_out(track.key) for track in sequence.tracks
        ):
            for track in sequence.tracks:
                copies = self.managers[track.model].swap_out(track.key)
                step.swaps_out += [BlockCopy(track.model, source, target) for source, target in copies]
            sequence.move(SequenceStatus.SWAPPED)
            insort(self.waiting, sequence, key=_order)
            return
        self._forget_computed(sequence)
        self._wait(sequence)

    def _forget_computed(self, sequence: Sequence) -> None:
        for track in sequence.tracks:
            self.managers[track.model].release(track.key)
            track.num_computed = 0
        if sequence.status is SequenceStatus.SWAPPED:
            sequence.move(SequenceStatus.WAITING)

    def _run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_order)
        self._sharing = None

    def _wait(self, sequence: Sequence) -> None:
        sequence.move(SequenceStatus.WAITING)
        insort(self.waiting, sequence, key=_order)

    # -- sharing ---------------------------------------------------------------------------------------------

    def _find_sharing(self, step: Schedule) -> list[SharedPrefix]:
        """Which chunks of this step may read the same leading blocks together."""
        if self._sharing is None:
            self._sharing = self._share_reads(step)
        chunk_of = {track: index for index, track in enumerate(step.tracks)}
        shared = []
        for num_blocks, members in self._sharing:
            chunks = tuple(chunk_of[member] for member in members if member in chunk_of)
            if len(chunks) > 1:
                shared.append(SharedPrefix(num_blocks, chunks))
        if any(len(chunk.token_ids) > 1 for chunk in step.chunks):
            self._sharing = None  # prompts on their way will share more in the next step
        return shared

    def _share_reads(self, step: Schedule) -> list[tuple[int, list[Track]]]:
        """Only blocks that were full before this step count: a chunk's own positions are not its past."""
        sharing = []
        for model, manager in enumerate(self.managers):
            rows = [index for index, chunk in enumerate(step.chunks) if chunk.model == model]
            tables = [step.chunks[row].block_table[: step.chunks[row].start // manager.block_size] for row in rows]
            for item in best_sharing(tables):
                sharing.append((item.num_blocks, [step.tracks[rows[row]] for row in item.rows]))
        return sharing


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _num_missing(sequence: Sequence) -> int:
    return sum(sequence.num_missing(track) for track in sequence.tracks)


def _take_out(ordered: list[Sequence], sequence: Sequence) -> bool:
    """Removes a sequence from a list that stands in order; returns whether it was there."""
    index = bisect_left(ordered, sequence.order, key=_order)
    if index < len(ordered) and ordered[index] is sequence:
        del ordered[index]
        return True
    return False
