"""Tokenizers built from GGUF metadata against the libraries the models were trained with."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from ramify.errors import FileFormatError, UnsupportedModelError
from ramify.text.gguf_tokenizer import tokenizer_from_gguf

ODD = [
    "",
    " ",
    "  ",
    " " * 17,
    "\t",
    "\t\t x",
    "\n",
    "\n\n\n",
    "\r\n",
    "a\r\nb\r\n\r\nc",
    " a",
    "a ",
    "  a  b   c    ",
    "\u00a0",
    "a\u00a0b",
    "\u3000全角",
    "0",
    "1234567890",
    "3.14159 and 1,000,000",
    "a1b22c333d4444",
    "²³¼Ⅷ١٢٣",
    "Hello, world!",
    "don't I'LL we've it's they'RE 'S'd",
    "’s curly don’t",
    "HTTPServer camelCase snake_case kebab-case",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    'if (a && b || !c) { printf("%d\\n", x[0]); }',
    "https://example.org/a?b=c&d=%20#e",
    "中文没有空格",
    "日本語とカタカナ、ひらがな。",
    "한국어 텍스트",
    "العربية من اليمين",
    "עִבְרִית",
    "हिन्दी में",
    "ไทยไม่มีช่องว่าง",
    "Ελληνικά Кириллица",
    "👩‍👩‍👧‍👦 family 👍🏽 🇩🇪",
    "e\u0301 vs \u00e9",
    "a\u0300\u0301\u0302\u0303",
    "A\u030a \u212b \u00c5",
    "ﬁ ligature",
    "zero\u200bwidth\u200djoin\ufeffbom",
    "\x00\x01\x7f\x80",
    "\U0010ffff\ufffd",
    "…—“quoted”",
    "!!!???...,,,;;;",
    "==================",
    "a" * 300,
    "ab" * 200,
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y",
    "<|endoftext|><|endoftext|>",
    " <|endoftext|> ",
    "<|endoftext",
    "<s>a</s>",
    "<0x41>",
    "▁literal▁",
    "Ġliteral Ċ",
    "mixed 日本 and עברית with 123 and 👍",
]
FRAGMENTS = [text for text in ODD if 0 < len(text) < 40] + ["the", " of", "ing", "er", " ", "\n", "7", "'t"]


def texts(seed: int, count: int = 500) -> list[str]:
    chance = random.Random(seed)
    mixtures = ["".join(chance.choices(FRAGMENTS, k=chance.randint(1, 8))) for _ in range(count)]
    anything = [
        "".join(chr(chance.choice([chance.randrange(32, 0x250), chance.randrange(0x250, 0xD800)])) for _ in range(9))
        for _ in range(count // 5)
    ]
    return [*ODD, *mixtures, *anything]


def training_text(seed: int) -> list[str]:
    return texts(seed, 400) + ["the quick brown fox jumps over the lazy dog's 1234 tails"] * 20


def assert_equal(ours: Any, theirs: tokenizers.Tokenizer, samples: Iterable[str]) -> None:
    for text in samples:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.fixture(scope="module")
def smollm_metadata(default_gguf: Path) -> dict[str, Any]:
    import gguf

    fields = gguf.GGUFReader(default_gguf).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def test_the_default_model_against_transformers(default_gguf: Path, smollm_metadata: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    reference = converted.backend_tokenizer
    # transformers leaves GPT-2's splitting in place for this family.
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = tokenizer_from_gguf(smollm_metadata)
    assert_equal(ours, reference, texts(0))
    assert ours.vocab_size == 49152
    assert ours.eos_token_ids == {2}
    assert ours.bos_token_id == 1
    assert ours.encode("Hi") == ours.encode("Hi", add_special_tokens=False)
    assert ours.chat_template == smollm_metadata["tokenizer.chat_template"]
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    assert all(ours.decode(ours.encode(text), skip_special_tokens=False) == text for text in texts(1))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(pre: str) -> tokenizers.Tokenizer:
    """A tiny byte-level BPE with the family's own splitting."""
    reference = tokenizers.Tokenizer(models.BPE())
    reference.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": split_by(LLAMA3),
        "qwen2": split_by(QWEN2),
    }[pre]
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    reference.train_from_iterator(training_text(2), trainer)
    reference.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    reference.add_tokens([AddedToken("<think>", normalized=False)])
    return reference


