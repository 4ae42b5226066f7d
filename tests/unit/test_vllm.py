"""What scripts for vLLM pass: taken where it asks for nothing, else refused in one message, and all on the page."""

from __future__ import annotations

import copy
import os
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ramify.config import EngineConfig
from ramify.errors import InvalidInputError, UnsupportedError
from ramify.foreign import vllm
from ramify.foreign.keywords import Foreign, own_keywords, strict_keywords
from ramify.sampling_params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_vllm.md"
MARK = re.compile(r"(<!-- options: [^\n]*-->\n).*", re.DOTALL)
TABLES = {
    "`LLM(…)`": vllm.ENGINE_OPTIONS,
    "`SamplingParams(…)`": vllm.SAMPLING_FIELDS,
    "`llm.generate`, `llm.chat`": vllm.CHAT_KEYWORDS,
}


# -- options of LLM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(vllm.ENGINE_OPTIONS))
def test_a_neutral_option_changes_nothing(name: str) -> None:
    option = vllm.ENGINE_OPTIONS[name]
    for value in (None, *option.neutral, *((3, "x") if option.changes_nothing else ())):
        assert EngineConfig.from_options(**{name: value}) == EngineConfig()


@pytest.mark.parametrize(
    "name", sorted(name for name, option in vllm.ENGINE_OPTIONS.items() if not option.changes_nothing)
)
def test_any_other_value_is_refused_with_what_to_do_instead(name: str) -> None:
    for value in (2, "other", True if False in vllm.ENGINE_OPTIONS[name].neutral else 17):
        with pytest.raises(UnsupportedError, match=rf"^{name} must be .*, got {value!r}: .+"):
            EngineConfig.from_options(**{name: value})


def test_all_that_cannot_be_taken_is_in_one_message() -> None:
    with pytest.raises(InvalidInputError) as caught:
        EngineConfig.from_options(
            block_size=16,
            dtype="fp8",
            load_format="bitsandbytes",
            pipeline_parallel_size=2,
            quantization="awq",
            speculative_config={"model": "draft"},
            blocksize=3,
            disable_log_stats=False,
        )
    head, *lines = str(caught.value).splitlines()
    assert head == "6 cannot be taken:"
    assert [line.split()[1] for line in lines] == [
        "dtype",
        "load_format",
        "pipeline_parallel_size",
        "quantization",
        "speculative_config",
        "'blocksize'",
    ]
    assert "(did you mean block_size?); there are: batch_invariant, block_size, data_parallel_size" in lines[-1]


def test_a_boolean_is_no_number_here_either() -> None:
    for wrong in ({"pipeline_parallel_size": True}, {"trust_remote_code": 0}, {"cpu_offload_gb": False}):
        with pytest.raises(UnsupportedError):
            EngineConfig.from_options(**wrong)


def test_values_that_vllm_spells_otherwise() -> None:
    made = EngineConfig.from_options(generation_config="vllm", logprobs_mode="processed_logprobs", seed=None)
    assert made == EngineConfig.from_options(generation_config="none", logprobs_mode="processed", seed=0)
    assert (
        EngineConfig.from_options(
            block_size=None, max_num_seqs=None, enable_prefix_caching=None, enable_chunked_prefill=None
        )
        == EngineConfig()
    )
    with pytest.raises(InvalidInputError, match=r"generation_config must be one of 'auto', 'none', got 'a/folder'"):
        EngineConfig.from_options(generation_config="a/folder")


def test_no_option_of_ours_is_called_foreign() -> None:
    own = {option.name for part in fields(EngineConfig) for option in fields(getattr(EngineConfig(), part.name))}
    assert not own & vllm.ENGINE_OPTIONS.keys()
    assert not {option.name for option in fields(SamplingParams)} & vllm.SAMPLING_FIELDS.keys()


# -- fields of SamplingParams ----------------------------------------------------------------------------------------

NEUTRAL: dict[str, Any] = {
    "guided_decoding": None,
    "truncate_prompt_tokens": None,
    "spaces_between_special_tokens": True,
    "extra_args": None,
}


