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
from ramify.plan import Plan, StepResult, Ticket
from ramify.sampling.pipeline import Sampler
from ramify.sampling.reports import report
from ramify.scheduler import Scheduler
from ramify.sequence import PENDING
from ramify.text.stream import TextStream

VOCAB = 300
EMPTY = -1


class FakeDevice:
    """Runs plans over a pool of token ids; remembers every plan."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        logprobs_mode: LogprobsMode = "raw",
        *,
        runs_ahead: bool = False,
    ) -> None:
        self.block_size = block_size
        self.pool = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.host = [[EMPTY] * block_size for _ in range(num_host_blocks)]
        self.plans: list[Plan] = []
        self.runs_ahead = runs_ahead
        self._last_drawn: dict[str, int] = {}  # by track
        self.sampler = Sampler(logprobs_mode)
        self.poisoned: Callable[[list[int]], bool] = lambda _tokens: False

    def _check_sharing(self, plan: Plan) -> None:
        for group in plan.shared:
            tables = {plan.chunks[index].block_table[: group.num_blocks] for index in group.chunks}
            assert len(tables) == 1, "a group that does not share"
            assert all(plan.chunks[index].start >= group.num_blocks * self.block_size for index in group.chunks)

    def launch(self, plan: Plan) -> Ticket:
        """Runs at once, but tells later: who runs ahead sees tokens as PENDING, as on a real device."""
        result = self.run(plan)
        for draw, token_id in zip(plan.draws, result.token_ids, strict=True):
            self._last_drawn[plan.chunks[draw.chunks[0]].key] = token_id
        return lambda: result

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        for moves, sources, targets in (
            (plan.swaps_out, self.pool, self.host),
            (plan.copies, self.pool, self.pool),
            (plan.swaps_in, self.host, self.pool),
            (plan.late_copies, self.pool, self.pool),
        ):
            contents = {move.target: list(sources[move.source]) for move in moves}
            assert len(contents) == len(moves), "two moves into one block"
            for target, content in contents.items():
                targets[target] = content
        self._check_sharing(plan)
        rows = []
        for chunk in plan.chunks:
            for offset, token_id in enumerate(chunk.token_ids):
                position = chunk.start + offset
                block = chunk.block_table[position // self.block_size]
                known = self._last_drawn[chunk.key] if token_id == PENDING else token_id
                self.pool[block][position % self.block_size] = known
        for chunk in plan.chunks:
            seen = [
                self.pool[chunk.block_table[position // self.block_size]][position % self.block_size]
                for position in range(chunk.end)
            ]
            assert EMPTY not in seen, "a position was attended to before it was written"
            rows.append(torch.full((VOCAB,), torch.nan) if self.poisoned(seen) else logits_after(seen))
        prompts = []
        for asked in plan.prompt_reports:
            chunk = plan.chunks[asked.chunk]
            seen = [
                self.pool[chunk.block_table[position // self.block_size]][position % self.block_size]
                for position in range(chunk.end)
            ]
            ends = [chunk.start + asked.first + row + 1 for row in range(len(asked.targets))]
            logits = torch.stack([logits_after(seen[:end]) for end in ends])
            prompts.append([row[0] for row in report(logits, torch.tensor(asked.targets)[:, None], asked.num_top)])
        if not plan.draws:
            return StepResult([], [], prompts=prompts)
        result = self.sampler.sample(torch.stack(rows), [item.chunks[0] for item in plan.draws], plan.draws)
        result.prompts.extend(prompts)
        return result


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
    enable_prefix_caching: bool = True,
    preemption_mode: PreemptionMode = "recompute",
    num_host_blocks: int = 0,
    max_model_len: int = 128,
    eos_token_ids: frozenset[int] = frozenset({0}),
    seed: int = 0,
    logprobs_mode: LogprobsMode = "raw",
    runs_ahead: bool = False,
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
        ],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        max_model_len=max_model_len,
        preemption_mode=preemption_mode,
    )
    return EngineCore(
        scheduler,
        FakeDevice(num_blocks, block_size, num_host_blocks, logprobs_mode, runs_ahead=runs_ahead),
        seed=seed,
        eos_token_ids=eos_token_ids,
        make_text=lambda _params: TextStream(None),
        clock=clock,
    )