def byte_level_metadata(reference: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    import json

    model = json.loads(reference.to_str())["model"]
    tokens = sorted(reference.get_vocab(), key=reference.get_vocab().__getitem__)
    kinds = [3 if token in SPECIAL else 4 if token == "<think>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": numpy.array(kinds, dtype=numpy.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": numpy.uint32(tokens.index("<|im_start|>")),
        "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": "default one",
        "tokenizer.chat_template.tool_use": "another",
        "tokenizer.chat_templates": ["tool_use"],
    }


@pytest.mark.parametrize(
    ("name", "pre"), [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")]
)
def test_other_names_of_the_same_splitting(name: str, pre: str) -> None:
    metadata = byte_level_metadata(trained(pre), pre)
    named, other = tokenizer_from_gguf(metadata), tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": name})
    for text in texts(4, 100):
        assert other.encode(text) == named.encode(text)
    assert (other.encode("a")[0] == other.bos_token_id) == (pre == "llama-bpe")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_families(pre: str) -> None:
    reference = trained(pre)
    metadata = byte_level_metadata(reference, pre)
    metadata["tokenizer.ggml.add_bos_token"] = False
    ours = tokenizer_from_gguf(metadata)
    if pre == "llama-bpe":
        reference.model.ignore_merges = True
    assert_equal(ours, reference, [*texts(3), "<think>a</think> <think>"])
    assert ours.eos_token_ids == {reference.token_to_id("<|endoftext|>"), reference.token_to_id("<|im_end|>")}
    assert ours.chat_template == "default one"
    assert ours.chat_templates == {"default": "default one", "tool_use": "another"}


def test_words_of_the_vocabulary_need_no_merges_in_llama_3() -> None:
    reference = trained("llama-bpe")
    metadata = byte_level_metadata(reference, "llama-bpe")
    word = "Ġxyzzy"
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], word]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"].tolist(), 1]
    ours = tokenizer_from_gguf(metadata)
    assert ours.encode(" xyzzy", add_special_tokens=False) == [ours.token_to_id(word)]


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [
        ("gpt-2", None, False),
        ("qwen2", None, False),
        ("llama-bpe", None, True),
        ("gpt-2", True, True),
        ("llama-bpe", False, False),
        ("gpt-2", numpy.bool_(True), True),
    ],
)
def test_bos_is_added_as_the_file_says(pre: str, add_bos: Any, expected: bool) -> None:
    metadata = byte_level_metadata(trained("gpt-2"), pre)
    if add_bos is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos
    metadata["tokenizer.ggml.add_eos_token"] = True
    ours = tokenizer_from_gguf(metadata)
    ids = ours.encode("a")
    assert (ids[0] == ours.bos_token_id) is expected
    assert ids[-1] == ours.token_to_id("<|endoftext|>")
    assert ours.encode("a", add_special_tokens=False) == ids[int(expected) : -1]


@pytest.fixture(scope="module")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """A tiny SentencePiece BPE as Llama 2 has it: bytes for the unknown, digits apart, spaces kept."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in training_text(4) for line in text.split("\n") if line.strip()]),
        model_writer=written,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        max_sentence_length=20000,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    count = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": numpy.array([model.get_score(i) for i in range(count)], dtype=numpy.float32),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def test_sentencepiece_scores(sentencepiece_model: sentencepiece.SentencePieceProcessor) -> None:
    ours = tokenizer_from_gguf(sentencepiece_metadata(sentencepiece_model))
    for text in texts(5):
        if "<s>" in text or "\x00" in text:
            continue  # SentencePiece reads no special tokens in texts, and ends at a zero byte in Python
        ids = sentencepiece_model.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [sentencepiece_model.bos_id(), *ids], text
        assert ours.decode(ids) == sentencepiece_model.decode(ids), text


def test_sentencepiece_without_space_prefix(sentencepiece_model: sentencepiece.SentencePieceProcessor) -> None:
    metadata = sentencepiece_metadata(sentencepiece_model)
    metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = tokenizer_from_gguf(metadata)
    for text in (" the quick", "the quick", "  x", "日本"):
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode(" the quick") == tokenizer_from_gguf(sentencepiece_metadata(sentencepiece_model)).encode(
        "the quick"
    )


def _broken() -> list[tuple[dict[str, Any], str]]:
    key = "tokenizer.ggml."
    return [
        ({key + "tokens": ["a", "a"]}, "more than once"),
        ({key + "tokens": ["a", 3]}, "array of texts"),
        ({key + "tokens": []}, "missing or empty"),
        ({key + "tokens": None}, "missing or empty"),
        ({key + "tokens": "abc"}, "must be an array"),
        ({key + "token_type": [1]}, "entries"),
        ({key + "token_type": [1, 1, 9, 3]}, "1 to 6"),
        ({key + "token_type": [1, 1, "x", 3]}, "1 to 6"),
        ({key + "scores": [0.0]}, "entries"),
        ({key + "scores": [float("nan")] * 4}, "numbers"),
        ({key + "scores": ["x"] * 4}, "numbers"),
        ({key + "merges": None}, "merges"),
        ({key + "merges": [1]}, "merges"),
        ({key + "merges": ["ab"]}, "two pieces"),
        ({key + "merges": ["a b c"]}, "two pieces"),
        ({key + "merges": ["a z"]}, "do not fit"),
        ({key + "bos_token_id": 4}, "outside the vocabulary"),
        ({key + "eos_token_id": -1}, "outside the vocabulary"),
        ({key + "eot_token_id": "x"}, "integer"),
        ({key + "unknown_token_id": 1.5}, "integer"),
        ({key + "padding_token_id": True}, "integer"),
        ({key + "add_bos_token": 1}, "true or false"),
        ({key + "model": None}, "no tokenizer"),
        ({"tokenizer.chat_template": 3}, "must be a text"),
    ]


@pytest.mark.parametrize(("changes", "told"), _broken())
def test_malformed_metadata_is_refused(changes: dict[str, Any], told: str) -> None:
    sound = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<x>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert tokenizer_from_gguf(sound).encode("ab<x>") == [2, 3]
    with pytest.raises(FileFormatError, match=told):
        tokenizer_from_gguf({**sound, **changes})


def test_scores_are_needed_for_sentencepiece() -> None:
    with pytest.raises(FileFormatError, match="scores"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({}, "None"),
    ],
)
def test_unknown_kinds_are_named(changes: dict[str, Any], told: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    with pytest.raises(UnsupportedModelError, match=told):
        tokenizer_from_gguf({**metadata, **changes})
