"""Who drafts for an engine, and how its drafts are paid for: a look-up, a model that the host waits for, or one on the
device that checks its drafts, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.config import EngineConfig
from ramify.device.pool import KVPool
from ramify.device.rehearsal import Largest
from ramify.device.step import DeviceStep
from ramify.drive.chained_model import ChainedModel
from ramify.drive.draft_model import DraftModel
from ramify.drive.placing import PlacedModel, device_step
from ramify.drive.student_drafter import StudentDrafter
from ramify.engine.blocks import BlockManager
from ramify.engine.drafting.lookup import LookupDrafter
from ramify.engine.drafting.speculation import Speculation
from ramify.engine.drafting.together import Together
from ramify.models.decoder import Decoder

# What a row adds to a step, of what a step takes without any: the default model's step of 1 row takes 14 ms of a core,
# one of 9 rows 46.
CPU_ROW_COST, GPU_ROW_COST = 0.35, 0.004
CPU_MOST_ROWS = 3  # a fifth row takes as long as three before it: beside four sequences no draft pays
GPU_STALL = 0.3  # of a step, where the host does not run ahead of the device


def speculation_of(
    config: EngineConfig,
    models: Sequence[PlacedModel],
    step: DeviceStep,
    managers: Sequence[BlockManager],
    *,
    drafting: Decoder | None,
    largest: Largest,
) -> Speculation | None:
    """Of an engine of these models, whose step checks drafts; drafting: the model that makes them, if one does."""
    scope = config.model_config.speculation
    if scope is None:
        return None
    on_gpu = any(model.device.type == "cuda" for model in models)
    if drafting is None:
        lookup = LookupDrafter("suffix" if scope == "suffix" else "ngram")
        if on_gpu:
            return Speculation(lookup, row_cost=GPU_ROW_COST, stall=GPU_STALL)
        return Speculation(lookup, row_cost=CPU_ROW_COST, most_rows=CPU_MOST_ROWS)
    decoders, role = [model.decoder for model in models], largest.num_tracks - 1
    cost = drafting.arch.num_weights / sum(each.arch.num_weights for each in decoders)
    if step.most_drafting:
        student = StudentDrafter(step, managers[-1], cost=cost, role=role, max_model_len=largest.max_model_len)
        return Together(student)
    length = min(largest.max_model_len, drafting.arch.max_position_embeddings or largest.max_model_len)
    blocks = managers[0].num_blocks
    pool = KVPool(drafting.arch, blocks, largest.block_size, drafting.dtype, drafting.device)
    own_step = device_step(config, [PlacedModel(drafting)], [pool], max_model_len=length)
    own = BlockManager(blocks, largest.block_size, enable_prefix_caching=config.cache_config.enable_prefix_caching)
    most = largest.max_num_batched_tokens
    if step.has_room_for_drafts and own_step.runs_ahead and drafting.device == models[0].device:
        step.check_drafts_of(own_step)
        return Together(
            ChainedModel(
                step,
                own_step,
                own,
                cost=cost,
                role=role,
                max_model_len=length,
                max_num_batched_tokens=most,
                num_known=drafting.arch.vocab_size,
            )
        )
    # A student's prompt is the second of the mixture's.
    drafter = DraftModel(
        own_step,
        own,
        cost=cost,
        role=role,
        vocab_size=min(each.arch.vocab_size for each in decoders),
        num_known=drafting.arch.vocab_size,
        max_model_len=length,
        max_num_batched_tokens=most,
    )
    if on_gpu:
        return Speculation(drafter, row_cost=GPU_ROW_COST, stall=GPU_STALL)
    return Speculation(drafter, row_cost=CPU_ROW_COST, most_rows=CPU_MOST_ROWS)
