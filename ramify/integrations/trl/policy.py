"""A trainer's model as a stream of weights for `load_weights`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# What wrappers put before the names of a checkpoint: data parallelism, gradient checkpointing, PEFT.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "base_model.model.")


@contextmanager
def policy_weights(model: torch.nn.Module) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """(name, tensor) of every parameter under its name in the checkpoint; adapters of PEFT are merged meanwhile."""
    adapted: Any = model if hasattr(model, "merge_adapter") and hasattr(model, "peft_config") else None
    if adapted is not None:
        adapted.merge_adapter()
    try:
        yield _named(model, None if adapted is None else str(adapted.base_model.prefix))
    finally:
        if adapted is not None:
            adapted.unmerge_adapter()


def _named(model: torch.nn.Module, adapter_prefix: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if adapter_prefix is not None and (adapter_prefix in name or "original_module." in name):
            continue
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901
        plain = name.replace(".base_layer", "").replace("modules_to_save.default.", "")
        whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # of several ranks
        yield plain, whole.detach()
