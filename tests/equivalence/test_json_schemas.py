"""Every output of a JSON schema parses and fits, by a validator that is not ours.

Tokens are the default tokenizer's, drawn at temperature 1 from a model that knows nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify import SamplingParams
from ramify.models.gguf_file import GGUFFile
from ramify.structured.grammars import Grammars
from ramify.text.codec import TextCodec
from ramify.text.gguf_tokenizer import tokenizer_from_gguf
from tests import fake
from tests.drive import finish
from tests.schemas import Schema, schemas

pytest.importorskip("llguidance")
jsonschema_rs: Any = pytest.importorskip("jsonschema_rs")

CLOSING = ('"', '",', '"}', "}", "]", ",", "0", "1")  # a model that knows nothing would write for ever
HELD = 4.0  # what those gain


@pytest.fixture(scope="module")
def codec(default_gguf: Path) -> TextCodec:
    return TextCodec(tokenizer_from_gguf(GGUFFile.open(default_gguf).metadata))


@pytest.fixture(scope="module")
def grammars(codec: TextCodec) -> Grammars:
    return Grammars(codec)


@pytest.fixture
def ignorance(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> frozenset[int]:
    """Fake logits over the whole vocabulary, some rows of noise in turn; returns the end tokens."""
    assert codec.tokenizer is not None
    size, ends = codec.tokenizer.vocab_size, codec.tokenizer.eos_token_ids
    noise = 2 * torch.randn(16, size, generator=torch.Generator().manual_seed(5))
    closing = [codec.encode(text, add_special_tokens=False)[0] for text in CLOSING]
    noise[:, [*closing, *ends]] += HELD + noise.amax()
    noise[:, [token_id for token_id in range(size) if codec.decode_token(token_id).isspace()]] -= 2 * HELD

    def logits_after(tokens: list[int], model: int = 0) -> Tensor:
        return noise[(sum(tokens) + model) % len(noise)]

    monkeypatch.setattr(fake, "VOCAB", size)
    monkeypatch.setattr(fake.FakeLayers, "vocab_size", size)
    monkeypatch.setattr(fake, "logits_after", logits_after)
    return ends


def check_all(wanted: list[Schema], codec: TextCodec, grammars: Grammars, ends: frozenset[int]) -> None:
    core = fake.fake_engine(
        eos_token_ids=ends, max_num_seqs=64, num_blocks=4_096, max_model_len=2_048, max_num_batched_tokens=256
    )
    core.begin_matcher = grammars.begin
    asked = [
        ([1, number + 2], SamplingParams(n=4, seed=number, max_tokens=400, structured_outputs={"json": schema}))
        for number, schema in enumerate(wanted)
    ]
    assert codec.tokenizer is not None
    distinct = 0
    for schema, output in zip(wanted, finish(core, asked), strict=True):
        assert output.error is None, schema
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        texts = [codec.tokenizer.decode(each.token_ids) for each in output.outputs]
        assert [each.finish_reason for each in output.outputs] == ["stop"] * 4, (schema, texts)
        for text in texts:
            assert validator.is_valid(json.loads(text)), (schema, text)
        distinct += len(set(texts)) > 1
    assert distinct > len(wanted) / 2, "a mask that leaves one text proves little"


def test_outputs_fit_their_schema(codec: TextCodec, grammars: Grammars, ignorance: frozenset[int]) -> None:
    check_all(schemas(12), codec, grammars, ignorance)


@pytest.mark.long
def test_outputs_fit_two_hundred_schemas(codec: TextCodec, grammars: Grammars, ignorance: frozenset[int]) -> None:
    check_all(schemas(200, seed=1), codec, grammars, ignorance)
