"""Structured output with the default model: the page, the command line, trees, two models, and the openai client.

Its server has an engine in a process of its own: structures travel there with the other parameters.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ramify import LLM, AsyncLLM, InvalidInputError, OptimalSampling, SamplingParams
from ramify.server.app import create_app
from tests.serving import serving

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("default_gguf")

PAGE = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text(encoding="utf-8")
MODEL = "smollm2-135m"
CHAT: list[Any] = [{"role": "user", "content": "Describe a cat as JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_kv_blocks=256, max_model_len=512)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    llm = AsyncLLM(num_kv_blocks=256, max_model_len=512, generation_config="none", engine_process=True)
    with serving(create_app(llm)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def is_person(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"name", "age"} and len(found["name"]) <= 8 and 0 <= found["age"] <= 99


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(block, {})
    # A text may hold a line break of its own between two parts of its JSON.
    found = re.findall(r"\{.*?\}", capsys.readouterr().out, flags=re.DOTALL)
    assert len(found) == 4
    assert all(set(json.loads(text)) == {"name", "age"} for text in found)


def test_a_chat_answers_in_a_schema(client: openai.OpenAI, llm: LLM) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    reply = client.chat.completions.create(model=MODEL, messages=CHAT, n=3, seed=3, max_tokens=80, response_format=form)
    texts = [choice.message.content or "" for choice in reply.choices]
    assert all(map(is_person, texts))
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    params = SamplingParams(n=3, seed=3, max_tokens=80, structured_outputs={"json": PERSON})
    [output] = llm.chat(CHAT, params, use_tqdm=False)
    assert texts == [each.text for each in output.outputs], "what the engine gives in this process"
    streamed = client.chat.completions.create(
        model=MODEL, messages=CHAT, seed=3, max_tokens=80, response_format=form, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == texts[0]


def test_a_completion_has_any_form(client: openai.OpenAI) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"[A-Z][a-z]{2,6}-[0-9]{2}"}, r"[A-Z][a-z]{2,6}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "a" b+\nb: "x" | "yy"'}, "a(x|yy)+"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
    ]
    for form, pattern in forms:
        reply = client.completions.create(
            model=MODEL, prompt="The code is ", seed=1, max_tokens=30, extra_body={"structured_outputs": form}
        )
        cut = reply.choices[0].finish_reason == "length"
        assert cut or re.fullmatch(pattern, reply.choices[0].text), form
    reply = client.completions.create(
        model=MODEL,
        prompt='A small object: {"a": 1}\nAnother: ',
        seed=4,
        temperature=0.2,
        max_tokens=40,
        extra_body={"response_format": {"type": "json_object"}},
    )
    assert reply.choices[0].text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}}},
            "response_format.json_schema.schema cannot be followed: Invalid type: objec",
        ),
        ({"structured_outputs": {"json": {"properties": {"a": {"type": 5}}}}}, "at ['properties']['a']"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}}}, "too long to build"),
    ],
    ids=["format", "place", "explosion"],
)
def test_a_bad_schema_is_a_400_with_its_place(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=fields)
    assert said in caught.value.message
    assert caught.value.param == next(iter(fields))


def test_the_command_line_takes_it_as_json() -> None:
    def ramify(structure: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-c",
            "from ramify.cli import main; main()",
            "generate",
            "Is the sky blue? ",
            "--json",
        ]
        flags = ["--seed", "1", "--max-tokens", "8", "--structured-outputs", structure]
        return subprocess.run(
            [*command, *flags], capture_output=True, text=True, check=False, timeout=120, env={**os.environ}
        )

    [sample] = json.loads(ramify('{"choice": ["yes", "no"]}').stdout)["outputs"]
    assert sample["text"] in ("yes", "no")
    refused = ramify("{choice: yes}")
    assert refused.returncode != 0
    assert "--structured-outputs must be JSON like" in refused.stderr.replace("\n", " ")


def test_a_tree_goes_on_in_its_grammar(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=3, seed=5, structured_outputs={"regex": "[a-c]{4}-[0-9]{6}-[x-z]{3}"})
    tree = llm.tree()
    nodes = [tree.root("The code is ")]
    for _ in range(30):
        going = [node for node in nodes if not node.has_ended]
        if not going:
            break
        grown = tree.sample(going, params)
        nodes = [node for node in nodes if node.has_ended] + [each for level in grown for each in level][:4]
    assert nodes
    assert all(re.fullmatch("[a-c]{4}-[0-9]{6}-[x-z]{3}", node.text) for node in nodes)
    stray = tree.extend(tree.root("The code is "), "never")
    with pytest.raises(InvalidInputError, match="do not allow what stands before the output"):
        tree.sample(stray, params)
    logprobs = tree.next_logprobs(tree.root("The code is "), "processed", params)
    tokenizer = llm.get_tokenizer()
    allowed = [tokenizer.decode([index]) for index in (logprobs[0] > -float("inf")).nonzero()[:, 0].tolist()]
    assert all(re.fullmatch("[a-c]{1,4}", text) for text in allowed)
    tree.close()


def test_two_models_keep_to_it() -> None:
    pair = OptimalSampling(MODEL, MODEL, num_kv_blocks=256, max_model_len=256, theta_system_prompt="Be brief.")
    outputs = pair.generate(["A person: "], n=2, max_tokens=60, seed=2, structured_outputs={"json": PERSON})
    assert all(map(is_person, outputs.generated_texts))
