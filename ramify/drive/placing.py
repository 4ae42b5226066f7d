"""Models where they compute: each on a device, or shared by several, and all of them under one device step.

draws are made     on the first model's GPU, or on whichever has one; else on the CPU
a model elsewhere  leaves its logits there once a step (device/crossing.py)
a shared model     is led by this process, and followed by those of its team (parallel/)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from ramify import validation as check
from ramify.config import STUDENT, EngineConfig, Lookup
from ramify.cpu.cpu_layers import cpu_layers
from ramify.cpu.cpu_step import CpuStep
from ramify.cpu.panels import PanelPacking
from ramify.device.captured_layers import CapturedLayers
from ramify.device.crossing import CrossedLayers
from ramify.device.guard import on
from ramify.device.lane import most_rows
from ramify.device.layers import Layers
from ramify.device.pool import KVPool
from ramify.device.step import Capture, DeviceStep
from ramify.drive.packing import check_integers, cpu_packing, gpu_packing
from ramify.engine.scheduler import FEWEST_DRAWS
from ramify.gpu.packed_parts import DevicePacking, settle
from ramify.models.decoder import Decoder
from ramify.models.linear import Packing
from ramify.models.loader import ModelLoader, resolve_device
from ramify.parallel.leading import LeadingLayers
from ramify.parallel.orders import Serve
from ramify.parallel.start import start_team
from ramify.parallel.team import Team
from ramify.sampling.mixing import Mixer

_log = logging.getLogger(__name__)
SEVERAL, ENOUGH_DRAWS = 4, 256  # tokens of every sequence in a step; beyond so many, more take more time


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model, or the leading rank's part of one."""

    decoder: Decoder
    team: Team | None = None  # the other ranks, where it is shared
    number: int = 0  # among the models of that team

    @property
    def device(self) -> torch.device:
        return self.decoder.device


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that is to be placed."""

    config: EngineConfig
    loader: ModelLoader


def has_own_process(wanted: bool | None, config: EngineConfig) -> bool:
    """Whether the engine runs in a process of its own. Where nobody says, it does on a GPU.

    A model on a CPU needs every core for its products: messages between processes would cost it one.
    """
    if wanted is None:
        return resolve_device(config.model_config.device).type == "cuda"
    return check.boolean("engine_process", wanted)


def place(models: Sequence[Wanted], say: Callable[[str], None], *, are_apart: bool = False) -> list[PlacedModel]:
    """Reads them all. Those of one place share their ranks; models that are apart have each its own."""
    groups = [[model] for model in models] if are_apart else [list(models)]
    packings = [cpu_packing(group[0].config, say) for group in groups]
    teams: list[Team | None] = []
    placed: list[PlacedModel] = []
    try:
        for group, packing in zip(groups, packings, strict=True):  # all begin to read at the same time
            loaders = [each.loader for each in group]
            teams.append(start_team(loaders, group[0].config, uses_panels=packing is not None))
        for group, packing, team in zip(groups, packings, teams, strict=True):
            for number, each in enumerate(group):
                placed.append(PlacedModel(load(each, packing, team), team, number))
            if team is not None:
                team.wait_until_loaded()
        check_integers(models[0].config, [each.decoder for each in placed])
    except BaseException:
        for team in teams:
            if team is not None:
                team.close()
        raise
    return placed


def load(model: Wanted, packing: PanelPacking | None, team: Team | None = None) -> Decoder:
    held: Packing | None = packing
    if held is None and team is None:
        held = gpu_packing(model.config, model.loader)
    if team is not None:  # whose thread computes, and knows no current device
        with on(team.device):
            return model.loader.load_model(str(team.device), packing=held, ranks=team.ranks)
    with on(resolve_device(model.config.model_config.device)):
        decoder = model.loader.load_model(packing=held)
        if isinstance(held, DevicePacking):  # before memory is measured: what joining parts frees is no step's
            settle(decoder)
        return decoder


def device_step(
    config: EngineConfig,
    models: Sequence[PlacedModel],
    pools: Sequence[KVPool],
    *,
    max_model_len: int,
    mixer: Mixer | None = None,
    are_apart: bool = False,
) -> DeviceStep:
    """What runs plans where the models are: kernels on a GPU, kernels of our own or torch's operators on a CPU."""
    options, drawing = config.model_config, drawing_model(models)
    device = models[drawing].device
    _log.info("preparing the %s's kernels", "CPU" if device.type == "cpu" else "GPU")
    asked: dict[str, Any] = {
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "logprobs_mode": options.logprobs_mode,
        "mixer": mixer,
        "batch_invariant": options.batch_invariant,
    }
    use_graphs = not options.enforce_eager
    if device.type == "cuda" and not are_apart and models[0].team is None:
        from ramify.gpu.gpu_step import gpu_step  # needs Triton, which only a GPU needs

        pairs = [(model.decoder, pool) for model, pool in zip(models, pools, strict=True)]
        if options.speculation is not None:
            asked["drafts"] = student_drafts_there(config, models, are_apart=are_apart)
            asked["checks_drafts"] = options.speculation not in get_args(Lookup)
            asked["max_num_seqs"] = _with_drafts(asked["max_num_seqs"], by_model=asked["checks_drafts"])
        with on(device):
            return gpu_step(pairs, max_model_len=max_model_len, use_graphs=use_graphs, **asked)
    max_rows = most_rows(asked["max_num_seqs"], 1 if mixer is None else 2, len(models))
    teams = list(dict.fromkeys(model.team for model in models if model.team is not None))
    for team in teams:
        team.serve(Serve(pools[0].blocks.shape[1], pools[0].num_host_blocks, max_rows, max_model_len))
    layers: list[Layers] = []
    captures: list[Capture] = []
    for index, pair in enumerate(zip(models, pools, strict=True)):
        own, who = _layers(config, *pair, max_rows, max_model_len)
        layers.append(CrossedLayers(own, device) if are_apart and index != drawing else own)
        captures.append(who)
    if device.type == "cpu":
        packing = models[0].decoder.packing
        return CpuStep(layers, packing.library if isinstance(packing, PanelPacking) else None, **asked)
    from ramify.gpu.gpu_step import kernel_step

    # A CPU needs its tokens when it is told to compute: nothing can be launched ahead of it.
    runs_ahead = all(model.device.type == "cuda" for model in models)
    with on(device):
        return kernel_step(
            layers,
            captures=captures,
            checks=[team.check for team in teams],
            use_graphs=use_graphs,
            runs_ahead=runs_ahead,
            **asked,
        )


