"""Calling: a request's tools on their way through one model: into its prompt, its sampling and out of its answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ramify.errors import InvalidInputError
from ramify.outputs import ToolCall
from ramify.sampling_params import SamplingParams
from ramify.text.codec import TextCodec
from ramify.text.tools.events import ToolParser, read_whole
from ramify.text.tools.formats import FORMATS, ToolFormat, format_of
from ramify.text.tools.llama3 import Llama3Parser
from ramify.text.tools.tool_use import ToolUse

T = TypeVar("T")


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
        tags = () if self.format is None else self.format.tags
        tokenizer = codec.tokenizer
        if tokenizer is None or not any(tokenizer.token_to_id(tag) in tokenizer.special_token_ids for tag in tags):
            return params
        return params.clone(skip_special_tokens=False)

    def _forcing(self, params: SamplingParams) -> SamplingParams:
        """Nothing but the object of one call can be written."""
        if params.structured_outputs is not None:
            raise InvalidInputError(
                "structured_outputs and response_format must be left out where tool_choice makes the model call one"
            )
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
            where = "structured_outputs['json']"
            if not self.use.forced or not str(error).startswith(where):
                raise
            raise type(error)(f"tools: the parameters of these functions{str(error).removeprefix(where)}") from None

    def parser(self) -> ToolParser:
        """For one answer."""
        if self.format is None or self.use.forced:
            return Llama3Parser(self.use.names, most_calls=self.use.most_calls)
        return self.format.make(self.use.names, self.use.most_calls)

    def answer(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """A whole answer's content and calls."""
        answer = read_whole(self.parser(), text)
        return answer.content, tuple(ToolCall(new_call_id(), name, arguments) for name, arguments in answer.calls)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
