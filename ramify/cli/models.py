"""`ramify models`: the embedded default model and its cache, and what is known of any model before it is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.messages import say
from ramify.config import DEFAULT_MODEL, CacheConfig

if TYPE_CHECKING:
    from ramify.models.survey import Room, Survey

app = typer.Typer(help="The default model and its cache; what a model needs.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """What runs without naming a model, and where it is kept."""
    from ramify.models import embedded

    state = "cached" if embedded.is_cached() else "not fetched yet (ramify models pull)"
    print(f"{embedded.NAME}  SmolLM2-135M-Instruct, {embedded.LICENSE}, {embedded.FILE_SIZE // 10**6} MB, {state}")
    print(f"  {embedded.cached_path()}")


@app.command("pull")
def pull_model() -> None:
    """Fetch the embedded default model into the cache."""
    from ramify.models import embedded

    fresh = not embedded.is_cached()
    path = embedded.fetch(say)
    print(f"{'fetched' if fresh else 'already there'}: {path}")


@app.command("info")
def model_info(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or smollm2-135m.")] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; sizes in bytes.")] = False,
) -> None:
    """What a model is, what it needs, and whether that is here.

    Files' headers are read, not their weights. The status is 0 if the model fits into this machine's memory, and 1 if
    it does not.
    """
    from ramify.models import memory, source
    from ramify.models.survey import cpu_room, gpu_room, survey_model

    survey = survey_model(source.resolve(model, say))
    rooms = {"CPU": cpu_room(survey, memory.free_memory(), memory.total_memory())}
    gpu = memory.gpu_memory()
    if gpu is not None:
        rooms["GPU"] = gpu_room(survey, *gpu, CacheConfig().gpu_memory_utilization)
    print(json.dumps(_facts(survey, rooms)) if as_json else _told(survey, rooms))
    if not any(room.fits for room in rooms.values()):
        raise typer.Exit(1)


def _facts(survey: Survey, rooms: dict[str, Room]) -> dict[str, Any]:
    arch, quantization = survey.arch, survey.arch.quantization
    return {
        "path": str(survey.path),
        "format": survey.container,
        "quantization": survey.quantization,
        "method": None if quantization is None else quantization.method,
        "bits": None if quantization is None else quantization.bits,
        "group_size": None if quantization is None else quantization.group_size,
        "bits_per_weight": round(survey.bits_per_weight, 3),
        "weights_by_format": dict(survey.formats),
        "family": arch.family,
        "parameters": survey.num_parameters,
        "layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "heads": arch.num_heads,
        "kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "vocabulary": arch.vocab_size,
        "context": arch.max_position_embeddings,
        "weight_bytes": {
            "cpu": survey.cpu_bytes,
            "cpu_dequantized": survey.dequantized_cpu_bytes,
            "gpu": survey.gpu_bytes,
        },
        "kv_bytes_per_token": {"cpu": survey.kv_bytes(4), "gpu": survey.kv_bytes(2)},
        "here": {
            name.lower(): {
                "free": room.free,
                "total": room.total,
                "needed": room.needed,
                "fits": room.fits,
                "fits_now": room.fits_now,
                "tokens_by_default": room.default_tokens,
                "tokens_at_most": room.most_tokens,
            }
            for name, room in rooms.items()
        },
    }


def _told(survey: Survey, rooms: dict[str, Room]) -> str:
    arch = survey.arch
    context = "any length" if arch.max_position_embeddings is None else f"{arch.max_position_embeddings:,} tokens"
    dequantized = survey.dequantized_cpu_bytes
    unpacked = f" ({_size(dequantized)} with dequantize)" if dequantized > survey.cpu_bytes else ""
    lines = {
        "format": f"{survey.container}, {survey.quantization}; {survey.bits_per_weight:.1f} bits a weight",
        "model": f"{arch.family}, {_count(survey.num_parameters)} parameters, {arch.num_layers} layers, "
        f"{arch.num_heads} heads over {arch.num_kv_heads} of keys and values",
        "context": f"{context}; vocabulary of {arch.vocab_size:,}",
        "weights": f"{_size(survey.cpu_bytes)} on a CPU{unpacked}, {_size(survey.gpu_bytes)} on a GPU",
        "KV cache": f"{survey.kv_bytes(4):,} bytes a token on a CPU, {survey.kv_bytes(2):,} on a GPU",
        **{f"this {name}": _verdict(room, arch.max_position_embeddings) for name, room in rooms.items()},
    }
    return "\n".join([survey.path.name, *(f"  {topic:<9} {told}" for topic, told in lines.items())])


def _verdict(room: Room, context: int | None) -> str:
    have = f"{_size(room.free)} free of {_size(room.total)}"
    if not room.fits:
        return f"does not fit: it needs {_size(room.needed)}, and there are {_size(room.total)}"
    if not room.fits_now:
        return f"fits, but not beside what runs now: it needs {_size(room.needed)}, and there are {have}"
    enough = context is not None and room.most_tokens >= context
    length = "its whole context" if enough else f"a context of {room.most_tokens:,} tokens"
    return (
        f"fits, with {length}: it needs {_size(room.needed)}, and there are {have}; an engine takes "
        f"{_size(room.pool)} for its KV cache unless told otherwise, {room.default_tokens:,} tokens"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.0f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 10**9 else f"{number / 1e6:.1f} million"
