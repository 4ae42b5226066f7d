"""The device step on a GPU: its layers, its sampler and its graphs put together."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.config import LogprobsMode
from ramify.device.graphs import padded
from ramify.device.lane import most_rows
from ramify.device.pool import KVPool
from ramify.device.step import DeviceStep
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
    logprobs_mode: LogprobsMode = "raw",
    mixer: Mixer | None = None,
    use_graphs: bool = True,
    runs_ahead: bool = True,
    batch_invariant: bool = False,
) -> DeviceStep:
    max_rows = most_rows(max_num_seqs, 1 if mixer is None else 2, len(models))
    forms = FormCache.of(models[0][0].device)
    layers = [
        GpuLayers(*model, max_rows=max_rows, max_model_len=max_model_len, batch_invariant=batch_invariant, forms=forms)
        for model in models
    ]
    vocab_size = min(decoder.arch.vocab_size for decoder, _ in models)
    kernels = KernelSampler(
        padded(max_num_seqs), vocab_size, layers[0].device, logprobs_mode, mixer, batch_invariant=batch_invariant
    )
    return DeviceStep(
        layers,
        max_num_seqs=max_num_seqs,
        logprobs_mode=logprobs_mode,
        mixer=mixer,
        kernels=kernels,
        use_graphs=use_graphs,
        runs_ahead=runs_ahead,
        batch_invariant=batch_invariant,
    )
