"""docs/sampling.md cannot rot: its blocks run on the default model, its tables are compared with SamplingParams."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ramify import InvalidInputError, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
OFFERED = [
    line
    for page in (PAGE.parents[1] / "README.md", PAGE.with_name("usage.md"))
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith("SamplingParams(")
]
REFUSED = re.findall(r"^\| `(SamplingParams\(.*\))` \|", TEXT, flags=re.MULTILINE)


def table_defaults() -> dict[str, set[str]]:
    """Field -> default, of every row whose first code is a field's name and whose last cell is code."""
    names = {field.name for field in fields(SamplingParams)}
    found: dict[str, set[str]] = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        code = re.match(r"\|(?: \d+ \|)? `(\w+)`", line)
        if code and code[1] in names and re.fullmatch(r"`[^`]+`", cells[-1]):
            found.setdefault(code[1], set()).add(cells[-1].strip("`"))
    return found


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the blocks define, one after the other: one page, one engine."""
    return {}


@pytest.mark.usefixtures("default_gguf")
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block-{number}" for number in range(len(BLOCKS))])
def test_every_block_runs(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, str(PAGE), "exec"), names)
    if "num_beam_groups" in block:
        penalised = [beam.cumulative_logprob - beam.score * len(beam.token_ids) for beam in names["beams"].outputs]
        assert max(penalised) > 0.4, "the page shows a penalty that is in the score and not in the logprob"
        assert all(abs(penalty * 2 - round(penalty * 2)) < 1e-2 for penalty in penalised), "whole penalties of 0.5"


def test_the_blocks_were_found() -> None:
    assert len(BLOCKS) == TEXT.count("```") // 2 == 19


def test_every_field_has_a_row_with_its_default() -> None:
    assert table_defaults() == {
        field.name: {
            repr(str(field.default)).replace("'", '"') if isinstance(field.default, str) else repr(field.default)
        }
        for field in fields(SamplingParams)
    }


@pytest.mark.parametrize("code", REFUSED)
def test_what_the_page_says_is_refused_is_refused(code: str) -> None:
    with pytest.raises(InvalidInputError):
        eval(code, {"SamplingParams": SamplingParams})


@pytest.mark.parametrize("code", OFFERED)
def test_what_readme_and_usage_offer_is_accepted(code: str) -> None:
    assert isinstance(eval(code, {"SamplingParams": SamplingParams}), SamplingParams)


def test_offers_and_refusals_were_found() -> None:
    assert len(REFUSED) == 31
    assert len(OFFERED) == 4 + 7


def test_the_pictures_are_there() -> None:
    for name in re.findall(r"\]\((pictures/\S+)\)", TEXT):
        assert (PAGE.parent / name).is_file()
        assert (PAGE.parent / name).with_suffix(".py").is_file(), "and what draws them"
