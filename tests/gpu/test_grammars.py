"""Masks of grammars on the GPU: rows with one, beside rows without, draw what the CPU's draw."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from ramify import LLM, SamplingParams
from ramify.engine.plan import Plan
from ramify.text.token_text import byte_of_character
from tests.conftest import CheckpointMaker
from tests.gpu.engines import OPTIONS, PROMPTS, engine, step_of, tokens
from tests.masks import fits, follow_sevenths

STRUCTURE: dict[str, Any] = {"structured_outputs": {"regex": "any"}}
END = 11  # the model names none
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "many": {"n": 4, "seed": 3},
    "reported": {"n": 2, "best_of": 4, "seed": 3, "logprobs": 3},
    "filtered": {"n": 4, "seed": 3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
    "beams": {"n": 3, "strategy": "beam_search", "beam_width": 4},
    "diverse": {"n": 3, "seed": 5, "strategy": "diverse", "diversity_penalty": 1.0},
    "distinct": {"n": 3, "seed": 5, "strategy": "without_replacement"},
}


@pytest.mark.parametrize("way", WAYS)
def test_masked_rows_are_those_of_the_cpu(make_checkpoint: CheckpointMaker, way: str) -> None:
    folder = make_checkpoint("llama")
    params = [
        SamplingParams(max_tokens=20, stop_token_ids=[END], **WAYS[way], **(STRUCTURE if number % 2 == 0 else {}))
        for number in range(len(PROMPTS))
    ]
    found = []
    for llm in (LLM(str(folder), device="cpu", dtype="float32", **OPTIONS), engine(folder, "float32")):
        follow_sevenths(llm)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert not any(output.error for output in outputs)
        for output in outputs[::2]:
            assert all(fits(each.token_ids, llm._intake.vocab_size, [END]) for each in output.outputs)
        found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[0] == found[1]


def test_they_run_one_step_ahead(make_checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps are begun before the host knows the tokens that their grammars need."""
    llm = engine(make_checkpoint("llama"), "float32")
    follow_sevenths(llm)
    step, counts = step_of(llm), Counter[str]()

    def count(name: str) -> None:
        original = getattr(step, name)

        def counted(plan: Plan) -> Any:
            counts[name] += 1
            return original(plan)

        monkeypatch.setattr(step, name, counted)

    count("begin")
    count("launch")  # begins, and draws at once
    tokens(llm, max_tokens=20, seed=1, stop_token_ids=[END], **STRUCTURE)
    assert counts["begin"] - counts["launch"] >= 10


@pytest.mark.parametrize("graphs", [True, False])
def test_texts_of_schemas_are_those_of_the_cpu(make_checkpoint: CheckpointMaker, graphs: bool) -> None:
    """By llguidance, with strings that must end soon, beside rows without a grammar; samples of one prompt."""
    pytest.importorskip("llguidance")
    folder = make_checkpoint("llama", vocab_size=1_000)
    end = write_words(folder)
    item = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["ab", "ba"]}},
    }
    schema = {
        "type": "array",
        "items": {**item, "required": ["name", "kind"], "additionalProperties": False},
        "minItems": 2,
    }
    ways: list[dict[str, Any]] = [
        {"structured_outputs": {"json": schema}, "n": 6},
        {},
        {"structured_outputs": {"json": schema}, "top_p": 0.9, "logprobs": 2},
        {"structured_outputs": {"regex": "(ab?c)*"}, "repetition_penalty": 1.2, "n": 2},
        {"structured_outputs": {"json": {"type": "object"}}, "temperature": 0.0},
    ]
    params = [SamplingParams(max_tokens=60, seed=7, stop_token_ids=[end], **way) for way in ways]
    found = []
    options = {"enforce_eager": not graphs}
    for llm in (LLM(str(folder), device="cpu", dtype="float32", **OPTIONS), engine(folder, "float32", **options)):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert not any(output.error for output in outputs)
        found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[0] == found[1]


def write_words(folder: Path) -> int:
    """Bytes, and words of up to four letters; returns the token that ends a text."""
    words = [*byte_of_character(), *("".join(word) for length in (2, 3, 4) for word in product("abcde", repeat=length))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words[:990])}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>")])
    backend.save(str(folder / "tokenizer.json"))
    end: int | None = backend.token_to_id("<end>")
    assert end is not None
    return end
