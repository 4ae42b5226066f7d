"""An exchange: the prompts of one HTTP request on their way through the engine, and back as one reply or as events."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from ramify.drive.mailroom import RequestStream
from ramify.engine.request import Request
from ramify.outputs import RequestOutput
from ramify.server.choices import check_sound, usage
from ramify.server.chunks import ChunkWriter, Shape
from ramify.server.connection import EventStream, client_of, unless_gone
from ramify.server.events import EventSource, event_of
from ramify.server.fields import OpenAIFields
from ramify.server.preparing import prepared
from ramify.server.records import Record, record_of
from ramify.server.service import ServedModel, Service

_BYTES_OF_ENTRY = 16  # near enough: a token's text and a number


async def answer(
    service: Service,
    model: ServedModel,
    num_prompts: int,
    make: Callable[[], Coroutine[Any, Any, list[Request]]],
    shape: Shape,
    *,
    body: OpenAIFields,
    http: HttpRequest,
) -> Response:
    """Makes the requests, one for each prompt, submits them, and answers, plainly or as a stream.

    Where the queue is full nothing is tokenized. Whatever ends the exchange frees what it held.
    """
    seconds = service.config.request_timeout
    record = record_of(http.scope)
    with ExitStack() as held:
        held.enter_context(service.room_for(num_prompts, client_of(http)))
        requests = await make()
        record.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        streams = []
        for request in requests:
            streams.append(model.engine.submit(request))
            held.callback(streams[-1].close)
        if not body.stream:
            outputs = await unless_gone(http, seconds, _finals(streams))
            for output in outputs:
                check_sound(output)
            num_tokens = record.output_tokens = _num_tokens(outputs)
            # Reports of many tokens take seconds to write.
            return await prepared(
                lambda: _written({**shape.reply(outputs), "usage": usage(outputs, num_tokens)}),
                _BYTES_OF_ENTRY * _num_entries(outputs),
            )
        return EventStream(_events(streams, shape, record, body), seconds=seconds, release=held.pop_all().close)


async def _finals(streams: list[RequestStream]) -> list[RequestOutput]:
    return [await stream.final() for stream in streams]


def _events(streams: list[RequestStream], shape: Shape, record: Record, body: OpenAIFields) -> EventSource:
    """An event for each sample that grew, and at the end, if it is wanted, the usage."""
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    writer = ChunkWriter(shape, with_token_ids=bool(body.return_token_ids), include_usage=include_usage)
    ends: list[RequestOutput] = []
    num_tokens = 0

    def tell(index: int, output: RequestOutput) -> bytes:
        nonlocal num_tokens
        if output.finished:
            check_sound(output)
            ends.append(output)
        for sample in output.outputs:
            num_tokens += len(sample.token_ids)
        record.output_tokens = num_tokens
        return writer.events(index, output)

    def last() -> bytes:
        return event_of({**shape.envelope([]), "usage": usage(ends, num_tokens)}) if include_usage else b""

    return EventSource(streams, tell, last=last)


def _written(reply: dict[str, Any]) -> Response:
    """Choice by choice: what writes JSON keeps the interpreter's lock until it is done."""
    choices = ",".join(_json_of(choice) for choice in reply["choices"])
    before, empty, after = _json_of({**reply, "choices": []}).partition('"choices":[]')  # no string can hold that
    return Response(f"{before}{empty[:-1]}{choices}]{after}", media_type="application/json")


def _json_of(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _num_entries(outputs: Iterable[RequestOutput]) -> int:
    """How many tokens and logprobs a reply may tell of."""
    num_entries = 0
    for output in outputs:
        num_entries += sum(map(len, filter(None, output.prompt_logprobs or ())))
        for sample in output.outputs:
            num_entries += len(sample.token_ids) + sum(map(len, sample.logprobs or ()))
    return num_entries


def _num_tokens(outputs: Iterable[RequestOutput]) -> int:
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
