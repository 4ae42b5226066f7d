"""IncrementalDetokenizer: text as the tokens come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.text.token_text import Pieces, TextAssembler, assembler_for
from ramify.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes ids one at a time.

    What `push` and `flush` return, joined, is `tokenizer.decode(all ids)`, even if the ids spell no valid UTF-8. Text
    is returned as soon as no later token can change it, and a push takes time for its own token only, however many came
    before. `token_text` says how each kind of decoder does this.

    A text that goes on after another keeps the space before its first word, which SentencePiece's decoders strip from
    the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, goes_on: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._assembler: TextAssembler = assembler_for(tokenizer)
        self._goes_on = False
        if goes_on and isinstance(self._assembler, Pieces) and self._assembler.strips:
            self._assembler, self._goes_on = self._assembler.within(), True

    def push(self, token_id: int) -> str:
        """Takes one more token; returns the text that is now certain, which may be none."""
        if token_id in self._skipped:
            return ""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            # As in `decode`: an id without a token has no text.
            return ""
        return self._assembler.push(token)

    def flush(self) -> str:
        """Ends the text and returns what was held back. Nothing may be pushed afterwards."""
        return self._assembler.flush()

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, by themselves: what pushing all of them to a new one would come to."""
        if self._goes_on:
            new = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=self._skips_special_tokens, goes_on=True)
            return "".join(map(new.push, token_ids)) + new.flush()
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special_tokens)

    def fork(self) -> IncrementalDetokenizer:
        """An independent copy: what is pushed to one is not seen by the other."""
        copy = object.__new__(IncrementalDetokenizer)
        copy._tokenizer = self._tokenizer
        copy._skips_special_tokens = self._skips_special_tokens
        copy._skipped = self._skipped
        copy._goes_on = self._goes_on
        copy._assembler = self._assembler.fork()
        return copy


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """What each token adds to the text, special tokens written out; joined, they are the whole text.

    A character that takes several tokens is added by the last of them. Without a tokenizer all texts are empty.
    """
    if tokenizer is None:
        return [""] * len(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces
