"""Triton's interpreter without what it does over and over: the same numbers in a fifth of the time.

As it comes, it replaces the language's functions anew for every call inside a kernel, describes the same types anew for
every value, and computes whether integers overflow only to forget it. Here the replacements are found once, types are
kept, and nobody asks about overflows.

One thing is better than it comes: on some processors numpy's library sums a product's row in an order that depends on
where in the tile it stands, which no matrix unit does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

WRITTEN_FOR = "3.6."  # whose interpreter this is about; other versions of Triton run as they come


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Makes the kernels that are launched inside quicker to interpret, and changes nothing else."""
    plain = interpreter.interpreter_builder.options
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang", Replacements().put)
        changes.setattr(interpreter, "_get_np_dtype", kept_by_name(interpreter._get_np_dtype))
        changes.setattr(interpreter.interpreter_builder, "options", type(plain)(sanitize_overflow=False))
        changes.setattr(tl.block_type, "__init__", kept_block_types(tl.block_type.__init__))
        changes.setattr(tl.tensor, "__init__", kept_shapes())
        changes.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def dot(_: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
    """a (M, K) times b (K, N), plus d: each sum in float64 and rounded once, so that its order shows in no bit."""
    sums = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)


class Replacements:
    """What the interpreter puts in the place of the language's functions while a kernel runs."""

    def __init__(self) -> None:
        # Kernels know the language as `tl`, its own library knows it as `tl.core`. Both are replaced at once, so that a
        # call inside a kernel finds everything done.
        both = type("Kernel", (), {"__globals__": {"tl": tl, "core": tl.core}})
        scope = interpreter._patch_lang(both)
        originals: dict[tuple[int, str], tuple[Any, Any]] = {}
        for owner, name, original in scope._changes:
            originals.setdefault((id(owner), name), (owner, original))
        self.changes = [(owner, name, getattr(owner, name), old) for (_, name), (owner, old) in originals.items()]
        self.is_in_place = False
        scope.restore()

    def put(self, _kernel: Any) -> Any:
        """As `_patch_lang`: `restore` of what it returns undoes it."""
        if self.is_in_place:
            return interpreter._LangPatchScope()
        for owner, name, replacement, _ in self.changes:
            setattr(owner, name, replacement)
        self.is_in_place = True
        return self

    def restore(self) -> None:
        for owner, name, _, original in self.changes:
            if original is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self.is_in_place = False


def kept_by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a type, with its answers kept: types of one name are equal."""
    kept: dict[str, Any] = {}

    def look_up(described: Any) -> Any:
        answer = kept.get(described.name)
        if answer is None:
            answer = kept[described.name] = find(described)
        return answer

    return look_up


def kept_block_types(describe: Callable[..., None]) -> Callable[..., None]:
    """`block_type.__init__`: one description for all types of the same elements and shape."""
    kept: dict[Any, dict[str, Any]] = {}

    def initialise(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        facts = kept.get((element_ty.name, sizes))
        if facts is None:
            describe(self, element_ty, shape)
            self.tensor_shape = tl.tuple([tl.constexpr(size) for size in sizes])
            self.tensor_numel = tl.constexpr(self.numel)
            kept[element_ty.name, sizes] = dict(self.__dict__)
        else:
            self.__dict__.update(facts)

    return initialise


def kept_shapes() -> Callable[..., None]:
    """`tensor.__init__` with the shape that its type keeps."""
    none, one = tl.tuple([]), tl.constexpr(1)

    def initialise(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as the interpreter calls it
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = (type.tensor_shape, type.tensor_numel) if type.is_block() else (none, one)

    return initialise
