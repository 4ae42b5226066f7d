"""Tokenizers that strangers wrote: bounded in this process, unproven ones in another, hopeless ones refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from ramify.errors import FileFormatError, InvalidInputError, UnsupportedModelError
from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.encoding_process import EncodingProcess
from ramify.text.split_patterns import GPT2, LLAMA3, QWEN2
from ramify.text.tokenizer import Tokenizer
from ramify.text.tokenizer_limits import LONGEST_TOKEN, MOST_PARTS, check_tokenizer

ALPHABET = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BPE = {"type": "BPE", "vocab": ALPHABET, "merges": []}


def _replace(old: str, new: str, *, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


def _text(**parts: Any) -> str:
    sound: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    return json.dumps(
        {**sound, "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": None, "model": BPE, **parts}
    )


def _backend(**parts: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_text(**parts))


def _unproven(**parts: Any) -> str:
    backend = _backend(**parts)
    return check_tokenizer(backend, backend.get_vocab())


def _template(*pieces: str, ids: int = 1) -> dict[str, Any]:
    def piece(name: str) -> dict[str, Any]:
        return {"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}}

    named = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
    single = [piece(name) for name in pieces]
    both = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": both, "special_tokens": named}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": _sequence("pretokenizers", _split(QWEN2), BYTE_LEVEL)},
        {
            "pre_tokenizer": _sequence("pretokenizers", _split(LLAMA3), BYTE_LEVEL),
            "post_processor": _template("x", "A"),
        },
        {"pre_tokenizer": _split(GPT2)},
        {
            "normalizer": _sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁")),
            "pre_tokenizer": None,
            "decoder": _sequence("decoders", _replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
        },
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}},
    ],
)
def test_the_families_own_tokenizers_are_bounded(parts: dict[str, Any]) -> None:
    assert _unproven(**parts) == ""


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"pre_tokenizer": _split("(a*)*b")}, "regular expression '(a*)*b'"),
        ({"pre_tokenizer": _sequence("pretokenizers", BYTE_LEVEL, _split(r"\s+$"))}, "regular expression"),
        ({"normalizer": _replace("a+", "b", kind="Regex")}, "regular expression 'a+'"),
        ({"normalizer": _replace("", "b")}, "regular expression"),
        ({"normalizer": _replace("a", "b" * 40)}, "80 times as long"),
        ({"normalizer": _sequence("normalizers", *[{"type": "NFD"}] * 3)}, "54 times as long"),
        ({"post_processor": _template(*["A"] * 20)}, "40 times as long"),
        ({"post_processor": _template("x", "A", ids=1000)}, "adds many tokens"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 4}}, "FixedLength"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}}, "Unigram model"),
        ({"model": {**BPE, "end_of_word_suffix": "x" * 100}}, "suffix"),
        (
            {
                "added_tokens": [
                    {"id": 256, "content": "<x>", "special": False, "normalized": False}
                    | {"single_word": False, "lstrip": True, "rstrip": False}
                ]
            },
            "lstrip",
        ),
    ],
)
def test_what_is_not_known_to_be_bounded_is_unproven(parts: dict[str, Any], told: str) -> None:
    assert told in _unproven(**parts)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"normalizer": _replace("a", "b" * 10**6)}, "2e\\+06 times as long"),
        ({"normalizer": _sequence("normalizers", *[_replace("a", "aa")] * 40)}, "times as long"),
        ({"normalizer": _replace("a", "b" * 10**6, kind="Regex")}, "times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}}, "times as long"),
        ({"normalizer": _sequence("normalizers", *[{"type": "NFC"}] * 100)}, f"more than {MOST_PARTS} normalizers"),
        ({"pre_tokenizer": _sequence("pretokenizers", *[_split("a")] * 100)}, f"more than {MOST_PARTS} pretokenizers"),
        ({"post_processor": _template(*["A"] * 2000)}, "times as long"),
        ({"decoder": _sequence("decoders", *[_replace("a", "aa")] * 40)}, "decoder may make a text"),
        ({"decoder": _sequence("decoders", *[{"type": "Fuse"}] * 100)}, f"more than {MOST_PARTS} decoders"),
        ({"model": {"type": "WordLevel", "vocab": {"x" * 5000: 0}, "unk_token": "?"}}, f"at most {LONGEST_TOKEN}"),
    ],
)
def test_hopeless_tokenizers_are_refused(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(FileFormatError, match=told):
        Tokenizer(_backend(**parts))


def test_decoders_run_no_regular_expressions() -> None:
    with pytest.raises(UnsupportedModelError, match="regular expression"):
        Tokenizer(_backend(decoder=_replace("(a*)*", "b", kind="Regex")))


def test_unproven_tokenizers_give_the_same_ids_from_another_process() -> None:
    parts: dict[str, Any] = {"pre_tokenizer": _sequence("pretokenizers", _split(r"\w+|\W"), BYTE_LEVEL)}
    tokenizer, backend = Tokenizer(_backend(**parts)), _backend(**parts)
    for text in ("", "hello wörld", "x" * 100_000, "\0\n"):
        assert tokenizer.encode(text) == backend.encode(text).ids


def test_texts_that_take_too_long_or_too_much_are_refused_and_the_next_one_is_not() -> None:
    """Each place of the text is tried with all that follows: cubic, and below the backend's own limits."""
    process = EncodingProcess(_text(pre_tokenizer=_split(r"[ab]+[ab]+[^ab]y")), seconds=1)
    with pytest.raises(InvalidInputError, match="takes more than 1 seconds"):
        process.encode("ab" * 1500 + "zx y", add_special_tokens=True)
    assert process.encode("ab", add_special_tokens=True) == [ALPHABET["a"], ALPHABET["b"]]
    process.close()
    swelling = _text(normalizer=_replace("a", "b" * 100_000))
    process = EncodingProcess(swelling, memory_bytes=2**29)
    with pytest.raises(InvalidInputError, match="too much memory"):
        process.encode("a" * 1000, add_special_tokens=True)
    assert process.encode("c", add_special_tokens=True) == [ALPHABET["c"]]
    process.close()


def test_a_text_without_a_token_is_refused_by_its_place() -> None:
    tokenizer = Tokenizer(
        _backend(
            model={"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "gone"},
            pre_tokenizer={"type": "WhitespaceSplit"},
        )
    )
    assert tokenizer.encode("hello hello") == [0, 0]
    with pytest.raises(InvalidInputError, match=r"from character 6 on \('world'\): WordLevel error"):
        tokenizer.encode("hello world")
    tokenizer = Tokenizer(_backend(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}))
    with pytest.raises(InvalidInputError, match="unknown token"):
        tokenizer.encode("b")


def test_a_decoder_that_fails_leaves_the_tokens_as_they_are_spelled() -> None:
    """The backend panics where a decoder strips the end of an empty token, which would break a whole step."""
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    model = {"type": "WordLevel", "vocab": {"": 0, "a ": 1}, "unk_token": "a "}
    tokenizer = Tokenizer(_backend(model=model, decoder=strip))
    assert tokenizer.decode([1, 1]) == "aa"
    assert tokenizer.decode([1, 0]) == "a "
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(1), detokenizer.push(0), detokenizer.flush()] == ["", "", "a "]
