"""Reports against float64 log-softmax, torch's ranks, and a full sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ramify.gpu.kernels.race import BlockScores, keep_above, score_blocks
from ramify.gpu.kernels.top_logprobs import Processing, Reports, report
from ramify.sampling import processors
from ramify.sampling.token_reports import ranks


def _report(logits: Tensor, token_ids: Tensor, count: int, processing: Processing | None = None) -> Reports:
    rows, vocab_size = logits.shape
    scores = BlockScores.empty(rows, vocab_size, logits.device)
    temperatures = torch.ones(rows, device=logits.device) if processing is None else processing.temperatures
    score_blocks(logits, temperatures, scores)
    if processing is not None:
        keep_above(logits, temperatures, processing.floors, scores)
    reports = Reports.empty(rows, count, logits.device)
    report(logits, scores, token_ids, reports, processing)
    return reports


def _check(reports: Reports, logits: Tensor, token_ids: Tensor, logprobs: Tensor) -> None:
    """logprobs (R, V) float64 are what is expected of every token."""
    expected = logprobs.gather(1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(reports.logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(reports.ranks.long(), ranks(logits, token_ids[:, None])[:, 0])
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, : reports.top_ids.shape[1]]
    assert torch.equal(reports.top_ids, order)
    torch.testing.assert_close(reports.top_logprobs.double(), logprobs.gather(1, order), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("vocab_size", "count"), [(7, 7), (256, 1), (515, 20), (1000, 32), (4999, 20), (600, 0)])
def test_reports(device: torch.device, vocab_size: int, count: int) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, device=device) * 3
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, 3], device=device)
    token_ids[3] = logits[3].argmax()
    _check(_report(logits, token_ids, count), logits, token_ids, logits.double().log_softmax(-1))


def test_a_row_lists_no_more_than_it_asks_for(device: torch.device) -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 1000, device=device)
    scores = BlockScores.empty(4, 1000, device)
    score_blocks(logits, torch.ones(4, device=device), scores)
    reports = Reports.empty(4, 20, device)
    reports.top_ids.fill_(-1)
    reports.top_logprobs.fill_(7.0)
    token_ids = torch.tensor([5, 600, 899, 0], device=device)
    asked = torch.tensor([0, 5, 20, 30], device=device)
    report(logits, scores, token_ids, reports, asked=asked)
    assert torch.equal(reports.ranks.long(), ranks(logits, token_ids[:, None])[:, 0])
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for row, count in enumerate((0, 5, 20, 20)):
        assert torch.equal(reports.top_ids[row, :count], order[row, :count])
        assert (reports.top_ids[row, count:] == -1).all()
        assert (reports.top_logprobs[row, count:] == 7).all()


def test_ties_come_lowest_id_first(device: torch.device) -> None:
    logits = torch.randint(-2, 3, (4, 900), device=device).float()
    logits[0] = 1.5
    token_ids = torch.tensor([5, 600, 899, 0], device=device)
    _check(_report(logits, token_ids, 30), logits, token_ids, logits.double().log_softmax(-1))


def test_minus_infinity_is_listed_last_and_each_id_once(device: torch.device) -> None:
    logits = torch.full((3, 600), -torch.inf, device=device)
    logits[:, [40, 300, 599]] = torch.tensor([0.0, 1e38, -1e38], device=device)
    logits[1, 300] = 1.0
    token_ids = torch.tensor([300, 599, 7], device=device)
    _check(_report(logits, token_ids, 20), logits, token_ids, logits.double().log_softmax(-1))


def test_processed_logprobs_are_of_what_is_left(device: torch.device) -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 1000, device=device) * 2
    temperatures = torch.tensor([0.5, 2.0, 0.0, 1.0], device=device)
    floors = logits.topk(12, dim=-1).values[:, -1].contiguous()
    floors[3] = -torch.inf
    token_ids = logits.topk(3, dim=-1).indices[:, 2].contiguous()
    kept = logits.masked_fill(logits < floors[:, None], -torch.inf)
    expected = processors.temperature(kept.double(), temperatures.double()).log_softmax(-1)
    expected[2] = logits[2].double().log_softmax(-1)  # greedy: as it is
    reports = _report(logits, token_ids, 20, Processing(temperatures, floors))
    _check(reports, logits, token_ids, expected)


def test_faulty_rows_stay_within_the_vocabulary(device: torch.device) -> None:
    logits = torch.randn(3, 700, device=device)
    logits[0, 5] = torch.nan
    logits[1, 400] = torch.inf
    logits[2] = -torch.inf
    reports = _report(logits, torch.tensor([1, 2, 3], device=device), 20)
    assert ((reports.top_ids >= 0) & (reports.top_ids < 700)).all()
    assert not (reports.logprobs.isfinite()).any()
