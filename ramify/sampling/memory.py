"""What a child's draws remember from one to the next, for rules that tokens alone do not tell: by request and child.

It lasts as long as the request, whatever the scheduler does with the child in between. A step that is broken off and
drawn again finds what it found before: what a draw leaves is for the next position.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from ramify.engine.demands import Demands
from ramify.engine.plan import Draw

T = TypeVar("T")


class Memory(Generic[T]):
    def __init__(self) -> None:
        # Of each request, by child and position; no more positions than the last two.
        self._known: WeakKeyDictionary[Demands, dict[int, dict[int, T]]] = WeakKeyDictionary()

    def recall(self, draw: Draw, otherwise: T) -> T:
        """What the draw before this one left; `otherwise` if there was none."""
        return self._known.get(draw.demands, {}).get(draw.child, {}).get(draw.position, otherwise)

    def note(self, draw: Draw, value: T) -> None:
        """For the draw after this one."""
        of_child = self._known.setdefault(draw.demands, {}).setdefault(draw.child, {})
        for position in [position for position in of_child if position != draw.position]:
            del of_child[position]
        of_child[draw.position + 1] = value
