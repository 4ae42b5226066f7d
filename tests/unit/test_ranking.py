"""Callers' own scores, asked of outputs that are whole and of those that are not."""

from __future__ import annotations

from typing import Any

from ramify import CompletionOutput, FinishReason, Request, RequestOutput, SamplingParams
from ramify.sampling_params import OutputKind
from tests.fake import fake_engine


def test_a_score_that_needs_whole_outputs_can_be_streamed() -> None:
    """Found by random schedules: one that failed on outputs on their way left its error on the whole ones too."""

    def score(output: CompletionOutput) -> float:
        if output.finish_reason is None:
            raise ValueError("no end")
        return float(-len(output.token_ids))

    ends = list(range(100))
    ways = {
        kind: SamplingParams(
            n=2, best_of=4, seed=11, max_tokens=12, score=score, stop_token_ids=ends, output_kind=OutputKind(kind)
        )
        for kind in ("final_only", "cumulative")
    }
    outputs: dict[str, list[RequestOutput]] = {}
    for kind, params in ways.items():
        engine = fake_engine()
        engine.add_request(Request("a", None, [1, 2, 3], params))
        outputs[kind] = [output for _ in range(12) if engine.has_unfinished() for output in engine.step()]
    [whole] = outputs["final_only"]
    *on_their_way, last = outputs["cumulative"]
    assert whole.error is None
    assert (last.error, last.outputs) == (None, whole.outputs)
    assert on_their_way
    for output in on_their_way:
        assert output.error is None
        assert FinishReason.ERROR not in [each.finish_reason for each in output.outputs]
        assert [(each.index, each.score) for each in output.outputs] == [(0, None), (1, None)]


def test_a_score_that_fails_hides_no_other_fault() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    def score(_output: CompletionOutput) -> float:
        raise ValueError("no end")

    engine = fake_engine()
    params = SamplingParams(n=1, best_of=2, score=score, logits_processors=[broken])
    engine.add_request(Request("a", None, [1, 2, 3], params))
    [output] = engine.step()
    assert "no such thing" in (output.error or "")
    engine.add_request(Request("b", None, [1, 2, 3], SamplingParams(best_of=2, score=score)))
    engine.step()
    aborted = engine.abort("b")
    assert aborted is not None
    assert (aborted.error, aborted.outputs[0].finish_reason) == (None, FinishReason.ABORT)
