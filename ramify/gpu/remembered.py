"""What draws remember beside their tokens, for kernels: arithmetic codes and mirostat's limits.

Who remembers waits for its token before it goes on, so the host knows what the last draw left. It is written into the
draw's slot, and what the kernels leave for the next draw comes back with the token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ramify.device.reads import Int64s
from ramify.device.rows import upload
from ramify.engine.plan import Draw
from ramify.sampling.arithmetic import Code, first_code, refilled
from ramify.sampling.memory import Memory


class Remembered:
    def __init__(self, num_slots: int, device: torch.device) -> None:
        # (slots, 2): a code and what is not known of it, or a limit of surprise in bits.
        self.table = torch.zeros(num_slots, 2, dtype=torch.float64, device=device)
        self._codes: Memory[Code] = Memory()
        self._limits: Memory[float] = Memory()

    def write(self, draws: Sequence[Draw], slots: Int64s) -> None:
        """What each of these draws finds."""
        remembering = [index for index, draw in enumerate(draws) if draw.demands.remembers]
        if remembering:
            found = np.array([self._recall(draws[index]) for index in remembering], np.float64)
            device = self.table.device
            self.table.index_copy_(0, upload(slots[remembering], device), upload(found, device))

    def _recall(self, draw: Draw) -> tuple[float, float]:
        if draw.demands.is_arithmetic:
            return refilled(self._codes.recall(draw, first_code(draw)), draw)
        return self._limit(draw), 0.0

    def _limit(self, draw: Draw) -> float:
        return self._limits.recall(draw, 2 * draw.demands.params.mirostat_tau)  # at first twice what is wanted

    def note(self, draw: Draw, left: Sequence[float]) -> None:
        """What a draw left: the code for the next, or the logprob of its token by what it was drawn from."""
        demands = draw.demands
        if demands.is_arithmetic:
            self._codes.note(draw, Code(*left))
        else:
            surprise = -left[0] / math.log(2)
            params = demands.params
            self._limits.note(draw, self._limit(draw) - params.mirostat_eta * (surprise - params.mirostat_tau))
