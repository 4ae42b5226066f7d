"""The source documents' way of loading a model, with the weights of a real one."""

from __future__ import annotations

from pathlib import Path

import torch

from ramify import EngineConfig, ModelConfig, ModelLoader
from ramify.models.decoder import Decoder, parameters
from ramify.text.tokenizer import Tokenizer
from tests.document_blocks import LOADING, run_code


def test_the_documents_factory_loads_model_and_tokenizer_with_our_loader(default_gguf: Path) -> None:
    factory = run_code(LOADING.code, ModelLoader=ModelLoader)["get_model_and_tokenizer"]
    model_config = ModelConfig(model=str(default_gguf))
    model, tokenizer = factory(model_config, "cpu")
    assert isinstance(model, Decoder)
    assert isinstance(tokenizer, Tokenizer)
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
    assert all(parameter.isfinite().all() for _, parameter in parameters(model))
    text = "Once upon a time, 从前有座山."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size <= model.arch.vocab_size


def test_our_factory_and_an_engine_config_give_the_same_model_as_the_documents(default_gguf: Path) -> None:
    from ramify import get_model_and_tokenizer

    factory = run_code(LOADING.code, ModelLoader=ModelLoader)["get_model_and_tokenizer"]
    model_config = ModelConfig(model=str(default_gguf))
    theirs, _ = factory(model_config, "cpu")
    ours, tokenizer = get_model_and_tokenizer(EngineConfig(model_config=model_config), "cpu")
    assert tokenizer is not None
    pairs = zip(parameters(ours), parameters(theirs), strict=True)
    assert all(name == other and torch.equal(mine, its) for (name, mine), (other, its) in pairs)
