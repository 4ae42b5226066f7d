"""Masks of many outputs at once, and of strings that must end soon, against llguidance asked for one mask at a time."""

from __future__ import annotations

import gc
import json
import random
import select
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from ramify.structured.grammars import Grammars
from ramify.structured.mask_threads import Mask, MaskThreads
from ramify.structured.mask_workers import RemoteMatcher, workers_of
from ramify.structured.matcher import (
    Area,
    Asked,
    GrammarFaultError,
    LocalMatcher,
    Matcher,
    ask_early,
    num_words,
    write_masks,
)
from ramify.structured.plain_tokens import LONGEST, NEUTRAL
from ramify.structured.roots import OUTPUTS_EACH, Roots
from ramify.structured.string_limits import MOST_NAMED, StringLimits, limits_of
from ramify.structured.string_position import StringPosition
from ramify.structured_outputs import Structure
from ramify.text.codec import TextCodec
from ramify.text.token_text import byte_of_character
from ramify.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")


@cache
def codec() -> TextCodec:
    """Bytes, words, pieces of JSON, and characters of two and three bytes, whole and in parts."""
    spelled = {byte: character for character, byte in byte_of_character().items()}
    words = ["".join(word) for length in (2, 3, 4) for word in product("abet", repeat=length)]
    longer = ["information", "a" * 31, "b" * (LONGEST + 1), "é", "éa", "Жуба", "\u20ac\u20ac", "naïve", "na\u00ef"]
    pieces = [
        '":',
        '", "',
        '"}',
        '{"',
        '["',
        '","',
        'ab"',
        '"ab',
        "\\n",
        "\\u",
        "a\\",
        'b":{"',
        "\x7f",
        "a\tb",
        "12",
        "true",
    ]
    texts = [text.encode() for text in (*words, *longer, *pieces)] + [b"\xc3", b"\xa9a", b"a\xe2\x82", b"\xac"]
    vocabulary = dict.fromkeys([*spelled.values(), *("".join(spelled[byte] for byte in text) for text in texts)])
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(vocabulary)}, merges=[])
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>")])
    return TextCodec(Tokenizer(backend, special_tokens={"eos_token": "<end>"}))


@cache
def end() -> int:
    [token_id] = codec().encode("<end>", add_special_tokens=False)
    return token_id


@cache
def grammars() -> Grammars:
    return Grammars(codec(), MaskThreads(3))


def begin(schema: Any) -> LocalMatcher:
    matcher = grammars().begin(Structure("json", json.dumps(schema)), [end()])
    assert isinstance(matcher, LocalMatcher)
    return matcher


def alone(matcher: LocalMatcher) -> Mask:
    """By llguidance, over the whole vocabulary; for an output that is not over."""
    state = matcher.state.deep_copy()
    if matcher.untold:
        state.consume_tokens(matcher.untold)
    num_tokens = matcher._beginning.num_tokens
    flags = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")[: num_tokens + 1]
    assert not state.is_error()
    assert bool(flags[num_tokens]) == state.is_accepting()
    flags[end()] = state.is_accepting()
    flags[num_tokens] = 0
    return np.packbits(np.pad(flags, (0, -len(flags) % 32)), bitorder="little").view(np.uint32)


def allowed(mask: Mask) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


ITEMS: dict[str, Any] = {
    "short": {"type": "string", "maxLength": 6, "minLength": 2},
    "named too": {
        "anyOf": [
            {"type": "string", "maxLength": 3},
            {"enum": ["information", "abet", "beta", "naïve"]},
            {"type": "null"},
        ]
    },
    "two limits": {
        "anyOf": [{"type": "string", "maxLength": 4}, {"type": "string", "maxLength": 9}, {"type": "integer"}]
    },
    "keys": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 7}, "abba": {"type": "string", "maxLength": 2}},
        "required": ["a"],
        "additionalProperties": {"type": "string", "maxLength": 5},
    },
    "constants": {
        "anyOf": [
            {"const": "abetabet"},
            {"type": "string", "maxLength": 2},
            {"type": "object", "properties": {"teatea": {"type": "string", "maxLength": 1}}, "required": ["teatea"]},
        ]
    },
    "long": {"type": "string", "maxLength": 36},
    "nothing": {"type": "string", "maxLength": 0},
    "a quote named": {"anyOf": [{"const": 'a"b'}, {"type": "string", "maxLength": 2}]},
    "a pattern": {"anyOf": [{"type": "string", "pattern": "^[ab]+$"}, {"type": "string", "maxLength": 3}]},
}


