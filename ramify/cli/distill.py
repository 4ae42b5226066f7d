"""`ramify distill`: problems in, data out."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ramify import validation as check
from ramify.cli.options import ENGINE_FLAGS, chosen, flags_of, override_flags_of, with_flags
from ramify.distill.recipe import Recipe, load_preset, preset_names
from ramify.errors import InvalidInputError

RECIPE_FIELDS = fields(Recipe)
RECIPE = override_flags_of(RECIPE_FIELDS, "Recipe (default: what the preset says)")
# The recipe names both models, and says how to draw from them.
ENGINE_FIELDS = tuple(field for field in ENGINE_FLAGS if field.name not in {"model", "generation_config"})
ENGINE = flags_of(ENGINE_FIELDS, "Engine")
MOST_SHOWN = 10


@with_flags(RECIPE, ENGINE)
def distill(
    problems: Annotated[
        Path, typer.Argument(metavar="PROBLEMS", help="JSONL: an object with `question` and `answer` a line.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A folder; the same one again goes on where it stopped.")],
    preset: Annotated[str, typer.Option(help=f"{', '.join(preset_names())}, or a YAML file.")] = "base",
    limit: Annotated[int | None, typer.Option(help="Only the first so many lines.")] = None,
    on_malformed: Annotated[str, typer.Option(help="stop, or skip: what a bad line does.")] = "stop",
    **values: Any,
) -> None:
    """Sample problems from a teacher and a student at once, and keep what passes.

    Writes samples.jsonl (all samples), data.jsonl (the accepted ones) and report.html. It may be stopped at any moment:
    the same command again goes on.
    """
    from ramify.distill.problems import read_problems
    from ramify.distill.run import DATA, REPORT, Run
    from ramify.optimal import OptimalSampling

    check.choice("on_malformed", on_malformed, ("stop", "skip"))
    if limit is not None:
        check.integer("limit", limit, 1)
    overrides = {field.name: values[field.name] for field in RECIPE_FIELDS if values[field.name] not in (None, [])}
    recipe = load_preset(preset).changed(overrides)
    found, malformed = read_problems(problems, limit)
    console = Console(stderr=True)
    for bad_line in malformed[:MOST_SHOWN]:
        console.print(f"{problems}, {bad_line}", style="yellow", highlight=False, markup=False)
    if len(malformed) > MOST_SHOWN:
        console.print(f"... and {len(malformed) - MOST_SHOWN} more", style="yellow")
    if malformed and on_malformed == "stop":
        raise InvalidInputError(
            f"{_count(len(malformed), 'line')} of {problems} cannot be used; --on-malformed skip leaves such lines out"
        )
    if not found:
        raise InvalidInputError(f"{problems} holds no problem")

    def say(message: str) -> None:
        console.print(message, style="dim", highlight=False, markup=False)

    options: Any = chosen(values, ENGINE_FIELDS)
    run = Run(
        recipe,
        found,
        out,
        lambda: OptimalSampling(preset=recipe, say=say, **options),
        stops_at_refused=on_malformed == "stop",
        show_progress=sys.stderr.isatty(),
    )
    try:
        summary = run()
    except KeyboardInterrupt:
        say(f"stopped; what was done is kept in {out}, and the same command goes on from there")
        raise typer.Exit(130) from None
    for bad_line in summary.refused[:MOST_SHOWN]:
        console.print(f"{problems}, {bad_line}", style="yellow", highlight=False, markup=False)
    earlier = summary.problems - summary.sampled_now
    print(
        f"{_count(summary.problems, 'problem')}{f' ({earlier} from before)' if earlier else ''}, "
        f"{_count(summary.samples, 'sample')}, {summary.accepted} accepted"
    )
    print(f"{out / DATA}\n{out / REPORT}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
