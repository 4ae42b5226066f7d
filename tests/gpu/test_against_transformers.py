"""bfloat16 on the GPU: logprobs of every decode step beside those of `transformers` on the same GPU.

The truth is `transformers` in float32. Our distance from it may be MOST_TIMES that of its own bfloat16, and no single
logprob may be further than TOLERANCE from either.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from ramify import SamplingParams
from tests.conftest import CheckpointMaker
from tests.gpu.engines import engine

TOLERANCE = 0.15
MOST_TIMES = 1.5
TINY = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "initializer_range": 0.06}
QWEN3_600M = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def logprobs_of(folder: Path, dtype: torch.dtype, sequences: list[tuple[list[int], tuple[int, ...]]]) -> list[Tensor]:
    """Of every output, (tokens, vocabulary) in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda").eval()
    found = []
    for prompt, output in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]], device="cuda")).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).cpu())
    return found


@pytest.fixture(
    scope="module",
    params=[("llama", TINY), ("qwen2", TINY), ("qwen3", TINY), ("qwen3", QWEN3_600M)],
    ids=["llama", "qwen2", "qwen3", "0.6B"],
)
def folder(request: pytest.FixtureRequest, make_checkpoint: CheckpointMaker) -> Path:
    family, changes = request.param
    return make_checkpoint(family, **changes)


@pytest.mark.parametrize("count", [1, 6, 40, 80], ids="{} rows".format)
def test_logprobs(folder: Path, count: int) -> None:
    """One row, a few and many: each goes through products of its own."""
    llm = engine(folder, "bfloat16", max_num_seqs=80)
    prompts = [[(7 * number + 3 * place) % 300 for place in range(5 + 3 * number)] for number in range(count)]
    params = SamplingParams(seed=1, max_tokens=12, logprobs=10, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    sequences = [(prompt, completion.token_ids) for prompt, completion in zip(prompts, outputs, strict=True)]
    truth = logprobs_of(folder, torch.float32, sequences)
    rounded = logprobs_of(folder, torch.bfloat16, sequences)
    ours, theirs, true = [], [], []
    for completion, plain, exact in zip(outputs, rounded, truth, strict=True):
        assert completion.logprobs is not None
        for place, row in enumerate(completion.logprobs):
            for token, entry in row.items():
                ours.append(entry.logprob)
                theirs.append(float(plain[place, token]))
                true.append(float(exact[place, token]))
    distances = torch.tensor(ours) - torch.tensor(true), torch.tensor(theirs) - torch.tensor(true)
    own, other = (float(distance.square().mean().sqrt()) for distance in distances)
    print(f"{folder.name}, {count} rows: off by {own:.5f} (root mean square), transformers by {other:.5f}")
    assert own <= MOST_TIMES * other
    assert float(distances[0].abs().max()) < TOLERANCE
    assert float((torch.tensor(ours) - torch.tensor(theirs)).abs().max()) < 2 * TOLERANCE
