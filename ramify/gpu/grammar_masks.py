"""Masks of grammars on their way to the GPU: found by several threads in pinned memory, while the device computes what
is drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.device.reads import Int64s
from ramify.device.rows import upload
from ramify.device.staging import Staging
from ramify.engine.plan import Asking
from ramify.structured.mask_threads import WORD
from ramify.structured.matcher import Asked, bits_of, num_words, write_masks


class GrammarMasks:
    def __init__(self, allowed: Tensor) -> None:
        """allowed (slots, words) int32, on the device: a bit for each token; zeros where no mask reaches."""
        self._allowed = allowed
        self._staging: Staging | None = None  # two steps' masks; nobody has asked for any yet
        self._width = 0  # words of a mask: as many as the tokenizer has tokens for

    def write(self, slots: Int64s, drawing: Sequence[Asking]) -> None:
        """What may follow each of these outputs, to its slot.

        A grammar that cannot be followed any further allows nothing, which ends its request with an error.
        """
        asked = [Asked(each.matcher, each.output) for each in drawing if each.matcher is not None]
        staging = self._room_for(num_words(asked))
        staged = staging.take()[: len(asked)]
        masks = staged.numpy().view(np.uint32)
        write_masks(asked, masks)
        for row, each in enumerate(drawing):
            if each.demands.params.allowed_token_ids and not asked[row].matcher.is_over:
                masks[row] &= bits_of(each.demands.params.allowed_token_ids, masks.shape[1] * WORD)
        device, table = self._allowed.device, self._allowed[:, : self._width]
        sent = staged.to(device, non_blocking=True)  # there is a bit for the end of texts, which may be a word more
        table.index_copy_(0, upload(slots, device), sent[:, : table.shape[1]])
        staging.sent()

    def _room_for(self, width: int) -> Staging:
        if self._staging is None or width != self._width:
            self._width = width
            self._staging = Staging(self._allowed.shape[0], width, dtype=torch.int32, device=self._allowed.device)
        return self._staging
