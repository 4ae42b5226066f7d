"""Outputs of the engine in the shapes of OpenAI's protocol; the same parts serve plain replies and streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from ramify.outputs import CompletionOutput, FinishReason, Inclusion, LogprobRow, MixtureReport, RequestOutput
from ramify.sampling_params import SamplingParams
from ramify.server.failures import Failure
from ramify.text.codec import TextCodec
from ramify.text.detokenizer import IncrementalDetokenizer

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
    """Raises a Failure if the request did not come to a good end."""
    if output.error is not None:
        raise Failure(500, f"the request failed: {output.error}", code="request_fault")
    if any(sample.finish_reason is FinishReason.ABORT for sample in output.outputs):
        raise Failure(503, "the request was ended because the server is shutting down", code="aborted")


def common(sample: CompletionOutput, *, with_token_ids: bool) -> dict[str, Any]:
    """What completions and chats both say about a sample, in a reply or in a chunk."""
    return {
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason if sample.finish_reason is not None else None,
        **({} if sample.score is None else {"score": _bounded(sample.score)}),
        **({} if sample.inclusion is None else {"inclusion": _inclusion(sample.inclusion)}),
        **({"token_ids": list(sample.token_ids)} if with_token_ids else {}),
        **({} if sample.mixture is None else {"mixture": _columns(sample.mixture)}),
        **({} if sample.processed_logprobs is None else {"processed_logprobs": _own_logprobs(sample)}),
    }


def _own_logprobs(sample: CompletionOutput) -> list[float]:
    """Of each token, by the distribution that it was drawn from."""
    rows = zip(sample.token_ids, sample.processed_logprobs or (), strict=True)
    return [_bounded(row[token_id].logprob) for token_id, row in rows]


def has_news(sample: CompletionOutput, params: SamplingParams, *, with_token_ids: bool | None) -> bool:
    """Whether a chunk would say anything: text, an end, or tokens that are reported one by one."""
    tells_tokens = params.logprobs is not None or sample.mixture is not None or bool(with_token_ids)
    return bool(sample.text) or sample.finish_reason is not None or (tells_tokens and bool(sample.token_ids))


def _inclusion(of: Inclusion) -> dict[str, float]:
    return {"logprob": _bounded(of.logprob), "threshold": _bounded(of.threshold), "weight": _bounded(of.weight)}


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
    """The logprobs of one choice as completions have them, with the places of its tokens in its text.

    A character of several tokens is where each of them is, and what the text leaves out takes no place in it.
    """

    def __init__(
        self, codec: TextCodec, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._codec = codec
        self._offset = 0
        self._text = codec.begin_text(prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def skip(self, text: str) -> None:
        """Moves on by a text that has no logprobs."""
        self._offset += len(text)

    def prompt(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """The places of a prompt's tokens in its text, behind which the output begins."""
        offsets, offset, written = [], 0, self._codec.begin_text(skip_special_tokens=False)
        special = frozenset() if self._codec.tokenizer is None else self._codec.tokenizer.special_token_ids
        for token_id in token_ids:
            place, is_added = offset, token_id in special and not text.startswith(self._own_text(token_id), offset)
            if not is_added:  # as a tokenizer adds BOS, which is not in the text
                place, offset = self._placed(written, token_id, offset)
            offsets.append(min(place, len(text)))
        self.skip(text)
        return offsets

    def rows(
        self, token_ids: Sequence[int], rows: Sequence[LogprobRow | None], before: Sequence[int] = ()
    ) -> dict[str, list[Any]]:
        """`before`: the places of the first tokens, which are a prompt's."""
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [*before]}
        for token_id, row in zip(token_ids, rows, strict=True):
            made["tokens"].append(self._own_text(token_id))
            made["token_logprobs"].append(None if row is None else _bounded(row[token_id].logprob))
            made["top_logprobs"].append(None if row is None else _by_text(row))
        for token_id in token_ids[len(before) :]:
            place, self._offset = self._placed(self._text, token_id, self._offset)
            made["text_offset"].append(place)
        return made

    def _placed(self, text: IncrementalDetokenizer | None, token_id: int, offset: int) -> tuple[int, int]:
        """Where a token begins if the text is so long before it, and how long it is then."""
        if text is None:
            return offset, offset
        grown, own = text.push(token_id), self._own_text(token_id)
        held_back = len(grown) - len(own) if grown.endswith(own) else 0  # by tokens before, until this one came
        return offset + held_back, offset + len(grown)

    def _own_text(self, token_id: int) -> str:
        return self._codec.decode_token(token_id) if self._codec.tokenizer is not None else str(token_id)


def _by_text(row: LogprobRow) -> dict[str, float]:
    """Logprobs by text; of several tokens with the same text the likeliest stays."""
    made: dict[str, float] = {}
    for token_id, entry in row.items():
        text = str(token_id) if entry.decoded_token is None else entry.decoded_token
        made.setdefault(text, _bounded(entry.logprob))
    return made


def prompt_rows(rows: Sequence[LogprobRow | None]) -> list[list[dict[str, Any]] | None]:
    """Prompt logprobs with ids and ranks, one list per token; the first token has none."""
    return [
        None
        if row is None
        else [
            {"token_id": token_id, "token": entry.decoded_token, "logprob": _bounded(entry.logprob), "rank": entry.rank}
            for token_id, entry in row.items()
        ]
        for row in rows
    ]


# -- chat -----------------------------------------------------------------------------------------------------


def chat_logprobs(
    codec: TextCodec, token_ids: Sequence[int], rows: Sequence[LogprobRow], num_top: int
) -> dict[str, Any]:
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        own = _entry(codec, token_id, row[token_id].logprob)
        top = [_entry(codec, other, entry.logprob) for other, entry in islice(row.items(), num_top)]
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": codec.decode_token(token_id) if codec.tokenizer is not None else str(token_id),
        "logprob": _bounded(logprob),
        "bytes": codec.token_bytes(token_id),
    }


def _bounded(number: float) -> float:
    return min(max(number, _LEAST), -_LEAST)