@pytest.mark.parametrize("kind", ITEMS)
def test_masks_near_a_limit_are_those_of_the_whole_vocabulary(kind: str) -> None:
    """Random texts, with escapes, quotes and parts of characters more often than by chance; forks go their own way."""
    numbers = random.Random(kind)
    num_near = 0
    for _ in range(6):
        schema = {"type": "array", "items": ITEMS[kind], "minItems": 9}
        matchers = [begin(schema) for _ in range(4)]
        for _ in range(25):
            asked = [Asked(matcher, ()) for matcher in matchers]
            num_near += sum(matcher.strings is not None and matcher.strings.are_near for matcher in matchers)
            expected = [alone(matcher) for matcher in matchers]
            masks = np.zeros((len(matchers), num_words(asked)), np.uint32)
            assert write_masks(asked, masks) == {}
            for number, (matcher, mask, truth) in enumerate(zip(matchers, masks, expected, strict=True)):
                assert allowed(mask) == allowed(truth)
                assert allowed(matcher.fork().allowed_after(())) == allowed(truth)  # type: ignore[arg-type]
                going_on = [token_id for token_id in allowed(mask) if token_id != end()]
                ends = [each for each in going_on if set(codec().decode([each])) & set('"\\,}\ufffd')]
                if not going_on:
                    matchers[number] = begin(schema)
                    continue
                matcher.take(numbers.choice(ends if ends and numbers.random() < 0.4 else going_on))
                if numbers.random() < 0.1:
                    matchers[number] = matcher.fork()
    assert (num_near > 10) == (kind not in ("a pattern", "a quote named"))


def test_rows_that_share_a_matcher_and_rows_that_are_over() -> None:
    """Samples before their first token are one output still; nobody looks at what may follow an end."""
    first, other = begin({"type": "integer"}), begin({"type": "boolean"})
    asked = [Asked(first, ()), Asked(other, ()), Asked(first, ()), Asked(first, ())]
    masks = np.full((4, num_words(asked)), 7, np.uint32)
    write_masks(asked, masks)
    assert allowed(masks[0]) == allowed(masks[2]) == allowed(masks[3]) != allowed(masks[1])
    [seven] = codec().encode("7", add_special_tokens=False)
    fork = first.fork()
    assert fork.root is not first.root or len(grammars()._grammar(Structure("json", '{"type": "integer"}')).roots) == 1
    asked = [Asked(first, (seven,)), Asked(fork, (seven, end()))]
    write_masks(asked, masks[:2])
    assert end() in allowed(masks[0])
    assert allowed(masks[1]) == [end()]
    assert fork.is_over
    assert not first.is_over
    asked = [Asked(first, (seven,))]  # told of the same again
    first.take(seven)
    write_masks(asked, masks[:1])
    assert first.state.validate_tokens([seven]) == 1


def test_a_fault_is_told_of_its_row_alone() -> None:
    matchers = [begin({"type": "array", "items": ITEMS["short"]}) for _ in range(3)]
    matchers[1].state.consume_token(end())
    masks = np.zeros((3, num_words([Asked(matchers[0], ())])), np.uint32)
    faults = write_masks([Asked(matcher, ()) for matcher in matchers], masks)
    assert list(faults) == [1]
    assert "cannot be followed any further" in faults[1]
    assert allowed(masks[1]) == []
    assert allowed(masks[0]) == allowed(masks[2]) != []


def test_threads_find_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.structured.mask_threads.PATIENCE", 0.0)
    matchers = [begin({"type": "array", "items": ITEMS["long"], "minItems": 9}) for _ in range(40)]
    numbers = random.Random(1)
    for _ in range(5):
        truth = [alone(matcher) for matcher in matchers]
        masks = np.zeros((40, len(truth[0])), np.uint32)
        write_masks([Asked(matcher, ()) for matcher in matchers], masks)
        assert np.array_equal(masks, np.stack(truth))
        for matcher, mask in zip(matchers, truth, strict=True):
            matcher.take(numbers.choice([token_id for token_id in allowed(mask) if token_id != end()]))


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_workers() -> Iterator[Grammars]:
    own = Grammars(codec(), MaskThreads(1))
    own.use_workers(2)
    yield own
    if own._workers is not None:
        own._workers.close()


