"""Outputs as JSON objects, for programs that read a command's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput, finite


def as_json(output: RequestOutput, seed: int | None) -> dict[str, Any]:
    """An output and the seed that it was drawn with, None where nothing was drawn."""
    return {
        "prompt": output.prompt,
        "seed": seed,
        "error": output.error,
        **_logprobs("prompt_logprobs", output.prompt_logprobs),
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "cumulative_logprob": finite(completion.cumulative_logprob),
                "score": finite(completion.score),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                **_logprobs("logprobs", completion.logprobs),
                **_logprobs("processed_logprobs", completion.processed_logprobs),
                **_alphas(completion),
            }
            for completion in output.outputs
        ],
    }


def _logprobs(name: str, rows: Sequence[LogprobRow | None] | None) -> dict[str, Any]:
    """Only where asked for. Each token's row has the likeliest first, and the token itself last if not among them."""
    if rows is None:
        return {}
    return {name: [None if row is None else _row(row) for row in rows]}


def _alphas(completion: CompletionOutput) -> dict[str, list[float]]:
    """Of two models: the teacher's weight at every token."""
    return {} if completion.mixture is None else {"alpha": [report.alpha for report in completion.mixture]}


def _row(row: LogprobRow) -> list[dict[str, Any]]:
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": finite(entry.logprob), "rank": entry.rank}
        for token_id, entry in row.items()
    ]
