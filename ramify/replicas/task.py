"""Task: a request under way through several engines, and its outputs put together from those of its parts.

A part is some of a request's children, asked of one engine as a request of its own: by their numbers they are the same
children wherever they are drawn. A request that is not divided is its own only part, and its outputs pass unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from secrets import token_hex

from ramify.engine.request import Request
from ramify.engine.search.ranking import best_of
from ramify.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from ramify.remote.assembly import Assembly, is_empty
from ramify.remote.packing import is_told
from ramify.replicas.work_queue import Piece, Work
from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy


def may_split(params: SamplingParams) -> bool:
    """Whether its children go their own ways, and nobody watches how they grow out of one."""
    goes_alone = params.resolved_strategy in (SamplingStrategy.PARALLEL, SamplingStrategy.BEST_OF_N)
    return goes_alone and params.num_samples > 1 and params.output_kind is not OutputKind.GROWTH


@dataclass(eq=False, slots=True)
class Part:
    """Children `first` to `first + count - 1` of a request, at one engine."""

    task: Task
    request: Request
    piece: Piece
    output: RequestOutput | None = None  # the latest
    is_redone: bool = False  # the engine that had it is gone
    earlier: Assembly | None = None  # what that one has told
    num_tokens: int = 0

    @property
    def first(self) -> int:
        return self.piece.first

    @property
    def count(self) -> int:
        return self.piece.count

    def note(self, output: RequestOutput) -> None:
        """One more output of it."""
        self.output = output
        num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
        self.num_tokens = num_tokens + (self.num_tokens if self._is_delta else 0)

    @property
    def _is_delta(self) -> bool:
        return self.request.sampling_params.output_kind is OutputKind.DELTA

    @property
    def num_drawn(self) -> int:
        """Tokens, those of children that are not shown estimated by the others'. Deltas show all, in time."""
        if self._is_delta:
            return self.num_tokens
        shown = len(self.output.outputs) if self.output is not None else 0
        return self.num_tokens * self.count // shown if shown else 0


class Task:
    """`is_over` once its last output, or its failure, has been told."""

    def __init__(self, request: Request, work: Work) -> None:
        self.request = request
        self.work = work  # what waits of it, until all is handed out
        self.is_over = False
        self.parts: list[Part] = []
        self._total = work.left
        self._error: str | None = None

    # -- dividing ------------------------------------------------------------------------------------------------------

    def part(self, piece: Piece) -> Part:
        """What an engine is to be asked for."""
        part = Part(self, self._request(piece), piece)
        self.parts.append(part)
        return part

    def _request(self, piece: Piece) -> Request:
        request, params = self.request, self.request.sampling_params
        if piece.first == 0 and piece.count == self._total:
            return request
        asked = replace(
            params,
            n=piece.count,
            best_of=None,
            strategy=None,
            score="cumulative_logprob",
            child=params.child + piece.first,
            seed=params.seed if params.seed is not None else request.seed,
            prompt_logprobs=params.prompt_logprobs if piece.first == 0 else None,
        )
        own, *others = request.root.tracks
        # Callers name requests as they like, also "job" and "job/0": no part may have the name of another request.
        return Request(
            f"{request.request_id}/{piece.first}/{token_hex(8)}",
            request.prompt,
            own.prompt_token_ids,
            asked,
            priority=request.priority,
            other_prompts=[(track.model, track.prompt_token_ids) for track in others],
        )

    def give_up(self, num_children: int) -> None:
        """So many of its children will not be drawn."""
        self._total -= num_children

    # -- putting together ----------------------------------------------------------------------------------------------

    @property
    def is_divided(self) -> bool:
        return len(self.parts) != 1 or self.parts[0].request is not self.request

    def take(self, part: Part, output: RequestOutput) -> RequestOutput | None:
        """What is due to the caller now that this came from a part; None: nothing yet."""
        part.note(output)
        kind = self.request.sampling_params.output_kind
        grows_again = part.is_redone and kind is OutputKind.CUMULATIVE and not output.finished
        if grows_again and not is_told(self.request.sampling_params):
            return None  # it would be shorter than what was shown before
        if not self.is_divided:
            return output
        self._error = self._error or output.error
        finished = self._all_finished
        if kind is OutputKind.DELTA:
            samples = [replace(sample, index=part.first + sample.index) for sample in output.outputs]
            return self._output(samples, finished=finished)
        if kind is OutputKind.FINAL_ONLY and not finished:
            return None
        return self._output(self._samples(), finished=finished)

    def aborted(self) -> RequestOutput:
        """The end of one of which no engine has anything more to tell."""
        if self.is_divided and any(part.output is not None for part in self.parts):
            samples = self._samples()
            if self.request.sampling_params.output_kind is OutputKind.DELTA:
                samples = [_told_already(sample) for sample in samples]
            return self._output(samples, finished=True)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids),
            outputs=(CompletionOutput(0, "", (), 0.0, finish_reason=FinishReason.ABORT),),
            finished=True,
        )

    @property
    def _all_finished(self) -> bool:
        ended = sum(part.count for part in self.parts if part.output is not None and part.output.finished)
        return ended == self._total

    def _samples(self) -> list[CompletionOutput]:
        """Of all parts that have told of any, as one engine would give them."""
        params = self.request.sampling_params
        samples = [
            replace(sample, index=part.first + sample.index)
            for part in sorted(self.parts, key=lambda part: part.first)
            if part.output is not None
            for sample in part.output.outputs
        ]
        if self._error is not None:  # one child's fault ends them all
            ends = (None, FinishReason.ABORT)
            samples = [
                replace(sample, finish_reason=FinishReason.ERROR) if sample.finish_reason in ends else sample
                for sample in samples
            ]
        if params.resolved_strategy is not SamplingStrategy.BEST_OF_N:
            return samples
        best = best_of([(sample, is_empty(sample)) for sample in samples], params.score, params.n)
        self._error = self._error or best.error
        return best.outputs

    def _output(self, samples: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        told = [part.output for part in self.parts if part.output is not None]
        first = min((part for part in self.parts if part.output is not None), key=lambda part: part.first)
        assert first.output is not None
        return replace(
            first.output,
            request_id=self.request.request_id,
            outputs=tuple(samples),
            finished=finished,
            metrics=_times([output.metrics for output in told if output.metrics is not None], finished=finished),
            error=self._error,
        )


def _told_already(delta: CompletionOutput) -> CompletionOutput:
    """What follows a delta that was told: nothing but how the sample stands."""

    def none_of(rows: object) -> tuple[()] | None:
        return None if rows is None else ()

    return replace(
        delta,
        text="",
        token_ids=(),
        logprobs=none_of(delta.logprobs),
        processed_logprobs=none_of(delta.processed_logprobs),
        mixture=none_of(delta.mixture),
        kept=none_of(delta.kept),
    )


def _times(metrics: list[RequestMetrics], *, finished: bool) -> RequestMetrics | None:
    """From the first that anything happened to, to the last. Processes of one machine have one clock."""
    if not metrics:
        return None
    scheduled = [each.first_scheduled_time for each in metrics if each.first_scheduled_time is not None]
    begun = [each.first_token_time for each in metrics if each.first_token_time is not None]
    ended = [each.finished_time for each in metrics if each.finished_time is not None]
    return RequestMetrics(
        min(each.arrival_time for each in metrics),
        min(scheduled, default=None),
        min(begun, default=None),
        max(ended, default=None) if finished else None,
    )
