"""The compiled functions as Python calls them: pointers and integers. Callers see to shapes and lifetimes.

A call releases Python's lock. It runs on the calling thread and on helpers that all libraries of the process share
(threads.cpp); where another call has them, it runs alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.cpu.compiler import NoCompilerError, compiled
from ramify.cpu.cores import usable_cores
from ramify.cpu.instructions import NATIVE, InstructionSet, asked_for, fitting, processor_flags
from ramify.cpu.prebuilt import carried

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double

_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "tile_columns": ([], _LONG),
    # threads
    "set_torch_threads": ([_LONG], _LONG),
    # memory, size
    "ask_for_huge_pages": ([_POINTER, _LONG], None),
    # format, rows, depth
    "panels_size": ([_LONG] * 3, _LONG),
    # format, stored, panels, rows, depth, threads
    "pack": ([_LONG] + [_POINTER] * 2 + [_LONG] * 3, None),
    # format, panels, rows, out, count, depth, threads
    "unpack_rows": ([_LONG] + [_POINTER] * 3 + [_LONG] * 3, None),
    # format, alike, has_wide_products
    "most_fixed_rows": ([_LONG] * 3, _LONG),
    # format, alike
    "least_int8_rows": ([_LONG] * 2, _LONG),
    # weight, rows
    "product_memory": ([_POINTER, _LONG], _LONG),
    # weight, x, out, rows, ending, memory, threads
    "multiply_packed": ([_POINTER] * 3 + [_LONG] * 2 + [_POINTER, _LONG], None),
    # layers, rows
    "layers_memory": ([_POINTER, _LONG], _LONG),
    # layers, pass, begin, end
    "run_stages": ([_POINTER] * 2 + [_LONG] * 2, None),
    # x, weight, epsilon, out, rows, columns, threads
    "norm": ([_POINTER] * 2 + [_DOUBLE, _POINTER] + [_LONG] * 3, None),
    # logits, stride, scores, rows, vocabulary, threads
    "block_scores": ([_POINTER, _LONG, _POINTER] + [_LONG] * 3, None),
    # logits, stride, top_k, top_p, floors, rows, vocabulary, threads
    "ranked_floors": ([_POINTER, _LONG] + [_POINTER] * 3 + [_LONG] * 3, None),
    # keys, weights, share, found, rows, count, threads
    "crossings": ([_POINTER] * 4 + [_LONG] * 3, None),
    # seed_low, seed_high, child, position, first, level, noise, rows, count, threads
    "gumbel": ([_POINTER] * 5 + [_LONG, _POINTER] + [_LONG] * 3, None),
    # vocabulary
    "mixture_scratch": ([_LONG], _LONG),
    # theta, stride, teacher, stride, forced, method, given, alpha_min, alpha_max,
    # logits, numbers, scratch, rows, vocabulary, threads
    "mix_rows": ([_POINTER, _LONG] * 2 + [_POINTER, _LONG] + [_DOUBLE] * 3 + [_POINTER] * 3 + [_LONG] * 3, None),
    # queries, heads, head_dim
    "attention_scratch": ([_LONG] * 3, _LONG),
    # queries, query_stride, pool, out, scores, order, tables, items, num_shared, num_items,
    # heads, kv_heads, head_dim, block_size, scratch, scratch_size, threads
    "attend": ([_POINTER, _LONG] + [_POINTER] * 6 + [_LONG] * 6 + [_POINTER] + [_LONG] * 2, None),
}


def floats(*shape: int) -> Tensor:
    """Memory that a kernel fills: its own type and place, whatever a program has made the defaults of torch."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


class Library:
    def __init__(self, path: Path, origin: str) -> None:
        self.origin = origin  # where it comes from and what it is for, in words
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NoCompilerError(f"the library cannot be loaded: {error}") from None
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, result
        self.ask_for_huge_pages = functions.ask_for_huge_pages
        self.panels_size = functions.panels_size
        self.pack = functions.pack
        self.unpack_rows = functions.unpack_rows
        self._most_fixed_rows = functions.most_fixed_rows
        self._least_int8_rows = functions.least_int8_rows
        self.product_memory = functions.product_memory
        self.multiply_packed = functions.multiply_packed
        self.layers_memory = functions.layers_memory
        self.run_stages = functions.run_stages
        self.norm = functions.norm
        self.block_scores = functions.block_scores
        self.ranked_floors = functions.ranked_floors
        self.crossings = functions.crossings
        self.gumbel = functions.gumbel
        self.mixture_scratch = functions.mixture_scratch
        self.mix_rows = functions.mix_rows
        self.attention_scratch = functions.attention_scratch
        self.attend = functions.attend
        self.tile_columns: int = functions.tile_columns()
        # Zen 5 and Sapphire Rapids have this shorter form of VNNI beside AVX-512, and processors before them have not.
        self._has_wide_products = {"avx512f", "avx_vnni"} <= processor_flags()
        self._set_torch_threads = functions.set_torch_threads
        self._threads: int | None = None

    @property
    def threads(self) -> int:
        """How many a call may use: as many as torch, within the container's quota."""
        return usable_cores() if self._threads is None else self._threads

    @contextmanager
    def torch_on_one_thread(self) -> Iterator[None]:
        """torch's operators that the calling thread runs stay on it; calls of this library do not."""
        self._threads = usable_cores()
        before = self._set_torch_threads(1)
        try:
            yield
        finally:
            if before > 0:
                self._set_torch_threads(before)
            self._threads = None

    def most_fixed_rows(self, number_format: int, *, alike: bool) -> int:
        """Up to how many rows of x are to be fixed-point numbers (panels.py)."""
        found: int = self._most_fixed_rows(number_format, alike, self._has_wide_products)
        return found

    def least_int8_rows(self, number_format: int, *, alike: bool) -> int:
        """From how many rows of x on they are to be integers of 8 bits, where that is wanted; 0: never (panels.py)."""
        found: int = self._least_int8_rows(number_format, alike)
        return found

    def keep_torch_on_this_thread(self) -> None:
        """For a thread of one's own, as long as it lives."""
        torch.get_num_threads()  # torch sets how many it uses when a thread first asks, and not again
        self._set_torch_threads(1)


def load(say: Callable[[str], None], instructions: InstructionSet | None = None) -> Library:
    """The widest that this installation carries and this processor has, else one that is compiled for it.

    The environment may ask for a set of instructions, and callers too. Raises NoCompilerError where the kernels cannot
    be had.
    """
    asked = instructions or asked_for()
    for each in fitting(processor_flags()) if asked is None else [asked]:
        path = carried(each)
        if path is not None:
            try:
                return Library(path, f"prebuilt for {each.title}")
            except NoCompilerError as error:  # a damaged file, a folder from which nothing may be run
                say(f"The CPU's kernels of this installation cannot be used: {error}")
    with compiled(say, asked or NATIVE) as path:
        return Library(path, f"compiled for {(asked or NATIVE).title}")
