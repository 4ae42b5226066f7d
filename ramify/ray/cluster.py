"""Ray itself: imported when it is needed, and joined where a cluster is running."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

from ramify.errors import InvalidInputError, RamifyError

_LONGEST = 300  # characters of a reason that is told
_SECONDS_TO_CONNECT = 10.0


def ray_module(name: str = "ray") -> Any:
    """Ray or one of its modules; without the extra an error that names it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise RamifyError(f'ramify.ray needs {error.name}: pip install ".[ray]" in a checkout') from None


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """This process as a part of a running cluster: the one at that address, or the one of this machine.

    What Ray prints meanwhile goes to standard error: it would stand among results on standard output.
    """
    ray = ray_module()
    with redirect_stdout(sys.stderr):
        try:
            if address is not None:
                _knock(address)
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # of many kinds, by what is wrong with the address or the cluster
            where = f"at {address}" if address else "on this machine (ray start --head starts one)"
            reason = " ".join(str(error).split())[:_LONGEST]
            raise RamifyError(
                f"no Ray cluster answers {where}. --ray-address HOST:PORT names one, and a cluster that asks for a "
                f"token needs RAY_AUTH_MODE=token. The reason: {reason}"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raises if nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidInputError(f"ray_address must be HOST:PORT, got {address!r}")
    with socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT):
        pass


def reason_of(error: BaseException) -> str:
    """Why work on a cluster failed: the last line that an engine's own error left in Ray's report of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("ramify.errors.")]
    return own[-1].partition(": ")[2] if own else (lines[-1] if lines else type(error).__name__)
