"""How much memory this process may use: the machine's, or less if its container has a limit."""

from __future__ import annotations

import os
from pathlib import Path

# Limit and usage of a control group, in version 2 and in version 1.
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)

MOST_POOL_BYTES = 4 * 2**30
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def kv_pool_bytes(free: int) -> int:
    """What the KV cache takes on a CPU with so much free memory, unless an engine is told otherwise."""
    return min(MOST_POOL_BYTES, free // 4)


def total_memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits())])


def free_memory() -> int:
    """Bytes that the system could give out now."""
    return min([_available(), *(max(limit - used, 0) for limit, used in _limits())])


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    except (OSError, StopIteration):
        return total_memory() // 2


def _limits() -> list[tuple[int, int]]:
    """(limit, used) of the control groups that have a limit."""
    found = []
    for limit, used in CONTROL_GROUPS:
        try:
            found.append((int(limit.read_text()), int(used.read_text())))
        except (OSError, ValueError):  # another version, or "max", which is no limit
            continue
    return found


def gpu_memory() -> tuple[int, int] | None:
    """(free, total) of the first GPU; None where there is none. torch is asked only where a driver is loaded."""
    if not NVIDIA_DRIVER.exists():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return int(free), int(total)
