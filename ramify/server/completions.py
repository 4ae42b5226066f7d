"""`/v1/completions`: a prompt goes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput
from ramify.request import Request as EngineRequest
from ramify.sampling_params import SamplingParams
from ramify.server.body import JsonRoute
from ramify.server.choices import CompletionLogprobs, common, prompt_rows
from ramify.server.exchange import answer
from ramify.server.openapi import failures, streamed_or
from ramify.server.protocol import CompletionRequest
from ramify.server.replies import Completion
from ramify.server.service import ServedModel, Service, prepared


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["samples"])

    @router.post("/v1/completions", response_model=None, responses={**streamed_or(Completion), **failures()})
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        """Continues one prompt or several: sampled, ranked, by beam search, plainly or as a stream."""
        model = service.model(body.model)
        params = body.params()
        service.check_samples(len(body.prompt), params)
        name = f"cmpl-{uuid.uuid4().hex}"

        add_special_tokens = body.add_special_tokens is not False

        def make() -> list[EngineRequest]:
            names = [f"{name}-{place}" for place in range(len(body.prompt))]
            if body.theta_prompt is None:
                return [
                    model.intake.request(prompt, params, each, add_special_tokens=add_special_tokens)
                    for prompt, each in zip(body.prompt, names, strict=True)
                ]
            intake = model.pair_intake("theta_prompt")
            return [
                intake.request(prompt, params, each, theta_prompt=other, add_special_tokens=add_special_tokens)
                for prompt, other, each in zip(body.prompt, body.theta_prompt, names, strict=True)
            ]

        requests = await prepared(make, sum(map(len, body.prompt)))
        return await answer(
            service,
            model,
            requests,
            CompletionShape(name, model, body, params),
            http,
            is_streamed=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    return router


class CompletionShape:
    def __init__(self, name: str, model: ServedModel, body: CompletionRequest, params: SamplingParams) -> None:
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model.name}
        self._model = model
        self._codec = model.intake.codec
        self._body = body
        self._params = params
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._ended: set[int] = set()

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices}

    def reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(place, output, item, is_first=True)
            for place, output in enumerate(outputs)
            for item in output.outputs
        ]
        return self.envelope(choices)

    def chunks(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for item in output.outputs:
            index = self._index(place, item)
            is_first = index not in self._logprobs
            says_prompt = is_first and (self._body.echo or self._body.return_token_ids)
            if index in self._ended or not (
                says_prompt or has_news(item, self._params, with_token_ids=self._body.return_token_ids)
            ):
                continue
            if item.finish_reason is not None:
                self._ended.add(index)
            yield self.envelope([self._choice(place, output, item, is_first=is_first)])

    def _index(self, place: int, item: CompletionOutput) -> int:
        return place * self._params.n + item.index

    def _choice(self, place: int, output: RequestOutput, item: CompletionOutput, *, is_first: bool) -> dict[str, Any]:
        index = self._index(place, item)
        writer = self._logprobs.setdefault(index, CompletionLogprobs(self._codec))
        text, token_ids = item.text, item.token_ids
        rows: Sequence[LogprobRow | None] | None = item.logprobs
        choice: dict[str, Any] = {"index": index}
        if is_first and self._body.echo:
            given = self._body.prompt[place]  # and not what a mixture's sides made of it: that is the server's own
            prompt = given if isinstance(given, str) else self._codec.decode(given)
            text = prompt + text
            if rows is not None and output.prompt_logprobs is not None:
                token_ids = output.prompt_token_ids + token_ids
                rows = [*output.prompt_logprobs, *rows]
            else:
                writer.skip(prompt)
        choice["text"] = text
        choice["logprobs"] = None if rows is None else writer.rows(token_ids, rows)
        choice.update(common(item, with_token_ids=bool(self._body.return_token_ids)))
        if is_first and self._body.return_token_ids and not self._model.is_pair:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_rows(output.prompt_logprobs)
        return choice


def has_news(item: CompletionOutput, params: SamplingParams, *, with_token_ids: bool | None) -> bool:
    """Whether an event is worth sending: text, an end, or tokens that are told about one by one."""
    tells_tokens = params.logprobs is not None or item.mixture is not None or bool(with_token_ids)
    return bool(item.text) or item.finish_reason is not None or (tells_tokens and bool(item.token_ids))
