"""What an engine is built from: frozen, checked once, never written back.

Sizes that only start-up can measure (the number of KV blocks, the resolved context length) become arguments of the
parts that need them; they are not stored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, get_args

from ramify import validation as check
from ramify.device_names import MOST_RANKS, Device, check_device, check_devices, names_of
from ramify.errors import InvalidInputError
from ramify.foreign.keywords import own_keywords
from ramify.foreign.vllm import ENGINE_OPTIONS, in_our_spelling

ModelDType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
PreemptionMode = Literal["recompute", "swap"]
LogprobsMode = Literal["raw", "processed", "both"]
Warmup = Literal["lazy", "full"]
GenerationConfig = Literal["auto", "none"]
Lookup = Literal["ngram", "suffix"]
STUDENT = "student"  # drafts for the mixture that it is part of
AlphaMethod = Literal["kl_symmetry", "fixed", "entropy", "ess_balance", "kl_budget"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_MODEL_LEN = 2048
LARGEST_MODEL_LEN = 2**24
MOST_REPLICAS = 64
SEED_LOW, SEED_HIGH = -(2**63), 2**64 - 1


def setting(default: Any, help_text: str) -> Any:
    """A field of a configuration; its help is that of its flag, and of whatever else describes it."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, in which precision, on which device."""

    model: str = setting(DEFAULT_MODEL, "folder, .gguf file, hub id, or smollm2-135m (embedded)")
    tokenizer: str | None = setting(None, "folder or .gguf file with another tokenizer than the model's own")
    dtype: ModelDType = setting("auto", "auto: float32 on a CPU; on a GPU the checkpoint's own, bfloat16 for float32")
    device: Device | str = setting("auto", "auto, cpu, cuda or cuda:N; several share the model: cuda:0,cuda:1")
    max_model_len: int | None = setting(None, "longest prompt + output; default: the checkpoint's")
    load_format: LoadFormat = setting("auto", "auto, safetensors, gguf, or dummy (random weights)")
    max_logprobs: int = setting(20, "most alternatives a request may ask for")
    logprobs_mode: LogprobsMode = setting("raw", "raw: the model's own; processed: what was drawn from; both")
    warmup: Warmup = setting("lazy", "full: every CUDA graph is captured at the start; lazy: when first needed")
    enforce_eager: bool = setting(False, "no CUDA graphs; on a CPU no compiled kernels")
    dequantize: bool = setting(
        False,
        "hold all weights as numbers (on a CPU float32), whatever the checkpoint's format; load_weights may then "
        "replace any",
    )
    int8_activations: bool = setting(
        False,
        "on a CPU: quantised weights are multiplied by activations of 8 bits where several rows make that faster; not "
        "exact",
    )
    batch_invariant: bool = setting(
        False, "a request's tokens and logprobs are the same to the bit whatever else runs; slower"
    )
    generation_config: GenerationConfig = setting(
        "auto", "auto: sample as the checkpoint recommends, unless told otherwise; none: as it is"
    )
    tensor_parallel_size: int = setting(
        1, "ranks that share each model: heads, MLP and vocabulary; a process each, one a GPU or on the CPU"
    )
    speculation: Lookup | str | None = setting(
        None,
        "what drafts tokens ahead, which changes none: ngram or suffix (what was written before), a smaller model, or "
        "student (of two models)",
    )
    data_parallel_size: int = setting(
        1,
        "engines that each hold the whole model and share the requests: a process each, one a GPU or a share of cores",
    )
    seed: int = setting(0, "the engine's seed, for requests that bring none")

    def __post_init__(self) -> None:
        check.text("model", self.model)
        if self.tokenizer is not None:
            check.text("tokenizer", self.tokenizer)
        check.choice("dtype", self.dtype, get_args(ModelDType))
        check_device("device", self.device)
        if self.max_model_len is not None:
            check.integer("max_model_len", self.max_model_len, 1, LARGEST_MODEL_LEN)
        check.choice("load_format", self.load_format, get_args(LoadFormat))
        check.integer("max_logprobs", self.max_logprobs, 0)
        check.choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode))
        check.choice("warmup", self.warmup, get_args(Warmup))
        check.boolean("enforce_eager", self.enforce_eager)
        check.boolean("dequantize", self.dequantize)
        check.boolean("int8_activations", self.int8_activations)
        if self.int8_activations and self.dequantize:
            raise InvalidInputError(
                "int8_activations multiplies quantised weights, and dequantize leaves none: ask for one of them"
            )
        check.boolean("batch_invariant", self.batch_invariant)
        check.choice("generation_config", self.generation_config, get_args(GenerationConfig))
        check.integer("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        if self.tensor_parallel_size not in (1, self.num_ranks):
            raise InvalidInputError(
                f"tensor_parallel_size must be the number of devices ({self.num_ranks} in {self.device!r}), got "
                f"{self.tensor_parallel_size}"
            )
        if self.speculation is not None:
            check.text("speculation", self.speculation)
        check.integer("data_parallel_size", self.data_parallel_size, 1, MOST_REPLICAS)
        check.integer("seed", self.seed, SEED_LOW, SEED_HIGH)

    @property
    def num_ranks(self) -> int:
        """That share each model: as many as devices are named, or as tensor_parallel_size says of one kind."""
        named = len(names_of(self.device))
        return named if named > 1 else self.tensor_parallel_size

    def resolve_max_model_len(self, checkpoint_len: int | None) -> int:
        """The user's choice, else the checkpoint's, else 2048. More than the checkpoint was made for is refused."""
        if self.max_model_len is None:
            return checkpoint_len or DEFAULT_MAX_MODEL_LEN
        if checkpoint_len is not None and self.max_model_len > checkpoint_len:
            raise InvalidInputError(
                f"max_model_len must be at most {checkpoint_len} (what the checkpoint was made for), "
                f"got {self.max_model_len}"
            )
        return self.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How keys and values are kept."""

    block_size: int = setting(16, "tokens per KV block")
    num_kv_blocks: int | None = setting(None, "KV blocks; default: what memory allows")
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory (no effect on a CPU)")
    swap_space: float = setting(4.0, "GiB of host memory for swapped-out blocks")
    enable_prefix_caching: bool = setting(True, "keep prompts' blocks for later requests")

    def __post_init__(self) -> None:
        check.integer("block_size", self.block_size, 1, 1024)
        if self.num_kv_blocks is not None:
            check.integer("num_kv_blocks", self.num_kv_blocks, 1)
        check.number("gpu_memory_utilization", self.gpu_memory_utilization, above=0, high=1)
        check.number("swap_space", self.swap_space, 0)
        check.boolean("enable_prefix_caching", self.enable_prefix_caching)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much one step may hold."""

    max_num_batched_tokens: int | None = setting(
        None, "tokens per step; default max(2048, max_num_seqs), 8192 on a GPU"
    )
    max_num_seqs: int = setting(256, "sequences that run at once")
    enable_chunked_prefill: bool = setting(True, "split long prompts over several steps")
    preemption_mode: PreemptionMode = setting("recompute", "recompute or swap when the cache runs out")

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens is not None:
            check.integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check.integer("max_num_seqs", self.max_num_seqs, 1)
        check.boolean("enable_chunked_prefill", self.enable_chunked_prefill)
        check.choice("preemption_mode", self.preemption_mode, get_args(PreemptionMode))

    def resolve_max_num_batched_tokens(self, *, on_gpu: bool) -> int:
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(8192 if on_gpu else 2048, self.max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """How a teacher and a student become one distribution; alpha is the teacher's weight in it."""

    alpha_method: AlphaMethod = setting(
        "kl_symmetry", "how the teacher's weight is found: kl_symmetry, fixed, entropy, ess_balance, kl_budget"
    )
    alpha: float | None = setting(None, "the teacher's weight, for alpha_method fixed")
    kl_budget: float | None = setting(None, "how far from the student, in nats a token, for alpha_method kl_budget")
    alpha_min: float = setting(0.0, "no weight below this, whatever the method finds")
    alpha_max: float = setting(1.0, "no weight above this")
    teacher_top_k: int = setting(-1, "only the teacher's k likeliest tokens (-1 or 0: all)")
    teacher_top_p: float = setting(1.0, "only the teacher's likeliest tokens of this mass")
    force_teacher_first_token: bool = setting(False, "the first token is the teacher's (its weight is 1 there)")
    force_teacher_special_tokens: bool = setting(
        False, "where the teacher's likeliest token is a special one, its weight is 1"
    )

    def __post_init__(self) -> None:
        check.choice("alpha_method", self.alpha_method, get_args(AlphaMethod))
        check.number("alpha_min", self.alpha_min, 0, 1)
        check.number("alpha_max", self.alpha_max, 0, 1)
        if self.alpha_min > self.alpha_max:
            raise InvalidInputError(f"alpha_min must be at most alpha_max ({self.alpha_max}), got {self.alpha_min}")
        if self.alpha_method == "fixed":
            if self.alpha is None:
                raise InvalidInputError("alpha_method 'fixed' needs alpha, a number in 0..1")
            check.number("alpha", self.alpha, 0, 1)
            if not self.alpha_min <= self.alpha <= self.alpha_max:
                raise InvalidInputError(
                    f"alpha must be in alpha_min..alpha_max ({self.alpha_min}..{self.alpha_max}), got {self.alpha}"
                )
        elif self.alpha is not None:
            raise check.refuse("alpha", self.alpha, f"None: alpha_method {self.alpha_method!r} finds it")
        self._check_budget()
        check.integer("teacher_top_k", self.teacher_top_k, -1, check.LARGEST_TOKEN_ID)
        check.number("teacher_top_p", self.teacher_top_p, above=0, high=1)
        check.boolean("force_teacher_first_token", self.force_teacher_first_token)
        check.boolean("force_teacher_special_tokens", self.force_teacher_special_tokens)

    def _check_budget(self) -> None:
        if self.alpha_method != "kl_budget":
            if self.kl_budget is not None:
                raise check.refuse("kl_budget", self.kl_budget, f"None: alpha_method is {self.alpha_method!r}")
            return
        if self.kl_budget is None:
            raise InvalidInputError("alpha_method 'kl_budget' needs kl_budget, a number of nats above 0")
        check.number("kl_budget", self.kl_budget, above=0)
        if self.alpha_min > 0:
            raise check.refuse(
                "alpha_min", self.alpha_min, "0 with alpha_method 'kl_budget', or the budget would not hold"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise check.refuse(name, getattr(self, name), f"a {kind.__name__}")

    @property
    def most_sequences(self) -> int:
        """That run at once, in all replicas."""
        return self.scheduler_config.max_num_seqs * self.model_config.data_parallel_size

    @classmethod
    def from_options(cls, **options: object) -> EngineConfig:
        """Sorts flat options (`block_size=16, dtype="float32"`) into their parts.

        vLLM's options are taken where they ask for nothing. One error says all that cannot be taken.
        """
        owners = {option: name for name, kind in _PARTS.items() for option in _names(kind)}
        options = in_our_spelling(options)
        wrong = [said for option, value in options.items() if (said := _refusal(owners.get(option), option, value))]
        own = own_keywords(options, owners, ENGINE_OPTIONS, what="an engine option", wrong=wrong)
        parts: dict[str, dict[str, object]] = {name: {} for name in _PARTS}
        for option, value in own.items():
            parts[owners[option]][option] = value
        return cls(**{name: kind(**parts[name]) for name, kind in _PARTS.items()})


def configs_of_pair(
    teacher: str, theta: str, devices: object, options: Mapping[str, Any]
) -> tuple[EngineConfig, EngineConfig]:
    """Of a teacher and a student: the same but for their models and, where these are named, their devices."""
    configs = [EngineConfig.from_options(model=model, **options) for model in (teacher, theta)]
    if devices is None:
        return configs[0], configs[1]
    named, said = check_devices(devices), configs[0].model_config
    if said.device != "auto":
        raise InvalidInputError(
            f"device must be left out beside devices, got {said.device!r}: devices says it for each model"
        )
    if said.tensor_parallel_size > 1:
        raise InvalidInputError(
            f"tensor_parallel_size must be 1 beside devices, got {said.tensor_parallel_size}: as many devices as are "
            "named for a model share it"
        )
    if said.data_parallel_size > 1:
        raise InvalidInputError(
            f"data_parallel_size must be 1 beside devices, got {said.data_parallel_size}: replicas take devices of "
            "their own"
        )
    placed = [
        replace(config, model_config=replace(config.model_config, device=device))
        for config, device in zip(configs, named, strict=True)
    ]
    return placed[0], placed[1]


def _refusal(part: str | None, option: str, value: object) -> str | None:
    """What is wrong with an option by itself; None if nothing is, or if no part has it."""
    if part is None:
        return None
    try:
        _PARTS[part](**{option: value})
    except InvalidInputError as error:
        return str(error)
    return None


def _names(kind: Any) -> list[str]:
    return [item.name for item in fields(kind)]


_PARTS = {"model_config": ModelConfig, "cache_config": CacheConfig, "scheduler_config": SchedulerConfig}


class EngineOptions(TypedDict, total=False):
    """The flat options of `LLM` and `EngineConfig.from_options` (all but the model); a test holds them to the parts."""

    tokenizer: str | None
    dtype: ModelDType
    device: Device | str
    max_model_len: int | None
    load_format: LoadFormat
    max_logprobs: int
    logprobs_mode: LogprobsMode
    warmup: Warmup
    enforce_eager: bool
    dequantize: bool
    int8_activations: bool
    batch_invariant: bool
    generation_config: GenerationConfig
    tensor_parallel_size: int
    speculation: Lookup | str | None
    data_parallel_size: int
    seed: int
    block_size: int
    num_kv_blocks: int | None
    gpu_memory_utilization: float
    swap_space: float
    enable_prefix_caching: bool
    max_num_batched_tokens: int | None
    max_num_seqs: int
    enable_chunked_prefill: bool
    preemption_mode: PreemptionMode
