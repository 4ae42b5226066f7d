"""A child: one continuation of the prompt, its text, its end, and how much of it has been handed out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ramify.engine.demands import Demands
from ramify.engine.plan import StepResult, TokenReport
from ramify.engine.search.advance import Continuation
from ramify.engine.search.logprob_rows import Decode, LogprobRows
from ramify.engine.sequence import Sequence, SequenceStatus
from ramify.outputs import CompletionOutput, FinishReason, GrownToken, Kept, MixtureReport, RequestMetrics
from ramify.sampling_params import SamplingParams
from ramify.text.stream import LateText, TextStream


class Ledger(Protocol):
    """Hears of the tokens of a request's children as they are taken, and which of them was a child's last."""

    def begin(self, num_cached_tokens: int, times: RequestMetrics) -> None:
        """The first token comes next."""
        ...

    def enter(
        self, child: int, token_id: int, logprob: float, report: TokenReport | None, mixture: MixtureReport | None
    ) -> None: ...

    def end(self, child: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        """With the token entered last."""
        ...


@dataclass(slots=True)
class Child:
    sequence: Sequence
    text: TextStream | LateText
    finish_reason: FinishReason | None = None
    reports: list[TokenReport] = field(default_factory=list)
    mixtures: list[MixtureReport] = field(default_factory=list)
    last_token_time: float | None = None
    ended_by_token: bool = False  # the last token is the end itself, and no content
    sent_characters: int = 0
    sent_tokens: int = 0
    is_end_sent: bool = False
    ledger: Ledger | None = None  # where somebody wants to hear of its tokens

    @property
    def is_empty(self) -> bool:
        """No token before the one that ended it."""
        return len(self.sequence.output_token_ids) == self.ended_by_token

    @property
    def has_news(self) -> bool:
        """Whether anything came since its last delta."""
        has_ended = self.finish_reason is not None and not self.is_end_sent
        return has_ended or self.sent_tokens < len(self.sequence.output_token_ids)

    def fork(self, sequence: Sequence) -> Child:
        text = self.text
        return Child(
            sequence,
            text.fork(sequence.output_token_ids) if isinstance(text, LateText) else text.fork(),
            reports=list(self.reports),
            mixtures=list(self.mixtures),
            last_token_time=self.last_token_time,
            ledger=self.ledger,
        )

    def become(self, sibling: Child) -> None:
        """What `fork` of that sibling would be, from now on; what it was is forgotten."""
        text = sibling.text
        self.sequence.become(sibling.sequence)
        self.text = text.fork(self.sequence.output_token_ids) if isinstance(text, LateText) else text.fork()
        self.reports[:] = sibling.reports
        self.mixtures[:] = sibling.mixtures
        self.last_token_time = sibling.last_token_time

    def append(self, token: Continuation, demands: Demands, now: float) -> float | None:
        """Takes a token, and ends if that was its last; returns the time since the one before it, None for a first."""
        latency = None if self.last_token_time is None else now - self.last_token_time
        self.last_token_time = now
        self.sequence.data.add_token_id(token.token_id, token.logprob)
        if token.report is not None:
            self.reports.append(token.report)
        if token.mixture is not None:
            self.mixtures.append(token.mixture)
        if self.ledger is not None:
            self.ledger.enter(self.sequence.child, token.token_id, token.logprob, token.report, token.mixture)
        self.check_end(token.token_id, demands)
        return latency

    def append_watched(
        self, token: Continuation, demands: Demands, now: float, decode: Decode | None
    ) -> tuple[float | None, GrownToken]:
        """The same, and what that did."""
        shown = len(self.text.text)
        latency = self.append(token, demands, now)
        text = self.text.text
        return latency, GrownToken(
            child=token.child,
            parent=token.parent,
            position=len(self.sequence.output_token_ids) - 1,
            token_id=token.token_id,
            logprob=token.logprob,
            text=text[shown:],
            num_taken_back=max(0, shown - len(text)),
            rows=None if token.report is None else LogprobRows([token.token_id], [token.report], decode),
            mixture=token.mixture,
            finish_reason=self.finish_reason,
            stop_reason=self.sequence.stop_reason,
        )

    def stop(self, reason: FinishReason) -> None:
        """Ends it from outside."""
        self.text.end(may_stop=False)
        self.finish_reason = reason
        self.sequence.move(SequenceStatus.FINISHED_ABORTED)

    def completion(self, decode: Decode | None, params: SamplingParams, *, delta: bool = False) -> CompletionOutput:
        """What there is of it; with `delta`, what there is since the last time."""
        text = self.text.visible
        token_ids = self.sequence.output_token_ids
        reports, mixtures = self.reports, self.mixtures
        if delta:
            shown, self.sent_characters = self.sent_characters, len(text)
            given, self.sent_tokens = self.sent_tokens, len(token_ids)
            self.is_end_sent = self.finish_reason is not None
            text, token_ids, reports, mixtures = text[shown:], token_ids[given:], reports[given:], mixtures[given:]
        rows = None if params.logprobs is None else LogprobRows(token_ids, reports, decode)
        return CompletionOutput(
            index=self.sequence.child,
            text=text,
            token_ids=tuple(token_ids),
            cumulative_logprob=self.sequence.cumulative_logprob,
            logprobs=rows,
            finish_reason=self.finish_reason,
            stop_reason=self.sequence.stop_reason,
            mixture=tuple(mixtures) if len(self.sequence.tracks) > 1 else None,
            kept=None if params.return_kept is None else kept_of(reports),
            processed_logprobs=None if rows is None else rows.processed,
        )

    def check_end(self, token_id: int, demands: Demands) -> bool:
        """Ends it if this token, which it has taken, is its last; returns whether it was."""
        length = len(self.sequence.data.output_token_ids)
        may_stop = length >= demands.params.min_tokens
        if token_id in demands.end_token_ids:
            if demands.params.include_stop_str_in_output:
                self.text.push(token_id, may_stop=False)
            else:
                self.text.leave_out()
            self.sequence.stop_reason = token_id if token_id in demands.stop_token_ids else None
            self.ended_by_token = True
            self._end(SequenceStatus.FINISHED_STOPPED, FinishReason.STOP)
        elif self.text.push(token_id, may_stop=may_stop):
            self._end(SequenceStatus.FINISHED_STOPPED, FinishReason.STOP)
        elif length >= demands.longest_output:
            if self.text.end(may_stop=may_stop):
                self._end(SequenceStatus.FINISHED_STOPPED, FinishReason.STOP)
            else:
                self._end(SequenceStatus.FINISHED_LENGTH_CAPPED, FinishReason.LENGTH)
        return self.finish_reason is not None

    def _end(self, status: SequenceStatus, reason: FinishReason) -> None:
        self.text.end(may_stop=False)
        if self.text.stopped_by is not None:
            self.sequence.stop_reason = self.text.stopped_by
        self.finish_reason = reason
        self.sequence.move(status)
        if self.ledger is not None:
            self.ledger.end(self.sequence.child, reason, self.sequence.stop_reason)


def kept_of(reports: Iterable[TokenReport]) -> tuple[Kept, ...]:
    """Of an output whose tokens were asked for what they were drawn from."""
    return tuple(report.kept for report in reports if report.kept is not None)


def go_on_all(grown: Iterable[tuple[Child, Continuation]], now: float) -> list[float | None]:
    """What `append` comes to where a search has decided that all of these go on, and nobody watches.

    Returns the time since the one before each token, None for a first.
    """
    latencies: list[float | None] = []
    for child, (_, number, token_id, logprob, report, mixture) in grown:
        before = child.last_token_time
        latencies.append(None if before is None else now - before)
        child.last_token_time = now
        data = child.sequence.data
        data.output_token_ids.append(token_id)
        data.cumulative_logprob += logprob
        if report is not None:
            child.reports.append(report)
        if mixture is not None:
            child.mixtures.append(mixture)
        if child.ledger is not None:
            child.ledger.enter(number, token_id, logprob, report, mixture)
    return latencies


def append_all(children: Iterable[tuple[int, Child]], result: StepResult, now: float) -> tuple[int, float]:
    """What `append` comes to for many whom nobody watches, but for their ends: each takes the token of its draw.

    Those that have ended already take nothing. Returns how many took one, and the time since the last one of the first:
    it is that of all, if they went on together.
    """
    count, latency = 0, 0.0
    token_ids, logprobs, reports = result.token_ids, result.logprobs, result.reports
    for index, child in children:
        if child.finish_reason is None:
            if not count and child.last_token_time is not None:
                latency = now - child.last_token_time
            child.last_token_time = now
            data = child.sequence.data
            data.output_token_ids.append(token_ids[index])
            data.cumulative_logprob += logprobs[index]
            if index in reports:
                child.reports.append(reports[index])
            if child.ledger is not None:
                report = reports.get(index)
                child.ledger.enter(child.sequence.child, token_ids[index], logprobs[index], report, None)
            count += 1
    return count, latency
