"""Beams chosen on the device: what the host chooses, before the host knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify import Request, RequestOutput, SamplingParams
from ramify.device.graphs import padded
from ramify.engine.core import EngineCore
from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import Plan, Ticket
from ramify.gpu.kernels import selection as fields
from ramify.gpu.kernels.selection import empty_orders, empty_totals, select_beams
from ramify.gpu.sampler import KernelSampler
from tests.fake import VOCAB, FakeDevice, fake_engine
from tests.kernels.test_schedules import TorchKernels
from tests.kernels.test_schedules import run as run_schedule
from tests.unit.test_engine import Setting, worlds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fake layers are on the CPU, kernels on the GPU here")
CPU = torch.device("cpu")


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(each.token_ids, each.cumulative_logprob, each.score, each.finish_reason) for each in output.outputs]
        for output in outputs
    ]


class LaunchedUnseen:
    """Counts the plans with a search that goes on from a choice that only the device knows."""

    def __init__(self, device: FakeDevice) -> None:
        self.count = 0
        self._launch = device.launch
        device.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Plan) -> Ticket:
        self.count += any(each.totals is None for each in plan.selections)
        return self._launch(plan)


def run(core: EngineCore, asked: list[tuple[list[int], SamplingParams]]) -> tuple[list[RequestOutput], int]:
    """The outputs, and how many steps were launched before the choice of the one before was known to the host."""
    device = core.device
    assert isinstance(device, FakeDevice)
    launched = LaunchedUnseen(device)
    for number, (prompt, params) in enumerate(asked):
        core.add_request(Request(str(number), None, prompt, params))
    finished: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        for output in core.step():
            finished[output.request_id] = output
        core.scheduler.managers[0].check()
    assert core.stats()["blocks_in_use"] == 0
    return [finished[str(number)] for number in range(len(asked))], launched.count


def engine(*, chooses: bool, **options: Any) -> EngineCore:
    core = fake_engine(runs_ahead=True, kernels=KernelSampler(padded(16), VOCAB, CPU, "raw"), **options)
    assert isinstance(core.device, FakeDevice)
    core.device.chooses = chooses
    return core


BEAMS = [
    ([5, 6, 7, 8, 9], SamplingParams(strategy="beam_search", beam_width=4, n=4, max_tokens=11)),
    ([5, 6, 7], SamplingParams(strategy="beam_search", beam_width=3, n=2, max_tokens=9, length_penalty=0.3)),
]


def test_beams_that_go_on_unseen_are_those_of_the_host() -> None:
    mine, unseen = run(engine(chooses=True), BEAMS)
    theirs, waited_for = run(engine(chooses=False), BEAMS)
    assert told(mine) == told(theirs)
    assert unseen >= 8
    assert waited_for == 0


BESIDE: dict[str, dict[str, Any]] = {
    "a diverse set": {"strategy": "diverse", "n": 3, "diversity_penalty": 2.0, "seed": 1},
    "draws without replacement": {"strategy": "without_replacement", "n": 3, "seed": 1},
    "filters and controls": {
        "n": 3,
        "seed": 1,
        "top_p": 0.8,
        "repetition_penalty": 1.3,
        "typical_p": 0.9,
        "logprobs": 2,
    },
}


@pytest.mark.parametrize("kind", BESIDE)
def test_beams_are_the_same_beside_others_that_are_drawn_in_other_ways(kind: str) -> None:
    """Every wave of draws, as diverse sets need them, chose for a search again; and what a search adds up had other
    last bits beside draws without replacement."""
    alone, _ = run(engine(chooses=True), BEAMS)
    together, unseen = run(engine(chooses=True), [*BEAMS, ([1, 5, 6], SamplingParams(**BESIDE[kind], max_tokens=14))])
    assert told(together[: len(BEAMS)]) == told(alone)
    assert unseen >= 7


class TorchBeams(TorchKernels):
    """The same with candidates by torch's operators, of which the kernel chooses."""

    def serves(self, asked: SamplerChoice) -> bool:
        return asked == SamplerChoice("plain", candidates=asked.chooses, chooses=asked.chooses)

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        super().draw(logits, integers, floats, SamplerChoice("plain"))
        drawn = self._drawn.of(len(logits[0]))
        if choice.chooses:
            candidates = drawn.candidates
            weights, token_ids = logits[0].log_softmax(-1).topk(candidates.token_ids.shape[1])
            candidates.token_ids.copy_(token_ids)
            for part in (candidates.weights, candidates.logprobs):
                part.copy_(weights)
            self._searches.choose(drawn)


def _asked(params: SamplingParams, *, beams: bool) -> SamplingParams:
    """Beams that kernels choose, or plain samples."""
    common: dict[str, Any] = {"max_tokens": params.max_tokens, "stop_token_ids": params.stop_token_ids}
    if not beams:
        return SamplingParams(n=params.n, seed=params.seed or 7, **common)
    width = max(2, min(4, params.n))
    return SamplingParams(strategy="beam_search", beam_width=width, n=width, **common)


@given(world=worlds(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_whoever_comes_and_goes_beams_chosen_unseen_are_those_of_a_search_alone(
    world: Setting, data: st.DataObject
) -> None:
    requests = [
        (prompt, _asked(params, beams=data.draw(st.booleans(), label="beams")), priority)
        for prompt, params, priority in world.requests
    ]
    together = max(params.num_together or 1 for _, params, _ in requests)
    world = replace(
        world,
        runs_ahead=True,
        requests=requests,
        max_num_seqs=max(together, world.max_num_seqs),
        max_num_batched_tokens=max(together, world.max_num_batched_tokens),
    )
    run_schedule(world, data, TorchBeams(padded(world.max_num_seqs), VOCAB, CPU, "raw"))


def test_of_a_small_vocabulary_all_tokens_are_candidates() -> None:
    """Fewer than a search asks for: behind the last one lie those of the next row, which are not this beam's."""
    width = 2
    searches = torch.zeros(2, fields.FIELDS.value, dtype=torch.int64)
    entry = searches[1]
    searches[0, 0], entry[:5] = 1, torch.tensor([width, 5, 0, 1, 1])  # one search: five candidates, and one end
    entry[fields.ENDS.value] = 2
    for first in (fields.ROWS, fields.LANE_ROWS, fields.ORDER):
        entry[first.value : first.value + width] = torch.tensor([0, 1])
    entry.view(torch.float64)[fields.TOTALS.value : fields.TOTALS.value + width] = torch.tensor([-9.0, 0.0]).double()
    token_ids = torch.tensor([[0, 1, 2], [2, 0, 1]])
    weights = torch.tensor([[-1.0, -2.0, -3.0], [-0.1, -3.0, -8.0]])
    chosen, parents = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    logprobs, told = torch.zeros(2), torch.zeros(2, fields.NUM_TOLD.value, dtype=torch.int64)
    select_beams(
        searches,
        empty_totals(2, CPU),
        empty_orders(2, CPU),
        token_ids,
        weights,
        weights,
        chosen=chosen,
        chosen_logprobs=logprobs,
        parents=parents,
        told=told,
    )
    # -3 and -8 by the second beam, -10 and -11 by the first, whose place the second continuation takes.
    assert told[:, fields.TOTAL.value].view(torch.float64).tolist() == [-8.0, -3.0]
    assert (chosen.tolist(), parents.tolist()) == ([1, 0], [1, 1])
