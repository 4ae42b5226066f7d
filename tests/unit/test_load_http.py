"""The load client reads HTTP and events wherever the network cuts them; its requests follow from a seed."""

from __future__ import annotations

import itertools
import re
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load_http import EventReader, ResponseReader, WireError
from bench.load_report import percentiles
from bench.load_work import WORDS, Work, arrivals

STREAM = (
    ': a comment\r\n\r\nevent: x\ndata: {"a": "é"}\n\ndata:two\r\ndata: lines\r\n\r\n'
    "id: 4\rdata: three\r\rdata: [DONE]\n\n"
).encode()
EVENTS = ['{"a": "é"}'.encode(), b"two\nlines", b"three", b"[DONE]"]


def test_events_are_the_same_wherever_two_cuts_are() -> None:
    for first, second in itertools.combinations_with_replacement(range(len(STREAM) + 1), 2):
        reader = EventReader()
        pieces = (STREAM[:first], STREAM[first:second], STREAM[second:])
        assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS, (first, second)


def test_an_event_is_there_as_soon_as_its_empty_line() -> None:
    for end in (b"\n\n", b"\r\r", b"\r\n\r"):  # the last: whatever follows, the line has ended
        assert EventReader().feed(b"data: x" + end) == [b"x"]
    assert EventReader().feed(b"data: x\n") == []


CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\nC;note=1\r\n, big\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 429 Too Many\r\ncontent-length: 16\r\n\r\nhello, big\r\nworl"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello, big\r\nworld"


@given(st.sampled_from([CHUNKED, SIZED, UNTIL_CLOSE]), st.lists(st.integers(0, 200), max_size=12))
def test_a_response_is_the_same_wherever_it_is_cut(response: bytes, cuts: list[int]) -> None:
    reader = ResponseReader()
    places = [0, *sorted(min(cut, len(response)) for cut in cuts), len(response)]
    body = b"".join(piece for low, high in itertools.pairwise(places) for piece in reader.feed(response[low:high]))
    assert body == b"hello, big\r\nworl" + b"d" * (response is not SIZED)
    assert reader.status == (429 if response is SIZED else 200)
    assert reader.is_complete == (response is not UNTIL_CLOSE)
    assert reader.stays_open == (response is not UNTIL_CLOSE)
    reader.close()
    assert reader.is_complete


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (b"SSH-2.0-x\r\n\r\n", "no HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", "no length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "no size of a chunk"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", "more came"),
        (b"x" * 70_000, "too long"),
    ],
)
def test_what_is_no_http_is_refused(response: bytes, why: str) -> None:
    with pytest.raises(WireError, match=re.escape(why)):
        ResponseReader().feed(response)


def test_an_incomplete_response_stays_incomplete() -> None:
    reader = ResponseReader()
    reader.feed(CHUNKED[:-2])
    reader.close()
    assert not reader.is_complete


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_percentiles_are_numpys(values: list[float], wanted: list[float]) -> None:
    assert percentiles(values, wanted) == pytest.approx(np.percentile(values, wanted), rel=1e-9, abs=1e-9)
    assert percentiles([], wanted) == []


def test_arrivals_follow_from_the_seed_and_come_at_their_rate() -> None:
    first, again, other = (list(itertools.islice(arrivals(5.0, seed), 4_000)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    gaps = np.diff([0.0, *first])
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.08)  # a Poisson process: gaps vary by as much as they are long
    assert np.diff(list(itertools.islice(arrivals(10.0, 1), 4_000))) == pytest.approx(np.diff(first) / 2)


def test_prompts_follow_from_the_seed_and_share_what_their_group_shares() -> None:
    work = Work(model="m", prompt=(20, 40), output=(3, 9), shared=0.5, groups=2, seed=7, turn="0")
    assert work.body_of(3) == work.body_of(3)
    prompts = [str(work.prompt_of(number)).split() for number in range(40)]
    assert {len(prompt) for prompt in prompts} <= set(range(20, 41))
    assert {work.max_tokens_of(number) for number in range(80)} == set(range(3, 10))
    for one, other in itertools.combinations(range(40), 2):
        common = min(round(len(prompts[one]) / 2), round(len(prompts[other]) / 2))
        together = prompts[one][:common] == prompts[other][:common]
        assert together == (one % 2 == other % 2)
        assert prompts[one] != prompts[other]
    assert work.prompt_of(0) != Work(model="m", prompt=(20, 40), output=(3, 9), seed=7, turn="1").prompt_of(0)
    ids = Work(model=None, prompt=(8, 8), output=(1, 1), vocabulary=50).prompt_of(0)
    assert isinstance(ids, list)
    assert len(ids) == 8
    assert max(ids) < 50
    assert len(set(WORDS)) == len(WORDS)
