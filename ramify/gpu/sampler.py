"""The sampler at the end of a graph: from logits and the rows' numbers to tokens, in buffers that outlive the step.

controls    penalties, bias, bans                kernels/controls.py, on what controls.py keeps of each sequence
mixture     of two models' logits                mixer.py
bending     dynamic temperature, smoothing       kernels/bending.py
filters     top-k, top-p, min-p                  kernels/floors.py
narrowing   what cuts more                       kernels/narrowing.py
draw        the race                             kernels/race.py
reports     logprobs                            kernels/top_logprobs.py
candidates  of searches                         listing.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ramify.config import LogprobsMode
from ramify.device.reads import Int64s
from ramify.device.sampler_kernels import Read
from ramify.engine.demands import MOST_REPORTED, SamplerChoice, SamplerKind
from ramify.engine.plan import Asking, Draw, Selection, StepResult, TokenReport
from ramify.gpu.charges import Charges
from ramify.gpu.controls import ControlSlots
from ramify.gpu.grammar_masks import GrammarMasks
from ramify.gpu.kernels.bending import bend
from ramify.gpu.kernels.candidate_ranks import rank_candidates
from ramify.gpu.kernels.codes import read_codes
from ramify.gpu.kernels.controls import control_blocks, count_drawn, match_words
from ramify.gpu.kernels.floors import Floors
from ramify.gpu.kernels.narrowing import narrow
from ramify.gpu.kernels.race import (
    NOT_FINITE,
    NOTHING_LEFT,
    BlockScores,
    draw_tokens,
    keep_above,
    score_blocks,
)
from ramify.gpu.kernels.top_logprobs import Processing, Reports, report
from ramify.gpu.listing import Listing
from ramify.gpu.mixer import KernelMixer
from ramify.gpu.remembered import Remembered
from ramify.gpu.results import NOTHING_IN_COMMON_CODE, Drawn, Results
from ramify.gpu.scored import Numbers, Scored, log_sum
from ramify.gpu.searches import Searches
from ramify.sampling import columns as column
from ramify.sampling.mixing import Mixer

KINDS: tuple[SamplerKind, ...] = ("shaped", "filtered", "plain")  # each can do what those after it can


class KernelSampler:
    """Serves all that its kernels have room for. `drawn` holds what the last step drew, row by row."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode,
        mixer: Mixer | None = None,
        *,
        batch_invariant: bool = False,
        num_drafts: int = 0,
    ) -> None:
        """num_drafts: tokens that there is room for behind those that are drawn."""
        self._vocab_size = vocab_size
        self._logprobs_mode = logprobs_mode
        self._log_sum = partial(log_sum, each_alone=batch_invariant)
        self._mixer = None if mixer is None else KernelMixer.of(mixer, each_alone=batch_invariant)
        self._scores = BlockScores.empty(max_rows, vocab_size, device)
        self._raw_scores = BlockScores.empty(max_rows, vocab_size, device)
        num_tracks = 1 if mixer is None else 2
        self._controlled = [torch.empty(max_rows, vocab_size, device=device) for _ in range(num_tracks)]
        self._slots = ControlSlots(max_rows, vocab_size, device)
        self._grammars = GrammarMasks(self._slots.tables.allowed)
        self._remembered = Remembered(max_rows, device)
        self._charges = Charges(max_rows, vocab_size, num_tracks, device)
        # Controlled logits are bent where they lie; of two models, they are still needed afterwards.
        self._bent = self._controlled[0] if mixer is None else torch.empty(max_rows, vocab_size, device=device)
        self._bent_temperatures = torch.empty(max_rows, device=device)
        self._floors = Floors(max_rows, vocab_size, device)
        self._no_floors = torch.full((max_rows,), -torch.inf, device=device)
        self._num_reported = min(MOST_REPORTED, vocab_size)
        self._tokens = torch.zeros(max_rows + num_drafts, dtype=torch.int64, device=device)
        drawn = Drawn.empty(max_rows, self._num_reported, device)
        self._drawn = drawn._replace(token_ids=self._tokens[:max_rows])
        self._listing = Listing(max_rows, device, each_alone=batch_invariant)
        self._searches = Searches(max_rows, device)
        self._ended = torch.zeros(max_rows, dtype=torch.bool, device=device)  # whose last token in a set ended it
        is_processed = logprobs_mode == "processed"
        self._results = [Results(max_rows, self._num_reported, device, tells_processed=is_processed) for _ in range(2)]

    @property
    def tokens(self) -> Tensor:
        return self._tokens

    @property
    def most_reported(self) -> int:
        return self._num_reported

    def tell(self, logits: Tensor, token_ids: Tensor, count: int) -> list[TokenReport]:
        rows, vocab_size = logits.shape
        scores = BlockScores.empty(rows, vocab_size, logits.device)
        score_blocks(logits, torch.ones(rows, device=logits.device), scores)
        told = Reports.empty(rows, count, logits.device)
        report(logits, scores, token_ids, told)
        logprobs, ranks, top_ids, top_logprobs = told
        listed = zip(logprobs.tolist(), ranks.tolist(), top_ids.cpu().numpy(), top_logprobs.cpu().numpy(), strict=True)
        return [TokenReport(*each) for each in listed]

    @property
    def parents(self) -> Tensor:
        return self._searches.parents

    # -- on the host -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._slots.reset()
        self._charges.reset()

    def serves(self, asked: SamplerChoice) -> bool:
        if self._logprobs_mode == "both" and asked.reports:
            return False
        return asked.kind != "full" and not (self._mixer is not None and (asked.candidates or asked.waves > 1))

    def choose(self, asked: Collection[SamplerChoice]) -> SamplerChoice:
        kinds, *others, waves = zip(*asked, strict=True)
        kind = next(kind for kind in KINDS if kind in kinds)
        reports, controls, candidates, distinct, charges, remembers, chooses = map(any, others)
        return SamplerChoice(kind, reports, controls, candidates, distinct, charges, remembers, chooses, max(waves))

    def every_choice(self) -> list[SamplerChoice]:
        candidates = (False,) if self._mixer is not None else (False, True)
        answers = product(KINDS, (False, True), (False, True), candidates)
        choices = (SamplerChoice(*answer, chooses=answer[-1] and not answer[2]) for answer in answers)
        return [choice for choice in choices if self.serves(choice)]  # the rest as it comes

    def settle(self, draws: Sequence[Draw]) -> Int64s:
        slots = self._slots.settle(draws)
        self._remembered.write(draws, slots)
        self._charges.write(draws, slots)
        return slots

    def go_on(self, slots: Int64s) -> None:
        self._slots.go_on(slots)

    def follow(self, slots: Int64s, drawing: Sequence[Asking]) -> None:
        self._grammars.write(slots, drawing)

    def select(self, selections: Sequence[Selection], draws: Sequence[Draw], rows: Int64s, lane_rows: Int64s) -> None:
        self._searches.write(selections, draws, rows, lane_rows)

    def fetch(self, choice: SamplerChoice, *, at_once: bool = False) -> Read:
        """Asks for what the last step drew; the answer can be read when it has arrived.

        There are two buffers, in turns, since the step before may not have been read yet: what is read at once takes
        no turn.
        """
        result = self._results[0]
        if not at_once:
            self._results.reverse()
        result.fetch(self._drawn, choice, with_mixture=self._mixer is not None)
        return partial(self._read_and_note, result) if choice.remembers else result.read

    def _read_and_note(self, result: Results, rows: Sequence[int] | Int64s, draws: Sequence[Asking]) -> StepResult:
        """What draws leave for the next is noted; who just goes on leaves nothing."""
        told = result.read(rows, draws)
        for draw, left in zip(draws, result.read_remembered(rows), strict=True):
            if isinstance(draw, Draw) and draw.demands.remembers:
                self._remembered.note(draw, left)
        return told

    # -- on the device ---------------------------------------------------------------------------------------

    def draw(self, logits: Sequence[Tensor], integers: Tensor, floats: Tensor, choice: SamplerChoice) -> None:
        """From the logits (R, vocabulary) of each track and the columns of R draws, into the first R rows."""
        drawn = self._drawn.of(logits[0].shape[0])
        numbers, tables = Numbers(integers, floats), self._slots.tables
        if choice.controls:
            match_words(numbers.slots, numbers.positions, tables)
        if self._mixer is None:
            [raw] = logits
            if choice.controls:
                before, after = self._control(raw, numbers, track=0, charges=choice.charges)
            else:
                keeps_raw = choice.kind == "shaped" or choice.waves > 1
                before = after = self._score(raw, numbers, self._raw_scores if keeps_raw else self._scores)
            if choice.waves > 1:
                after = self._draw_before(before, after, numbers, choice, drawn)
            self._draw(before, after, numbers, choice, drawn)
            if choice.waves > 1:
                ends = numbers.floats[column.ENDS :].T
                self._ended[: len(ends)] = (drawn.token_ids[:, None] == ends.long()).any(-1)
        else:
            self._draw_from_two(self._mixer, logits, numbers, choice, drawn)
        if choice.controls:
            count_drawn(drawn.token_ids, numbers.slots, numbers.positions, tables)

    def _draw_from_two(
        self, mixer: KernelMixer, logits: Sequence[Tensor], numbers: Numbers, choice: SamplerChoice, drawn: Drawn
    ) -> None:
        """Controls act on both models, filters on their mixture, whose logprobs are the raw ones."""
        teacher, theta = (part[:, : self._vocab_size] for part in logits)
        nothing_left = not_finite = None
        if choice.controls:
            tops, sums = [], []
            for track, part in enumerate((teacher, theta)):
                before, after = self._control(part, numbers, track=track, charges=choice.charges)
                tops.append(after.scores.largest.amax(-1))
                sums.append(before.scores.raw_sums.sum(-1))
            nothing_left = torch.stack(tops).amin(0) == -torch.inf
            not_finite = ~torch.stack(sums).isfinite().all(0)  # also where controls leave nothing of it
            teacher, theta = (part[: len(numbers.slots)] for part in self._controlled)
        pair = mixer.mix(teacher, theta, numbers.temperatures, numbers.positions == 0)
        # The temperature is in the mixture; what is left of it is whether the likeliest token is wanted.
        numbers = numbers.at((numbers.temperatures > 0).float())
        scores = self._raw_scores if choice.kind == "shaped" else self._scores
        mixed = self._score(pair.logits.contiguous(), numbers, scores)
        self._draw(mixed, mixed, numbers, choice, drawn)
        drawn.faults.masked_fill_(pair.mixed.disjoint, NOTHING_IN_COMMON_CODE)
        if nothing_left is not None:
            drawn.faults.masked_fill_(nothing_left, NOTHING_LEFT)
        drawn.faults.masked_fill_(~pair.mixed.sound, NOT_FINITE)
        if not_finite is not None:
            drawn.faults.masked_fill_(not_finite, NOT_FINITE)
        drawn.mixture.copy_(pair.numbers(drawn.token_ids))

    def _draw_before(self, raw: Scored, left: Scored, numbers: Numbers, choice: SamplerChoice, drawn: Drawn) -> Scored:
        """All waves but the last: a token loses for every earlier sibling of a diverse set that took it.

        Every wave draws all rows. Who has seen all siblings before it draws the same again, so after the last wave
        everyone has the token that it draws when they go one by one. Returns what the last wave draws from.
        """
        size = left.logits.shape[0]
        pushed = self._controlled[0][:size]
        if left.logits.data_ptr() != pushed.data_ptr():
            pushed.copy_(left.logits)
        left = self._score(pushed, numbers, self._scores)
        wave_choice = choice._replace(reports=False, candidates=False, distinct=False, chooses=False)
        sets, depths = numbers.integers[column.SET], numbers.integers[column.DEPTH]
        # Who has ended, which the host did not know yet, is not looked at any more.
        last_rows = numbers.integers[column.LAST_ROW]
        counts = ((last_rows < 0) | ~self._ended[last_rows.clamp_min(0)]).float()
        for wave in range(choice.waves - 1):
            self._draw(raw, left, numbers, wave_choice, drawn)
            # Of each set, what its sibling of this wave took; nobody reads the last entry.
            taken = torch.zeros(size + 1, dtype=torch.int64, device=pushed.device)
            its_set = torch.where(depths == wave, sets, size)
            taken.scatter_(0, its_set, drawn.token_ids)
            is_counted = torch.zeros(size + 1, device=pushed.device).scatter_(0, its_set, counts)
            loss = torch.where(depths > wave, numbers.floats[column.DIVERSITY], 0.0) * is_counted[sets.clamp_min(0)]
            pushed.scatter_add_(1, taken[sets.clamp_min(0)][:, None], -loss[:, None])
            left = self._score(pushed, numbers, self._scores)
        return left

    def _score(self, logits: Tensor, numbers: Numbers, into: BlockScores) -> Scored:
        scores = into.of(logits.shape[0])
        score_blocks(logits, numbers.temperatures, scores)
        return Scored(logits, scores)

    def _control(self, raw: Tensor, numbers: Numbers, *, track: int, charges: bool) -> tuple[Scored, Scored]:
        """Before the controls and after."""
        size = raw.shape[0]
        controlled = self._controlled[track][:size]
        raw_scores, scores = self._raw_scores.of(size), self._scores.of(size)
        control_blocks(
            raw,
            numbers.temperatures,
            numbers.slots,
            numbers.positions,
            self._slots.tables,
            track=track,
            controlled=controlled,
            raw_scores=raw_scores,
            scores=scores,
        )
        if charges:
            self._charges.take(controlled, numbers.slots, track=track)
            score_blocks(controlled, numbers.temperatures, scores)
        return Scored(raw, raw_scores), Scored(controlled, scores)

    def _draw(self, raw: Scored, left: Scored, numbers: Numbers, choice: SamplerChoice, drawn: Drawn) -> None:
        """From what controls left; logprobs are of the raw logits."""
        if choice.kind == "shaped":
            left, numbers = self._bend(left, numbers, in_waves=choice.waves > 1)
        temperatures, top_p, min_p = numbers.floats[: column.MIN_P + 1]
        logits, scores = left
        size = logits.shape[0]
        floor = None
        if choice.kind != "plain":
            floor = self._floors.find(
                logits, temperatures, scores, top_k=numbers.integers[column.TOP_K], top_p=top_p, min_p=min_p
            )
            if choice.kind == "shaped":
                cuts = numbers.cuts
                if choice.remembers:
                    limits = self._remembered.table[numbers.slots.clamp_min(0), 0].float()
                    follows = numbers.floats[column.FOLLOWS] > 0
                    cuts = cuts._replace(limits=torch.where(follows, limits, torch.inf))
                narrow(logits, temperatures, cuts, numbers.keys, floor)
                score_blocks(logits, temperatures, scores)  # the largest of a block may be gone
            keep_above(logits, temperatures, floor, scores)
        draw_tokens(
            logits,
            temperatures,
            numbers.keys,
            scores,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            faults=drawn.faults,
            floors=floor,
            raw=raw,
        )
        if choice.remembers and floor is not None:
            self._leave(raw, left, numbers, floor, drawn)
        processing = Processing(temperatures, self._no_floors[:size] if floor is None else floor)
        if choice.reports:
            asked = numbers.integers[column.REPORTED]
            if self._logprobs_mode == "processed":
                report(logits, scores, drawn.token_ids, drawn.reports, processing, asked=asked)
            else:
                report(raw.logits, raw.scores, drawn.token_ids, drawn.reports, asked=asked)
        if choice.distinct:
            self._listing.by_key(raw, left, processing, numbers, drawn)
        elif choice.candidates:
            self._listing.by_weight(raw, left, processing, drawn)
        if choice.chooses:
            self._searches.choose(drawn)
        if choice.candidates and choice.reports:
            reported = left if self._logprobs_mode == "processed" else raw
            rank_candidates(*reported, drawn.candidates.token_ids, drawn.candidates.ranks)

    def _bend(self, left: Scored, numbers: Numbers, *, in_waves: bool) -> tuple[Scored, Numbers]:
        """Rows that ask for it are bent, and drawn from at temperature 1; others stay as they are."""
        size = left.logits.shape[0]
        bent, temperatures = self._bent[:size], self._bent_temperatures[:size]
        if in_waves and left.logits.data_ptr() == bent.data_ptr():
            bent = torch.empty_like(bent)  # the next wave begins with these
        bend(left.logits, numbers.temperatures, left.scores, numbers.bends, bent=bent, bent_temperatures=temperatures)
        numbers = numbers.at(temperatures)
        return self._score(bent, numbers, self._scores), numbers

    def _leave(self, raw: Scored, left: Scored, numbers: Numbers, floors: Tensor, drawn: Drawn) -> None:
        """Reads tokens off codes, and tells what draws leave for the next ones."""
        logits, scores = left
        follows, reads = numbers.floats[column.FOLLOWS], numbers.floats[column.READS_CODE]
        codes = self._remembered.table[numbers.slots.clamp_min(0)]
        read_codes(
            logits,
            numbers.temperatures,
            floors,
            reads,
            codes,
            token_ids=drawn.token_ids,
            following=drawn.remembered,
        )
        chosen = drawn.token_ids[:, None]
        own = (raw.logits.gather(1, chosen) - self._log_sum(raw.scores.largest + raw.scores.raw_sums.log()))[:, 0]
        drawn.logprobs.copy_(torch.where(reads > 0, own, drawn.logprobs))
        surprise = (logits.gather(1, chosen) - self._log_sum(scores.largest + scores.sums.log()))[:, 0].double()
        drawn.remembered[:, 0] = torch.where(follows > 0, surprise, drawn.remembered[:, 0])
