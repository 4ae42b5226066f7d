"""Gangs to blocks: what a gang takes when it starts, what it adds in a step, what it leaves when it is preempted.

Knows no queue: who goes first, and who is preempted for whom, is the scheduler's to say.
"""

from __future__ import annotations

from functools import partial

from ramify.engine.blocks import BlockManager
from ramify.engine.gang import Gang
from ramify.engine.plan import GUESS, MOST_DRAFTED, PENDING, BlockCopy, Chunk, Row, Work, quickly
from ramify.engine.prefix import Entry
from ramify.engine.schedule import Schedule, ScheduledSequence
from ramify.engine.sequence import Sequence, SequenceStatus, Track

UNKNOWN = (PENDING,)
ONE = [1]  # the share of a sequence that lacks one position: most of them


class Placement:
    """Keeps nothing: tables are the managers', one a model, and computed counts the tracks'."""

    def __init__(self, managers: list[BlockManager]) -> None:
        self.managers = managers
        # The rows of decodes, by model and chunk: the same in every step, so they are made once.
        self._single_rows: list[list[tuple[Row]]] = [[] for _ in managers]

    # -- positions of a step ---------------------------------------------------------------------------------

    def has_room(self, gang: Gang, share: list[int]) -> bool:
        """Whether the blocks of its share are free."""
        if sum(share) <= min(manager.num_free for manager in self.managers):
            return True  # a position takes at most one; to count what 64 beams take is 0.08 ms of a step of 4
        if len(share) == 1:  # most of them
            track = gang.sequences[0].tracks[0]
            manager = self.managers[track.model]
            start = track.num_computed
            return manager.num_new_blocks(track.key, start, start + share[0]) <= manager.num_free
        extents: dict[int, list[tuple[str, int, int]]] = {}  # two tracks may draw on one model's blocks
        for (_, track), count in zip(gang.tracks(), share, strict=True):
            if count:
                extent = (track.key, track.num_computed, track.num_computed + count)
                extents.setdefault(track.model, []).append(extent)
        return all(
            self.managers[model].num_new_blocks_of(parts) <= self.managers[model].num_free
            for model, parts in extents.items()
        )

    def most_new_blocks(self, gang: Gang, share: list[int]) -> int:
        """How many blocks a share takes at most, whatever is shared: each begins and ends in the midst of one."""
        counts = zip(gang.tracks(), share, strict=True)
        return sum(self.managers[track.model].blocks_for(count) + 1 for (_, track), count in counts if count)

    def place(self, gang: Gang, share: list[int], schedule: Schedule) -> None:
        if gang.decodes:
            caught_up = 0 not in share
            if caught_up and self._place_decodes(gang, schedule):
                return
        else:
            caught_up = not gang.restart and share == gang.missing()
        num_tracks = len(gang.sequences[0].tracks)
        num_decodes = 0
        for index, sequence in enumerate(gang.sequences):
            own = share[index * num_tracks : (index + 1) * num_tracks]
            if caught_up and own == ONE and self.place_decode(sequence, schedule):
                num_decodes += 1
                continue
            rows = tuple(
                self._place_chunk(sequence, track, count, schedule)
                for track, count in zip(sequence.tracks, own, strict=True)
                if count
            )
            if rows:
                schedule.sequences.append(ScheduledSequence(sequence, rows, caught_up))
        schedule.tracks[0].num_positions += num_decodes

    def _place_decodes(self, gang: Gang, schedule: Schedule) -> bool:
        """What `place_decode` comes to for sequences of one track that stand at the same position, as beams do.

        Returns whether they do, and each found a block.
        """
        sequences = gang.sequences
        tracks = [sequence.tracks[0] for sequence in sequences]
        num_pending = sequences[0].num_pending
        model, start = tracks[0].model, tracks[0].num_computed
        manager, work = self.managers[model], schedule.works[model]
        if len(sequences) > manager.num_free or start < len(tracks[0].prompt_token_ids):
            return False
        if any(track.num_computed != start for track in tracks) or any(
            each.num_pending != num_pending for each in sequences
        ):
            return False
        keys = [track.key for track in tracks]
        tables, copies = manager.open_blocks(keys, start)
        _copies(sequences[0], work).extend([quickly(BlockCopy, pair) for pair in copies])
        first, end = len(work.chunks), len(work.chunks) + len(sequences)
        rows = self._rows(model, end)[first:end]
        schedule.sequences += [
            quickly(ScheduledSequence, (sequence, row, True)) for sequence, row in zip(sequences, rows, strict=True)
        ]
        work.chunks += [
            quickly(Chunk, (UNKNOWN if num_pending else sequence.data.output_token_ids[-1:], start, table, key))
            for sequence, table, key in zip(sequences, tables, keys, strict=True)
        ]
        for track in tracks:
            track.num_computed = start + 1
        if start % manager.block_size in (0, manager.block_size - 1):
            for sequence, track in zip(sequences, tracks, strict=True):
                manager.publish(track.key, start + 1 - num_pending, partial(sequence.tokens_between, track))
        if num_pending and gang.may_regrow:
            schedule.moving.append(range(first, end))
        schedule.tracks[0].num_positions += len(sequences)
        return True

    def _rows(self, model: int, count: int) -> list[tuple[Row]]:
        """Those of at least so many decodes."""
        rows = self._single_rows[model]
        if count > len(rows):
            rows += [(Row(model, number, 0),) for number in range(len(rows), 2 * count)]
        return rows

    def place_decode(self, sequence: Sequence, schedule: Schedule) -> bool:
        """The one position that a sequence lacks after an output, if there is a block for it; returns whether there is.

        What `place` comes to for most sequences in most steps: for 256 rows it saves the host 1.5 ms of 3. Counting the
        position is left to the caller, who may have many.
        """
        track, output, num_pending = sequence.tracks[0], sequence.data.output_token_ids, sequence.num_pending
        manager, start = self.managers[track.model], track.num_computed
        position = start - len(track.prompt_token_ids)  # in the output
        if position < 0 or position + 1 != len(output) + num_pending:
            return False
        table = manager.open_table(track.key, start) or manager.append_block(track.key, start)
        if table is None:
            copy = manager.copy_block(track.key, start)
            if copy is None:
                return False
            _copies(sequence, schedule.works[track.model]).append(BlockCopy(*copy))
            table = manager.table(track.key)
        token = PENDING if num_pending else output[-1]
        chunks = schedule.works[track.model].chunks
        index = len(chunks)
        row = self._rows(track.model, index + 1)[index]
        schedule.sequences.append(quickly(ScheduledSequence, (sequence, row, True)))
        chunks.append(quickly(Chunk, ((token,), start, table, track.key)))
        track.num_computed = start + 1
        offset = start % manager.block_size
        if offset == 0 or offset == manager.block_size - 1:
            known = start + 1 - num_pending
            manager.publish(track.key, known, partial(sequence.tokens_between, track))
        return True

    def place_drafted(
        self, sequence: Sequence, num_spare: int, schedule: Schedule, foreseen: int | None = None
    ) -> bool:
        """The position that each track of a sequence lacks, and those of its drafted tokens; returns whether there was
        room for them with so many blocks to spare: nobody gives way to a guess.

        foreseen: the role of a track that has them already, from who drafted these tokens.
        """
        count = 1 + len(sequence.drafted)
        for model, manager in enumerate(self.managers):
            extents = [
                (track.key, track.num_computed, track.num_computed + count)
                for track in sequence.tracks
                if track.model == model
            ]
            if manager.num_new_blocks_of(extents) > manager.num_free - num_spare:
                return False
        rows = []
        for track in sequence.tracks:
            manager, work, start = self.managers[track.model], schedule.works[track.model], track.num_computed
            if track.role == foreseen:
                place = (GUESS - sequence.drafted[0]) // MOST_DRAFTED  # among those that were drafted for
                rows.append(Row(track.model, -1 - place, count - 1))
            else:
                copies = manager.extend(track.key, start, start + count)
                _copies(sequence, work).extend(BlockCopy(*pair) for pair in copies)
                tokens = [sequence.data.output_token_ids[-1], *sequence.drafted]
                rows.append(Row(track.model, len(work.chunks), count - 1))
                work.chunks.append(Chunk(tokens, start, manager.table(track.key), track.key))
            schedule.tracks[track.role].num_positions += count
            track.num_computed = start + count
            manager.publish(track.key, start + 1, partial(sequence.tokens_between, track))  # nothing that is a guess
        schedule.sequences.append(ScheduledSequence(sequence, tuple(rows), True))
        schedule.num_drafted += count - 1
        return True

    def _place_chunk(self, sequence: Sequence, track: Track, count: int, schedule: Schedule) -> Row:
        manager, work = self.managers[track.model], schedule.works[track.model]
        start, end = track.num_computed, track.num_computed + count
        _copies(sequence, work).extend(BlockCopy(*pair) for pair in manager.extend(track.key, start, end))
        tokens = sequence.tokens_between(track, start, end)
        work.chunks.append(Chunk(tokens, start, manager.table(track.key), track.key))
        counts = schedule.tracks[track.role]
        counts.num_positions += count
        counts.num_prompt_tokens += max(0, min(end, len(track.prompt_token_ids)) - start)
        # True once this step has run, and nothing runs before it: later tracks of this very step may share.
        track.num_computed = end
        known = end - sequence.num_pending  # a block whose last token is pending is published one step later
        if known // manager.block_size > (start - 1) // manager.block_size:
            manager.publish(track.key, known, partial(sequence.tokens_between, track))
        return Row(track.model, len(work.chunks) - 1, count - 1)

    # -- coming ----------------------------------------------------------------------------------------------

    def plan_restart(self, gang: Gang) -> None:
        """Several that lost all they had: what they have in common is computed once, as it was at first."""
        if len(gang.sequences) == 1 or gang.restart or gang.status is SequenceStatus.SWAPPED:
            return
        if all(track.num_computed == 0 for _, track in gang.tracks()):
            sizes = [self.managers[track.model].block_size for track in gang.sequences[0].tracks]
            gang.restart = [common // size * size for common, size in zip(gang.num_common(), sizes, strict=True)]

    def fork_again(self, gang: Gang) -> bool:
        """Ends a restart: the first has computed what all share from now on. Returns whether it did."""
        if not gang.restart or any(gang.missing()):
            return False
        leader = gang.sequences[0]
        for follower in gang.sequences[1:]:
            for source, target, end in zip(leader.tracks, follower.tracks, gang.restart, strict=True):
                manager = self.managers[source.model]
                manager.fork(source.key, target.key, end // manager.block_size)
                target.num_computed = end
        gang.restart = []
        return True

    def find_prefixes(self, gang: Gang) -> list[list[Entry]]:
        """For each track of the first that must start from nothing: blocks whose content it can take over."""
        leader = gang.sequences[0]
        ends = gang.restart or [leader.num_tokens(track) for track in leader.tracks]
        if leader.sampling_params.prompt_logprobs is not None and not leader.output_token_ids:
            if leader.num_told is None:
                return [[] for _ in leader.tracks]  # a cached prefix has no logits to report
            ends = [end - leader.num_told + 1 for end in ends]  # up to where they are reported
        return [
            self.managers[track.model].find(leader.tokens_between(track, 0, end)) if track.num_computed == 0 else []
            for track, end in zip(leader.tracks, ends, strict=True)
        ]

    def has_blocks_for(self, gang: Gang, found: list[list[Entry]], num_running: int) -> bool:
        """Whether all its tokens would fit, and one more block for each sequence that runs: else it would soon go."""
        wanted = [0] * len(self.managers)
        spare = [manager.num_free - num_running for manager in self.managers]
        for index, entries in enumerate(found):
            members = [(sequence, sequence.tracks[index]) for sequence in gang.sequences]
            model = members[0][1].model
            manager = self.managers[model]
            spare[model] -= manager.num_free - manager.num_free_without(entries)
            totals = [manager.blocks_for(sequence.num_tokens(track)) for sequence, track in members]
            if gang.restart:
                common = gang.restart[index] // manager.block_size
                wanted[model] += sum(totals) - (len(totals) - 1) * common - len(entries)
            elif entries:
                wanted[model] += totals[0] - len(entries)
            else:
                wanted[model] += manager.num_swapped([track.key for _, track in members])
                wanted[model] += manager.num_new_blocks_of(
                    (track.key, track.num_computed, sequence.num_tokens(track)) for sequence, track in members
                )
        return all(need <= have for need, have in zip(wanted, spare, strict=True))

    def bring_back(self, gang: Gang, found: list[list[Entry]], schedule: Schedule) -> None:
        """From host memory, or to the end of the prefixes found."""
        if gang.status is SequenceStatus.SWAPPED:
            for model, (manager, work) in enumerate(zip(self.managers, schedule.works, strict=True)):
                copies = manager.swap_in([track.key for _, track in gang.tracks() if track.model == model])
                work.swaps_in += [BlockCopy(*pair) for pair in copies]
            return
        leader = gang.sequences[0]
        for track, entries in zip(leader.tracks, found, strict=True):
            if not entries:
                continue
            track.num_computed = self.managers[track.model].adopt(track.key, entries)
            if not leader.output_token_ids:
                schedule.num_cached_tokens[leader.request_id] += track.num_computed
                schedule.tracks[track.role].num_cached_tokens += track.num_computed

    # -- going -----------------------------------------------------------------------------------------------

    def swap_out(self, gang: Gang, schedule: Schedule) -> bool:
        """Moves all its blocks to host memory, or none if there is no room; returns whether it did."""
        keys: dict[int, list[str]] = {}
        for _, track in gang.tracks():
            keys.setdefault(track.model, []).append(track.key)
        if not all(self.managers[model].can_swap_out(some) for model, some in keys.items()):
            return False
        for model, some in keys.items():
            schedule.works[model].swaps_out += [BlockCopy(*pair) for pair in self.managers[model].swap_out(some)]
        return True

    def forget(self, gang: Gang) -> None:
        """Gives up all its blocks, wherever they are: it computes everything again."""
        for _, track in gang.tracks():
            self.managers[track.model].release(track.key)
            track.num_computed = 0
        gang.restart = []
        if gang.status is SequenceStatus.SWAPPED:
            gang.move(SequenceStatus.WAITING)


def _copies(sequence: Sequence, work: Work) -> list[BlockCopy]:
    """Where its copies go: who is being admitted may copy from a block that is swapped in only now."""
    return work.copies if sequence.status is SequenceStatus.RUNNING else work.late_copies
