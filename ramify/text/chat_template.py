"""ChatTemplate: a conversation to the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta

from ramify.errors import ChatTemplateError
from ramify.text.messages import plain_data, validate_messages
from ramify.text.template_limits import Budget, LimitError
from ramify.text.template_sandbox import LimitedEnvironment

# The longest real templates have some ten thousand characters; compiling as many as this can take seconds.
_MAX_SOURCE_CHARACTERS = 128 * 1024
_MAX_DATE_FORMAT_CHARACTERS = 256
_SHOWN_CHARACTERS = 500
# `transformers` always passes these, so templates test them for none without testing whether they are defined.
_ALWAYS_DEFINED = ("tools", "documents")


class ChatTemplate:
    """A compiled chat template. It renders what `transformers` would, or raises ChatTemplateError.

    The template is not trusted: it runs in Jinja's sandbox, sees plain data only, and is stopped at limits on time and
    size. Several threads may render one template at once.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_output_characters: int = 4 * 2**20,
        time_limit_seconds: float = 2.0,
    ) -> None:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters, more than {_MAX_SOURCE_CHARACTERS}"
            )
        self._special_tokens = dict(special_tokens)
        self._reads_tool_calls = "tool_calls" in source
        self._max_output_characters = max_output_characters
        self._time_limit_seconds = time_limit_seconds
        self._environment = LimitedEnvironment()
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        try:
            tree = self._environment.parse(source)
            names = _undeclared_variables(tree, self._environment)
            code = self._environment.compile(tree)
            self._template = jinja2.Template.from_code(self._environment, code, self._environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is malformed (line {error.lineno}): {_said(error)}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template is nested too deeply") from None
        except Exception as error:
            # Whatever Jinja or Python's compiler raises for generated code that is too large or too deep.
            raise ChatTemplateError(f"the chat template cannot be compiled: {_said(error)}") from None
        self._variables = names - self._environment.globals.keys()  # what the template reads from outside

    def render(
        self, /, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text of `messages`; `kwargs` are further variables, such as `tools` or `enable_thinking`.

        A variable that the template does not read is refused, since it would do nothing.
        """
        if kwargs.get("tools") and "tools" not in self._variables:
            raise ChatTemplateError("tools are not supported by this model: its chat template has no place for them")
        unknown = sorted(kwargs.keys() - self._variables)
        if unknown:
            known = sorted(self._variables - self._special_tokens.keys() - {"messages", "add_generation_prompt"})
            raise ChatTemplateError(
                f"the chat template does not read {', '.join(unknown)}; it reads {', '.join(known) or 'no such names'}"
            )
        checked = validate_messages(messages)
        self._check_tool_calls(checked)
        variables = {
            **dict.fromkeys(_ALWAYS_DEFINED),
            **self._special_tokens,
            **{name: plain_data(value, name) for name, value in kwargs.items()},
            "messages": checked,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        budget = Budget(max_characters=self._max_output_characters, time_limit_seconds=self._time_limit_seconds)
        self._environment.budget = budget
        try:
            pieces: list[str] = []
            total = 0
            for piece in self._template.generate(variables):
                total += len(piece)
                budget.require(total)
                pieces.append(piece)
            return "".join(pieces)
        except LimitError as error:
            raise ChatTemplateError(f"the chat template was stopped: {error}") from None
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(f"the chat template does what is not allowed: {_said(error)}") from None
        except jinja2.UndefinedError as error:
            raise ChatTemplateError(f"the chat template uses what is not there: {_said(error)}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template calls itself too deeply") from None
        except Exception as error:
            # Template code can fail in all the ways in which Python code can.
            raise ChatTemplateError(f"the chat template failed: {_said(error)}{_without_content(checked)}") from None

    def _check_tool_calls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuses what the template would leave out of the text without a word."""
        for index, message in enumerate(messages):
            if message.get("tool_calls") and not self._reads_tool_calls:
                raise ChatTemplateError(
                    f"messages[{index}].tool_calls is not supported: this model's chat template has no place for them"
                )


def _without_content(messages: Sequence[Mapping[str, Any]]) -> str:
    """Which messages have null for a content: what many templates fail at."""
    empty = [f"messages[{index}].content" for index, message in enumerate(messages) if message.get("content") is None]
    return f" ({', '.join(empty[:4])} is null)" if empty else ""


def _undeclared_variables(tree: jinja2.nodes.Template, environment: jinja2.Environment) -> set[str]:
    """What the template reads from outside: Jinja's own search, without the folding of constants that goes with it.

    Folding takes cubic time for a long chain of filters, and would run them when there is no budget yet.
    """
    search = jinja2.meta.TrackingCodeGenerator(environment)
    search.optimizer = None
    search.visit(tree)
    return search.undeclared_identifiers


def _said(error: Exception) -> str:
    """An error's message, with its type unless a template raised it on purpose; cut if it is long."""
    said = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return said if len(said) <= _SHOWN_CHARACTERS else said[: _SHOWN_CHARACTERS - 3] + "..."


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_DATE_FORMAT_CHARACTERS:
        raise LimitError("the template's date format is too long")
    return datetime.now().strftime(pattern)
