"""What the OpenAPI document says beside the routes' own types."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ramify.server.failures import ErrorReply

DESCRIPTION = """An inference engine for sampling: one prompt, many continuations.

The routes under `/v1` speak OpenAI's protocol. Fields that OpenAI does not have carry the names of `SamplingParams`:
`top_k`, `min_p`, `strategy`, `beam_width` and others. A field that is not known, or that the chosen strategy cannot
use, is refused and never ignored. With an API key, send it as `Authorization: Bearer KEY`.
"""

_FAILURES = {
    400: "Something in the request is wrong; the message names the field, the value and what is allowed.",
    401: "No API key, or not the right one.",
    404: "There is no model of that name.",
    408: "The request took longer than the server allows.",
    413: "The body is larger than the server allows.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The engine failed, or this request inside it.",
    503: "Not ready: the model is being loaded, or the server is shutting down.",
}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The failures a route may answer with: those named, or all."""
    chosen = statuses or tuple(_FAILURES)
    return {status: {"model": ErrorReply, "description": _FAILURES[status]} for status in chosen}


def streamed_or(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A plain reply of this kind, or with `stream` a stream of chunks."""
    return {
        200: {
            "model": model,
            "description": "The reply; with `stream`, server-sent events that end with `data: [DONE]`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    }
