"""The draw: the published generator, exact frequencies, and noise that knows nothing but its key."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.sampling.draw import TOKEN_LEVEL, NoiseKeys, draw, gumbel, philox
from tests.noise import noise_keys

CPU = torch.device("cpu")

# Known answers published with the Random123 library for philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    low, high = torch.tensor(key)
    words = philox(tuple(torch.tensor(counter)), (low, high))
    assert tuple(int(word) for word in words) == expected


def _keys(rows: int, seed: int = 1) -> NoiseKeys:
    return noise_keys([(seed, 0, position) for position in range(rows)], CPU)


@pytest.mark.parametrize("vocab_size", [7, 256, 700])
def test_frequencies_are_softmax(vocab_size: int) -> None:
    """Chi-square at a false-alarm odds of about 1 in 10,000 for these fixed seeds (z below 3.7)."""
    draws = 40_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 1.5
    tokens = draw(logits.expand(draws, -1), _keys(draws))
    expected = logits.double().softmax(-1) * draws
    counted = torch.bincount(tokens, minlength=vocab_size).double()
    common = expected >= 5  # the chi-square law needs cells that are not nearly empty; the rest becomes one cell
    observed = torch.cat((counted[common], counted[~common].sum()[None]))
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.7


def test_what_cannot_be_drawn_never_is() -> None:
    logits = torch.full((5000, 600), -torch.inf)
    logits[:, [3, 300, 599]] = torch.tensor([0.0, -3.0, 1.0])
    assert set(draw(logits, _keys(5000)).tolist()) == {3, 300, 599}


def test_rare_tokens_are_as_rare_as_they_should_be() -> None:
    """The tail of the noise decides rare events: 1e-4 of mass over 200,000 draws is 20 +- 4.5."""
    logits = torch.tensor([0.0] + [-torch.inf] * 299 + [math.log(1e-4)])
    count = int((draw(logits.expand(200_000, -1), _keys(200_000, seed=5)) == 300).sum())
    assert 3 < count < 42


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    child=st.integers(0, 16_383),
    position=st.integers(0, 2**24),
    others=st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 16_383), st.integers(0, 9)), max_size=5),
    place=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_noise_depends_on_its_key_alone(
    seed: int, child: int, position: int, others: list[tuple[int, int, int]], place: int
) -> None:
    alone = gumbel(noise_keys([(seed, child, position)], CPU), torch.tensor([[512]]), 256, TOKEN_LEVEL)
    keys = [*others[:place], (seed, child, position), *others[place:]]
    row = min(place, len(others))
    batch = gumbel(noise_keys(keys, CPU), torch.full((len(keys), 1), 256), 1024, TOKEN_LEVEL)
    assert torch.equal(batch[row, 256:512], alone[0])


def test_no_two_keys_share_a_stream() -> None:
    keys = [
        (seed, child, position) for seed in (0, 1, -1, 2**64 - 1, 2**32) for child in (0, 1, 7) for position in (0, 1)
    ]
    noise = gumbel(noise_keys(keys, CPU), torch.zeros(len(keys), 1, dtype=torch.long), 8, TOKEN_LEVEL)
    assert len({tuple(row) for row in noise.tolist()}) == len(keys)


def test_a_padded_vocabulary_meets_the_same_noise() -> None:
    logits = torch.randn(64, 500)
    padded = torch.nn.functional.pad(logits, (0, 400), value=-torch.inf)
    assert torch.equal(draw(logits, _keys(64)), draw(padded, _keys(64)))


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_numpy_makes_the_integers_that_torch_makes(words: list[int], seed: int) -> None:
    rows = torch.tensor([words, words[::-1], [seed] * 6])[..., None]  # (3, 6, 1)
    counter = (rows[:, 0] ^ torch.arange(5), *rows[:, 1:4].unbind(1))
    key = (rows[:, 4], rows[:, 5])
    by_numpy = philox(tuple(word.numpy() for word in counter), (key[0].numpy(), key[1].numpy()))
    for one, other in zip(philox(counter, key), by_numpy, strict=True):
        assert one.tolist() == other.tolist()
