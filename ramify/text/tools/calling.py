"""Calling: a request's tools on their way through one model: into its prompt, its sampling and out of its answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ramify.errors import InvalidInputError, UnsupportedError
from ramify.outputs import ToolCall
from ramify.sampling_params import SamplingParams
from ramify.text.codec import TextCodec
from ramify.text.tools.events import ToolParser, read_whole
from ramify.text.tools.formats import FORMATS, ToolFormat, format_of
from ramify.text.tools.llama3 import Llama3Parser
from ramify.text.tools.tool_use import ToolUse

T = TypeVar("T")
_OF_GRAMMAR = re.compile(r"structured_outputs\['(json|grammar)'\]")
_PLACE_IN_GRAMMAR = re.compile(r"line \d+, column \d+: ")  # in one that was made here, and that no caller sees


@dataclass(frozen=True, slots=True)
class Calling:
    """`use` by a model that writes calls in `format`; without a format, only what is forced can be read."""

    use: ToolUse
    format: ToolFormat | None

    @classmethod
    def of(
        cls,
        codec: TextCodec,
        tools: object,
        tool_choice: object,
        parallel_tool_calls: object,
        chat_template: str | None,
    ) -> Calling | None:
        """What a Python caller says, whose tools may have any shape that the template understands."""
        use = ToolUse.of(tools, tool_choice, parallel_tool_calls, is_openai=False)
        return None if use is None else cls.by(use, codec, chat_template=chat_template)

    @classmethod
    def by(
        cls, use: ToolUse, codec: TextCodec, *, chat_template: str | None = None, format_name: str | None = None
    ) -> Calling:
        """By a model's own template or another, in the format that it teaches or in one that is named."""
        if format_name is not None:
            return cls(use, FORMATS[format_name])
        source = codec.template_source(with_tools=True) if chat_template is None else chat_template
        return cls(use, None if source is None else format_of(source))

    @property
    def is_readable(self) -> bool:
        """Whether calls can be found in what the model writes."""
        return self.format is not None or bool(self.use.forced)

    def params(self, params: SamplingParams, codec: TextCodec) -> SamplingParams:
        """The caller's parameters, with what calls need of them."""
        if self.use.forced:
            return self._forcing(params)
        if self.use.strict:
            params = self._strictly(params, codec)
        tags = () if self.format is None else self.format.tags
        tokenizer = codec.tokenizer
        if tokenizer is None or not any(tokenizer.token_to_id(tag) in tokenizer.special_token_ids for tag in tags):
            return params
        return params.clone(skip_special_tokens=False)

    def _strictly(self, params: SamplingParams, codec: TextCodec) -> SamplingParams:
        """Whatever is written, a call in it fits its schema."""
        if self.format is None:
            raise UnsupportedError(
                f"the function {self.use.strict[0]!r} is strict, which needs tool_choice 'required' or a function's "
                f"name here: the model's chat template does not show how it writes calls"
            )
        _check_free(params, "where a function is strict")
        tokenizer = codec.tokenizer
        special = () if tokenizer is None else [tokenizer.id_to_token(each) for each in tokenizer.special_token_ids]
        grammar = self.format.answers(self.use.schemas(), [tag for tag in special if tag is not None])
        return self.in_words_of_tools(lambda: params.clone(structured_outputs={"grammar": grammar}))

    def _forcing(self, params: SamplingParams) -> SamplingParams:
        """Nothing but the object of one call can be written."""
        _check_free(params, "where tool_choice makes the model call one")
        arguments = "arguments" if self.format is None else self.format.arguments
        schema = self.use.schema(arguments)
        return self.in_words_of_tools(lambda: params.clone(structured_outputs={"json": schema}))

    @property
    def opening(self) -> str:
        """What the answer begins with before anything is drawn: a call that is forced begins as the model begins it."""
        return self.format.opening if self.use.forced and self.format is not None else ""

    def in_words_of_tools(self, make: Callable[[], T]) -> T:
        """What `make` makes of such parameters; what is wrong with a schema is told by the field that has it."""
        try:
            return make()
        except InvalidInputError as error:
            said = _OF_GRAMMAR.match(str(error))
            if said is None or not (self.use.forced or self.use.strict):
                raise
            why = _PLACE_IN_GRAMMAR.sub("", str(error)[said.end() :])
            raise type(error)(f"tools: the parameters of these functions{why}") from None

    def parser(self) -> ToolParser:
        """For one answer."""
        if self.format is None or self.use.forced:
            return Llama3Parser(self.use.names, most_calls=self.use.most_calls)
        return self.format.make(self.use.names, self.use.most_calls)

    def answer(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """A whole answer's content and calls."""
        answer = read_whole(self.parser(), text)
        return answer.content, tuple(ToolCall(new_call_id(), name, arguments) for name, arguments in answer.calls)


def _check_free(params: SamplingParams, where: str) -> None:
    if params.structured_outputs is not None:
        raise InvalidInputError(f"structured_outputs and response_format must be left out {where}")


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
