"""A model without a model: exact logits from a hash of the tokens a sequence has seen, kept in a simulated KV pool.

`FakeLayers` stand under the engine's own device step, in the place of torch's operators or kernels. They are handed
tokens, slots and reads, and read the tokens back from the pool through the block tables, as attention would: a wrong
table, row, slot or token, a missing copy or a stale block changes their output. Logits are exact, so equality in tests
is bitwise.

Keys and values follow from all tokens before theirs. So each position also holds what it was computed after, and who
reads it looks whether that is its own past: the right token of a block that was computed after another prefix is found
too, though it would change no logits here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models
from torch import Tensor

from ramify.config import LogprobsMode, PreemptionMode
from ramify.device.captured_layers import CapturedLayers
from ramify.device.crossing import CrossedLayers
from ramify.device.lane import most_rows
from ramify.device.layers import Batch
from ramify.device.reads import Reads, SharingRule
from ramify.device.sampler_kernels import SamplerKernels
from ramify.device.step import Capture, DeviceStep
from ramify.drive.student_drafter import StudentDrafter
from ramify.engine.blocks import BlockManager
from ramify.engine.core import EngineCore
from ramify.engine.drafting.drafter import Drafter
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.drafting.together import Together
from ramify.engine.plan import BlockCopy, Plan, Ticket, Work
from ramify.engine.scheduler import Scheduler
from ramify.engine.sharing import Table
from ramify.sampling.mixing import Mixer
from ramify.sampling_params import SamplingParams
from ramify.text.codec import TextCodec
from ramify.text.stream import TextStream
from ramify.text.token_text import byte_of_character
from ramify.text.tokenizer import Tokenizer

VOCAB = 300
EMPTY = -1


class Position(NamedTuple):
    """What a slot holds of a position: its token, and what that and all tokens before it come to."""

    token_id: int = EMPTY
    past: int = EMPTY


def pasts_of(token_ids: Sequence[int]) -> list[int]:
    """Of positions from the first on."""
    return list(accumulate(token_ids, lambda past, token_id: hash((past, token_id))))


class FakePool:
    """Blocks of positions, on the device and on the host."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.blocks = [[Position()] * block_size for _ in range(num_blocks)]
        self.host = [[Position()] * block_size for _ in range(num_host_blocks)]

    def move(self, work: Work) -> None:
        self._copy(work.swaps_out, self.blocks, self.host)
        self._copy(work.copies, self.blocks, self.blocks)
        self._copy(work.swaps_in, self.host, self.blocks)
        self._copy(work.late_copies, self.blocks, self.blocks)

    def read(self, table: Table, end: int) -> list[Position]:
        """What whoever has this table holds before this position."""
        return [held for block in table[: -(-end // self.block_size)] for held in self.blocks[block]][:end]

    def _copy(self, copies: Sequence[BlockCopy], sources: list[list[Position]], targets: list[list[Position]]) -> None:
        contents = {copy.target: list(sources[copy.source]) for copy in copies}
        assert len(contents) == len(copies), "two moves into one block"
        for target, content in contents.items():
            targets[target] = content


class FakeLayers:
    """Hidden states are logits already."""

    device = torch.device("cpu")
    vocab_size = VOCAB
    sharing = SharingRule(fewest_positions=1)

    def __init__(self, pool: FakePool, model: int) -> None:
        self.pool = pool
        self.poisoned: Callable[[list[int]], bool] = lambda _tokens: False
        self.logits_of: Callable[[list[int]], Tensor] = lambda seen: logits_after(seen, model)
        self._tables: dict[int, Table] = {}  # of single rows, as a device keeps them

    def prepare(self, reads: Reads) -> None:
        size = reads.block_size
        reads = replace(reads, tables=self._true_tables(reads))
        starts, ends = (reads.ends - 1).tolist(), (reads.ends - 1 + reads.num_rows).tolist()
        written = {
            block
            for table, start, end in zip(reads.tables, starts, ends, strict=True)
            for block in table[start // size : -(-end // size)]
        }
        for prefix in reads.shared:
            tables = {reads.tables[sharer][: prefix.num_blocks] for sharer in prefix.sharers}
            assert len(tables) == 1, "sharers that do not share"
            assert written.isdisjoint(tables.pop()), "read together while this step writes it"
            assert all(reads.ends[sharer] > prefix.num_blocks * size for sharer in prefix.sharers), "not yet computed"
            assert all(reads.begins[sharer] == prefix.num_blocks * size for sharer in prefix.sharers)
        if size > 1 and bool((reads.num_rows == 1).all()):
            for table, start in zip(reads.tables, starts, strict=True):
                # Kernels for few rows read all but the last positions while others still write (gpu/early_decode.py).
                first_late = max(0, start - 1) // size if start % size == 0 else start // size
                assert written.isdisjoint(table[:first_late]), "read while another row writes it"
        self._reads = reads

    def _true_tables(self, reads: Reads) -> list[Table]:
        """Those of beams that only the device knows of follow from the tables of the step before."""
        followed, before = reads.followed, self._tables
        singles = zip(reads.first_rows.tolist(), reads.num_rows.tolist(), reads.tables, strict=True)
        self._tables = {row: table for row, count, table in singles if count == 1}
        if followed is not None:
            parents = followed.parents[torch.from_numpy(followed.sources)].tolist()
            columns = (followed.rows, followed.blocks, followed.indices, followed.is_inside)
            moves = zip(parents, *(column.tolist() for column in columns), strict=True)
            copies = []
            for parent, row, block, index, is_inside in moves:
                self._tables[row] = (*before[parent][:index], block)
                if is_inside and before[parent][index] != block:
                    copies.append(BlockCopy(before[parent][index], block))
            sources, targets = ({copy[side] for copy in copies} for side in (0, 1))
            assert sources.isdisjoint(targets), "beams are copied all at once: one would read what another writes"
            self.pool.move(Work(copies=copies))
        rows = zip(reads.first_rows.tolist(), reads.num_rows.tolist(), reads.tables, strict=True)
        return [self._tables[row] if count == 1 else table for row, count, table in rows]

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        size = self.pool.block_size
        token_ids, positions, slots = (column.tolist() for column in batch)
        chosen: list[int] | None = None if rows is None else rows.tolist()
        assert len(token_ids) == self._reads.size
        written = [slot for slot in slots if slot >= 0]
        assert len(set(written)) == len(written), "two rows in one slot"
        for token_id, slot in zip(token_ids, slots, strict=True):
            if slot >= 0:
                self.pool.blocks[slot // size][slot % size] = Position(token_id)
        logits: list[Tensor | None] = [None] * len(token_ids)
        reads, blocks = self._reads, self.pool.blocks
        read: list[tuple[list[int], list[int]]] = []
        for chunk, table in enumerate(reads.tables):  # keys and values of all rows are written before they are read
            start, end = int(reads.ends[chunk]) - 1, int(reads.ends[chunk] + reads.num_rows[chunk] - 1)
            seen = [held.token_id for held in self.pool.read(table, end)]
            assert EMPTY not in seen, "a position was attended to before it was written"
            pasts = pasts_of(seen)
            for position in range(start, end):
                own = blocks[table[position // size]]
                own[position % size] = Position(seen[position], pasts[position])
            read.append((seen, pasts))
        for chunk, (table, (seen, pasts)) in enumerate(zip(reads.tables, read, strict=True)):
            first = int(reads.first_rows[chunk])
            assert [held.past for held in self.pool.read(table, len(seen))] == pasts, "computed after another past"
            for offset in range(int(reads.num_rows[chunk])):
                row, length = first + offset, int(reads.ends[chunk]) + offset
                assert positions[row] == length - 1, "a row at another's position"
                assert slots[row] == table[(length - 1) // size] * size + (length - 1) % size, "written elsewhere"
                assert logits[row] is None, "two chunks in one row"
                if chosen is None or row in chosen:
                    logits[row] = self._logits(seen[:length])
        empty = torch.full((VOCAB,), torch.nan)  # padding
        told = [empty if each is None else each for each in logits]
        return torch.stack(told) if chosen is None else torch.stack([empty, *told])[1:][chosen]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out.copy_(hidden)

    def _logits(self, seen: list[int]) -> Tensor:
        return torch.full((VOCAB,), torch.nan) if self.poisoned(seen) else self.logits_of(seen)


class FakeDevice(DeviceStep):
    """The engine's device step over fake layers, one per model; remembers every plan."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        logprobs_mode: LogprobsMode = "raw",
        *,
        max_num_seqs: int = 16,
        runs_ahead: bool = False,
        num_models: int = 1,
        mixer: Mixer | None = None,
        kernels: SamplerKernels | None = None,
        elsewhere: Mapping[int, Capture] | None = None,
        drafting: SamplerKernels | None = None,
    ) -> None:
        """elsewhere: models on a device other than the one that draws, and who captures them there."""
        elsewhere = elsewhere or {}
        self.pools = [FakePool(num_blocks, block_size, num_host_blocks) for _ in range(num_models)]
        self.layers = [FakeLayers(pool, model) for model, pool in enumerate(self.pools)]
        self.plans: list[Plan] = []
        self.crossed: dict[int, CrossedLayers] = {}
        for model, capture in elsewhere.items():
            max_rows = most_rows(max_num_seqs, 1 if mixer is None else 2, num_models)
            own = self.layers[model] if capture == "nobody" else CapturedLayers(self.layers[model], max_rows)
            self.crossed[model] = CrossedLayers(own, torch.device("cpu"))
        super().__init__(
            [self.crossed.get(model, each) for model, each in enumerate(self.layers)],
            max_num_seqs=max_num_seqs,
            logprobs_mode=logprobs_mode,
            mixer=mixer,
            kernels=kernels,
            captures=[elsewhere.get(model, "step") for model in range(num_models)],
            runs_ahead=runs_ahead,
            chooses=num_models == 1 and not elsewhere,
            drafting=drafting,
        )

    def begin(self, plan: Plan) -> Callable[[], Ticket]:
        self.plans.append(plan.spelled_out())
        return super().begin(plan)

    def num_tokens(self, plan: Plan) -> int:
        return sum(len(chunk.token_ids) for work in plan.works for chunk in work.chunks)

    def poison(self, poisoned: Callable[[list[int]], bool]) -> None:
        """After such tokens, logits are NaN."""
        for layers in self.layers:
            layers.poisoned = poisoned


def logits_after(tokens: list[int], model: int = 0) -> Tensor:
    """Exact, and its own for each model."""
    digest = hashlib.blake2b(repr((model, tokens)).encode(), digest_size=8).digest()
    numbers = torch.Generator().manual_seed(int.from_bytes(digest, signed=True))
    return 2 * torch.randn(VOCAB, generator=numbers)


def fake_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    enable_chunked_prefill: bool = True,
    enable_prefix_caching: bool = True,
    preemption_mode: PreemptionMode = "recompute",
    num_host_blocks: int = 0,
    max_model_len: int = 128,
    eos_token_ids: frozenset[int] = frozenset({0}),
    seed: int = 0,
    logprobs_mode: LogprobsMode = "raw",
    runs_ahead: bool = False,
    num_models: int = 1,
    mixer: Mixer | None = None,
    kernels: SamplerKernels | None = None,
    elsewhere: Mapping[int, Capture] | None = None,
    drafter: Drafter | None = None,
    drafting: SamplerKernels | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    make_text: Callable[[SamplingParams, Sequence[int]], TextStream] = lambda _params, _prompt: TextStream(None),
) -> EngineCore:
    managers = [
        BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        for _ in range(num_models)
    ]
    device = FakeDevice(
        num_blocks,
        block_size,
        num_host_blocks,
        logprobs_mode,
        max_num_seqs=max_num_seqs,
        runs_ahead=runs_ahead,
        num_models=num_models,
        mixer=mixer,
        kernels=kernels,
        elsewhere=elsewhere,
        drafting=drafting,
    )
    speculation = None if drafter is None else Speculation(drafter, row_cost=0.01)
    if drafting is not None:
        student = StudentDrafter(device, managers[-1], cost=0.3, role=num_models - 1, max_model_len=max_model_len)
        speculation = Together(student)
    scheduler = Scheduler(
        managers,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        max_model_len=max_model_len,
        preemption_mode=preemption_mode,
        speculation=speculation,
    )
    return EngineCore(
        scheduler,
        device,
        seed=seed,
        eos_token_ids=eos_token_ids,
        make_text=make_text,
        clock=clock,
    )


def letters() -> TextCodec:
    """Text for fake tokens: few letters, so that stop strings are met, and one that takes two tokens."""
    half = {byte: letter for letter, byte in byte_of_character().items()}
    words = ["".join(word) for length in range(1, 6) for word in product("abc", repeat=length)]
    vocabulary = {token: place for place, token in enumerate([half[0xC3], half[0xA9], *words][:VOCAB])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return TextCodec(Tokenizer(backend))
