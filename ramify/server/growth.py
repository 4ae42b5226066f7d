"""`/ramify/stream`: samples or beams as they grow, step by step, for pages that show them."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ramify.drive.mailroom import RequestStream
from ramify.engine.request import Request as EngineRequest
from ramify.outputs import GrownToken, GrowthStep, MixtureReport, RequestOutput, finite
from ramify.server.body import JsonRoute
from ramify.server.choices import check_sound, usage
from ramify.server.connection import EventStream, client_of
from ramify.server.events import EventSource, event_of
from ramify.server.growth_events import GrowthEvent
from ramify.server.openapi import failures
from ramify.server.preparing import prepared
from ramify.server.protocol import GrowthRequest
from ramify.server.records import Record, record_of
from ramify.server.service import ServedModel, Service
from ramify.text.codec import TextCodec


class _Documented(JSONResponse):
    """Only for the OpenAPI document, which describes the JSON of one event."""

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
        params = body.params(model.intake.defaults)
        service.check_samples(1, params)
        name = f"growth-{uuid.uuid4().hex}"
        record = record_of(http.scope)
        record.request_id = name

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

        may_take_long = body.messages is not None or params.structured_outputs is not None
        with ExitStack() as held:
            held.enter_context(service.room_for(1, client_of(http)))
            request = await prepared(make, len(await http.body()), may_take_long=may_take_long)
            stream = model.engine.submit(request)
            held.callback(stream.close)
            record.prompt_tokens = len(request.prompt_token_ids)
            events = _events(stream, model, record)
            return EventStream(events, seconds=service.config.request_timeout, release=held.pop_all().close)

    return router


def _events(stream: RequestStream, model: ServedModel, record: Record) -> EventSource:
    codec = model.intake.codec
    num_tokens = 0
    ranking: tuple[int, ...] = ()  # children, best first

    def tell(_index: int, output: RequestOutput) -> bytes:
        nonlocal num_tokens, ranking
        num_tokens += sum(len(step.tokens) for step in output.growth)
        record.output_tokens = num_tokens
        for step in output.growth:
            ranking = tuple(standing.child for standing in step.standings) or ranking
        told = event_of({"type": "steps", "steps": [_step(step, codec) for step in output.growth]})
        if output.finished:
            check_sound(output)
            told += event_of(_end_event(output, ranking, num_tokens))
        return told

    return EventSource([stream], tell, first=event_of(_start_event(stream.request, model.name)))


def _start_event(request: EngineRequest, model: str) -> dict[str, Any]:
    params = request.sampling_params
    return {
        "type": "start",
        "id": request.request_id,
        "model": model,
        "strategy": params.resolved_strategy.value,
        "num_children": params.num_children,
        "num_prompt_tokens": len(request.prompt_token_ids),
    }


def _end_event(output: RequestOutput, ranking: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    """`num_tokens` counts all that was drawn, also by samples and beams that do not return."""
    outputs = [
        {
            "index": sample.index,
            "child": ranking[sample.index] if ranking else sample.index,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "cumulative_logprob": finite(sample.cumulative_logprob),
            "score": finite(sample.score),
            "num_tokens": len(sample.token_ids),
        }
        for sample in output.outputs
    ]
    return {"type": "end", "outputs": outputs, "usage": usage([output], num_tokens)}


def _step(step: GrowthStep, codec: TextCodec) -> dict[str, Any]:
    return {
        "tokens": [_token(token, codec) for token in step.tokens],
        "standings": [
            {
                "child": standing.child,
                "score": finite(standing.score),
                "finished": standing.finished,
                "group": standing.group,
            }
            for standing in step.standings
        ],
    }


def _token(token: GrownToken, codec: TextCodec) -> dict[str, Any]:
    row = token.alternatives or {}
    return {
        "child": token.child,
        "parent": token.parent,
        "position": token.position,
        "token_id": token.token_id,
        "token": codec.decode_token(token.token_id) if codec.tokenizer is not None else None,
        "text": token.text,
        "num_taken_back": token.num_taken_back,
        "logprob": finite(token.logprob),
        "rank": row[token.token_id].rank if row else None,
        "top": [
            {"token_id": token_id, "token": entry.decoded_token, "logprob": finite(entry.logprob)}
            for token_id, entry in row.items()
        ],
        "mixture": None if token.mixture is None else _mixture(token.mixture),
        "finish_reason": token.finish_reason,
        "stop_reason": token.stop_reason,
    }


def _mixture(report: MixtureReport) -> dict[str, Any]:
    return {
        "alpha": report.alpha,
        "kl_teacher": finite(report.kl_teacher),
        "kl_theta": finite(report.kl_theta),
        "logprob_teacher": finite(report.logprob_teacher),
        "logprob_theta": finite(report.logprob_theta),
    }
