"""Who computes what in the next step. Touches no tensor; returns a frozen Plan.

There is no prefill or decode phase: each track's computed count catches up with its tokens, within the step's budget
of tokens. A sequence runs once the blocks that it may ever need are set aside, so a running sequence never lacks one:

    set aside = the prompt once per request + the longest own suffix of each running sequence  <=  the pool
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ramify.errors import InvalidInputError
from ramify.kv.blocks import BlockManager
from ramify.plan import BlockCopy, Chunk
from ramify.request import Request
from ramify.sequence import Sequence, SequenceStatus, Track


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence, the index of its first chunk in this step, and whether its tracks will have caught up after it."""

    sequence: Sequence
    first_chunk: int
    caught_up: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    sequences: tuple[ScheduledSequence, ...]
    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...]


class Scheduler:
    """First come, first served; children of a started request go before new requests."""

    def __init__(
        self,
        managers: list[BlockManager],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        max_model_len: int,
    ) -> None:
        self.managers = managers
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_model_len = max_model_len
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._requests: dict[str, Request] = {}
        self._started: set[str] = set()  # requests whose prompt is set aside
        self._set_aside = [0] * len(managers)

    # -- requests come and go --------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raises InvalidInputError for a request that could never be scheduled."""
        root = request.root
        longest = self.longest_output(root)
        for track in root.tracks:
            manager = self.managers[track.model]
            prompt = len(track.prompt_token_ids)
            if longest < 0 or longest < (request.sampling_params.max_tokens or 0):
                raise InvalidInputError(
                    f"prompt of {prompt} tokens plus max_tokens {request.sampling_params.max_tokens} must fit "
                    f"max_model_len = {self.max_model_len}"
                )
            if not self.enable_chunked_prefill and prompt > self.max_num_batched_tokens:
                raise InvalidInputError(
                    f"prompt must have at most max_num_batched_tokens = {self.max_num_batched_tokens} tokens "
                    f"while enable_chunked_prefill is False, got {prompt}"
                )
            needed = manager.blocks_for(prompt) + self._own_blocks(root)[track.model]
            if needed > manager.num_blocks:
                raise InvalidInputError(
                    f"prompt of {prompt} tokens plus an output of up to {longest} needs {needed} KV blocks, "
                    f"the cache has {manager.num_blocks}: lower max_tokens or raise num_kv_blocks"
                )

    def longest_output(self, sequence: Sequence) -> int:
        """How long an output may get: max_tokens, or what the context leaves; negative if the prompt is too long."""
        room = self.max_model_len - max(len(track.prompt_token_ids) for track in sequence.tracks)
        limit = sequence.sampling_params.max_tokens
        if limit is None:
            return room if room > 0 else -1
        return min(limit, room)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.waiting.append(request.root)

    def adopt(self, children: Iterable[Sequence]) -> None:
        """Takes over forks of a running sequence: they run as far as there is room, the others wait in front."""
        late: list[Sequence] = []
        for child in children:
            if not late and self._has_room(child):
                self._start(child)
            else:
                child.move(SequenceStatus.WAITING)
                late.append(child)
        self.waiting.extendleft(reversed(late))

    def remove(self, sequence: Sequence) -> None:
        """Frees everything a sequence holds, at once, in whatever state it is."""
        for track in sequence.tracks:
            self.managers[track.model].release(track.key)
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(self._own_blocks(sequence))
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def close(self, request: Request) -> None:
        """The last of a request's sequences has been removed."""
        del self._requests[request.request_id]
        if request.request_id in self._started:
            self._started.remove(request.request_id)
            self._give_back(self._prompt_blocks(request.root))

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        self._admit()
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        # Sequences that need least go first: decodes are not held up by a long prompt.
        for sequence in sorted(self.running, key=self._num_missing):
            if budget == 0:
                break
            first = len(chunks)
            caught_up = True
            for track in sequence.tracks:
                missing = sequence.num_missing(track)
                count = min(missing, budget)
                if count < missing:
                    caught_up = False
                    if not self.enable_chunked_prefill:
                        continue
                if count:
                    budget -= count
                    chunk, chunk_copies = self._chunk(sequence, track, count)
                    chunks.append(chunk)
                    copies += chunk_copies
            if len(chunks) > first:
                scheduled.append(ScheduledSequence(sequence, first, caught_up))
        return Schedule(tuple(scheduled), tuple(chunks), tuple(copies))

    def _chunk(self, sequence: Sequence, track: Track, count: int) -> tuple[Chunk, list[BlockCopy]]:
        manager = self.managers[track.model]
        start, end = track.num_computed, track.num_computed + count
        copies = manager.extend(track.key, start, end)
        track.num_computed = end  # true once this plan has run, and nothing runs before it
        chunk = Chunk(track.model, sequence.tokens_between(track, start, end), start, manager.table(track.key))
        return chunk, [BlockCopy(track.model, source, target) for source, target in copies]

    def _admit(self) -> None:
        while self.waiting and self._has_room(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.move(SequenceStatus.RUNNING)
            self._start(sequence)

    # -- what is set aside -----------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> None:
        self._set_aside = [aside + more for aside, more in zip(self._set_aside, self._needs(sequence), strict=True)]
        self._started.add(sequence.request_id or "")
        self.running.append(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        return len(self.running) < self.max_num_seqs and all(
            aside + more <= manager.num_blocks
            for aside, more, manager in zip(self._set_aside, self._needs(sequence), self.managers, strict=True)
        )

    def _needs(self, sequence: Sequence) -> list[int]:
        """Blocks to set aside before this sequence may run: the first of a request brings the prompt."""
        own = self._own_blocks(sequence)
        if sequence.request_id in self._started:
            return own
        return [mine + prompt for mine, prompt in zip(own, self._prompt_blocks(sequence), strict=True)]

    def _prompt_blocks(self, sequence: Sequence) -> list[int]:
        blocks = [0] * len(self.managers)
        for track in sequence.tracks:
            blocks[track.model] += self.managers[track.model].blocks_for(len(track.prompt_token_ids))
        return blocks

    def _own_blocks(self, sequence: Sequence) -> list[int]:
        """The most blocks a sequence can hold beside its prompt's full ones (a copy of the partial one included)."""
        blocks = [0] * len(self.managers)
        for track in sequence.tracks:
            manager = self.managers[track.model]
            prompt = len(track.prompt_token_ids)
            longest = prompt + max(self.longest_output(sequence), 0)
            blocks[track.model] += manager.blocks_for(longest) - prompt // manager.block_size
        return blocks

    def _give_back(self, blocks: list[int]) -> None:
        self._set_aside = [aside - less for aside, less in zip(self._set_aside, blocks, strict=True)]

    def _num_missing(self, sequence: Sequence) -> int:
        return sum(sequence.num_missing(track) for track in sequence.tracks)
