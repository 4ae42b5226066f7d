"""Capacity: what an engine has room for, and whether a request can ever be scheduled in it.

It is plain data, so that a process that only talks to an engine refuses what the engine would refuse, in its words.
"""

from __future__ import annotations

from dataclasses import dataclass

from ramify.engine.request import Request
from ramify.engine.sequence import Sequence
from ramify.errors import InvalidInputError

# What a request that is drafted for cannot ask for, and why.
NOT_SPECULATED = {
    "mirostat_tau": "every draw depends on how surprising the one before it was",
    "logits_processors": "they would be called with tokens that may never be drawn",
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes of an engine. `num_blocks` has one entry per model."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    block_size: int
    num_blocks: tuple[int, ...]
    has_words: bool = True  # whether it has a tokenizer that knows what bad words are
    speculates: bool = False

    def check(self, request: Request) -> None:
        """Raises InvalidInputError for a request that could never be scheduled.

        Its prompt and one child must fit, or, where children step together, its prompt and all of them.
        """
        params, tracks = request.sampling_params, request.root.tracks
        if params.bad_words and not self.has_words:
            raise InvalidInputError("bad_words need a tokenizer, and this model has none: use logit_bias")
        if params.dry_sequence_breakers and not self.has_words:
            raise InvalidInputError("dry_sequence_breakers need a tokenizer, and this model has none: leave them out")
        if self.speculates and params.speculate:
            for name, why in NOT_SPECULATED.items():
                if getattr(params, name):
                    raise InvalidInputError(
                        f"{name} cannot be used while the engine drafts tokens ahead (speculation), since {why}: "
                        f"set speculate=False for this request"
                    )
        longest = self.longest_output(request.root)
        together = params.num_together or 1
        if together > self.max_num_seqs:
            raise InvalidInputError(
                f"strategy {params.resolved_strategy.value!r} runs {together} sequences together; they must be at "
                f"most max_num_seqs = {self.max_num_seqs}"
            )
        if together * len(tracks) > self.max_num_batched_tokens:
            raise InvalidInputError(
                f"max_num_batched_tokens must be at least {together * len(tracks)}, one for each sequence that steps "
                f"together and each model, got {self.max_num_batched_tokens}"
            )
        needed = [0] * len(self.num_blocks)
        for track in tracks:
            prompt = len(track.prompt_token_ids)
            if longest < max(params.max_tokens is None, params.max_tokens or 0):
                raise InvalidInputError(
                    f"prompt of {prompt} tokens plus max_tokens {params.max_tokens} must fit "
                    f"max_model_len = {self.max_model_len}"
                )
            if not self.enable_chunked_prefill and prompt > self.max_num_batched_tokens:
                raise InvalidInputError(
                    f"prompt must have at most max_num_batched_tokens = {self.max_num_batched_tokens} tokens "
                    f"while enable_chunked_prefill is False, got {prompt}"
                )
            common = prompt // self.block_size
            needed[track.model] += common + together * (-(-(prompt + longest) // self.block_size) - common)
            # A fork may hold the prompt's last, partly filled block beside its own copy of it for a moment.
            needed[track.model] += together == 1 < params.num_samples
        for most, count in zip(self.num_blocks, needed, strict=True):
            if count > most:
                prompts = " and ".join(str(len(track.prompt_token_ids)) for track in tracks)
                outputs = "an output" if together == 1 else f"{together} outputs"
                raise InvalidInputError(
                    f"prompt of {prompts} tokens plus {outputs} of up to {longest} needs {count} KV blocks, "
                    f"the cache has {most}: lower max_tokens, or leave the cache more (a higher "
                    "gpu_memory_utilization, quantised weights, a larger num_kv_blocks)"
                )

    def longest_output(self, sequence: Sequence) -> int:
        """How long an output may get: max_tokens, or what the context leaves."""
        room = self.max_model_len - max(len(track.prompt_token_ids) for track in sequence.tracks)
        limit = sequence.sampling_params.max_tokens
        return room if limit is None else min(limit, room)
