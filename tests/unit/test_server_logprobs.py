"""Logprobs as completions and chats have them: each token's own text and bytes, and where it stands in the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from ramify.outputs import Logprob, LogprobRow
from ramify.sampling_params import SamplingParams
from ramify.server.choices import CompletionLogprobs, chat_logprobs
from ramify.text.codec import TextCodec
from ramify.text.token_text import byte_of_character
from ramify.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "<|im_end|>"]


def codec_of(tokens: Sequence[str], decoder: decoders.Decoder) -> TextCodec:
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token) for token in SPECIAL])
    return TextCodec(Tokenizer(backend))


@pytest.fixture(scope="module")
def pieces() -> TextCodec:
    """As Llama 2's: words with the space before them, other characters as bytes."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "the", "▁cat", "s"]
    return codec_of(tokens, decoders.Sequence(steps))


@pytest.fixture(scope="module")
def byte_level() -> TextCodec:
    return codec_of(list(byte_of_character()), decoders.ByteLevel())


def ids(codec: TextCodec, *tokens: str) -> list[int]:
    assert codec.tokenizer is not None
    found = [codec.tokenizer.token_to_id(token) for token in tokens]
    return [token_id for token_id in found if token_id is not None]


def in_bytes(codec: TextCodec, text: str) -> list[int]:
    letters = {byte: letter for letter, byte in byte_of_character().items()}
    return ids(codec, *(letters[byte] for byte in text.encode()))


def rows_of(codec: TextCodec, rows: Sequence[Sequence[int]]) -> list[LogprobRow]:
    """The first of each row is its token, the others less likely ones."""
    return [
        {token_id: Logprob(-1.0 - place, place + 1, codec.decode_token(token_id)) for place, token_id in enumerate(row)}
        for row in rows
    ]


def test_a_word_keeps_the_space_before_it(pieces: TextCodec) -> None:
    """Decoded by itself it loses it: what was told was another token, and of "the" and " the" one stood for both."""
    spaced, bare, cat, plural = ids(pieces, "▁the", "the", "▁cat", "s")
    rows = rows_of(pieces, [[spaced, bare], [cat, plural]])
    told = CompletionLogprobs(pieces, skip_special_tokens=True).rows([spaced, cat], rows)
    assert told["tokens"] == [" the", " cat"]
    assert told["top_logprobs"] == [{" the": -1.0, "the": -2.0}, {" cat": -1.0, "s": -2.0}]
    entries = chat_logprobs(pieces, [spaced, cat], rows, 1)["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == b" the cat"
    assert [entry["token"] for entry in entries] == [" the", " cat"]


def test_places_are_those_of_the_text(pieces: TextCodec, byte_level: TextCodec) -> None:
    """A character of four tokens counted four times, and a token that no text shows as long as its name."""
    for codec, token_ids, text, wanted in (
        (byte_level, in_bytes(byte_level, "a🙂b"), "a🙂b", [0, 1, 1, 1, 1, 2]),
        (byte_level, [*in_bytes(byte_level, "a"), *ids(byte_level, "<|im_end|>", "s")], "as", [0, 1, 1]),
        (pieces, ids(pieces, "▁the", "▁cat", "s"), "the cats", [0, 3, 7]),
        (pieces, ids(pieces, "s", "<0xC3>", "<0xA9>", "s"), "sés", [0, 1, 1, 2]),
    ):
        stream = codec.make_stream(SamplingParams(), ())
        for token_id in token_ids:
            stream.push(token_id)
        stream.end()
        assert stream.text == text
        whole = CompletionLogprobs(codec, skip_special_tokens=True)
        rows = rows_of(codec, [[token_id] for token_id in token_ids])
        assert whole.rows(token_ids, rows)["text_offset"] == wanted
        streamed = CompletionLogprobs(codec, skip_special_tokens=True)
        pairs = zip(token_ids, rows, strict=True)
        assert [streamed.rows([token_id], [row])["text_offset"][0] for token_id, row in pairs] == wanted


def test_an_output_begins_where_its_prompt_ends(pieces: TextCodec, byte_level: TextCodec) -> None:
    """Who looks for the first token behind the prompt found a later one, where the tokenizer puts BOS before it."""
    cases: list[tuple[TextCodec, list[int], str, list[int]]] = [
        (pieces, ids(pieces, "<s>", "▁the", "▁cat"), "the cat", [0, 0, 3]),
        (pieces, ids(pieces, "<s>", "▁the"), "<s> the", [0, 3]),
        (byte_level, [*ids(byte_level, "<s>"), *in_bytes(byte_level, "é.")], "é.", [0, 0, 0, 1]),
    ]
    for codec, prompt_ids, prompt, wanted in cases:
        [token_id] = ids(codec, "s")
        writer = CompletionLogprobs(codec, skip_special_tokens=True)
        before = writer.prompt(prompt, prompt_ids)
        assert before == wanted
        told = writer.rows(
            [*prompt_ids, token_id], [None, *rows_of(codec, [[each] for each in [*prompt_ids[1:], token_id]])], before
        )
        assert told["text_offset"] == [*wanted, len(prompt)]
