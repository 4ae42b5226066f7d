"""DraftModel: a model that guesses the next tokens of another, or of a mixture that it is part of.

It draws with the noise that the draft will meet, so that it errs only where the two distributions come apart. It has
blocks and a step of its own: nothing of the engine's waits for them, and who lacks room is not drafted for.

    tokens     p p p p o o|d d d        computed up to here, then a pass for each drafted token
    afterwards p p p p o o d x          d was drawn, then x: what was computed after d counts for nothing
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from ramify.engine.blocks import BlockManager
from ramify.engine.demands import Demands
from ramify.engine.device import Device
from ramify.engine.drafting.drafter import Wanted
from ramify.engine.plan import BlockCopy, Chunk, Draw, Plan, Row, Work
from ramify.engine.sequence import Sequence, Track
from ramify.engine.shared_reads import SharedReads


@dataclass(slots=True)
class _Followed:
    """What the model has computed of a sequence: positions, the last of which may be drafted tokens."""

    key: str
    num_computed: int = 0
    num_output: int = 0  # that was known in the last draft
    drafted: list[int] = field(default_factory=list)  # behind that

    def go_back(self, num_prompt: int, output: Items[int]) -> None:
        """To what the sequence has, but for its last token: the logits after it are wanted."""
        num_right = 0
        for token_id, drawn in zip(self.drafted, output[self.num_output :], strict=False):
            if token_id != drawn:
                break
            num_right += 1
        known = num_prompt + min(self.num_output + num_right, len(output) - 1)
        self.num_computed = min(self.num_computed, known)
        self.num_output, self.drafted = len(output), []


class DraftModel:
    foreseen = None  # its positions are in blocks of its own

    def __init__(
        self,
        step: Device,
        manager: BlockManager,
        *,
        cost: float,
        role: int,
        vocab_size: int,
        num_known: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        """role: whose prompt it sees, of the tracks of the sequences that it drafts for. vocab_size: theirs. num_known:
        the tokens that it knows, the first ones: models of one tokenizer may be padded to different sizes."""
        self.cost = cost
        self._step = step
        self._manager = manager
        self._role = role
        self._vocab_size = vocab_size
        self._num_known = num_known
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._shared_reads = SharedReads(manager)
        self._followed: dict[str, _Followed] = {}  # by sequence, the longest not drafted for first

    # -- drafting --------------------------------------------------------------------------------------------

    def serves(self, demands: Demands) -> bool:
        return demands.largest_token_id < self._num_known

    def draft(self, wanted: Items[Wanted]) -> list[list[int]]:
        """All of them together, a pass for each further token. Who has much to catch up with is drafted for later."""
        drafts: list[list[int]] = [[] for _ in wanted]
        going = self._catch_up(wanted, drafts)
        while going:
            work, draws, able = Work(), [], []
            for number in going:
                each = wanted[number]
                track, known = each.sequence.tracks[self._role], self._followed[each.sequence.seq_id]
                start = len(track.prompt_token_ids) + len(each.sequence.output_token_ids) + len(drafts[number]) - 1
                if self._place(track, known, start, drafts[number][-1:], work):
                    draws.append(_draw(each, drafts[number], len(work.chunks) - 1, 0))
                    able.append(number)
            going = self._run(wanted, drafts, work, draws, able)
        for each, drafted in zip(wanted, drafts, strict=True):
            self._followed[each.sequence.seq_id].drafted = drafted
        return drafts

    def _catch_up(self, wanted: Items[Wanted], drafts: list[list[int]]) -> list[int]:
        """Computes what was drawn since the last time, or the whole prompt, and draws after it; returns who goes on."""
        budget = self._max_num_batched_tokens
        work, draws, able = Work(), [], []
        for number, each in enumerate(wanted):
            sequence = each.sequence
            track, known = sequence.tracks[self._role], self._begin(sequence)
            num_tokens = sequence.num_tokens(track)
            count = min(num_tokens - known.num_computed, budget)
            if count <= 0 or num_tokens + each.most > self._max_model_len:
                continue
            start, end = known.num_computed, known.num_computed + count
            tokens = sequence.tokens_between(track, start, end)
            if max(tokens) >= self._num_known or not self._place(track, known, start, tokens, work):
                continue
            self._manager.publish(known.key, end, partial(sequence.tokens_between, track))
            budget -= count
            if end == num_tokens:
                draws.append(_draw(each, (), len(work.chunks) - 1, count - 1))
                able.append(number)
        return self._run(wanted, drafts, work, draws, able)

    def _begin(self, sequence: Sequence) -> _Followed:
        """Where the model stands with a sequence; blocks of others that begin alike are taken over."""
        track = sequence.tracks[self._role]
        known = self._followed.pop(sequence.seq_id, None)
        if known is None:
            known = _Followed(track.key)
            found = self._manager.find(sequence.tokens_between(track, 0, sequence.num_tokens(track)))
            known.num_computed = self._manager.adopt(known.key, found)
            known.num_output = len(sequence.output_token_ids)
        self._followed[sequence.seq_id] = known
        known.go_back(len(track.prompt_token_ids), sequence.output_token_ids)
        return known

    def _place(self, track: Track, known: _Followed, start: int, tokens: Items[int], work: Work) -> bool:
        """Gives these positions blocks and a chunk; returns whether there was room."""
        manager, end = self._manager, start + len(tokens)
        if manager.num_new_blocks(known.key, start, end) > manager.num_free:
            return False
        work.copies.extend(BlockCopy(*pair) for pair in manager.extend(known.key, start, end))
        work.chunks.append(Chunk(list(tokens), start, manager.table(known.key), track.key))
        known.num_computed = end
        return True

    def _run(
        self, wanted: Items[Wanted], drafts: list[list[int]], work: Work, draws: list[Draw], able: list[int]
    ) -> list[int]:
        """One pass; returns who was given a token and wants another."""
        if not work.chunks:
            return []
        work.shared = self._shared_reads.find(work.chunks)
        result = self._step.launch(Plan([work], draws))()
        going = []
        for index, number in enumerate(able):
            token_id = result.token_ids[index]
            if index in result.faults or token_id >= self._vocab_size:
                continue
            drafts[number].append(token_id)
            if len(drafts[number]) < wanted[number].most:
                going.append(number)
        return going

    # -- sequences come and go -------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        known = self._followed.pop(sequence.seq_id, None)
        if known is not None:
            self._shared_reads.leave(known.key)
            self._manager.release(known.key)

    def end(self, request_id: str) -> None:
        """Its sequences have been forgotten one by one."""

    def reset(self) -> None:
        self._followed.clear()
        self._shared_reads.forget()
        self._manager.reset()
        self._step.reset()


def _draw(each: Wanted, drafted: Items[int], chunk: int, offset: int) -> Draw:
    """The token after what was drafted so far, as it will be drawn if all of that is right."""
    sequence = each.sequence
    output = [*sequence.output_token_ids, *drafted]
    child = sequence.child
    draw = Draw(sequence.request_id, child, child, len(output), (Row(0, chunk, offset),), each.demands, output)
    if sequence.matcher is None:
        return draw
    return draw._replace(presumed=len(drafted), matcher=sequence.matcher)
