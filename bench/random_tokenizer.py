"""A tokenizer of random words for models of random weights: its tokens spell text, so that grammars can be followed."""

from __future__ import annotations

import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

from ramify.text.token_text import byte_of_character

SIZE = 128_000
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
PARTS = ('{"', '":', '",', '"}', '"},', "},{", "[{", "}]", ', "', '": "', '": ', "\n\n", "  ", "    ")


def write_tokenizer(folder: Path) -> None:
    """All bytes, what JSON is made of, and words of up to nine letters, half of them after a space."""
    spelled = {byte: character for character, byte in byte_of_character().items()}

    def token(text: str) -> str:
        return "".join(spelled[byte] for byte in text.encode())

    numbers = random.Random(0)
    tokens = dict.fromkeys([*spelled.values(), *map(token, PARTS), *(str(number) for number in range(1000))])
    while len(tokens) < SIZE:
        word = "".join(numbers.choices(LETTERS, k=numbers.randint(2, 9)))
        tokens[token(f" {word}" if numbers.random() < 0.5 else word)] = None
    vocabulary = {each: place for place, each in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
