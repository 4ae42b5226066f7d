"""The playground in a real browser, before a real server with the default model. Leaves pictures in `screenshots/`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from ramify import LLM, AsyncLLM, SamplingParams
from ramify.server.app import create_app
from ramify.server.config import ServerConfig
from tests.browser import picture, system_browser
from tests.serving import ENGINE_PROCESS, mixture_app, serving

DESKTOP = {"width": 1360, "height": 860}
PHONE = {"width": 375, "height": 780}
PROMPT = "The lighthouse keeper climbed the stairs one last time. At the top she found"
LONG = 60_000  # milliseconds that a busy machine may take for one search
ASKED = "performance.getEntriesByType('resource').map(one => one.name)"
DRAWN = {"temperature": 0.8, "seed": 7}  # the same texts in every run


@pytest.fixture(scope="module")
def llm() -> AsyncLLM:
    return AsyncLLM(max_model_len=1024, generation_config="none", engine_process=ENGINE_PROCESS)


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    with serving(create_app(llm)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with system_browser() as browser:
        yield browser


class Visit:
    """A page, and what went wrong in it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page = context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def _heard(self, kind: str, text: str) -> None:
        if kind == "error" and "Failed to load resource" not in text:  # the browser's word for a refusal
            self.faults.append(text)


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Any]:
    """visit(**context options) -> Page; no page may have had an error of its own or asked anybody else."""
    visits: list[Visit] = []
    with ExitStack() as contexts:

        def begin(address: str = url, **options: Any) -> Page:
            context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
            contexts.callback(context.close)
            visits.append(Visit(context, address))
            return visits[-1].page

        yield begin
        for each in visits:
            assert each.faults == []
            assert all(asked.startswith("http://127.0.0.1:") for asked in each.asked), "something from elsewhere"


def sample(page: Page) -> None:
    page.get_by_role("button", name="Sample", exact=True).click()
    finished(page)


