"""Logprobs as callers see them: ranks where tokens tie, and what cannot be drawn."""

from __future__ import annotations

import numpy as np
import torch

from ramify import SamplingParams
from ramify.engine.plan import TokenReport
from ramify.engine.search.logprob_rows import logprob_row
from tests.drive import finish
from tests.fake import VOCAB, FakeDevice, fake_engine


def report(logprob: float, rank: int, token_ids: list[int], logprobs: list[float]) -> TokenReport:
    return TokenReport(logprob, rank, np.array(token_ids), np.array(logprobs, np.float32))


def test_tokens_that_tie_share_a_rank() -> None:
    row = logprob_row(4, report(-2.0, 4, [7, 8, 9, 4, 5], [-1.0, -1.0, -1.0, -2.0, -3.0]), None)
    assert {token_id: told.rank for token_id, told in row.items()} == {7: 1, 8: 1, 9: 1, 4: 4, 5: 5}


def test_the_tokens_own_rank_is_that_of_its_logit() -> None:
    """Two logits may differ in a digit that their logprobs do not have."""
    row = logprob_row(8, report(-1.0, 2, [7, 8], [-1.0, -1.0]), None)
    assert [told.rank for told in row.values()] == [1, 2]


def test_what_cannot_be_drawn_is_not_listed() -> None:
    row = logprob_row(7, report(0.0, 1, [7, 8], [0.0, float("-inf")]), None)
    assert list(row) == [7]


def test_a_token_has_one_rank_however_many_are_listed_beside_it() -> None:
    """Of two that tie, the second was told as rank 2 in a list of both, and as rank 1 by itself."""
    logits = torch.zeros(VOCAB)
    logits[[11, 22, 33]] = torch.tensor([9.0, 9.0, 5.0])
    core = fake_engine()
    assert isinstance(core.device, FakeDevice)
    core.device.layers[0].logits_of = lambda _seen: logits
    ranks = set()
    for count in (0, 1, 2, 5):
        params = SamplingParams(n=8, max_tokens=1, seed=3, logprobs=count)
        [output] = finish(core, [([1, 2], params)])
        for completion in output.outputs:
            assert completion.logprobs is not None
            [drawn], [row] = completion.token_ids, completion.logprobs
            if drawn in (11, 22):
                ranks.add((drawn, row[drawn].rank))
    assert ranks == {(11, 1), (22, 1)}
