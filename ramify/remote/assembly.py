"""Assembly: the outputs of one request, put together where they are read, from what the engine's process tells.

Only tokens and numbers come: texts, rows of logprobs with their texts, and a caller's own ranking are made here, as
`engine/search` makes them where the engine is in the same process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ramify.engine.plan import TokenReport
from ramify.engine.request import Request
from ramify.engine.search.child import kept_of
from ramify.engine.search.logprob_rows import Decode, LogprobRows
from ramify.engine.search.ranking import best_of
from ramify.outputs import (
    CompletionOutput,
    ContinuationLogprobs,
    FinishReason,
    GrownToken,
    GrowthStep,
    Logprob,
    LogprobRow,
    MixtureReport,
    PairLogprobs,
    RequestMetrics,
    RequestOutput,
    Standing,
)
from ramify.remote.messages import Begun, Grown, Growth, Output, PromptRow, Sample, StopReason, integers_of
from ramify.remote.packing import is_ranked_here, is_told, report_of, times_of
from ramify.sampling_params import OutputKind, SamplingParams
from ramify.text.codec import TextCodec
from ramify.text.stream import TextStream


@dataclass(slots=True)
class Child:
    """A continuation that is told token by token."""

    number: int
    text: TextStream
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    reports: list[TokenReport] = field(default_factory=list)
    mixtures: list[MixtureReport] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    sent_characters: int = 0
    sent_tokens: int = 0
    is_end_sent: bool = False
    behind: list[int] | None = None  # the tokens that an earlier try had shown, until they are there again

    @property
    def has_news(self) -> bool:
        """Whether anything came since its last delta."""
        has_ended = self.finish_reason is not None and not self.is_end_sent
        return has_ended or self.sent_tokens < len(self.token_ids)

    def repeats(self) -> bool:
        """Whether the last token, which was drawn again, is the one that was shown."""
        assert self.behind is not None
        place = len(self.token_ids) - 1
        is_same = self.token_ids[place] == self.behind[place]
        if place + 1 == len(self.behind):
            self.behind = None
        return is_same

    def completion(
        self, decode: Decode | None, params: SamplingParams, *, is_mixed: bool, delta: bool = False
    ) -> CompletionOutput:
        """What there is of it; with `delta`, what there is since the last time."""
        text, token_ids = self.text.visible, self.token_ids
        reports, mixtures = self.reports, self.mixtures
        if delta:
            shown, self.sent_characters = self.sent_characters, len(text)
            given, self.sent_tokens = self.sent_tokens, len(token_ids)
            self.is_end_sent = self.finish_reason is not None
            text, token_ids, reports, mixtures = text[shown:], token_ids[given:], reports[given:], mixtures[given:]
        rows = None if params.logprobs is None else LogprobRows(token_ids, reports, decode)
        return CompletionOutput(
            index=self.number,
            text=text,
            token_ids=tuple(token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=rows,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            mixture=tuple(mixtures) if is_mixed else None,
            kept=None if params.return_kept is None else kept_of(reports),
            processed_logprobs=None if rows is None else rows.processed,
        )


class Assembly:
    """`earlier` is that of a try that broke off: what it has shown is not shown again, once it is drawn again."""

    def __init__(self, request: Request, codec: TextCodec, earlier: Assembly | None = None) -> None:
        self.request = request
        self._codec = codec
        self._params = request.sampling_params
        self._decode: Decode | None = codec.decode_token if codec.tokenizer is not None else None
        self._is_mixed = len(request.root.tracks) > 1
        self.is_told = is_told(self._params)
        self._is_ranked_here = is_ranked_here(self._params)
        self._is_delta = self._params.output_kind is OutputKind.DELTA
        self._prompt_token_ids = tuple(request.prompt_token_ids)
        self._children: dict[int, Child] = {}
        self._watched: dict[int, TextStream] = {}  # texts of a search that is watched, by child
        self._times: RequestMetrics | None = None
        self._num_cached_tokens = 0
        self._error: str | None = None
        self._finished = False
        self._shown = {} if earlier is None else earlier.shown
        self.divergence: str | None = None  # why it cannot go on where the earlier try ended

    @property
    def shown(self) -> dict[int, Child]:
        """What outputs have told of, by child; the longest that any try has told of."""
        told = dict(self._shown)
        for number, child in self._children.items():
            if number not in told or len(child.token_ids) > len(told[number].token_ids):
                told[number] = child
        return told

    # -- token by token ----------------------------------------------------------------------------------------------

    def begin(self, begun: Begun) -> None:
        self._num_cached_tokens = begun.num_cached_tokens
        self._times = RequestMetrics(begun.arrival_time, begun.first_scheduled_time, begun.first_token_time)

    def take(
        self,
        number: int,
        token_id: int,
        logprob: float,
        *,
        report: TokenReport | None = None,
        mixture: MixtureReport | None = None,
        end: tuple[FinishReason, StopReason] | None = None,
    ) -> None:
        """A child takes a token, which may be its last."""
        child = self._children.get(number) or self._child(number)
        child.token_ids.append(token_id)
        if child.behind is not None and not child.repeats():
            self.divergence = (
                "the engine that drew this stream has ended, and another one draws it differently: the logits of "
                f"sample {number} are too close at token {len(child.token_ids) - 1}. Ask again; batch_invariant=True "
                "rules it out"
            )
        child.cumulative_logprob += logprob
        if report is not None:
            child.reports.append(report)
        if mixture is not None:
            child.mixtures.append(mixture)
        if end is not None:
            child.finish_reason, child.stop_reason = end
        _grow(child.text, token_id, len(child.token_ids), self._params, end)

    def end(self, message: Output) -> None:
        """The end of a request that was told token by token."""
        self._num_cached_tokens, self._times = message.num_cached_tokens, times_of(message)
        self._error, self._finished = message.error, message.finished
        for number, reason, stop_reason in message.ends:
            child = self._child(number)
            if child.finish_reason is None:
                child.finish_reason, child.stop_reason = reason, stop_reason
                child.text.end(may_stop=False)

    def told(self) -> RequestOutput | None:
        """What is due after the tokens of a step; None while they only repeat what was shown."""
        children = self._children
        if self._shown and not self._has_caught_up:
            return None
        if len(children) > 1:  # the first draw makes all of them, not always in their order
            children = {number: children[number] for number in sorted(children)}
        if self._is_delta and not self._finished:
            children = {number: child for number, child in children.items() if child.has_news}
        if self._is_ranked_here:
            samples, _ = self._ranked([self._completion(child) for child in children.values()])
        else:
            samples = [self._completion(child, delta=self._is_delta) for child in children.values()]
        return self._output(samples)

    @property
    def _has_caught_up(self) -> bool:
        """Whether every child is as long again as it was shown."""
        return self._finished or all(
            number in self._children and self._children[number].behind is None for number in self._shown
        )

    def _child(self, number: int) -> Child:
        child = self._children.get(number)
        if child is None:
            child = self._children[number] = Child(
                number, self._codec.make_stream(self._params, self._prompt_token_ids)
            )
            before = self._shown.get(number)
            if before is not None and before.token_ids:
                child.behind = before.token_ids
                child.sent_characters, child.sent_tokens = before.sent_characters, before.sent_tokens
        return child

    def _completion(self, child: Child, *, delta: bool = False) -> CompletionOutput:
        return child.completion(self._decode, self._params, is_mixed=self._is_mixed, delta=delta)

    # -- whole outputs -----------------------------------------------------------------------------------------------

    def whole(self, message: Output) -> RequestOutput:
        self._num_cached_tokens, self._times = message.num_cached_tokens, times_of(message)
        self._error, self._finished = message.error, message.finished
        growth = tuple(self._growth(step) for step in message.growth)
        samples = [self._sample(sample) for sample in message.samples]
        if samples and self._is_ranked_here:
            samples, standings = self._ranked(samples)
            if growth and standings is not None:
                growth = (*growth[:-1], replace(growth[-1], standings=tuple(standings)))
        rows = None if message.prompt_rows is None else [self._row(row) for row in message.prompt_rows]
        scored = self._compared(message.compared) or self._scored(message.scored)
        return replace(self._output(samples), prompt_logprobs=rows, growth=growth, scored=scored)

    def _compared(self, compared: PairLogprobs | None) -> PairLogprobs | None:
        if compared is None:
            return None
        teacher, theta = self._scored(compared.teacher), self._scored(compared.theta)
        assert teacher is not None
        assert theta is not None
        return replace(compared, teacher=teacher, theta=theta)

    def _scored(self, scored: ContinuationLogprobs | None) -> ContinuationLogprobs | None:
        """With the texts of its tokens, which an engine elsewhere does not make."""
        decode = self._decode
        if scored is None or scored.alternatives is None or decode is None:
            return scored
        rows = tuple(
            {token_id: replace(entry, decoded_token=decode(token_id)) for token_id, entry in row.items()}
            for row in scored.alternatives
        )
        return replace(scored, alternatives=rows)

    def _sample(self, message: Sample) -> CompletionOutput:
        token_ids = integers_of(message.token_ids)
        rows = None
        if message.reports is not None:
            rows = LogprobRows(token_ids, [report_of(report) for report in message.reports], self._decode)
        return CompletionOutput(
            index=message.index,
            text=self._text(message, token_ids),
            token_ids=tuple(token_ids),
            cumulative_logprob=message.cumulative_logprob,
            logprobs=rows,
            finish_reason=message.finish_reason,
            stop_reason=message.stop_reason,
            score=message.score,
            mixture=None if message.mixture is None else tuple(message.mixture),
            inclusion=message.inclusion,
            kept=None if message.kept is None else tuple(message.kept),
            processed_logprobs=None if rows is None else rows.processed,
        )

    def _text(self, message: Sample, token_ids: Sequence[int]) -> str:
        text = self._codec.make_stream(self._params, self._prompt_token_ids)
        end = None if message.finish_reason is None else (message.finish_reason, message.stop_reason)
        if end is not None and not self._params.stop_strings:  # a whole text costs less than its parts
            is_said = self._params.include_stop_str_in_output or not _ended_by_token(*end)
            return text.of_whole(token_ids if is_said else token_ids[:-1], ended=True)
        for length, token_id in enumerate(token_ids, start=1):
            _grow(text, token_id, length, self._params, end if length == len(token_ids) else None)
        return text.visible

    def _growth(self, message: Growth) -> GrowthStep:
        # Fork before anything grows: a parent is meant as it was before the step.
        texts = {token.child: self._text_after(token) for token in message.tokens}
        self._watched |= texts
        tokens = tuple(self._grown(token, texts[token.child]) for token in message.tokens)
        if message.standings and not self._is_independent:
            alive = {standing.child for standing in message.standings}
            self._watched = {number: text for number, text in self._watched.items() if number in alive}
        return GrowthStep(tokens, tuple(message.standings))

    @property
    def _is_independent(self) -> bool:
        return self._params.num_together is None

    def _text_after(self, token: Grown) -> TextStream:
        known = self._watched.get(token.parent)
        if known is None:
            return self._codec.make_stream(self._params, self._prompt_token_ids)
        return known if token.child == token.parent else known.fork()

    def _grown(self, token: Grown, stream: TextStream) -> GrownToken:
        shown = len(stream.text)
        end = None if token.finish_reason is None else (token.finish_reason, token.stop_reason)
        _grow(stream, token.token_id, token.position + 1, self._params, end)
        return GrownToken(
            child=token.child,
            parent=token.parent,
            position=token.position,
            token_id=token.token_id,
            logprob=token.logprob,
            text=stream.text[shown:],
            num_taken_back=max(0, shown - len(stream.text)),
            rows=None
            if token.report is None
            else LogprobRows([token.token_id], [report_of(token.report)], self._decode),
            mixture=token.mixture,
            finish_reason=token.finish_reason,
            stop_reason=token.stop_reason,
        )

    def _row(self, row: PromptRow | None) -> LogprobRow | None:
        if row is None:
            return None
        decode = self._decode
        return {
            token_id: Logprob(logprob, rank, None if decode is None else decode(token_id))
            for token_id, logprob, rank in row
        }

    # -- both --------------------------------------------------------------------------------------------------------

    def _ranked(self, samples: Sequence[CompletionOutput]) -> tuple[list[CompletionOutput], list[Standing] | None]:
        """By the caller's own function; the samples are all children in their order."""
        best = best_of([(sample, is_empty(sample)) for sample in samples], self._params.score, self._params.n)
        if best.error is not None:
            self._error = best.error
        return best.outputs, best.standings

    def _output(self, samples: Sequence[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=tuple(samples),
            finished=self._finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._times,
            error=self._error,
        )


def _grow(
    text: TextStream,
    token_id: int,
    length: int,
    params: SamplingParams,
    end: tuple[FinishReason, StopReason] | None,
) -> None:
    """The text after one more token, the last if there is an end: as the engine's own child does it.

    The engine has found the end; its own text, cut at the same stop string, is not sent.
    """
    may_stop = length >= params.min_tokens
    if end is None:
        text.push(token_id, may_stop=may_stop)
        return
    reason, stop_reason = end
    if _ended_by_token(reason, stop_reason):
        if params.include_stop_str_in_output:
            text.push(token_id, may_stop=False)
        text.end(may_stop=False)
    elif not text.push(token_id, may_stop=may_stop):
        text.end(may_stop=may_stop and reason in (FinishReason.STOP, FinishReason.LENGTH))


def _ended_by_token(reason: FinishReason, stop_reason: StopReason) -> bool:
    """Whether the last token itself is the end."""
    return reason is FinishReason.STOP and not isinstance(stop_reason, str)


def is_empty(sample: CompletionOutput) -> bool:
    """No token before the one that ended it."""
    is_end_told = sample.finish_reason is not None and _ended_by_token(sample.finish_reason, sample.stop_reason)
    return len(sample.token_ids) == int(is_end_told)
