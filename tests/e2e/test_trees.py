"""Trees on real models: what a node draws and is worth is what `generate` draws and reports from its tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ramify import LLM, SamplingParams
from ramify.drive.tree import node_seed
from tests.conftest import CheckpointMaker

PAGE = Path(__file__).parents[2] / "docs" / "trees.md"
PROMPTS = [[5, 6, 7], list(range(10, 50))]


@pytest.fixture(scope="module")
def folder(make_checkpoint: CheckpointMaker) -> Path:
    return make_checkpoint("llama")


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", max_model_len=256, num_kv_blocks=256)


def test_nodes_draw_what_generate_draws(llm: LLM, folder: Path) -> None:
    tree = llm.tree()
    roots = [tree.root(prompt) for prompt in PROMPTS]
    params = SamplingParams(n=3, max_tokens=5, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True)
    children = tree.sample(roots, params)
    nodes = [child for family in children for child in family]
    assert len({node.token_ids for node in nodes}) == 6
    other = LLM(str(folder), dtype="float32", device="cpu", max_model_len=256, num_kv_blocks=256)
    for node, [grandchild] in zip(nodes, tree.sample(nodes, SamplingParams(max_tokens=4, seed=9)), strict=True):
        again = SamplingParams(max_tokens=4, seed=node_seed(9, node.id, 0), prompt_logprobs=0)
        [output] = other.generate([list(node.token_ids)], again, use_tqdm=False)
        assert output.outputs[0].token_ids == grandchild.own_token_ids
        assert output.outputs[0].cumulative_logprob == pytest.approx(grandchild.logprob, abs=1e-4)
        rows = output.prompt_logprobs
        assert rows is not None
        own = zip(node.own_token_ids, rows[-node.num_own :], strict=True)
        assert sum(row[token].logprob for token, row in own if row is not None) == pytest.approx(node.logprob, abs=1e-4)
    told = tree.next_logprobs(nodes)
    given = [[int(row.argmax()), 7] for row in told]
    for row, token_ids, logprobs, node in zip(told, given, tree.logprobs(nodes, given), nodes, strict=True):
        assert logprobs[0] == pytest.approx(float(row.max()), abs=1e-4)
        [longer] = tree.extend(node, [token_ids])
        assert longer.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    del roots, children, nodes, node, longer, grandchild
    tree.close()
    assert llm.stats()["blocks_in_use"] == 0


def test_new_weights_are_seen_by_old_nodes(llm: LLM, folder: Path) -> None:
    tree = llm.tree()
    [node] = tree.extend(tree.root(PROMPTS[1]), [[3, 4, 5]])
    before = tree.next_logprobs(node)
    weights = {name: tensor * 0.5 for name, tensor in load_file(folder / "model.safetensors").items()}
    llm.load_weights(weights.items())
    assert llm.stats()["blocks_in_use"] == 0
    after = tree.next_logprobs(node)
    assert not torch.allclose(before, after)
    llm.reset_prefix_cache()
    torch.testing.assert_close(tree.next_logprobs(tree.root(node.token_ids)), after, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("default_gguf")
def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})
    assert "torch.Size([4, 49152])" in capsys.readouterr().out
