"""A model without a model: exact logits from a hash of the tokens a sequence has seen, kept in a simulated KV pool.

It reads the tokens back from the pool through the block tables, as attention would: a wrong table, a missing copy or a
stale block changes its output. Its logits are exact, so equality in tests is bitwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ramify.core import EngineCore
from ramify.kv.blocks import BlockManager
from ramify.plan import Plan, StepResult
from ramify.sampling.pipeline import sample
from ramify.scheduler import Scheduler
from ramify.text.stream import TextStream

VOCAB = 300
EMPTY = -1


class FakeDevice:
    """Runs plans over a pool of token ids; remembers every plan."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.plans: list[Plan] = []
        self.poisoned: Callable[[list[int]], bool] = lambda _tokens: False

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        contents = {copy.target: list(self.pool[copy.source]) for copy in plan.copies}
        for target, content in contents.items():
            self.pool[target] = content
        rows = []
        for chunk in plan.chunks:
            for offset, token_id in enumerate(chunk.token_ids):
                position = chunk.start + offset
                block = chunk.block_table[position // self.block_size]
                self.pool[block][position % self.block_size] = token_id
        for chunk in plan.chunks:
            seen = [
                self.pool[chunk.block_table[position // self.block_size]][position % self.block_size]
                for position in range(chunk.end)
            ]
            assert EMPTY not in seen, "a position was attended to before it was written"
            rows.append(torch.full((VOCAB,), torch.nan) if self.poisoned(seen) else logits_after(seen))
        if not plan.draws:
            return StepResult([], [])
        drawn = sample(torch.stack(rows), [item.chunks[0] for item in plan.draws], plan.draws)
        faults = {index: "not finite" for index, sound in enumerate(drawn.sound.tolist()) if not sound}
        return StepResult(drawn.token_ids.tolist(), drawn.logprobs.tolist(), faults)


def logits_after(tokens: list[int]) -> Tensor:
    numbers = random.Random(repr(tokens))
    return torch.tensor([numbers.gauss(0, 2) for _ in range(VOCAB)])


def fake_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    enable_chunked_prefill: bool = True,
    max_model_len: int = 128,
    eos_token_ids: frozenset[int] = frozenset({0}),
    seed: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
) -> EngineCore:
    scheduler = Scheduler(
        [BlockManager(num_blocks, block_size)],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        max_model_len=max_model_len,
    )
    return EngineCore(
        scheduler,
        FakeDevice(num_blocks, block_size),
        seed=seed,
        eos_token_ids=eos_token_ids,
        make_text=lambda _params: TextStream(None),
        clock=clock,
    )