def finished(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden(timeout=LONG)
    expect(page.get_by_role("button", name="Sample", exact=True)).to_be_visible()


def until(page: Page, expression: str) -> None:
    """Asks until it is so; the page's own policy keeps Playwright's waiting for expressions out."""
    for _ in range(LONG // 20):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"it never came to this: {expression}")


def choose(page: Page, strategy: str, **fields: object) -> None:
    page.get_by_role("radio", name=strategy).check(force=True)
    for name, value in fields.items():
        page.locator(f"#control-{name}").fill(str(value))


def link(page: Page) -> str:
    page.get_by_role("button", name="Copy a link to this form").click()
    text = page.locator("#code").inner_text()
    page.keyboard.press("Escape")
    return text


def columns(page: Page) -> Locator:
    return page.locator(".column")


def column_text(column: Locator) -> str:
    """What a column says; special tokens are shown in it and belong to no text."""
    pieces: list[str] = column.locator(".token:not(.silent)").evaluate_all("all => all.map(one => one.textContent)")
    return "".join(pieces)


def answer(url: str, **body: Any) -> list[str]:
    """The texts of the same search by the plain route."""
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return [choice["text"] for choice in reply.json()["choices"]]


# -- sampling -------------------------------------------------------------------------------------------------


def test_a_prompt_streams_into_four_columns_side_by_side(visit: Any, url: str) -> None:
    page = visit()
    expect(page.get_by_text("One prompt, many continuations")).to_be_visible()
    picture(page, "empty")
    choose(page, "Parallel", **DRAWN)
    page.get_by_role("button", name="Sample", exact=True).click()
    # It streams: there are tokens while the search still runs.
    until(
        page,
        "document.querySelectorAll('.column.running .token').length > 4 && !document.getElementById('stop').hidden",
    )
    finished(page)
    expect(columns(page)).to_have_count(4)
    tops = {round(column.bounding_box()["y"]) for column in columns(page).all()}  # type: ignore[index]
    assert len(tops) == 1, "side by side"
    texts = [column_text(column) for column in columns(page).all()]
    assert texts == answer(url, prompt=PROMPT, n=4, max_tokens=40, **DRAWN)
    expect(page.locator("#summary")).to_have_text("Done: 4 continuations, 160 tokens drawn.")
    assert len(set(texts)) == 4
    picture(page, "four-columns")


def test_a_token_is_shaded_by_its_probability_and_shows_its_alternatives(visit: Any) -> None:
    page = visit(viewport={"width": 1360, "height": 736})
    choose(page, "Parallel", **DRAWN)
    sample(page)
    tokens = columns(page).nth(1).locator(".token")
    shades = tokens.evaluate_all(
        "all => all.map(one => [one.node.logprob, getComputedStyle(one.querySelector('.ink')).backgroundColor])"
    )
    certain = [colour for logprob, colour in shades if logprob > -0.02]
    surprising = [colour for logprob, colour in shades if logprob < -2]
    assert surprising
    assert all(colour not in certain for colour in surprising)
    tokens.nth(5).click()
    panel = page.get_by_role("dialog", name="Alternatives of a token")
    expect(panel).to_be_visible()
    shares = [
        float(re.sub(r"[<% ]", "", text)) for text in panel.locator("li .share").all_inner_texts() if "<" not in text
    ]
    assert 98 < sum(shares) < 102, "eight alternatives, what was drawn, and all others make one"
    assert panel.locator("li").count() >= 9
    expect(panel.locator("li.taken")).to_have_count(1)
    picture(page, "alternatives")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_what_a_stop_text_took_back_is_not_shown(visit: Any, url: str) -> None:
    page = visit()
    choose(page, "Parallel", n=4, max_tokens=30, **DRAWN)
    page.get_by_text("More controls").click()
    page.get_by_label("Stop at").fill(". She")
    sample(page)
    texts = [column_text(column) for column in columns(page).all()]
    assert texts == answer(url, prompt=PROMPT, n=4, max_tokens=30, stop=[". She"], **DRAWN)
    assert any(reason == "ended" for reason in page.locator(".column .state").all_inner_texts())


def test_best_of_stands_in_the_order_of_ranks_with_its_losers_greyed(visit: Any, url: str) -> None:
    page = visit()
    choose(page, "Best of", n=2, best_of=6, max_tokens=14, **DRAWN)
    sample(page)
    expect(columns(page)).to_have_count(6)
    expect(page.locator(".column.won")).to_have_count(2)
    expect(page.locator(".column.lost")).to_have_count(4)
    looks = page.locator(".column.lost").evaluate_all("all => all.map(one => getComputedStyle(one).filter)")
    assert set(looks) == {"grayscale(1)"}
    assert page.locator(".column .badge").all_inner_texts() == ["1st", "2nd", "3rd", "4th", "5th", "6th"]
    best = answer(url, prompt=PROMPT, n=2, best_of=6, max_tokens=14, **DRAWN)
    assert [column_text(column) for column in columns(page).all()[:2]] == best
    scores = [
        float(column.get_by_text("score").locator("b").inner_text().replace("−", "-")) for column in columns(page).all()
    ]
    assert scores == sorted(scores, reverse=True)
    picture(page, "best-of")


# -- beams ----------------------------------------------------------------------------------------------------


def test_beams_are_a_tree_that_grows(visit: Any, url: str) -> None:
    page = visit()
    choose(page, "Beams", n=4, beam_width=4, max_tokens=14)
    page.get_by_role("button", name="Sample", exact=True).click()
    # It grows: there is a moment with some levels of it and not all.
    count = "document.querySelectorAll('.tree .node').length"
    until(page, f"{count} >= 8 && {count} <= 52")
    finished(page)
    nodes = page.locator(".tree .node")
    assert nodes.count() == 56
    assert page.locator(".tree .edge").count() == 56
    best = page.locator(".tree .node.best").evaluate_all("all => all.map(one => one.node.text).join('')")
    texts = [column_text(column) for column in columns(page).all()]
    assert best == texts[0]
    assert texts == answer(url, prompt=PROMPT, n=4, strategy="beam_search", beam_width=4, max_tokens=14)
    assert page.locator(".tree .node.dead").count() > 0, "branches that were given up"
    assert scores_by_row(page) == scores_by_card(page), "rows and cards are in one order"
    picture(page, "beam-tree")
    # Fourteen steps are wider than the page: an overview shows all of them, and a click in it looks there.
    place = "document.querySelector('.tree-scroll')"
    overview = page.locator(".overview")
    expect(overview).to_be_visible()
    assert page.evaluate(f"{place}.scrollLeft") > 0, "it follows the newest step"
    overview.click(position={"x": 2, "y": 20})
    assert page.evaluate(f"{place}.scrollLeft") == 0
    fit = page.get_by_role("button", name="Fit to width")
    fit.click()
    expect(fit).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(f"{place}.scrollWidth <= {place}.clientWidth")
    expect(overview).to_be_hidden()
    picture(page, "beam-tree-fit")


def test_groups_of_beams_have_colours(visit: Any) -> None:
    page = visit(color_scheme="dark")
    choose(page, "Groups", n=4, beam_width=4, num_beam_groups=2, max_tokens=8)
    sample(page)
    expect(page.locator(".tree-keys").get_by_text("group 2")).to_be_visible()
    strokes = page.locator(".tree .node .frame").evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
    assert len(set(strokes)) == 2
    assert scores_by_row(page) == scores_by_card(page)
    tips = page.locator(".tree .node.finished:not(.dead)").evaluate_all(
        "all => all.map(one => [one.getBoundingClientRect().y, getComputedStyle(one.querySelector('.frame')).stroke])"
    )
    tops = page.locator(".column").evaluate_all("all => all.map(one => getComputedStyle(one).borderTopColor)")
    assert tops == [colour for _, colour in sorted(tips)], "a card has the colour of its beam"
    assert len(set(tops)) == 2
    assert all(name in ("group 1", "group 2") for name in page.locator(".column .group-name").all_inner_texts())
    picture(page, "groups-dark")


def scores_by_row(page: Page) -> list[str]:
    """Of the beams that return, from top to bottom, all in the last step here."""
    tips = page.locator(".tree .node.finished:not(.dead)").evaluate_all(
        "all => all.map(one => [one.getBoundingClientRect().y, one.querySelector('.score').textContent])"
    )
    assert [text.split(":")[0] for _, text in sorted(tips)] == ["1", "2", "3", "4"], "a row says which card is its"
    return [text.split()[-1] for _, text in sorted(tips)]


def scores_by_card(page: Page) -> list[str]:
    return [column.get_by_text("score").locator("b").inner_text() for column in columns(page).all()]


# -- two models -----------------------------------------------------------------------------------------------


def test_the_text_of_two_models_is_coloured_by_alpha_with_a_chart(
    visit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(mixture_app()) as address:
        page = visit(address)
        expect(page.get_by_label("What the student sees")).to_be_visible()
        page.get_by_label("What the teacher sees").fill(
            "Question: Tom has 3 boxes with 4 pens each. How many pens has he?\nThe answer is 12.\nExplanation:"
        )
        page.get_by_label("What the student sees").fill(
            "Question: Tom has 3 boxes with 4 pens each. How many pens has he?\nExplanation:"
        )
        choose(page, "Parallel", n=3, max_tokens=36, **DRAWN)
        sample(page)
        expect(page.get_by_label("Shade by")).to_have_value("alpha")
        expect(page.locator(".chart")).to_have_count(3)
        column = columns(page).first
        told = column.locator(".token").evaluate_all(
            "all => all.map(one => [one.node.mixture.alpha, one.dataset.side,"
            " getComputedStyle(one.querySelector('.ink')).backgroundColor])"
        )
        assert all((alpha >= 0.5) == (side == "teacher") for alpha, side, _ in told)
        assert len({colour for _, _, colour in told}) > 2
        for line in ("alpha", "kl-teacher", "kl-theta"):
            points = column.locator(f".chart .{line}").get_attribute("points")
            assert points is not None
            assert len(points.split()) == len(told), "one point per token"
        # One legend and one scale for all cards; this α makes both divergences equal, and the legend says so.
        expect(page.locator("#legend .key")).to_have_count(2)
        expect(page.locator("#legend")).to_contain_text("KL to the teacher and to the student")
        expect(page.locator("#legend")).to_contain_text("the two coincide")
        expect(column.locator(".chart .kl-theta")).to_be_hidden()
        heights = page.evaluate(
            """[...document.querySelectorAll('.column')].flatMap(column => {
                const points = column.querySelector('.kl-teacher').getAttribute('points').split(' ');
                const nodes = [...column.querySelectorAll('.token')].map(one => one.node);
                return nodes.map((node, i) => [node.mixture.kl_teacher, 73 - points[i].split(',')[1]]);
            })"""
        )
        [scale] = {round(height / kl, 0) for kl, height in heights if height > 20}
        assert scale > 0
        expect(page.locator("#asked-text")).to_contain_text("Teacher sees")
        expect(page.locator("#asked-text")).to_contain_text("Student sees")
        picture(page, "alpha")
        column.locator(".token").nth(2).click()
        panel = page.locator("#alternatives")
        expect(panel).to_contain_text("The teacher gave it")
        expect(panel).to_contain_text(f"α {told[2][0]:.3f}")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Copy as Python").click()
        names: dict[str, Any] = {}
        exec(compile(page.locator("#code").inner_text(), "copied", "exec"), names)
        capsys.readouterr()
        assert names["outputs"].generated_texts == [column_text(each) for each in columns(page).all()]
        page.keyboard.press("Escape")
        page.get_by_label("Shade by").select_option("probability")
        expect(page.locator("#results")).to_have_class(re.compile("by-probability"))


# -- chat -----------------------------------------------------------------------------------------------------


def test_a_chat_goes_on_with_the_answer_that_was_liked(visit: Any) -> None:
    page = visit()
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("textbox", name="Message of the user").fill("Name a colour.")
    choose(page, "Parallel", n=2, max_tokens=10)
    sample(page)
    liked = column_text(columns(page).nth(1))
    columns(page).nth(1).get_by_role("button", name="Reply to this").click()
    expect(page.get_by_role("textbox", name="Message of the assistant")).to_have_value(liked)
    page.get_by_role("textbox", name="Message of the user").nth(1).fill("Another one, please.")
    sample(page)
    expect(columns(page)).to_have_count(2)
    picture(page, "chat")


# -- what goes wrong ------------------------------------------------------------------------------------------


REFUSED = (
    ("Parallel", {"temperature": 9}, "temperature", "“Temperature” must be less than or equal to 2, got 9"),
    ("Parallel", {"temperature": 0}, "n", "“Samples” must be 1 when temperature is 0"),
    ("Parallel", {"n": 1000}, "n", "(or “Drawn”, or “Beam width”) must be at most 128"),
    ("Parallel", {"max_tokens": 2000}, "prompt", "plus “Max tokens” 2000 must fit the model’s context = 1024"),
    ("Beams", {"n": 8, "beam_width": 4}, "n", "“Samples” must be at most “Beam width” = 4, got 8"),
    ("Groups", {"num_beam_groups": 3}, "num_beam_groups", "“Groups” must divide “Beam width” = 4, got 3"),
    ("Best of", {"n": 4, "best_of": 2}, "best_of", "“Drawn” must be at least “Samples” = 4, got 2"),
)


def test_a_refused_input_is_a_message_in_the_pages_words_beside_its_field(visit: Any) -> None:
    page = visit()
    for strategy, fields, field, words in REFUSED:
        choose(page, strategy, **fields)
        sample(page)
        message = page.locator(f'[data-field="{field}"] .message')
        expect(message).to_be_visible()
        expect(message).to_contain_text(words)
        entry = page.locator(f"#control-{field}, #{field}")
        expect(entry).to_have_attribute("aria-invalid", "true")
        expect(entry).to_be_focused()
        expect(columns(page)).to_have_count(0)
        if field == "temperature":
            picture(page, "refused")
        page.evaluate("sessionStorage.clear()")
        page.reload()


def test_a_message_goes_when_it_is_no_longer_true(visit: Any) -> None:
    page = visit()
    choose(page, "Parallel", n=1, max_tokens=2, temperature=9)
    sample(page)
    message = page.locator('[data-field="temperature"] .message')
    expect(message).to_be_visible()
    choose(page, "Parallel", temperature=1)
    sample(page)
    expect(message).to_be_hidden()
    expect(columns(page)).to_have_count(1)


def test_a_number_that_a_page_cannot_send_is_refused_by_the_page(visit: Any) -> None:
    page = visit()
    choose(page, "Parallel", seed=2**60 + 1)
    page.get_by_role("button", name="Sample", exact=True).click()
    expect(page.locator('[data-field="seed"] .message')).to_contain_text("9007199254740991")
    expect(columns(page)).to_have_count(0)


def test_an_empty_prompt_is_a_message_beside_it(visit: Any) -> None:
    page = visit()
    page.get_by_label("Prompt", exact=True).last.fill("")
    sample(page)
    message = page.locator('[data-field="prompt"] .message')
    expect(message).to_be_visible()
    expect(message).to_contain_text("empty")


def test_the_key_is_asked_for_and_a_wrong_one_is_not_taken(visit: Any, llm: AsyncLLM) -> None:
    with serving(create_app(llm, ServerConfig(api_key="open sesame"))) as guarded:
        page = visit(guarded)
        dialog = page.get_by_role("dialog", name="This server wants an API key")
        expect(dialog).to_be_visible()
        picture(page, "key")
        page.get_by_label("API key", exact=True).fill("close sesame")
        page.get_by_role("button", name="Use this key").click()
        # It starts clean: the field is empty, the message says what happened and goes when one writes.
        expect(dialog.get_by_role("alert")).to_contain_text("did not accept that key")
        expect(page.get_by_label("API key", exact=True)).to_have_value("")
        expect(page.get_by_label("API key", exact=True)).to_be_focused()
        assert "close sesame" not in page.evaluate("JSON.stringify(sessionStorage)")
        picture(page, "wrong-key")
        page.get_by_label("API key", exact=True).fill("open sesame")
        expect(dialog.get_by_role("alert")).to_be_hidden()
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        choose(page, "Parallel", n=1, max_tokens=3)
        sample(page)
        expect(columns(page)).to_have_count(1)
        page.get_by_role("button", name="Copy as curl").click()
        code = page.locator("#code").inner_text()
        assert "$RAMIFY_API_KEY" in code
        assert "open sesame" not in code
        page.keyboard.press("Escape")
        assert "sesame" not in link(page)
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)"), "nor in the history"


def test_the_key_may_be_given_later(visit: Any, llm: AsyncLLM) -> None:
    with serving(create_app(llm, ServerConfig(api_key="open sesame"))) as guarded:
        page = visit(guarded)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#model option")).to_have_text(["an API key is needed"])
        page.get_by_role("button", name="API key").click()
        page.get_by_label("API key", exact=True).fill("open sesame")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#model option")).to_have_text(["smollm2-135m"])


def test_a_server_that_went_away_is_said_so(visit: Any, llm: AsyncLLM) -> None:
    with serving(create_app(llm)) as address:
        page = visit(address)
        expect(page.locator("#model option")).to_have_text(["smollm2-135m"])
    sample(page)
    expect(page.get_by_role("alert").first).to_contain_text("does not answer")
    expect(page.get_by_role("button", name="Sample", exact=True)).to_be_enabled()


def test_a_server_that_is_back_is_asked_for_its_models_again(visit: Any) -> None:
    """The page went on without a model until it was reloaded, or asked for one that is gone."""
    page = visit()
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    expect(page.locator("#model option")).to_have_text(["no server"])
    page.unroute("**/v1/models")
    choose(page, "Parallel", n=1, max_tokens=2)
    sample(page)
    expect(page.locator("#model option")).to_have_text(["smollm2-135m"])
    expect(columns(page)).to_have_count(1)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "older"}]}))
    page.reload()
    expect(page.locator("#model option")).to_have_text(["older"])
    page.unroute("**/v1/models")
    sample(page)
    expect(page.get_by_role("alert").first).to_contain_text("for the model older, which this server does not have")
    expect(page.locator("#model option")).to_have_text(["smollm2-135m"])
    sample(page)
    expect(page.get_by_role("alert").first).to_be_hidden()
    expect(columns(page)).to_have_count(1)


def test_stop_keeps_what_came_and_frees_the_engine(visit: Any, llm: AsyncLLM) -> None:
    page = visit()
    choose(page, "Parallel", n=3, max_tokens=900)
    page.get_by_role("button", name="Sample", exact=True).click()
    until(page, "document.querySelectorAll('.token').length > 6")
    page.get_by_role("button", name="Stop", exact=True).click()
    finished(page)
    expect(columns(page).first.locator(".state")).to_have_text("stopped")
    assert column_text(columns(page).first)
    page.wait_for_timeout(100)
    for _ in range(200):
        if llm.engine.num_unfinished == 0:
            break
        page.wait_for_timeout(50)
    assert llm.engine.num_unfinished == 0
    assert llm.stats()["blocks_in_use"] == 0


PART = "\ufffd"  # how a token is told that is some bytes of a character


def stream_of(*pieces: str, name: str = "x", taken_back: int = 0) -> str:
    """The stream of a model that wrote these tokens, the last of which takes so many characters back."""
    tokens = [
        {
            "child": 0, "parent": 0, "position": position, "token_id": position, "token": text,
            "text": "" if text == PART else text, "num_taken_back": 0, "logprob": -0.5, "rank": 1,
            "top": [{"token_id": position, "token": text, "logprob": -0.5}],
            "finish_reason": None, "stop_reason": None,
        }
        for position, text in enumerate(pieces)
    ]  # fmt: skip
    tokens[-1] |= {"finish_reason": "length", "num_taken_back": taken_back}
    start = {"type": "start", "id": "x", "model": name, "strategy": "parallel", "num_children": 1}
    events = [
        {**start, "num_prompt_tokens": 1},
        *({"type": "steps", "steps": [{"tokens": [token], "standings": []}]} for token in tokens),
        {"type": "end", "outputs": [{}], "usage": {"completion_tokens": len(tokens)}},
    ]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def write(page: Page, body: str) -> None:
    """Samples from a model that writes this: no real one does on demand. The page is the real one."""
    page.route("**/ramify/stream", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    choose(page, "Parallel", n=1)
    sample(page)
    page.unroute("**/ramify/stream")


def test_a_models_text_is_text_and_never_markup(visit: Any) -> None:
    hostile = "<img src=x onerror=alert(1)><script>document.title='taken'</script>"
    page = visit()
    write(page, stream_of(hostile, name=hostile))
    assert column_text(columns(page).first) == hostile
    columns(page).first.locator(".token").click()
    expect(page.locator("#alternatives")).to_contain_text("onerror")
    assert page.locator("img, .columns script, #alternatives script").count() == 0
    assert page.title() == "Ramify playground"


def test_a_text_from_right_to_left_runs_so_and_arrows_go_with_it(visit: Any) -> None:
    page = visit()
    page.get_by_label("Prompt", exact=True).last.fill("مرحبا يا عالم")
    write(page, stream_of(" كان", " هناك", " \u202eabc", " ملك"))
    column = columns(page).first
    text = column.locator(".tokens")
    for each in (text, page.locator("#prompt")):
        assert each.evaluate("one => getComputedStyle(one).direction") == "rtl"
    column.locator(".token").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(column.locator(".token").nth(1)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(column.locator(".token").first).to_be_focused()
    column.locator(".token").nth(2).click()
    shares = page.locator("#alternatives .share").all_inner_texts()
    assert shares == ["61 %", "39 %"], "nothing turns what stands beside a token's text"
    picture(page, "right-to-left")


def test_what_is_taken_back_is_counted_in_characters_though_an_emoji_is_two_of_javascripts(visit: Any) -> None:
    """A stop text that began with an emoji left half of it behind."""
    page = visit()
    write(page, stream_of("ab", " 🙂", "🙂", "!", taken_back=2))
    assert column_text(columns(page).first) == "ab !"
    until(page, "import('/playground/search.js').then((made) => made.withoutLast('a🙂🙂', 1) === 'a🙂')")


def test_parts_of_a_character_do_not_stand_between_words_as_special_tokens_do(visit: Any) -> None:
    """Text in signs of several tokens each was a row of labels with a question mark in them."""
    page = visit()
    write(page, stream_of("I", " ", PART, PART, PART, "🙂", "ok"))
    part = columns(page).first.locator(".token").nth(2)
    expect(part).to_have_text("·")
    expect(part).to_have_attribute("aria-label", "(part of a character), 61 %")
    assert part.locator(".ink").evaluate("one => getComputedStyle(one).boxShadow") == "none"
    assert column_text(columns(page).first) == "I 🙂ok"


def test_on_a_phone_the_alternatives_do_not_hide_their_own_token(visit: Any) -> None:
    page = visit(viewport={"width": 360, "height": 640})
    write(page, stream_of(*[" word"] * 150))
    token = columns(page).first.locator(".token").nth(60)
    token.evaluate("one => one.scrollIntoView({ block: 'end' })")
    token.click()
    panel, place = page.locator("#alternatives").bounding_box(), token.bounding_box()
    assert panel is not None
    assert place is not None
    assert place["y"] + place["height"] <= panel["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_long_texts_of_many_samples_do_not_hold_the_page_up(visit: Any) -> None:
    """Each token was a layer of its own while it appeared, and cards out of sight were laid out with every step: for
    32 samples of 2,000 tokens the page stood still for seconds."""
    page = visit(reduced_motion="no-preference")
    appears = "getComputedStyle(document.querySelector('.token')).animationName"
    write(page, stream_of(*[" word"] * 20))
    assert page.evaluate(appears) == "appear"
    write(page, stream_of(*[" word"] * 2_100))
    assert page.evaluate(appears) == "none"
    assert page.evaluate("getComputedStyle(document.querySelector('.column')).contentVisibility") == "auto"
    write(page, stream_of(" word"))
    assert page.evaluate(appears) == "appear"


# -- settings that stay and travel ----------------------------------------------------------------------------


def test_results_say_what_they_came_of_and_are_dimmed_when_the_form_changes(visit: Any) -> None:
    page = visit()
    expect(page.get_by_label("Seed", exact=True)).to_have_value("")
    choose(page, "Parallel", n=2, max_tokens=4, temperature=0.8)
    sample(page)
    expect(page.locator("#asked-text")).to_have_text(f"Prompt {PROMPT}")
    expect(page.locator("#asked-words")).to_contain_text("Parallel · samples 2 · max tokens 4 · temperature 0.8")
    stale = page.get_by_text("These came of older settings")
    expect(stale).to_be_hidden()
    texts = [column_text(column) for column in columns(page).all()]
    page.get_by_label("Prompt", exact=True).last.fill("Something else")
    expect(stale).to_be_visible()
    assert page.locator("#columns").evaluate("one => getComputedStyle(one).opacity") == "0.5"
    picture(page, "stale")
    page.get_by_role("button", name="Back to these settings").click()
    expect(stale).to_be_hidden()
    expect(page.get_by_label("Prompt", exact=True).last).to_have_value(PROMPT)
    # The seed that was drawn can be kept: the form is then still the one of these results, and gives them again.
    drawn = page.locator("#seed-number").inner_text()
    keep = page.get_by_role("button", name="Keep this seed")
    keep.click()
    expect(page.get_by_label("Seed", exact=True)).to_have_value(drawn)
    expect(keep).to_have_attribute("aria-pressed", "true")
    expect(stale).to_be_hidden()
    sample(page)
    assert [column_text(column) for column in columns(page).all()] == texts
    keep.click()
    expect(page.get_by_label("Seed", exact=True)).to_have_value("")
    sample(page)
    assert page.locator("#seed-number").inner_text() != drawn, "empty, every run draws its own"
    page.get_by_role("button", name="Draw a seed and keep it").click()
    expect(page.get_by_label("Seed", exact=True)).to_have_value(re.compile(r"^\d+$"))
    expect(stale).to_be_visible()


def test_a_strategy_gets_values_that_fit_it(visit: Any) -> None:
    page = visit()
    width, said = page.locator("#control-beam_width"), page.locator("#strategy-hint")
    choose(page, "Parallel", n=8)
    choose(page, "Beams")
    expect(width).to_have_value("8")
    expect(said).to_contain_text("Beam width is 8 now, to hold 8 samples.")
    choose(page, "Groups", num_beam_groups=3)
    choose(page, "Parallel", n=2)
    expect(said).not_to_contain_text("Beam width")
    choose(page, "Groups")
    expect(width).to_have_value("9")
    choose(page, "Parallel", n=9)
    choose(page, "Best of")
    expect(page.locator("#control-best_of")).to_have_value("18")
    choose(page, "Parallel", n=2)
    choose(page, "Best of")
    expect(page.locator("#control-best_of")).to_have_value("18")


def test_the_models_defaults_are_what_empty_fields_mean(visit: Any, url: str) -> None:
    """Written here where the numbers are checked; that a real card has them under this name is checked first."""
    page = visit()
    [real] = httpx.get(f"{url}/v1/models").json()["data"]
    card = {"temperature": 0.3, "top_p": 0.85, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "source": "a card"}
    assert set(real["default_sampling_params"]) == set(card)
    models = {"data": [{**real, "default_sampling_params": card}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    sent: list[dict[str, Any]] = []
    page.on("request", lambda it: sent.append(it.post_data_json) if it.url.endswith("/ramify/stream") else None)
    page.reload()
    temperature = page.get_by_label("Temperature")
    back = page.get_by_role("button", name="Use them")
    expect(temperature).to_have_attribute("placeholder", "0.3")
    expect(page.locator("#control-top_k")).to_have_attribute("placeholder", "off")
    expect(page.get_by_text("The model’s defaults: temperature 0.3, top-p 0.85.")).to_be_visible()
    expect(back).to_be_hidden()
    choose(page, "Parallel", n=2, max_tokens=2, temperature=0.7)
    sample(page)
    expect(page.locator("#asked-words")).to_contain_text("temperature 0.7 · top-p 0.85")
    back.click()
    expect(temperature).to_have_value("")
    expect(back).to_be_hidden()
    sample(page)
    choose(page, "Beams", n=2, beam_width=2)
    expect(page.locator("#control-top_p")).to_have_attribute("placeholder", "1")
    sample(page)
    said = [(body.get("temperature"), body.get("top_p"), "top_k" in body) for body in sent]
    assert said == [(0.7, 0.85, False), (0.3, 0.85, False), (None, None, False)], "beams take none of them"


def test_a_run_waits_until_the_model_is_known(visit: Any) -> None:
    """It would say neither the model nor its defaults, and look like the run of another form once they are known."""
    page = visit()
    held: list[Any] = []
    page.route("**/v1/models", lambda route: held.insert(0, route))
    page.reload()
    choose(page, "Parallel", n=2, max_tokens=2)
    page.get_by_role("button", name="Sample", exact=True).click()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    assert not any(asked.endswith("/ramify/stream") for asked in page.evaluate(ASKED))
    held[0].continue_()
    finished(page)
    expect(columns(page)).to_have_count(2)
    expect(page.get_by_text("These came of older settings")).to_be_hidden()


def test_the_form_survives_a_reload_and_travels_in_a_link(visit: Any) -> None:
    page = visit()
    page.get_by_label("Prompt", exact=True).last.fill('Two & two = "four"\n#5 ünï')
    choose(page, "Best of", n=1, best_of=2, max_tokens=3, temperature=0.9)
    page.locator("#control-score").select_option("mean_logprob")
    page.reload()
    expect(page.get_by_label("Prompt", exact=True).last).to_have_value('Two & two = "four"\n#5 ünï')
    expect(page.get_by_role("radio", name="Best of")).to_be_checked()
    expect(page.locator("#control-score")).to_have_value("mean_logprob")
    sample(page)
    drawn, texts = page.locator("#seed-number").inner_text(), [column_text(column) for column in columns(page).all()]
    address = link(page)
    assert f"&seed={drawn}" in address, "with the seed of what is shown"
    other = visit(address)
    expect(other.get_by_label("Prompt", exact=True).last).to_have_value('Two & two = "four"\n#5 ünï')
    expect(other.get_by_label("Seed", exact=True)).to_have_value(drawn)
    expect(other.locator("#control-temperature")).to_have_value("0.9")
    expect(columns(other)).to_have_count(0)  # a link runs nothing
    assert "#" not in other.url, "the form is what counts from here on"
    sample(other)
    assert [column_text(column) for column in columns(other).all()] == texts
    # A chat travels too, into a page that is open already; what cannot be read is said and changes nothing.
    other.get_by_role("tab", name="Chat").click()
    other.get_by_role("textbox", name="Message of the user").fill("<b>Hi</b>")
    chat = link(other)
    other.get_by_role("tab", name="Prompt").click()
    other.evaluate(f"location.hash = {json.dumps(chat.partition('#')[2])}")
    expect(other.get_by_role("tab", name="Chat")).to_have_attribute("aria-selected", "true")
    expect(other.get_by_role("textbox", name="Message of the user")).to_have_value("<b>Hi</b>")
    other.evaluate("location.hash = 'try?strategy=beam&messages=[]&model=another'")
    expect(other.get_by_role("alert").first).to_contain_text("for the model another, which this server does not have")
    other.evaluate(f"location.hash = {json.dumps(chat.partition('#')[2])}")
    expect(other.get_by_role("alert").first).to_be_hidden()
    other.evaluate("location.hash = 'try?strategy=nonsense&messages={'")
    expect(other.get_by_role("alert").first).to_contain_text("cannot be read")
    expect(other.get_by_role("textbox", name="Message of the user")).to_have_value("<b>Hi</b>")


def test_the_history_shows_runs_again(visit: Any) -> None:
    page = visit()
    dialog = page.get_by_role("dialog", name="Runs")
    runs = dialog.locator(".run")
    for prompt in ("The first", "The second"):
        page.get_by_label("Prompt", exact=True).last.fill(prompt)
        choose(page, "Parallel", n=2, max_tokens=3, temperature=0.8)
        sample(page)
        if prompt == "The first":
            texts = [column_text(column) for column in columns(page).all()]
            seed = page.locator("#seed-number").inner_text()
    page.get_by_role("button", name="History", exact=True).click()
    expect(runs).to_have_count(2)
    expect(runs.first).to_contain_text("The second")
    expect(dialog).to_contain_text("in this browser alone")
    picture(page, "history")
    runs.nth(1).click()
    expect(dialog).to_be_hidden()
    assert [column_text(column) for column in columns(page).all()] == texts, "shown again without a run"
    expect(page.locator("#asked-text")).to_have_text("Prompt The first")
    expect(page.get_by_text("These came of older settings")).to_be_hidden()
    # After a reload the settings are there, and the seed gives the same texts.
    page.reload()
    page.get_by_role("button", name="History", exact=True).click()
    runs.nth(1).click()
    expect(page.get_by_label("Seed", exact=True)).to_have_value(seed)
    sample(page)
    assert [column_text(column) for column in columns(page).all()] == texts
    # A run that a reload broke off is among them, too, though nobody stopped it.
    choose(page, "Parallel", n=2, max_tokens=900, temperature=0.8)
    page.get_by_role("button", name="Sample", exact=True).click()
    until(page, "document.querySelectorAll('.token').length > 6")
    page.reload()
    page.get_by_role("button", name="History", exact=True).click()
    expect(runs).to_have_count(4)
    expect(runs.first).to_contain_text("max tokens 900")
    dialog.get_by_role("button", name="Clear the history").click()
    expect(runs).to_have_count(0)
    assert page.evaluate("localStorage.getItem('ramify-runs')") is None
    # It is bounded, and what others wrote there does no harm.
    page.evaluate(
        "localStorage.setItem('ramify-runs', JSON.stringify([1, null, {time: 1, settings: {strategy: 'x'}}]))"
    )
    page.keyboard.press("Escape")
    page.get_by_role("button", name="History", exact=True).click()
    expect(runs).to_have_count(0)


def test_the_pages_own_rules(visit: Any) -> None:
    """The parts without a view, as they are served."""
    page = visit()
    told = page.evaluate(
        """async () => {
            const { legend } = await import('/playground/legend.js');
            const { Search } = await import('/playground/search.js');
            const { roundUp } = await import('/playground/shade.js');
            const { sound } = await import('/playground/settings.js');
            const { History } = await import('/playground/history.js');
            const search = new Search({}, {}, {}, { teacher: 'a', theta: 'b' });
            const words = () => legend('nothing', search).map((part) => part.textContent).join(' ');
            const token = (kl_teacher, kl_theta) => ({ child: 0, parent: 0, position: 0, logprob: -1, text: '',
                mixture: { alpha: 0.5, kl_teacher, kl_theta } });
            const said = [words()];
            search.take({ steps: [{ tokens: [token(0.03, 0.03)], standings: [] }] });
            said.push(words());
            search.take({ steps: [{ tokens: [token(0.1, 0.3)], standings: [] }] });
            said.push(words());
            const history = new History(() => {});
            for (let i = 0; i < 40; i += 1) {
                const run = new Search({ strategy: 'parallel', values: {} }, {}, {}, null);
                run.take({ type: 'start', id: String(i) });
                history.add(run, { strategy: 'parallel', prompt: 'p'.repeat(10), values: {} });
            }
            return {
                said,
                scales: [0, 0.07, 0.2, 0.21, 3, 80].map(roundUp),
                kept: JSON.parse(localStorage.getItem('ramify-runs')).length,
                refused: [null, 3, { strategy: 'x' }].map(sound),
                sound: sound({ strategy: 'beam', values: { n: 3, seed: '1', evil: 'x' }, messages: [{ role: 'x' }] }),
            };
        }"""
    )
    nothing, one_line, two_lines = told["said"]
    assert "no KL" in nothing
    assert "0 to 0.05 nats: the two coincide" in one_line
    assert "KL to the teacher" in two_lines
    assert "both 0 to 0.5 nats" in two_lines
    assert "coincide" not in two_lines
    assert told["scales"] == [0, 0.1, 0.2, 0.5, 5, 100]
    assert told["kept"] == 30
    assert told["refused"] == [None, None, None]
    assert told["sound"]["values"] == {"seed": "1"}
    assert told["sound"]["messages"] == []


# -- as code --------------------------------------------------------------------------------------------------


def test_the_python_it_shows_gives_the_same_texts(visit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = visit()
    page.get_by_label("Prompt", exact=True).last.fill('She said "it\'s\nover", and left')
    choose(page, "Parallel", n=2, max_tokens=6)
    sample(page)
    page.get_by_role("button", name="Copy as Python").click()
    expect(page.get_by_role("dialog", name="This search in Python")).to_be_visible()
    picture(page, "code")
    names: dict[str, Any] = {}
    exec(compile(page.locator("#code").inner_text(), "copied", "exec"), names)
    capsys.readouterr()
    assert isinstance(names["llm"], LLM)
    assert isinstance(names["params"], SamplingParams)
    texts = [completion.text for completion in names["output"].outputs]
    assert texts == [column_text(column) for column in columns(page).all()]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_curl_it_shows_gives_the_same_texts(visit: Any) -> None:
    page = visit()
    page.get_by_label("Prompt", exact=True).last.fill('It\'s "over"; $HOME `date`\nshe said')
    choose(page, "Beams", n=2, beam_width=2, max_tokens=5)
    sample(page)
    page.get_by_role("button", name="Copy as curl").click()
    done = subprocess.run(
        ["bash", "-c", page.locator("#code").inner_text()], capture_output=True, text=True, timeout=60, check=True
    )
    events = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    texts = [output["text"] for output in events[-1]["outputs"]]
    assert texts == [column_text(column) for column in columns(page).all()]


# -- hands and eyes -------------------------------------------------------------------------------------------


def test_it_can_be_used_with_the_keyboard_alone(visit: Any) -> None:
    page = visit()
    prompt = page.get_by_label("Prompt", exact=True).last
    for _ in range(12):
        page.keyboard.press("Tab")
        if prompt.evaluate("one => one === document.activeElement"):
            break
    expect(prompt).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("The capital of Portugal is")
    radio = page.get_by_role("radio", name="Parallel")
    for _ in range(12):
        page.keyboard.press("Tab")
        if radio.evaluate("one => one === document.activeElement"):
            break
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="Best of")).to_be_checked()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    page.keyboard.press("Control+Enter")
    finished(page)
    expect(columns(page)).to_have_count(2)
    tokens = columns(page).first.locator(".token")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
    expect(tokens.first).to_be_focused()
    outline = tokens.first.evaluate("one => getComputedStyle(one).outlineStyle")
    assert outline == "solid", "the focus can be seen"
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    panel = page.locator("#alternatives")
    expect(panel).to_be_visible()
    shown = panel.locator("h2").inner_text()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(2)).to_be_focused()
    expect(panel).to_be_visible()
    assert panel.locator("h2").inner_text() != shown, "the panel follows"
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(tokens.nth(2)).to_be_focused()
    page.keyboard.press("Tab")  # a column is one stop
    expect(columns(page).nth(1).locator(".token").first).to_be_focused()


def test_the_tree_can_be_walked_with_arrows(visit: Any) -> None:
    page = visit()
    choose(page, "Beams", n=2, beam_width=3, max_tokens=5)
    sample(page)
    first = page.locator('.tree .node[tabindex="0"]')
    first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("Step 1:")
    best = page.locator(".tree .node.best").first
    best.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Step 2:")
    page.keyboard.press("Enter")
    expect(page.locator("#alternatives")).to_be_visible()


def test_phone_width(visit: Any) -> None:
    page = visit(viewport=PHONE, is_mobile=True, has_touch=True, device_scale_factor=2)
    picture(page, "phone")
    choose(page, "Parallel", max_tokens=20)
    sample(page)
    lefts = {round(column.bounding_box()["x"]) for column in columns(page).all()}  # type: ignore[index]
    assert len(lefts) == 1, "one below the other"
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    picture(page, "phone-columns")
    columns(page).first.locator(".token").nth(2).tap()
    box = page.locator("#alternatives").bounding_box()
    assert box is not None
    assert (box["x"], box["width"]) == (0, PHONE["width"])
    assert round(box["y"] + box["height"]) == PHONE["height"], "a sheet at the bottom"
    picture(page, "phone-alternatives")
    page.keyboard.press("Escape")
    choose(page, "Beams", n=2, beam_width=3, max_tokens=8)
    sample(page)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], "the tree scrolls by itself"
    picture(page, "phone-tree")


def test_dark_as_the_system_says_or_as_the_button_does(visit: Any) -> None:
    def brightness(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) // 3

    light, dark = visit(color_scheme="light"), visit(color_scheme="dark")
    assert brightness(light) > 230
    assert brightness(dark) < 40
    light.get_by_role("button", name="Colours").click()
    assert brightness(light) < 40
    light.reload()
    assert brightness(light) < 40, "it is remembered"
    picture(dark, "dark")


def test_every_field_has_a_name_and_ids_are_used_once(visit: Any) -> None:
    page = visit()
    nameless = page.evaluate(
        """[...document.querySelectorAll('input, select, textarea, button')]
            .filter(one => !one.labels?.length && !one.getAttribute('aria-label') && !one.textContent.trim())
            .map(one => one.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(set(ids)) == len(ids)
