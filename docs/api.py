"""Writes docs/api.md from the signatures and docstrings of every public name; nothing is imported.

    python docs/api.py            prints the page
    python docs/api.py --write    writes it

The order of the page is this file's; that every public name is in it once, and that the page is fresh, a test holds.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
WIDTH = 116  # of a signature that stays on one line

CHAPTERS: dict[str, tuple[str, ...]] = {
    "Doors": ("LLM", "Tree", "Node", "AsyncLLM", "OptimalSampling", "OptimalSamplingV1"),
    "What is asked": ("SamplingParams", "SamplingStrategy", "SamplingType", "OutputKind", "TextPrompt", "TokensPrompt"),
    "What comes back": (
        "RequestOutput",
        "CompletionOutput",
        "FinishReason",
        "Logprob",
        "RequestMetrics",
        "GrowthStep",
        "GrownToken",
        "Standing",
        "OptimalOutputs",
        "Inclusion",
        "Kept",
        "MixtureReport",
        "ContinuationLogprobs",
        "PairLogprobs",
    ),
    "Configuration": ("EngineConfig", "ModelConfig", "CacheConfig", "SchedulerConfig", "MixtureConfig"),
    "Loading": ("ModelLoader", "get_model_and_tokenizer"),
    "The engine's parts": (
        "Request",
        "Sequence",
        "SequenceData",
        "SequenceStatus",
        "EngineCore",
        "AsyncEngine",
        "RequestStream",
        "IterationStats",
    ),
    "The rules without the engine": (
        "BestOfNFilter",
        "ParentRequest",
        "ParallelSamplingManager",
        "BeamState",
        "BeamSearchManager",
        "DiverseSamplingManager",
        "Sampler",
        "ModelRunner",
    ),
    "Errors": (
        "RamifyError",
        "InvalidInputError",
        "UnsupportedError",
        "UnsupportedAttributeError",
        "ModelError",
        "ModelNotFoundError",
        "FileFormatError",
        "UnsupportedModelError",
        "WeightsError",
        "ChatTemplateError",
        "IllegalMoveError",
        "CacheExhaustedError",
        "EngineFaultError",
        "EngineLostError",
        "EngineAsleepError",
        "EngineBusyError",
        "EngineClosedError",
    ),
}


class Source:
    """A module's text and its definitions by name."""

    def __init__(self, module: str) -> None:
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        self.module = module
        self.lines = text.splitlines()
        self.named: dict[str, ast.stmt] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                self.named[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.named[node.targets[0].id] = node

    def remark(self, node: ast.stmt) -> str:
        """The comment at the end of a statement's last line."""
        found = re.search(r"  # (.*)$", self.lines[(node.end_lineno or node.lineno) - 1])
        return "" if found is None or found[1].startswith(("type:", "noqa")) else found[1]


def homes() -> dict[str, str]:
    """Public name -> module, as the package itself says."""
    tree = ast.parse((ROOT / "ramify" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return {name: home for home, names in ast.literal_eval(node.value).items() for name in names}
    raise LookupError("ramify/__init__.py has no _HOMES")


def page() -> str:
    where = homes()
    sources = {module: Source(module) for module in set(where.values())}
    lines = [
        "# API",
        "",
        "Every public name of `ramify`, by its signature and docstring. `docs/api.py` makes this page, and",
        "`make format` writes it. [usage.md](usage.md) and [sampling.md](sampling.md) explain; this page lists.",
    ]
    for chapter, names in CHAPTERS.items():
        lines += ["", f"## {chapter}"]
        for name in names:
            source = sources[where[name]]
            lines += ["", f"### {name}", "", f"`{source.module}`", "", *_described(name, source)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _described(name: str, source: Source) -> Iterator[str]:
    node = source.named[name]
    if isinstance(node, ast.ClassDef):
        yield from _class(node, source)
    elif isinstance(node, ast.FunctionDef):
        yield from _code(_signature(node, node.name))
        yield from _docstring(node)
    else:
        assert isinstance(node, ast.Assign), name
        remark = source.remark(node)
        yield f"Another name of `{ast.unparse(node.value)}`{f': {remark}' if remark else ''}."


def _class(node: ast.ClassDef, source: Source) -> Iterator[str]:
    functions = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    if "__init__" in functions:
        yield from _code(_signature(functions["__init__"], node.name, is_method=True, returns=False))
    bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) not in {"NamedTuple"}]
    if bases:
        yield f"A kind of {', '.join(f'`{base}`' for base in bases)}."
        yield ""
    yield from _docstring(node)
    yield from _fields(node, source)
    for name, function in functions.items():
        if name.startswith("_") and name not in {"__call__"}:
            continue
        decorators = {ast.unparse(each) for each in function.decorator_list}
        if decorators & {"property", "cached_property"}:
            kind = f": {ast.unparse(function.returns)}" if function.returns is not None else ""
            yield from ("", f"#### `{name}{kind}`", "")
        else:
            prefix = "classmethod " if "classmethod" in decorators else ""
            prefix += "async " if isinstance(function, ast.AsyncFunctionDef) else ""
            is_method = "staticmethod" not in decorators
            yield from ("", f"#### {prefix}`{name}`", "", *_code(_signature(function, name, is_method=is_method)))
        yield from _docstring(function)


def _fields(node: ast.ClassDef, source: Source) -> Iterator[str]:
    """A table of the fields of a dataclass, a named tuple or an enumeration."""
    rows = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            default, told = _default(each.value)
            rows.append(
                (f"`{each.target.id}`", _cell(ast.unparse(each.annotation)), default, told or source.remark(each))
            )
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id.isupper():
            rows.append((f"`{each.targets[0].id}`", "", _cell(ast.unparse(each.value)), source.remark(each)))
    if not rows:
        return
    is_enum = all(not kind for _, kind, _, _ in rows)
    yield "| member | value | |" if is_enum else "| field | type | default | |"
    yield "|---|---|---|" if is_enum else "|---|---|---|---|"
    for name, kind, default, told in rows:
        cells = (name, default, told) if is_enum else (name, kind, default, told)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') if '`' not in cell else cell for cell in cells)} |"
    yield ""


def _default(value: ast.expr | None) -> tuple[str, str]:
    """A field's default as code, and its help."""
    if value is None:
        return "", ""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in {"_option", "field", "_field"}:
        return _cell(ast.unparse(value)), ""
    given = {each.arg: each.value for each in value.keywords}
    if value.args:  # a default and its help, by a function of the module's own
        return _cell(ast.unparse(value.args[0])), _text(value.args[1])
    told = ""
    if isinstance(given.get("metadata"), ast.Dict):
        metadata = given["metadata"]
        assert isinstance(metadata, ast.Dict)
        told = next(
            (_text(text) for key, text in zip(metadata.keys, metadata.values, strict=True) if _is(key, "help")), ""
        )
    if "default_factory" in given:
        return _cell(f"{ast.unparse(given['default_factory'])}()"), told
    return (_cell(ast.unparse(given["default"])) if "default" in given else ""), told


def _is(key: ast.expr | None, text: str) -> bool:
    return isinstance(key, ast.Constant) and key.value == text


def _text(node: ast.expr) -> str:
    return str(ast.literal_eval(node))


def _cell(code: str) -> str:
    return f"`{code}`".replace("|", "\\|")


def _signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, is_method: bool = False, returns: bool = True
) -> str:
    """`name(parameters) -> result`, a parameter a line where one line is too short."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    parts = [_parameter(each, default) for each, default in zip(positional, defaults, strict=True)]
    if is_method:
        parts = parts[1:]
    if given.vararg is not None:
        parts.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        parts.append(f"**{_parameter(given.kwarg, None)}")
    end = f" -> {ast.unparse(node.returns)}" if returns and node.returns is not None else ""
    line = f"{name}({', '.join(parts)}){end}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def _parameter(node: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(node.annotation)}" if node.annotation is not None else ""
    if default is None:
        return f"{node.arg}{kind}"
    return f"{node.arg}{kind} = {ast.unparse(default)}" if kind else f"{node.arg}={ast.unparse(default)}"


def _code(text: str) -> list[str]:
    return ["```text", text, "```", ""]


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    text = ast.get_docstring(node)
    return [*inspect.cleandoc(text).splitlines(), ""] if text else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/api.md instead of printing it")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