def test_neutral_fields_leave_no_trace() -> None:
    params = SamplingParams(n=2, seed=3, **NEUTRAL)
    plain = SamplingParams(n=2, seed=3)
    assert params == plain
    assert repr(params) == repr(plain)
    assert hash(params) == hash(plain)
    assert {option.name for option in fields(params)}.isdisjoint(NEUTRAL)
    for again in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), replace(params, **NEUTRAL)):
        assert again == plain


def test_fields_that_ask_for_something_are_refused_together() -> None:
    with pytest.raises(UnsupportedError, match="2 cannot be taken") as caught:
        SamplingParams(guided_decoding={"json": {}}, truncate_prompt_tokens=5)  # type: ignore[call-arg]
    assert "guided_decoding must be None" in str(caught.value)
    assert "truncate_prompt_tokens must be None, got 5: prompts are never cut" in str(caught.value)


def test_an_unknown_field_is_refused_with_the_closest_name() -> None:
    with pytest.raises(InvalidInputError, match=r"^'temprature' is not a field .*\(did you mean temperature\?\)"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(
        InvalidInputError, match=r"^'zzz' is not a field of SamplingParams; there are: allowed_token_ids"
    ):
        replace(SamplingParams(), zzz=1)  # type: ignore[call-arg]


def test_clone_is_the_same_or_changed_where_asked() -> None:
    params = SamplingParams(n=4, temperature=0.7, stop=["a"])
    assert params.clone() == params
    assert params.clone(temperature=0.2) == SamplingParams(n=4, temperature=0.2, stop=["a"])
    with pytest.raises(InvalidInputError, match="temperature must be"):
        params.clone(temperature=-1)


# -- the mechanism ---------------------------------------------------------------------------------------------------


def test_strict_keywords_keep_a_callable_as_it_was() -> None:
    @strict_keywords({"colour": Foreign("paint it yourself", ("red",))}, "an option of draw")
    def draw(shape: str, *, size: int = 1) -> str:
        """Draws."""
        return shape * size

    assert draw("o", size=3) == draw("o", size=3, colour="red") == "ooo"  # type: ignore[call-arg]
    assert draw.__doc__ == "Draws."
    with pytest.raises(UnsupportedError, match=r"^colour must be 'red', got 'blue': paint it yourself$"):
        draw("o", colour="blue")  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match=r"^'sise' is not an option of draw \(did you mean size\?\)"):
        draw("o", sise=2)  # type: ignore[call-arg]


def test_a_value_that_cannot_be_shown_or_compared_is_refused_too() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(UnsupportedError, match="x must be 1, got a Odd that cannot be shown: no"):
        own_keywords({"x": Odd()}, [], {"x": Foreign("no", (1,))}, what="an option")


# -- the page --------------------------------------------------------------------------------------------------------


def _tables() -> str:
    """The page's last part, from the tables in the code."""
    parts = []
    for where, table in TABLES.items():
        parts += [f"\n**{where}**\n", "| option | taken at | instead of other values |", "|---|---|---|"]
        free = ", ".join(f"`{name}`" for name, option in table.items() if option.changes_nothing)
        for name, option in table.items():
            if not option.changes_nothing:
                parts.append(f"| `{name}` | {_taken(option)} | {option.instead} |")
        if free:
            parts.append(f"| {free} | any value | no result depends on them |")
    parts += ["\n**Attributes of `LLM`**, refused by name\n", "| attribute | instead |", "|---|---|"]
    parts += [f"| `{name}` | {instead} |" for name, instead in vllm.ATTRIBUTES.items()]
    return "\n".join(parts) + "\n"


def _taken(option: Foreign) -> str:
    return ", ".join(f"`{value!r}`" for value in option.neutral or (None,))


def test_the_page_lists_what_the_code_has() -> None:
    page = PAGE.read_text()
    if os.environ.get("WRITE"):
        page = MARK.sub(lambda found: found[1] + _tables(), page)
        PAGE.write_text(page)
    found = MARK.search(page)
    assert found is not None
    assert found[0].removeprefix(found[1]) == _tables(), "WRITE=1 pytest tests/unit/test_vllm.py writes it"
