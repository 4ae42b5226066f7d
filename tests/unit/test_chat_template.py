"""Chat templates: what they render, and that none of them can hang or fill the memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ramify.errors import ChatTemplateError, InvalidInputError, UnsupportedError
from ramify.text.chat_template import ChatTemplate
from ramify.text.messages import validate_messages

HELLO = [{"role": "user", "content": "Hello"}]
HANG_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    """A template that is not stopped would run for hours: end the whole process instead."""
    import faulthandler

    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def render(source: str, messages: object = HELLO, **kwargs: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, time_limit_seconds=0.5)
    return template.render(messages, **kwargs)  # type: ignore[arg-type]


def _short(source: str) -> str:
    return source if len(source) < 100 else f"{source[:60]}..{source[-30:]}"


def test_renders_as_templates_expect() -> None:
    source = (
        "{{ bos_token }}{%- for message in messages %}\n"
        "    {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "[{{ message['role'] }}] {{ message.content | trim }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": "  Hi é "}]
    assert render(source, messages) == "<s>[user] Hi é\n[assistant]"
    assert render(source, messages, add_generation_prompt=False) == "<s>[user] Hi é\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        (
            "{% set ns = namespace(n=0) %}{% for i in [4, 6] %}{% set ns.n = i + 4 %}{% endfor %}{{ ns.n }}",
            "10",
        ),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m(1) }}", "<a><1>"),
        ("{{ 'a-b'.split('-') | join('+') }}{{ 'x' * 3 }}{{ 2 ** 10 }}{{ '%s!' % 'y' }}", "a+bxxx1024y!"),
        ("{{ '{}/{}'.format(1, 'z') }}{{ 'abc'[::-1] }}{{ 'aXb'.replace('X', '--') }}", "1/zcbaa--b"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("{{ dict(a=1).items() | list }}{{ messages | map(attribute='role') | list }}", "[('a', 1)]['user']"),
        ("{% set x %}{% for c in 'abc' %}{{ c }}{% endfor %}{% endset %}{{ x | upper }}", "ABC"),
        (
            "{{ 'a\nb' | indent(2, true) }}{{ 'a' | center(3) }}{{ strftime_now('%Y') | length }}",
            "  a\n  b a 4",
        ),
        (
            "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [3, 1] | sort }}{{ [1, 2] | sum }}",
            "[[1, 2], [3, 0]][1, 3]3",
        ),
    ],
)
def test_template_language(source: str, expected: str) -> None:
    assert render(source) == expected


NUMBERS = "{% set numbers = range(99999) | list %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if range(99999) | sum == 1 %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n) if n else '' }}{% endfor %}{% endmacro %}{{ m(1) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
        "{% for a in range(9999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
        "{% for a in range(9999) %}{{ range(99999) | select('divisibleby', 100001) | list }}{% endfor %}",
        "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        NUMBERS + "{% for a in numbers if -1 in numbers %}{% endfor %}",
        NUMBERS + "{% for a in numbers if numbers is in [numbers] and a not in numbers[::-1] %}{% endfor %}",
        NUMBERS + "{{ numbers | reject('in', numbers) | first }}",
        NUMBERS + "{{ numbers" + " | map(attribute='real')" * 60 + " | max }}",
        NUMBERS + "{% for a in numbers %}{% set b = 'x' in numbers and 'y' in numbers %}{% endfor %}",
        "{% for a in range(99999) if 'x' in range(99999) %}{% endfor %}",
        "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}",
        "{{ ('a' * 4000000) | trim('b' * 4000000 ~ 'a') }}",
        "{{ ('a' * 4000000).rfind('ab' ~ 'a' * 2000000) }}",
        "{{ ('a' * 4000000).rsplit('ab' ~ 'a' * 2000000, 1) }}",
    ],
    ids=_short,
)
def test_time_bombs_are_stopped(source: str) -> None:
    template = ChatTemplate(source, {}, time_limit_seconds=0.2)
    with pytest.raises(ChatTemplateError, match=r"was stopped|too deeply"):
        template.render(HELLO)


BIG = "{% set big = 'x' * 1000000 %}"
DOUBLING = "{% set ns = namespace(x='xx') %}{% for i in range(60) %}STEP{% endfor %}{{ ns.x | length }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'x' }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** 99999 }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ 'x'.rjust(10 ** 10) }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.zfill(10 ** 10) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ ('\\t' * 100000).expandtabs(100000) }}",
        "{{ (1).to_bytes(10 ** 10, 'big') }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%.2000000000f' | format(1.0) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10000000000) }}",
        "{{ '{0[a]:{0[b]}}'.format_map({'0': {'a': 1, 'b': 10000000000}}) }}",
        BIG + "{{ ('{0}' * 10000).format(big) }}",
        BIG + "{{ ('%(a)s' * 10000) % {'a': big} }}",
        BIG + "{{ ('y' * 100000).replace('y', big) }}",
        BIG + "{{ ('y' * 100000) | replace('y', big) }}",
        BIG + "{{ 'abc'.replace('', big) | length }}{{ ('y' * 99).replace('', big) }}",
        BIG + "{{ range(99999) | join(big) }}",
        BIG + "{{ big.join(['a', 'b', 'c', 'd', 'e', 'f', 'g']) }}",
        BIG + "{{ ([big] * 4) | string | length }}{{ [[big, big, big], [big, big, big]] }}",
        BIG + "{{ ('\n' * 100000) | indent(1000) }}{{ ('\n' * 9) | indent(big) }}",
        BIG + "{{ range(9) | map('replace', '', big) | list }}",
        BIG + "{{ ('a' * 10000) | wordwrap(1, true, big) }}",
        BIG + "{{ 'a'.translate({97: big}) }}",
        BIG + "{{ range(99999) | map(attribute='q', default=big) | list | length }}",
        BIG + "{{ [1] | batch(60000, big) | list }}",
        BIG + "".join(f"{{% set v{i} = big[1:] %}}" for i in range(2000)),
        BIG + "".join(f"{{% set v{i} = big ~ {i} %}}" for i in range(2000)),
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ [[1]] | tojson(indent=10 ** 9) }}",
        "{{ lipsum(n=10 ** 9) }}",
        DOUBLING.replace("STEP", "{% set ns.x = ns.x + ns.x %}"),
        DOUBLING.replace("STEP", "{% set ns.x = ns.x ~ ns.x %}"),
        DOUBLING.replace("STEP", "{% set ns.x = [ns.x, ns.x] %}"),
        DOUBLING.replace("STEP", "{% set ns.x = (ns.x, ns.x) %}"),
        DOUBLING.replace("STEP", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
        DOUBLING.replace("STEP", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
        DOUBLING.replace("STEP", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        DOUBLING.replace("STEP", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}") + "{{ ns.x }}",
        "{% set x %}{% for i in range(99999) %}" + "y" * 10000 + "{% endfor %}{% endset %}{{ x | length }}",
        "{% macro m() %}{% for i in range(99999) %}" + "y" * 10000 + "{% endfor %}{% endmacro %}{{ m() | length }}",
        "{% for i in range(99999) %}" + "y" * 10000 + "{% endfor %}",
        "{% filter upper %}{% for i in range(99999) %}" + "y" * 10000 + "{% endfor %}{% endfilter %}",
        "{{ range(99) | map('round', 4000000, 'ceil') | list }}",
        BIG + "{{ big.encode('punycode') }}",
        "{{ int }}{{ (1).from_bytes(('x' * 1000000).encode(), 'big') }}",
    ],
    ids=_short,
)
def test_memory_bombs_are_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages['__class__']['__base__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ dict.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ (['{0.__class__}'] | map('format', 1) | list)[0] ~ ''.__class__ }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages.clear() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
        "{% extends 'other' %}",
        "{{ open('x') }}",
        "{{ 'x' | ramify_tick }}",
    ],
)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ChatTemplateError):
        render(source, messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for %}", "malformed"),
        ("{{ 'a' }", "malformed"),
        ("{{ nothing.attribute }}", "nothing"),
        ("{{ messages[0].absent.deeper }}", "absent"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(separators=3) }}", "TypeError"),
        ("{{ nothing | tojson }}", "Undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "deeply"),
        ("{{ 1" + " + 1" * 30000 + " }}", "deeply"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "compiled"),
        ("{{ 'a' | unheard_of }}", "unheard_of"),
        (" " * 300_000, "300000"),
    ],
    ids=_short,
)
def test_failures_are_told(source: str, told: str) -> None:
    with pytest.raises(ChatTemplateError, match=told):
        render(source)


def test_long_chains_compile_in_time() -> None:
    """Jinja's search for variables folds constants, which takes cubic time for a chain of filters."""
    chain = "{{ 1" + " | abs" * 120 + " }}"
    assert render(chain * 12) == "1" * 12


