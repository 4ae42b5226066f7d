"""An exchange: the prompts of one HTTP request on their way through the engine, and back as one reply or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse

from ramify.drive.mailroom import RequestStream
from ramify.engine.request import Request
from ramify.outputs import RequestOutput
from ramify.server.choices import check_sound, usage
from ramify.server.connection import EventStream, client_of, events_of, unless_gone
from ramify.server.fields import OpenAIFields
from ramify.server.records import Record, record_of
from ramify.server.service import ServedModel, Service


class Shape(Protocol):
    """How outputs look to the client: one for completions, one for chats."""

    def reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole reply, without the usage."""
        ...

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """What is new of one of the prompts."""
        ...

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk around these choices."""
        ...


async def answer(
    service: Service,
    model: ServedModel,
    requests: list[Request],
    shape: Shape,
    *,
    body: OpenAIFields,
    http: HttpRequest,
) -> Response:
    """Submits the requests and answers, plainly or as a stream; whatever ends the exchange frees what it held."""
    seconds = service.config.request_timeout
    record = record_of(http.scope)
    record.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    with ExitStack() as held:
        held.enter_context(service.room_for(len(requests), client_of(http)))
        streams = []
        for request in requests:
            streams.append(model.engine.submit(request))
            held.callback(streams[-1].close)
        if not body.stream:
            outputs = await unless_gone(http, seconds, _finals(streams))
            for output in outputs:
                check_sound(output)
            record.output_tokens = _num_tokens(outputs)
            return JSONResponse({**shape.reply(outputs), "usage": usage(outputs, record.output_tokens)})
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        events = _events(streams, shape, record, include_usage=include_usage)
        return EventStream(events, seconds=seconds, release=held.pop_all().close)


async def _finals(streams: list[RequestStream]) -> list[RequestOutput]:
    return [await stream.final() for stream in streams]


async def _events(
    streams: list[RequestStream], shape: Shape, record: Record, *, include_usage: bool
) -> AsyncIterator[bytes]:
    """The chunks of one output are sent together: one for each sample that grew."""
    ends: list[RequestOutput] = []
    num_tokens = 0
    async for index, output in _joined(streams):
        if output.finished:
            check_sound(output)
            ends.append(output)
        num_tokens += _num_tokens([output])
        record.output_tokens = num_tokens
        chunks = list(shape.chunks(index, output))
        if include_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
        if chunks:
            yield events_of(chunks)
    if include_usage:
        yield events_of([{**shape.envelope([]), "usage": usage(ends, num_tokens)}])


async def _joined(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they come, each with its stream's index; at most one waits to be read."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # An output, what a stream raised, or None at its end.
    arrived: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def read(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await arrived.put((index, output))
            await arrived.put((index, None))
        except Exception as error:  # raised where the outputs are read, not in a task that nobody waits for
            await arrived.put((index, error))

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        unfinished = len(streams)
        while unfinished:
            index, came = await arrived.get()
            if isinstance(came, BaseException):
                raise came
            if came is None:
                unfinished -= 1
            else:
                yield index, came
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _num_tokens(outputs: Iterable[RequestOutput]) -> int:
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
