"""Values of the engine as messages, and back: configurations, requests, outputs, exceptions."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from ramify import errors
from ramify.config import EngineConfig
from ramify.engine.capacity import Capacity
from ramify.engine.plan import TokenReport
from ramify.engine.request import Request
from ramify.engine.search.logprob_rows import LogprobRows
from ramify.errors import EngineFaultError, RamifyError, UnsupportedError
from ramify.outputs import (
    CompletionOutput,
    ContinuationLogprobs,
    GrownToken,
    LogprobRow,
    PairLogprobs,
    RequestMetrics,
    RequestOutput,
)
from ramify.remote.messages import (
    Add,
    Facts,
    Grown,
    Growth,
    Output,
    PromptRow,
    Report,
    Sample,
    integers,
    integers_of,
)
from ramify.sampling_params import OutputKind, SamplingParams, SamplingStrategy

# -- configurations --------------------------------------------------------------------------------------------


def options_of(config: EngineConfig) -> dict[str, Any]:
    """What EngineConfig.from_options takes."""
    parts = (config.model_config, config.cache_config, config.scheduler_config)
    return {name: value for part in parts for name, value in asdict(part).items()}


def facts_of(capacity: Capacity) -> Facts:
    return Facts(**asdict(capacity))


def capacity_of(facts: Facts) -> Capacity:
    return Capacity(**{field.name: getattr(facts, field.name) for field in fields(Capacity)})


# -- requests --------------------------------------------------------------------------------------------------


def is_ranked_here(params: SamplingParams) -> bool:
    """Whether a caller's own function ranks the samples, which it does in the caller's process."""
    return callable(params.score)


def is_told(params: SamplingParams) -> bool:
    """Whether tokens are told one by one, and outputs made of them where they are read."""
    streams = params.output_kind in (OutputKind.DELTA, OutputKind.CUMULATIVE)
    alone = (SamplingStrategy.PARALLEL, SamplingStrategy.DIVERSE, SamplingStrategy.ARITHMETIC)
    goes_alone = params.resolved_strategy in alone
    return streams and (goes_alone or is_ranked_here(params))


NO_PROCESSORS = (
    "logits_processors cannot be used with an engine in a process of its own: functions do not cross. Start it with "
    "engine_process=False (--no-engine-process)"
)


def check_crosses(params: SamplingParams, refusal: str = NO_PROCESSORS) -> None:
    if params.logits_processors:
        raise UnsupportedError(refusal)


class SentParams:
    """Parameters as the engine is to see them: samples that are ranked here are plain samples there.

    Made once for all requests that have the same.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.is_told = is_told(params)
        changes: dict[str, Any] = {}
        if is_ranked_here(params):
            changes = {"n": params.num_samples, "best_of": None, "strategy": None, "score": "cumulative_logprob"}
        if self.is_told:
            changes["output_kind"] = OutputKind.FINAL_ONLY
        sent = replace(params, **changes) if changes else params
        said = {field.name: getattr(sent, field.name) for field in fields(sent)}
        self.said = {name: value for name, value in said.items() if value != DEFAULTS[name]}


def add_of(model: int, number: int, request: Request, sent: SentParams) -> Add:
    own, *others = request.root.tracks
    return Add(
        model=model,
        number=number,
        token_ids=integers(own.prompt_token_ids),
        params=sent.said,
        priority=request.priority,
        other_prompts=[(track.model, integers(track.prompt_token_ids)) for track in others],
        is_told=sent.is_told,
        seed=request.seed,
        next_token_id=request.next_token_id,
        num_told=request.root.num_told,
    )


DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def request_of(add: Add, request_id: str) -> Request:
    return Request(
        request_id,
        None,
        integers_of(add.token_ids),
        SamplingParams(**add.params),
        priority=add.priority,
        other_prompts=[(model, integers_of(token_ids)) for model, token_ids in add.other_prompts],
        seed=add.seed,
        next_token_id=add.next_token_id,
        num_told=add.num_told,
    )


