"""The sampler's kernels on a vocabulary of real size, as one CUDA graph; the interpreter would take hours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ramify.gpu.kernels.floors import Floors
from ramify.gpu.kernels.race import SOUND, BlockScores, KeyWords, draw_tokens, keep_above, score_blocks
from ramify.gpu.kernels.top_logprobs import Reports, report
from ramify.sampling import filters, processors
from ramify.sampling.draw import draw
from tests.noise import noise_keys

ROWS, VOCAB_SIZE = 64, 151_936


class Sampler:
    """Buffers and one step: scores, floors, draw, reports."""

    def __init__(self, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: KeyWords) -> None:
        device = temperatures.device
        self.logits = torch.zeros(ROWS, VOCAB_SIZE, device=device)
        self.temperatures, self.keys = temperatures, keys
        self.top_k, self.top_p, self.min_p = top_k, top_p, min_p
        self.scores = BlockScores.empty(ROWS, VOCAB_SIZE, device)
        self.memory = Floors(ROWS, VOCAB_SIZE, device)
        self.token_ids = torch.empty(ROWS, dtype=torch.int64, device=device)
        self.logprobs = torch.empty(ROWS, device=device)
        self.faults = torch.empty(ROWS, dtype=torch.int32, device=device)
        self.reports = Reports.empty(ROWS, 20, device)

    def step(self) -> None:
        score_blocks(self.logits, self.temperatures, self.scores)
        self.floors = self.memory.find(
            self.logits, self.temperatures, self.scores, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )
        keep_above(self.logits, self.temperatures, self.floors, self.scores)
        draw_tokens(
            self.logits,
            self.temperatures,
            self.keys,
            self.scores,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            faults=self.faults,
            floors=self.floors,
        )
        report(self.logits, self.scores, self.token_ids, self.reports)


@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
@pytest.mark.parametrize(
    ("k", "p", "min_p"), [(50, 1.0, 0.0), (VOCAB_SIZE, 0.9, 0.0), (5000, 0.95, 0.0), (40, 0.9, 0.05)]
)
def test_a_captured_step_draws_what_torch_draws(
    device: torch.device, spread: float, k: int, p: float, min_p: float
) -> None:
    torch.manual_seed(k)
    column = torch.ones(ROWS, device=device)
    keys = noise_keys([(-row, row, 3 * row) for row in range(ROWS)], device)
    words = KeyWords(
        *(part.flatten().contiguous() for part in (keys.seed_low, keys.seed_high, keys.child, keys.position))
    )
    sampler = Sampler(column * 0.8, (column * k).long(), column * p, column * min_p, words)
    sampler.step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.step()
    logits = torch.randn(ROWS, VOCAB_SIZE, device=device) * spread
    logits[1, ::2] = -torch.inf
    sampler.logits.copy_(logits)
    graph.replay()
    torch.cuda.synchronize()

    assert (sampler.faults == SOUND).all()
    scaled = processors.temperature(logits, column * 0.8)
    chosen = filters.Filters((column * k).long(), column * p, column * min_p if min_p else None)
    kept = filters.apply(scaled, chosen)
    stays = logits >= sampler.floors[:, None]
    differs = ((kept > -torch.inf) != stays) & (logits > -torch.inf)
    assert float((kept.double().softmax(-1) * differs).sum(-1).max()) < 1e-4
    # Borders that rounding moved, and near-ties, may change a token in a hundred.
    assert int((sampler.token_ids != draw(kept, keys)).sum()) <= 2
    expected = logits.double().log_softmax(-1)
    own = expected.gather(1, sampler.token_ids[:, None])[:, 0]
    torch.testing.assert_close(sampler.logprobs.double(), own, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(sampler.reports.logprobs.double(), own, atol=2e-5, rtol=2e-5)
    top = logits.topk(20, dim=-1).values
    assert torch.equal(logits.gather(1, sampler.reports.top_ids), top)
    ranks = (logits > logits.gather(1, sampler.token_ids[:, None])).sum(-1) + 1
    assert torch.equal(sampler.reports.ranks.long(), ranks)
