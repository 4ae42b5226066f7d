"""`quantization_config` of a config.json to Quantization; a method, a number of bits or an option that is not served is
refused by name.

Which of a model's matrices are quantised is not read here: the names of their tensors say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.models.metadata_reader import MetadataReader
from ramify.models.number_formats import FP8_BLOCK
from ramify.validation import shown

QuantizationMethod = Literal["gptq", "awq", "fp8"]
METHODS: tuple[QuantizationMethod, ...] = ("gptq", "awq", "fp8")
WHERE = "config.json quantization_config"

# What says how a checkpoint was made, or with which kernels others run it, and nothing about what its tensors mean.
ABOUT_MAKING = frozenset(
    {
        "_load_in_4bit",
        "_load_in_8bit",
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "cache_examples_on_gpu",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "desc_act",
        "disable_exllama",
        "do_fuse",
        "exllama_config",
        "expert_dtype",
        "fuse_max_seq_len",
        "ignored_layers",
        "llm_int8_skip_modules",
        "lm_head",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "modules_to_fuse",
        "modules_to_not_convert",
        "mse",
        "pad_token_id",
        "quant_method",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
    }
)
GROUP_OPTIONS = frozenset({"bits", "w_bit", "group_size", "q_group_size"})
OPTIONS: Mapping[QuantizationMethod, frozenset[str]] = {
    "gptq": GROUP_OPTIONS | {"sym", "checkpoint_format", "format", "is_marlin_format", "pack_dtype", "dynamic"},
    "awq": GROUP_OPTIONS | {"zero_point", "version", "format", "checkpoint_format", "sym", "pack_dtype", "dynamic"},
    "fp8": frozenset({"activation_scheme", "fmt", "scale_fmt", "weight_block_size"}),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    method: QuantizationMethod
    bits: int
    group_size: int  # weights along a row that share a scale; -1: all of a row; of fp8: of rows, too
    symmetric: bool = False
    zeros_are_one_less: bool = False  # of gptq, before its second version: zero points are stored less one

    @property
    def label(self) -> str:
        """For people."""
        if self.method == "fp8":
            return f"FP8 (e4m3), blocks of {self.group_size} x {self.group_size}"
        groups = "a group a row" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"{self.method.upper()}, {self.bits} bits, {groups}"


def quantization_from_config(config: Mapping[str, Any]) -> Quantization | None:
    """None: the checkpoint is not quantised."""
    if not config.get("quantization_config"):
        return None
    options = MetadataReader(config, "config.json").mapping("quantization_config")
    named = options.get("quant_method")
    if not isinstance(named, str) or named.lower() not in METHODS:
        raise UnsupportedModelError(
            f"checkpoints quantised by {shown('an unnamed method' if named is None else named)} are not supported; "
            f"supported are {', '.join(METHODS)} and GGUF files"
        )
    method = cast(QuantizationMethod, named.lower())
    _refuse_unknown(method, options)
    read = MetadataReader(options, WHERE)
    if method == "fp8":
        return _fp8(options)
    _one_of(method, "pack_dtype", options, ("int32",))
    if options.get("dynamic"):
        raise UnsupportedModelError(f"{method}: dynamic (other bits or groups for some matrices) is not supported")
    return _gptq(options, read) if method == "gptq" else _awq(options, read)


def _gptq(options: Mapping[str, Any], read: MetadataReader) -> Quantization:
    bits = _bits("gptq", options, (4, 8))
    if read.boolean("is_marlin_format", False):
        raise UnsupportedModelError(
            "gptq: weights in marlin's order are not supported, only checkpoint_format gptq(_v2)"
        )
    name = "checkpoint_format" if options.get("checkpoint_format") is not None else "format"
    version = _one_of("gptq", name, options, ("gptq", "gptq_v2"))
    return Quantization("gptq", bits, _group_size(options), read.boolean("sym", True), version == "gptq")


def _awq(options: Mapping[str, Any], read: MetadataReader) -> Quantization:
    bits = _bits("awq", options, (4,))
    name = next(
        (each for each in ("version", "checkpoint_format", "format") if options.get(each) is not None), "version"
    )
    _one_of("awq", name, options, ("gemm",))
    if not read.boolean("zero_point", True):
        raise UnsupportedModelError("awq: zero_point false is not supported, only true")
    return Quantization("awq", bits, _group_size(options))


def _fp8(options: Mapping[str, Any]) -> Quantization:
    _one_of("fp8", "fmt", options, ("e4m3",))
    _one_of("fp8", "activation_scheme", options, ("dynamic",))
    _one_of("fp8", "scale_fmt", options, ("float",))
    block = options.get("weight_block_size")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise UnsupportedModelError(
            f"fp8: weight_block_size {shown(block)} is not supported, only [{FP8_BLOCK}, {FP8_BLOCK}]"
        )
    return Quantization("fp8", 8, FP8_BLOCK, symmetric=True)


def _bits(method: str, options: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = options.get("bits", options.get("w_bit"))
    if isinstance(bits, bool) or bits not in known:
        allowed = " and ".join(map(str, known))
        raise UnsupportedModelError(f"{method} with bits {shown(bits)} is not supported, only with {allowed}")
    return int(bits)


def _group_size(options: Mapping[str, Any]) -> int:
    size = options.get("group_size", options.get("q_group_size", 128))
    if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or 8 <= size <= 2**20):
        raise FileFormatError(f"{WHERE}: group_size must be -1 or a whole number in 8..{2**20}, got {shown(size)}")
    return size


def _one_of(method: str, name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """The first of them where nothing is said."""
    value = options.get(name)
    if value is None:
        return known[0]
    if not isinstance(value, str) or value.lower().removeprefix("torch.") not in known:
        raise UnsupportedModelError(f"{method}: {name} {shown(value)} is not supported, only {' and '.join(known)}")
    return value.lower().removeprefix("torch.")


def _refuse_unknown(method: QuantizationMethod, options: Mapping[str, Any]) -> None:
    """An option that asks for nothing (null, false, empty) is not looked at."""
    known = OPTIONS[method] | ABOUT_MAKING
    unknown = sorted(
        name for name, value in options.items() if name not in known and value not in (None, False, "", [], {})
    )
    if unknown:
        raise UnsupportedModelError(
            f"{method}: {', '.join(map(shown, unknown[:3]))} in quantization_config is not known; options that decide "
            f"how weights are read are {', '.join(sorted(OPTIONS[method]))}"
        )
