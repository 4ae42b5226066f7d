"""genlm-backend's language model on Ramify: programs written for it keep their prefixes as nodes of a tree.

`RamifyLM` is an `AsyncLM`: concurrent questions become one batch, and a prefix that is one token longer than one asked
before computes one position. Here it runs sequential importance sampling: tokens of at most so many bytes, each draw
from the model restricted to them, weighted by the mass that was left.

    pip install genlm-backend
    python examples/genlm_adapter.py --particles 4 --longest 3
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from genlm.backend.llm.base import AsyncLM
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ramify import LLM, Node


class RamifyLM(AsyncLM):  # type: ignore[misc]
    """At most `max_nodes` prefixes are kept, those asked last."""

    def __init__(self, llm: LLM, tokenizer: PreTrainedTokenizerFast, max_nodes: int = 1_000) -> None:
        super().__init__(tokenizer)
        self.tree = llm.tree()
        self._max_nodes = max_nodes
        self._nodes: OrderedDict[tuple[int, ...], Node] = OrderedDict()

    async def next_token_logprobs(self, token_ids: Sequence[int], lora_name: str | None = None) -> Tensor:
        self._refuse(lora_name)
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        batch = await self._join_batch([(tuple(token_ids), answer)])
        if batch is not None:  # this call leads: it answers for all that came with it
            for row, (_, each) in zip(self._ask([prefix for prefix, _ in batch]), batch, strict=True):
                each.set_result(row)
        return await answer

    def next_token_logprobs_sync(self, token_ids: Sequence[int], lora_name: str | None = None) -> Tensor:
        self._refuse(lora_name)
        return self._ask([tuple(token_ids)])[0]

    def clear_cache(self) -> None:
        self._nodes.clear()  # nobody holds the nodes any more: their blocks are free

    def _refuse(self, lora_name: str | None) -> None:
        if lora_name is not None:
            raise ValueError(f"this model has no adapters, got lora_name {lora_name!r}")

    def _ask(self, prefixes: list[tuple[int, ...]]) -> Tensor:
        """(prefixes, vocabulary): what is new grows from the longest prefix that is known, all of it in one batch."""
        found = {prefix: self._longest_known(prefix) for prefix in dict.fromkeys(prefixes)}
        roots = {prefix: self.tree.root(prefix) for prefix, known in found.items() if known is None}
        growing = [
            prefix for prefix, known in found.items() if known is not None and len(known.token_ids) < len(prefix)
        ]
        known_nodes = [node for prefix in growing if (node := found[prefix]) is not None]
        rest = [prefix[len(node.token_ids) :] for prefix, node in zip(growing, known_nodes, strict=True)]
        grown = dict(zip(growing, self.tree.extend(known_nodes, rest), strict=True)) if growing else {}
        for prefix, known in found.items():
            node = roots.get(prefix) or grown.get(prefix) or known
            assert node is not None, "every prefix is a root, grown or known"
            self._nodes[prefix] = node
            self._nodes.move_to_end(prefix)
        rows = self.tree.next_logprobs([self._nodes[prefix] for prefix in prefixes])
        while len(self._nodes) > self._max_nodes:
            self._nodes.popitem(last=False)
        return rows

    def _longest_known(self, prefix: tuple[int, ...]) -> Node | None:
        return next(
            (self._nodes[prefix[:end]] for end in range(len(prefix), 0, -1) if prefix[:end] in self._nodes), None
        )


async def importance_sample(
    model: RamifyLM, prompt: list[int], allowed: Tensor, *, num_tokens: int, generator: torch.Generator
) -> tuple[list[int], float]:
    """Tokens drawn among the allowed ones, and the log of how much of the model's mass they were."""
    token_ids, log_weight = list(prompt), 0.0
    for _ in range(num_tokens):
        logprobs = await model.next_token_logprobs(token_ids)
        kept = logprobs.masked_fill(~allowed, -torch.inf)
        mass = kept.logsumexp(-1)
        log_weight += float(mass)
        token_ids.append(int(torch.multinomial((kept - mass).exp(), 1, generator=generator)))
    return token_ids[len(prompt) :], log_weight


async def run(model: RamifyLM, prompt: str, *, particles: int, longest: int, num_tokens: int, seed: int) -> None:
    token_ids: list[int] = model.tokenizer.encode(prompt)
    allowed = torch.tensor([0 < len(token) <= longest for token in model.byte_vocab])
    generator = torch.Generator().manual_seed(seed)
    draws = (
        importance_sample(model, token_ids, allowed, num_tokens=num_tokens, generator=generator)
        for _ in range(particles)
    )
    samples = await asyncio.gather(*draws)
    largest = max(weight for _, weight in samples)
    total = sum(math.exp(weight - largest) for _, weight in samples)
    print(f"log of the mass of such texts, estimated: {largest + math.log(total / particles):.2f}")
    for drawn, weight in sorted(samples, key=lambda sample: -sample[1]):
        print(f"  {math.exp(weight - largest) / total:.2f}  {prompt}{model.tokenizer.decode(drawn)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Importance sampling of texts of short tokens, by genlm-backend.")
    parser.add_argument("--prompt", default="The weather today is")
    parser.add_argument("--particles", type=int, default=4)
    parser.add_argument("--longest", type=int, default=3, help="bytes of a token")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    llm = LLM()
    assert llm.tokenizer is not None, "the default model has one"
    model = RamifyLM(llm, PreTrainedTokenizerFast(tokenizer_object=llm.tokenizer.backend))
    sizes = {"particles": options.particles, "longest": options.longest, "num_tokens": options.tokens}
    asyncio.run(run(model, options.prompt, seed=options.seed, **sizes))
    print(f"{llm.stats()['prompt_tokens_computed']} positions were computed for {options.particles} particles.")


if __name__ == "__main__":
    main()
