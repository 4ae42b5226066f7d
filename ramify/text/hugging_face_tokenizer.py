"""HuggingFaceTokenizer: a model's tokenizer under the names and defaults that `transformers` gave them.

For callers who know those: scripts that encode, decode and render chats themselves. The engine uses `Tokenizer`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ramify import validation as check
from ramify.errors import InvalidInputError, UnsupportedAttributeError
from ramify.foreign.keywords import Foreign, own_keywords, strict_keywords
from ramify.text.codec import Message, TextCodec
from ramify.text.messages import as_conversations
from ramify.text.tokenizer import Tokenizer

_LISTS = "token ids come as lists, whole and unpadded"
# What else `transformers` takes there, at the values that ask for nothing.
KEYWORDS = {
    "return_tensors": Foreign(_LISTS),
    "padding": Foreign(_LISTS, (False,)),
    "truncation": Foreign(_LISTS, (False,)),
    "max_length": Foreign(_LISTS),
    "return_attention_mask": Foreign(_LISTS, (True,)),
    "clean_up_tokenization_spaces": Foreign("text is decoded as the tokenizer says", (False,)),
    "spaces_between_special_tokens": Foreign("text is decoded as the tokenizer says", (True,)),
}


class Encoding(dict[str, Any]):
    """What a tokenizer makes of a text, by key or by attribute: `encoding["input_ids"]`, `encoding.input_ids`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"an encoding has {', '.join(self)}, and no {name!r}")


class HuggingFaceTokenizer:
    """Encodes, decodes and renders as `transformers`' fast tokenizer of the same files does; nothing can be changed."""

    is_fast = True

    def __init__(self, codec: TextCodec) -> None:
        if codec.tokenizer is None:
            raise InvalidInputError("this model has no tokenizer: give prompts as token ids")
        self._codec = codec
        self._tokenizer: Tokenizer = codec.tokenizer
        self.backend = codec.tokenizer.backend

    # -- text and ids ----------------------------------------------------------------------------------------

    @strict_keywords(KEYWORDS, "an option of encode")
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @strict_keywords(KEYWORDS, "an option of decode")
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of one id or of several, special tokens written out unless told otherwise."""
        return self._tokenizer.decode(_as_ids(token_ids), skip_special_tokens=skip_special_tokens)

    @strict_keywords(KEYWORDS, "an option of batch_decode")
    def batch_decode(self, sequences: Sequence[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    @strict_keywords(KEYWORDS, "an option of a tokenizer")
    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """`input_ids` and `attention_mask` of a text, or of each of several, unpadded."""
        if isinstance(text, str):
            token_ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=token_ids, attention_mask=[1] * len(token_ids))
        if not isinstance(text, list | tuple):
            raise check.refuse("text", text, "a text or a list of texts")
        each = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=each, attention_mask=[[1] * len(token_ids) for token_ids in each])

    def tokenize(self, text: str) -> list[str]:
        """The vocabulary's spelling of each token."""
        return [str(self._tokenizer.id_to_token(token_id)) for token_id in self.encode(text, False)]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The vocabulary's spelling of an id, or of each of several; None for an id that names no token."""
        tokens = [self._tokenizer.id_to_token(token_id) for token_id in _as_ids(ids)]
        return tokens[0] if isinstance(ids, int) else tokens

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each of several; one that is not known has the unknown token's, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self._tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    # -- chats -----------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_variables: Any,
    ) -> Any:
        """The text (`tokenize=False`) or the token ids of a conversation, or of each of several.

        Unlike the engine's `chat` it opens no turn for the assistant unless told to. A variable that the template does
        not read is refused.
        """
        others = {name: template_variables.pop(name) for name in KEYWORDS if name in template_variables}
        own_keywords(others, (), KEYWORDS, what="an option of apply_chat_template")
        conversations = as_conversations(conversation) or [conversation]  # an empty one is refused below
        texts = [
            self._codec.render_chat(
                each,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs={**template_variables, **({} if tools is None else {"tools": tools})},
            )
            for each in conversations
        ]
        is_one = len(texts) == 1 and conversations[0] is conversation
        asked: Any = texts[0] if is_one else texts
        if not tokenize:
            return asked
        encoded = self(asked, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    # -- the vocabulary --------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Without the tokens that were added to it; `len` counts those too."""
        return int(self.backend.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [str(self._tokenizer.id_to_token(token_id)) for token_id in self.all_special_ids]

    def __setattr__(self, name: str, value: object) -> None:
        """An attribute that a script sets would be read by nobody."""
        if "backend" in self.__dict__:  # made already
            raise UnsupportedAttributeError(
                f"this tokenizer cannot be changed: {name} cannot be set (nothing is padded or cut here)"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """`eos_token` and its siblings, and `eos_token_id` and theirs: None where the model has no such token."""
        role = name.removesuffix("_id")
        if role in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
            token = self._tokenizer.special_token(role)
            return token if role == name or token is None else self._tokenizer.token_to_id(token)
        raise UnsupportedAttributeError(
            f"this tokenizer has no {check.shown(name)}; `backend` is the whole one of the package tokenizers"
        )


def _as_ids(given: Any) -> list[int]:
    """A list of ids from one id, a list, an array or a tensor."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    try:
        return [operator.index(each) for each in ([listed] if isinstance(listed, int) else listed)]
    except TypeError:
        raise check.refuse("token ids", given, "one id, or a list, an array or a tensor of ids") from None
