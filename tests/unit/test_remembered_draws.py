"""Draws that remember: arithmetic codes and mirostat's limit, over outputs, schedules, and steps drawn twice."""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from ramify import InvalidInputError, SamplingParams
from ramify.engine.demands import Demands
from ramify.engine.plan import Draw
from ramify.sampling import pipeline
from ramify.sampling.arithmetic import Code, first_code, read, refilled
from ramify.sampling.memory import Memory
from ramify.sampling.pipeline import Sampler, Source
from tests.drive import finish
from tests.equivalence.test_sampler_reference import chi_square_limit
from tests.fake import fake_engine

LOGITS = torch.tensor([[1.0, 0.2, -0.5, 0.7, -2.0], [0.0, 2.0, 0.1, -1.0, 0.5]])


def chi_square(counted: Counter[Any], probabilities: dict[Any, float], total: int) -> float:
    assert set(counted) <= set(probabilities)
    return sum((counted[key] - share * total) ** 2 / (share * total) for key, share in probabilities.items())


def sequences(params: SamplingParams, seeds: range, length: int = 2) -> list[list[tuple[int, ...]]]:
    """What the children of some requests draw, from logits that depend on the last token."""
    sampler = Sampler()
    asked = [(Demands(params, seed=seed), child, list[int]()) for seed in seeds for child in range(params.n)]
    for position in range(length):
        rows = [output[-1] % 2 if output else 0 for _, _, output in asked]
        draws = [Draw("r", child, child, position, (), demands, tuple(output)) for demands, child, output in asked]
        tokens = sampler.sample([Source(LOGITS, rows)], draws).token_ids
        for (_, _, output), token in zip(asked, tokens, strict=True):
            output.append(token)
    outputs = [tuple(output) for _, _, output in asked]
    return [outputs[start : start + params.n] for start in range(0, len(outputs), params.n)]


def exact(temperature: float = 1.0) -> dict[tuple[int, ...], float]:
    shares = (LOGITS.double() / temperature).softmax(-1).tolist()
    return {(a, b): shares[0][a] * shares[a % 2][b] for a in range(5) for b in range(5)}


def test_every_child_of_an_arithmetic_set_is_an_exact_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ROWS_AT_ONCE", 256)
    params = SamplingParams(n=3, strategy="arithmetic", temperature=0.8)
    drawn = sequences(params, range(1_000))
    for child in range(3):
        counted = Counter(samples[child] for samples in drawn)
        assert chi_square(counted, exact(0.8), 1_000) < chi_square_limit(24)


