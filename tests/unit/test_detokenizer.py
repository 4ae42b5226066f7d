"""Incremental decoding gives the text of decoding all at once, whatever the ids."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from ramify.outputs import Logprob
from ramify.sampling_params import SamplingParams
from ramify.server.choices import CompletionLogprobs
from ramify.text.codec import TextCodec
from ramify.text.detokenizer import IncrementalDetokenizer, token_texts
from ramify.text.stream import LateText, TextStream
from ramify.text.token_text import byte_of_character
from ramify.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _tokenizer(tokens: list[str], decoder: decoders.Decoder | None, special: list[str], added: list[str]) -> Tokenizer:
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False) for token in added])
    return Tokenizer(backend)


def byte_level() -> Tokenizer:
    letters = {byte: letter for letter, byte in byte_of_character().items()}
    texts = ["the", " end", "é", "日本", "👩‍👧", " ", "\n\n"]
    words = ["".join(letters[byte] for byte in text.encode()) for text in texts]
    cut = [letters[0xF0] + letters[0x9F], letters[0x91] + letters[0xA9] + letters[0xE2]]
    return _tokenizer(
        [*letters.values(), *words, *cut], decoders.ByteLevel(), ["<|end|>"], ["<think>", "two words", "日"]
    )


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    pieces = ["▁", "▁▁", "▁the", "a", "é", "日", "▁👩", "<0xZZ>", "<0x4>", "<0x+F>"]
    return _tokenizer(
        [f"<0x{byte:02X}>" for byte in range(256)] + pieces,
        decoders.Sequence(steps),
        ["<s>", "</s>"],
        ["<think>", " spaced"],
    )


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
SENTENCEPIECE_UNSTRIPPED = sentencepiece(strip=False)
SPACED = _tokenizer(["a", "bc"], None, ["<s>"], [])
METASPACE = _tokenizer(["▁a", "b", "▁"], decoders.Metaspace(), ["<s>"], [])
ALL = [BYTE_LEVEL, SENTENCEPIECE, SENTENCEPIECE_UNSTRIPPED, SPACED, METASPACE]

# Bytes that make and break characters come often, so that runs of them meet.
TELLING_BYTES = [0x20, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF]


@st.composite
def tokenizer_and_ids(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    tokenizer = draw(st.sampled_from(ALL))
    any_id = st.integers(0, tokenizer.vocab_size + 2)  # a few ids name no token
    if tokenizer is BYTE_LEVEL:
        letters = {byte: letter for letter, byte in byte_of_character().items()}
        telling = [tokenizer.token_to_id(letters[byte]) for byte in TELLING_BYTES]
    else:
        telling = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in TELLING_BYTES]
    known = [token_id for token_id in telling if token_id is not None]
    one = st.one_of(any_id, st.sampled_from(known)) if known else any_id
    return tokenizer, draw(st.lists(one, max_size=24))


@settings(max_examples=1500, deadline=None)
@given(tokenizer_and_ids(), st.booleans())
def test_pieces_joined_are_the_whole(case: tuple[Tokenizer, list[int]], skip: bool) -> None:
    tokenizer, ids = case
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=500, deadline=None)
@given(tokenizer_and_ids(), st.data())
def test_what_came_out_is_certain(case: tuple[Tokenizer, list[int]], data: st.DataObject) -> None:
    """No continuation takes back text: what was pushed so far starts every later text."""
    tokenizer, ids = case
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = "".join(detokenizer.push(token_id) for token_id in ids[:cut])
    assert tokenizer.decode(ids).startswith(shown)


@settings(max_examples=500, deadline=None)
@given(tokenizer_and_ids(), st.data())
def test_a_fork_goes_its_own_way(case: tuple[Tokenizer, list[int]], data: st.DataObject) -> None:
    tokenizer, ids = case
    cut = data.draw(st.integers(0, len(ids)))
    other = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    first = IncrementalDetokenizer(tokenizer)
    common = _pushed(first, ids[:cut])
    second = first.fork()
    of_second = _pushed(second, other)
    of_first = _pushed(first, ids[cut:])
    assert common + of_first + first.flush() == tokenizer.decode(ids)
    assert common + of_second + second.flush() == tokenizer.decode(ids[:cut] + other)


@settings(max_examples=200, deadline=None)
@given(tokenizer_and_ids(), st.data())
def test_a_text_that_is_made_when_it_is_read_is_the_one_that_grew(
    case: tuple[Tokenizer, list[int]], data: st.DataObject
) -> None:
    tokenizer, ids = case
    cut = data.draw(st.integers(0, len(ids)))
    tokens: list[int] = []
    grown = TextStream(IncrementalDetokenizer(tokenizer))
    late = LateText(TextStream(IncrementalDetokenizer(tokenizer)), tokens)
    for token_id in ids[:cut]:
        tokens.append(token_id)
        assert grown.push(token_id) is late.push(token_id) is False
    assert late.visible == grown.visible
    forks = grown.fork(), late.fork(list(tokens))
    for token_id in ids[cut:]:
        tokens.append(token_id)
        grown.push(token_id)
        late.push(token_id)
    for text in (grown, late, *forks):
        assert text.end() is False
    assert late.visible == grown.visible == tokenizer.decode(ids)
    assert forks[1].visible == forks[0].visible == tokenizer.decode(ids[:cut])
    late.leave_out()
    assert late.visible == tokenizer.decode(ids[:-1])


def _pushed(detokenizer: IncrementalDetokenizer, ids: list[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in ids)


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    return [token_id for token_id in ids if token_id is not None]


def test_characters_come_whole() -> None:
    letters = {byte: letter for letter, byte in byte_of_character().items()}
    ids = _ids(BYTE_LEVEL, *(letters[byte] for byte in "é👩".encode()))
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "é", "", "", "", "👩"]


def test_a_run_of_byte_tokens_comes_with_its_end() -> None:
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    ids = _ids(SENTENCEPIECE, "<0xC3>", "<0xA9>", "a", "<0xC3>", "<0xC3>", "<0xA9>", "▁the")
    assert [detokenizer.push(token_id) for token_id in ids] == [
        "",
        "",
        "éa",
        "",
        REPLACEMENT * 2,  # no longer to be saved, so nothing waits
        REPLACEMENT,
        " the",
    ]


def test_only_the_first_space_of_the_text_goes() -> None:
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    ids = _ids(SENTENCEPIECE, "<s>", "▁the", "</s>", "▁the")
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "the", "", " the"]


def test_long_runs_of_bad_bytes_hold_nothing_that_grows() -> None:
    """A run of 100 000 tokens would take minutes if each push looked at all before it."""
    letters = {byte: letter for letter, byte in byte_of_character().items()}
    for tokenizer, token in (
        (BYTE_LEVEL, letters[0xF0]),
        (SENTENCEPIECE, "<0xF0>"),
        (SENTENCEPIECE, "<0x41>"),
    ):
        ids = _ids(tokenizer, token) * 100_000
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert _pushed(detokenizer, ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_token_by_itself_keeps_the_space_before_its_word() -> None:
    """Logprobs told "the" for "▁the" and "the" alike once, and bytes that were not those of the text."""
    codec = TextCodec(SENTENCEPIECE)
    for token, text in (
        ("▁the", " the"),
        ("a", "a"),
        ("▁", " "),
        ("▁👩", " 👩"),
        ("<think>", "<think>"),
        ("</s>", "</s>"),
    ):
        [token_id] = _ids(SENTENCEPIECE, token)
        assert codec.decode_token(token_id) == text
        assert codec.token_bytes(token_id) == list(text.encode())
    [cut] = _ids(SENTENCEPIECE, "<0xC3>")
    assert (codec.decode_token(cut), codec.token_bytes(cut)) == (REPLACEMENT, [0xC3])
    assert (codec.decode_token(10_000), codec.token_bytes(10_000)) == ("", [])


def test_logprobs_of_a_completion_stand_where_its_tokens_do() -> None:
    ids = [_ids(SENTENCEPIECE, token)[0] for token in ("▁the", "▁the", "a", "▁👩")]
    codec = TextCodec(SENTENCEPIECE)
    rows = [{token_id: Logprob(-1.0, 1, codec.decode_token(token_id))} for token_id in ids]
    told = CompletionLogprobs(codec, [ids[0]]).rows(ids, rows)
    assert told["tokens"] == [" the", " the", "a", " 👩"]
    assert codec.text_after([ids[0]], ids) == " the thea 👩"
    assert told["text_offset"] == [0, 4, 8, 9]


def test_an_output_reads_on_from_its_prompt() -> None:
    """ "The capital of France is" and "Paris" were one word once, with tokenizers that strip the start of a text."""
    the, bos, think = (_ids(SENTENCEPIECE, token)[0] for token in ("▁the", "<s>", "<think>"))
    codec, ids = TextCodec(SENTENCEPIECE), [the, the, *_ids(SENTENCEPIECE, "é")]
    for prompt, text in (([the], " the theé"), ([bos, the], " the theé"), ([think], " the theé")):
        assert codec.text_after(prompt, ids) == text
    for prompt in ([], [bos], [the, bos]):  # a text begins
        assert codec.text_after(prompt, ids) == codec.decode(ids) == "the theé"
    stream = codec.make_stream(SamplingParams(stop=[" the the"]), [the])
    assert [stream.push(token_id) for token_id in ids[:2]] == [False, True]
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE_UNSTRIPPED, SPACED, METASPACE):
        some = list(range(min(12, tokenizer.vocab_size)))
        assert TextCodec(tokenizer).text_after(some[1:2], some) == tokenizer.decode(some)


@settings(max_examples=60)
@given(data=st.data())
def test_what_goes_on_is_the_whole_less_what_was_there(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), min_size=1, max_size=8)
    before, ids = data.draw(tokens), data.draw(tokens)
    [letter] = _ids(SENTENCEPIECE, "a")  # bytes do not join across it
    whole, prompt = SENTENCEPIECE.decode([*before, letter, *ids]), SENTENCEPIECE.decode([*before, letter])
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE, goes_on=True)
    fork = detokenizer.fork()
    assert _pushed(detokenizer, ids) + detokenizer.flush() == whole.removeprefix(prompt) == fork.whole(ids)


@settings(max_examples=60)
@given(data=st.data(), tokenizer=st.sampled_from([BYTE_LEVEL, SENTENCEPIECE, SENTENCEPIECE_UNSTRIPPED]))
def test_the_bytes_of_tokens_join_to_the_text(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    codec = TextCodec(tokenizer)
    joined = bytes(byte for token_id in ids for byte in codec.token_bytes(token_id))
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        return  # which bytes are replaced depends on the decoder
    assert codec.decode(ids) == (text.removeprefix(" ") if tokenizer is SENTENCEPIECE else text)


@settings(max_examples=60)
@given(data=st.data(), tokenizer=st.sampled_from(ALL))
def test_the_texts_of_tokens_join_to_the_whole_and_decode_nothing_again(
    data: st.DataObject, tokenizer: Tokenizer
) -> None:
    """Each token is looked at once: a text of any length takes time in proportion to it."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.backend.get_vocab_size() - 1), max_size=30))
    pieces = token_texts(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert token_texts(ids, None) == [""] * len(ids)
