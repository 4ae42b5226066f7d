"""A sequence: one list of output tokens, one track per model, one status that moves by a table.

Prefill and decode are not states: a track's `num_computed` catches up with its number of tokens, whatever it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from enum import Enum

from ramify.engine.plan import PENDING
from ramify.errors import IllegalMoveError, InvalidInputError
from ramify.sampling_params import SamplingParams
from ramify.structured.matcher import Matcher


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"

    def is_finished(self) -> bool:
        return self in _FINISHED


_FINISHED = frozenset(status for status in SequenceStatus if status.value.startswith("finished"))

# Preemption is a move back: to WAITING (blocks given up, recomputed later) or to SWAPPED (blocks kept elsewhere).
# What ended well may still be IGNORED: best_of draws more than it returns.
LEGAL_MOVES: Mapping[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED_ABORTED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.SWAPPED}) | _FINISHED,
    SequenceStatus.SWAPPED: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED_ABORTED}
    ),
    SequenceStatus.FINISHED_STOPPED: frozenset({SequenceStatus.FINISHED_IGNORED}),
    SequenceStatus.FINISHED_LENGTH_CAPPED: frozenset({SequenceStatus.FINISHED_IGNORED}),
    SequenceStatus.FINISHED_ABORTED: frozenset(),
    SequenceStatus.FINISHED_IGNORED: frozenset(),
}


class SequenceData:
    """The tokens of a sequence and the sum of the output's logprobs."""

    __slots__ = ("cumulative_logprob", "output_token_ids", "prompt_token_ids")

    def __init__(
        self,
        prompt_token_ids: Iterable[int],
        output_token_ids: Iterable[int] = (),
        cumulative_logprob: float = 0.0,
    ) -> None:
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids = list(output_token_ids)
        self.cumulative_logprob = cumulative_logprob

    def add_token_id(self, token_id: int, logprob: float = 0.0) -> None:
        self.output_token_ids.append(token_id)
        self.cumulative_logprob += logprob

    def get_len(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def get_prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    def get_output_len(self) -> int:
        return len(self.output_token_ids)

    def get_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def get_last_token_id(self) -> int:
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    def copy(self, *, shares_prompt: bool = False) -> SequenceData:
        """shares_prompt: with the very list of the prompt's tokens, which nobody changes then."""
        copy = SequenceData(
            () if shares_prompt else self.prompt_token_ids, self.output_token_ids, self.cumulative_logprob
        )
        if shares_prompt:
            copy.prompt_token_ids = self.prompt_token_ids
        return copy


Order = tuple[int, int, int]  # priority, arrival, child


class Track:
    """What one model has seen of a sequence: its own prompt, and how many positions have keys and values.

    The output tokens are the sequence's; a track only counts how far it has followed them. The prompt is shared
    between siblings and never changed, so it is not copied.
    """

    __slots__ = ("key", "model", "num_computed", "prompt_token_ids", "role")

    def __init__(
        self, key: str, model: int, prompt_token_ids: list[int], num_computed: int = 0, *, role: int = 0
    ) -> None:
        self.key = key  # names this track's block table
        self.model = model  # which of the engine's models it belongs to
        self.role = role  # its place among the sequence's tracks: two of them may belong to one model
        self.prompt_token_ids = prompt_token_ids
        self.num_computed = num_computed


class Sequence:
    """One continuation: what it holds, where it stands, which child of its request it is."""

    __slots__ = (
        "_is_finished",
        "_status",
        "child",
        "data",
        "drafted",
        "is_blocked",
        "matcher",
        "num_pending",
        "num_told",
        "order",
        "request_id",
        "sampling_params",
        "seq_id",
        "stop_reason",
        "tracks",
    )

    def __init__(
        self,
        seq_id: str,
        prompt_token_ids: Iterable[int] | None = None,
        *,
        request_id: str | None = None,
        data: SequenceData | None = None,
        sampling_params: SamplingParams | None = None,
        child: int = 0,
        tracks: list[Track] | None = None,
    ) -> None:
        if (prompt_token_ids is None) == (data is None):
            raise InvalidInputError("a Sequence takes either prompt_token_ids or data, and not both")
        self.seq_id = seq_id
        self.request_id = seq_id if request_id is None else request_id  # a sequence by itself is its own request
        self.data = data if data is not None else SequenceData(prompt_token_ids or ())
        self.sampling_params = sampling_params if sampling_params is not None else SamplingParams()
        self.child = child
        self.tracks = tracks if tracks is not None else [Track(f"{seq_id}/0", 0, self.data.prompt_token_ids)]
        self.stop_reason: int | str | None = None
        self.num_told: int | None = None  # of its last prompt positions, how many are reported; None: all
        self.num_pending = 0  # tokens drawn in a step under way: 0 or 1
        self.matcher: Matcher | None = None  # where it stands in its grammar, if it must follow one
        self.drafted: Items[int] = ()  # what the step under way computes behind its tokens, as a guess
        self.is_blocked = False  # what follows depends on the step under way: nothing is scheduled before it is known
        self.order: Order = (0, 0, child)  # who goes first: the lower
        self._status = SequenceStatus.WAITING
        self._is_finished = False  # follows the status: it is asked for every token

    def __repr__(self) -> str:
        lengths = f"{self.get_prompt_len()}+{self.get_output_len()} tokens"
        return f"Sequence({self.seq_id!r}, {lengths}, {self._status.value})"

    @property
    def status(self) -> SequenceStatus:
        return self._status

    def move(self, target: SequenceStatus) -> None:
        """Changes the status, if the table of legal moves has that move."""
        if target not in LEGAL_MOVES[self._status]:
            raise IllegalMoveError(f"{self.seq_id}: {self._status.name} cannot become {target.name}")
        self._status = target
        self._is_finished = target.is_finished()

    @property
    def num_at_once(self) -> int:
        """How many of its last positions all tracks compute in one step, where they are compared or drawn from."""
        return 1 if self.num_told is None or len(self.tracks) == 1 else self.num_told

    def is_finished(self) -> bool:
        return self._is_finished

    def add_token_id(self, token_id: int, logprob: float = 0.0) -> None:
        self.data.add_token_id(token_id, logprob)

    def fork(self, new_seq_id: str, *, shares_prompt: bool = False) -> Sequence:
        """An independent copy that has seen the same tokens. Its blocks are the block manager's to share.

        shares_prompt: as siblings of one request do, so that a thousand samples do not hold a long prompt each.
        """
        tracks = [
            Track(f"{new_seq_id}/{role}", track.model, track.prompt_token_ids, track.num_computed, role=role)
            for role, track in enumerate(self.tracks)
        ]
        copy = Sequence(
            new_seq_id,
            request_id=self.request_id,
            data=self.data.copy(shares_prompt=shares_prompt),
            sampling_params=self.sampling_params,
            child=self.child,
            tracks=tracks,
        )
        copy.order = self.order
        copy.matcher = None if self.matcher is None else self.matcher.fork()
        copy._status = self._status
        copy._is_finished = self._is_finished
        return copy

    def become(self, sibling: Sequence) -> None:
        """What a fork of that sibling, which stands in the same state, would be: by its own name, and with its own
        lists. Its blocks are the block manager's to exchange."""
        data, source = self.data, sibling.data
        data.output_token_ids[:] = source.output_token_ids
        data.cumulative_logprob = source.cumulative_logprob
        self.matcher = None if sibling.matcher is None else sibling.matcher.fork()
        for track, followed in zip(self.tracks, sibling.tracks, strict=True):
            track.num_computed = followed.num_computed

    # -- tokens, as a track's model sees them ----------------------------------------------------------------

    def num_tokens(self, track: Track) -> int:
        return len(track.prompt_token_ids) + len(self.data.output_token_ids) + self.num_pending

    def num_missing(self, track: Track) -> int:
        """Positions that this track's model has still to compute before the next token can be drawn."""
        # `num_tokens`, written out: it is asked for every sequence, several times a step.
        return len(track.prompt_token_ids) + len(self.data.output_token_ids) + self.num_pending - track.num_computed

    def tokens_between(self, track: Track, start: int, end: int) -> list[int]:
        """Tokens at positions start..end of a track: its prompt, then the common output, then what is pending."""
        prompt = track.prompt_token_ids
        shift = len(prompt)
        if start >= shift:
            tokens = self.data.output_token_ids[start - shift : end - shift]
        else:
            tokens = prompt[start:end] + self.data.output_token_ids[: max(0, end - shift)]
        return [*tokens, PENDING] if self.num_pending and len(tokens) == end - start - 1 else tokens

    def end_draft(self) -> int:
        """Once the tokens drawn in a step are known: what was guessed wrong counts as never computed.

        Returns how many drafted tokens were drawn.
        """
        num_output, num_drafted = len(self.data.output_token_ids), len(self.drafted)
        first = self.tracks[0]
        num_before = first.num_computed - len(first.prompt_token_ids) - num_drafted
        for track in self.tracks:
            track.num_computed = len(track.prompt_token_ids) + num_output - 1
        self.drafted = ()
        return max(0, num_output - num_before - 1)

    # -- the documents' names --------------------------------------------------------------------------------

    @property
    def temperature(self) -> float:
        return self.sampling_params.temperature

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.data.prompt_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        return self.data.output_token_ids

    @property
    def cumulative_logprob(self) -> float:
        return self.data.cumulative_logprob

    def get_len(self) -> int:
        return self.data.get_len()

    def get_prompt_len(self) -> int:
        return self.data.get_prompt_len()

    def get_output_len(self) -> int:
        return self.data.get_output_len()

    def get_token_ids(self) -> list[int]:
        return self.data.get_token_ids()

    def get_last_token_id(self) -> int:
        return self.data.get_last_token_id()
