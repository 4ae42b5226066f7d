"""Command-line flags made from dataclass fields, so that a field and its flag can never differ."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args

import typer

from ramify.config import CacheConfig, MixtureConfig, ModelConfig, SchedulerConfig
from ramify.errors import InvalidInputError
from ramify.sampling_params import PYTHON_ALONE, SamplingParams
from ramify.server.config import PairConfig, ServerConfig
from ramify.validation import shown

ENGINE_FIELDS = tuple(field for kind in (ModelConfig, CacheConfig, SchedulerConfig) for field in fields(kind))
SAMPLING_FIELDS = tuple(field for field in fields(SamplingParams) if field.name not in PYTHON_ALONE)
# The engine's own seed would collide with the request's --seed, which is the one people mean.
ENGINE_FLAGS = tuple(field for field in ENGINE_FIELDS if field.name != "seed")
SERVER_FIELDS, PAIR_FIELDS, MIXTURE_FIELDS = fields(ServerConfig), fields(PairConfig), fields(MixtureConfig)

Made = TypeVar("Made")

# Fields that are typed as JSON, each with an example that is quoted as a shell wants it.
LOGIT_BIAS_EXAMPLE = """'{"50": -2.5}'"""
STRUCTURE_EXAMPLE = """'{"choice": ["yes", "no"]}'"""
_JSON_EXAMPLES = {"logit_bias": LOGIT_BIAS_EXAMPLE, "structured_outputs": STRUCTURE_EXAMPLE}
_SHORT = {"n": "-n", "model": "-m"}
_METAVARS = {"bool": None, "int": "INTEGER", "float": "NUMBER"}  # by the first word of a type; all else is TEXT
_PLAIN_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "bool | None": bool | None,
    "str": str,
    "int | None": int | None,
    "float | None": float | None,
    "str | None": str | None,
    "str | Sequence[str] | None": list[str] | None,
    "Sequence[str] | None": list[str] | None,
    "Sequence[int] | None": list[int] | None,
    "tuple[str, ...]": list[str],
}


def flags_of(
    some: Iterable[Field[Any]], panel: str, defaults: Mapping[str, Any] | None = None
) -> list[inspect.Parameter]:
    """One keyword parameter per field, annotated so that typer makes a flag of it; `defaults` are the command's own."""
    return [_parameter(field, panel, defaults or {}) for field in some]


def override_flags_of(some: Iterable[Field[Any]], panel: str) -> list[inspect.Parameter]:
    """As flags_of, but a flag that is left out is None, so that the preset's value stays."""
    return [optional(flag) for flag in flags_of(some, panel)]


def optional(flag: inspect.Parameter, shown: str | bool = False) -> inspect.Parameter:
    """The flag, None if it is left out; `shown` is what the help says of that."""
    kind, option = get_args(flag.annotation)
    option.show_default = shown
    option.help = option.help.removesuffix(_switch_default(flag.default))
    return flag.replace(default=None, annotation=Annotated[kind | None, option])


def with_flags(*panels: list[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds flags to a command; it receives their values as keyword arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        parameters = own + [flag for flags in panels for flag in flags]

        def run(**values: Any) -> None:
            command(**values)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def chosen(values: dict[str, Any], some: Iterable[Field[Any]]) -> dict[str, Any]:
    """The values of these fields' flags, as the dataclass wants them."""
    return {field.name: _parsed(field, values[field.name]) for field in some}


def made(kind: Callable[..., Made], values: dict[str, Any], some: Iterable[Field[Any]], **others: Any) -> Made:
    """What `kind` makes of these fields' flags; what it refuses is said in the flags' own words."""
    some = tuple(some)
    with told_in_flags(some):
        return kind(**chosen(values, some), **others)


@contextmanager
def told_in_flags(some: Iterable[Field[Any]]) -> Iterator[None]:
    """Around what may refuse values of these fields' flags: it speaks of the flags, in one line as ever."""
    try:
        yield
    except InvalidInputError as error:
        raise type(error)(in_flags_words(str(error), (field.name for field in some))) from None


def in_flags_words(message: str, names: Iterable[str]) -> str:
    """`best_of must be at least n = 3` as `--best-of must be at least --n = 3`.

    A name that is an everyday word too (stop, seed) is taken for a field where a message, or a line of a list in it,
    begins, and before its value.
    """
    for name in names:
        place = rf"\b{name}\b" if "_" in name else rf"^{name}\b|(?<=\n- ){name}\b|\b{name}(?= = )"
        message = re.sub(place, flag_of(name), message)
    return message


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter(field: Field[Any], panel: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    # Unions and literals of strings are typed as text here; the dataclass itself checks them.
    kind = _PLAIN_TYPES.get(str(field.type), str | None if _shown_default(field) is None else str)
    default = defaults.get(field.name, _shown_default(field))
    names = [flag_of(field.name)]
    if kind in (bool, bool | None):
        names = [f"{names[0]}/{flag_of(f'no_{field.name}')}"]
    if field.name in _SHORT:
        names.append(_SHORT[field.name])
    option = typer.Option(
        *names,
        help=_help(field, kind, default),
        rich_help_panel=panel,
        metavar=_metavar(field, kind),
        show_default=kind is not bool,
        parser=_PARSERS.get(str(field.type)),
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _help(field: Field[Any], kind: Any, default: Any) -> str:
    says: str = field.metadata["help"]
    if kind is bool:
        return says + _switch_default(default)
    if field.name in _JSON_EXAMPLES:
        return f"{says}, like {_JSON_EXAMPLES[field.name]}"
    return f"{says} (repeatable)" if str(kind).startswith("list[") else says


def _switch_default(default: Any) -> str:
    """What the help says of a switch that is left out; typer would name the flag a second time."""
    return f"  [default: {'on' if default else 'off'}]"


def _metavar(field: Field[Any], kind: Any) -> str | None:
    if field.name in _JSON_EXAMPLES:
        return "JSON"
    [word] = re.findall(r"bool|int|float|str", str(kind))[:1]
    return _METAVARS.get(word, "TEXT")


def _number(parse: Callable[[str], Made], what: str, *, or_none: bool) -> Callable[[Any], Made | None]:
    """`none` is how None is typed: a flag whose default is a number could not say it otherwise."""

    def parse_number(text: Any) -> Made | None:
        if or_none and str(text).lower() == "none":
            return None
        try:
            return parse(str(text))
        except ValueError:
            wanted = f"neither {what} nor none" if or_none else f"not {what}"
            raise typer.BadParameter(f"{text!r} is {wanted}") from None

    return parse_number


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "int": _number(int, "an integer", or_none=False),
    "float": _number(float, "a number", or_none=False),
    "int | None": _number(int, "an integer", or_none=True),
    "float | None": _number(float, "a number", or_none=True),
}


def _shown_default(field: Field[Any]) -> Any:
    default = None if field.default is MISSING else field.default
    if isinstance(default, Enum):
        return default.value
    return str(default).lower() if isinstance(default, bool) and field.type != "bool" else default


def _parsed(field: Field[Any], value: Any) -> Any:
    if field.name == "logit_bias" and isinstance(value, str):
        try:
            return {int(key): bias for key, bias in json.loads(value).items()}
        except (ValueError, AttributeError):
            raise InvalidInputError(f"--logit-bias must be JSON like {LOGIT_BIAS_EXAMPLE}, got {value!r}") from None
    if field.name == "structured_outputs" and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"--structured-outputs must be JSON like {STRUCTURE_EXAMPLE}, got {shown(value)}: {error}"
            ) from None
    if field.name == "early_stopping" and value in ("true", "false"):
        return value == "true"
    if value == []:
        return None
    return value
