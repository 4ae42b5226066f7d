"""Outputs as a notebook shows them: side by side, shaded, whole, and never a page's own markup."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from ramify.drive.alpha_view import small_curve
from ramify.notebook import cards
from ramify.notebook.token_shades import STUDENT, SURPRISE, TEACHER, reach_of
from ramify.optimal import OptimalOutputs
from ramify.outputs import CompletionOutput, FinishReason, Logprob, MixtureReport, RequestOutput, RequestOutputs

HOSTILE = "</div><script>alert(1)</script><img src=x onerror='a()'>\"&amp;"


class Reader(HTMLParser):
    """What a browser sees: elements, their attributes, and the text; every element must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def sample(pieces: list[str], *, text: str | None = None, logprob: float = -1.0, index: int = 0) -> CompletionOutput:
    """Each token with one alternative beside it."""
    rows = [
        {place: Logprob(logprob, 2, piece), 10_000: Logprob(-0.5, 1, "<i>other</i>")}
        for place, piece in enumerate(pieces)
    ]
    joined = "".join(pieces) if text is None else text
    return CompletionOutput(
        index, joined, tuple(range(len(pieces))), logprob * len(pieces), rows, finish_reason=FinishReason.LENGTH
    )


def request(*outputs: CompletionOutput, prompt: str | None = "A prompt", error: str | None = None) -> RequestOutput:
    return RequestOutput("r", prompt, (1, 2), outputs, finished=True, error=error)


def shades(page: str, colour: str) -> list[float]:
    """How strongly each token has a colour."""
    return [float(share) for share in re.findall(rf"background:rgba\({colour},([\d.]+)\)", page)]


def test_no_text_of_a_model_or_a_prompt_is_markup() -> None:
    completion = sample(["Hi", HOSTILE])
    seen = Reader(request(completion, prompt=HOSTILE, error=HOSTILE)._repr_html_())
    assert set(seen.tags) == {"div", "span", "b"}
    assert {name for name, _ in seen.attributes} == {"style", "title"}
    assert seen.text.count(HOSTILE) == 3
    plain = CompletionOutput(0, HOSTILE, (1,), -1.0, finish_reason=FinishReason.STOP, stop_reason="<script>")
    for page in (plain._repr_html_(), request(plain)._repr_html_(), completion._repr_html_()):
        assert set(Reader(page).tags) <= {"div", "span", "b"}
    assert all("script" not in (value or "") for name, value in seen.attributes if name == "style")


def test_samples_stand_side_by_side_and_say_how_they_ended() -> None:
    outputs = RequestOutputs([request(sample(["a"]), sample(["b"], index=1)), request(sample(["c"]), prompt=None)])
    seen = Reader(outputs._repr_html_())
    assert seen.text.count("max tokens") == 3
    assert "2 prompt tokens" in seen.text
    assert "1 tokens · logprob -1.0 · perplexity 2.7" in seen.text
    assert ("style", cards.GRID) in seen.attributes
    assert isinstance(outputs, list)
    assert RequestOutputs()._repr_html_() == "<div></div>"


def test_the_less_likely_the_stronger_and_alternatives_are_told() -> None:
    certain, rare, never = (sample(["x"], logprob=value)._repr_html_() for value in (0.0, -3.45, float("-inf")))
    assert shades(certain, SURPRISE) == [0.0]
    assert shades(rare, SURPRISE) == [pytest.approx(0.85 / 2, abs=0.01)]
    assert shades(never, SURPRISE) == [0.85]
    titles = [unescape(title) for title in re.findall('title="([^"]*)"', rare)]
    assert titles == ["x\nid 0\n3.2 %, rank 2\n  <i>other</i> 61 %"]


@pytest.mark.parametrize(
    ("pieces", "text", "beside"),
    [
        (["A", " tree", "."], None, ""),
        (["�", "�", " x"], "🌳 x", ""),  # a character of two tokens
        (["�", "�", "�"], "é�", ""),  # it ends in the middle of one
        (["Yes", "<end>"], "Yes", "<end>"),  # a token that the text leaves out
        ([" Hi", " you"], "Hi you", ""),  # a text without its first space
        (["one", " end", " more"], "one e", " more"),  # cut at a stop string
        (["?", "?"], "something else", "??"),  # tokens that tell nothing of the text
        (["", ""], "text", ""),
    ],
)
def test_the_text_is_shown_whole_whatever_tokens_are_called(pieces: list[str], text: str | None, beside: str) -> None:
    completion = sample(pieces, text=text)
    body = re.search(rf'<div style="{re.escape(cards.TEXT)}">(.*?)</div>', completion._repr_html_(), re.DOTALL)
    assert body is not None
    spans = re.findall(r'(<span[^>]*style="font-size[^>]*>)?', body[1])
    shown = Reader(body[1]).text
    assert len([each for each in spans if each]) == (0 if not beside else 2 if beside == "??" else 1)
    assert sorted(shown) == sorted((text if text is not None else "".join(pieces)) + beside)


def mixed(alpha: float) -> MixtureReport:
    return MixtureReport(alpha, -0.1, 0.2, 0.2, 1.0, 1.0, -1.0, -2.0, is_clamped=False)


def test_two_models_are_shaded_by_alpha_on_one_scale() -> None:
    completion = CompletionOutput(0, "abc", (0, 1, 2), -3.0, mixture=(mixed(0.5), mixed(0.42), mixed(0.6)))
    assert reach_of([completion]) == 0.1
    outputs = OptimalOutputs([request(completion)], None)
    page = outputs._repr_html_()
    assert "abc" in Reader(page).text  # without a tokenizer nobody knows which token wrote what
    assert "α = 0.4, student" in page
    page = cards.html_of_requests(outputs.outputs, pieces_of=lambda _: ["a", "b", "c"])
    assert shades(page, STUDENT) == [0.0, pytest.approx(0.6)]
    assert shades(page, TEACHER) == [pytest.approx(0.75)]
    assert small_curve([]) == ""
    assert 'points="0.0,22.0 150.0,0.0 300.0,44.0"' in small_curve([0.5, 1.0, 0.0])
    Reader(small_curve([0.5]))


def test_a_large_result_stays_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MOST_TOKENS", 3)
    many = [request(*(sample(["a", "b"], index=index) for index in range(100))) for _ in range(20)]
    page = RequestOutputs(many)._repr_html_()
    assert len(shades(page, SURPRISE)) == 2  # one sample's tokens
    assert "… and 36 more samples of this prompt" in page
    assert "… and 4 more prompts" in page
    assert "logprobs=3" in request(CompletionOutput(0, "a", (1,), -1.0))._repr_html_()
