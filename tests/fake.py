"""A model without a model: exact logits from a hash of the tokens a sequence has seen, kept in a simulated KV pool.

It reads the tokens back from the pool through the block tables, as attention would: a wrong table, a missing copy or a
stale block changes its output. Its logits are exact, so equality in tests is bitwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ramify.config import LogprobsMode, PreemptionMode
from ramify.core import EngineCore
from ramify.kv.blocks import BlockManager
from ramify.plan import Chunk, Plan, StepResult, Ticket
from ramify.sampling.mixing import Mixer
from ramify.sampling.pipeline import Sampler, Source
from ramify.sampling.reports import report
from ramify.scheduler import Scheduler
from ramify.sequence import PENDING
from ramify.text.stream import TextStream

VOCAB = 300
EMPTY = -1


class FakeDevice:
    """Runs plans over pools of token ids, one per model; remembers every plan. With a mixer, draws have two tracks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        logprobs_mode: LogprobsMode = "raw",
        *,
        runs_ahead: bool = False,
        num_models: int = 1,
        mixer: Mixer | None = None,
    ) -> None:
        self.block_size = block_size
        self.pools = [[[EMPTY] * block_size for _ in range(num_blocks)] for _ in range(num_models)]
        self.hosts = [[[EMPTY] * block_size for _ in range(num_host_blocks)] for _ in range(num_models)]
        self.plans: list[Plan] = []
        self.runs_ahead = runs_ahead
        self._last_drawn: dict[str, int] = {}  # by track
        self.sampler = Sampler(logprobs_mode, mixer)
        self.poisoned: Callable[[list[int]], bool] = lambda _tokens: False

    def _check_sharing(self, plan: Plan) -> None:
        for group in plan.shared:
            chunks = [plan.chunks[index] for index in group.chunks]
            tables = {(chunk.model, chunk.block_table[: group.num_blocks]) for chunk in chunks}
            assert len(tables) == 1, "a group that does not share"
            assert all(plan.chunks[index].start >= group.num_blocks * self.block_size for index in group.chunks)

    def launch(self, plan: Plan) -> Ticket:
        """Runs at once, but tells later: who runs ahead sees tokens as PENDING, as on a real device."""
        result = self.run(plan)
        for draw, token_id in zip(plan.draws, result.token_ids, strict=True):
            self._last_drawn.update({plan.chunks[chunk].key: token_id for chunk in draw.chunks})
        return lambda: result

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        for moves, sources, targets in (
            (plan.swaps_out, self.pools, self.hosts),
            (plan.copies, self.pools, self.pools),
            (plan.swaps_in, self.hosts, self.pools),
            (plan.late_copies, self.pools, self.pools),
        ):
            contents = {(move.model, move.target): list(sources[move.model][move.source]) for move in moves}
            assert len(contents) == len(moves), "two moves into one block"
            for (model, target), content in contents.items():
                targets[model][target] = content
        self._check_sharing(plan)
        rows = []
        for chunk in plan.chunks:
            for offset, token_id in enumerate(chunk.token_ids):
                position = chunk.start + offset
                block = chunk.block_table[position // self.block_size]
                known = self._last_drawn[chunk.key] if token_id == PENDING else token_id
                self.pools[chunk.model][block][position % self.block_size] = known
        for chunk in plan.chunks:
            seen = self._seen(chunk)
            assert EMPTY not in seen, "a position was attended to before it was written"
            rows.append(self._logits(seen, chunk.model))
        prompts = []
        for asked in plan.prompt_reports:
            chunk = plan.chunks[asked.chunk]
            assert 0 <= asked.first <= len(chunk.token_ids) - len(asked.targets), "asked about rows of another step"
            seen = self._seen(chunk)
            ends = [chunk.start + asked.first + row + 1 for row in range(len(asked.targets))]
            logits = torch.stack([self._logits(seen[:end], chunk.model) for end in ends])
            prompts.append([row[0] for row in report(logits, torch.tensor(asked.targets)[:, None], asked.num_top)])
        if not plan.draws:
            return StepResult([], [], prompts=prompts)
        logits = torch.stack(rows)
        by_track = zip(*(item.chunks for item in plan.draws), strict=True)
        result = self.sampler.sample([Source(logits, chunks) for chunks in by_track], plan.draws)
        result.prompts.extend(prompts)
        return result

    def _logits(self, seen: list[int], model: int) -> Tensor:
        return torch.full((VOCAB,), torch.nan) if self.poisoned(seen) else logits_after(seen, model)

    def _seen(self, chunk: Chunk) -> list[int]:
        pool = self.pools[chunk.model]
        return [
            pool[chunk.block_table[position // self.block_size]][position % self.block_size]
            for position in range(chunk.end)
        ]


def logits_after(tokens: list[int], model: int = 0) -> Tensor:
    """Exact, and its own for each model."""
    numbers = random.Random(f"{model}{tokens!r}" if model else repr(tokens))
    return torch.tensor([numbers.gauss(0, 2) for _ in range(VOCAB)])


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
    clock: Callable[[], float] = lambda: 0.0,
) -> EngineCore:
    scheduler = Scheduler(
        [
            BlockManager(
                num_blocks,
                block_size,
                enable_prefix_caching=enable_prefix_caching,
                num_host_blocks=num_host_blocks,
            )
            for _ in range(num_models)
        ],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        max_model_len=max_model_len,
        preemption_mode=preemption_mode,
    )
    return EngineCore(
        scheduler,
        FakeDevice(
            num_blocks,
            block_size,
            num_host_blocks,
            logprobs_mode,
            runs_ahead=runs_ahead,
            num_models=num_models,
            mixer=mixer,
        ),
        seed=seed,
        eos_token_ids=eos_token_ids,
        make_text=lambda _params: TextStream(None),
        clock=clock,
    )
