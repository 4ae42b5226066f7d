"""What Ramify finds on a machine: each thing that decides how it runs, what is lacking, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ramify.errors import InvalidInputError, ModelError
from ramify.version import __version__

# "lacking" costs speed or a feature; with "broken" nothing runs.
State = Literal["good", "lacking", "broken"]
LEAST_FREE_MEMORY = 2 * 10**9  # bytes: the default model, its cache and torch
EXTRAS = (  # the modules that a feature needs, the feature, and what to install
    (
        ("fastapi", "uvicorn", "msgspec", "prometheus_client"),
        "ramify serve, the playground",
        'pip install "ramify-llm[server]"',
    ),
    (("llguidance",), "structured_outputs, response_format", 'pip install "ramify-llm[structured]"'),
    (("matplotlib",), "pictures of two models as .png, .svg and .pdf", "pip install matplotlib"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    state: State
    found: str
    advice: str | None = None


def findings(say: Callable[[str], None]) -> Iterator[Finding]:
    """One after the other, as they are found; `say` is told what takes a while."""
    yield Finding("ramify", "good", f"{__version__}, in {Path(__file__).parents[1]}")
    yield _python()
    torch = _torch()
    yield torch
    if torch.state == "broken":
        return
    yield _gpu()
    yield _processor()
    yield _cpu_kernels(say)
    yield _memory()
    yield _cache()
    yield _default_model()
    yield from (_extra(*each) for each in EXTRAS)


def what_will_be_used() -> str:
    """Of a plain `LLM()`: device, precision and kernels."""
    import torch

    from ramify.models.loader import resolve_device

    device = resolve_device("auto")
    if device.type == "cuda":
        name = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
        return f"the GPU (device='auto'), {name}, Triton kernels and CUDA graphs"
    return f"the CPU (device='auto'), float32, {torch.get_num_threads()} threads"


def _python() -> Finding:
    system = platform.system()
    found = f"{platform.python_version()}, {sys.executable}, {system} {platform.machine()}"
    if system == "Linux":
        return Finding("Python", "good", found)
    advice = (
        "Ramify is made for Linux and tested there; elsewhere it runs on torch's operators, without its own kernels"
    )
    return Finding("Python", "lacking", found, advice)


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is damaged or made for another system
        return Finding("PyTorch", "broken", f"it cannot be imported: {error}", "pip install --force-reinstall torch")
    build = "CPU build" if torch.version.cuda is None else f"build for CUDA {torch.version.cuda}"
    return Finding("PyTorch", "good", f"{torch.__version__}, {build}")


def _gpu() -> Finding:
    import torch

    has_driver = Path("/proc/driver/nvidia/version").exists()
    if not torch.cuda.is_available():
        if not has_driver:
            return Finding("GPU", "good", "none; the CPU serves")
        why = "torch is its CPU build" if torch.version.cuda is None else "torch cannot use it (is its driver too old?)"
        return Finding(
            "GPU",
            "lacking",
            f"an NVIDIA driver is loaded, but {why}",
            "install the CUDA build of torch for this driver",
        )
    names = [
        f"{torch.cuda.get_device_name(index)} ({torch.cuda.get_device_properties(index).total_memory / 1e9:.0f} GB)"
        for index in range(torch.cuda.device_count())
    ]
    if importlib.util.find_spec("triton") is None:
        return Finding("GPU", "broken", f"{', '.join(names)}, but Triton is missing", "pip install triton")
    return Finding("GPU", "good", f"{', '.join(names)}, Triton {_version('triton')}")


def _processor() -> Finding:
    from ramify.cpu.instructions import CPU_INFO, fitting, processor_flags

    name = platform.processor() or platform.machine()
    try:
        lines = CPU_INFO.read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    widest = next((each.title for each in fitting(processor_flags())), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{name}, {cores} cores for this process, {widest or 'plain vectors'}"
    if widest is None and platform.machine() == "x86_64":
        return Finding("processor", "lacking", found, "a processor with AVX2 or AVX-512 is several times faster")
    return Finding("processor", "good", found)


def _cpu_kernels(say: Callable[[str], None]) -> Finding:
    from ramify.cpu.compiler import NoCompilerError
    from ramify.cpu.instructions import VARIABLE, asked_for, fitting, processor_flags
    from ramify.cpu.library import load

    try:
        origin = load(say).origin
        asked, fits = asked_for(), fitting(processor_flags())
    except InvalidInputError as error:
        return Finding("CPU kernels", "broken", str(error), f"unset {VARIABLE}, or set it to one of these")
    except NoCompilerError as error:
        remedy = "mend that"
        if shutil.which("g++") is None:
            carries = ", or Ramify's wheel, which carries them" if fitting(processor_flags()) else ""
            remedy = f"install g++ (Debian, Ubuntu: apt install g++){carries}"
        advice = f"{remedy}; until then torch's operators serve, at less than half of the speed"
        return Finding("CPU kernels", "lacking", f"not there: {error}", advice)
    if asked is not None and asked in fits[1:]:
        advice = f"unset {VARIABLE}: this processor has {fits[0].title}"
        return Finding("CPU kernels", "lacking", f"{origin}, as {VARIABLE}={asked.name} asks", advice)
    return Finding("CPU kernels", "good", origin)


def _memory() -> Finding:
    from ramify.models.memory import free_memory, total_memory

    free = free_memory()
    found = f"{free / 1e9:.1f} GB free of the {total_memory() / 1e9:.1f} GB that this process may use"
    if free < LEAST_FREE_MEMORY:
        return Finding("memory", "lacking", found, "close something, or raise the container's limit")
    return Finding("memory", "good", found)


def _cache() -> Finding:
    from ramify.files import disk
    from ramify.models import embedded

    try:
        folder = embedded.cache_folder()
    except RuntimeError as error:  # a user without a home
        return Finding("cache", "lacking", str(error), "set RAMIFY_CACHE to a folder of your own")
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        advice = "set RAMIFY_CACHE to a folder that you may write to"
        return Finding("cache", "lacking", f"{folder}: {there} cannot be written to", advice)
    free = disk.free_space(there)
    found = f"{folder}, {free / 1e9:.1f} GB free"
    if free < embedded.WHEEL_SIZE + embedded.FILE_SIZE and not embedded.is_cached():
        return Finding("cache", "lacking", f"{found}: no room for the default model", embedded.HINT)
    return Finding("cache", "good", found)


def _default_model() -> Finding:
    from ramify.models import embedded

    try:
        if embedded.is_cached():
            return Finding("default model", "good", f"{embedded.NAME}, {embedded.cached_path()}")
    except (OSError, RuntimeError, ModelError) as error:
        return Finding("default model", "lacking", str(error), "set RAMIFY_CACHE to a folder of your own")
    size = embedded.FILE_SIZE // 10**6
    return Finding("default model", "good", f"{embedded.NAME} is fetched when it is first used, {size} MB by pip")


def _extra(modules: tuple[str, ...], feature: str, install: str) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return Finding(feature, "good", ", ".join(f"{module} {_version(module)}" for module in modules))
    return Finding(feature, "lacking", f"{', '.join(missing)} not installed", install)


def _version(module: str) -> str:
    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return "of unknown version"
