"""Diverse sets whose next tokens are drawn before the host knows the last ones, and which siblings these ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ramify import Request, RequestOutput, SamplingParams
from ramify.device.graphs import padded
from ramify.gpu.sampler import KernelSampler
from tests.fake import VOCAB, FakeDevice, fake_engine
from tests.unit.test_engine import alone, tokens_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fake layers are on the CPU, kernels on the GPU here")
FEW = [0, 4, 9, 17]  # the first ends a sibling, so that some end in every step


def test_a_sibling_that_has_ended_is_not_looked_at_any_more() -> None:
    kernels = KernelSampler(padded(8), VOCAB, torch.device("cpu"), "raw")
    core = fake_engine(runs_ahead=True, kernels=kernels, max_num_seqs=8)
    asked = [
        ([number, 5], SamplingParams(strategy="diverse", n=4, diversity_penalty=30.0, seed=number, max_tokens=7))
        for number in (1, 2)
    ]
    params = [replace(each, allowed_token_ids=FEW) for _, each in asked]
    for (prompt, _), own in zip(asked, params, strict=True):
        core.add_request(Request(str(prompt[0]), None, prompt, own))
    finished: dict[str, RequestOutput] = {}
    num_unseen = 0
    while core.has_unfinished():
        finished |= {output.request_id: output for output in core.step() if output.finished}
        num_unseen += core._under_way is not None
    assert isinstance(core.device, FakeDevice)
    assert num_unseen >= 3
    for (prompt, _), own in zip(asked, params, strict=True):
        found = tokens_of(finished[str(prompt[0])])
        assert len({len(tokens) for tokens in found}) > 1, "none ended before the others"
        assert found == alone(prompt, own)
    assert core.stats()["blocks_in_use"] == 0
