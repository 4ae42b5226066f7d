"""What tokens cost that would repeat the text (dry, n-grams that may not come again), for kernels.

Who asks for it waits for its token before it goes on, so the host knows the whole text and tells which tokens lose how
much; the graph takes that from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.device.reads import Int64s
from ramify.device.rows import upload
from ramify.engine.demands import MOST_CHARGED
from ramify.engine.plan import Draw
from ramify.sampling.controls import charges_of


class Charges:
    def __init__(self, num_slots: int, vocab_size: int, num_tracks: int, device: torch.device) -> None:
        width = min(MOST_CHARGED, vocab_size)
        # Of each track (slots, width): tokens, and what they lose; 0 behind the last.
        self._tokens = [torch.zeros(num_slots, width, dtype=torch.int32, device=device) for _ in range(num_tracks)]
        self._losses = [torch.zeros(num_slots, width, device=device) for _ in range(num_tracks)]
        self._num_slots = num_slots
        self._written: set[int] = set()  # slots that hold some

    def reset(self) -> None:
        """Nobody knows which slots hold some: any may."""
        self._written = set(range(self._num_slots))

    def write(self, draws: Sequence[Draw], slots: Int64s) -> None:
        """What each of these draws is charged."""
        charged = [index for index, draw in enumerate(draws) if draw.demands.looks_far_back]
        own = set(slots[charged].tolist())
        emptied = sorted(self._written & set(slots.tolist()))
        self._written = (self._written - set(emptied)) | own
        for track, (tokens, losses) in enumerate(zip(self._tokens, self._losses, strict=True)):
            if emptied:
                losses.index_fill_(0, upload(emptied, losses.device), 0.0)
            found = [charges_of(draws[index], track) for index in charged]
            width = max(map(len, found), default=0)
            if width:
                padded = np.zeros((2, len(found), width), np.float64)
                for row, entries in enumerate(found):
                    if entries:
                        padded[:, row, : len(entries)] = np.array(entries).T
                where = upload(slots[charged], tokens.device)
                tokens[:, :width].index_copy_(0, where, upload(padded[0].astype(np.int32), tokens.device))
                losses[:, :width].index_copy_(0, where, upload(padded[1].astype(np.float32), losses.device))

    def take(self, logits: Tensor, slots: Tensor, *, track: int) -> None:
        """From logits (R, V) of the draws in slots (R,), in place."""
        at = slots.clamp_min(0)
        losses = self._losses[track][at].masked_fill(slots[:, None] < 0, 0.0)
        logits.scatter_add_(1, self._tokens[track][at].long(), -losses)
