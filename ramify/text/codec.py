"""TextCodec: all that an engine and its callers need to turn text into token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ramify.errors import InvalidInputError
from ramify.sampling_params import SamplingParams
from ramify.text.detokenizer import IncrementalDetokenizer
from ramify.text.messages import validate_messages
from ramify.text.stream import TextStream
from ramify.text.token_text import ByteLevel, Pieces, assembler_for
from ramify.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ramify.text.chat_template import ChatTemplate

Message = Mapping[str, Any]


class TextCodec:
    """A model's tokenizer and chat template. Without a tokenizer, encoding is refused and all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        assembler = None if tokenizer is None else assembler_for(tokenizer)
        self._speller = assembler if isinstance(assembler, ByteLevel | Pieces) else None

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own, compiled when it is first asked for: a caller who never chats does not wait for it."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return None
        return self._compiled(self.tokenizer.chat_template)

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The model's own for chats with tools, where it brings one; else the same."""
        source = self.template_source(with_tools=True)
        is_own = self.tokenizer is not None and source != self.tokenizer.chat_template
        return self._compiled(source) if is_own and source is not None else self.chat_template

    def template_source(self, *, with_tools: bool) -> str | None:
        if self.tokenizer is None:
            return None
        of_tools = self.tokenizer.chat_templates.get("tool_use") if with_tools else None
        return self.tokenizer.chat_template if of_tools is None else of_tools

    def _compiled(self, source: str) -> ChatTemplate:
        from ramify.text.chat_template import ChatTemplate  # Jinja takes a tenth of a second to import

        return ChatTemplate(source, {} if self.tokenizer is None else self.tokenizer.special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise InvalidInputError("this model has no tokenizer: give prompts as token ids")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens, both at the beginning of a text and after a space."""
        spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
        encoded = [tuple(self.encode(spelling, add_special_tokens=False)) for spelling in spellings]
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole list of ids, special tokens written out; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode_token(self, token_id: int) -> str:
        """What a token adds to a text that goes before it: with the space that decoders drop where a text begins."""
        spelled = self._spelled(token_id)
        return self.decode([token_id]) if spelled is None else spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> list[int]:
        """The bytes that a token stands for, even if they are only part of a character."""
        spelled = self._spelled(token_id)
        return list(self.decode_token(token_id).encode("utf-8") if spelled is None else spelled)

    def _spelled(self, token_id: int) -> bytes | None:
        """None where a token's text depends on those around it."""
        if self.tokenizer is None or self._speller is None:
            return None
        token = self.tokenizer.id_to_token(token_id)
        return b"" if token is None else self._speller.spelled(token)

    def begin_text(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer | None:
        """For tokens that go on after a prompt; None without a tokenizer. After a special token a new text begins."""
        if self.tokenizer is None:
            return None
        goes_on = bool(prompt_token_ids) and prompt_token_ids[-1] not in self.tokenizer.special_token_ids
        return IncrementalDetokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens, goes_on=goes_on)

    def text_after(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of tokens that go on after others, special ones left out; empty without a tokenizer."""
        text = self.begin_text(prompt_token_ids)
        return "" if text is None else text.whole(token_ids)

    def make_stream(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> TextStream:
        """An empty TextStream with the stop strings and options of these parameters, for what follows this prompt."""
        detokenizer = None
        if params.detokenize:
            detokenizer = self.begin_text(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        return TextStream(detokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        opening: str = "",
    ) -> str:
        """The text of a conversation, by the model's own chat template unless another is given.

        `opening` is what the turn that is opened begins with. With `continue_final_message` the text ends where the
        last message ends, so that the model goes on with it.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidInputError(
                "continue_final_message needs add_generation_prompt to be False: the last turn is open, or a new one is"
            )
        extra = dict(chat_template_kwargs or {})
        if chat_template is not None:  # then the model's own, which may be malformed, is not looked at
            template: ChatTemplate | None = self._compiled(chat_template)
        else:
            template = self.tool_template if extra.get("tools") else self.chat_template
        if template is None:
            raise InvalidInputError("this model has no chat template; use generate with a prompt of your own")
        for name in ("messages", "add_generation_prompt"):
            if name in extra:
                raise InvalidInputError(f"chat_template_kwargs must not name {name!r}: it has a place of its own")
        text = template.render(messages, add_generation_prompt=add_generation_prompt, **extra)
        if continue_final_message:
            return up_to_message(text, messages[-1])
        return text + opening if add_generation_prompt else text


def up_to_message(text: str, message: Message) -> str:
    """A rendered conversation up to the end of its last message's own text."""
    [checked] = validate_messages([message])
    content = checked["content"] or ""
    begin = text.rfind(content.strip())
    if not content.strip() or begin < 0:
        raise InvalidInputError("continue_final_message needs a last message whose text the chat template keeps")
    kept = content.lstrip()  # with the space at its end, if the template keeps that
    return text[: begin + len(kept if text.startswith(kept, begin) else content.strip())]
