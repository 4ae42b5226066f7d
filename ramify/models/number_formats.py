"""The facts of number formats: how many weights and bytes a block has. No torch is needed to know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class NumberFormat:
    name: str
    type_id: int  # GGML's number for it, or one of ours above all of GGML's
    block_size: int  # weights in a block
    block_bytes: int

    def size(self, num_weights: int) -> int:
        """The bytes of so many weights, in whole blocks."""
        return -(-num_weights // self.block_size) * self.block_bytes


GGUF_FORMATS = (
    NumberFormat("F32", 0, 1, 4),
    NumberFormat("F16", 1, 1, 2),
    NumberFormat("BF16", 30, 1, 2),
    NumberFormat("Q8_0", 8, 32, 34),
    NumberFormat("Q4_0", 2, 32, 18),
    NumberFormat("Q4_1", 3, 32, 20),
    NumberFormat("Q5_0", 6, 32, 22),
    NumberFormat("Q5_1", 7, 32, 24),
    NumberFormat("Q4_K", 12, 256, 144),
    NumberFormat("Q5_K", 13, 256, 176),
    NumberFormat("Q6_K", 14, 256, 210),
)
GGUF_FORMATS_BY_TYPE_ID: Mapping[int, NumberFormat] = MappingProxyType({each.type_id: each for each in GGUF_FORMATS})

# How weights of GPTQ, AWQ and FP8 checkpoints are held, block after block along a row:
#
#     INT4, INT8   scale f16 | zero point, 1 byte | a byte that means nothing | numbers
#     FP8          scale f32 | 128 x e4m3
#
# Nibbles are by 32 weights: 16 bytes, the low ones first. A group of a checkpoint is one block or several alike.
GROUP_BLOCKS = (128, 32)
INT4_FORMATS = tuple(NumberFormat(f"INT4x{size}", 1000 + size, size, 4 + size // 2) for size in GROUP_BLOCKS)
INT8_FORMATS = tuple(NumberFormat(f"INT8x{size}", 2000 + size, size, 4 + size) for size in GROUP_BLOCKS)
FP8_BLOCK = 128  # rows and columns that share a scale
FP8_FORMAT = NumberFormat("FP8", 3000 + FP8_BLOCK, FP8_BLOCK, 4 + FP8_BLOCK)


def group_format(bits: int, group_size: int, depth: int) -> NumberFormat | None:
    """The largest blocks that rows of this depth, and their groups, are whole numbers of; None: there are none."""
    formats = INT4_FORMATS if bits == 4 else INT8_FORMATS
    return next((each for each in formats if not (depth % each.block_size or group_size % each.block_size)), None)


# GGML's other types, by name only, for the message that refuses them.
_OTHER_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
    }
)


def type_name(type_id: int) -> str:
    """GGML's name for a tensor type, supported here or not."""
    if type_id in GGUF_FORMATS_BY_TYPE_ID:
        return GGUF_FORMATS_BY_TYPE_ID[type_id].name
    return _OTHER_TYPE_NAMES.get(type_id, f"GGML type {type_id}")
