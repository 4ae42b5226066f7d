"""What Python writes and the kernels read in one piece, field by field as in products.h and layers.cpp."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, ClassVar

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
Fields = list[tuple[str, Any]]


class Stage(IntEnum):
    """Of a layer."""

    WRITE = 0  # queries, keys and values; keys and values to the cache
    ATTEND = 1
    OUTPUT = 2  # of attention, added to the residual
    MLP = 3


class PartFields(ctypes.Structure):
    _fields_: ClassVar[Fields] = [("format", _INTEGER), ("panels", _POINTER), ("bias", _POINTER), ("columns", _INTEGER)]


class WeightFields(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("parts", ctypes.POINTER(PartFields)),
        ("num_parts", _INTEGER),
        ("depth", _INTEGER),
        ("columns", _INTEGER),
        ("order", _POINTER),
        ("most_fixed_rows", _INTEGER),
        ("least_int8_rows", _INTEGER),
    ]


class LayerFields(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("pool", _POINTER),
        ("qkv", WeightFields),
        ("output", WeightFields),
        ("gate_up", WeightFields),
        ("down", WeightFields),
    ]


class LayersFields(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("layers", ctypes.POINTER(LayerFields)),
        ("num_layers", _INTEGER),
        ("heads", _INTEGER),
        ("kv_heads", _INTEGER),
        ("head_dim", _INTEGER),
        ("block_size", _INTEGER),
        ("epsilon", ctypes.c_double),
    ]


class PassFields(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("rows", _INTEGER),
        ("threads", _INTEGER),
        ("residual", _POINTER),
        ("normed", _POINTER),
        ("qkv", _POINTER),
        ("attended", _POINTER),
        ("inner", _POINTER),
        ("added", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("slots", _POINTER),
        ("memory", _POINTER),
        ("order", _POINTER),
        ("tables", _POINTER),
        ("items", _POINTER),
        ("num_shared", _INTEGER),
        ("num_items", _INTEGER),
        ("scores", _POINTER),
        ("scratch", _POINTER),
        ("scratch_size", _INTEGER),
        ("attention_threads", _INTEGER),
    ]
