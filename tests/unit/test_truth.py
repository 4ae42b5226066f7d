"""Names that some know as methods and others as values: an `if` is right either way."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from dataclasses import asdict, replace

import pytest

from ramify import CompletionOutput, FinishReason, ParentRequest, SamplingParams
from ramify.foreign.truth import Truth

RUNNING = CompletionOutput(0, "On", (5,), -0.5)
ENDED = replace(RUNNING, finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize(("output", "expected"), [(RUNNING, False), (ENDED, True)])
def test_finished_is_right_as_a_method_and_as_a_value(output: CompletionOutput, expected: bool) -> None:
    # As a plain method it was true in every `if output.finished`.
    assert output.finished() is expected
    assert bool(output.finished) is expected
    assert ("ended" if output.finished else "running") == ("ended" if expected else "running")
    assert (not output.finished) is not expected


def test_the_other_predicates_of_document_4_are_right_either_way() -> None:
    parent = ParentRequest("a", SamplingParams(n=2))
    assert not parent.all_finished
    assert parent.all_finished() is False
    for index in range(2):
        due = parent.record_child_output(f"a-{index}", ENDED)
    assert parent.all_finished
    assert parent.all_finished() is True
    assert due.finished is True, "what is handed out is a plain bool"
    assert SamplingParams(n=2).requires_parallel_sampling
    assert not SamplingParams().requires_parallel_sampling
    assert SamplingParams().requires_parallel_sampling() is False


def test_it_prints_compares_and_adds_up_as_the_bool_does() -> None:
    assert (repr(ENDED.finished), str(RUNNING.finished), f"{ENDED.finished}") == ("True", "False", "True")
    answers: list[object] = [ENDED.finished, RUNNING.finished]
    assert answers == [True, False]
    assert answers == [1, 0]
    assert set(answers) == {True, False}
    assert sum(output.finished for output in (ENDED, RUNNING, ENDED)) == 2
    assert [output for output in (ENDED, RUNNING) if not output.finished] == [RUNNING]
    assert Truth([]) == Truth(0)
    assert Truth("anything") == Truth(True)


def test_outputs_travel_without_it_and_have_it_again() -> None:
    assert "finished" not in repr(ENDED), "it follows from finish_reason and is no field"
    assert "finished" not in asdict(ENDED)
    assert CompletionOutput(**json.loads(json.dumps(asdict(ENDED)))).finished
    for copied in (pickle.loads(pickle.dumps(ENDED)), deepcopy(ENDED)):
        assert copied == ENDED
        assert copied.finished() is True
    assert pickle.loads(pickle.dumps(ENDED.finished))() is True
    assert json.dumps({"finished": ENDED.finished()}) == '{"finished": true}'
    assert json.loads(json.dumps({"finished": ENDED.finished})) == {"finished": True}, "1, which is equal"
