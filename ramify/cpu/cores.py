"""How many cores this process may use: those that torch would, or fewer if its container has a quota of their time."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch

# A container's quota of time in each period: both numbers in one file (control groups, version 2), or one in each.
CONTROL_GROUP = Path("/sys/fs/cgroup/cpu.max")
CONTROL_GROUPS_BEFORE = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def usable_cores() -> int:
    """Threads beyond a quota would only use it up sooner, and then all of them stand still until the next period."""
    return min([torch.get_num_threads(), *_quota()])


@cache
def _quota() -> tuple[int, ...]:
    """In whole cores, at least one; empty where there is none."""
    try:
        if CONTROL_GROUP.exists():
            quota, period = CONTROL_GROUP.read_text().split()
        else:
            quota, period = (path.read_text().strip() for path in CONTROL_GROUPS_BEFORE)
        share = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no control group, or "max", which is no quota
        return ()
    return (max(1, math.ceil(share)),) if share > 0 else ()  # version 1 says -1 where there is none