def student_drafts_there(config: EngineConfig, models: Sequence[PlacedModel], *, are_apart: bool) -> bool:
    """Whether the step of these models drafts by itself: a student's drafts, beside its teacher on one GPU."""
    is_one_gpu = models[0].device.type == "cuda" and not are_apart and models[0].team is None
    return is_one_gpu and len(models) > 1 and config.model_config.speculation == STUDENT


def _with_drafts(max_num_seqs: int, *, by_model: bool) -> int:
    """How many sequences a step has room for, with drafts in the place of some."""
    several = min(SEVERAL * max_num_seqs, ENOUGH_DRAWS) if by_model else 0
    return max(max_num_seqs, several, FEWEST_DRAWS)


def drawing_model(models: Sequence[PlacedModel]) -> int:
    """Whose device draws: a vocabulary is looked at more often than it crosses, and a GPU looks faster."""
    return next((index for index, model in enumerate(models) if model.device.type == "cuda"), 0)


def _layers(
    config: EngineConfig, model: PlacedModel, pool: KVPool, max_rows: int, max_model_len: int
) -> tuple[Layers, Capture]:
    """And who captures them: on a GPU they do it themselves here, whatever else a step holds."""
    options, team = config.model_config, model.team
    layers: Layers
    who: Capture = "nobody"
    if model.device.type == "cpu":
        layers = cpu_layers(model.decoder, pool, batch_invariant=options.batch_invariant)
    else:
        from ramify.gpu.gpu_step import gpu_layers

        use_graphs = not options.enforce_eager and (team is None or team.backend == "nccl")
        own = gpu_layers(
            model.decoder,
            pool,
            max_rows=max_rows,
            max_model_len=max_model_len,
            batch_invariant=options.batch_invariant,
        )
        layers, who = CapturedLayers(own, max_rows, use_graphs=use_graphs), "layers"
    return (layers if team is None else LeadingLayers(layers, team, model.number)), who
