"""Sequences and requests: the documents' method names, one table of legal moves, forks that share nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ramify.engine.request import Request
from ramify.engine.sequence import LEGAL_MOVES, Sequence, SequenceData, SequenceStatus, Track
from ramify.errors import IllegalMoveError, InvalidInputError
from ramify.sampling_params import SamplingParams

WAITING, RUNNING, SWAPPED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED
STOPPED, CAPPED = SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED
ABORTED, IGNORED = SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_IGNORED
FINISHED = {STOPPED, CAPPED, ABORTED, IGNORED}

# Written out a second time: this table is the oracle.
MOVES: dict[SequenceStatus, set[SequenceStatus]] = {
    WAITING: {RUNNING, ABORTED},
    RUNNING: {WAITING, SWAPPED, STOPPED, CAPPED, ABORTED, IGNORED},
    SWAPPED: {RUNNING, WAITING, ABORTED},
    STOPPED: {IGNORED},
    CAPPED: {IGNORED},
    ABORTED: set(),
    IGNORED: set(),
}
PATHS: dict[SequenceStatus, list[SequenceStatus]] = {
    WAITING: [],
    RUNNING: [RUNNING],
    SWAPPED: [RUNNING, SWAPPED],
    STOPPED: [RUNNING, STOPPED],
    CAPPED: [RUNNING, CAPPED],
    ABORTED: [ABORTED],
    IGNORED: [RUNNING, STOPPED, IGNORED],
}


def sequence_at(status: SequenceStatus) -> Sequence:
    sequence = Sequence("walker", [1, 2, 3])
    for step in PATHS[status]:
        sequence.move(step)
    assert sequence.status is status
    return sequence


# -- the documents' names ------------------------------------------------------------------------------------


def test_the_documents_methods_answer_for_prompt_and_output() -> None:
    sequence = Sequence("s", [11, 12, 13], request_id="r")
    assert (sequence.get_len(), sequence.get_prompt_len(), sequence.get_output_len()) == (3, 3, 0)
    assert sequence.get_last_token_id() == 13
    sequence.add_token_id(21, -0.5)
    sequence.add_token_id(22)
    for holder in (sequence, sequence.data):
        assert (holder.get_len(), holder.get_prompt_len(), holder.get_output_len()) == (5, 3, 2)
        assert holder.prompt_token_ids == [11, 12, 13]
        assert holder.output_token_ids == [21, 22]
        assert holder.get_token_ids() == [11, 12, 13, 21, 22]
        assert holder.get_last_token_id() == 22
        assert holder.cumulative_logprob == -0.5
    assert (sequence.seq_id, sequence.request_id, sequence.status) == ("s", "r", WAITING)


def test_the_states_have_the_documents_names() -> None:
    assert {status.name: status.value for status in SequenceStatus} == {
        "WAITING": "waiting",
        "RUNNING": "running",
        "SWAPPED": "swapped",
        "FINISHED_STOPPED": "finished_stopped",
        "FINISHED_LENGTH_CAPPED": "finished_length_capped",
        "FINISHED_ABORTED": "finished_aborted",
        "FINISHED_IGNORED": "finished_ignored",
    }


def test_the_callers_list_is_copied() -> None:
    prompt = [1, 2]
    sequence, request = Sequence("s", prompt), Request("r", prompt_token_ids=prompt)
    prompt.append(3)
    assert sequence.get_token_ids() == request.prompt_token_ids == [1, 2]


def test_a_sequence_takes_a_prompt_or_data_and_not_both() -> None:
    data = SequenceData([1], [2], -0.5)
    assert Sequence("s", data=data).get_token_ids() == [1, 2]
    with pytest.raises(InvalidInputError, match="either prompt_token_ids or data"):
        Sequence("s")
    with pytest.raises(InvalidInputError, match="either prompt_token_ids or data"):
        Sequence("s", [1], data=data)


def test_a_request_is_its_root_and_the_forks_that_grow_from_it() -> None:
    params = SamplingParams(n=3)
    request = Request("r", "two words", [5, 6], params)
    first = request.fork_sequence("first")
    first.add_token_id(7, -1.0)
    second = request.fork_sequence("second", "first")
    assert request.get_seqs() == [request.root, first, second]
    assert request.get_num_seqs() == 3
    assert [sequence.output_token_ids for sequence in request.get_seqs()] == [[], [7], [7]]
    assert {sequence.request_id for sequence in request.get_seqs()} == {"r"}
    assert all(sequence.sampling_params is params for sequence in request.get_seqs())
    assert request.get_seq("second") is second
    with pytest.raises(InvalidInputError, match="'third'"):
        request.get_seq("third")
    with pytest.raises(InvalidInputError, match="'third'"):
        request.fork_sequence("fourth", "third")
    with pytest.raises(InvalidInputError, match="'first' already"):
        request.fork_sequence("first")
    assert request.get_num_seqs() == 3, "a refused fork leaves nothing behind"


@pytest.mark.parametrize("prompt_token_ids", [None, []])
def test_a_request_without_tokens_is_refused(prompt_token_ids: list[int] | None) -> None:
    with pytest.raises(InvalidInputError, match="prompt"):
        Request("r", "text", prompt_token_ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from(SequenceStatus), min_size=1, max_size=5))
def test_a_request_sorts_its_sequences_by_state(states: list[SequenceStatus]) -> None:
    request = Request("r", prompt_token_ids=[1])
    sequences = [request.root, *(request.fork_sequence(str(index)) for index in range(1, len(states)))]
    for sequence, state in zip(sequences, states, strict=True):
        for step in PATHS[state]:
            sequence.move(step)
    for status in SequenceStatus:
        expected = [sequence for sequence, state in zip(sequences, states, strict=True) if state is status]
        assert request.get_seqs(status) == expected
        assert request.get_num_seqs(status) == len(expected)
    assert request.get_finished_seqs() == [sequence for sequence in sequences if sequence.status in FINISHED]
    assert request.get_unfinished_seqs() == [sequence for sequence in sequences if sequence.status not in FINISHED]
    assert request.is_finished() == (set(states) <= FINISHED)
    assert request.status in states
    assert request.status.is_finished() == request.is_finished()
    if request.is_finished() and set(states) != {IGNORED}:
        assert request.status is not IGNORED, "a request was not ignored because some of its samples were"


# -- the table of moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", list(SequenceStatus))
@pytest.mark.parametrize("start", list(SequenceStatus))
def test_a_move_succeeds_exactly_where_the_table_has_it(start: SequenceStatus, target: SequenceStatus) -> None:
    sequence = sequence_at(start)
    if target in MOVES[start]:
        sequence.move(target)
        assert sequence.status is target
    else:
        with pytest.raises(IllegalMoveError, match=f"walker: {start.name} cannot become {target.name}"):
            sequence.move(target)
        assert sequence.status is start


def test_the_published_table_is_the_one_that_is_followed() -> None:
    assert {start: set(targets) for start, targets in LEGAL_MOVES.items()} == MOVES


def test_the_status_cannot_be_assigned_past_the_table() -> None:
    sequence = sequence_at(STOPPED)
    with pytest.raises(AttributeError):
        sequence.status = RUNNING  # type: ignore[misc]
    assert sequence.status is STOPPED


@pytest.mark.parametrize("status", list(SequenceStatus))
def test_a_state_is_finished_when_its_name_says_so(status: SequenceStatus) -> None:
    assert status.is_finished() is (status in FINISHED)
    assert sequence_at(status).is_finished() is (status in FINISHED)


# -- moves, tokens and forks in any order --------------------------------------------------------------------


@dataclass
class Expected:
    """What the oracle knows of one sequence."""

    output: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    history: list[SequenceStatus] = field(default_factory=lambda: [WAITING])


class SequencesWalk(RuleBasedStateMachine):
    """A family of forks; whatever is done to one of them, the others stay as they are."""

    @initialize(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def start(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.sequences = [Sequence("0", prompt)]
        self.expected = [Expected()]

    @rule(data=st.data(), status=st.sampled_from(SequenceStatus))
    def try_to_move(self, data: st.DataObject, status: SequenceStatus) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        sequence, history = self.sequences[index], self.expected[index].history
        if status in MOVES[history[-1]]:
            sequence.move(status)
            history.append(status)
        else:
            with pytest.raises(IllegalMoveError):
                sequence.move(status)

    @rule(data=st.data())
    def move_without_finishing(self, data: st.DataObject) -> None:
        """Most moves end a sequence: without this rule few would ever be swapped or preempted."""
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        history = self.expected[index].history
        if history[-1] not in FINISHED:
            status = data.draw(st.sampled_from(sorted(MOVES[history[-1]] - FINISHED, key=str)))
            self.sequences[index].move(status)
            history.append(status)

    @rule(data=st.data(), token_id=st.integers(0, 99), logprob=st.floats(-20, 0))
    def append(self, data: st.DataObject, token_id: int, logprob: float) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.sequences[index].add_token_id(token_id, logprob)
        self.expected[index].output.append(token_id)
        self.expected[index].cumulative_logprob += logprob

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.sequences.append(self.sequences[index].fork(str(len(self.sequences))))
        parent = self.expected[index]
        self.expected.append(Expected(list(parent.output), parent.cumulative_logprob, list(parent.history)))

    @invariant()
    def every_sequence_holds_what_was_done_to_it_alone(self) -> None:
        for index, (sequence, expected) in enumerate(zip(self.sequences, self.expected, strict=True)):
            assert sequence.seq_id == str(index)
            assert sequence.get_token_ids() == self.prompt + expected.output
            assert sequence.cumulative_logprob == expected.cumulative_logprob
            assert sequence.status is expected.history[-1]
            assert sequence.num_missing(sequence.tracks[0]) == len(self.prompt) + len(expected.output)

    @invariant()
    def what_has_finished_never_comes_back(self) -> None:
        for sequence, expected in zip(self.sequences, self.expected, strict=True):
            assert sequence.is_finished() is any(status in FINISHED for status in expected.history)
            for earlier, later in pairwise(expected.history):
                assert later in FINISHED or earlier not in FINISHED


SequencesWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSequencesWalk = SequencesWalk.TestCase


def test_a_fork_keeps_everything_but_the_name() -> None:
    params = SamplingParams(n=2)
    parent = Sequence("parent", [1, 2], request_id="r", sampling_params=params, child=3)
    parent.add_token_id(9, -0.25)
    parent.tracks[0].num_computed = 2
    parent.move(RUNNING)
    child = parent.fork("child")
    assert (child.seq_id, child.request_id, child.child) == ("child", "r", 3)
    assert child.sampling_params is params
    assert child.status is RUNNING
    assert child.get_token_ids() == [1, 2, 9]
    assert child.cumulative_logprob == -0.25
    assert [track.num_computed for track in child.tracks] == [2]
    assert child.tracks[0].key != parent.tracks[0].key, "each names a block table of its own"


def test_even_a_forks_lists_and_counts_are_its_own() -> None:
    parent = Sequence("parent", [1, 2])
    parent.add_token_id(9)
    first, second = parent.fork("first"), parent.fork("second")
    first.data.output_token_ids[0] = 100
    first.data.prompt_token_ids[0] = 100
    first.tracks[0].num_computed = 3
    assert parent.get_token_ids() == second.get_token_ids() == [1, 2, 9]
    assert parent.tracks[0].num_computed == second.tracks[0].num_computed == 0


# -- tracks --------------------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 99), max_size=8)
prompts = st.lists(st.integers(0, 99), min_size=1, max_size=8)


@settings(deadline=None)
@given(teacher=prompts, student=prompts, output=tokens, data=st.data())
def test_two_tracks_with_prompts_of_their_own_grow_by_the_same_tokens(
    teacher: list[int], student: list[int], output: list[int], data: st.DataObject
) -> None:
    tracks = [Track("s/0", 0, teacher), Track("s/1", 1, student)]
    sequence = Sequence("s", teacher, tracks=tracks)
    for token_id in output:
        sequence.add_token_id(token_id)
    for track, prompt in zip(tracks, (teacher, student), strict=True):
        seen = prompt + output  # the slow oracle: the whole text of this model
        track.num_computed = data.draw(st.integers(0, len(seen)))
        assert sequence.num_tokens(track) == len(seen)
        assert sequence.num_missing(track) == len(seen[track.num_computed :])
        for start in range(len(seen) + 1):
            for end in range(start, len(seen) + 1):
                assert sequence.tokens_between(track, start, end) == seen[start:end]


@settings(deadline=None)
@given(teacher=prompts, student=prompts, computed=st.tuples(st.integers(0, 8), st.integers(0, 8)))
def test_a_fork_of_two_tracks_counts_for_itself(
    teacher: list[int], student: list[int], computed: tuple[int, int]
) -> None:
    tracks = [Track("s/0", 0, teacher, computed[0]), Track("s/1", 1, student, computed[1])]
    sequence = Sequence("s", teacher, tracks=tracks)
    fork = sequence.fork("f")
    assert [(track.model, track.prompt_token_ids, track.num_computed) for track in fork.tracks] == [
        (0, teacher, computed[0]),
        (1, student, computed[1]),
    ]
    assert len({track.key for track in [*tracks, *fork.tracks]}) == 4
    for track in fork.tracks:
        track.num_computed += 1
    fork.add_token_id(5)
    assert tuple(track.num_computed for track in tracks) == computed
    assert [sequence.num_tokens(track) for track in tracks] == [len(teacher), len(student)]
    assert [fork.num_tokens(track) for track in fork.tracks] == [len(teacher) + 1, len(student) + 1]
