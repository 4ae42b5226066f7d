"""The device step on a GPU: its layers, its sampler and its graphs put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ramify.config import LogprobsMode
from ramify.device.graphs import padded
from ramify.device.guard import on
from ramify.device.lane import most_rows
from ramify.device.layers import Layers
from ramify.device.pool import KVPool
from ramify.device.step import Capture, DeviceStep
from ramify.engine.plan import MOST_DRAFTED
from ramify.gpu.form_cache import FormCache
from ramify.gpu.gpu_layers import GpuLayers
from ramify.gpu.sampler import KernelSampler
from ramify.models.decoder import Decoder
from ramify.sampling.mixing import Mixer


def gpu_step(
    models: Sequence[tuple[Decoder, KVPool]],
    *,
    max_num_seqs: int,
    max_model_len: int,
    mixer: Mixer | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> DeviceStep:
    """Models that are all on one GPU; the other options are those of `kernel_step`."""
    max_rows = most_rows(max_num_seqs, 1 if mixer is None else 2, len(models))
    forms = FormCache.of(models[0][0].device)
    layers = [
        GpuLayers(*model, max_rows=max_rows, max_model_len=max_model_len, batch_invariant=batch_invariant, forms=forms)
        for model in models
    ]
    return kernel_step(
        layers, max_num_seqs=max_num_seqs, mixer=mixer, batch_invariant=batch_invariant, chooses=True, **options
    )


def gpu_layers(
    decoder: Decoder, pool: KVPool, *, max_rows: int, max_model_len: int, batch_invariant: bool = False
) -> GpuLayers:
    """Of one model, on its own GPU."""
    forms = FormCache.of(decoder.device)
    with on(decoder.device):
        return GpuLayers(
            decoder,
            pool,
            max_rows=max_rows,
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
            forms=forms,
        )


def kernel_step(
    layers: Sequence[Layers],
    *,
    max_num_seqs: int,
    logprobs_mode: LogprobsMode = "raw",
    mixer: Mixer | None = None,
    captures: Sequence[Capture] | None = None,
    checks: Sequence[Callable[[], None]] = (),
    use_graphs: bool = True,
    runs_ahead: bool = True,
    chooses: bool = False,
    batch_invariant: bool = False,
    checks_drafts: bool = False,
    drafts: bool = False,
) -> DeviceStep:
    """Over layers that leave their logits on one GPU, wherever they compute.

    checks_drafts: some model drafts tokens on this GPU. drafts: that is the last of two models here.
    """
    kernels = KernelSampler(
        padded(max_num_seqs),
        min(each.vocab_size for each in layers),
        layers[0].device,
        logprobs_mode,
        mixer,
        batch_invariant=batch_invariant,
        num_drafts=padded(max_num_seqs) * MOST_DRAFTED if checks_drafts or drafts else 0,
    )
    drafting = None
    if drafts:
        last = layers[-1]
        drafting = KernelSampler(
            padded(max_num_seqs), last.vocab_size, last.device, "raw", batch_invariant=batch_invariant
        )
    return DeviceStep(
        layers,
        max_num_seqs=max_num_seqs,
        logprobs_mode=logprobs_mode,
        mixer=mixer,
        kernels=kernels,
        captures=captures,
        checks=checks,
        use_graphs=use_graphs,
        runs_ahead=runs_ahead,
        chooses=chooses,
        batch_invariant=batch_invariant,
        drafting=drafting,
    )
