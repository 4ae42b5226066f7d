"""From raw logits to drawn tokens, in one order:

    raw logprobs are the model's own
    controls    bans, bias, penalties, callers' processors                   controls.py
    filters     temperature, then what cuts unlikely tokens off              narrowing.py
    processed logprobs are of what is left
    the draw, or the likeliest candidates of a beam

Greedy rows take the largest logit after the controls; beams skip the temperature. Where two models are mixed, the
controls act on both, the mixture (which brings the temperature) takes the place of the raw logits, and all filters but
the temperature act on it. Whatever touches the whole vocabulary happens a few rows at a time, so that it stays in
cache; noise, which does not, is made for many rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.engine.plan import Draw, StepResult
from ramify.sampling.arithmetic import Code, first_code, read, refilled
from ramify.sampling.columns import CHILD, POSITION, SEED_HIGH, SEED_LOW, Columns
from ramify.sampling.controls import control, find_grammatical
from ramify.sampling.draw import NoiseKeys, block_noise, choose_tokens, take_blocks
from ramify.sampling.memory import Memory
from ramify.sampling.mixing import Mixer
from ramify.sampling.narrowing import BENDS, BENDS_OF_MIXTURES, FILTERS, FILTERS_OF_MIXTURES
from ramify.sampling.operators import Operators, Task
from ramify.sampling.piece import Piece, Rows
from ramify.sampling.remaining import Remaining
from ramify.sampling.settings import KnownSettings, Settings

ROWS_AT_ONCE = 8  # some 2 MB at a time
NOISE_AT_ONCE = 256  # n = 16,384 first tokens never become one array


class Source(NamedTuple):
    """Logits (rows, vocabulary), and for each draw the row that it is from."""

    logits: Tensor
    rows: Sequence[int]

    def take(self, draws: Sequence[int]) -> Tensor:
        """The rows of these draws, by their indices."""
        return _take_rows(self.logits, [self.rows[draw] for draw in draws])

    def cut(self, vocab_size: int) -> Source:
        return Source(self.logits[:, :vocab_size], self.rows)


class Asked(NamedTuple):
    """A draw, and its number in the plan."""

    number: int
    draw: Draw


class Sampler:
    """Keeps the settings of rows as tensors, for as long as the rows stay the same, and what their draws remember."""

    def __init__(
        self, logprobs_mode: LogprobsMode = "raw", mixer: Mixer | None = None, *, rows_at_once: int = ROWS_AT_ONCE
    ) -> None:
        self.logprobs_mode = logprobs_mode
        self._mixer = mixer
        self.operators = Operators()
        self._rows_at_once = rows_at_once
        self._known = KnownSettings()
        self._codes: Memory[Code] = Memory()
        self._limits: Memory[float] = Memory()  # of surprise, in bits

    @torch.inference_mode()
    def sample(self, sources: Sequence[Source], draws: Sequence[Draw]) -> StepResult:
        """Draws once per entry of `draws`, from one model's logits, or from the mixture of a teacher's and a student's.

        Vocabularies may be padded to different sizes; what only one model has cannot be drawn.
        """
        assert (len(sources) == 2) == (self._mixer is not None), "two sources need a mixer, one has no use for it"
        if len(sources) == 2 and len({source.logits.shape[1] for source in sources}) == 2:
            vocab_size = min(source.logits.shape[1] for source in sources)
            sources = [source.cut(vocab_size) for source in sources]
        result = StepResult([0] * len(draws), [0.0] * len(draws))
        self._known.begin()
        asked = [Asked(index, draw) for index, draw in enumerate(draws)]
        taken: dict[str, list[int]] = {}
        for wave in _waves(asked):
            for start in range(0, len(wave), NOISE_AT_ONCE):
                self._sample_some(sources, wave[start : start + NOISE_AT_ONCE], taken, result)
            for index, draw in wave:
                if draw.demands.diversity_penalty:
                    taken.setdefault(draw.request_id, []).append(result.token_ids[index])
        return result

    def _sample_some(
        self, sources: Sequence[Source], asked: list[Asked], taken: dict[str, list[int]], result: StepResult
    ) -> None:
        device, vocab_size = sources[0].logits.device, sources[0].logits.shape[1]
        indices, draws = [index for index, _ in asked], [draw for _, draw in asked]
        columns = Columns.of(draws)
        keys = noise = None
        if any(draw.demands.is_random for draw in draws):
            words = torch.tensor(columns.integers[[SEED_LOW, SEED_HIGH, CHILD, POSITION]], device=device)
            keys = NoiseKeys(*words[:, :, None])
            noise = block_noise(keys, vocab_size, self.operators.gumbel)
        tasks: list[Task[Piece]] = []
        for start in range(0, len(asked), self._rows_at_once):
            some = slice(start, start + self._rows_at_once)
            own = Columns(columns.integers[:, some], columns.floats[:, some])
            settings = self._known.of(indices[start], draws[some], own, vocab_size, device)
            raw = [source.take(indices[some]) for source in sources]
            if self._rows_at_once == 1:  # where a row lies must not matter either: sums begin at aligned addresses
                raw = [row.clone() for row in raw]
            rows = self._rows(settings, draws[some], taken, vocab_size, device)
            act = partial(self._process, raw, rows, None if noise is None else noise[some])
            tasks.append(Task(act, is_bound=settings.has_processors))
        pieces = self.operators.run(tasks)
        token_ids = torch.cat([piece.best for piece in pieces])
        if keys is not None:
            blocks = torch.cat([piece.blocks for piece in pieces])
            inside = torch.cat([piece.inside for piece in pieces])
            drawn = choose_tokens(inside, blocks, keys, self.operators.gumbel)
            token_ids = torch.where(torch.cat([piece.rows.settings.is_raced for piece in pieces]), drawn, token_ids)
        for index, token_id in zip(indices, token_ids.tolist(), strict=True):
            result.token_ids[index] = token_id
        for piece, start in zip(pieces, range(0, len(asked), self._rows_at_once), strict=True):
            some = slice(start, start + self._rows_at_once)
            piece.tell(indices[some], token_ids[some], result)
            if piece.rows.settings.follows_surprise:
                self._note_surprises(piece, token_ids[some])

    def _rows(
        self,
        settings: Settings,
        draws: Sequence[Draw],
        taken: dict[str, list[int]],
        vocab_size: int,
        device: torch.device,
    ) -> Rows:
        rows = Rows(settings, draws, taken, operators=self.operators)
        find_grammatical(rows, vocab_size, device)
        if settings.follows_surprise:  # at first the limit is twice the surprise that is wanted
            rows.limits = [self._limits.recall(draw, 2 * draw.demands.params.mirostat_tau) for draw in draws]
        return rows

    def _note_surprises(self, piece: Piece, token_ids: Tensor) -> None:
        """A token that surprised by more than is wanted lowers the limit for the next, and one by less raises it."""
        for draw, limit, surprise in zip(piece.rows.draws, piece.rows.limits, piece.surprises(token_ids), strict=True):
            params = draw.demands.params
            if params.mirostat_tau and draw.demands.is_random:
                self._limits.note(draw, limit - params.mirostat_eta * (surprise - params.mirostat_tau))

    def _read_codes(self, kept: Tensor, rows: Rows, best: Tensor) -> Tensor:
        """Best (R,), with what the codes of arithmetic rows read."""
        reading = [row for row, draw in enumerate(rows.draws) if draw.demands.is_arithmetic]
        draws = [rows.draws[row] for row in reading]
        codes = [refilled(self._codes.recall(draw, first_code(draw)), draw) for draw in draws]
        index = torch.tensor(reading, device=kept.device)
        token_ids, following = read(kept[index], codes)
        for draw, code in zip(draws, following, strict=True):
            self._codes.note(draw, code)
        return best.index_copy(0, index, torch.tensor(token_ids, device=kept.device))

    def _process(self, logits: Sequence[Tensor], rows: Rows, noise: Tensor | None) -> Piece:
        """A few rows of each source to the winners of the race's first level."""
        settings = rows.settings
        controlled = [control(each, replace(rows, role=role) if role else rows) for role, each in enumerate(logits)]
        changed = [pair for pair in zip(logits, controlled, strict=True) if pair[1] is not pair[0]]
        alive = [after.amax(-1) > -torch.inf for _, after in changed]
        # What controls forbid is no part of a mixture, and a model that fails there has failed all the same.
        finite = [before.amax(-1) < torch.inf for before, _ in changed if self._mixer is not None]
        mixed = None
        if self._mixer is None:
            [raw], [kept] = logits, controlled
        else:
            teacher, theta = controlled
            is_first = torch.tensor([draw.position == 0 for draw in rows.draws], device=theta.device)
            mixed = self._mixer.mix(teacher, theta, settings.temperatures, is_first)
            raw = kept = mixed.logits
        scores = self.operators.block_scores(raw)
        normaliser = scores.logsumexp(-1)
        best = kept.argmax(-1) if settings.has_greedy else torch.zeros_like(normaliser, dtype=torch.long)
        uncut = kept
        if settings.has_random or settings.has_beams:
            for keep in FILTERS if mixed is None else FILTERS_OF_MIXTURES:
                kept = keep(kept, rows)
        if settings.has_kept:
            for bend in BENDS if mixed is None else BENDS_OF_MIXTURES:
                uncut = bend(uncut, rows)
        blocks = torch.zeros_like(best)
        inside = raw.new_empty(0)
        if settings.has_codes:
            best = self._read_codes(kept, rows, best)
        if noise is not None:
            if kept is not raw:
                scores = self.operators.block_scores(kept)
            blocks = (scores + noise).argmax(-1)
            inside = take_blocks(kept, blocks)
        keeps = (
            settings.has_beams or settings.follows_surprise or (self.logprobs_mode != "raw" and settings.has_reports)
        )
        piece = Piece(
            rows=rows,
            normaliser=normaliser,
            best=best,
            blocks=blocks,
            inside=inside,
            raw=raw,
            processed=kept if keeps else None,
            mode=self.logprobs_mode,
            alive=torch.stack(alive).all(0) if alive else None,
            finite=torch.stack(finite).all(0) if finite else None,
            mixed=mixed,
            remaining=Remaining.of(uncut, kept, settings.is_greedy, best) if settings.has_kept else None,
        )
        if settings.has_beams:
            piece.expand()
        return piece


def _waves(asked: list[Asked]) -> list[list[Asked]]:
    """Which draws go at once: all, but a diverse sibling goes after those before it."""
    if not any(draw.demands.diversity_penalty for _, draw in asked):
        return [asked]
    waves: list[list[Asked]] = [[]]
    depths: dict[str, int] = {}
    for each in sorted(asked, key=lambda each: each.draw.child):
        depth = 0
        if each.draw.demands.diversity_penalty:
            depth = depths.get(each.draw.request_id, 0)
            depths[each.draw.request_id] = depth + 1
        if depth == len(waves):
            waves.append([])
        waves[depth].append(each)
    return [sorted(wave, key=lambda each: each.number) for wave in waves]


def _take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """A view where the rows follow each other or are one and the same, else a copy."""
    first = rows[0]
    if rows == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    if rows == [first] * len(rows):
        return logits[first].expand(len(rows), -1)
    return logits[torch.tensor(rows, device=logits.device)]
