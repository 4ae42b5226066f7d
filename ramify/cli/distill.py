"""`ramify distill`: problems in, data out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify import validation as check
from ramify.cli.messages import say, say_warning
from ramify.cli.options import (
    ENGINE_FLAGS,
    PAIR_FIELDS,
    chosen,
    flag_of,
    flags_of,
    override_flags_of,
    told_in_flags,
    with_flags,
)
from ramify.config import EngineConfig
from ramify.device_names import Devices, check_devices
from ramify.distill.files import DATA, REPORT, WRITTEN
from ramify.distill.problems import Malformed, Problem, read_problems
from ramify.distill.recipe import Recipe, load_preset, preset_names
from ramify.distill.tally import percent
from ramify.errors import InvalidInputError

if TYPE_CHECKING:
    from ramify.distill.oracle import Oracle
    from ramify.distill.run import Summary
    from ramify.distill.writer import Writers
    from ramify.ray.pool import Pool

RECIPE_FIELDS = fields(Recipe)
RECIPE = override_flags_of(RECIPE_FIELDS, "Recipe (default: what the preset says)")
# The recipe names both models, and says how to draw from them.
OTHER_ENGINE_FLAGS = tuple(field for field in ENGINE_FLAGS if field.name not in {"model", "generation_config"})
ENGINE = flags_of(OTHER_ENGINE_FLAGS, "Engine")
CLUSTER = "On a Ray cluster"
MOST_SHOWN = 10
NOTHING_ACCEPTED = 3  # exit status; 1 and 2 are failures and refusals


@with_flags(RECIPE, ENGINE)
def distill(
    problems: Annotated[
        Path, typer.Argument(metavar="PROBLEMS", help="JSONL: an object with `question` and `answer` a line.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="A folder; the same one again goes on where it stopped."),
    ],
    preset: Annotated[str, typer.Option(metavar="TEXT", help=f"{', '.join(preset_names())}, or a YAML file.")] = "base",
    limit: Annotated[int | None, typer.Option(metavar="INTEGER", help="Only the first so many lines.")] = None,
    on_malformed: Annotated[str, typer.Option(metavar="TEXT", help="stop, or skip: what a bad line does.")] = "stop",
    *,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A device for each model, twice: the teacher's, then the student's; cuda:0,cuda:1 share a model.",
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="On engines of a running Ray cluster (extra ray).", rich_help_panel=CLUSTER)
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where it is; default: this machine's.", rich_help_panel=CLUSTER),
    ] = None,
    ray_engines: Annotated[
        int | None,
        typer.Option(metavar="INTEGER", help="Default: one a GPU, else one a machine.", rich_help_panel=CLUSTER),
    ] = None,
    ray_cpus: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="CPUs of an engine.", rich_help_panel=CLUSTER)
    ] = None,
    ray_gpus: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="GPUs of an engine.", rich_help_panel=CLUSTER)
    ] = None,
    **values: Any,
) -> None:
    """Make training data of a teacher and a student.

    Samples problems from both at once and keeps what passes. Writes samples.jsonl (all samples), data.jsonl (the
    accepted ones) and report.html. It may be stopped at any moment: the same command again goes on. The exit status is
    3 if no sample was accepted.
    """
    check.choice("--on-malformed", on_malformed, ("stop", "skip"))
    if limit is not None:
        check.integer("--limit", limit, 1)
    recipe = _recipe(preset, values)
    _check_place(problems, out)
    given = {"address": ray_address, "engines": ray_engines, "cpus": ray_cpus, "gpus": ray_gpus}
    if not ray and (idle := [name for name, value in given.items() if value is not None]):
        raise InvalidInputError(f"--ray-{idle[0]} needs --ray")
    if ray and values["data_parallel_size"] > 1:
        raise InvalidInputError("--data-parallel-size must be 1 with --ray: --ray-engines says how many there are")
    if ray and devices:
        raise InvalidInputError("--devices is for this machine: with --ray the cluster gives each engine its devices")
    if devices:
        with told_in_flags(PAIR_FIELDS):
            check_devices(devices)
    pool = _pool(num_engines=ray_engines, num_cpus=ray_cpus, num_gpus=ray_gpus)
    found = _read(problems, limit, skips=on_malformed == "skip", has_oracle=recipe.oracle is not None)
    options: Any = chosen(values, OTHER_ENGINE_FLAGS)
    try:
        with _joined(ray_address) if ray else nullcontext(), told_in_flags((*RECIPE_FIELDS, *OTHER_ENGINE_FLAGS)):
            from ramify.distill.run import Run  # torch takes a moment: what is wrong above is told without it

            run = Run(
                recipe,
                found,
                out,
                writers=_on_cluster(recipe, options, pool) if ray else _here(recipe, options, devices or None),
                preset=preset,
                stops_at_refused=on_malformed == "stop",
                show_progress=True,
            )
            summary = run()
    except KeyboardInterrupt:
        say(f"stopped; what was done is kept in {out}, and the same command goes on from there")
        raise typer.Exit(130) from None
    _warn_of(problems, summary.refused)
    _print_summary(summary, out)
    if not summary.accepted:
        raise typer.Exit(NOTHING_ACCEPTED)


def _here(recipe: Recipe, options: Any, devices: Devices | None) -> Writers:
    from ramify.distill.writer import WritersHere
    from ramify.optimal import OptimalSampling

    return WritersHere(
        recipe,
        lambda: OptimalSampling(preset=recipe, say=say, devices=devices, **options),
        lambda: _oracle(EngineConfig.from_options(model=recipe.oracle, **options)),
    )


def _on_cluster(recipe: Recipe, options: Any, pool: Pool) -> Writers:
    from ramify.ray.problems import ClusterWriters

    return ClusterWriters(recipe, options, pool)


def _joined(address: str | None) -> AbstractContextManager[None]:
    from ramify.ray.cluster import joined

    return joined(address)


def _oracle(config: EngineConfig) -> Oracle:
    from ramify.drive.build import build_engine
    from ramify.replicas.doors import model_for_calls

    return model_for_calls(config, say) if config.model_config.data_parallel_size > 1 else build_engine(config, say)


def _pool(**given: Any) -> Pool:
    from ramify.ray.pool import Pool

    try:
        return Pool(**given)
    except InvalidInputError as error:
        name, _, rest = str(error).partition(" ")
        raise InvalidInputError(f"--ray-{name.removeprefix('num_')} {rest}") from None


def _recipe(preset: str, values: dict[str, Any]) -> Recipe:
    overrides = {field.name: values[field.name] for field in RECIPE_FIELDS if values[field.name] not in (None, [])}
    recipe = load_preset(preset)
    with told_in_flags(RECIPE_FIELDS):
        recipe = recipe.changed(overrides)
    asked_of_oracle = sorted(name for name in overrides if name.startswith("oracle_"))
    if recipe.oracle is None and asked_of_oracle:
        raise InvalidInputError(f"{flag_of(asked_of_oracle[0])} needs --oracle, the model that writes missing answers")
    return recipe


def _check_place(problems: Path, out: Path) -> None:
    """The file of problems is only read: it may not be one of the files that the run writes."""
    written = [out / name for name in WRITTEN]
    is_linked = any(each.exists() and problems.exists() and each.samefile(problems) for each in written)
    if is_linked or (problems.parent.resolve() == out.resolve() and problems.name in WRITTEN):
        raise InvalidInputError(f"{problems} is a file that this run would write itself: choose another --out")


def _read(problems: Path, limit: int | None, *, skips: bool, has_oracle: bool) -> list[Problem]:
    found, malformed = read_problems(problems, limit, answers_may_lack=has_oracle)
    _warn_of(problems, malformed)
    if malformed and not skips:
        raise InvalidInputError(
            f"{_count(len(malformed), 'line')} of {problems} cannot be used; --on-malformed skip leaves such lines out"
        )
    if not found:
        raise InvalidInputError(f"{problems} holds no problem")
    if has_oracle and all(problem.answer is not None for problem in found):
        say(f"every problem of {problems} has its answer: the oracle is not asked")
    return found


def _warn_of(problems: Path, malformed: Sequence[Malformed]) -> None:
    for bad_line in malformed[:MOST_SHOWN]:
        say_warning(f"{problems}, {bad_line}")
    if len(malformed) > MOST_SHOWN:
        say_warning(f"... and {len(malformed) - MOST_SHOWN} more")


def _print_summary(summary: Summary, out: Path) -> None:
    """On standard output, line by line; the last line says it if nothing was accepted."""
    earlier = summary.problems - summary.sampled_now
    share = ""
    if summary.rejected:
        low, high = summary.interval
        share = f" ({percent(summary.accepted, summary.samples)}; 95% confidence: {percent(low)} to {percent(high)})"
    print(
        f"{_count(summary.problems, 'problem')}{f' ({earlier} from before)' if earlier else ''}, "
        f"{_count(summary.samples, 'sample')}, {summary.accepted} accepted{share}"
    )
    if summary.rejected:
        print("rejected: " + ", ".join(f"{count} {reason}" for reason, count in summary.rejected.items()))
    for line in summary.advice:
        print(f"advice: {line}")
    print(f"{out / DATA}\n{out / REPORT}")
    if not summary.accepted:
        print(f"nothing accepted: {out / DATA} is empty")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
