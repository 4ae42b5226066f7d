"""Request bodies: every check of one is bounded by its length, and what it refuses can be told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ramify.errors import InvalidInputError
from ramify.server.body import MARKS, parse_json
from ramify.server.failures import Failure
from ramify.server.protocol import DetokenizeRequest, GrowthRequest
from ramify.text import messages
from ramify.text.messages import validate_messages
from ramify.validation import shown

TROUBLE = st.lists(st.sampled_from([b'"', b"\\", b'\\"', b"[", b"]", b"{", b"}", b"a", b",", b"\n"])).map(b"".join)


@given(TROUBLE)
def test_no_byte_of_a_body_is_looked_at_twice(body: bytes) -> None:
    """A match that begins and then fails costs what it read, and begins anew one byte later: quadratic in all."""
    assert not set(MARKS.sub(b"", body)) & set(b'"[]{}'), "every place where a match may begin is inside of one"
    assert all(MARKS.match(body, place) for place, byte in enumerate(body) if byte in b'"[]{}')


@settings(max_examples=40)
@given(st.recursive(st.text('[]{}"\\a'), lambda inner: st.lists(inner) | st.dictionaries(st.text('"[]\\'), inner)))
def test_depth_is_what_it_is(value: Any) -> None:
    def depth(value: Any) -> int:
        if isinstance(value, dict):
            value = list(value.values())
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    body = json.dumps(value).encode()
    assert parse_json(body, depth(value)) == value
    if depth(value):
        with pytest.raises(Failure, match="nested at most"):
            parse_json(body, depth(value) - 1)


@pytest.mark.parametrize(
    "body",
    [b"[]" * 65 + b'"' + b'\\"' * 150_000, b"[]" * 65 + b'"' * 300_001, b"[]" * 65 + b"\\" * 300_000],
    ids=["escaped quotes", "quotes", "backslashes"],
)
def test_a_string_without_an_end_is_refused_at_once(body: bytes) -> None:
    """The first of these kept a server busy for minutes."""
    with pytest.raises(Failure):
        parse_json(body, 64)


def test_an_object_has_so_many_names() -> None:
    with pytest.raises(Failure, match="at most 4096 names, got 5000"):
        parse_json(json.dumps({"x": {str(number): 0 for number in range(5_000)}}).encode(), 64)


@pytest.mark.parametrize("make", [DetokenizeRequest.model_validate, GrowthRequest.model_validate])
def test_the_first_wrong_id_ends_the_check(make: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        make({"tokens": ["x"] * 1_000, "prompt": ["x"] * 1_000})
    assert caught.value.error_count() <= 3


def test_no_more_of_a_value_is_written_than_isshown() -> None:
    class Counted:
        num_written = 0

        def __repr__(self) -> str:
            Counted.num_written += 1
            return "x"

    assert len(shown([Counted() for _ in range(10_000)])) == 120
    assert Counted.num_written < 1_000
    assert len(shown("x" * 10**6)) <= 120
    assert [shown(True), shown("3"), shown([1, "x"]), shown({"a": None})] == [
        "True",
        "'3'",
        "[1, 'x']",
        "{'a': None}",
    ]


def test_a_message_is_short_and_has_utf_8() -> None:
    error = Failure(400, "\ud800" + "x" * 10_000, param="\udfff").as_json()["error"]
    assert error["message"].startswith("\\ud800xxx")
    assert len(error["message"]) < 2_100
    assert error["param"] == "\\udfff"


def test_where_a_value_stands_is_written_only_if_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a megabyte, written once for each of a million values below it, is a million megabytes."""
    written: list[str] = []
    place = messages._Copier._place

    def counted(self: messages._Copier) -> str:
        written.append(place(self))
        return written[-1]

    monkeypatch.setattr(messages._Copier, "_place", counted)
    good = {"role": "user", "content": "x", "n" * 5_000: [{"a": "b"}, "c", 1.5]}
    assert validate_messages([good]) == [good]
    assert written == []
    with pytest.raises(InvalidInputError, match=r"^messages\[0\]\.n{80}\[1\]\.a must be made of JSON types, not set$"):
        validate_messages([{**good, "n" * 5_000: [0, {"a": set()}]}])


@pytest.mark.parametrize("more", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_a_content_of_null_is_named(more: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, **more}]
    with pytest.raises(InvalidInputError, match=r"^messages\[1\]\.content is null"):
        validate_messages(said)
