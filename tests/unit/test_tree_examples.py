"""The searches of examples/ against brute force, on a model of four tokens with exact logits."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from ramify import Node, SamplingParams
from tests import fake
from tests.unit.test_tree import check_blocks, tree_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = 4
EXACT = fake.logits_after


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def few_tokens(tokens: list[int], model: int = 0) -> Tensor:
    logits = EXACT(tokens, model) / 2
    logits[SMALL:] = -math.inf
    return logits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "logits_after", few_tokens)


def texts(prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Every continuation and its logprob."""
    told = {}
    for text in product(range(SMALL), repeat=length):
        rows = [few_tokens([*prompt, *text[:index]]).log_softmax(-1) for index in range(length)]
        told[text] = sum(float(row[token]) for row, token in zip(rows, text, strict=True))
    return told


def test_particles_estimate_the_normaliser_without_bias() -> None:
    filters = example("particle_filter")
    core = fake.fake_engine(eos_token_ids=frozenset(), max_num_seqs=64)
    tree = tree_of(core)
    root = tree.root([1, 2])

    def potential(node: Node) -> float:
        return 0.1 + 3.0 * node.new_token_ids.count(1) * (node.new_token_ids[-1] == 2 if node.depth else 1)

    def value(text: tuple[int, ...]) -> float:
        return 0.1 + 3.0 * text.count(1) * (text[-1] == 2)

    exact = sum(math.exp(logprob) * value(text) for text, logprob in texts([1, 2], 3).items())
    found = []
    for seed in range(80):
        params = SamplingParams(max_tokens=1, seed=seed)
        posterior = filters.particle_filter(tree, root, potential, params, particles=6, steps=3, seed=seed)
        assert sum(posterior.weights) == pytest.approx(1)
        found.append(math.exp(posterior.log_z))
    error = statistics.stdev(found) / math.sqrt(len(found))
    assert abs(statistics.mean(found) - exact) < 4 * error
    assert error < 0.2 * exact, "an estimate that says nothing would pass"


def test_a_particle_that_was_worth_nothing_stays_worth_nothing() -> None:
    """What it would gain by being worth something again was a division by zero."""
    filters = example("particle_filter")
    tree = tree_of(fake.fake_engine(eos_token_ids=frozenset(), max_num_seqs=64))
    root = tree.root([1, 2])

    def potential(node: Node) -> float:
        return 0.0 if node.depth == 1 and node.token_ids[2] == 0 else 1.0

    fallen = []
    for seed in range(20):  # where few fall, nobody is resampled
        params = SamplingParams(max_tokens=1, seed=seed)
        posterior = filters.particle_filter(tree, root, potential, params, particles=8, steps=2, seed=seed)
        shares = zip(posterior.nodes, posterior.weights, strict=True)
        fallen += [weight for node, weight in shares if node.token_ids[2] == 0]
    assert fallen
    assert fallen == [0.0] * len(fallen)


def test_resampling_keeps_shares() -> None:
    filters = example("particle_filter")
    weights = [0.5, 0.0, 0.3, 0.2]
    for offset in (0.0, 0.3, 0.999):
        chosen = filters.systematic(weights, offset)
        assert len(chosen) == 4
        assert chosen.count(0) == 2
        assert 1 not in chosen
    assert filters.log_mean([-math.inf, -math.inf]) == -math.inf


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_power_samples_follow_the_power(alpha: float) -> None:
    power = example("power_sampling")
    core = fake.fake_engine(eos_token_ids=frozenset(), max_num_seqs=256, num_blocks=3_000)
    tree = tree_of(core)
    params = SamplingParams(max_tokens=1, seed=5)
    chains = power.power_sample(
        tree, tree.root([3, 1]), params, alpha=alpha, chains=120, pieces=2, moves=14 if alpha > 1 else 2
    )
    told = texts([3, 1], 2)
    mass = sum(math.exp(alpha * logprob) for logprob in told.values())
    shares = {text: math.exp(alpha * logprob) / mass for text, logprob in told.items()}
    mean = sum(share * told[text] for text, share in shares.items())
    spread = math.sqrt(sum(share * (told[text] - mean) ** 2 for text, share in shares.items()))
    found = statistics.mean(chain.logprob for chain in chains)
    assert abs(found - mean) < 4 * spread / math.sqrt(len(chains))
    best = max(shares, key=lambda text: shares[text])
    count = sum(chain.path[-1].new_token_ids == best for chain in chains)
    expected = shares[best] * len(chains)
    assert abs(count - expected) < 4 * math.sqrt(expected * (1 - shares[best]))
    del chains
    tree.close()
    check_blocks(core)


def test_steps_that_a_verifier_likes_go_on() -> None:
    search = example("step_beam_search")
    core = fake.fake_engine(eos_token_ids=frozenset(), num_blocks=500)
    tree = tree_of(core)
    root = tree.root([1, 2, 3])
    wanted = (2, 3, 3)

    def reward(_: str) -> float:
        return 0.0

    by_logprob = search.beam_search(tree, root, reward, SamplingParams(n=16, max_tokens=1, seed=1), width=2, steps=3)
    assert by_logprob[0].node.total_logprob >= by_logprob[1].node.total_logprob
    assert len(tree) <= 1 + 2 * 3 + 2
    told = {tree.decode(text): text for text in texts([1, 2, 3], 3)}

    def matching(text: str) -> float:
        prefix = tree.decode(wanted)
        return float(len(text) if prefix.startswith(text) else -1)

    params = SamplingParams(n=16, max_tokens=1, temperature=5.0, seed=1)
    [best] = search.beam_search(tree, root, matching, params, width=1, steps=3)
    assert told[best.node.text] == wanted