def test_averages_over_a_set_vary_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of one first token among 8 samples, over 100 seeds: by independent samples, and by spread ones."""
    monkeypatch.setattr(pipeline, "ROWS_AT_ONCE", 256)
    variances = {}
    for strategy in ("parallel", "arithmetic"):
        drawn = sequences(SamplingParams(n=8, strategy=strategy), range(100))
        variances[strategy] = float(np.var([sum(first == 0 for first, _ in samples) / 8 for samples in drawn]))
    assert variances["arithmetic"] < 0.2 * variances["parallel"], variances


def test_children_cover_the_distribution() -> None:
    """Of n codes, n times its probability fall into each sequence, but for less than one."""
    [samples] = sequences(SamplingParams(n=64, strategy="arithmetic"), range(11, 12))
    counted = Counter(samples)
    for sequence, share in exact().items():
        assert abs(counted[sequence] - 64 * share) < 1 + 1e-9


def test_a_code_never_runs_out_of_bits() -> None:
    """Two hundred fair coins and more than 53 bits: the late ones are as fair as the first."""
    logits = torch.zeros(1, 2)
    demands = Demands(SamplingParams(n=4, strategy="arithmetic"), seed=5)
    ones = 0
    for child in range(4):
        code = first_code(Draw("r", child, child, 0, (), demands, ()))
        tokens = []
        for position in range(400):
            draw = Draw("r", child, child, position, (), demands, ())
            [token], [code] = read(logits, [refilled(code, draw)])
            tokens.append(token)
        ones += sum(tokens[100:])
        assert len({tuple(tokens[start : start + 20]) for start in range(100, 380)}) > 250, "no bits come twice"
    assert abs(ones - 600) < 5 * math.sqrt(300)


def test_codes_at_the_edges_read_what_can_be_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]] * 3)
    tokens, following = read(logits, [Code(0.0, 1e-9), Code(0.5, 1e-9), Code(1 - 2**-53, 1e-9)])
    assert tokens == [1, 3, 3]
    assert all(0 <= code.value < 1 for code in following)


def test_a_set_is_the_same_in_every_schedule() -> None:
    """Few blocks, so that children are preempted and come back; and alone, beside others, in steps of few tokens."""
    params = SamplingParams(n=4, seed=3, strategy="arithmetic", max_tokens=12, ignore_eos=True, temperature=1.3)
    follows = SamplingParams(n=3, seed=4, mirostat_tau=2.0, max_tokens=12, ignore_eos=True)
    asked = [([7, 8, 9], params), ([1, 2], follows)]
    roomy = [[completion.token_ids for completion in output.outputs] for output in finish(fake_engine(), asked)]
    tight: list[dict[str, Any]] = [{"num_blocks": 9, "block_size": 4}, {"max_num_seqs": 2}]
    for options in (*tight, {"max_num_batched_tokens": 3}):
        narrow = finish(fake_engine(**options), asked)
        assert [[completion.token_ids for completion in output.outputs] for output in narrow] == roomy, options


def test_a_step_drawn_again_draws_the_same() -> None:
    demands = Demands(SamplingParams(n=2, strategy="arithmetic"), seed=1)
    sampler = Sampler()
    for position in range(5):
        draws = [Draw("r", child, child, position, (), demands, ()) for child in range(2)]
        source = [Source(LOGITS, [0, 1])]
        assert sampler.sample(source, draws).token_ids == sampler.sample(source, draws).token_ids


def test_what_a_request_remembers_goes_with_it() -> None:
    memory: Memory[int] = Memory()
    demands = Demands(SamplingParams())
    draw = Draw("r", 0, 0, 0, (), demands, ())
    memory.note(draw, 5)
    assert memory.recall(draw._replace(position=1), 0) == 5
    assert memory.recall(draw._replace(position=1, child=1), 0) == 0
    del draw, demands
    gc.collect()
    assert len(memory._known) == 0


# -- mirostat ------------------------------------------------------------------------------------------------------


def test_mirostat_follows_the_surprise() -> None:
    """Every limit and every cut against the rule, written out; at the end outputs surprise as much as was asked for."""
    torch.manual_seed(2)
    table = torch.randn(40, 200) * 1.5
    params = SamplingParams(mirostat_tau=3.0, mirostat_eta=0.2, logprobs=200, max_tokens=None)
    demands = Demands(params, seed=9)
    sampler, numbers = Sampler("processed"), random.Random(4)
    limit, surprises = 6.0, []
    for position in range(300):
        row = numbers.randrange(40)
        draw = Draw("r", 0, 0, position, (), demands, ())
        result = sampler.sample([Source(table, [row])], [draw])
        logprobs = table[row].double().log_softmax(-1).numpy()
        stays = (-logprobs / math.log(2) <= limit) | (logprobs == logprobs.max())
        kept = np.exp(logprobs) * stays / (np.exp(logprobs) * stays).sum()
        report, token = result.reports[0], result.token_ids[0]
        assert {int(each) for each in report.top_token_ids[report.top_logprobs > -np.inf]} == set(np.flatnonzero(stays))
        surprises.append(-math.log2(kept[token]))
        limit -= 0.2 * (surprises[-1] - 3.0)
    assert sum(surprises[50:]) / 250 == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "arithmetic", "n": 2, "best_of": 4},
        {"strategy": "arithmetic", "seed": 1, "child": 1},
        {"strategy": "arithmetic", "n": 2, "temperature": 0},
        {"strategy": "beam_search", "mirostat_tau": 3.0},
        {"mirostat_tau": 3.0, "xtc_probability": 0.5},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        SamplingParams(**options)
