"""Where a growing text is cut: by the earliest stop string that ends in what is new, however long others are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.stream import TextStream
from tests.fake import letters

TOKENIZER = letters().tokenizer


def stream(*stop: str, **options: Any) -> TextStream:
    assert TOKENIZER is not None
    return TextStream(IncrementalDetokenizer(TOKENIZER), stop, **options)


def ids(text: str) -> list[int]:
    return letters().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("stop", [("a",), ("a", "cccccc")])
def test_what_was_complete_before_min_tokens_ends_nothing_later(stop: tuple[str, ...]) -> None:
    """Beside a longer stop string, a short one was looked for among as many characters as that one has."""
    text = stream(*stop)
    for place, token_id in enumerate(ids("bab")):
        assert not text.push(token_id, may_stop=place == 2)
    assert text.text == "bab"
    assert text.push(ids("a")[0])
    assert (text.text, text.stopped_by) == ("bab", "a")


def test_what_ends_after_min_tokens_may_begin_before() -> None:
    text = stream("ab", "cccccc")
    assert not text.push(ids("a")[0], may_stop=False)
    assert text.push(ids("b")[0])
    assert text.text == ""


@given(
    written=st.text("abc", max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    include_stop=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_text_is_cut_as_it_is_where_every_length_is_tried(
    written: str, stop: list[str], min_tokens: int, include_stop: bool
) -> None:
    """A letter a token; of those that end with it, the one that begins first."""
    grown = stream(*stop, include_stop=include_stop)
    expected: tuple[str, str | None] = written, None
    for length in range(max(min_tokens, 1), len(written) + 1):
        ending = [each for each in stop if written[:length].endswith(each)]
        if ending:
            longest = max(ending, key=len)
            expected = written[: length if include_stop else length - len(longest)], longest
            break
    for length, token_id in enumerate(ids(written), start=1):
        if grown.push(token_id, may_stop=length >= min_tokens):
            break
    grown.end()
    assert (grown.text, grown.stopped_by) == expected
