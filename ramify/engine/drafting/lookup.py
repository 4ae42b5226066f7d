"""LookupDrafter: what followed when the last tokens were written before.

"ngram" looks in a sequence's own prompt and output, "suffix" in what its siblings have written too: samples of one
prompt repeat each other.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import chain

from ramify.config import Lookup
from ramify.engine.demands import Demands
from ramify.engine.drafting.drafter import Wanted
from ramify.engine.drafting.ngrams import LONGEST, SIZE, Match, Ngrams
from ramify.engine.sequence import Sequence


class LookupDrafter:
    cost = 0.0
    foreseen = None

    def __init__(self, scope: Lookup) -> None:
        self._among_siblings = scope == "suffix"
        self._known: dict[str, _Texts] = {}  # by request

    def serves(self, _demands: Demands) -> bool:
        return True

    def draft(self, wanted: Items[Wanted]) -> list[list[int]]:
        return [self._draft(*each) for each in wanted]

    def _draft(self, sequence: Sequence, _demands: object, most: int) -> list[int]:
        texts = self._known.get(sequence.request_id)
        if texts is None:
            texts = self._known[sequence.request_id] = _Texts(sequence.prompt_token_ids, self._among_siblings)
        match = texts.find(sequence)
        if match is None:
            return []
        return match.following(min(most, _as_far_as(match)))

    def forget(self, sequence: Sequence) -> None:
        texts = self._known.get(sequence.request_id)
        if texts is not None:
            texts.end(sequence)

    def end(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def reset(self) -> None:
        self._known.clear()


def _as_far_as(match: Match) -> int:
    """How many tokens a match speaks for: what agrees for long goes on to agree for long."""
    return 2 * (match.length - SIZE + 1)


class _Texts:
    """The prompt and the outputs of one request."""

    def __init__(self, prompt: Items[int], among_siblings: bool) -> None:
        self._prompt = prompt
        self._of_prompt = Ngrams()
        self._of_prompt.add(prompt, 0)
        self._of_all = Ngrams() if among_siblings else None
        self._of_each: dict[int, Ngrams] = {}  # by child, where siblings do not count
        self._num_added: dict[int, int] = {}  # tokens of each child's output

    def find(self, sequence: Sequence) -> Match | None:
        """The longest match of what a sequence ends with; the latest of those, its own before the prompt's."""
        output = sequence.output_token_ids
        ngrams = self._of_all if self._of_all is not None else self._of_each.setdefault(sequence.child, Ngrams())
        # What spans prompt and output is not in either; the text that is looked for does.
        ngrams.add(output, self._num_added.get(sequence.child, 0) + 1)
        self._num_added[sequence.child] = len(output)
        text: Items[int] = output
        if len(output) < LONGEST:
            text = list(chain(self._prompt[-LONGEST:], output))
        matches = [match for index in (ngrams, self._of_prompt) if (match := index.find(text)) is not None]
        return max(matches, key=_length, default=None)

    def end(self, sequence: Sequence) -> None:
        """What it wrote stays for its siblings, if they look at it."""
        self._of_each.pop(sequence.child, None)
        if self._of_all is not None and sequence.child in self._num_added:
            self._of_all.add(sequence.output_token_ids, self._num_added[sequence.child] + 1)
            self._num_added[sequence.child] = len(sequence.output_token_ids)


def _length(match: Match) -> int:
    return match.length
