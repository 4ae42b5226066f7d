"""Raw and processed logprobs together, as the server's choices, the command's JSON and its table show them."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from ramify import CompletionOutput, RequestOutput, SamplingParams
from ramify.cli.as_json import as_json
from ramify.cli.view import show_side_by_side
from tests.drive import finish
from tests.fake import fake_engine


@pytest.fixture(scope="module")
def output() -> RequestOutput:
    params = SamplingParams(seed=5, max_tokens=3, top_k=2, logprobs=1, ignore_eos=True)
    return finish(fake_engine(logprobs_mode="both"), [([1, 2, 3], params)])[0]


def own_logprobs(sample: CompletionOutput) -> tuple[list[float], list[float]]:
    assert sample.logprobs is not None
    assert sample.processed_logprobs is not None
    raw, processed = (
        [row[token_id].logprob for token_id, row in zip(sample.token_ids, rows, strict=True)]
        for rows in (sample.logprobs, sample.processed_logprobs)
    )
    assert all(one < other for one, other in zip(raw, processed, strict=True)), "top-k leaves more for those it keeps"
    return raw, processed


def test_choices_have_one_processed_logprob_per_token(output: RequestOutput) -> None:
    pytest.importorskip("fastapi", reason="the server's packages are not installed")
    from ramify.server.choices import common

    [sample] = output.outputs
    assert common(sample, with_token_ids=True)["processed_logprobs"] == own_logprobs(sample)[1]
    plain = finish(fake_engine(), [([1, 2, 3], SamplingParams(max_tokens=2, logprobs=1))])[0].outputs[0]
    assert "processed_logprobs" not in common(plain, with_token_ids=False)


def test_json_has_both_rows(output: RequestOutput) -> None:
    [shown] = as_json(output, seed=5)["outputs"]
    raw, processed = own_logprobs(output.outputs[0])
    for name, wanted in (("logprobs", raw), ("processed_logprobs", processed)):
        rows = zip(shown["token_ids"], shown[name], strict=True)
        got = [next(entry["logprob"] for entry in row if entry["token_id"] == token_id) for token_id, row in rows]
        assert got == wanted


def test_the_table_shows_what_filters_made_of_a_chance(output: RequestOutput) -> None:
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        show_side_by_side(console, [output])
    for before, after in zip(*own_logprobs(output.outputs[0]), strict=True):
        assert f"{math.exp(before):.1%} → {math.exp(after):.1%}" in captured.get()
