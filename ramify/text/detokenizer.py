"""IncrementalDetokenizer: text as the tokens come, never half a character."""

from __future__ import annotations

from ramify.text.token_text import TextAssembler, assembler_for
from ramify.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes a growing list of ids.

    Promise: all that `push` and `flush` returned, joined, is `tokenizer.decode(all ids)`, also where the ids
    spell no valid UTF-8. Text comes out as soon as no later token can change it; a push costs the length of
    its own token, however much came before. How each kind of decoder keeps this is told in `token_text`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._assembler: TextAssembler = assembler_for(tokenizer)

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that became certain by it, often none."""
        if token_id in self._skipped:
            return ""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            # As in `decode`: an id without a token has no text.
            return ""
        return self._assembler.push(token)

    def flush(self) -> str:
        """End the text: return what was held back. Nothing may be pushed afterwards."""
        return self._assembler.flush()

    def fork(self) -> IncrementalDetokenizer:
        """An independent copy: what is pushed to one is not seen by the other."""
        copy = object.__new__(IncrementalDetokenizer)
        copy._tokenizer = self._tokenizer
        copy._skipped = self._skipped
        copy._assembler = self._assembler.fork()
        return copy