@pytest.mark.parametrize("kind", ["short", "keys", "a pattern"])
def test_processes_find_the_same_masks(by_workers: Grammars, kind: str) -> None:
    """Whether they write them where a step's are, or aside; of forks too, and after tokens that are only presumed."""
    numbers = random.Random(kind)
    structure = Structure("json", json.dumps({"type": "array", "items": ITEMS[kind], "minItems": 9}))
    remote: list[Matcher] = [by_workers.begin(structure, [end()]) for _ in range(5)]
    local: list[Matcher] = [begin(json.loads(structure.source)) for _ in range(5)]
    workers = workers_of([Asked(remote[0], ())])
    assert workers is not None
    outputs: list[list[int]] = [[] for _ in remote]
    for step in range(20):
        truth = np.zeros((5, num_words([Asked(local[0], ())])), np.uint32)
        write_masks([Asked(*each) for each in zip(local, outputs, strict=True)], truth)
        area = workers.area(step % 2, 5) if step % 3 else None
        masks = np.zeros_like(truth) if area is None else area.masks
        assert write_masks([Asked(*each) for each in zip(remote, outputs, strict=True)], masks, area) == {}
        assert np.array_equal(masks, truth)
        for number, output in enumerate(outputs):
            going_on = [token_id for token_id in allowed(truth[number]) if token_id != end()]
            drafted = [numbers.choice(going_on), numbers.choice(range(200))]
            for count in (0, 1, 2):
                told = [each[number].allowed_after([*output, *drafted[:count]], count) for each in (remote, local)]
                assert (told[0] is None) == (told[1] is None)
                assert told[0] is None or np.array_equal(*told)  # type: ignore[arg-type]
            if step % 5 == 4:
                remote[number], local[number] = remote[number].fork(), local[number].fork()
            output.append(drafted[0])
    gc.collect()
    write_masks([Asked(remote[0], ())], masks)  # whoever was forked from is forgotten with the next frame


def test_samples_of_one_prompt_are_dealt_to_all_processes(by_workers: Grammars) -> None:
    first = by_workers.begin(Structure("json", '{"type": "integer"}'), [end()])
    forks = [first.fork() for _ in range(4)]
    assert len({id(fork.worker) for fork in forks if isinstance(fork, RemoteMatcher)}) == 2


def test_a_process_that_ends_ends_its_outputs_and_no_others() -> None:
    own = Grammars(codec(), MaskThreads(1))
    own.use_workers(2)
    structure = Structure("json", '{"type": "integer"}')
    matchers = [own.begin(structure, [end()]) for _ in range(4)]
    masks = np.zeros((4, num_words([Asked(matchers[0], ())])), np.uint32)
    asked = [Asked(matcher, ()) for matcher in matchers]
    assert write_masks(asked, masks) == {}
    lost = matchers[0]
    assert isinstance(lost, RemoteMatcher)
    lost.worker._process.kill()
    faults = write_masks(asked, masks)
    assert set(faults) == {0, 2}
    assert "has ended" in faults[0]
    assert allowed(masks[0]) == []
    assert allowed(masks[1]) != []
    assert isinstance(own.begin(structure, [end()]), LocalMatcher), "from then on without them"
    lost.workers.close()


def next_step(matchers: Sequence[Matcher], area: Area) -> Mask:
    """What may follow these, by workers who write it into this area."""
    area.masks[:] = 0
    assert write_masks([Asked(matcher, ()) for matcher in matchers], area.masks, area) == {}
    return area.masks.copy()


