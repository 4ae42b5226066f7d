"""The Jinja environment for chat templates: sandboxed, with every costly operation counted.

The parsed template is rewritten before it is compiled:

    for body, its if  starts with a tick, so that no loop runs without a check
    a == b, a in b    counted: it may walk a whole list
    text, {{ ... }}   counted when written, also inside {% set %} blocks and macros
    a ~ b             checked, then joined by our own function
    [..], {..}, x[:]  counted when made

Operators, calls, filters and tests go through the environment anyway and are checked there. One operation takes time in
proportion to the values it is given, whose size is limited; so counting operations is enough to stop in time.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ramify.text.template_filters import REMOVED_FILTERS, check_filter, fresh_value, to_json
from ramify.text.template_limits import Budget

# A template cannot call these filters itself, since their names contain a space.
_TICK, _COUNTED, _MADE, _CONCATENATE = "ramify tick", "ramify counted", "ramify made", "ramify concatenate"

# Methods of str and bytes: tables can turn one character into thousands, and some codecs take quadratic time.
_REFUSED_METHODS = frozenset({"translate", "maketrans", "encode", "decode"})
# Methods of str that take time in proportion to the text's length times the argument's.
_QUADRATIC_METHODS = frozenset({"strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"})


class GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote; its body is rendered as any other text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        return str(caller())


class TemplateNamespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        # Jinja's own signature, so that `namespace(self=...)` works.
        for name in dict(*args[1:], **values):
            _refuse_private(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the private name {name!r}")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Configured as in `transformers`; `budget` must be set in the thread that renders."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self._written,
            # Constant folding would run filters during compilation, when there is no budget yet.
            optimized=False,
        )
        self._local = threading.local()
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._limited_filter(name, function)
        for name, test in list(self.tests.items()):
            self.tests[name] = self._limited_test(cast(Callable[..., Any], test))
        self.filters[_TICK] = self._tick
        self.filters[_COUNTED] = self._counted
        self.filters[_MADE] = self._made
        self.filters[_CONCATENATE] = self._concatenate
        del self.globals["lipsum"]
        self.globals["dict"] = lambda *values, **named: self.budget.made(dict(*values, **named))
        self.globals["namespace"] = TemplateNamespace

    @property
    def budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._local.budget = budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.check_operator(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(function, types.BuiltinMethodType) and owner is not None:
            arguments = self._check_method(owner, function.__name__, arguments, named)
        else:
            self.budget.tick()
        result = super().call(context, function, *arguments, **named)
        return self.budget.made(result)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja would return a value that fails when it is used, and printing it does not count as a use.
        raise jinja2.exceptions.SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of reach")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*arguments: Any, **named: Any) -> str:
            self.budget.check_format(str(value.__self__), [*arguments, named])
            return cast(str, self.budget.made(formatted(*arguments, **named)))

        return checked

    def _check_method(
        self, owner: Any, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Checks a call of a built-in value's method; returns its arguments, with iterators turned into lists."""
        budget = self.budget
        budget.tick()
        for value in (*arguments, *named.values()):
            # It may be a width: of ljust, center, zfill, to_bytes.
            if isinstance(value, int):
                budget.require(abs(value))
        if isinstance(owner, (str, bytes)):
            if name == "replace" and len(arguments) >= 2:
                budget.check_replace(str(owner), str(arguments[0]), str(arguments[1]))
            elif name == "join" and arguments:
                parts = budget.listed(arguments[0])
                budget.require(budget.size(parts) + len(parts) * len(owner))
                return (parts, *arguments[1:])
            elif name == "expandtabs":
                width = arguments[0] if arguments else named.get("tabsize", 8)
                budget.require(len(owner) + str(owner).count("\t") * (width if isinstance(width, int) else 8))
            elif name in _QUADRATIC_METHODS:
                budget.check_search(owner, arguments[0] if arguments else named.get("sep"))
            elif name in _REFUSED_METHODS:
                raise jinja2.exceptions.SecurityError(f"chat templates may not call {name}()")
        return arguments

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters get the context or the environment before the value.
        skipped = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            first, rest = arguments[: skipped + 1], arguments[skipped + 1 :]
            value = check_filter(self.budget, name, first[-1], rest, named)
            result = function(*first[:-1], value, *rest, **named)
            if isinstance(result, types.GeneratorType):
                return self._watched(result)
            return self.budget.made(result) if fresh_value(name) else result

        return limited

    def _limited_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            self.budget.tick()
            return function(*arguments, **named)

        return limited

    def _watched(self, values: Iterator[Any]) -> Iterator[Any]:
        """Counts what `map`, `select` and their like hand on, whoever takes it."""
        for value in values:
            self.budget.tick()
            yield value

    def _counted(self, value: Any) -> Any:
        self.budget.tick()
        return value

    def _tick(self, characters: int) -> None:
        self.budget.tick(characters)

    def _made(self, value: Any) -> Any:
        return self.budget.made(value)

    def _concatenate(self, values: list[Any]) -> str:
        self.budget.require(self.budget.size(values) - 2 - 2 * len(values))
        text = "".join(map(str, values))
        self.budget.tick(len(text))
        return text

    @pass_context  # also keeps Jinja from calling it during compilation
    def _written(self, _context: Context, value: Any) -> Any:
        size = self.budget.size(value)
        self.budget.require(size)
        self.budget.tick(size)
        return value


class _Watched(NodeTransformer):
    """Adds the counting to a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _tick(node, 0))
        if node.test is not None:
            node.test = _filtered(cast(nodes.Expr, node.test), _COUNTED)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _COUNTED)

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        written = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        return [_tick(node, written), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if all(isinstance(element, nodes.Const) for element in node.items) else _filtered(node, _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        constant = all(isinstance(element, nodes.Const) for element in node.items)
        return node if constant or node.ctx != "load" else _filtered(node, _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MADE)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tick(before: nodes.Node, characters: int) -> nodes.Node:
    count = nodes.Const(characters, lineno=before.lineno)
    return nodes.ExprStmt(_filtered(count, _TICK), lineno=before.lineno)
