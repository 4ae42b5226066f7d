"""`/ramify/stream`: a search as it grows, step by step, for whoever draws it."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ramify.async_engine import RequestStream
from ramify.outputs import GrownToken, GrowthStep, MixtureReport, RequestOutput
from ramify.request import Request as EngineRequest
from ramify.server.body import JsonRoute
from ramify.server.choices import check_sound, usage
from ramify.server.connection import EventStream, event_of
from ramify.server.growth_events import GrowthEvent
from ramify.server.openapi import failures
from ramify.server.protocol import GrowthRequest
from ramify.server.service import ServedModel, Service, prepared
from ramify.text.codec import TextCodec


class _Documented(JSONResponse):
    """For the OpenAPI document alone: events are JSON, each by itself."""

    media_type = "text/event-stream"


def growth_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["samples"])

    @router.post(
        "/ramify/stream",
        response_class=_Documented,
        response_model=None,
        responses={
            200: {"model": GrowthEvent, "description": "Server-sent events; after the last, `data: [DONE]`."},
            **failures(),
        },
    )
    async def stream_growth(body: GrowthRequest, http: Request) -> Response:
        """Samples one prompt or conversation and tells every step: tokens, alternatives, living beams, scores."""
        model = service.model(body.model)
        params = body.params()
        service.check_samples(1, params)
        name = f"growth-{uuid.uuid4().hex}"

        def make() -> EngineRequest:
            if body.theta_prompt is not None:
                return model.pair_intake("theta_prompt").request(
                    body.prompt or "", params, name, theta_prompt=body.theta_prompt
                )
            if body.theta_messages is not None:
                return model.pair_intake("theta_messages").chat_request(
                    body.messages or [], params, name, theta_messages=body.theta_messages
                )
            if body.prompt is not None:
                return model.intake.request(body.prompt, params, name)
            return model.intake.chat_request(body.messages or [], params, name)

        request = await prepared(make, len(await http.body()))
        client = "" if http.client is None else http.client.host
        with ExitStack() as held:
            held.enter_context(service.room_for(1, client))
            stream = model.engine.submit(request)
            held.callback(stream.close)
            events = _events(stream, model)
            return EventStream(events, seconds=service.config.request_timeout, release=held.pop_all().close)

    return router


async def _events(stream: RequestStream, model: ServedModel) -> AsyncIterator[bytes]:
    codec = model.intake.codec
    yield event_of(start_event(stream.request, model.name))
    num_tokens = 0
    ranking: tuple[int, ...] = ()  # children, best first
    async for output in stream:
        num_tokens += sum(len(step.tokens) for step in output.growth)
        for step in output.growth:
            ranking = tuple(item.child for item in step.standings) or ranking
        yield event_of({"type": "steps", "steps": [_step(step, codec) for step in output.growth]})
        if output.finished:
            check_sound(output)
            yield event_of(end_event(output, ranking, num_tokens))


def start_event(request: EngineRequest, model: str) -> dict[str, Any]:
    params = request.sampling_params
    return {
        "type": "start",
        "id": request.request_id,
        "model": model,
        "strategy": params.resolved_strategy.value,
        "num_children": params.num_children,
        "num_prompt_tokens": len(request.prompt_token_ids),
    }


def end_event(output: RequestOutput, ranking: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    """`num_tokens` counts what was drawn: losers too."""
    outputs = [
        {
            "index": item.index,
            "child": ranking[item.index] if ranking else item.index,
            "text": item.text,
            "finish_reason": None if item.finish_reason is None else item.finish_reason.value,
            "stop_reason": item.stop_reason,
            "cumulative_logprob": _finite(item.cumulative_logprob),
            "score": None if item.score is None else _finite(item.score),
            "num_tokens": len(item.token_ids),
        }
        for item in output.outputs
    ]
    return {"type": "end", "outputs": outputs, "usage": usage([output], num_tokens)}


def _step(step: GrowthStep, codec: TextCodec) -> dict[str, Any]:
    return {
        "tokens": [_token(item, codec) for item in step.tokens],
        "standings": [
            {"child": item.child, "score": _finite(item.score), "finished": item.finished, "group": item.group}
            for item in step.standings
        ],
    }


def _token(item: GrownToken, codec: TextCodec) -> dict[str, Any]:
    row = item.alternatives or {}
    return {
        "child": item.child,
        "parent": item.parent,
        "position": item.position,
        "token_id": item.token_id,
        "token": codec.decode_token(item.token_id) if codec.tokenizer is not None else None,
        "text": item.text,
        "num_taken_back": item.num_taken_back,
        "logprob": _finite(item.logprob),
        "rank": row[item.token_id].rank if row else None,
        "top": [
            {"token_id": token_id, "token": entry.decoded_token, "logprob": _finite(entry.logprob)}
            for token_id, entry in row.items()
        ],
        "mixture": None if item.mixture is None else _mixture(item.mixture),
        "finish_reason": None if item.finish_reason is None else item.finish_reason.value,
        "stop_reason": item.stop_reason,
    }


def _mixture(report: MixtureReport) -> dict[str, Any]:
    return {
        "alpha": report.alpha,
        "kl_teacher": _finite(report.kl_teacher),
        "kl_theta": _finite(report.kl_theta),
        "logprob_teacher": _finite(report.logprob_teacher),
        "logprob_theta": _finite(report.logprob_theta),
    }


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if math.isfinite(number) else None
