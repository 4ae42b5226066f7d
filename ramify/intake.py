"""Intake: what callers hand in, as requests that are known to be sound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypedDict

from ramify import validation as check
from ramify.errors import InvalidInputError
from ramify.request import Request
from ramify.sampling_params import SamplingParams
from ramify.text.codec import Message, TextCodec


class TextPrompt(TypedDict):
    prompt: str


class TokenPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokenPrompt


class Intake:
    """Makes requests for one model; a bad prompt or parameter raises before anything is kept.

    `check_request` is the engine's own question whether it could serve a request. Safe from several threads.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        vocab_size: int,
        max_logprobs: int,
        check_request: Callable[[Request], None],
    ) -> None:
        self.codec = codec
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self._check_request = check_request
        self._numbers = count()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
    ) -> Request:
        """Text, token ids, or a dict that holds one of them."""
        if isinstance(prompt, Mapping):
            fields: Mapping[str, Any] = prompt
            if set(fields) not in ({"prompt"}, {"prompt_token_ids"}):
                raise InvalidInputError(
                    f"a prompt given as a dict must have the one key prompt or prompt_token_ids, got {sorted(prompt)}"
                )
            [prompt] = fields.values()
        if not isinstance(prompt, str):
            return self._request_of_ids(None, prompt, params, request_id, priority)
        token_ids = self.codec.encode(prompt, add_special_tokens=add_special_tokens)
        return self._request_of_ids(prompt, token_ids, params, request_id, priority)

    def chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        priority: int = 0,
    ) -> Request:
        """One conversation, rendered by the chat template, which writes the special tokens itself."""
        text = self.codec.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
        )
        token_ids = self.codec.encode(text, add_special_tokens=False)
        return self._request_of_ids(text, token_ids, params, request_id, priority)

    def check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise check.refuse("sampling_params", params, "SamplingParams")
        params.check_against(vocab_size=self.vocab_size, max_logprobs=self.max_logprobs)

    def _request_of_ids(
        self, text: str | None, token_ids: object, params: SamplingParams, request_id: str | None, priority: int
    ) -> Request:
        self.check_params(params)
        ids = check.token_ids("prompt_token_ids", token_ids, 2**31, self.vocab_size)
        if not ids:
            raise InvalidInputError("prompt must not be empty: it has no tokens")
        name = f"request-{next(self._numbers)}" if request_id is None else check.text("request_id", request_id, 256)
        request = Request(name, text, ids, params, priority=check.integer("priority", priority))
        self._check_request(request)
        return request


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many: a string, a dict or a list of integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise check.refuse("prompts", prompts, "text, token ids, or a list of these")
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def one_for_each(name: str, given: Any, prompts: Sequence[Any], kind: type) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise check.refuse(name, given, f"one {kind.__name__}, or a list with one per prompt")
    values = list(given)
    if len(values) != len(prompts):
        raise InvalidInputError(f"{name} must be one, or one per prompt: got {len(values)} for {len(prompts)} prompts")
    return values
