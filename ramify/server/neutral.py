"""Fields of OpenAI's protocol and of vLLM's server that are not served, and the values at which they ask for nothing.

Clients send them at those values without a thought, so those are accepted. Any other value would change what is
answered: it is refused by the field's name, as not supported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

M = TypeVar("M", bound=BaseModel)


class Neutral(NamedTuple):
    """`values` ask for nothing, and null does not either; `why` is for the reference."""

    values: tuple[Any, ...]
    why: str


_STRUCTURED = Neutral((), "`structured_outputs` says what outputs look like.")
_ELSEWHERE = Neutral((), "Keys and values stay in their engine.")
_VLLM = {
    "use_beam_search": Neutral((False,), "`strategy` `beam_search` with `beam_width` searches by beams."),
    "priority": Neutral((0,), "Requests are served as they come."),
    "truncate_prompt_tokens": Neutral((), "Prompts are never cut."),
    "spaces_between_special_tokens": Neutral((True,), "Text is decoded as the tokenizer says."),
    "request_id": Neutral((), "Names of requests are the server's own."),
    "return_tokens_as_token_ids": Neutral((False,), "`return_token_ids` adds the ids."),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _STRUCTURED),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), _STRUCTURED),
    **dict.fromkeys(("kv_transfer_params", "cache_salt"), _ELSEWHERE),
    "vllm_xargs": Neutral((), "There is nobody to read them."),
}
COMPLETIONS = {
    "suffix": Neutral(("",), "Nothing is inserted before a text."),
    "prompt_embeds": Neutral((), "Prompts are text or token ids."),
    **_VLLM,
}
CHATS = {
    "functions": Neutral(([],), "Functions, which tools replaced, are not supported."),
    "function_call": Neutral(("none", "auto"), "There are no functions to call."),
    "modalities": Neutral((["text"],), "Answers are text."),
    "audio": Neutral((), "Answers are text."),
    "prediction": Neutral((), "Predicted outputs are not supported."),
    "web_search_options": Neutral((), "Nothing is looked up."),
    "reasoning_effort": Neutral(("none",), "There is no effort to choose."),
    "verbosity": Neutral(("medium",), "There is no verbosity to choose."),
    "service_tier": Neutral(("auto", "default"), "There is one tier."),
    "prompt_cache_retention": Neutral(("in_memory",), "Prefixes stay in memory as long as there is room."),
    "echo": Neutral((False,), "`continue_final_message` goes on with a text that was sent."),
    "prompt_logprobs": Neutral((), "Completions report them."),
    "add_special_tokens": Neutral((False,), "The chat template writes them."),
    "documents": Neutral(([],), "Nothing is looked up."),
    "mm_processor_kwargs": Neutral(({},), "Models take text."),
    "media_io_kwargs": Neutral(({},), "Models take text."),
    "thinking_token_budget": Neutral((), "Answers are text as the model writes it."),
    "include_reasoning": Neutral((True,), "Answers are text as the model writes it."),
    **_VLLM,
}


def with_neutral_fields(table: dict[str, Neutral]) -> Callable[[type[M]], type[M]]:
    """Adds the fields of a table to a class of requests."""

    def add(model: type[M]) -> type[M]:
        made: dict[str, Any] = {name: (_type_of(entry), _described(entry)) for name, entry in table.items()}
        return create_model(model.__name__, __base__=model, __module__=model.__module__, **made)

    return add


def _type_of(entry: Neutral) -> Any:
    def check(given: Any) -> Any:
        # Compared as JSON, where true is not 1.
        if given is None or any(type(given) is type(value) and given == value for value in entry.values):
            return given
        context = {"accepted": _accepted(entry), "why": entry.why}
        raise PydanticCustomError("not_supported", "is not supported: only {accepted}", context)

    return Annotated[Any, PlainValidator(check), WithJsonSchema({"enum": [None, *entry.values]})]


def _described(entry: Neutral) -> Any:
    return Field(None, description=f"{entry.why} Only {_accepted(entry)}.")


def _accepted(entry: Neutral) -> str:
    shown = ["null", *map(json.dumps, entry.values)]
    return f"{shown[0]} is accepted" if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]} are accepted"
