"""Who computes what in the next step. Touches no tensor.

There is no prefill or decode phase: each track's computed count catches up with its tokens, within the step's budget of
tokens. Gangs (sequences that step together, usually one alone) are served in their order (`engine/standing.py`), and
the last is preempted when others lack blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial

from ramify.config import PreemptionMode
from ramify.engine.blocks import BlockManager
from ramify.engine.demands import Demands
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.gang import Gang
from ramify.engine.placement import ONE, Placement
from ramify.engine.plan import Work
from ramify.engine.request import Request
from ramify.engine.schedule import Schedule
from ramify.engine.search.child import Child
from ramify.engine.sequence import Sequence, SequenceStatus, Track
from ramify.engine.shared_reads import SharedReads
from ramify.engine.standing import Standing

FEWEST_DRAWS = 32  # that a step has room for, however few sequences may run


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
        speculation: Speculation | None = None,
    ) -> None:
        self.managers = managers
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.preemption_mode = preemption_mode
        self.speculation = speculation
        self._num_arrived = 0
        self._placement = Placement(managers)
        self._shared_reads = [SharedReads(manager) for manager in managers]
        self._forget_sequences()

    def reset(self) -> None:
        """Drops every sequence and every block, in whatever state they are."""
        self._forget_sequences()
        for manager in self.managers:
            manager.reset()
        if self.speculation is not None:
            self.speculation.reset()

    def _forget_sequences(self) -> None:
        self.standing = Standing(self.managers[0])
        self._look_for_sharing()

    @property
    def running(self) -> list[Gang]:
        """In order, as those that wait."""
        return self.standing.running

    @property
    def waiting(self) -> list[Gang]:
        return self.standing.waiting

    @property
    def num_running(self) -> int:
        return self.standing.num_running

    @property
    def num_waiting(self) -> int:
        return self.standing.num_waiting

    # -- sequences come and go -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        request.root.order = (request.priority, self._num_arrived, 0)
        self._num_arrived += 1
        params = request.sampling_params
        gang = Gang(request.root, num_together=params.num_together, may_regrow=params.forks_at_every_token)
        self.standing.gang_of[request.root.seq_id] = gang
        self.standing.arrive(gang)

    def adopt(self, forks: Items[tuple[Sequence, Sequence]]) -> None:
        """Takes over (parent, fork) pairs of one request's running sequences, which share their blocks from now on.

        Forks that need not step together run as far as there is room; others wait with their blocks.
        """
        if not forks:
            return
        first = self.standing.gang_of[forks[0][0].seq_id]  # they are of one request
        steps_together = first.num_together is not None
        if not steps_together or len(first.sequences) == 1 or self._is_at_a_border(forks[0][0]):
            self._look_for_sharing()
        room = 0 if steps_together else self.max_num_seqs - self.num_running
        for parent, child in forks:
            for source, target in zip(parent.tracks, child.tracks, strict=True):
                self.managers[source.model].fork(source.key, target.key)
                self._shared_reads[source.model].fork(source.key, target.key)
            gang = self.standing.gang_of[parent.seq_id]
            if steps_together:
                gang.join(child)
            else:
                child.order = (*child.order[:2], child.child)
                gang = Gang(child)
                if room > 0:
                    self.standing.run(gang)
                else:
                    self.standing.wait(gang)
                room -= 1
            self.standing.gang_of[child.seq_id] = gang

    def move(self, moves: Items[tuple[Sequence, Sequence]]) -> None:
        """Members of a gang that became forks of others of it: they hold what these hold.

        Where the next step is under way already, each writes into a block of its own, which it keeps.
        """
        if not moves:
            return
        if self._is_at_a_border(moves[0][0]):
            self._look_for_sharing()
        for parent, sequence in moves:
            for source, target in zip(parent.tracks, sequence.tracks, strict=True):
                manager = self.managers[source.model]
                is_under_way = not parent.num_missing(source)
                own_from = (source.num_computed - 1) // manager.block_size if is_under_way else None
                manager.follow(source.key, target.key, own_from)
                self._shared_reads[source.model].follow(source.key, target.key)

    def _is_at_a_border(self, sequence: Sequence) -> bool:
        """Whether its last position filled a block.

        Beams fork in every step, but what they share grows by whole blocks: it is looked for when one was filled, and
        forks share what their parents do until then. That saves a twelfth of the host's time for 64 beams.
        """
        return sequence.tracks[0].num_computed % self.managers[0].block_size == 0

    def remove(self, sequence: Sequence) -> None:
        """Frees everything a sequence holds, at once, in whatever state it is."""
        for track in sequence.tracks:
            if sequence.drafted:  # what it drew of them is computed, and may be found
                self._publish(sequence, track, sequence.num_tokens(track) - 1)
            self.managers[track.model].release(track.key)
            self._shared_reads[track.model].leave(track.key)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self.standing.leave(sequence)

    # -- those who just go on --------------------------------------------------------------------------------

    def go_on_unseen(self, sequence: Sequence, child: Child, demands: Demands, source: int, *, is_quiet: bool) -> None:
        """The next step may compute the token that the draw `source` of the step under way draws for a sequence.

        is_quiet: nobody looks at its text as it grows.
        """
        sequence.num_pending = 1
        if len(self.managers) == len(sequence.tracks) == 1:
            self.standing.join_cohort(sequence, child, demands, source, is_quiet=is_quiet)

    def is_whole(self, sequence: Sequence) -> bool:
        """Whether all that step together with it, once the root has forked, are there."""
        gang = self.standing.gang_of[sequence.seq_id]
        return len(gang.sequences) == gang.num_together

    def go_on_together(self, sequence: Sequence) -> None:
        """The same for a member of a gang, if all of it goes on."""
        sequence.num_pending = 1

    def stop_those_at_their_end(self) -> None:
        """Whose token under way is the last one waits for that to be known."""
        self.standing.stop_those_at_their_end()

    # -- one step --------------------------------------------------------------------------------------------

    def has_any_to_go_on(self) -> bool:
        """Whether a step can be decided before the one under way is known: for who goes on unseen, or is not in it."""
        return bool(self.waiting or len(self.standing.cohort)) or any(
            not gang.sequences[0].is_blocked for gang in self.standing.loose
        )

    def schedule(self, *, may_preempt: bool = True) -> Schedule:
        """Decides a step. While another is under way nobody can be preempted: it may be about to fork or end."""
        if may_preempt:
            self.standing.dissolve_cohort(num_pending=0)
        schedule, shares = self._share_budget()
        if len(self.standing.cohort) and (not self._has_room_for_all(shares) or self._passes_over(shares)):
            self.standing.dissolve_cohort(num_pending=1)
            schedule, shares = self._share_budget()
        if len(self.standing.cohort):
            schedule.going_on = self.standing.cohort.go_on(schedule.works[0].copies)
        elif self.speculation is not None and may_preempt:
            self._draft(self.speculation, schedule, shares)
        num_decodes = len(self.standing.cohort)
        for gang in list(self.standing.loose):
            if gang not in shares or (schedule.num_preempted and gang.status is not SequenceStatus.RUNNING):
                continue
            if gang.sequences[0].drafted and self._place_draft(gang, schedule):
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
        onward = None if schedule.going_on is None else schedule.going_on.onward
        for work, shared_reads in zip(schedule.works, self._shared_reads, strict=True):
            # Who was swapped out in this step may then have given up its host blocks too, and another got them.
            work.swaps_out = list({copy.target: copy for copy in work.swaps_out}.values())
            work.shared = shared_reads.find(work.chunks, onward, schedule.moving)
        return schedule

    def _draft(self, speculation: Speculation, schedule: Schedule, shares: dict[Gang, list[int]]) -> None:
        """Guesses for those who lack one position. They take up to half of what the step has left: others may come."""
        able = [
            gang.sequences[0]
            for gang in self.standing.loose
            if set(shares.get(gang, ())) == {1} and len(gang.sequences) == 1 and gang.sequences[0].output_token_ids
        ]
        num_rows, num_tracks = len(able), len(able[0].tracks) if able else 1
        most_draws = max(self.max_num_seqs, FEWEST_DRAWS, speculation.most_draws)
        budget = min(schedule.budget // 2 // num_tracks, most_draws - num_rows)
        speculation.draft(able, num_rows=num_rows, budget=budget)
        schedule.budget -= num_tracks * sum(len(sequence.drafted) for sequence in able)

    def _place_draft(self, gang: Gang, schedule: Schedule) -> bool:
        """Returns whether there was room; else it goes on without."""
        sequence = gang.sequences[0]
        foreseen = None if self.speculation is None else self.speculation.drafter.foreseen
        if self._placement.place_drafted(sequence, len(self.running), schedule, foreseen):
            return True
        schedule.budget += len(sequence.drafted) * len(sequence.tracks)
        sequence.drafted = ()
        return False

    def settle_draft(self, sequence: Sequence) -> tuple[int, int]:
        """Once its tokens are known. Returns how many were drafted, and how many of these were drawn."""
        num_drafted, num_accepted = len(sequence.drafted), sequence.end_draft()
        if not sequence.is_finished():
            for track in sequence.tracks:
                self._publish(sequence, track, track.num_computed)
        return num_drafted, num_accepted

    def _publish(self, sequence: Sequence, track: Track, num_computed: int) -> None:
        self.managers[track.model].publish(track.key, num_computed, partial(sequence.tokens_between, track))

    def _has_room_for_all(self, shares: dict[Gang, list[int]]) -> bool:
        """Whether the cohort and all others find their blocks, whoever takes them first."""
        most = self.standing.cohort.most_new_blocks()
        most += sum(self._placement.most_new_blocks(gang, share) for gang, share in shares.items())
        return len(self.standing.cohort) <= self.max_num_batched_tokens and most <= self.managers[0].num_free

    def _passes_over(self, shares: dict[Gang, list[int]]) -> bool:
        """Whether the cohort leaves nothing to somebody who runs and comes before one of its members.

        Else a set that needs more positions at once than others leave would wait for as long as others come.
        """
        if len(shares) == len(self.standing.loose):  # the usual case
            return False
        left_out = (gang.order for gang in self.standing.loose if gang not in shares and any(gang.missing()))
        first = next(left_out, None)
        return first is not None and first < self.standing.cohort.last_order()

    def _share_budget(self) -> tuple[Schedule, dict[Gang, list[int]]]:
        """A step to be filled, and the positions that each running gang outside the cohort may compute per track.

        Who lacks least goes first: a long prompt waits.
        """
        schedule = Schedule(self.max_num_batched_tokens, [Work() for _ in self.managers])
        schedule.budget = max(0, schedule.budget - len(self.standing.cohort))
        num_loose = sum([len(gang.sequences) for gang in self.standing.loose])
        if num_loose <= schedule.budget and all(gang.decodes for gang in self.standing.loose):  # the usual case
            schedule.budget -= num_loose
            return schedule, {
                gang: ONE if len(gang.sequences) == 1 else ONE * len(gang.sequences) for gang in self.standing.loose
            }
        lacking = []
        for gang in self.standing.loose:
            if gang.restart and self._placement.fork_again(gang):
                self._look_for_sharing()
            lacking.append((gang, gang.missing()))
        lacking.sort(key=_longest_missing)
        shares: dict[Gang, list[int]] = {}
        for gang, missing in lacking:
            if schedule.budget == 0:
                break
            share = self._share(gang, missing, schedule.budget)
            if any(share):
                shares[gang] = share
                schedule.budget -= sum(share)
        return schedule, shares

    def _share(self, gang: Gang, missing: list[int], budget: int) -> list[int]:
        if sum(missing) <= budget:
            return missing
        if (
            not self.enable_chunked_prefill
            and gang.status is not SequenceStatus.RUNNING
            and sum(missing) <= self.max_num_batched_tokens
        ):
            # It fits a step of its own, and others are not admitted before it. What does not fit (a long recompute) is
            # split anyway, and so is what those that run compute again: others that come would always be before it.
            return [0] * len(missing)
        share = []
        at_once = gang.sequences[0].num_at_once
        for count in missing:  # tokens are drawn from all tracks' last positions at once: none goes there alone
            share.append(max(0, min(count - at_once, budget)))
            budget -= share[-1]
        return share

    def _grow(self, gang: Gang, share: list[int], schedule: Schedule) -> None:
        """Gives a gang the blocks of its share, taking them from the last in order; it may be the last itself."""
        while not self._placement.has_room(gang, share):
            victim = self.standing.victim(gang)
            self._preempt(victim, schedule)
            if victim is gang:
                schedule.budget += sum(share)
                return
        self._placement.place(gang, share, schedule)

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, schedule: Schedule) -> None:
        """Starts waiting gangs in order, as long as sequences, tokens and blocks allow."""
        if not self.waiting:
            return
        room = self.max_num_seqs - self.num_running
        num_running = len(self.standing.cohort) + sum([len(gang.sequences) for gang in self.standing.loose])
        while self.waiting and self.waiting[0].size <= room and schedule.budget > 0:
            gang = self.waiting[0]
            self._placement.plan_restart(gang)
            found = self._placement.find_prefixes(gang)
            if not self._placement.has_blocks_for(gang, found, num_running):
                if self.running or not self._release_a_holder(gang):
                    return
                continue
            if gang.status is SequenceStatus.SWAPPED and not any(self._share(gang, gang.missing(), schedule.budget)):
                return  # its blocks come back in the step that goes on with it, or not at all
            self._placement.bring_back(gang, found, schedule)
            if self._placement.fork_again(gang):
                self._look_for_sharing()
            share = self._share(gang, gang.missing(), schedule.budget)
            if not any(share):
                return
            self.waiting.pop(0)
            room -= gang.size
            num_running += len(gang.sequences)
            schedule.budget -= sum(share)
            self._placement.place(gang, share, schedule)
            gang.move(SequenceStatus.RUNNING)
            self.standing.run(gang)

    # -- preemption ------------------------------------------------------------------------------------------

    def _release_a_holder(self, gang: Gang) -> bool:
        """Nothing runs, and `gang` still lacks blocks: others that wait with some recompute theirs later."""
        holder = self.standing.last_holder(but=gang)
        if holder is None:
            return False
        self._placement.forget(holder)
        return True

    def _preempt(self, gang: Gang, schedule: Schedule) -> None:
        schedule.num_preempted += 1
        for sequence in gang.sequences:
            sequence.drafted = ()
        if gang.status is not SequenceStatus.RUNNING:
            self._placement.forget(gang)
            return
        self.standing.stop_running(gang)
        self._look_for_sharing()
        swaps = self.preemption_mode == "swap" and not gang.restart
        if swaps and self._placement.swap_out(gang, schedule):
            self.standing.wait(gang, SequenceStatus.SWAPPED)
            return
        self._placement.forget(gang)
        self.standing.wait(gang)

    def _look_for_sharing(self) -> None:
        """Tables of running tracks have changed, not only grown."""
        for shared_reads in self._shared_reads:
            shared_reads.forget()


def _longest_missing(lacking: tuple[Gang, list[int]]) -> int:
    return max(lacking[1])
