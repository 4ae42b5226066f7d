"""The Python blocks of the source documents, and how they are run: only imports change, missing names are given."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "documents"
PARALLEL_SAMPLING, TOKEN_SAMPLER, FOUNDATIONS, OPTIMAL_SAMPLING = (
    "1-parallel-sampling.md",
    "2-token-sampler.md",
    "3-foundations.md",
    "5-optimal-sampling.md",
)
IMPORTS = re.compile(r"^from (folovllm|nanovllm|optimal_sampling)[\w.]* import", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its text, and the last line of prose before it."""

    document: str
    lead: str
    code: str


def python_blocks(document: str) -> list[Block]:
    blocks: list[Block] = []
    language: str | None = None  # of the fence that is open
    lead, lines = "", list[str]()
    for line in (FOLDER / document).read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith("```"):
            if language is not None:
                lines.append(line)
            elif line.strip():
                lead = line
        elif language is None:
            language, lines = line.strip().removeprefix("```"), []
            assert language in ("python", "bash", "mermaid", ""), f"{document}: is {language!r} Python?"
        else:
            if language == "python":
                blocks.append(Block(document, lead, textwrap.dedent("\n".join(lines))))
            language = None
    assert language is None, f"{document}: the last fence is open"
    return blocks


def find_block(document: str, line: str, *, lead: str | None = None) -> Block:
    """The one block that has this line (under this last line of prose, where several have it)."""
    found = [
        block
        for block in python_blocks(document)
        if line in block.code.splitlines() and (lead is None or block.lead == lead)
    ]
    assert len(found) == 1, f"{document} has {len(found)} blocks with the line {line!r}"
    return found[0]


def run_code(code: str, **names: Any) -> dict[str, Any]:
    """Executes a block where these names exist; returns all names afterwards."""
    namespace: dict[str, Any] = dict(names)
    exec(compile(IMPORTS.sub("from ramify import", code), "<document>", "exec"), namespace)
    return namespace


def run_as_body(code: str, **names: Any) -> Any:
    """Executes a block that ends in `return`, as the body of a function; returns what it returns."""
    body = textwrap.indent(code, "    ")
    return run_code(f"def block():\n{body}", **names)["block"]()


def run_expression(code: str, **names: Any) -> Any:
    """The value of a block that is one expression."""
    return eval(compile(code, "<document>", "eval"), dict(names))


def split_prose(code: str) -> tuple[str, str]:
    """The lines before the first that is no Python, and the rest."""
    lines = code.splitlines()
    length = next(length for length in range(len(lines), 0, -1) if _is_python("\n".join(lines[:length])))
    assert length < len(lines), "all of it is Python: run all of it"
    return "\n".join(lines[:length]), "\n".join(lines[length:])


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# Needs the weights of a model: tests/e2e/test_documents_loading.py runs it.
LOADING = find_block(FOUNDATIONS, "def get_model_and_tokenizer(config, device):")
OPTIMAL_BLOCKS = python_blocks(OPTIMAL_SAMPLING)
# tests/unit/test_document_two.py runs them.
TOKEN_SAMPLER_BLOCKS = python_blocks(TOKEN_SAMPLER)
