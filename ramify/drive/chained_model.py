"""ChainedModel: a model of its own drafts on the device, in blocks of its own.

It computes each prompt once more, and what was drawn while nobody asked for drafts. Afterwards it has computed all that
it drafted: of these, what was drawn stays. What was not is computed again with the tokens that were drawn instead.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial

from ramify.drive.chained_drafter import ChainedDrafter, DraftingDevice
from ramify.engine.blocks import BlockManager
from ramify.engine.device import Device
from ramify.engine.drafting.drafter import Standing
from ramify.engine.plan import BlockCopy, Chunk, Plan, Work
from ramify.engine.sequence import Sequence


class ChainedModel(ChainedDrafter):
    foreseen = None

    def __init__(
        self,
        device: DraftingDevice,
        step: Device,
        manager: BlockManager,
        *,
        cost: float,
        role: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_known: int | None = None,
    ) -> None:
        """device: what checks the drafts. step: of the model that drafts."""
        super().__init__(device, manager, cost=cost, role=role, max_model_len=max_model_len, num_known=num_known)
        self._step = step
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_computed: dict[str, int] = {}  # positions of tokens that were drawn, by sequence

    def _catch_up(self, standings: Items[Standing]) -> None:
        """As far as a step takes it; who has more to catch up with is drafted for later."""
        work, budget = Work(), self._max_num_batched_tokens
        for each in standings:
            sequence, track, end = each.sequence, self._track(each), self._start(each)
            start = min(self._begin(each), end)
            end = min(end, start + budget)
            is_known = each.num_output == len(sequence.output_token_ids)
            self._num_computed[sequence.seq_id] = start
            tokens = sequence.tokens_between(track, start, max(start, end))
            if (
                start >= end
                or not is_known
                or not self._knows(max(tokens))
                or self._manager.num_new_blocks(track.key, start, end) > self._manager.num_free
            ):
                continue
            work.copies.extend(BlockCopy(*pair) for pair in self._manager.extend(track.key, start, end))
            work.chunks.append(Chunk(tokens, start, self._manager.table(track.key), track.key))
            self._manager.publish(track.key, end, partial(sequence.tokens_between, track))
            self._num_computed[sequence.seq_id] = end
            budget -= end - start
        if work.chunks:
            self._shared_reads.forget()
            work.shared = self._shared_reads.find(work.chunks)
            self._step.launch(Plan([work], []))

    def _begin(self, each: Standing) -> int:
        """How many positions are computed; blocks of others that begin alike are taken over."""
        sequence, track = each.sequence, self._track(each)
        if sequence.seq_id not in self._num_computed:
            found = self._manager.find(sequence.tokens_between(track, 0, sequence.num_tokens(track)))
            self._num_computed[sequence.seq_id] = self._manager.adopt(track.key, found)
        return self._num_computed[sequence.seq_id]

    def _is_ready(self, each: Standing, start: int) -> bool:
        return self._num_computed[each.sequence.seq_id] >= start

    def _note(self, each: Standing, end: int) -> None:
        """Of what comes behind its last token nobody knows yet whether it will be drawn."""
        self._num_computed[each.sequence.seq_id] = min(end, self._start(each) + 1)

    def confirm(self, standings: Items[Standing]) -> None:
        """Drafts of theirs were checked: of all before their last token it has computed the tokens that were drawn."""
        super().confirm(standings)
        for each in standings:
            if each.sequence.seq_id in self._num_computed:
                self._num_computed[each.sequence.seq_id] = self._start(each)

    # -- sequences come and go -------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        if self._num_computed.pop(sequence.seq_id, None) is not None:
            self._manager.release(sequence.tracks[self._role].key)

    def reset(self) -> None:
        super().reset()
        self._num_computed = {}
        self._manager.reset()
        self._step.reset()
