"""What one caller wants from one prompt: frozen, and refused at once where it is wrong.

Token ids can only be checked against a vocabulary: `check_against` does that when a request meets its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum, StrEnum
from typing import Any, Literal, TypeVar, get_args

from ramify import validation as check
from ramify.config import SEED_HIGH, SEED_LOW
from ramify.errors import InvalidInputError
from ramify.foreign.keywords import strict_keywords
from ramify.foreign.truth import Truth
from ramify.foreign.vllm import SAMPLING_FIELDS
from ramify.structured_outputs import Structure, checked_structure

MAX_SAMPLES = 16_384
MAX_TOKENS = 2**31 - 1
MAX_LOGIT_BIASES = 1_024
MAX_ALLOWED_TOKEN_IDS = 1_024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1_024
MAX_BAD_WORDS = 128
MAX_LOGITS_PROCESSORS = 128
SEQUENCE_BREAKERS = ("\n", ":", '"', "*")

# Fields that no flag and no HTTP request has: functions, how text is given out, which a command or server decides, and
# what only a program that trains on the samples reads.
PYTHON_ALONE = frozenset({"logits_processors", "output_kind", "detokenize", "return_kept"})

T = TypeVar("T")
LogitsProcessor = Callable[..., Any]
KeptKind = Literal["mass", "ids"]
ScoreName = Literal["cumulative_logprob", "mean_logprob"]
Score = ScoreName | Callable[..., float]


class SamplingType(Enum):
    GREEDY = "greedy"
    RANDOM = "random"


class SamplingStrategy(StrEnum):
    """How many samples of one prompt relate to each other."""

    PARALLEL = "parallel"
    BEST_OF_N = "best_of_n"
    BEAM_SEARCH = "beam_search"
    DIVERSE = "diverse"
    ARITHMETIC = "arithmetic"
    WITHOUT_REPLACEMENT = "without_replacement"


class OutputKind(StrEnum):
    """What a stream of outputs carries: the end alone, only what is new, everything so far, or every step as it was."""

    FINAL_ONLY = "final_only"
    DELTA = "delta"
    CUMULATIVE = "cumulative"
    GROWTH = "growth"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a field takes, whatever the others say: SamplingParams checks it, and the server's fields say the same."""

    low: int | None = None
    above: int | None = None  # where the low end itself is refused
    high: int | None = None
    fewest: int = 0  # entries of a list or a mapping
    most: int | None = None
    longest: int | None = None  # characters of a text, alone or in a list
    choices: tuple[str, ...] = ()


def _option(default: Any, help_text: str, *, is_hashable: bool = True, **limits: Any) -> Any:
    metadata = {"help": help_text, "limits": Limits(**limits)}
    return field(default=default, metadata=metadata, hash=None if is_hashable else False)


def _refusing_unknown_fields(kind: type[T]) -> type[T]:
    """Names that are no fields are vLLM's at a value that asks for nothing, or refused by an error of ours."""
    kind.__init__ = strict_keywords(SAMPLING_FIELDS, "a field of SamplingParams")(kind.__init__)  # type: ignore[method-assign]
    return kind


