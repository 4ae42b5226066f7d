"""What the core asks of a device: the real step (device/step.py), or a fake one in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ramify.engine.demands import SamplerChoice
from ramify.engine.plan import Plan, Ticket


class Device(Protocol):
    """What runs plans, in the order they are launched."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a plan may be launched before the result of the one before it is known.

        Tokens that the host does not know yet are PENDING in it; the device has them.
        """
        ...

    def looks_back(self, asked: SamplerChoice) -> bool:
        """Whether it keeps what was drawn for controls that depend on it: where its kernels serve what is asked for."""
        ...

    @property
    def chooses(self) -> bool:
        """Whether it can choose the continuations of beams, where its kernels serve them."""
        ...

    @property
    def drew_by_kernels(self) -> bool:
        """Whether kernels drew all of the last plan, and chose for its selections: who steps together may go on too."""
        ...

    def launch(self, plan: Plan) -> Ticket: ...

    def begin(self, plan: Plan) -> Callable[[], Ticket]:
        """As launch, but the draws are left to be made later: before the next plan, by what is returned."""
        ...

    def reset(self) -> None:
        """Forgets what earlier plans left, in whatever state a broken launch left it: all that comes is new."""
