"""The matrices of GPTQ, AWQ and FP8 checkpoints: several tensors of a folder that are one weight, found and checked by
their headers.

    gptq   qweight (depth * bits / 32, outputs), qzeros (groups, outputs * bits / 32), scales (groups, outputs),
           g_idx (depth): which group each column of the weight is in
    awq    qweight (depth, outputs / 8), qzeros (groups, outputs / 8), scales (groups, outputs)
    fp8    weight (outputs, depth) e4m3, weight_scale_inv (outputs / 128, depth / 128), both rounded up

Many GPTQ checkpoints also hold a bias of zeros for every matrix, whether the model has biases or not: the layers that
wrote them always had one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ramify.errors import WeightsError
from ramify.models.families import Architecture
from ramify.models.number_formats import FP8_BLOCK, FP8_FORMAT, NumberFormat, group_format
from ramify.models.quantization_config import Quantization
from ramify.models.safetensors_folder import Header

FLOATING = ("F16", "BF16", "F32")
WORDS = ("I32",)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    name: str  # of the weight that it is
    shape: tuple[int, int]  # outputs, depth
    tensors: tuple[str, ...]  # of which it is made, all their names


class QuantisedMatrices:
    """All of a folder's, by the name of the weight."""

    def __init__(self, quantization: Quantization, headers: Mapping[str, Header]) -> None:
        self.quantization = quantization
        self._headers = headers
        find = self._fp8_matrices if quantization.method == "fp8" else self._grouped_matrices
        self.by_name = {matrix.name: matrix for matrix in find()}
        if not self.by_name:
            raise WeightsError(
                f"config.json says that weights are quantised ({quantization.label}), but no tensor of the folder is"
            )

    def as_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, with each matrix's own tensors as the one weight that they are."""
        taken = {name for matrix in self.by_name.values() for name in matrix.tensors}
        left = {name: shape for name, shape in shapes.items() if name not in taken}
        twice = next((name for name in self.by_name if name in left), None)
        if twice is not None:
            raise WeightsError(f"{twice} is there twice, quantised and not")
        return left | {name: matrix.shape for name, matrix in self.by_name.items()}

    def spare_biases(self, arch: Architecture) -> tuple[str, ...]:
        """Biases of quantised matrices where the model has none; they must be zeros."""
        biases = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), arch.qkv_bias),
            "o_proj": arch.output_bias,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), arch.mlp_bias),
        }
        stems = [name.removesuffix(".weight") for name in self.by_name]
        spare = [f"{stem}.bias" for stem in stems if not biases.get(stem.rpartition(".")[2], False)]
        return tuple(name for name in spare if name in self._headers)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._headers

    def group_size(self, depth: int) -> int:
        return depth if self.quantization.group_size == -1 else self.quantization.group_size

    def num_groups(self, depth: int) -> int:
        return -(-depth // self.group_size(depth))

    def format_of(self, matrix: QuantisedMatrix) -> NumberFormat | None:
        """How its weights are held; None: as float32."""
        depth = matrix.shape[1]
        if self.quantization.method == "fp8":
            return None if depth % FP8_BLOCK else FP8_FORMAT
        return group_format(self.quantization.bits, self.group_size(depth), depth)

    def _grouped_matrices(self) -> Sequence[QuantisedMatrix]:
        stems = [name.removesuffix(".qweight") for name in self._headers if name.endswith(".qweight")]
        return [self._grouped_matrix(stem) for stem in stems]

    def _grouped_matrix(self, stem: str) -> QuantisedMatrix:
        method, bits = self.quantization.method, self.quantization.bits
        in_word = 32 // bits
        rows, columns = self._two(f"{stem}.qweight", WORDS)
        depth, outputs = (rows * in_word, columns) if method == "gptq" else (rows, columns * in_word)
        groups = self.num_groups(depth)
        for name, shape, dtypes in (
            (f"{stem}.scales", (groups, outputs), FLOATING),
            (f"{stem}.qzeros", (groups, outputs // in_word), WORDS),
        ):
            if self._two(name, dtypes) != shape or outputs % in_word:
                raise WeightsError(
                    f"{name} must have shape {shape} for a weight of {outputs} x {depth} in "
                    f"{self.quantization.label}, got {self._headers[name].shape}"
                )
        tensors = [f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales"]
        if method == "gptq" and (name := f"{stem}.g_idx") in self._headers:
            header = self._headers[name]
            if header.shape != (depth,) or header.dtype not in ("I32", "I64"):
                raise WeightsError(f"{name} must be I32 of shape {(depth,)}, got {header.dtype} of {header.shape}")
            tensors.append(name)
        return QuantisedMatrix(f"{stem}.weight", (outputs, depth), tuple(tensors))

    def _fp8_matrices(self) -> Sequence[QuantisedMatrix]:
        found = []
        for name, header in self._headers.items():
            if header.dtype != "F8_E4M3" or not name.endswith(".weight"):
                continue
            outputs, depth = self._two(name, ("F8_E4M3",))
            scale, shape = f"{name}_scale_inv", (-(-outputs // FP8_BLOCK), -(-depth // FP8_BLOCK))
            if self._two(scale, FLOATING) != shape:
                raise WeightsError(f"{scale} must have shape {shape}, got {self._headers[scale].shape}")
            found.append(QuantisedMatrix(name, (outputs, depth), (name, scale)))
        return found

    def _two(self, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        header = self._headers.get(name)
        if header is None:
            raise WeightsError(f"the checkpoint lacks {name}")
        if len(header.shape) != 2 or 0 in header.shape or header.dtype not in dtypes:
            raise WeightsError(
                f"{name} must be a matrix of {' or '.join(dtypes)}, got {header.dtype} of shape {header.shape}"
            )
        return header.shape[0], header.shape[1]
