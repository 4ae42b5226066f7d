"""Python's collector of cyclic garbage, kept from looking where there is none.

It looks through all objects there are whenever their number has grown by a quarter, and torch alone brings half a
million: a tenth of a second each time. Modules, vocabularies and models are no garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """For what makes many objects that stay. Afterwards those count as old: they are not looked through as new ones."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _let_all_be_old()
        if was_enabled:
            gc.enable()


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """The collector goes on, but does not look through what was there before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _let_all_be_old() -> None:
    if gc.get_freeze_count() == 0:  # else somebody has frozen objects, and means them to stay so
        gc.freeze()
        gc.unfreeze()
