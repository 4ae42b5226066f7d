"""Weights of an engine replaced in place, between calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ramify.drive.build import Engine
from ramify.errors import InvalidInputError, UnsupportedError
from ramify.models.weights import fill
from ramify.parallel.leading import replaced_everywhere


def check_replaceable(engine: Engine[Any]) -> None:
    """Raises where nothing can be replaced, or not now; nothing is changed then."""
    if len(engine.decoders) != 1:
        raise UnsupportedError("weights can be replaced in an engine of one model only")
    [decoder] = engine.decoders
    if engine.core.has_unfinished():
        raise InvalidInputError("weights can be replaced between calls only: requests are running")
    if formats := decoder.quantised_formats:
        raise InvalidInputError(
            f"the model's weights are held quantised ({', '.join(formats)}) and cannot be replaced by others: "
            "LLM(…, dequantize=True) holds them as float32"
        )


def replace_weights(engine: Engine[Any], weights: Iterable[tuple[str, Tensor]]) -> None:
    """If it raises, weights of two kinds are mixed. What was computed with the old ones is forgotten."""
    [decoder] = engine.decoders
    engine.core.reset_prefix_cache()
    engine.core.release_all_kept()
    if engine.team is not None:
        weights = replaced_everywhere(weights, decoder.shard, engine.team, model=0)
    fill(decoder, weights)
