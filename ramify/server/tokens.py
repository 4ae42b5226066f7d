"""`/v1/models`, `/tokenize`, `/detokenize` and `/tokenizer_info`: what there is to know without drawing anything."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from ramify import validation as check
from ramify.errors import InvalidInputError
from ramify.models.generation_defaults import RECOMMENDED_FIELDS, GenerationDefaults
from ramify.server.body import JsonRoute
from ramify.server.openapi import failures
from ramify.server.preparing import prepared
from ramify.server.protocol import DetokenizeRequest, TokenizeRequest
from ramify.server.replies import DetokenizeReply, ModelCard, ModelList, TokenizeReply, TokenizerInfo
from ramify.server.service import ServedModel, Service
from ramify.text.tools.tool_use import ToolUse


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["models"])

    @router.get("/v1/models", response_model=ModelList, response_model_exclude_unset=True, responses=failures(401, 503))
    async def list_models() -> dict[str, Any]:
        """The models that are served, with the longest context of each."""
        service.model(None)
        return {"object": "list", "data": [_card(model) for model in service.models.values()]}

    # What follows takes any path; a slash at the end names no model. Some ask only whether there is an answer.
    for path, methods in (("/v1/models", ["HEAD"]), ("/v1/models/", ["GET", "HEAD"])):
        router.add_api_route(
            path, list_models, methods=methods, response_model_exclude_unset=True, include_in_schema=False
        )

    @router.get(
        "/v1/models/{name:path}",
        response_model=ModelCard,
        response_model_exclude_unset=True,
        responses=failures(401, 404, 503),
    )
    async def show_model(name: str) -> dict[str, Any]:
        """One of them."""
        return _card(service.model(name))

    @router.post("/tokenize", response_model=TokenizeReply, responses=failures(400, 401, 404, 413, 503))
    async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
        """The token ids of a text or a conversation, exactly as a request for samples would have them."""
        model = service.model(body.model)
        make = partial(_tokens, model, body)
        token_ids, texts = await prepared(make, len(await http.body()), may_take_long=body.messages is not None)
        return {
            "tokens": token_ids,
            "token_strs": texts,
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
        }

    @router.post("/detokenize", response_model=DetokenizeReply, responses=failures(400, 401, 404, 413, 503))
    async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, Any]:
        """The text of token ids, special tokens written out."""
        model = service.model(body.model)
        if model.intake.codec.tokenizer is None:
            raise InvalidInputError("this model has no tokenizer: there is no text")

        def decode() -> str:
            check.token_ids("tokens", body.tokens, 2**31, model.intake.vocab_size)
            return model.intake.codec.decode(body.tokens)

        return {"prompt": await prepared(decode, len(await http.body()))}

    @router.get("/tokenizer_info", response_model=TokenizerInfo, responses=failures(400, 401, 404, 503))
    async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
        """What a client that tokenizes by these routes must know: the special tokens and the chat template."""
        served = service.model(model)
        tokenizer = served.intake.codec.tokenizer
        if tokenizer is None:
            raise InvalidInputError("this model has no tokenizer")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": served.max_model_len,
            **{role: tokenizer.special_token(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "chat_template": tokenizer.chat_template,
        }

    return router


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "ramify",
        "max_model_len": model.max_model_len,
        "default_sampling_params": _defaults(model.intake.defaults),
        **({} if model.mixed is None else {"mixture": dict(zip(("teacher", "theta"), model.mixed, strict=True))}),
    }


def _defaults(defaults: GenerationDefaults) -> dict[str, Any]:
    params = defaults.params()
    return {**{name: getattr(params, name) for name in RECOMMENDED_FIELDS}, "source": defaults.source or None}


def _tokens(model: ServedModel, body: TokenizeRequest) -> tuple[list[int], list[str]]:
    codec = model.intake.codec
    if body.prompt is not None:
        ids = codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        use = ToolUse.of(body.tools)
        variables = body.chat_template_kwargs
        text = codec.render_chat(
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=variables if use is None else use.variables(variables),
        )
        ids = codec.encode(text, add_special_tokens=bool(body.add_special_tokens))
    return ids, list(map(codec.decode_token, ids))
