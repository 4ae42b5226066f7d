"""`/v1/completions`: a prompt goes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ramify.engine.request import Request as EngineRequest
from ramify.outputs import CompletionOutput, LogprobRow, RequestOutput
from ramify.sampling_params import SamplingParams
from ramify.server.body import JsonRoute
from ramify.server.choices import CompletionLogprobs, common, has_news, prompt_rows
from ramify.server.exchange import answer
from ramify.server.openapi import failures, streamed_or
from ramify.server.preparing import prepared
from ramify.server.protocol import CompletionRequest
from ramify.server.records import record_of
from ramify.server.replies import Completion
from ramify.server.response_format import in_words_of_response_format
from ramify.server.service import ServedModel, Service


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["samples"])

    @router.post("/v1/completions", response_model=None, responses={**streamed_or(Completion), **failures()})
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        """Continues one prompt or several: sampled, ranked, by beam search, plainly or as a stream."""
        model = service.model(body.model)
        params = body.params(model.intake.defaults)
        service.check_samples(len(body.prompt), params)
        name = f"cmpl-{uuid.uuid4().hex}"
        record_of(http.scope).request_id = name

        add_special_tokens = body.add_special_tokens is not False

        def requests() -> list[EngineRequest]:
            names = [f"{name}-{index}" for index in range(len(body.prompt))]
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

        may_take_long = params.structured_outputs is not None
        made = partial(in_words_of_response_format, requests) if body.is_formatted else requests

        async def make() -> list[EngineRequest]:
            return await prepared(made, len(await http.body()), may_take_long=may_take_long)

        shape = CompletionShape(name, model, body, params)
        return await answer(service, model, len(body.prompt), make, shape, body=body, http=http)

    return router


class CompletionShape:
    is_framed = True

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
            self._choice(prompt_index, output, sample, is_first=True)
            for prompt_index, output in enumerate(outputs)
            for sample in output.outputs
        ]
        return self.envelope(choices)

    def chunks(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> Iterator[dict[str, Any]]:
        index = self._index(prompt_index, sample)
        is_first = index not in self._logprobs
        says_prompt = is_first and (self._body.echo or self._body.return_token_ids)
        if index in self._ended or not (
            says_prompt or has_news(sample, self._params, with_token_ids=self._body.return_token_ids)
        ):
            return
        if sample.finish_reason is not None:
            self._ended.add(index)
        yield self.envelope([self._choice(prompt_index, output, sample, is_first=is_first)])

    def _index(self, prompt_index: int, sample: CompletionOutput) -> int:
        return prompt_index * self._params.n + sample.index

    def _choice(
        self, prompt_index: int, output: RequestOutput, sample: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        index = self._index(prompt_index, sample)
        if index not in self._logprobs:
            skips = self._params.skip_special_tokens
            prompt_token_ids = output.prompt_token_ids
            self._logprobs[index] = CompletionLogprobs(self._codec, prompt_token_ids, skip_special_tokens=skips)
        writer = self._logprobs[index]
        text, token_ids = sample.text, sample.token_ids
        before: list[int] = []  # the places of the prompt's tokens
        rows: Sequence[LogprobRow | None] | None = sample.logprobs
        choice: dict[str, Any] = {"index": index}
        if is_first and self._body.echo:
            given = self._body.prompt[prompt_index]  # as it was sent: a mixture's system prompts are the server's own
            prompt = given if isinstance(given, str) else self._codec.decode(given)
            text = prompt + text
            if rows is not None and output.prompt_logprobs is not None:
                token_ids = output.prompt_token_ids + token_ids
                rows = [*output.prompt_logprobs, *rows]
                before = writer.prompt(prompt, output.prompt_token_ids)
            else:
                writer.skip(prompt)
        choice["text"] = text
        choice["logprobs"] = None if rows is None else writer.rows(token_ids, rows, before)
        choice.update(common(sample, with_token_ids=bool(self._body.return_token_ids)))
        if is_first and self._body.return_token_ids and not self._model.is_pair:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_rows(output.prompt_logprobs)
        return choice
