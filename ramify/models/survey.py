"""What a model's files say of it, without its weights and without torch: format, size, and what it will need here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from ramify.errors import WeightsError
from ramify.models import memory
from ramify.models.families import Architecture
from ramify.models.gguf_architecture import architecture_of, shapes_of
from ramify.models.gguf_header import GGUFHeader
from ramify.models.number_formats import GGUF_FORMATS, NumberFormat
from ramify.models.quantised_headers import QuantisedMatrices
from ramify.models.safetensors_folder import header_of, open_tensors, read_architecture

GGUF_BY_NAME = {each.name: each for each in GGUF_FORMATS}
F32 = GGUF_BY_NAME["F32"]
OVERHEAD = 250 * 10**6  # bytes of Python and torch beside a model, on a CPU


class Weight(NamedTuple):
    name: str
    shape: tuple[int, ...]
    stored_in: NumberFormat
    stored_bytes: int
    held_in: NumberFormat  # by the CPU's kernels, and on a GPU where it stays quantised

    @property
    def num_weights(self) -> int:
        return prod(self.shape)

    @property
    def is_quantised(self) -> bool:
        return self.stored_in.block_size > 1


@dataclass(frozen=True, slots=True)
class Survey:
    path: Path
    container: str  # GGUF or safetensors
    quantization: str  # the method and what belongs to it, or how weights are stored
    arch: Architecture
    weights: tuple[Weight, ...]
    stays_packed_on_gpu: bool

    @property
    def num_parameters(self) -> int:
        return sum(weight.num_weights for weight in self.weights)

    @property
    def formats(self) -> Counter[str]:
        """How many weights are stored in each format, the most first."""
        counted: Counter[str] = Counter()
        for weight in self.weights:
            counted[weight.stored_in.name] += weight.num_weights
        return Counter(dict(counted.most_common()))

    @property
    def bits_per_weight(self) -> float:
        """Scales included."""
        return 8 * sum(weight.stored_bytes for weight in self.weights) / self.num_parameters

    @property
    def cpu_bytes(self) -> int:
        """Matrices as they are held; all else is float32."""
        return sum((each.held_in if len(each.shape) == 2 else F32).size(each.num_weights) for each in self.weights)

    @property
    def dequantized_cpu_bytes(self) -> int:
        return F32.size(self.num_parameters)

    @property
    def gpu_bytes(self) -> int:
        """In 16 bits, but for what stays quantised."""
        return sum(
            each.held_in.size(each.num_weights)
            if self.stays_packed_on_gpu and each.is_quantised
            else 2 * each.num_weights
            for each in self.weights
        )

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token: a key and a value in every layer."""
        return 2 * self.arch.num_layers * self.arch.num_kv_heads * self.arch.head_dim * itemsize


class Room(NamedTuple):
    """What is free for a model: its weights, then the KV cache."""

    free: int
    total: int
    needed: int  # by the weights and what runs them
    pool: int  # that an engine takes for the KV cache unless it is told otherwise
    kv_bytes: int  # of a token

    @property
    def fits(self) -> bool:
        return self.needed <= self.total

    @property
    def fits_now(self) -> bool:
        return self.needed + self.kv_bytes <= self.free

    @property
    def default_tokens(self) -> int:
        return max(0, self.pool // self.kv_bytes)

    @property
    def most_tokens(self) -> int:
        return max(0, (self.free - self.needed) // self.kv_bytes)


def cpu_room(survey: Survey, free: int, total: int) -> Room:
    needed = survey.cpu_bytes + OVERHEAD
    return Room(free, total, needed, memory.kv_pool_bytes(max(0, free - needed)), survey.kv_bytes(4))


def gpu_room(survey: Survey, free: int, total: int, share: float) -> Room:
    """share: gpu_memory_utilization."""
    pool = int(share * total) - (total - free) - survey.gpu_bytes
    return Room(free, total, survey.gpu_bytes, max(0, pool), survey.kv_bytes(2))


def survey_model(path: Path) -> Survey:
    """Of a folder or a .gguf file."""
    return _survey_gguf(path) if path.is_file() else _survey_folder(path)


def _survey_gguf(path: Path) -> Survey:
    header = GGUFHeader.open(path)
    with header.contents:
        arch = architecture_of(header)
    weights = tuple(
        Weight(name, shape, stored_in, header.tensors[name].num_bytes, stored_in)
        for name, shape in shapes_of(header).items()
        for stored_in in (GGUF_BY_NAME[header.tensors[name].quantization],)
    )
    names = Counter({each.stored_in.name: 0 for each in weights if each.is_quantised})
    for each in weights:
        if each.is_quantised:
            names[each.stored_in.name] += each.num_weights
    label = ", ".join(name for name, _ in names.most_common()) or weights[0].stored_in.name
    return Survey(path, "GGUF", label, arch, weights, stays_packed_on_gpu=False)


def _survey_folder(path: Path) -> Survey:
    arch = read_architecture(path)
    weights = tuple(
        each for each in _folder_weights(path, arch) if not (arch.tie_embeddings and each.name == "lm_head.weight")
    )
    if not weights:
        raise WeightsError(f"{path.name} holds no tensors")
    common = Counter(each.stored_in.name for each in weights).most_common(1)[0][0]
    label = common if arch.quantization is None else arch.quantization.label
    return Survey(path, "safetensors", label, arch, weights, stays_packed_on_gpu=True)


def _folder_weights(path: Path, arch: Architecture) -> Iterator[Weight]:
    headers = {name: header_of(file, name) for name, file in open_tensors(path, "np").items()}
    shapes = {name: header.shape for name, header in headers.items()}
    sizes = {name: prod(header.shape) * _itemsize(name, header.dtype) for name, header in headers.items()}
    matrices = None if arch.quantization is None else QuantisedMatrices(arch.quantization, headers)
    if matrices is not None:
        for matrix in matrices.by_name.values():
            held_in = matrices.format_of(matrix)
            stored_in = held_in or NumberFormat("quantised", -1, matrices.group_size(matrix.shape[1]), 0)
            yield Weight(
                matrix.name, matrix.shape, stored_in, sum(sizes[each] for each in matrix.tensors), held_in or F32
            )
        shapes = {name: shape for name, shape in matrices.as_weights(shapes).items() if name in headers}
        done = {*matrices.by_name, *matrices.spare_biases(arch)}
        shapes = {name: shape for name, shape in shapes.items() if name not in done}
    for name, shape in shapes.items():
        stored_in = GGUF_BY_NAME.get(headers[name].dtype, F32)
        yield Weight(name, shape, stored_in, sizes[name], stored_in)


def _itemsize(name: str, dtype: str) -> int:
    digits = "".join(each for each in dtype.partition("_")[0] if each.isdigit())
    if not digits:
        raise WeightsError(f"{name} is of the unknown type {dtype}")
    return max(1, int(digits) // 8)
