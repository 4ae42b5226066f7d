"""The GPU's draw against torch's: the same integers, the same tokens, the model's own logprobs."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kernels import race as kernel
from ramify.gpu.kernels.race import NOT_FINITE, NOTHING_LEFT, SOUND, BlockScores, KeyWords
from ramify.sampling import draw as truth
from ramify.sampling import processors
from ramify.sampling.draw import NoiseKeys
from tests.noise import noise_keys

Keys = list[tuple[int, int, int]]
MARGIN = 1e-3  # where the reference itself is this close to another token, rounding may decide


def _random_keys(rows: int, seed: int = 0) -> Keys:
    source = random.Random(seed)
    seeds = (0, -1, 2**64 - 1, -(2**63), 2**32, 2**63)
    return [
        (
            source.choice(seeds) if source.random() < 0.2 else source.randrange(-(2**63), 2**64),
            source.randrange(2**14),
            source.randrange(2**20),
        )
        for _ in range(rows)
    ]


def _many(device: torch.device, few: int) -> int:
    """How many rows: the interpreter takes some 20 ms for each."""
    return 4000 if device.type == "cuda" else few


def _words(keys: NoiseKeys) -> KeyWords:
    return KeyWords(
        *(part.flatten().contiguous() for part in (keys.seed_low, keys.seed_high, keys.child, keys.position))
    )


class Drawn:
    """One run of the kernels."""

    def __init__(
        self,
        logits: Tensor,
        temperatures: Tensor,
        keys: KeyWords,
        floors: Tensor | None = None,
        raw: Tensor | None = None,
    ) -> None:
        rows, vocab_size = logits.shape
        scores = BlockScores.empty(rows, vocab_size, logits.device)
        kernel.score_blocks(logits, temperatures, scores)
        before = None
        if raw is not None:
            before = raw, BlockScores.empty(rows, vocab_size, logits.device)
            kernel.score_blocks(*before[:1], torch.ones_like(temperatures), before[1])
        if floors is not None:
            kernel.keep_above(logits, temperatures, floors, scores)
        self.scores = scores
        self.token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        self.logprobs = torch.empty(rows, device=logits.device)
        self.faults = torch.empty(rows, dtype=torch.int32, device=logits.device)
        kernel.draw_tokens(
            logits,
            temperatures,
            keys,
            scores,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            faults=self.faults,
            floors=floors,
            raw=before,
        )


def _check_tokens(token_ids: Tensor, processed: Tensor, keys: NoiseKeys) -> None:
    """Equal to torch's draw from processed logits, but for near-ties of the reference's own races."""
    scores = truth.block_scores(processed) + truth.block_noise(keys, processed.shape[1])
    blocks = scores.argmax(-1)
    first = blocks[:, None] * truth.BLOCK
    inside = truth.take_blocks(processed, blocks)
    race = inside + truth.gumbel(keys, first, truth.BLOCK, truth.TOKEN_LEVEL)
    expected = truth.draw(processed, keys)

    def margin(race: Tensor) -> Tensor:
        if race.shape[1] == 1:
            return torch.full_like(race[:, 0], torch.inf)
        best = race.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]

    decided = torch.minimum(margin(scores), margin(race)) > MARGIN
    assert torch.equal(token_ids[decided], expected[decided])
    assert int((token_ids != expected).sum()) <= max(1, len(expected) // 100)


@triton.jit
def _write_philox(out: tl.tensor, words: tl.tensor, count: tl.constexpr) -> None:
    """words (6, count): four counter words and two key words, each column a call -> out (4, count)."""
    lanes = tl.arange(0, count)
    w0, w1, w2, w3 = kernel.philox(
        tl.load(words + lanes).to(tl.uint32),
        tl.load(words + count + lanes).to(tl.uint32),
        tl.load(words + 2 * count + lanes).to(tl.uint32),
        tl.load(words + 3 * count + lanes).to(tl.uint32),
        tl.load(words + 4 * count + lanes).to(tl.uint32),
        tl.load(words + 5 * count + lanes).to(tl.uint32),
    )
    tl.store(out + lanes, w0.to(tl.int64))
    tl.store(out + count + lanes, w1.to(tl.int64))
    tl.store(out + 2 * count + lanes, w2.to(tl.int64))
    tl.store(out + 3 * count + lanes, w3.to(tl.int64))


@triton.jit
def _write_noise(
    integers: tl.tensor, noise: tl.tensor, first: tl.tensor, keys: tl.tensor, level: tl.constexpr, count: tl.constexpr
) -> None:
    row = tl.program_id(0)
    low, high = tl.load(keys + row * 4), tl.load(keys + row * 4 + 1)
    child, position = tl.load(keys + row * 4 + 2), tl.load(keys + row * 4 + 3)
    words = kernel.random_words(first, low, high, child, position, level, count)
    tl.store(integers + row * count + tl.arange(0, count), words.to(tl.int64))
    tl.store(noise + row * count + tl.arange(0, count), kernel.gumbel(words))


def test_philox_is_the_same_bit_for_bit(device: torch.device) -> None:
    count = 8192
    keys = noise_keys(_random_keys(count), device)
    counters = torch.randint(0, 2**32, (count, 1), device=device)
    level = torch.arange(count, device=device)[:, None] % 2
    counter = counters, keys.position, keys.child, level
    words = torch.cat((*counter, keys.seed_low, keys.seed_high), dim=1).T.contiguous()
    words[:, 0], words[:, 1] = 0, 2**32 - 1
    out = torch.empty(4, count, dtype=torch.int64, device=device)
    _write_philox[(1,)](out, words, count=count)
    expected = truth.philox(tuple(words[:4]), (words[4], words[5]))
    assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize(("level", "first"), [(truth.BLOCK_LEVEL, 0), (truth.TOKEN_LEVEL, 512), (1, 2**20)])
def test_ids_take_their_own_words(device: torch.device, level: int, first: int) -> None:
    rows = 6
    keys = noise_keys(_random_keys(rows), device)
    packed = torch.cat((keys.seed_low, keys.seed_high, keys.child, keys.position), dim=1).contiguous()
    integers = torch.empty(rows, 256, dtype=torch.int64, device=device)
    noise = torch.empty(rows, 256, device=device)
    _write_noise[(rows,)](integers, noise, first, packed, level=level, count=256)
    counters = first // 4 + torch.arange(64, device=device)
    words = truth.philox(
        (counters, keys.position, keys.child, torch.full_like(keys.child, level)), (keys.seed_low, keys.seed_high)
    )
    assert torch.equal(integers, torch.stack(words, dim=-1).flatten(1))
    expected = truth.gumbel(keys, torch.full_like(keys.child, first), 256, level)
    torch.testing.assert_close(noise, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [7, 256, 515, 1000, 4999])
def test_tokens_are_those_of_torch(device: torch.device, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    rows = _many(device, 24)
    keys = noise_keys(_random_keys(rows, vocab_size), device)
    logits = torch.randn(rows, vocab_size, device=device) * 3
    drawn = Drawn(logits, torch.ones(rows, device=device), _words(keys))
    _check_tokens(drawn.token_ids, logits, keys)
    expected = logits.double().log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert (drawn.faults == SOUND).all()


def test_words_may_be_32_bits_wide(device: torch.device) -> None:
    keys = noise_keys(_random_keys(20), device)
    logits = torch.randn(20, 700, device=device)
    wide = _words(keys)
    narrow = KeyWords(*(part.to(torch.int32) for part in wide))  # keeps the lowest 32 bits
    temperatures = torch.ones(20, device=device)
    assert torch.equal(Drawn(logits, temperatures, wide).token_ids, Drawn(logits, temperatures, narrow).token_ids)


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 0.7, 1e30])
def test_temperatures(device: torch.device, temperature: float) -> None:
    torch.manual_seed(1)
    rows = _many(device, 12)
    keys = noise_keys(_random_keys(rows, 3), device)
    logits = torch.randn(rows, 1000, device=device) * 5
    logits[::3, 100:600] = -torch.inf
    temperatures = torch.full((rows,), temperature, device=device)
    drawn = Drawn(logits, temperatures, _words(keys))
    _check_tokens(drawn.token_ids, processors.temperature(logits, temperatures), keys)
    assert logits.gather(1, drawn.token_ids[:, None]).isfinite().all()


def test_greedy_rows_take_the_lowest_of_the_largest(device: torch.device) -> None:
    logits = torch.randint(-3, 4, (20, 1000), device=device).float()
    logits[0] = -5.0
    logits[1, 300:] = -torch.inf
    keys = noise_keys(_random_keys(20), device)
    temperatures = torch.zeros(20, device=device)
    temperatures[1::2] = 1.0  # random rows beside them change nothing
    drawn = Drawn(logits, temperatures, _words(keys))
    assert torch.equal(drawn.token_ids[::2], logits[::2].argmax(-1))
    _check_tokens(drawn.token_ids[1::2], logits[1::2], noise_keys(_random_keys(20)[1::2], device))


def test_floors_leave_out_what_is_below(device: torch.device) -> None:
    torch.manual_seed(2)
    rows = _many(device, 40)
    keys = noise_keys(_random_keys(rows, 5), device)
    logits = torch.randn(rows, 1300, device=device) * 2
    temperatures = torch.linspace(0.3, 3.0, rows, device=device)
    floors = logits.topk(40, dim=-1).values[:, -1].contiguous()
    floors[::5] = -torch.inf
    floors[1::5] = logits[1::5].amax(-1)  # the likeliest alone
    drawn = Drawn(logits, temperatures, _words(keys), floors)
    kept = logits.masked_fill(logits < floors[:, None], -torch.inf)
    _check_tokens(drawn.token_ids, processors.temperature(kept, temperatures), keys)
    assert (logits.gather(1, drawn.token_ids[:, None])[:, 0] >= floors).all()
    expected = logits.double().log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, atol=1e-5, rtol=1e-5)


def test_logprobs_are_of_the_logits_before_controls(device: torch.device) -> None:
    torch.manual_seed(3)
    raw = torch.randn(30, 600, device=device)
    controlled = raw + torch.randn_like(raw)
    keys = noise_keys(_random_keys(30, 6), device)
    drawn = Drawn(controlled, torch.ones(30, device=device), _words(keys), raw=raw)
    _check_tokens(drawn.token_ids, controlled, keys)
    expected = raw.double().log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, atol=1e-5, rtol=1e-5)


def test_extreme_logits_and_faults(device: torch.device) -> None:
    logits = torch.zeros(8, 600, device=device)
    logits[1, 37] = torch.nan
    logits[2, 300] = torch.inf
    logits[3] = -torch.inf
    logits[4] = torch.linspace(-1, 1, 600, device=device) * 3e38
    logits[5, :] = -torch.inf
    logits[5, 599] = -1e30
    logits[6] = 1e5
    keys = _words(noise_keys(_random_keys(8), device))
    for temperature in (0.0, 1e-30, 1.0):
        drawn = Drawn(logits, torch.full((8,), temperature, device=device), keys)
        assert drawn.faults.tolist() == [0, NOT_FINITE, NOT_FINITE, NOT_FINITE, 0, 0, 0, 0]
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < 600)).all()
        assert drawn.token_ids[4:6].tolist() == [599, 599]
        assert drawn.logprobs[4:6].tolist() == [0.0, 0.0]
    sound = torch.zeros_like(logits)
    forbidden = torch.full_like(logits, -torch.inf)
    drawn = Drawn(forbidden, torch.ones(8, device=device), keys, raw=sound)
    assert drawn.faults.tolist() == [NOTHING_LEFT] * 8


def test_a_row_is_the_same_in_every_batch(device: torch.device) -> None:
    logits = torch.randn(12, 900, device=device)
    keys = _words(noise_keys(_random_keys(12), device))
    temperatures = torch.rand(12, device=device) + 0.5
    together = Drawn(logits, temperatures, keys)
    for row in (0, 7):
        one = slice(row, row + 1)
        alone = Drawn(logits[one], temperatures[one], KeyWords(*(part[one] for part in keys)))
        assert torch.equal(alone.token_ids, together.token_ids[one])
        assert torch.equal(alone.logprobs, together.logprobs[one])
