"""Document 2's model runner: sequences in, one token for each out, on the engine's layers, cache and race.

The engine itself steps through `DeviceStep`, which also samples with every control, on the device. Here the same steps
can be taken by hand: what is fed in, what the model says, what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from ramify import validation as check
from ramify.config import EngineConfig
from ramify.device.graphs import padded
from ramify.device.last_draws import LastDraws
from ramify.device.rows import upload
from ramify.device.step import DeviceStep
from ramify.documents.sampler import Sampler
from ramify.drive.build import build_engine
from ramify.engine.core import request_seed
from ramify.engine.demands import Demands
from ramify.engine.plan import Chunk, Row, Work
from ramify.engine.prefix import Entry
from ramify.engine.sequence import Sequence
from ramify.errors import CacheExhaustedError, InvalidInputError, UnsupportedError
from ramify.sampling.draw import NoiseKeys
from ramify.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What `run_model` needs beside token ids and positions (T,): whose they are."""

    seqs: list[Sequence]
    starts: list[int]  # the first position of each sequence that is computed now
    ends: list[int]  # and the one after the last
    input_ids: Tensor
    positions: Tensor
    is_prefill: bool


class ModelRunner:
    """Runs a model over sequences: all their missing tokens at once (prefill), or one token each (decode).

    `run` returns tokens and appends none: that is the caller's, with `Sequence.add_token_id`. A sequence keeps its
    blocks of the cache from its first run until `release`. There is one rank: `event`, by which several would wait for
    each other, stays empty.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        rank: int = 0,
        event: object = None,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise check.refuse("config", config, "an EngineConfig")
        if rank != 0 or (event is not None and event != []):
            raise UnsupportedError(f"a model runs on one rank: rank must be 0 and event empty, got {rank!r}, {event!r}")
        self.config = config if config is not None else EngineConfig()
        self.rank = rank
        engine = build_engine(self.config, say)
        assert isinstance(engine.core.device, DeviceStep), "every device has the one step"
        self.model = engine.decoders[0]
        self.tokenizer = engine.codec.tokenizer
        self.eos_token_ids = engine.core.eos_token_ids
        self.max_model_len = engine.max_model_len
        self.sampler = Sampler(self.config.model_config.seed)
        self._lane = engine.core.device.lanes[0]
        self._manager = engine.core.scheduler.managers[0]
        self._most_tokens = engine.core.scheduler.max_num_batched_tokens
        self._most_seqs = engine.core.scheduler.max_num_seqs
        self._known: dict[str, Sequence] = {}  # those that hold blocks, by their track's key
        self._seeds: dict[str, int] = {}  # of those that brought none
        self._arrivals = count()
        self._prepared: _Prepared | None = None
        # The engine's steps may begin before the host knows the last one's tokens; these always know them.
        self._unseen = torch.zeros(padded(self._most_seqs), dtype=torch.int64, device=self._lane.layers.device)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the cache that no sequence holds."""
        return self._manager.num_free

    # -- one step ---------------------------------------------------------------------------------------------

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """The next token of every sequence, drawn with the noise that the engine would draw it with."""
        temperatures = self.prepare_sample(seqs)
        input_ids, positions = self.prepare_prefill(seqs) if is_prefill else self.prepare_decode(seqs)
        logits = self.run_model(input_ids, positions, is_prefill)
        token_ids: list[int] = self.sampler(logits, temperatures, self.noise_of(seqs)).tolist()
        return token_ids

    def prepare_prefill(self, seqs: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Token ids and positions (T,) of all that the model has not seen, sequence after sequence.

        What the cache holds of a new sequence's beginning is not computed again.
        """
        self._check(seqs)
        tracks = [seq.tracks[0] for seq in seqs]
        # Whatever a fork's parent had seen, blocks of its own are still to be found.
        found = [
            [] if track.key in self._known else self._manager.find(seq.get_token_ids())
            for seq, track in zip(seqs, tracks, strict=True)
        ]
        starts = [
            track.num_computed if track.key in self._known else len(entries) * self._manager.block_size
            for track, entries in zip(tracks, found, strict=True)
        ]
        for seq, start in zip(seqs, starts, strict=True):
            if seq.get_len() == start:
                raise InvalidInputError(f"{seq.seq_id!r} has nothing to compute: its last token was run already")
        self._check_room(seqs, starts, found)
        for seq, track, entries in zip(seqs, tracks, found, strict=True):
            if track.key not in self._known:
                track.num_computed = self._manager.adopt(track.key, entries)
                self._known[track.key] = seq
        return self._prepare(seqs, starts, is_prefill=True)

    def prepare_decode(self, seqs: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Token ids and positions (R,) of every sequence's last token, the only one that the model has not seen."""
        self._check(seqs)
        for seq in seqs:
            missing = seq.num_missing(seq.tracks[0]) if seq.tracks[0].key in self._known else None
            if missing != 1:
                lack = "was not prefilled" if missing is None else f"has {missing} tokens to compute"
                raise InvalidInputError(f"{seq.seq_id!r} {lack}: a decode computes one token of what is prefilled")
        starts = [seq.tracks[0].num_computed for seq in seqs]
        self._check_room(seqs, starts, [])
        return self._prepare(seqs, starts, is_prefill=False)

    def prepare_sample(self, seqs: list[Sequence]) -> Tensor:
        """The temperature of every sequence, float32 (R,) on the model's device."""
        for seq in seqs:
            _check_sampling(seq.seq_id, seq.sampling_params)
        values = np.array([Demands(seq.sampling_params).temperature for seq in seqs], np.float32)
        return upload(values, self._lane.layers.device)

    @torch.inference_mode()
    def run_model(self, input_ids: Tensor, positions: Tensor, is_prefill: bool) -> Tensor:
        """Keeps keys and values of all these tokens; returns float32 logits (R, vocabulary) after each sequence's last.

        Takes what the last `prepare_prefill` or `prepare_decode` returned, once.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.is_prefill != is_prefill:
            name = "prepare_prefill" if is_prefill else "prepare_decode"
            raise InvalidInputError(f"nothing is prepared for this: {name} comes before run_model, each time")
        # The cache is searched by tokens: it must hold what it says it holds.
        if not (torch.equal(input_ids, prepared.input_ids) and torch.equal(positions, prepared.positions)):
            raise InvalidInputError("input_ids and positions must be those that were prepared last")
        chunks = [
            Chunk(seq.get_token_ids()[start:end], start, self._manager.table(seq.tracks[0].key), seq.tracks[0].key)
            for seq, start, end in zip(prepared.seqs, prepared.starts, prepared.ends, strict=True)
        ]
        self._lane.begin(Work(chunks), LastDraws())
        last = self._lane.rows_of([Row(0, index, len(chunk.token_ids) - 1) for index, chunk in enumerate(chunks)])
        self._lane.compute(np.sort(last), self._unseen)
        logits = self._lane.logits(last)
        for seq, end in zip(prepared.seqs, prepared.ends, strict=True):
            self._computed(seq, end)
        return logits

    def noise_of(self, seqs: list[Sequence]) -> NoiseKeys:
        """What names the noise of every sequence's next token: its seed, its child's number, its position.

        A sequence without a seed gets one from the engine's, in the order in which they first come.
        """
        rows = []
        for seq in seqs:
            params, seed = seq.sampling_params, seq.sampling_params.seed
            if seed is None:
                if seq.seq_id not in self._seeds:
                    self._seeds[seq.seq_id] = request_seed(self.config.model_config.seed, next(self._arrivals))
                seed = self._seeds[seq.seq_id]
            rows.append((seed, params.child + seq.child, seq.get_output_len()))
        return NoiseKeys.of(rows, self._lane.layers.device)

    def release(self, seqs: Items[Sequence]) -> None:
        """Gives the blocks of these sequences back; run again, they begin anew (with what the cache still has)."""
        for seq in seqs:
            for track in seq.tracks:
                if self._known.get(track.key) is seq:
                    del self._known[track.key]
                    self._manager.release(track.key)
                    track.num_computed = 0
            self._seeds.pop(seq.seq_id, None)

    # -- what is asked of sequences ---------------------------------------------------------------------------

    def _check(self, seqs: list[Sequence]) -> None:
        if not seqs:
            raise InvalidInputError("seqs must have at least one sequence, got none")
        if len(seqs) > self._most_seqs:
            raise InvalidInputError(f"seqs must be at most max_num_seqs = {self._most_seqs}, got {len(seqs)}")
        if len({seq.seq_id for seq in seqs}) < len(seqs):
            raise InvalidInputError("seqs must have different seq_ids")
        for seq in seqs:
            if seq.is_finished():
                raise InvalidInputError(f"{seq.seq_id!r} has ended ({seq.status.value}): it cannot be run")
            if len(seq.tracks) != 1:
                raise InvalidInputError(f"{seq.seq_id!r} belongs to two models: a runner has one")
            if self._known.get(seq.tracks[0].key, seq) is not seq:
                raise InvalidInputError(f"seq_id {seq.seq_id!r} is another sequence's, which holds blocks: release it")
            if not seq.get_len():
                raise InvalidInputError(f"{seq.seq_id!r} must not be empty: it has no tokens")
            if seq.get_len() > self.max_model_len:
                raise InvalidInputError(
                    f"{seq.seq_id!r} must have at most max_model_len = {self.max_model_len} tokens, got {seq.get_len()}"
                )
            check.token_ids(f"tokens of {seq.seq_id!r}", seq.get_token_ids(), 2**31, self._lane.layers.vocab_size)

    def _check_room(self, seqs: list[Sequence], starts: list[int], found: Items[Items[Entry]]) -> None:
        """Before anything is taken: tokens within a step's limit, and blocks for all of them."""
        num_tokens = sum(seq.get_len() for seq in seqs) - sum(starts)
        if num_tokens > self._most_tokens:
            raise InvalidInputError(
                f"a step computes at most max_num_batched_tokens = {self._most_tokens} tokens, got {num_tokens}: "
                "prefill fewer sequences at a time"
            )
        manager = self._manager
        needed = sum(
            manager.blocks_for(seq.get_len()) - max(manager.blocks_for(start), len(manager.table(seq.tracks[0].key)))
            for seq, start in zip(seqs, starts, strict=True)
        )
        free = manager.num_free_without(list({entry.block: entry for entries in found for entry in entries}.values()))
        if needed > free:
            raise CacheExhaustedError(f"{needed} blocks are needed and {free} are free: release what has ended")

    # -- the cache ---------------------------------------------------------------------------------------------

    def _prepare(self, seqs: list[Sequence], starts: list[int], *, is_prefill: bool) -> tuple[Tensor, Tensor]:
        ends = [seq.get_len() for seq in seqs]
        for seq, start, end in zip(seqs, starts, ends, strict=True):
            copies = self._manager.extend(seq.tracks[0].key, start, end)
            assert not copies, "only whole blocks are shared, and what follows them is written"
        tokens = [token for seq, start in zip(seqs, starts, strict=True) for token in seq.get_token_ids()[start:]]
        positions = [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]
        device = self._lane.layers.device
        self._prepared = _Prepared(
            list(seqs), starts, ends, upload(tokens, device), upload(positions, device), is_prefill
        )
        return self._prepared.input_ids, self._prepared.positions

    def _computed(self, seq: Sequence, end: int) -> None:
        track = seq.tracks[0]
        track.num_computed = end

        def tokens_between(start: int, stop: int) -> list[int]:
            return seq.tokens_between(track, start, stop)

        self._manager.publish(track.key, end, tokens_between)


def _check_sampling(seq_id: str, params: SamplingParams) -> None:
    """The document's sampler knows temperatures; what it cannot do is not dropped in silence."""
    demands = Demands(params)
    changes_logits = demands.narrows or demands.is_controlled or demands.looks_back
    reports = params.logprobs is not None or params.prompt_logprobs is not None
    if changes_logits or reports or params.num_together is not None:
        raise UnsupportedError(
            f"{seq_id!r} asks for more than a temperature and a seed, which is all that this sampler knows: "
            "give its request to LLM"
        )
