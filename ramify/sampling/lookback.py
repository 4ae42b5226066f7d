"""Rules about what a text would repeat: which tokens would, told from the ids of prompt and output alone.

no_repeat_ngram_size   a token that would complete n tokens that were there before, in this order
dry_multiplier         a token that would make a repetition longer: the longer it is, the more it costs
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def completes_repeated(ids: Ids, size: int) -> Ids:
    """The tokens, each once, that would end a run of `size` tokens that `ids` (N,) already has."""
    if size > len(ids):
        return ids[:0]
    runs = np.lib.stride_tricks.sliding_window_view(ids, size)
    begun = ids[len(ids) - (size - 1) :]
    return np.unique(runs[(runs[:, :-1] == begun).all(1), -1])


def longest_repeats(ids: Ids, breakers: Set[int], longest: int) -> tuple[Ids, Ids]:
    """Tokens that once followed what `ids` (N,) ends with, and for each how many of the last tokens agreed there.

    The longest of several agreements counts, and `longest` is the most that is told apart. A breaker neither is part
    of an agreement nor follows one.
    """
    if not len(ids) or int(ids[-1]) in breakers:
        return ids[:0], ids[:0]
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    if breakers:
        ends = ends[~np.isin(ids[ends + 1], list(breakers))]
    lengths = np.ones(len(ends), np.int64)
    growing = np.arange(len(ends))
    for length in range(1, min(longest, len(ids))):
        before = int(ids[-1 - length])
        growing = growing[ends[growing] >= length]
        growing = growing[ids[ends[growing] - length] == before]
        if before in breakers or not len(growing):
            break
        lengths[growing] = length + 1
    followers, place = np.unique(ids[ends + 1], return_inverse=True)
    most = np.zeros(len(followers), np.int64)
    np.maximum.at(most, place, lengths)
    return followers, most
