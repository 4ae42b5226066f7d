"""Who computes what in the next step. Touches no tensor.

There is no prefill or decode phase: each track's computed count catches up with its tokens, within the step's budget of
tokens. Gangs (sequences that step together, usually one alone) have an order (priority, arrival, child): the first in
it is served first, the last is preempted when others lack blocks, so the first always gets on and nobody waits for
ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Items

from ramify.config import PreemptionMode
from ramify.engine.blocks import BlockManager
from ramify.engine.gang import Gang
from ramify.engine.placement import ONE, Placement
from ramify.engine.plan import Work
from ramify.engine.request import Request
from ramify.engine.schedule import Schedule
from ramify.engine.sequence import Order, Sequence, SequenceStatus
from ramify.engine.shared_reads import SharedReads


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
        self._num_arrived = 0
        self._placement = Placement(managers)
        self._shared_reads = [SharedReads(manager.block_size) for manager in managers]
        self._forget_sequences()

    def reset(self) -> None:
        """Drops every sequence and every block, in whatever state they are."""
        self._forget_sequences()
        for manager in self.managers:
            manager.reset()

    def _forget_sequences(self) -> None:
        self.running: list[Gang] = []  # both lists stand in order
        self.waiting: list[Gang] = []
        self._gang_of: dict[str, Gang] = {}
        self._rows_changed()

    @property
    def num_running(self) -> int:
        return sum(gang.size for gang in self.running)

    @property
    def num_waiting(self) -> int:
        return sum(len(gang.sequences) for gang in self.waiting)

    # -- sequences come and go -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        request.root.order = (request.priority, self._num_arrived, 0)
        self._num_arrived += 1
        gang = Gang(request.root, num_together=request.sampling_params.num_together)
        self._gang_of[request.root.seq_id] = gang
        insort(self.waiting, gang, key=_order)

    def adopt(self, forks: Items[tuple[Sequence, Sequence]]) -> None:
        """Takes over (parent, fork) pairs of one request's running sequences, which share their blocks from now on.

        Forks that need not step together run as far as there is room; others wait with their blocks.
        """
        if not forks:
            return
        self._rows_changed()
        steps_together = self._gang_of[forks[0][0].seq_id].num_together is not None  # they are of one request
        room = 0 if steps_together else self.max_num_seqs - self.num_running
        for parent, child in forks:
            for source, target in zip(parent.tracks, child.tracks, strict=True):
                self.managers[source.model].fork(source.key, target.key)
            gang = self._gang_of[parent.seq_id]
            if steps_together:
                gang.join(child)
            else:
                child.order = (*child.order[:2], child.child)
                gang = Gang(child)
                if room > 0:
                    insort(self.running, gang, key=_order)
                else:
                    self._wait(gang)
                room -= 1
            self._gang_of[child.seq_id] = gang

    def remove(self, sequence: Sequence) -> None:
        """Frees everything a sequence holds, at once, in whatever state it is."""
        for track in sequence.tracks:
            self.managers[track.model].release(track.key)
        gang = self._gang_of.pop(sequence.seq_id, None)
        if gang is None:
            return
        if gang.restart and sequence is gang.sequences[0]:
            gang.restart = []  # nobody to fork from any more: the others start by themselves
        if len(gang.sequences) == 1 and not _take_out(self.running, gang):
            _take_out(self.waiting, gang)
        gang.sequences.remove(sequence)
        self._rows_changed()

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self, *, may_preempt: bool = True) -> Schedule:
        """Decides a step. While another is under way nobody can be preempted: it may be about to fork or end."""
        schedule = Schedule(self.max_num_batched_tokens, [Work() for _ in self.managers])
        shares = self._share_budget(schedule)
        num_decodes = 0
        for gang in list(self.running):
            if gang not in shares or (schedule.num_preempted and gang.status is not SequenceStatus.RUNNING):
                continue
            if shares[gang] == ONE and self._placement.place_decode(gang.sequences[0], schedule):
                num_decodes += 1
                continue
            if not may_preempt and not self._placement.has_room(gang, shares[gang]):
                schedule.is_short = True  # those after it must not take what it lacks
                break
            self._grow(gang, shares[gang], schedule)
        schedule.tracks[0].num_positions += num_decodes
        if not schedule.is_short:
            self._admit(schedule)
        for work, shared_reads in zip(schedule.works, self._shared_reads, strict=True):
            # Who was swapped out in this step may then have given up its host blocks too, and another got them.
            work.swaps_out = list({copy.target: copy for copy in work.swaps_out}.values())
            work.shared = shared_reads.find(work.chunks)
        return schedule

    def _share_budget(self, schedule: Schedule) -> dict[Gang, list[int]]:
        """Positions each running gang may compute per track. Who lacks least goes first: a long prompt waits."""
        if len(self.running) <= schedule.budget and all(gang.decodes for gang in self.running):  # the usual case
            schedule.budget -= len(self.running)
            return dict.fromkeys(self.running, ONE)
        lacking = []
        for gang in self.running:
            if gang.restart and self._placement.fork_again(gang):
                self._rows_changed()
            lacking.append((gang, gang.missing()))
        lacking.sort(key=_longest_missing)
        shares: dict[Gang, list[int]] = {}
        for gang, missing in lacking:
            if schedule.budget == 0:
                break
            share = self._share(missing, schedule.budget)
            if any(share):
                shares[gang] = share
                schedule.budget -= sum(share)
        return shares

    def _share(self, missing: list[int], budget: int) -> list[int]:
        if sum(missing) <= budget:
            return missing
        if not self.enable_chunked_prefill and sum(missing) <= self.max_num_batched_tokens:
            return [0] * len(missing)  # it fits a step of its own; what does not (a long recompute) is split anyway
        share = []
        for count in missing:  # tokens are drawn from all tracks' last positions at once: none goes there alone
            share.append(max(0, min(count - 1, budget)))
            budget -= share[-1]
        return share

    def _grow(self, gang: Gang, share: list[int], schedule: Schedule) -> None:
        """Gives a gang the blocks of its share, taking them from the last in order; it may be the last itself."""
        while not self._placement.has_room(gang, share):
            victim = self._victim(gang)
            self._preempt(victim, schedule)
            if victim is gang:
                schedule.budget += sum(share)
                return
        self._placement.place(gang, share, schedule)

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, schedule: Schedule) -> None:
        """Starts waiting gangs in order, as long as sequences, tokens and blocks allow."""
        room = self.max_num_seqs - self.num_running if self.waiting else 0
        while self.waiting and self.waiting[0].size <= room and schedule.budget > 0:
            gang = self.waiting[0]
            self._placement.plan_restart(gang)
            found = self._placement.find_prefixes(gang)
            num_running = sum(len(other.sequences) for other in self.running)
            if not self._placement.has_blocks_for(gang, found, num_running):
                if self.running or not self._release_a_holder(gang):
                    return
                continue
            if gang.status is SequenceStatus.SWAPPED and not any(self._share(gang.missing(), schedule.budget)):
                return  # its blocks come back in the step that goes on with it, or not at all
            self._placement.bring_back(gang, found, schedule)
            if self._placement.fork_again(gang):
                self._rows_changed()
            share = self._share(gang.missing(), schedule.budget)
            if not any(share):
                return
            self.waiting.pop(0)
            room -= gang.size
            schedule.budget -= sum(share)
            self._placement.place(gang, share, schedule)
            gang.move(SequenceStatus.RUNNING)
            insort(self.running, gang, key=_order)
            self._rows_changed()

    # -- preemption ------------------------------------------------------------------------------------------

    def _victim(self, gang: Gang) -> Gang:
        """Who gives up blocks so that `gang` can grow: the last to run, else a later one that waits with some."""
        last = self.running[-1]
        if last is not gang:
            return last
        holder = self._last_holder()
        return holder if holder is not None and holder.order > gang.order else gang

    def _release_a_holder(self, gang: Gang) -> bool:
        """Nothing runs, and `gang` still lacks blocks: others that wait with some recompute theirs later."""
        holder = self._last_holder(but=gang)
        if holder is None:
            return False
        self._placement.forget(holder)
        return True

    def _last_holder(self, but: Gang | None = None) -> Gang | None:
        for gang in reversed(self.waiting):
            if gang is not but and any(track.num_computed for _, track in gang.tracks()):
                return gang
        return None

    def _preempt(self, gang: Gang, schedule: Schedule) -> None:
        schedule.num_preempted += 1
        if gang.status is not SequenceStatus.RUNNING:
            self._placement.forget(gang)
            return
        _take_out(self.running, gang)
        self._rows_changed()
        swaps = self.preemption_mode == "swap" and not gang.restart
        if swaps and self._placement.swap_out(gang, schedule):
            gang.move(SequenceStatus.SWAPPED)
            insort(self.waiting, gang, key=_order)
            return
        self._placement.forget(gang)
        self._wait(gang)

    def _rows_changed(self) -> None:
        for shared_reads in self._shared_reads:
            shared_reads.forget()

    def _wait(self, gang: Gang) -> None:
        gang.move(SequenceStatus.WAITING)
        insort(self.waiting, gang, key=_order)


def _order(gang: Gang) -> Order:
    return gang.order


def _longest_missing(lacking: tuple[Gang, list[int]]) -> int:
    return max(lacking[1])


def _take_out(ordered: list[Gang], gang: Gang) -> bool:
    """Removes a gang from a list that stands in order; returns whether it was there."""
    index = bisect_left(ordered, gang.order, key=_order)
    if index < len(ordered) and ordered[index] is gang:
        del ordered[index]
        return True
    return False