@pytest.mark.parametrize("is_early", [False, True])
def test_what_a_broken_off_step_was_answered_answers_no_later_one(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """Ctrl-C between the question and the answer: the answer comes all the same, and says that masks are there. The
    next step must not take it for its own, whose masks are not."""
    own = Grammars(codec(), MaskThreads(1))
    own.use_workers(2)
    structure = Structure("json", '{"type": "integer"}')
    matchers = [own.begin(structure, [end()]) for _ in range(4)]
    workers = workers_of([Asked(matchers[0], ())])
    assert workers is not None
    area = workers.area(0, 4)
    assert area is not None
    truth = next_step(matchers, area)
    assert truth.any(1).all()
    if is_early:
        assert ask_early(matchers)

    def interrupted(worker: Any) -> bytes:
        select.select([worker._process.stdout], [], [], 10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(workers._workers[0]), "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next_step(matchers, area)
    for worker in workers._workers:
        worker._process.send_signal(signal.SIGSTOP)  # it finds no more masks
    later = [own.begin(structure, [end()]) for _ in range(4)]
    others = workers_of([Asked(later[0], ())])
    assert others is not None, "processes find masks as before"
    its_area = others.area(1, 4)
    assert its_area is not None
    assert np.array_equal(next_step(later, its_area), truth)
    with pytest.raises(GrammarFaultError, match="has ended"):
        matchers[0].presume([5])
    assert set(write_masks([Asked(matcher, ()) for matcher in matchers], area.masks, area)) == {0, 1, 2, 3}
    others.close()


def test_a_grammar_of_which_not_all_processes_have_heard_is_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Grammars(codec(), MaskThreads(1))
    own.use_workers(2)
    structures = [Structure("json", json.dumps({"type": "integer", "minimum": least})) for least in (0, 10)]
    first = own.begin(structures[0], [end()])
    assert isinstance(first, RemoteMatcher)
    own.check(structures[1])
    request = type(first.worker).request

    def interrupted(worker: Any, name: str, *arguments: Any, at_once: bool = False) -> None:
        if name == "know" and worker is not first.worker:
            raise KeyboardInterrupt
        request(worker, name, *arguments, at_once=at_once)

    with monkeypatch.context() as patched:
        patched.setattr(type(first.worker), "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.begin(structures[1], [end()])
    matcher = own.begin(structures[1], [end()])
    assert isinstance(matcher, RemoteMatcher)
    matcher.workers.close()


def test_where_no_process_can_be_started_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr("ramify.structured.mask_workers.os.memfd_create", refuse)
    own = Grammars(codec(), MaskThreads(1))
    own.use_workers(2)
    assert isinstance(own.begin(Structure("json", '{"type": "integer"}'), [end()]), LocalMatcher)


# -- roots -----------------------------------------------------------------------------------------------------------


def test_outputs_begin_at_as_many_roots_as_pay() -> None:
    built = []

    def build() -> object:
        built.append(object())
        return built[-1]

    roots = Roots(build, 3)
    dealt = [roots.deal() for _ in range(OUTPUTS_EACH)]
    assert len(roots) == len(built) == 1, "a few outputs wait for each other"
    dealt += [roots.deal() for _ in range(20)]
    assert len(roots) == 3
    assert {id(each) for each in dealt[-3:]} == set(map(id, built))
    assert roots.shrink() == 2
    assert roots.deal() is built[0]


def test_a_grammar_that_takes_long_has_one_root(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0])
    monkeypatch.setattr("ramify.structured.roots.time.perf_counter", lambda: next(seconds))
    roots = Roots(object, 16)
    assert len({id(roots.deal()) for _ in range(50)}) == 1


# -- strings ---------------------------------------------------------------------------------------------------------


@given(
    value=st.recursive(
        st.text() | st.booleans() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ),
    cut=st.integers(0, 200),
    size=st.integers(1, 7),
    ascii_only=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_where_a_text_stands(value: Any, cut: int, size: int, ascii_only: bool) -> None:
    """Told a few bytes at a time; against a look at all of the text."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")[:cut]
    position = StringPosition()
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        is_plain = piece.isalnum() and piece.isascii()
        position.take(piece, len(piece) if is_plain else 0)
    inside, begun, place = False, 0, 0
    while place < len(text):
        if text[place] == ord('"'):
            inside, begun = not inside, place + 1
        if inside and text[place] == ord("\\"):
            place += 5 if text[place + 1 : place + 2] == b"u" else 1
        place += 1
    assert position.is_inside == (inside and place == len(text))
    if inside:
        assert position.content == text[begun:]


LIMITS: list[tuple[Any, int | None, list[str]]] = [
    ({"type": "string"}, None, []),
    ({"type": "string", "maxLength": 5}, 5, ["string", "type", "maxLength"]),
    ({"properties": {"pattern": {"maxLength": 7}, "b": {"items": {"maxLength": 3}}}}, 3, ["pattern", "b"]),
    ({"properties": {"a": {"maxLength": 7}, "b": {"pattern": "x"}}}, None, []),
    ({"properties": {"a": {"maxLength": 7}}, "x-guidance": {}}, None, []),
    ({"anyOf": [{"maxLength": 7}, {"enum": ["x", ["y", {"z": 1}]]}]}, 7, ["x", "y", "z"]),
    ({"anyOf": [{"maxLength": 7}, {"const": 'x"'}]}, None, []),
    ({"anyOf": [{"maxLength": 7}, {"const": NEUTRAL}]}, None, []),
    ({"anyOf": [{"maxLength": 7}, {"format": "date"}]}, None, []),
    (True, None, []),
]


@pytest.mark.parametrize(("schema", "least", "named"), LIMITS, ids=lambda value: str(value)[:40])
def test_what_schemas_say_ofstrings(schema: Any, least: int | None, named: list[str]) -> None:
    found = limits_of(json.dumps(schema), NEUTRAL)
    assert (None if found is None else found.least) == least
    if found is not None:
        assert set(named) <= {text.decode() for text in found.named}


def test_namedstrings_are_found_by_their_beginning() -> None:
    limits = StringLimits(3, sorted([b"ab", b"abc", b"b", *(b"x%d" % number for number in range(MOST_NAMED + 1))]))
    assert limits.named_after(b"a") == [b"b", b"bc"]
    assert limits.named_after(b"abc") == [b""]
    assert limits.named_after(b"c") == []
    assert limits.named_after(b"x") is None
