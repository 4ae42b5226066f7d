"""ModelLoader: a config to a decoder and a tokenizer."""

from __future__ import annotations

import logging
import time

import torch

from ramify.config import EngineConfig, ModelConfig, ModelDType
from ramify.device_names import names_of
from ramify.errors import InvalidInputError, ModelError
from ramify.models import memory, weights
from ramify.models.decoder import Decoder
from ramify.models.families import Architecture
from ramify.models.files import ModelFiles
from ramify.models.gguf_checkpoint import GGUFCheckpoint
from ramify.models.linear import Packing
from ramify.models.safetensors_folder import read_architecture
from ramify.models.shards import Ranks
from ramify.models.st_file import SafetensorsCheckpoint
from ramify.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
# Where weights find no room; of two models each may have a device of its own.
WHAT_HELPS = (
    "take a smaller or quantised model, a dtype of fewer bytes, a device with more memory or several that share it "
    "(tensor_parallel_size), and for two models a device each (devices)"
)


class ModelLoader(ModelFiles):
    """Reads the weights too."""

    def load_model_and_tokenizer(self, device: str | None = None) -> tuple[Decoder, Tokenizer | None]:
        """The tokenizer is None if the folder has none: such a model takes token ids."""
        tokenizer = self.load_tokenizer()
        return self.load_model(device), tokenizer

    def load_model(
        self, device: str | None = None, packing: Packing | None = None, ranks: Ranks | None = None
    ) -> Decoder:
        """Says in the log that it reads, and then what it has read. A packing: whoever holds the weights, on a CPU.

        Of a model that ranks share, this is one rank's part.
        """
        target = resolve_device(device if device is not None else self.config.device)
        _log.info("%s: reading weights", self.config.model)
        began = time.monotonic()
        decoder = self._read(target, packing, ranks)
        kinds, seconds = decoder.quantised_formats, time.monotonic() - began
        kind = ", ".join(kinds) if kinds else str(decoder.dtype).removeprefix("torch.")
        size = decoder.num_bytes / 2**20
        _log.info("%s: read in %.1f s (%.0f MiB of %s on %s)", self.config.model, seconds, size, kind, target)
        return decoder

    def _read(self, target: torch.device, packing: Packing | None, ranks: Ranks | None) -> Decoder:
        try:
            if self.gguf is not None:
                self._check_memory(target, self.path.stat().st_size)
                stored = GGUFCheckpoint(self.gguf)
                return weights.load(stored, self._dtype(stored.arch.dtype, target), target, packing, ranks)
            if self.config.load_format == "dummy":
                arch = read_architecture(self.path)
                dtype = self._dtype(arch.dtype, target)
                stored_dtype = DTYPES.get(arch.dtype, torch.float32) if packing is not None else dtype
                self._check_memory(target, _dummy_size(arch, stored_dtype, is_packed=packing is not None))
                decoder = Decoder(arch, dtype, target, packing, ranks)
                weights.fill_randomly(decoder, self.config.seed % 2**63, stored_dtype)
                return decoder
            checkpoint = SafetensorsCheckpoint(self.path)
            return weights.load(checkpoint, self._dtype(checkpoint.arch.dtype, target), target, packing, ranks)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelError(f"{self.path.name} does not fit in memory: {WHAT_HELPS} ({error})") from None

    def _check_memory(self, target: torch.device, num_bytes: int) -> None:
        """A system that promises more than it has would end the process when the weights are written."""
        if target.type == "cpu" and num_bytes > memory.total_memory():
            raise ModelError(
                f"{self.path.name} does not fit in memory: its weights take {num_bytes / 2**30:.1f} GiB, and "
                f"{memory.total_memory() / 2**30:.1f} are there. What helps: {WHAT_HELPS}"
            )

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """What this model is computed in there."""
        return self._dtype(self.architecture.dtype, device)

    def _dtype(self, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
        has_bfloat16 = device.type == "cpu" or torch.cuda.is_bf16_supported()
        return choose_dtype(self.config.dtype, checkpoint_dtype, device.type, has_bfloat16=has_bfloat16)


def _dummy_size(arch: Architecture, dtype: torch.dtype, *, is_packed: bool) -> int:
    """Bytes of random weights: quantised ones are in layers, and a byte or so for each 32 is theirs."""
    if not is_packed or arch.quantization is None:
        return arch.num_weights * dtype.itemsize
    outside = arch.vocab_size * arch.hidden_size * (1 if arch.tie_embeddings else 2)
    return outside * dtype.itemsize + (arch.num_weights - outside) * (arch.quantization.bits + 1) // 8


def choose_dtype(asked: ModelDType, checkpoint_dtype: str, device_type: str, *, has_bfloat16: bool) -> torch.dtype:
    """auto is float32 on a CPU; on a GPU the checkpoint's own, except that float32 becomes bfloat16.

    A GPU without bfloat16 takes float16 in its place. What a checkpoint calls by a name unknown here is bfloat16 too.
    """
    if asked != "auto":
        return DTYPES[asked]
    if device_type == "cpu":
        return torch.float32
    if DTYPES.get(checkpoint_dtype) is torch.float16 or not has_bfloat16:
        return torch.float16
    return torch.bfloat16


def resolve_device(name: str) -> torch.device:
    """What a name means here; of several that share a model, the first."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = names_of(name)[0]
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidInputError(f"device {name!r} was asked for, but torch sees no GPU here")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise InvalidInputError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs")
    return device


def rank_devices(config: ModelConfig) -> list[torch.device]:
    """Of every rank that shares this model; what the machine has not got is refused."""
    names, size = names_of(config.device), config.num_ranks
    if len(names) > 1:
        return [resolve_device(name) for name in names]
    device = resolve_device(config.device)
    index: int | None = device.index
    if size == 1 or device.type == "cpu":
        return [device] * size
    if index is not None:
        raise InvalidInputError(
            f"device must be 'cuda', or name all {size} GPUs that share the model, got {config.device!r} with "
            f"tensor_parallel_size {size}"
        )
    there = torch.cuda.device_count()
    if size > there:
        raise InvalidInputError(
            f"tensor_parallel_size must be at most the number of GPUs ({there}), got {size}: each rank has its own"
        )
    return [torch.device("cuda", index) for index in range(size)]


def get_model_and_tokenizer(
    config: ModelConfig | EngineConfig, device: str | None = None
) -> tuple[Decoder, Tokenizer | None]:
    return ModelLoader(config).load_model_and_tokenizer(device)
