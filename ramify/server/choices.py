"""Outputs of the engine in the shapes of OpenAI's protocol; the same parts serve plain replies and streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ramify.outputs import CompletionOutput, FinishReason, LogprobRow, MixtureReport, RequestOutput
from ramify.server.failures import Failure
from ramify.text.codec import TextCodec

# JSON has no infinity; OpenAI writes this number for "cannot be".
_LEAST = -9999.0


def usage(outputs: Iterable[RequestOutput], completion_tokens: int) -> dict[str, Any]:
    outputs = list(outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def check_sound(output: RequestOutput) -> None:
    """Raises the Failure of a request that did not come to a good end."""
    if output.error is not None:
        raise Failure(500, f"the request failed: {output.error}", code="request_fault")
    if any(item.finish_reason is FinishReason.ABORT for item in output.outputs):
        raise Failure(503, "the request was ended because the server is shutting down", code="aborted")


def common(item: CompletionOutput, *, with_token_ids: bool) -> dict[str, Any]:
    """What every choice has, at its end or on the way."""
    return {
        "finish_reason": None if item.finish_reason is None else item.finish_reason.value,
        "stop_reason": item.stop_reason if item.finish_reason is not None else None,
        **({} if item.score is None else {"score": _bounded(item.score)}),
        **({"token_ids": list(item.token_ids)} if with_token_ids else {}),
        **({} if item.mixture is None else {"mixture": _columns(item.mixture)}),
    }


def _columns(reports: Sequence[MixtureReport]) -> dict[str, list[float]]:
    """Each number of the reports as a list with one entry per token."""
    return {
        name: [_bounded(getattr(report, name)) for report in reports]
        if name != "is_clamped"
        else [report.is_clamped for report in reports]
        for name in MixtureReport._fields
    }


# -- completions ----------------------------------------------------------------------------------------------


class CompletionLogprobs:
    """Logprobs of one choice in the older form; counts the characters it has told about."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._offset = 0

    def skip(self, text: str) -> None:
        """Text that stands before what is told about."""
        self._offset += len(text)

    def rows(self, token_ids: Sequence[int], rows: Sequence[LogprobRow | None]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, row in zip(token_ids, rows, strict=True):
            text = self._codec.decode_token(token_id)
            made["tokens"].append(text if self._codec.tokenizer is not None else str(token_id))
            made["text_offset"].append(self._offset)
            made["token_logprobs"].append(None if row is None else _finite(row[token_id].logprob))
            made["top_logprobs"].append(None if row is None else _by_text(row))
            self._offset += len(text)
        return made


def _by_text(row: LogprobRow) -> dict[str, float]:
    """Of tokens that read the same the likeliest counts."""
    made: dict[str, float] = {}
    for token_id, item in row.items():
        made.setdefault(str(token_id) if item.decoded_token is None else item.decoded_token, _finite(item.logprob))
    return made


def prompt_rows(rows: Sequence[LogprobRow | None]) -> list[list[dict[str, Any]] | None]:
    """Prompt logprobs with ids and ranks, one list per token; the first token has none."""
    return [
        None
        if row is None
        else [
            {"token_id": token_id, "token": item.decoded_token, "logprob": _finite(item.logprob), "rank": item.rank}
            for token_id, item in row.items()
        ]
        for row in rows
    ]


# -- chat -----------------------------------------------------------------------------------------------------


def chat_logprobs(
    codec: TextCodec, token_ids: Sequence[int], rows: Sequence[LogprobRow], num_top: int
) -> dict[str, Any]:
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        likeliest = list(row.items())[:num_top]
        own = _entry(codec, token_id, row[token_id].logprob)
        top = [_entry(codec, other, item.logprob) for other, item in likeliest]
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": codec.decode_token(token_id) if codec.tokenizer is not None else str(token_id),
        "logprob": _finite(logprob),
        "bytes": codec.token_bytes(token_id),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _bounded(number: float) -> float:
    return min(max(number, _LEAST), -_LEAST)