# -- outputs ---------------------------------------------------------------------------------------------------


def report_message(report: TokenReport) -> Report:
    top_token_ids, top_logprobs = (np.asarray(column) for column in (report.top_token_ids, report.top_logprobs))
    return Report(
        report.logprob,
        report.rank,
        top_token_ids.astype(np.int64).tobytes(),
        top_logprobs.astype(np.float64).tobytes(),
        None if report.processed is None else report_message(report.processed),
        report.kept,
    )


def report_of(message: Report) -> TokenReport:
    return TokenReport(
        message.logprob,
        message.rank,
        np.frombuffer(message.top_token_ids, dtype=np.int64),
        np.frombuffer(message.top_logprobs, dtype=np.float64),
        None if message.processed is None else report_of(message.processed),
        message.kept,
    )


def output_message(number: int, output: RequestOutput, *, is_told: bool) -> Output:
    """Of a told request, whose tokens have been sent, only how its children ended."""
    assert output.metrics is not None, "an engine's outputs have their times"
    times = output.metrics
    return Output(
        number=number,
        finished=output.finished,
        samples=[] if is_told else [_sample(sample) for sample in output.outputs],
        num_cached_tokens=output.num_cached_tokens,
        times=(times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time),
        error=output.error,
        ends=[
            (sample.index, sample.finish_reason, sample.stop_reason)
            for sample in output.outputs
            if is_told and sample.finish_reason is not None
        ],
        prompt_rows=None if output.prompt_logprobs is None else [_prompt_row(row) for row in output.prompt_logprobs],
        growth=[Growth([_grown(token) for token in step.tokens], list(step.standings)) for step in output.growth],
        scored=output.scored if isinstance(output.scored, ContinuationLogprobs) else None,
        compared=output.scored if isinstance(output.scored, PairLogprobs) else None,
    )


def times_of(message: Output) -> RequestMetrics:
    return RequestMetrics(*message.times)


def _sample(sample: CompletionOutput) -> Sample:
    return Sample(
        index=sample.index,
        token_ids=integers(sample.token_ids),
        cumulative_logprob=sample.cumulative_logprob,
        reports=None if sample.logprobs is None else [report_message(each) for each in _reports(sample.logprobs)],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        score=sample.score,
        mixture=None if sample.mixture is None else list(sample.mixture),
        inclusion=sample.inclusion,
        kept=None if sample.kept is None else list(sample.kept),
    )


def _grown(token: GrownToken) -> Grown:
    return Grown(
        child=token.child,
        parent=token.parent,
        position=token.position,
        token_id=token.token_id,
        logprob=token.logprob,
        report=None if token.rows is None else report_message(_reports(token.rows)[0]),
        mixture=token.mixture,
        finish_reason=token.finish_reason,
        stop_reason=token.stop_reason,
    )


def _reports(rows: Sequence[LogprobRow]) -> Sequence[TokenReport]:
    assert isinstance(rows, LogprobRows), "as the engine makes them"
    return rows.reports


def _prompt_row(row: LogprobRow | None) -> PromptRow | None:
    return None if row is None else [(token_id, entry.logprob, entry.rank) for token_id, entry in row.items()]


# -- exceptions ------------------------------------------------------------------------------------------------


def error_of(kind: str, text: str) -> Exception:
    """The exception of that name, ours or one of Python's own; of a stranger's the name is told."""
    for home in (errors, builtins):
        found = getattr(home, kind, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(text)
            except TypeError:  # one of Python's that wants more than a text
                break
    return EngineFaultError(f"{kind}: {text}")


def own_error_of(kind: str, text: str) -> RamifyError:
    """What ends a request is always an exception of ours."""
    error = error_of(kind, text)
    return error if isinstance(error, RamifyError) else EngineFaultError(f"{kind}: {text}")
