"""Tool calls read from text: what is told in pieces is what the whole says, wherever the pieces are cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.text.tools.call_object import CallObject
from ramify.text.tools.events import Answer, CallOpened, Content, Event, ToolParser, answer_of, read_whole
from ramify.text.tools.hermes import HermesParser
from ramify.text.tools.json_value import BrokenJsonError, JsonValue
from ramify.text.tools.llama3 import Llama3Parser

TAG = "<|python_tag|>"
CALL = '{"name": "f", "arguments": {"city": "Köln </tool_call> \\" \\u00e9", "n": [1, -2.5e3, null, {}]}}'
ARGUMENTS = CALL.removeprefix('{"name": "f", "arguments": ').removesuffix("}")
CASES: dict[str, tuple[Callable[[], ToolParser], str, str, list[tuple[str, str]]]] = {}


def case(make: Callable[[], ToolParser], name: str, text: str, content: str, *calls: tuple[str, str]) -> None:
    CASES[name] = make, text, content, list(calls)


def llama() -> ToolParser:
    return Llama3Parser({"f", "g"})


F, G = ("f", ARGUMENTS), ("g", "{}")
case(HermesParser, "text", " Hello <tool> <tool_cal world ", " Hello <tool> <tool_cal world ")
case(HermesParser, "one", f"<tool_call>\n{CALL}\n</tool_call>", "", F)
case(HermesParser, "text before", f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", F)
case(HermesParser, "two", f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name":"g"}}\n</tool_call>', "", F, G)
case(HermesParser, "text after", f"a <tool_call>{CALL}\n</tool_call>\nb ", "a\nb", F)
case(HermesParser, "text after alone", f"<tool_call>{CALL}</tool_call>\n\nb", "b", F)
case(HermesParser, "no end", f"<tool_call>\n{CALL}", "", F)
case(HermesParser, "half an end", f"<tool_call>\n{CALL}\n</tool_c", "", F)
case(HermesParser, "too many braces", f"<tool_call>{CALL}}}</tool_call>", "}</tool_call>", F)
case(HermesParser, "arguments first", f'<tool_call>{{"parameters": {ARGUMENTS}, "name": "f"}}', "", F)
case(HermesParser, "arguments of null", '<tool_call>{"name": "g", "arguments": null}', "", G)
case(HermesParser, "type", '<tool_call>{"type": "function", "function": "g", "parameters": {}}', "", G)
for broken in (
    "{'name': 'f'}</tool_call>",
    '{"name": "f", "arguments": {"a": oops}}</tool_call> ',
    '{"name": "f", "arguments": {"a": "line\nbreak"}}',
    '{"name": "f", "arguments": {"a": 01}}</tool_call>',
    '{"name": "f", "arguments": {"a": 1,}}</tool_call>',
    '{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
    '{"name": "f", "arguments": "{}"}</tool_call>',
    '{"name": "f", "arguments": {"a": ',
    '{"name": "", "arguments": {}}',
    '{"name": "f", "name": "g"}',
    '{"name": "f", "more": 1}',
    '{"type": "tool", "name": "f"}',
    '{"arguments": {}}',
    "{}",
    "no JSON</tool_call>",
    "",
    '{"name": "f", "arguments": ' + '{"a":' * 70,
):
    case(HermesParser, f"broken {broken[:40]}", f"So: <tool_call>{broken}", f"So: <tool_call>{broken}")
case(
    HermesParser,
    "broken, then whole",
    f'<tool_call>{{"name": "f", "arguments": {{"a" 1}}</tool_call> <tool_call>{CALL}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a" 1}</tool_call>',
    F,
)
case(HermesParser, "tag twice", f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", F)
case(lambda: HermesParser(most_calls=1), "one of two", f"<tool_call>{CALL}</tool_call> <tool_call>{CALL}", "", F)
case(llama, "llama text", " Hi {name} <|python ", " Hi {name} <|python ")
case(llama, "llama one", CALL, "", F)
case(llama, "llama tag", f"{TAG}{CALL}\n", "", F)
case(llama, "llama text and tag", f"Now: {TAG} {CALL}", "Now:", F)
case(llama, "llama second line", f"Now:\n  {CALL}", "Now:", F)
case(llama, "llama two", f'{CALL}; {{"name": "g"}}', "", F, G)
case(llama, "llama two tags", f'{TAG}{CALL};{TAG}{{"name": "g", "parameters": {{}}}}', "", F, G)
case(llama, "llama two lines", f'{CALL}\n{{"name": "g"}}', "", F, G)
case(llama, "llama text after", f"a\n{CALL}\nb", "a\nb", F)
case(llama, "llama unknown name", '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}')
case(llama, "llama other JSON", '{\n  "answer": {"f": 1}\n}', '{\n  "answer": {"f": 1}\n}')
case(llama, "llama in a sentence", f"I say {CALL}", f"I say {CALL}")
case(llama, "llama code", f"{TAG}print(1)", f"{TAG}print(1)")
case(llama, "llama cut", f"{TAG}{CALL[:50]}", f"{TAG}{CALL[:50]}")
case(llama, "llama tag alone", f"{TAG} ", f"{TAG} ")


def in_pieces(parser: ToolParser, text: str, cuts: list[int]) -> Answer:
    events: list[Event] = []
    for begin, end in pairwise([0, *cuts, len(text)]):
        events += parser.feed(text[begin:end])
    return answer_of([*events, *parser.finish()])


@pytest.mark.parametrize("name", CASES)
def test_calls_and_content_of_a_whole_text(name: str) -> None:
    make, text, content, calls = CASES[name]
    assert read_whole(make(), text) == Answer(content, tuple(calls))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("name", CASES)
def test_any_cut_tells_the_same(name: str) -> None:
    make, text, content, calls = CASES[name]
    wanted = Answer(content, tuple(calls))
    for cut in range(len(text) + 1):
        assert in_pieces(make(), text, [cut]) == wanted, f"cut at {cut}"
    assert in_pieces(make(), text, list(range(len(text)))) == wanted, "character by character"


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    TAG,
    "<|py",
    "\n",
    " ",
    ";",
    "text",
    CALL,
    "{",
    "}",
    '{"name":"g"}',
    '"',
]
PIECES += ['{"name": "f", "arguments": {', '"a": 1', ",", "é", '{"name": "f", "parameters": {"a": nul']


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.data())
def test_any_text_in_any_pieces_tells_the_same_and_loses_nothing(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for make in (HermesParser, llama):
        whole = read_whole(make(), text)
        assert in_pieces(make(), text, cuts) == whole
        assert whole.calls or whole.content == text


def test_text_and_arguments_are_told_as_they_come() -> None:
    parser = HermesParser()
    assert parser.feed("Let me look") == [Content("Let me look")]
    assert parser.feed(" it up. <tool") == [Content(" it up.")]
    assert parser.feed('_call>{"name": "look') == []
    assert parser.feed('_up", "arguments": ') == []
    assert answer_of(parser.feed('{"word": "a')) == Answer("", ())
    told = [*parser.feed('b"'), *parser.feed("}"), *parser.feed("}"), *parser.feed("</tool_call>"), *parser.finish()]
    assert [event for event in told if isinstance(event, Content | CallOpened)] == []
    assert [type(event).__name__ for event in told] == ["ArgumentsGrown", "ArgumentsGrown", "CallClosed"]


def test_a_call_that_breaks_after_it_was_opened_follows_as_content_and_the_next_has_a_number_of_its_own() -> None:
    parser = HermesParser()
    opened = parser.feed('<tool_call>{"name": "f", "arguments": {"a": ')
    assert opened[0] == CallOpened(0, "f")
    told = parser.feed(f"oops <tool_call>{CALL}")
    assert told[0] == Content('<tool_call>{"name": "f", "arguments": {"a":')
    assert CallOpened(1, "f") in told


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    st.booleans(),
)
def test_every_json_value_is_read_to_its_end_and_not_beyond(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert JsonValue().feed(f" {text},") == len(text) + 1
    one_by_one = JsonValue()
    ends = [one_by_one.feed(character) for character in text]
    assert set(ends[:-1]) <= {None}


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='{}[]",:\\u0123456789-+.eEtrufalsn \n', max_size=12))
def test_what_json_does_not_allow_is_refused(text: str) -> None:
    try:
        end = JsonValue().feed(text + ",")
    except BrokenJsonError:
        end = None
    if end is not None:
        json.loads(text[:end])
    else:
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


def test_a_call_is_read_in_one_pass_however_long_it_is() -> None:
    long = '{"name": "f", "arguments": {"a": "' + "x" * 1_000_000 + '"}}'
    call = CallObject()
    assert call.feed(long) == len(long)
    assert len(call.take_arguments()) == 1_000_000 + len('{"a": ""}')
