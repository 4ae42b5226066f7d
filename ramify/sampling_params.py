"""What one caller wants from one prompt: frozen, and refused at once where it is wrong.

Token ids can only be checked against a vocabulary: `check_against` does that when a request meets its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any, Literal

from ramify import validation as check
from ramify.config import SEED_HIGH, SEED_LOW
from ramify.errors import InvalidInputError

MAX_SAMPLES = 16_384
MAX_TOKENS = 2**31 - 1
MAX_LOGIT_BIASES = 1_024
MAX_ALLOWED_TOKEN_IDS = 1_024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1_024
MAX_BAD_WORDS = 128

LogitsProcessor = Callable[..., Any]
Score = Literal["cumulative_logprob", "mean_logprob"] | Callable[..., float]


class SamplingType(Enum):
    GREEDY = "greedy"
    RANDOM = "random"


class SamplingStrategy(StrEnum):
    """How many samples of one prompt relate to each other."""

    PARALLEL = "parallel"
    BEST_OF_N = "best_of_n"
    BEAM_SEARCH = "beam_search"
    DIVERSE = "diverse"


class OutputKind(StrEnum):
    """What a stream of outputs carries: the end alone, only what is new, everything so far, or every step as it was."""

    FINAL_ONLY = "final_only"
    DELTA = "delta"
    CUMULATIVE = "cumulative"
    GROWTH = "growth"


def _option(default: Any, help_text: str, *, is_hashable: bool = True) -> Any:
    return field(default=default, metadata={"help": help_text}, hash=None if is_hashable else False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The controls of one request. See docs for each one's formula; defaults draw from the model as it is."""

    n: int = _option(1, "continuations to return")
    best_of: int | None = _option(None, "continuations to draw, of which the n best return (default: n)")
    temperature: float = _option(1.0, "0: greedy; below 1 sharper, above 1 flatter")
    top_p: float = _option(1.0, "smallest set of tokens whose mass reaches this")
    top_k: int = _option(-1, "only the k likeliest tokens (-1 or 0: all)")
    min_p: float = _option(0.0, "only tokens at least this share of the likeliest one")
    presence_penalty: float = _option(0.0, "-2..2, once per token already in the output")
    frequency_penalty: float = _option(0.0, "-2..2, per occurrence in the output")
    repetition_penalty: float = _option(1.0, "above 1 discourages tokens of prompt and output")
    seed: int | None = _option(None, "same seed, same prompt, same tokens")
    stop: str | Sequence[str] | None = _option(None, "end where this text appears (repeatable)")
    stop_token_ids: Sequence[int] | None = _option(None, "end at this token id (repeatable)")
    include_stop_str_in_output: bool = _option(False, "keep the stop text or token in the output's text")
    ignore_eos: bool = _option(False, "go on past the model's own end token")
    max_tokens: int | None = _option(16, "longest output (none: as long as the context allows)")
    min_tokens: int = _option(0, "no end token before this many tokens")
    logprobs: int | None = _option(None, "likeliest alternatives to report per output token")
    prompt_logprobs: int | None = _option(None, "likeliest alternatives to report per prompt token")
    logit_bias: Mapping[int, float] | None = _option(None, "token id -> amount added to its logit", is_hashable=False)
    allowed_token_ids: Sequence[int] | None = _option(None, "draw only from these")
    bad_words: Sequence[str] | None = _option(None, "never write these")
    detokenize: bool = _option(True, "make text of the tokens")
    skip_special_tokens: bool = _option(True, "leave special tokens out of the text")
    strategy: SamplingStrategy | str | None = _option(
        None, "parallel, best_of_n, beam_search or diverse (default: best_of_n if best_of > n, else parallel)"
    )
    score: Score = _option("cumulative_logprob", "what ranks best_of: cumulative_logprob or mean_logprob")
    beam_width: int | None = _option(None, "beams kept (default: max(n, 2))")
    length_penalty: float = _option(1.0, "beam scores are divided by length ** this")
    early_stopping: bool | Literal["never"] = _option(False, "when a beam search ends: true, false or never")
    num_beam_groups: int = _option(1, "groups of beams that push each other apart")
    diversity_penalty: float = _option(0.0, "taken from a token's logit per earlier sibling that took it")
    output_kind: OutputKind | str = _option(OutputKind.FINAL_ONLY, "final_only, delta or cumulative")
    logits_processors: Sequence[LogitsProcessor] | None = _option(None, "functions that change logits")

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_distribution()
        self._check_ends()
        self._check_reports()
        self._check_token_lists()
        self._check_strategy()

    # -- what callers ask ------------------------------------------------------------------------------------

    @property
    def sampling_type(self) -> SamplingType:
        return SamplingType.GREEDY if self.temperature == 0 else SamplingType.RANDOM

    @property
    def num_samples(self) -> int:
        """How many sequences are generated: best_of where it is given, else n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def resolved_strategy(self) -> SamplingStrategy:
        if self.strategy is not None:
            return SamplingStrategy(self.strategy)
        return SamplingStrategy.BEST_OF_N if self.num_samples > self.n else SamplingStrategy.PARALLEL

    @property
    def resolved_beam_width(self) -> int:
        return self.beam_width if self.beam_width is not None else max(self.n, 2)

    @property
    def num_together(self) -> int | None:
        """How many sequences must step together, because they look at each other; None where each goes its own way."""
        if self.resolved_strategy is SamplingStrategy.BEAM_SEARCH:
            return self.resolved_beam_width
        return self.num_samples if self.resolved_strategy is SamplingStrategy.DIVERSE else None

    @property
    def looks_back(self) -> bool:
        """Whether what may be drawn depends on which tokens were drawn before."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.bad_words
            or self.logits_processors
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else tuple(self.stop)

    def requires_parallel_sampling(self) -> bool:
        """Whether one prompt grows into several sequences."""
        return self.num_samples > 1 or self.resolved_strategy is SamplingStrategy.BEAM_SEARCH

    def check_against(self, *, vocab_size: int, max_logprobs: int) -> None:
        """The checks that need a model: ids inside the vocabulary, reports no longer than the engine allows."""
        for name, most in (
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        ):
            if getattr(self, name) is not None:
                check.token_ids(name, getattr(self, name), most, vocab_size)
        for token_id in self.logit_bias or ():
            check.integer("logit_bias key", token_id, 0, vocab_size - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), 0, max_logprobs)

    # -- checks, one topic each ------------------------------------------------------------------------------

    def _normalise(self) -> None:
        """Strings become enumeration members and lists become tuples, so that nobody can change them later."""
        if self.strategy is not None:
            self._set("strategy", check.member("strategy", self.strategy, SamplingStrategy))
        self._set("output_kind", check.member("output_kind", self.output_kind, OutputKind))
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name, most in (
            ("stop", MAX_STOP_STRINGS),
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
            ("bad_words", MAX_BAD_WORDS),
            ("logits_processors", 128),
        ):
            if getattr(self, name) is not None:
                self._set(name, check.items(name, getattr(self, name), most))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise check.refuse("logit_bias", self.logit_bias, "a mapping of token id to bias")
            self._set("logit_bias", dict(self.logit_bias))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        check.integer("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            check.integer("best_of", self.best_of, 1, MAX_SAMPLES)
            if self.best_of < self.n:
                raise InvalidInputError(f"best_of must be at least n = {self.n}, got {self.best_of}")
        if self.seed is not None:
            check.integer("seed", self.seed, SEED_LOW, SEED_HIGH)

    def _check_distribution(self) -> None:
        check.number("temperature", self.temperature, 0)
        if check.number("top_p", self.top_p, 0, 1) == 0:
            raise check.refuse("top_p", self.top_p, "in (0, 1]")
        check.integer("top_k", self.top_k, -1, check.LARGEST_TOKEN_ID)
        check.number("min_p", self.min_p, 0, 1)
        check.number("presence_penalty", self.presence_penalty, -2, 2)
        check.number("frequency_penalty", self.frequency_penalty, -2, 2)
        if check.number("repetition_penalty", self.repetition_penalty, 0) == 0:
            raise check.refuse("repetition_penalty", self.repetition_penalty, "above 0")

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            check.integer("max_tokens", self.max_tokens, 0, MAX_TOKENS)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise check.refuse("max_tokens", 0, "at least 1 (0 goes with prompt_logprobs alone)")
            if self.max_tokens == 0 and (self.num_samples > 1 or self.strategy is SamplingStrategy.BEAM_SEARCH):
                raise InvalidInputError("max_tokens 0 draws nothing: n must be 1, and no beam search")
        check.integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        for index, stop in enumerate(self.stop_strings):
            check.text(f"stop[{index}]", stop, MAX_STOP_LENGTH)
        if self.stop_strings and not self.detokenize:
            raise InvalidInputError("stop strings need text: detokenize must be True when stop is given")
        check.boolean("include_stop_str_in_output", self.include_stop_str_in_output)
        check.boolean("ignore_eos", self.ignore_eos)

    def _check_reports(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), 0)
        check.boolean("detokenize", self.detokenize)
        check.boolean("skip_special_tokens", self.skip_special_tokens)
        if self.prompt_logprobs is not None and self.output_kind is not OutputKind.FINAL_ONLY:
            raise InvalidInputError("prompt_logprobs cannot be streamed: output_kind must be 'final_only'")

    def _check_token_lists(self) -> None:
        if self.stop_token_ids is not None:
            check.token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidInputError("allowed_token_ids must name at least one token, got none")
            check.token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIASES:
                raise InvalidInputError(
                    f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, got {len(self.logit_bias)}"
                )
            for token_id, bias in self.logit_bias.items():
                check.integer("logit_bias key", token_id, 0, check.LARGEST_TOKEN_ID)
                check.number(f"logit_bias[{token_id}]", bias)
        for index, word in enumerate(self.bad_words or ()):
            check.text(f"bad_words[{index}]", word, MAX_STOP_LENGTH)
        for index, processor in enumerate(self.logits_processors or ()):
            if not callable(processor):
                raise check.refuse(f"logits_processors[{index}]", processor, "callable")

    def _check_strategy(self) -> None:
        if not callable(self.score):
            check.choice("score", self.score, ("cumulative_logprob", "mean_logprob"))
        if self.beam_width is not None:
            check.integer("beam_width", self.beam_width, 1, MAX_SAMPLES)
        check.number("length_penalty", self.length_penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise check.refuse("early_stopping", self.early_stopping, "True, False or 'never'")
        check.integer("num_beam_groups", self.num_beam_groups, 1)
        check.number("diversity_penalty", self.diversity_penalty, 0)
        if self.resolved_strategy is SamplingStrategy.BEAM_SEARCH:
            self._check_beam_search()
            return
        self._refuse_unused("beam_width", "length_penalty", "early_stopping", "num_beam_groups")
        if self.sampling_type is SamplingType.GREEDY and self.num_samples > 1:
            name = "n" if self.best_of is None else "best_of"
            raise InvalidInputError(
                f"{name} must be 1 when temperature is 0: greedy samples of one prompt are all the same "
                f"(beam search returns several), got {self.num_samples}"
            )
        if self.resolved_strategy is SamplingStrategy.DIVERSE:
            self._refuse_unused("best_of", "score")
        else:
            self._refuse_unused("diversity_penalty")
        if self.resolved_strategy is SamplingStrategy.PARALLEL:
            if self.num_samples > self.n:
                raise InvalidInputError("best_of > n needs strategy 'best_of_n', got 'parallel'")
            self._refuse_unused("score")
        elif self.num_samples > self.n:
            self._refuse_deltas("best_of > n ranks outputs when all have ended")

    def _check_beam_search(self) -> None:
        width = self.resolved_beam_width
        self._refuse_unused("seed", "best_of", "score")
        if self.temperature not in (0, 1):
            raise check.refuse("temperature", self.temperature, "at its default or 0 in a beam search")
        if self.n > width:
            raise InvalidInputError(f"n must be at most beam_width = {width}, got {self.n}")
        if width % self.num_beam_groups:
            raise InvalidInputError(f"num_beam_groups must divide beam_width = {width}, got {self.num_beam_groups}")
        if self.num_beam_groups == 1:
            self._refuse_unused("diversity_penalty")
        if self.stop_strings:
            raise InvalidInputError("stop strings cannot be used in a beam search; use stop_token_ids")
        self._refuse_deltas("beams change until the search has ended")

    def _refuse_deltas(self, why: str) -> None:
        if self.output_kind is OutputKind.DELTA:
            raise InvalidInputError(f"output_kind must not be 'delta' here: {why}")

    def _refuse_unused(self, *names: str) -> None:
        """An option that the chosen strategy cannot use is an error, not a silence."""
        defaults = {item.name: item.default for item in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                strategy = self.resolved_strategy.value
                raise InvalidInputError(f"{name} has no meaning with strategy {strategy!r}, got {value!r}")
