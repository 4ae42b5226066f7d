"""Strict functions where the model decides: free text, and every call in it sound."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from ramify import SamplingParams
from ramify.errors import InvalidInputError, UnsupportedError
from ramify.structured.grammars import Grammars
from ramify.structured.matcher import LocalMatcher, flags_of
from ramify.text.codec import TextCodec
from ramify.text.tools.calling import Calling
from ramify.text.tools.events import read_whole
from ramify.text.tools.formats import FORMATS
from ramify.text.tools.tool_use import ToolUse
from tests.scripted import END, bytes_codec

CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "::="]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
TAGS = {"hermes": ["<tool_call>", "</tool_call>"], "llama3_json": ["<|python_tag|>"]}
WAYS = [(name, special) for name in TAGS for special in (False, True)]


def calling(name: str, tools: Any = None) -> Calling:
    use = ToolUse.of(TOOLS if tools is None else tools)
    assert use is not None
    return Calling(use, FORMATS[name])


@cache
def codec(name: str, special: bool) -> TextCodec:
    return bytes_codec("", TAGS[name] if special else ())


@cache
def grammars(name: str, special: bool) -> Grammars:
    return Grammars(codec(name, special))


def beginning(name: str, special: bool) -> LocalMatcher:
    pytest.importorskip("llguidance")
    params = calling(name).params(SamplingParams(), codec(name, special))
    assert params.structure is not None
    ends = codec(name, special).encode(END, add_special_tokens=False)
    matcher = grammars(name, special).begin(params.structure, ends)
    assert isinstance(matcher, LocalMatcher)
    return matcher


def fits(name: str, special: bool, text: str) -> bool:
    """Whether it may be a whole answer."""
    matcher, own = beginning(name, special), codec(name, special)
    [end] = own.encode(END, add_special_tokens=False)
    token_ids = own.encode(text, add_special_tokens=False)
    if matcher.state.try_consume_tokens(token_ids) < len(token_ids):
        return False
    mask = matcher.allowed_after([])
    return mask is not None and bool(flags_of(mask, end + 1)[end])


def call(name: str, arguments: str, part: str) -> str:
    return f'{{"name": "{name}", "{part}": {arguments}}}'


GOOD, BAD = '{"city": "Köln"}', '{"town": "Köln"}'


@pytest.mark.parametrize("special", [False, True])
def test_answers_in_hermes_format(special: bool) -> None:
    good = f"<tool_call>\n{call('weather', GOOD, 'arguments')}\n</tool_call>"
    bad = f"<tool_call>{call('weather', BAD, 'arguments')}</tool_call>"
    free = f"<tool_call>{call('time', BAD, 'arguments')}</tool_call>"
    sound = ["", "Hello.", "a <tool_cal> b", '{"name": 3}', good, f"I look. {good}\nAnd {good} so.", free + good]
    broken = [bad, f"I look. {bad}", good + bad, "<tool_call>Hello", good.replace("weather", "cell"), "<tool_call>"]
    assert [text for text in sound if not fits("hermes", special, text)] == []
    assert [text for text in broken if fits("hermes", special, text)] == []


@pytest.mark.parametrize("special", [False, True])
def test_answers_in_llama_format(special: bool) -> None:
    good, bad = (call("weather", arguments, "parameters") for arguments in (GOOD, BAD))
    sound = ["", "Hello.", good, f"{good}; {good}", f"I look.\n {good}", f"<|python_tag|>{good}", f"I look: {bad}"]
    sound += ['{"foo": 1}', "{}", "{\n  x\n}\n", f'{{"foo":\n{good}}}', "if x {\n  y\n}", f"{good} and {bad}"]
    broken = [bad, f"I look.\n\t{bad}", f"\u3000{bad}", f"{good}; {bad}", f"{good} {bad}", f"{good}\n{bad}"]
    broken += [f"I look. <|python_tag|>{bad}", "<|python_tag|>x", f'{{"foo":\n{bad}', '{"parameters": {"town": 1}}']
    broken += ['{"n\\u0061me": "weather"}', '{"type": "function", "name": "weather"}', '{"function": "weather"}']
    assert [text for text in sound if not fits("llama3_json", special, text)] == []
    assert [text for text in broken if fits("llama3_json", special, text)] == []


@pytest.mark.parametrize(("name", "special"), WAYS)
def test_whatever_is_drawn_every_call_that_a_parser_finds_is_sound(name: str, special: bool) -> None:
    """Random answers that would rather break every call: what may be drawn next of these, else anything allowed."""
    part = FORMATS[name].arguments
    opening, *closing = TAGS[name]
    wanted = [
        f"{opening}{call(function, arguments, part)}{''.join(closing)}"
        for function in ("weather", "time", "cell")
        for arguments in (GOOD, BAD, "{}", "null", '{"city": 3}')
    ]
    wanted += [text.removeprefix(opening) for text in wanted] + [f"\n{opening}\n", "; ", "{", "so\n"]
    numbers = random.Random(5)
    own = codec(name, special)
    [end] = own.encode(END, add_special_tokens=False)
    num_calls = 0
    for _ in range(25):
        matcher, drawn = beginning(name, special), list[int]()
        while len(drawn) < 220 and (not drawn or drawn[-1] != end):
            for token_id in own.encode(numbers.choice(wanted), add_special_tokens=False):
                mask = matcher.allowed_after(drawn)
                assert mask is not None
                allowed = np.flatnonzero(flags_of(mask, len(mask) * 32)).tolist()
                drawn.append(token_id if token_id in allowed else numbers.choice(allowed))
                if drawn[-1] != token_id or token_id == end:
                    break
        assert own.tokenizer is not None
        said = [token_id for token_id in drawn if token_id != end]
        text = own.tokenizer.decode(said, skip_special_tokens=False)
        answer = read_whole(calling(name).parser(), text)
        num_calls += len(answer.calls)
        for function, arguments in answer.calls:
            assert function in ("weather", "time")
            if function == "weather":
                assert json.loads(arguments) in ({"city": "Köln"}, {"city": "::="})
    assert num_calls > 10


def test_who_asks_for_nothing_strict_gets_no_grammar() -> None:
    own = calling("hermes", [{"type": "function", "function": {"name": "time", "strict": False}}])
    assert own.params(SamplingParams(), codec("hermes", False)).structured_outputs is None


def test_what_cannot_be_strict_is_refused() -> None:
    use = ToolUse.of(TOOLS)
    assert use is not None
    with pytest.raises(UnsupportedError, match=r"'weather' is strict, which needs tool_choice 'required'"):
        Calling(use, None).params(SamplingParams(), codec("hermes", False))
    with pytest.raises(InvalidInputError, match=r"must be left out where a function is strict"):
        calling("hermes").params(SamplingParams(structured_outputs={"regex": "a"}), codec("hermes", False))
