"""Logits processors of your own: a plain function for one row, and an object that takes several rows at once.

The function forbids one letter (a lipogram); the object favours words that begin with another (an alliteration). They
act after the penalties and before the temperature. Given together, each gets the logits that the one before returned.

    python examples/logits_processor.py --without e --favour s
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.sampling_params import LogitsProcessor


def token_texts(llm: LLM) -> list[str]:
    """The text of every token id. Computed once, before generation, because a processor runs in every step."""
    assert llm.tokenizer is not None, "the default model has one"
    return [llm.tokenizer.decode([token_id]) for token_id in range(llm.architecture.vocab_size)]


class FavourWords:
    """Adds `bonus` to every token that begins a word with `letter`.

    `process_batch` makes it a batched processor: it gets the tokens of several rows that carry this same object, and
    their logits (rows, vocabulary), at once. The sampler works a few rows at a time, so many samples are a few calls.
    """

    def __init__(self, texts: Sequence[str], letter: str, bonus: float) -> None:
        self.bonus = bonus * torch.tensor([text.lower().startswith(f" {letter}") for text in texts])
        self.calls = 0
        self.rows = 0

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        self.calls += 1
        self.rows += len(token_ids)
        return logits + self.bonus

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """The same for one row, which every processor must be able to do."""
        return self.process_batch([token_ids], logits[None])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write without one letter, and with many words of another.")
    parser.add_argument("--prompt", default="On a quiet Sunday morning")
    parser.add_argument("--without", default="e", help="a letter that must not occur")
    parser.add_argument("--favour", default="s", help="the first letter of many words")
    parser.add_argument("--bonus", type=float, default=4.0)
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()

    llm = LLM()
    texts = token_texts(llm)
    has_letter = torch.tensor([options.without in text.lower() for text in texts])

    def without_letter(_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        # Minus infinity cannot be drawn. If nothing at all were left, this request would end with an error of its own.
        return logits.masked_fill(has_letter, -torch.inf)

    favour = FavourWords(texts, options.favour, options.bonus)
    ways: dict[str, list[LogitsProcessor]] = {
        "as it is": [],
        f"without {options.without!r} (a function)": [without_letter],
        f"many {options.favour!r} (a batched object)": [favour],
        "both": [favour, without_letter],
    }
    params = [
        SamplingParams(
            n=options.n,
            temperature=0.8,
            top_p=0.95,
            seed=5,
            max_tokens=options.max_tokens,
            logits_processors=processors,
        )
        for processors in ways.values()
    ]
    # Requests with and without processors share the batch; only the rows that carry one pay for it.
    outputs = llm.generate([options.prompt] * len(ways), params, use_tqdm=False)

    print(options.prompt)
    for name, output in zip(ways, outputs, strict=True):
        print(f"\n{name}")
        for completion in output.outputs:
            print(f"  {completion.index}  {' '.join(completion.text.split())}")
    print(f"\nThe batched object was called {favour.calls} times for {favour.rows} rows.")


if __name__ == "__main__":
    main()
