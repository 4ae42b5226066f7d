"""What a benchmark took of a GPU at its most, beside the share of it that the engine was allowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Peak:
    """In bytes, since `begin`."""

    reserved: int  # by torch's allocator at its most
    allocated: int  # of that, by tensors at their most
    beside: int  # by the driver, its modules and graphs, and whoever else is on this GPU
    total: int
    allowed: float  # gpu_memory_utilization

    @staticmethod
    def begin() -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @classmethod
    def since_begin(cls, allowed: float) -> Peak | None:
        """None without a GPU."""
        if not torch.cuda.is_available():
            return None
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        beside = total - free - torch.cuda.memory_reserved()
        return cls(torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated(), beside, total, allowed)

    @property
    def share(self) -> float:
        return (self.reserved + self.beside) / self.total

    @property
    def is_inside(self) -> bool:
        return self.share <= self.allowed

    def __str__(self) -> str:
        taken, total = (self.reserved + self.beside) / GIB, self.total / GIB
        where = "inside" if self.is_inside else "OUTSIDE"
        parts = f"tensors {self.allocated / GIB:.1f}, beside torch {self.beside / GIB:.1f}"
        return (
            f"at most {taken:.1f} of {total:.1f} GiB, {self.share:.3f} of the GPU, {where} the {self.allowed} allowed "
            f"({parts})"
        )

    def as_dict(self) -> dict[str, float]:
        sizes = {"reserved": self.reserved, "allocated": self.allocated, "beside": self.beside, "total": self.total}
        told = {f"{name}_gib": round(size / GIB, 3) for name, size in sizes.items()}
        return {**told, "share": round(self.share, 4), "allowed": self.allowed}
