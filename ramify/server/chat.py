"""`/v1/chat/completions`: a conversation goes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from ramify.engine.request import Request as EngineRequest
from ramify.outputs import CompletionOutput, RequestOutput
from ramify.sampling_params import SamplingParams
from ramify.server.body import JsonRoute
from ramify.server.choices import chat_logprobs, common, has_news
from ramify.server.exchange import answer
from ramify.server.failures import Failure
from ramify.server.openapi import failures, streamed_or
from ramify.server.preparing import beside_the_loop
from ramify.server.protocol import ChatCompletionRequest
from ramify.server.records import record_of
from ramify.server.replies import ChatCompletion
from ramify.server.service import ServedModel, Service


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["samples"])

    @router.post("/v1/chat/completions", response_model=None, responses={**streamed_or(ChatCompletion), **failures()})
    async def create_chat_completion(body: ChatCompletionRequest, http: Request) -> Response:
        """Answers a conversation, rendered by the model's chat template."""
        model = service.model(body.model)
        params = body.params(model.intake.defaults)
        service.check_samples(1, params)
        if body.chat_template is not None and not service.config.allow_chat_template:
            raise Failure(
                400,
                "chat_template is not allowed in requests here (the server's --allow-chat-template)",
                param="chat_template",
                code="not_allowed",
            )
        name = f"chatcmpl-{uuid.uuid4().hex}"
        record_of(http.scope).request_id = name
        options: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt is not False,
            "chat_template_kwargs": body.chat_template_kwargs,
            "chat_template": body.chat_template,
        }

        def make() -> EngineRequest:
            if body.theta_messages is None:
                return model.intake.chat_request(body.messages, params, name, **options)
            intake = model.pair_intake("theta_messages")
            return intake.chat_request(body.messages, params, name, theta_messages=body.theta_messages, **options)

        request = await beside_the_loop(make)
        shape = ChatShape(name, model, body, params)
        return await answer(service, model, [request], shape, body=body, http=http)

    return router


class ChatShape:
    def __init__(self, name: str, model: ServedModel, body: ChatCompletionRequest, params: SamplingParams) -> None:
        self._head = {"id": name, "created": int(time.time()), "model": model.name}
        self._model = model
        self._codec = model.intake.codec
        self._body = body
        self._params = params
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        choices = [
            {
                "index": sample.index,
                "message": {"role": "assistant", "content": sample.text, "refusal": None},
                "logprobs": self._logprobs(sample),
                **self._rest(sample),
            }
            for sample in output.outputs
        ]
        reply = {**self._head, "object": "chat.completion", "choices": choices}
        if self._body.return_token_ids and not self._model.is_pair:
            reply["prompt_token_ids"] = list(output.prompt_token_ids)
        return reply

    def chunks(self, _prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> Iterator[dict[str, Any]]:
        if sample.index not in self._begun:
            self._begun.add(sample.index)
            opening = {"role": "assistant", "content": "", "refusal": None}
            first = self.envelope([{"index": sample.index, "delta": opening, "logprobs": None, "finish_reason": None}])
            if self._body.return_token_ids and not self._model.is_pair:
                first["prompt_token_ids"] = list(output.prompt_token_ids)
            yield first
        if sample.index in self._ended or not has_news(
            sample, self._params, with_token_ids=self._body.return_token_ids
        ):
            return
        if sample.finish_reason is not None:
            self._ended.add(sample.index)
        delta = {"content": sample.text} if sample.text or sample.finish_reason is None else {}
        choice = {"index": sample.index, "delta": delta, "logprobs": self._logprobs(sample), **self._rest(sample)}
        yield self.envelope([choice])

    def _rest(self, sample: CompletionOutput) -> dict[str, Any]:
        return common(sample, with_token_ids=bool(self._body.return_token_ids))

    def _logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        if sample.logprobs is None:
            return None
        return chat_logprobs(self._codec, sample.token_ids, sample.logprobs, self._body.top_logprobs or 0)
