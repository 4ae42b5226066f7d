"""Every field of a model's metadata with every kind of value that does not belong: loaded, or refused with an error of
ours that names the file, never another exception."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ramify import LLM, FileFormatError, ModelConfig, ModelLoader, ModelNotFoundError, SamplingParams
from ramify.errors import RamifyError
from ramify.files.json_file import DEEPEST_JSON, nesting, parse_object, read_json
from ramify.models.families import Architecture, architecture_from_config, architecture_from_gguf
from ramify.models.generation_defaults import GGUF_KEYS, RECOMMENDED_FIELDS, defaults_from_gguf
from ramify.models.gguf_file import GGUFFile
from ramify.models.rope import inverse_frequencies
from ramify.text.codec import TextCodec
from ramify.text.gguf_tokenizer import tokenizer_from_gguf
from ramify.text.tokenizer_folder import load_folder
from tests.alterations import FOREIGN, check_message, random_alteration, use, with_value
from tests.conftest import CheckpointMaker
from tests.unit.test_models_corrupted import write_model

NUM_RANDOM = 60  # of each file
CONFIG_FIELDS = (
    *("model_type", "hidden_act", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "layer_types"),
    *("use_sliding_window", "sliding_window", "num_experts", "num_local_experts", "quantization_config", "auto_map"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "transformers_version"),
)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    "yarn": {
        **{"original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
    },
}


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    """A checkpoint with a byte-level tokenizer, whose end token is the last but one of a padded vocabulary."""
    folder = make_checkpoint("llama")
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={**vocabulary, "he": 256, "ll": 257}, merges=[("h", "e"), ("l", "l")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    written = {
        "eos_token": "<|end|>",
        "chat_template": "{{ messages[0].content }}",
        "added_tokens_decoder": {"258": {"content": "<|end|>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


@pytest.fixture
def altered(folder: Path, tmp_path: Path) -> Path:
    """The same checkpoint in a folder of its own, whose files may be changed."""
    for path in folder.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    return tmp_path


def _rewrite(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # it may be a link to the sound file
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _architecture(config: str) -> Architecture | None:
    """None if it was refused."""
    try:
        arch = architecture_from_config(parse_object(config, "config.json"))
    except RamifyError as error:
        check_message(error)
        return None
    assert inverse_frequencies(arch.rope, arch.head_dim).isfinite().all()
    return arch


# -- config.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", CONFIG_FIELDS)
def test_every_field_of_config_json(altered: Path, field: str) -> None:
    config = read_json(altered / "config.json")
    sound = architecture_from_config(config)
    for value in FOREIGN.values():
        written = with_value(config, (field,), value)
        arch = _architecture(written)
        if arch is not None and arch != sound:
            _rewrite(altered / "config.json", written)
            use(altered)


@pytest.mark.parametrize("kind", ROPES)
def test_every_field_of_rope_parameters(altered: Path, kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, **ROPES[kind]}
    config = {**read_json(altered / "config.json"), "rope_parameters": parameters}
    used = 0
    for field in (*parameters, "type", "partial_rotary_factor", "mrope_section"):
        for value in FOREIGN.values():
            arch = _architecture(with_value(config, ("rope_parameters", field), value))
            used += arch is not None
    assert used > len(FOREIGN)  # a field that this kind does not read may hold anything


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_parameters": "linear"}, "rope_parameters must be an object, got 'linear'"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be at least 1, got 0.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor must be a number in 0..1e"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor must be a number in 0.*got '2'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e301}}, "factor must be a number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast must be a number"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"quantization_config": "gptq"}, "quantization_config must be an object, got 'gptq'"),
        ({"layer_types": "full_attention"}, "layer_types must be a list, got 'full_attention'"),
        ({"vocab_size": 2**63}, f"vocab_size must be a whole number up to 2147483647, got {2**63}"),
        ({"eos_token_id": 320}, "config.json: eos_token_id 320 is outside the vocabulary of 320 tokens"),
        ({"eos_token_id": [1, -1]}, "eos_token_id -1 is outside the vocabulary"),
        ({"eos_token_id": [2**70]}, "eos_token_id .* is outside the vocabulary"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, changes: Mapping[str, Any], told: str) -> None:
    config = {**read_json(folder / "config.json"), "rope_parameters": None, **changes}
    with pytest.raises(FileFormatError, match=told):
        architecture_from_config(config)


def test_weights_that_a_config_merely_claims_are_not_made_up(altered: Path) -> None:
    config = {**read_json(altered / "config.json"), "vocab_size": 2**31 - 1, "hidden_size": 2**20}
    _rewrite(altered / "config.json", json.dumps(config))
    with pytest.raises(RamifyError, match="does not fit in memory"):
        LLM(str(altered), load_format="dummy")


# -- JSON itself -----------------------------------------------------------------------------------------------


def test_nesting_counts_brackets_outside_of_strings_in_one_pass() -> None:
    assert nesting('{"a": [1, {"b": "[[[[\\"[["}]}', 10) == 3
    assert nesting("[" * 1_000_000, 10) == 11  # no more is counted than is allowed
    assert nesting("[]" * 65 + '"' + '\\"' * 500_000, 10) == 1  # an unclosed string is gone over once
    with pytest.raises(FileFormatError, match=r"config\.json is nested more than 64 levels deep"):
        parse_object('{"a":' + "[" * DEEPEST_JSON + "]" * DEEPEST_JSON + "}", "config.json")


def test_a_file_that_is_a_folder_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(FileFormatError, match=r"config\.json is no file"):
        read_json(tmp_path / "config.json")
    os.mkfifo(tmp_path / "pipe.json")  # nobody ever writes to it
    with pytest.raises(FileFormatError, match=r"pipe\.json is no file"):
        read_json(tmp_path / "pipe.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(FileFormatError, match=r"latin\.json is not UTF-8"):
        read_json(tmp_path / "latin.json")
    with pytest.raises(ModelNotFoundError, match=r"has no gone\.json"):
        read_json(tmp_path / "gone.json")
    (tmp_path / "digits.json").write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(FileFormatError, match=r"digits\.json is not valid JSON"):
        read_json(tmp_path / "digits.json")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "x" * 5000, "a\0b", "", "/", "\ud800", "no/such"])
def test_names_that_are_no_paths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RamifyError):
        LLM(name)


# -- end tokens ------------------------------------------------------------------------------------------------


def test_end_tokens_of_generation_config_are_checked(altered: Path) -> None:
    for value in FOREIGN.values():
        _rewrite(altered / "generation_config.json", with_value({}, ("eos_token_id",), value))
        use(altered)
    _rewrite(altered / "generation_config.json", '{"eos_token_id": [3, 400]}')
    with pytest.raises(FileFormatError, match=r"generation_config\.json: eos_token_id 400 is outside the vocabulary"):
        LLM(str(altered))


@pytest.mark.parametrize("field", [*RECOMMENDED_FIELDS, "do_sample", "max_length"])
def test_every_recommendation_of_generation_config(altered: Path, field: str) -> None:
    for value in FOREIGN.values():
        _rewrite(altered / "generation_config.json", with_value({}, (field,), value))
        try:
            loader = ModelLoader(ModelConfig(model=str(altered)))
            assert str(loader.load_generation_defaults().params())
        except RamifyError as error:
            check_message(error)


def test_an_end_token_that_the_model_cannot_draw_ends_nothing(altered: Path) -> None:
    """A tokenizer may name tokens beyond the embedding: masking one would break a step."""
    added = {str(259 + index): {"content": f"<|extra {index}|>"} for index in range(100)}
    config = {"added_tokens_decoder": added, "eos_token": "<|extra 99|>"}
    _rewrite(altered / "tokenizer_config.json", json.dumps(config))
    llm = LLM(str(altered), num_kv_blocks=32)
    assert llm.tokenizer is not None
    assert min(llm.tokenizer.eos_token_ids) >= 320
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=4, min_tokens=3), use_tqdm=False)[0]
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(RamifyError, match="prompt_token_ids"):  # nor can a prompt hold it
        llm.generate("<|extra 99|>", use_tqdm=False)


# -- GGUF ------------------------------------------------------------------------------------------------------

FOREIGN_GGUF: tuple[Any, ...] = (
    *(True, 0, 1, -1, 7, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, 0.5, -1.0, 1e-320, 1e300),
    *(float("inf"), float("-inf"), float("nan"), "", "x", "llama", "x" * 50_000, [], ["x"], ["x", "x"], ["a b"] * 300),
    *(np.array([], np.uint8), np.array([1, 2]), np.array([np.nan, np.inf]), np.array([True, False])),
    np.arange(300, dtype=np.int32),
)


def test_every_key_of_gguf_metadata(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    write_model(path)
    file = GGUFFile.open(path)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    keys = [
        *file.metadata,
        *(f"llama.rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")),
        *(f"llama.rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "ext_factor", "log_multiplier")),
        *("llama.rope.scale_linear", "split.count"),
        *("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"),
        *("llama.expert_count", "llama.attention.sliding_window", "tokenizer.chat_template.tool_use"),
        *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eot", "eom", "unknown", "padding")),
        *(f"tokenizer.ggml.{name}" for name in ("add_bos_token", "add_eos_token", "add_space_prefix", "scores")),
    ]
    scaled = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    pieces = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": np.zeros(259)}
    keys += GGUF_KEYS.values()
    for base in (file.metadata, {**file.metadata, **scaled}, {**file.metadata, **pieces}):
        for key in keys:
            for value in FOREIGN_GGUF:
                metadata: dict[str, Any] = {**base, key: value}
                try:
                    arch = architecture_from_gguf(metadata, shapes)
                    assert inverse_frequencies(arch.rope, arch.head_dim).isfinite().all()
                    defaults_from_gguf(metadata).params()
                    if key.startswith("tokenizer."):
                        codec = TextCodec(tokenizer_from_gguf(metadata))
                        _ = codec.chat_template
                        codec.encode("hello 12 wörld", add_special_tokens=True)
                except RamifyError as error:
                    check_message(error)


# -- tokenizer files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *(("eos_token",), ("eos_token", "content"), ("chat_template",), ("extra_special_tokens",)),
        *(("additional_special_tokens",), ("added_tokens_decoder",), ("added_tokens_decoder", "258")),
        *(("added_tokens_decoder", "300", name) for name in ("content", "special", "lstrip", "__type", "foreign")),
        *(("added_tokens_decoder", "x"), ("model_max_length",), ("tokenizer_class",)),
    ],
    ids=".".join,
)
def test_every_field_of_tokenizer_config_json(altered: Path, path: tuple[str, ...]) -> None:
    config = read_json(altered / "tokenizer_config.json")
    for value in FOREIGN.values():
        _rewrite(altered / "tokenizer_config.json", with_value(config, path, value))
        try:
            tokenizer = load_folder(altered)
            TextCodec(tokenizer).encode("hello <|end|>", add_special_tokens=True)
        except RamifyError as error:
            check_message(error)


# -- at random -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_random_alterations_are_used_or_refused(altered: Path, name: str) -> None:
    generator = random.Random(f"alterations of {name}")
    sound = read_json(altered / name)
    outcomes = set()
    for _ in range(NUM_RANDOM):
        done, text = random_alteration(sound, generator)
        _rewrite(altered / name, text)
        try:
            outcomes.add(use(altered))
        except Exception as error:
            raise AssertionError(f"{name}: {done}") from error
    assert outcomes == {"worked", "refused"}
