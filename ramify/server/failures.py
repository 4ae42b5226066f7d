"""Every failure as OpenAI's error object: a message, a type, a parameter, a code. No paths, no stack traces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ramify.errors import ChatTemplateError, EngineClosedError, EngineFaultError, InvalidInputError
from ramify.sampling_params import SamplingParams
from ramify.server.records import record_of
from ramify.validation import shown

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
_LONGEST_MESSAGE = 2_000
_OFTEN_MEANT = ("/v1/chat/completions", "/v1/completions", "/v1/models")
INTERNAL_ERROR = "internal_error"
_FIRST_WORD = re.compile(r"[a-z_]+")
_OTHER_FIELDS = {"prompt", "messages", "stream", "stream_options", "response_format", "top_logprobs"}
_OTHER_FIELDS |= {"tools", "tool_choice", "parallel_tool_calls", "continue_final_message"}
_FIELDS = {field.name for field in fields(SamplingParams)} | _OTHER_FIELDS


class Failure(HTTPException):
    """A request that is not served, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, _writable(message), dict(headers or {}))
        self.param = None if param is None else _writable(param)
        self.code = code

    def as_json(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = _TYPES.get(self.status_code, default)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_json(), self.status_code, self.headers)


def headers_too_large(most: int) -> Failure:
    return Failure(431, f"the request line and headers must have at most {most} bytes", code="headers_too_large")


class ErrorDetail(BaseModel):
    message: str = Field(description="What is wrong, with the field, the value and what is allowed.")
    type: str = Field(description="A kind of error, by its HTTP status.")
    param: str | None = Field(description="The field that is wrong, where it is one.")
    code: str | None = Field(description="A word for programs, where there is one.")


class ErrorReply(BaseModel):
    """What every failure looks like."""

    error: ErrorDetail


def failure_of(error: BaseException) -> Failure:
    """What a client is told about an exception; about an unexpected one, only that there was one."""
    match error:
        case Failure():
            return error
        case HTTPException():
            return Failure(error.status_code, error.detail, headers=error.headers)
        case RequestValidationError():
            return _invalid_fields(error)
        case InvalidInputError() | ChatTemplateError():
            return Failure(400, str(error), param=_field_named(str(error)), code="invalid_value")
        case EngineClosedError():
            return Failure(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        case EngineFaultError():
            return Failure(500, str(error), code="engine_fault")
        case _:
            return Failure(500, "an internal error; the server's log says more", code=INTERNAL_ERROR)


def _invalid_fields(error: RequestValidationError) -> Failure:
    """The first thing that is wrong, in the words of our own checks."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if path[:1] == ["response_format"]:
        del path[1:2]  # which of the kinds it is, and no name that the client wrote
    field = ".".join(path) or "the body"
    param = path[0] if path else None
    match first["type"]:
        case "extra_forbidden":
            return Failure(400, f"{field} is not a field of this request", param=param, code="unknown_field")
        case "missing":
            return Failure(400, f"{field} is missing", param=param, code="missing_field")
        case "model_attributes_type" | "dict_type":
            how = "" if path else ", sent as application/json"
            return Failure(400, f"{field} must be a JSON object{how}", param=param, code="invalid_value")
        case "union_tag_not_found" | "union_tag_invalid":
            said = f"{field}.type must be 'text', 'json_object' or 'json_schema', got {shown(first['input'])}"
            return Failure(400, said, param=param, code="invalid_value")
        case "not_supported":
            said = f"{field} {first['msg']}, got {shown(first['input'])}. {first['ctx']['why']}"
            return Failure(400, said, param=param, code="not_supported")
    said = first["msg"].removeprefix("Value error, ")
    if not path:
        return Failure(400, said, param=_field_named(said), code="invalid_value")
    if said.startswith("Input should be "):
        wanted = "must be " + said.removeprefix("Input should be ")
    else:
        wanted = said[0].lower() + said[1:]
    return Failure(400, f"{field} {wanted}, got {shown(first['input'])}", param=param, code="invalid_value")


def _field_named(message: str) -> str | None:
    """The field that a message of our own checks begins with, if it begins with one."""
    first = _FIRST_WORD.match(message)
    return first[0] if first is not None and first[0] in _FIELDS else None


def _writable(text: str) -> str:
    """What a client sent may stand in a message: not all of a long text, and no lone surrogate, which has no UTF-8."""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def _no_route(request: Request, error: HTTPException) -> Failure:
    """What the router itself refuses, with the route that was probably meant."""
    path, method = request.scope["path"], request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path:.200} does not take {method:.20}, but {allowed}"
        return Failure(405, message, code="method_not_allowed", headers=error.headers)
    meant = next((served for served in _OFTEN_MEANT if _is_meant(served, path)), None)
    hint = "/docs lists the routes, and OpenAI's begin with /v1" if meant is None else f"{meant} is one"
    return Failure(404, f"there is no route {path:.200}: {hint}", code="unknown_url")


def _is_meant(served: str, path: str) -> bool:
    """Clients are given an address without /v1, or put it before one that has it."""
    return path.endswith(served) or served == f"/v1{path}"


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException) and not isinstance(error, Failure) and error.status_code in (404, 405):
        failure = _no_route(request, error)
    else:
        failure = failure_of(error)
    record_of(request.scope).error = failure.code
    return failure.response()


def handle_failures(app: FastAPI) -> None:
    """What routes raise on purpose is answered in this shape; the guard answers what nobody expected."""
    for kind in (
        HTTPException,
        RequestValidationError,
        InvalidInputError,
        ChatTemplateError,
        EngineClosedError,
        EngineFaultError,
    ):
        app.add_exception_handler(kind, _answer)
