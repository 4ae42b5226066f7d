"""What clients send: one class per route that takes a body."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from ramify.models.generation_defaults import GenerationDefaults
from ramify.sampling_params import MAX_TOKENS, OutputKind, SamplingParams
from ramify.server.fields import OpenAIFields, SamplingFields, Strict, TokenIds
from ramify.server.neutral import CHATS, COMPLETIONS, with_neutral_fields
from ramify.text.tools.tool_use import MAX_TOOLS

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_FUNCTION_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"}
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _FUNCTION_NAME, "arguments": {"anyOf": [_TEXT, {"type": "object"}]}},
        },
    },
}


def _prompts(given: object) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids; ids themselves are compared with the vocabulary later."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise ValueError("must be a text, token ids, or a list of these that is not empty")
    if _are_ids(given):
        return [given]
    if all(isinstance(prompt, str) for prompt in given) or all(map(_are_ids, given)):
        return list(given)
    raise ValueError("must be a text, token ids, or a list of one kind of these")


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int}


def _prompt(given: object) -> str | list[int]:
    """One prompt; the same."""
    if isinstance(given, str) or _are_ids(given):
        return given  # type: ignore[return-value]
    raise ValueError("must be a text, or token ids")


Prompt = Annotated[str | list[int], PlainValidator(_prompt), WithJsonSchema({"anyOf": [_TEXT, _IDS]})]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
# The code that hands messages to the chat template checks them: it says what is wrong better than a schema could.
Messages = Annotated[
    list[Any],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                    "content": {
                        "anyOf": [
                            _TEXT,
                            {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["type", "text"],
                                    "properties": {"type": {"const": "text"}, "text": _TEXT},
                                },
                            },
                            {"type": "null"},
                        ]
                    },
                    "tool_calls": {"type": "array", "items": _TOOL_CALL},
                    "tool_call_id": _TEXT,
                },
            },
        }
    ),
]
# So does the code that hands tools to it.
Tools = Annotated[
    list[Any],
    WithJsonSchema(
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": _FUNCTION_NAME,
                            "description": _TEXT,
                            "parameters": {"type": "object"},
                            "strict": {"type": "boolean"},
                        },
                    },
                },
            },
        }
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": _FUNCTION_NAME},
                        },
                    },
                },
            ]
        }
    ),
]


@with_neutral_fields(COMPLETIONS)
class CompletionRequest(OpenAIFields):
    prompt: Prompts = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="Longest output (default 16); 0 only with echo or prompt_logprobs."
    )
    logprobs: int | None = Field(None, ge=0, description="Report this many of the likeliest tokens per token.")
    prompt_logprobs: int | None = Field(
        None, ge=0, description="The same for the prompt, token by token; not together with stream."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output; with logprobs, those of both.")
    add_special_tokens: bool | None = Field(
        None, description="Whether BOS and the like are added to texts (default true)."
    )
    theta_prompt: Prompts | None = Field(
        None, description="A mixture of two models: what the student sees instead, one for each prompt."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream and (self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)):
            raise ValueError("prompt_logprobs, and echo with logprobs, cannot be streamed")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens must be at least 1; 0 goes with echo or prompt_logprobs alone")
        if self.theta_prompt is not None and len(self.theta_prompt) != len(self.prompt):
            raise ValueError("theta_prompt must have one entry for each prompt")
        return self

    def params(self, defaults: GenerationDefaults) -> SamplingParams:
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        elif self.max_tokens == 0 and prompt_logprobs is None:
            prompt_logprobs = 0  # nothing is drawn: SamplingParams takes that with prompt_logprobs alone
        return self.sampling_params(
            defaults,
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
        )


@with_neutral_fields(CHATS)
class ChatCompletionRequest(OpenAIFields):
    messages: Messages = Field(description="The conversation: objects with a role and a content of text.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Longest answer (default: what the context has left)."
    )
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="The older name of the same.")
    logprobs: bool | None = Field(None, description="Report the logprob of every token.")
    top_logprobs: int | None = Field(None, ge=0, description="And of this many of the likeliest; needs logprobs.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn (default true).")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message's text; then add_generation_prompt must be false."
    )
    chat_template: str | None = Field(None, description="Another template; only where the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables the template reads.")
    tools: Tools | None = Field(None, description="Functions that the model may call, if its template knows tools.")
    tool_choice: ToolChoice = Field(
        None, description="Whether one is called: `none`, `auto`, `required`, or a function by name (default: auto)."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether several may be called (default true).")
    theta_messages: Messages | None = Field(
        None, description="A mixture of two models: the conversation that the student sees instead."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit and must not differ")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def params(self, defaults: GenerationDefaults) -> SamplingParams:
        return self.sampling_params(
            defaults,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
        )


class GrowthRequest(SamplingFields):
    """Either a prompt or messages."""

    prompt: Prompt | None = Field(None, description="A text, or token ids.")
    messages: Messages | None = Field(None, description="A conversation, rendered by the chat template.")
    theta_prompt: Prompt | None = Field(
        None, description="With two models, what the student sees in place of the prompt, which is the teacher's."
    )
    theta_messages: Messages | None = Field(None, description="The same in place of the messages.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Longest output (default 16).")
    top_logprobs: int | None = Field(None, ge=0, description="Tell this many of the likeliest tokens with each token.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages must be given")
        if (self.theta_prompt is not None and self.prompt is None) or (
            self.theta_messages is not None and self.messages is None
        ):
            raise ValueError("theta_prompt goes with prompt, and theta_messages with messages")
        return self

    def params(self, defaults: GenerationDefaults) -> SamplingParams:
        return self.sampling_params(
            defaults,
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.top_logprobs,
            output_kind=OutputKind.GROWTH,
        )


class TokenizeRequest(Strict):
    """Either a prompt or messages."""

    model: str | None = Field(None, max_length=256, description="A name from `/v1/models`; by default the first.")
    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation, rendered by the chat template.")
    add_special_tokens: bool | None = Field(None, description="Whether BOS and the like are added (a prompt: true).")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn (default true).")
    continue_final_message: bool | None = Field(None, description="End with the last message's text.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables the template reads.")
    tools: Tools | None = Field(None, description="Functions that the model may call; they go with messages.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages must be given")
        of_chats = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
        if self.messages is None and any(getattr(self, name) is not None for name in of_chats):
            raise ValueError(f"{', '.join(of_chats[:-1])} and {of_chats[-1]} go with messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = Field(None, max_length=256, description="A name from `/v1/models`; by default the first.")
    tokens: TokenIds = Field(description="Token ids.")
