"""Intake: callers' prompts and parameters to requests that the engine can serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NotRequired, TypedDict

from ramify import validation as check
from ramify.engine.request import Request
from ramify.errors import InvalidInputError
from ramify.models.generation_defaults import NO_DEFAULTS, GenerationDefaults
from ramify.sampling_params import SamplingParams
from ramify.structured.grammars import Grammars
from ramify.text.codec import Message, TextCodec


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # the text that they are: outputs tell it again, nothing else is made of it


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class Intake:
    """Makes requests for one model; a bad prompt or parameter raises here, before the engine sees it.

    `check_request` raises if the engine could never serve the request; `defaults` are what the model recommends where
    a caller does not say how to draw. Safe to call from several threads.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        vocab_size: int,
        max_logprobs: int,
        check_request: Callable[[Request], None],
        defaults: GenerationDefaults = NO_DEFAULTS,
        grammars: Grammars | None = None,
    ) -> None:
        self.codec = codec
        self.grammars = Grammars(codec) if grammars is None else grammars
        self.defaults = defaults
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
        """From text, token ids, or a dict that holds one of them."""
        given = plain(prompt)
        if not isinstance(given, str):
            text = text_beside(prompt)
            return self._make(params, request_id, priority, text=text, token_ids=self._checked(given))
        token_ids = self.codec.encode(given, add_special_tokens=add_special_tokens)
        return self._make(params, request_id, priority, text=given, token_ids=self._checked(token_ids))

    def chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        opening: str = "",
        priority: int = 0,
    ) -> Request:
        """From a conversation; the chat template itself writes the special tokens."""
        text = self.codec.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
            opening=opening,
        )
        token_ids = self.codec.encode(text, add_special_tokens=False)
        return self._make(params, request_id, priority, text=text, token_ids=self._checked(token_ids))

    def continuations(self, given: Any) -> list[list[int]]:
        """Token ids of given continuations: one or several, each a text (tokenised by itself) or token ids."""
        if isinstance(given, str):
            given = [given]
        listed = list(given) if isinstance(given, Iterable) else [given]
        if listed and all(isinstance(each, int) for each in listed):
            listed = [listed]
        encoded = [
            self.codec.encode(each, add_special_tokens=False) if isinstance(each, str) else each for each in listed
        ]
        checked = [list(check.token_ids("continuations", each, 2**31, self.vocab_size)) for each in encoded]
        for index, token_ids in enumerate(checked):
            if not token_ids:
                raise InvalidInputError(f"continuations must not be empty: number {index} has no tokens")
        return checked

    def scoring_request(self, prompt: Prompt, continuation: list[int], top_k: int) -> Request:
        """Asks for the logprobs of a continuation's tokens after a prompt, and nothing else of it."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top_k, detokenize=False)
        given = plain(prompt)
        if isinstance(given, str):
            given = self.codec.encode(given, add_special_tokens=True)
        return self._make(params, None, 0, text=None, token_ids=self._checked(given), continuation=continuation)

    def check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise check.refuse("sampling_params", params, "SamplingParams")
        params.check_against(vocab_size=self.vocab_size, max_logprobs=self.max_logprobs)
        if params.structure is not None:
            self.grammars.check(params.structure)

    def _checked(self, token_ids: object, name: str = "prompt") -> list[int]:
        if isinstance(token_ids, set | frozenset):
            raise check.refuse(f"{name}_token_ids", token_ids, "a list: a set has no order")
        ids = check.token_ids(f"{name}_token_ids", token_ids, 2**31, self.vocab_size)
        if not ids:
            raise InvalidInputError(f"{name} must not be empty: it has no tokens")
        return list(ids)

    def _make(
        self,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        *,
        text: str | None,
        token_ids: list[int],
        other_prompts: Iterable[tuple[int, list[int]]] = (),
        continuation: list[int] | None = None,
    ) -> Request:
        if continuation is None:
            self.check_params(params)
        else:  # all but its last token stand behind every prompt: that one is only asked about
            token_ids = token_ids + continuation[:-1]
            other_prompts = [(model, ids + continuation[:-1]) for model, ids in other_prompts]
        name = f"request-{next(self._numbers)}" if request_id is None else check.text("request_id", request_id, 256)
        priority = check.integer("priority", priority)
        request = Request(
            name,
            text,
            token_ids,
            params,
            priority=priority,
            other_prompts=other_prompts,
            next_token_id=None if continuation is None else continuation[-1],
            num_told=None if continuation is None else len(continuation),
        )
        self._check_request(request)
        return request


def plain(prompt: Prompt) -> str | Sequence[int]:
    """The text or token ids, taken out of their dict if they came in one."""
    if not isinstance(prompt, Mapping):
        return prompt
    fields: Mapping[str, Any] = {name: value for name, value in prompt.items() if value is not None}
    names = set(fields)
    if not names or names - {"prompt", "prompt_token_ids"}:
        raise InvalidInputError(
            f"a prompt given as a dict must have the key prompt, the key prompt_token_ids or both, got {sorted(names)}"
        )
    return fields["prompt_token_ids" if "prompt_token_ids" in names else "prompt"]  # type: ignore[no-any-return]


def text_beside(prompt: Prompt) -> str | None:
    """The text that stands beside token ids in one dict."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    if text is not None and not isinstance(text, str):
        raise check.refuse("prompt", text, "the text of prompt_token_ids beside them")
    return text


def as_prompts(prompts: Any, name: str = "prompts") -> list[Prompt]:
    """A list of prompts, from many or from one: a string, a dict or a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    # Bytes would be taken for token ids, and a set would give its outputs in an order of its own.
    if isinstance(prompts, bytes | bytearray | memoryview | set | frozenset) or not isinstance(prompts, Iterable):
        raise check.refuse(name, prompts, "text, token ids, or a list of these")
    listed = list(prompts)
    if listed and all(isinstance(entry, int) for entry in listed):
        return [listed]
    return listed


def one_for_each(name: str, given: Any, prompts: Sequence[Any], kind: type) -> list[Any]:
    """A list with one value per prompt, from such a list or from one value for all."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise check.refuse(name, given, f"one {kind.__name__}, or a list with one per prompt")
    values = list(given)
    if len(values) != len(prompts):
        raise InvalidInputError(f"{name} must be one, or one per prompt: got {len(values)} for {len(prompts)} prompts")
    return values
