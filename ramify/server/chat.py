"""`/v1/chat/completions`: a conversation goes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ramify.engine.request import Request as EngineRequest
from ramify.errors import InvalidInputError
from ramify.outputs import CompletionOutput, FinishReason, RequestOutput, ToolCall
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
from ramify.server.response_format import in_words_of_response_format
from ramify.server.service import ServedModel, Service
from ramify.server.tool_deltas import ToolDeltas
from ramify.text.tools.calling import Calling
from ramify.text.tools.formats import FORMATS
from ramify.text.tools.tool_use import ToolUse


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["samples"])

    @router.post("/v1/chat/completions", response_model=None, responses={**streamed_or(ChatCompletion), **failures()})
    async def create_chat_completion(body: ChatCompletionRequest, http: Request) -> Response:
        """Answers a conversation, rendered by the model's chat template."""
        model = service.model(body.model)
        calling = _calling(service, model, body)
        params = body.params(model.intake.defaults)
        if calling is not None:
            params = calling.params(params, model.intake.codec)
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
            "continue_final_message": bool(body.continue_final_message),
            "chat_template_kwargs": body.chat_template_kwargs
            if calling is None
            else calling.use.variables(body.chat_template_kwargs),
            "chat_template": body.chat_template,
            "opening": "" if calling is None else calling.opening,
        }

        def request() -> EngineRequest:
            if body.theta_messages is None:
                return model.intake.chat_request(body.messages, params, name, **options)
            intake = model.pair_intake("theta_messages")
            return intake.chat_request(body.messages, params, name, theta_messages=body.theta_messages, **options)

        made = partial(in_words_of_response_format, request) if body.is_formatted else request
        made = partial(_in_words_of_chats, made)

        async def make() -> list[EngineRequest]:
            requests = [await beside_the_loop(made if calling is None else partial(calling.in_words_of_tools, made))]
            if calling is not None:
                _check_readable(calling)
            return requests

        shape = ChatShape(name, model, body, params, calling)
        return await answer(service, model, 1, make, shape, body=body, http=http)

    return router


def _in_words_of_chats(make: Callable[[], EngineRequest]) -> EngineRequest:
    """To a chat `logprobs` is yes or no, and their number has another name."""
    try:
        return make()
    except InvalidInputError as error:
        if not str(error).startswith("logprobs "):
            raise
        raise type(error)(f"top_{error}") from None


def _calling(service: Service, model: ServedModel, body: ChatCompletionRequest) -> Calling | None:
    """What the request says of tools, for this model; None where none is to be called."""
    use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    if use is None:
        return None
    return Calling.by(
        use,
        model.intake.codec,
        chat_template=body.chat_template,
        format_name=service.config.tool_call_parser,
    )


def _check_readable(calling: Calling) -> None:
    if not calling.is_readable:
        message = (
            f"tools are not supported: this model's chat template does not show in which format it writes calls; the "
            f"server's --tool-call-parser names one: {', '.join(FORMATS)}"
        )
        raise Failure(400, message, param="tools", code="not_supported")


class ChatShape:
    def __init__(
        self,
        name: str,
        model: ServedModel,
        body: ChatCompletionRequest,
        params: SamplingParams,
        calling: Calling | None = None,
    ) -> None:
        self._head = {"id": name, "created": int(time.time()), "model": model.name}
        self._model = model
        self._codec = model.intake.codec
        self._body = body
        self._params = params
        self._calling = calling
        self._deltas: dict[int, ToolDeltas] = {}  # by choice
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    @property
    def is_framed(self) -> bool:
        return self._calling is None

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        choices = [self._choice(sample) for sample in output.outputs]
        reply = {**self._head, "object": "chat.completion", "choices": choices}
        if self._body.return_token_ids and not self._model.is_pair:
            reply["prompt_token_ids"] = list(output.prompt_token_ids)
        return reply

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        calls: tuple[ToolCall, ...] = ()
        if self._calling is not None:
            content, calls = self._calling.answer(sample.text)
            message["content"] = content if content or not calls else None
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        rest = self._rest(sample, has_calls=bool(calls))
        return {"index": sample.index, "message": message, "logprobs": self._logprobs(sample), **rest}

    def chunks(self, _prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> Iterator[dict[str, Any]]:
        if sample.index not in self._begun:
            self._begun.add(sample.index)
            opening = {"role": "assistant", "content": "", "refusal": None}
            first = self.envelope([{"index": sample.index, "delta": opening, "logprobs": None, "finish_reason": None}])
            if self._body.return_token_ids and not self._model.is_pair:
                first["prompt_token_ids"] = list(output.prompt_token_ids)
            yield first
        if sample.index in self._ended:
            return
        is_last = sample.finish_reason is not None
        if self._calling is None:
            delta, has_calls = {"content": sample.text} if sample.text or not is_last else {}, False
        else:
            deltas = self._deltas.setdefault(sample.index, ToolDeltas(self._calling))
            delta, has_calls = deltas.delta(sample.text, is_last=is_last), deltas.has_calls
            sample = replace(sample, text=delta.get("content", ""))
        if not has_news(sample, self._params, with_token_ids=self._body.return_token_ids) and "tool_calls" not in delta:
            return
        if is_last:
            self._ended.add(sample.index)
        rest = self._rest(sample, has_calls=has_calls)
        yield self.envelope([{"index": sample.index, "delta": delta, "logprobs": self._logprobs(sample), **rest}])

    def _rest(self, sample: CompletionOutput, *, has_calls: bool) -> dict[str, Any]:
        rest = common(sample, with_token_ids=bool(self._body.return_token_ids))
        if has_calls and sample.finish_reason is FinishReason.STOP:
            rest["finish_reason"] = "tool_calls"
        return rest

    def _logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        if sample.logprobs is None:
            return None
        return chat_logprobs(self._codec, sample.token_ids, sample.logprobs, self._body.top_logprobs or 0)