@_refusing_unknown_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The controls of one request. See docs for each one's formula; defaults draw from the model as it is.

    A field is defined here and nowhere else: the command line makes its flag of it, the server its JSON field.
    """

    n: int = _option(1, "continuations to return", low=1, high=MAX_SAMPLES)
    best_of: int | None = _option(
        None, "continuations to draw, of which the n best return, best first (default: n)", low=1, high=MAX_SAMPLES
    )
    temperature: float = _option(1.0, "0: greedy; below 1 sharper, above 1 flatter", low=0)
    top_p: float = _option(1.0, "smallest set of tokens whose mass reaches this", above=0, high=1)
    top_k: int = _option(-1, "only the k likeliest tokens (-1 or 0: all)", low=-1, high=check.LARGEST_TOKEN_ID)
    min_p: float = _option(0.0, "only tokens at least this share of the likeliest one", low=0, high=1)
    top_n_sigma: float = _option(
        0.0, "only tokens whose logit is within this many standard deviations of the largest (0: all)", low=0
    )
    typical_p: float = _option(
        1.0, "the tokens of the most typical surprise whose mass reaches this (1: all)", above=0, high=1
    )
    epsilon_cutoff: float = _option(0.0, "only tokens of at least this probability", low=0, high=1)
    eta_cutoff: float = _option(
        0.0, "only tokens of at least this probability, and less where the model is unsure", low=0, high=1
    )
    top_a: float = _option(0.0, "only tokens of at least this times the square of the largest", low=0, high=1)
    p_less: bool = _option(False, "only tokens at least as likely as two draws are to agree")
    mirostat_tau: float = _option(0.0, "the surprise, in bits a token, that outputs are held to (0: any)", low=0)
    mirostat_eta: float = _option(0.1, "how quickly mirostat_tau is returned to", low=0, high=1)
    xtc_probability: float = _option(0.0, "how often the likeliest tokens are excluded", low=0, high=1)
    xtc_threshold: float = _option(0.1, "excluded are tokens that reach this, but for the last of them", low=0, high=1)
    dynatemp_range: float = _option(
        0.0, "temperature moves by this much down where the model is sure, and up where it is not", low=0
    )
    dynatemp_exponent: float = _option(1.0, "how late dynatemp_range moves it up", above=0)
    smoothing_factor: float = _option(
        0.0, "logits fall with this times the square of their distance from the largest (0: unchanged)", low=0
    )
    presence_penalty: float = _option(0.0, "-2..2, once per token already in the output", low=-2, high=2)
    frequency_penalty: float = _option(0.0, "-2..2, per occurrence in the output", low=-2, high=2)
    repetition_penalty: float = _option(1.0, "above 1 discourages tokens of prompt and output", above=0)
    no_repeat_ngram_size: int = _option(
        0, "never write so many tokens in an order that was there before (0: any)", low=0, high=MAX_TOKENS
    )
    dry_multiplier: float = _option(0.0, "taken from a token that would go on with a repetition (0: nothing)", low=0)
    dry_base: float = _option(1.75, "by what that grows with every token of the repetition", low=1)
    dry_allowed_length: int = _option(2, "repetitions shorter than this cost nothing", low=1, high=MAX_TOKENS)
    dry_penalty_last_n: int = _option(
        -1, "how many of the last tokens are searched for repetitions (-1: all)", low=-1, high=MAX_TOKENS
    )
    dry_sequence_breakers: Sequence[str] | None = _option(
        None,
        "no repetition goes on past these (default: line breaks, colons, quotation marks and asterisks)",
        most=MAX_BAD_WORDS,
        longest=MAX_STOP_LENGTH,
    )
    seed: int | None = _option(None, "same seed, same prompt, same tokens", low=SEED_LOW, high=SEED_HIGH)
    child: int = _option(
        0, "with a seed: the number of the first sample, as a larger n would count them", low=0, high=MAX_SAMPLES - 1
    )
    stop: str | Sequence[str] | None = _option(
        None, "end where this text, or one of several, appears", most=MAX_STOP_STRINGS, longest=MAX_STOP_LENGTH
    )
    stop_token_ids: Sequence[int] | None = _option(None, "end at one of these token ids", most=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = _option(False, "keep the stop text or token in the output's text")
    ignore_eos: bool = _option(False, "go on past the model's own end token")
    max_tokens: int | None = _option(16, "longest output (none: as long as the context allows)", low=0, high=MAX_TOKENS)
    min_tokens: int = _option(0, "no end token before this many tokens", low=0, high=MAX_TOKENS)
    logprobs: int | None = _option(None, "likeliest alternatives to report per output token", low=0)
    prompt_logprobs: int | None = _option(None, "likeliest alternatives to report per prompt token", low=0)
    return_kept: KeptKind | None = _option(
        None,
        "tell of every token what it was drawn from: the mass that filters left, or the ids of all that was left too",
        choices=get_args(KeptKind),
    )
    logit_bias: Mapping[int, float] | None = _option(
        None, "token ids, each with the amount added to its logit", most=MAX_LOGIT_BIASES, is_hashable=False
    )
    allowed_token_ids: Sequence[int] | None = _option(
        None, "draw only from these token ids", fewest=1, most=MAX_ALLOWED_TOKEN_IDS
    )
    bad_words: Sequence[str] | None = _option(None, "never write these", most=MAX_BAD_WORDS, longest=MAX_STOP_LENGTH)
    structured_outputs: Mapping[str, Any] | None = _option(
        None, "write only what fits a JSON schema, a regex, a choice or a grammar", is_hashable=False
    )
    detokenize: bool = _option(True, "make text of the tokens")
    skip_special_tokens: bool = _option(True, "leave special tokens out of the text")
    strategy: SamplingStrategy | str | None = _option(
        None,
        "how the samples of one prompt relate: parallel, best_of_n, beam_search, diverse, arithmetic or "
        "without_replacement "
        "(default: best_of_n if best_of > n, else parallel)",
        choices=tuple(strategy.value for strategy in SamplingStrategy),
    )
    score: Score = _option(
        "cumulative_logprob",
        "what ranks best_of: cumulative_logprob or mean_logprob",
        choices=get_args(ScoreName),
    )
    beam_width: int | None = _option(None, "beams kept (default: max(n, 2))", low=1, high=MAX_SAMPLES)
    length_penalty: float = _option(1.0, "beam scores are divided by length ** this")
    early_stopping: bool | Literal["never"] = _option(False, "when a beam search ends: true, false or never")
    num_beam_groups: int = _option(1, "groups of beams that push each other apart", low=1, high=MAX_SAMPLES)
    diversity_penalty: float = _option(
        0.0, "taken from a token's logit per earlier sibling or group that took it", low=0
    )
    speculate: bool = _option(True, "draft tokens ahead, where the engine does: the same tokens, sooner")
    output_kind: OutputKind | str = _option(OutputKind.FINAL_ONLY, "final_only, delta, cumulative or growth")
    logits_processors: Sequence[LogitsProcessor] | None = _option(
        None, "functions that change logits", most=MAX_LOGITS_PROCESSORS
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None or not str(option.type).endswith(" | None"):
                object.__setattr__(self, option.name, _checked(option, value))
        self._check_ends()
        self._check_strategy()
        if self.mirostat_tau and self.xtc_probability:
            raise InvalidInputError("mirostat_tau holds the surprise that xtc_probability would raise: use one of them")
        if self.dynatemp_range > self.temperature:
            message = f"dynatemp_range must be at most temperature = {self.temperature}, got {self.dynatemp_range}"
            raise InvalidInputError(message)

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
    def num_children(self) -> int:
        """How many sequences a prompt grows into: samples, or the beams of a search."""
        is_beam_search = self.resolved_strategy is SamplingStrategy.BEAM_SEARCH
        return self.resolved_beam_width if is_beam_search else self.num_samples

    @property
    def num_together(self) -> int | None:
        """How many sequences must step together, because they look at each other; None where each goes its own way."""
        looks_at_siblings = self.forks_at_every_token or self.resolved_strategy is SamplingStrategy.DIVERSE
        return self.num_children if looks_at_siblings else None

    @property
    def forks_at_every_token(self) -> bool:
        """Whether sequences are given up and others fork in their place, at any token and not at the first alone."""
        return self.resolved_strategy in (SamplingStrategy.BEAM_SEARCH, SamplingStrategy.WITHOUT_REPLACEMENT)

    @property
    def sequence_breakers(self) -> tuple[str, ...]:
        """What ends a repetition; nothing where no repetition costs anything."""
        if not self.dry_multiplier:
            return ()
        return SEQUENCE_BREAKERS if self.dry_sequence_breakers is None else tuple(self.dry_sequence_breakers)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else tuple(self.stop)

    @property
    def requires_parallel_sampling(self) -> Truth:
        """Whether one prompt grows into several sequences; may be called too."""
        return Truth(self.num_samples > 1 or self.resolved_strategy is SamplingStrategy.BEAM_SEARCH)

    @property
    def structure(self) -> Structure | None:
        """What outputs must look like, if that is asked for."""
        return None if self.structured_outputs is None else Structure.of(self.structured_outputs)

    def clone(self, **changes: Any) -> SamplingParams:
        """The same, with some fields changed; this one stays as it is."""
        return replace(self, **changes)

    def check_against(self, *, vocab_size: int, max_logprobs: int) -> None:
        """The checks that need a model: ids inside the vocabulary, reports no longer than the engine allows."""
        check.token_ids("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS, vocab_size)
        check.token_ids("allowed_token_ids", self.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS, vocab_size)
        for token_id in self.logit_bias or ():
            check.integer("logit_bias key", token_id, 0, vocab_size - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), 0, max_logprobs)

    # -- fields that must fit each other -----------------------------------------------------------------------

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise check.refuse("max_tokens", 0, "at least 1 (0 goes with prompt_logprobs alone)")
            if self.max_tokens == 0 and self.requires_parallel_sampling:
                raise InvalidInputError("max_tokens 0 draws nothing: n must be 1, and no beam search")
            if self.min_tokens > self.max_tokens:
                message = f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
                raise InvalidInputError(message)
        if self.structured_outputs is not None:
            if self.ignore_eos:
                raise InvalidInputError("ignore_eos must be False with structured_outputs, which say where outputs end")
            if self.min_tokens:
                raise InvalidInputError("min_tokens must be 0 with structured_outputs, which say where outputs end")
        if self.stop_strings and not self.detokenize:
            raise InvalidInputError("stop strings need text: detokenize must be True when stop is given")
        if self.prompt_logprobs is not None and self.output_kind is not OutputKind.FINAL_ONLY:
            raise InvalidInputError("prompt_logprobs cannot be streamed: output_kind must be 'final_only'")
        if self.return_kept is not None and self.output_kind is OutputKind.GROWTH:
            raise InvalidInputError("return_kept is told with outputs: output_kind must not be 'growth'")

    def _check_strategy(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidInputError(f"best_of must be at least n = {self.n}, got {self.best_of}")
        if self.resolved_strategy is SamplingStrategy.BEAM_SEARCH:
            self._check_beam_search()
            return
        self._check_child()
        self._refuse_unused("beam_width", "length_penalty", "early_stopping", "num_beam_groups")
        if self.sampling_type is SamplingType.GREEDY and self.num_samples > 1:
            name = "n" if self.best_of is None else "best_of"
            raise InvalidInputError(
                f"{name} must be 1 when temperature is 0: greedy samples of one prompt are all the same "
                f"(beam search returns several), got {self.num_samples}"
            )
        if self.resolved_strategy not in (SamplingStrategy.PARALLEL, SamplingStrategy.BEST_OF_N):
            self._refuse_unused("best_of", "score")
        if self.resolved_strategy in (SamplingStrategy.ARITHMETIC, SamplingStrategy.WITHOUT_REPLACEMENT):
            self._refuse_unused("child")
        if self.resolved_strategy is SamplingStrategy.WITHOUT_REPLACEMENT:
            self._check_distinct()
        if self.resolved_strategy is not SamplingStrategy.DIVERSE:
            self._refuse_unused("diversity_penalty")
        if self.resolved_strategy is SamplingStrategy.PARALLEL:
            if self.num_samples > self.n:
                raise InvalidInputError("best_of > n needs strategy 'best_of_n', got 'parallel'")
            self._refuse_unused("score")
        elif self.num_samples > self.n:
            self._refuse_deltas("best_of > n ranks outputs when all have ended")

    def _check_child(self) -> None:
        if self.child and self.num_samples > 1 and self.resolved_strategy is not SamplingStrategy.PARALLEL:
            name = "n" if self.best_of is None else "best_of"
            raise InvalidInputError(
                f"child names samples that go their own ways, and strategy {self.resolved_strategy.value!r} looks at "
                f"all of a set: got child {self.child} and {name} {self.num_samples}"
            )
        if self.child + self.num_samples > MAX_SAMPLES:
            raise InvalidInputError(f"child + n must be at most {MAX_SAMPLES}, got {self.child} + {self.num_samples}")
        if self.child and self.seed is None:
            raise InvalidInputError(f"child names one of a seed's samples: give the seed too, got child {self.child}")

    def _check_beam_search(self) -> None:
        width = self.resolved_beam_width
        self._refuse_unused("seed", "child", "best_of", "score", "xtc_probability", "dynatemp_range", "mirostat_tau")
        self._refuse_unused("return_kept")
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

    def _check_distinct(self) -> None:
        self._refuse_unused("xtc_probability", "mirostat_tau", "return_kept")
        if self.temperature == 0:
            raise InvalidInputError("temperature must be above 0 to draw without replacement")
        if self.stop_strings:
            raise InvalidInputError("stop strings cannot be used without replacement; use stop_token_ids")
        self._refuse_deltas("samples change until the last has ended")

    def _refuse_deltas(self, why: str) -> None:
        if self.output_kind is OutputKind.DELTA:
            raise InvalidInputError(f"output_kind must not be 'delta' here: {why}")

    def _refuse_unused(self, *names: str) -> None:
        """An option that the chosen strategy cannot use is an error, not a silence."""
        for name in names:
            value = getattr(self, name)
            if value != self.__dataclass_fields__[name].default:
                strategy = self.resolved_strategy.value
                raise InvalidInputError(f"{name} has no meaning with strategy {strategy!r}, got {value!r}")


def _checked(option: Field[Any], value: Any) -> Any:
    """The value if its field takes it: lists become tuples and names members, so that nobody can change them later."""
    name, limits = option.name, option.metadata["limits"]
    match str(option.type).removesuffix(" | None"):
        case "bool":
            return check.boolean(name, value)
        case "int":
            return check.integer(name, value, limits.low, limits.high)
        case "float":
            check.number(name, value, limits.low, limits.high, above=limits.above)
            return value
        case "str | Sequence[str]" if isinstance(value, str):
            return (check.text(name, value, limits.longest),)
        case "str | Sequence[str]" | "Sequence[str]":
            texts = check.items(name, value, limits.most)
            for index, text in enumerate(texts):
                check.text(f"{name}[{index}]", text, limits.longest)
            return texts
        case "Sequence[int]":
            token_ids = check.token_ids(name, value, limits.most)
            if len(token_ids) < limits.fewest:
                raise InvalidInputError(f"{name} must have at least {limits.fewest} entry, got {len(token_ids)}")
            return token_ids
        case "Sequence[LogitsProcessor]":
            processors = check.items(name, value, limits.most)
            for index, processor in enumerate(processors):
                if not callable(processor):
                    raise check.refuse(f"{name}[{index}]", processor, "callable")
            return processors
        case "Mapping[int, float]":
            if not isinstance(value, Mapping):
                raise check.refuse(name, value, "a mapping of token id to bias")
            if len(value) > limits.most:
                raise InvalidInputError(f"{name} must have at most {limits.most} entries, got {len(value)}")
            for token_id, bias in value.items():
                check.integer(f"{name} key", token_id, 0, check.LARGEST_TOKEN_ID)
                check.number(f"{name}[{token_id}]", bias)
            return dict(value)
        case "Mapping[str, Any]":
            return checked_structure(name, value)
        case "SamplingStrategy | str":
            return check.member(name, value, SamplingStrategy)
        case "OutputKind | str":
            return check.member(name, value, OutputKind)
        case "KeptKind":
            return check.choice(name, value, limits.choices)
        case "Score":
            return value if callable(value) else check.choice(name, value, limits.choices)
        case "bool | Literal['never']":
            if not isinstance(value, bool) and value != "never":
                raise check.refuse(name, value, "True, False or 'never'")
            return value
    raise TypeError(f"SamplingParams.{name}: nothing checks a {option.type}")
