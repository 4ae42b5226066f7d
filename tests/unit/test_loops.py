"""A plain call's progress bar."""

from __future__ import annotations

import pytest

from ramify import Request, SamplingParams
from ramify.drive import loops
from tests.fake import fake_engine


@pytest.mark.parametrize("visible", [True, False])
def test_tokens_per_second_move_while_no_prompt_ends(
    visible: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loops, "SECONDS_BETWEEN_REFRESHES", 0.0)
    requests = [Request(name, None, [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)) for name in "ab"]
    outputs = loops.Calls(fake_engine()).run(requests, use_tqdm=visible)
    assert [output.request_id for output in outputs] == ["a", "b"]
    shown = capsys.readouterr().err.split("\r")
    if not visible:
        assert shown == [""]
        return
    assert any(" 0/2 " in line and "tokens/s" in line for line in shown)
    assert " 2/2 " in shown[-1]
    assert "tokens/s" in shown[-1]


def test_a_call_without_prompts_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """It showed `Prompts: 0prompt`."""
    assert loops.Calls(fake_engine()).run([], use_tqdm=True) == []
    assert capsys.readouterr().err == ""
