"""Joined deltas are what one reader would have put together, wherever they were cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ramify.drive.merging import merged
from ramify.outputs import CompletionOutput, FinishReason, Logprob, LogprobRow, MixtureReport, RequestOutput
from ramify.sampling_params import OutputKind

STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.text(max_size=3)), max_size=4), min_size=1, max_size=8
)


def delta(step: list[tuple[int, int, str]], seen: dict[int, int], *, is_last: bool) -> RequestOutput:
    """What one step of the engine hands out: every child so far, with what is new of it."""
    for child, _, _ in step:
        seen.setdefault(child, 0)
    outputs = []
    for child in sorted(seen):
        mine = [(token, text) for which, token, text in step if which == child]
        seen[child] += len(mine)
        rows: list[LogprobRow] = [{token: Logprob(-float(token), 1, text)} for token, text in mine]
        outputs.append(
            CompletionOutput(
                index=child,
                text="".join(text for _, text in mine),
                token_ids=tuple(token for token, _ in mine),
                cumulative_logprob=-float(seen[child]),
                logprobs=rows,
                finish_reason=FinishReason.LENGTH if is_last else None,
                mixture=tuple(MixtureReport(token / 100, 0, 0, 0, 0, 0, 0, 0, is_clamped=False) for token, _ in mine),
            )
        )
    return RequestOutput("r", None, (1,), tuple(outputs), finished=is_last)


@given(steps=STEPS, data=st.data())
def test_any_way_of_joining_gives_the_same(steps: list[list[tuple[int, int, str]]], data: st.DataObject) -> None:
    seen: dict[int, int] = {}
    deltas = [delta(step, seen, is_last=place == len(steps) - 1) for place, step in enumerate(steps)]
    read: list[RequestOutput] = []
    waiting: RequestOutput | None = None
    for each in deltas:
        waiting = merged(waiting, each, OutputKind.DELTA)
        if data.draw(st.booleans()) or each.finished:
            read.append(waiting)
            waiting = None
    for child in seen:
        taken = [(token, text) for step in steps for which, token, text in step if which == child]
        parts = [completion for output in read for completion in output.outputs if completion.index == child]
        assert "".join(part.text for part in parts) == "".join(text for _, text in taken)
        assert [token for part in parts for token in part.token_ids] == [token for token, _ in taken]
        assert [min(row) for part in parts for row in part.logprobs or ()] == [token for token, _ in taken]
        weights = [report.alpha for part in parts for report in part.mixture or ()]
        assert weights == [token / 100 for token, _ in taken]
        assert parts[-1].cumulative_logprob == -float(len(taken))
    assert read[-1].finished
    assert {completion.finish_reason for completion in read[-1].outputs} <= {FinishReason.LENGTH}


def test_of_outputs_that_hold_everything_the_later_one_counts() -> None:
    early, late = (delta([(0, token, "x")], {}, is_last=False) for token in (1, 2))
    for kind in (OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY):
        assert merged(early, late, kind) is late
        assert merged(None, early, kind) is early
