"""Who packs a model's weights for the kernels that will multiply them, and where that is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.config import EngineConfig
from ramify.cpu.compiler import NoCompilerError
from ramify.cpu.library import load
from ramify.cpu.panels import PanelPacking
from ramify.errors import UnsupportedError
from ramify.gpu.packed_parts import DevicePacking
from ramify.models.decoder import Decoder
from ramify.models.loader import ModelLoader, resolve_device

KERNEL_DTYPES = ("auto", "float", "float32")  # what the CPU's kernels compute in; "auto" is that on a CPU


def gpu_packing(config: EngineConfig, loader: ModelLoader) -> DevicePacking | None:
    """Who brings a quantised folder's weights to a GPU as they are; None: they become numbers of the model's dtype."""
    model = config.model_config
    device = resolve_device(model.device)
    if device.type == "cpu" or model.dequantize or model.batch_invariant or loader.architecture.quantization is None:
        return None
    return DevicePacking(device, loader.dtype_on(device))


def cpu_packing(config: EngineConfig, say: Callable[[str], None]) -> PanelPacking | None:
    """Who packs weights for the CPU's kernels; None where torch's operators compute."""
    model = config.model_config
    if resolve_device(model.device).type != "cpu":
        if model.int8_activations:
            raise UnsupportedError("int8_activations is for CPUs, and this engine runs on a GPU (device='cpu')")
        return None
    try:
        if not model.enforce_eager and model.dtype in KERNEL_DTYPES:
            return PanelPacking(load(say), dequantize=model.dequantize, int8_activations=model.int8_activations)
        why = "enforce_eager does without them" if model.enforce_eager else f"dtype is {model.dtype}"
    except NoCompilerError as error:
        why = str(error)
        say(f"Without the CPU's kernels, on torch's operators: {error}")
    if model.batch_invariant:
        raise UnsupportedError(
            "batch_invariant needs Ramify's own kernels on a CPU, since torch's operators sum in an order that "
            f"follows from the number of rows; here {why}"
        )
    if model.int8_activations:
        raise UnsupportedError(
            f"int8_activations needs Ramify's own kernels: torch's operators have float32 weights; here {why}"
        )
    return None


def check_integers(config: EngineConfig, decoders: Sequence[Decoder]) -> None:
    """Refuses to multiply integers where no model has any."""
    if config.model_config.int8_activations and not any(decoder.holds_integers for decoder in decoders):
        raise UnsupportedError(
            "int8_activations multiplies weights of integers, and this model has none: its checkpoint stores "
            "floating-point numbers"
        )
