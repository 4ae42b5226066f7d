"""A request: one prompt, what is wanted from it, and the sequences that grow from it."""

from __future__ import annotations

from collections.abc import Iterable

from ramify.engine.sequence import Sequence, SequenceStatus, Track
from ramify.errors import InvalidInputError
from ramify.sampling_params import SamplingParams


class Request:
    """What a caller asked for. Its first sequence is the root; others are forks of it or of each other.

    `other_prompts` are what further models see in place of the prompt, as (model, token ids): a track each. All tracks
    grow by the same tokens. `begins_with` names a kept prefix of the prompt (engine/kept.py), and what `keeps` is kept
    under its sequences' ids. The token after the prompt is reported with the prompt's own, if it is named; `num_told`
    says how many of the last tokens are reported at all, so that the rest may come out of the prefix cache. `begun` are
    the last tokens of the prompt that a grammar counts as its own.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None = None,
        prompt_token_ids: Iterable[int] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        other_prompts: Iterable[tuple[int, list[int]]] = (),
        begins_with: str | None = None,
        keeps: bool = False,
        next_token_id: int | None = None,
        num_told: int | None = None,
        seed: int | None = None,
        begun: Iterable[int] = (),
    ) -> None:
        if prompt_token_ids is None:
            raise InvalidInputError(f"request {request_id!r} has no prompt_token_ids")
        self.request_id = request_id
        self.prompt = prompt
        self.sampling_params = sampling_params if sampling_params is not None else SamplingParams()
        self.arrival_time = arrival_time
        self.priority = priority  # lower goes first
        self.begins_with = begins_with
        self.keeps = keeps
        self.next_token_id = next_token_id
        self.begun = tuple(begun)
        self.seed = seed  # where its parameters name none: of whoever gives requests to several engines
        self.root = Sequence(
            f"{request_id}-0", prompt_token_ids, request_id=request_id, sampling_params=self.sampling_params
        )
        for role, (model, token_ids) in enumerate(other_prompts, start=1):
            self.root.tracks.append(Track(f"{self.root.seq_id}/{role}", model, token_ids, role=role))
        self.root.num_told = num_told
        if not all(track.prompt_token_ids for track in self.root.tracks):
            raise InvalidInputError("prompt must have at least one token, got none")
        self.sequences: dict[str, Sequence] = {self.root.seq_id: self.root}

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {len(self.sequences)} sequences, {self.status.value})"

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.root.prompt_token_ids

    @property
    def reported_token_ids(self) -> list[int]:
        """Those that `prompt_logprobs` tell of, but for the first."""
        return self.prompt_token_ids + ([] if self.next_token_id is None else [self.next_token_id])

    @property
    def num_untold(self) -> int:
        """How many positions of the prompt, from the first, nobody asks for the token after."""
        num_told = self.root.num_told
        return 0 if num_told is None else len(self.prompt_token_ids) - num_told

    def fork_sequence(self, seq_id: str, parent_id: str | None = None) -> Sequence:
        """A new sequence of this request, forked from the root or from the one named. All share the prompt's list."""
        if seq_id in self.sequences:
            raise InvalidInputError(f"request {self.request_id!r} has a sequence {seq_id!r} already")
        parent = self.root if parent_id is None else self.get_seq(parent_id)
        self.sequences[seq_id] = child = parent.fork(seq_id, shares_prompt=True)
        return child

    def get_seq(self, seq_id: str) -> Sequence:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise InvalidInputError(f"request {self.request_id!r} has no sequence {seq_id!r}") from None

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """All sequences, or those that stand at `status`."""
        return [seq for seq in self.sequences.values() if status is None or seq.status is status]

    def get_num_seqs(self, status: SequenceStatus | None = None) -> int:
        return len(self.get_seqs(status))

    def get_unfinished_seqs(self) -> list[Sequence]:
        return [seq for seq in self.sequences.values() if not seq.is_finished()]

    def get_finished_seqs(self) -> list[Sequence]:
        return [seq for seq in self.sequences.values() if seq.is_finished()]

    def is_finished(self) -> bool:
        return all(seq.is_finished() for seq in self.sequences.values())

    @property
    def status(self) -> SequenceStatus:
        """The liveliest of its sequences' states; once all have ended, that of the first that counted."""
        states = [seq.status for seq in self.sequences.values()]
        for state in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED, SequenceStatus.WAITING):
            if state in states:
                return state
        return next((state for state in states if state is not SequenceStatus.FINISHED_IGNORED), states[0])
