"""What callers call devices: one, several that share a model ("cuda:0,cuda:1"), and the teacher's and the student's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from ramify import validation as check
from ramify.errors import InvalidInputError

Device = Literal["auto", "cpu", "cuda"]
# Of two models, the teacher's and the student's: a name, or several, which share that model.
Devices = Sequence[str | Sequence[str]]

_GPU = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")
MOST_RANKS = 64
ONE = "'auto', 'cpu', 'cuda' or 'cuda:N'"
SEVERAL = "'cuda:0,cuda:1' or 'cpu,cpu'"
BOTH = "the teacher's devices and the student's, two in all, like 'cuda:0,cuda:1' and 'cuda:2'"


def names_of(device: str) -> list[str]:
    """One, or those of each rank that shares a model."""
    return device.split(",")


def check_device(field: str, device: object) -> str:
    """One device, or several that can share a model."""
    if not isinstance(device, str):
        raise check.refuse(field, device, f"{ONE}, or several that share a model, like {SEVERAL}")
    names = names_of(device)
    if len(names) == 1:
        if device not in get_args(Device) and not _GPU.fullmatch(device):
            raise check.refuse(field, device, f"{ONE}, or several that share a model, like {SEVERAL}")
        return device
    if len(names) > MOST_RANKS:
        raise InvalidInputError(f"{field} must name at most {MOST_RANKS} devices, got {len(names)}")
    for name in names:
        if name != "cpu" and not _GPU.fullmatch(name):
            raise check.refuse(field, device, f"'cuda:N' or 'cpu' for each of several that share a model ({SEVERAL})")
    if "cpu" in names and set(names) != {"cpu"}:
        raise check.refuse(field, device, "either GPUs or CPUs: they cannot share one model")
    if "cpu" not in names and len(set(names)) < len(names):
        raise check.refuse(field, device, "different GPUs: a model is not shared by a GPU with itself")
    return device


def check_devices(devices: object) -> tuple[str, str]:
    """The teacher's and the student's, each as one name."""
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence) or len(devices) != 2:
        raise check.refuse("devices", devices, BOTH)
    return _group(devices, devices[0]), _group(devices, devices[1])


def _group(devices: object, group: object) -> str:
    names = [group] if isinstance(group, str) else group
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise check.refuse("devices", devices, BOTH)
    return check_device("devices", ",".join(names))