def test_a_template_cannot_fill_a_message() -> None:
    with pytest.raises(ChatTemplateError, match=r"^.{400,600}$"):
        render("{{ raise_exception('x' * 1000000) }}")


def test_output_limit_is_an_option() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, max_output_characters=100)
    assert template.render([{"role": "user", "content": "x" * 100}]) == "x" * 100
    with pytest.raises(ChatTemplateError, match="100 characters"):
        template.render([{"role": "user", "content": "x" * 101}])


def test_long_conversations_are_fine() -> None:
    """The limits stop bombs, not work: a thousand messages, a large tool, the text gathered bit by bit."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ ('<' + m.role + '>' + m.content | trim) %}{% endfor %}"
        "{{ ns.text }}{{ tools | tojson(indent=4) }}"
    )
    messages = [{"role": "user", "content": "word " * 40} for _ in range(1000)]
    tools = [{"name": f"tool{n}", "parameters": {"properties": {"a": {"type": "string"}}}} for n in range(500)]
    text = ChatTemplate(source, {}).render(messages, tools=tools)
    assert text == "".join("<user>" + ("word " * 40).strip() for _ in messages) + json.dumps(tools, indent=4)


def test_unknown_variables_are_refused() -> None:
    template = ChatTemplate("{{ messages }}{% if enable_thinking %}!{% endif %}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(HELLO, enable_thinking=True).endswith("!<s>")
    with pytest.raises(ChatTemplateError, match=r"does not read tools; it reads enable_thinking$"):
        template.render(HELLO, tools=[])
    with pytest.raises(ChatTemplateError, match="does not read self"):
        template.render(HELLO, **{"self": True})


def test_threads_have_their_own_budget() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}", {})
    results: dict[int, str] = {}

    def work(number: int) -> None:
        results[number] = template.render([{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number) * 2000 for number in range(4)}


def test_only_plain_data_reaches_a_template() -> None:
    class Text(str):
        def secret(self) -> str:
            return "secret"

    with pytest.raises(ChatTemplateError):
        render("{{ messages[0].content.secret() }}", [{"role": "user", "content": Text("x")}])
    with pytest.raises(InvalidInputError, match="x must be made of JSON types"):
        render("{{ x }}", x=object())


def test_messages_are_normalised() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    tool = {"role": "tool", "content": None, "tool_call_id": "1", "name": "f"}
    assert validate_messages([{"role": "user", "content": parts}, call, tool]) == [
        {"role": "user", "content": "a\nb"},
        call,
        tool,
    ]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages must not be empty"),
        ("hello", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (None, "messages must be a list"),
        ([1], r"messages\[0\] must be an object"),
        ([*HELLO, {"content": "x"}], r"messages\[1\].role is missing"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "a b", "content": "x"}], r"messages\[0\].role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user\n", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\].type 'image_url' is not supported",
        ),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content has a lone surrogate"),
        ([{"role": "user", "content": "x", "name": object()}], r"messages\[0\].name must be made of JSON"),
        ([{"role": "user", "content": "x", 3: 4}], r"messages\[0\] has a key that is no text"),
    ],
)
def test_wrong_messages_are_named(messages: object, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        validate_messages(messages)


def test_other_kinds_of_content_are_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        validate_messages([{"role": "user", "content": [{"type": "audio"}]}])


def test_nesting_is_bounded() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(InvalidInputError, match="nested"):
        validate_messages([{"role": "user", "content": "x", "extra": nested}])


def test_tool_calls_that_a_template_would_leave_out_are_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {})
    calls: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    with pytest.raises(ChatTemplateError, match=r"^messages\[1\]\.tool_calls is not supported"):
        template.render(calls)


def test_what_clients_write_for_nothing_is_not_there_for_templates_that_ask() -> None:
    """Messages of the openai client, sent back, have nulls; Llama 3's template asks for `'tool_calls' in message`."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m | list | join(' ') }};{% endfor %}{{ messages[0].tool_calls }}", {}
    )
    plain: dict[str, Any] = {"role": "assistant", "content": "x", "refusal": None, "name": None}
    assert template.render([{**plain, "tool_calls": None}, {**plain, "tool_calls": []}]) == "role content;role content;"
    with pytest.raises(InvalidInputError, match=r"^messages\[0\]\.tool_calls must be a list of calls, not dict"):
        validate_messages([{**plain, "tool_calls": {"id": "1"}}])


def test_a_result_has_the_name_of_its_function() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    asked: list[Any] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    checked = validate_messages([*asked, result, {**result, "name": "g"}, {**result, "tool_call_id": "c2"}])
    assert checked[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert [message.get("name") for message in checked[1:]] == ["f", "g", None]


def test_a_template_that_fails_at_a_content_of_null_tells_which() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content + m.tool_calls|length|string }}{% endfor %}", {})
    with pytest.raises(ChatTemplateError, match=r"\(messages\[0\]\.content is null\)$"):
        template.render([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}])
