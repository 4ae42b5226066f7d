"""Long texts are tokenized as short ones are, and other threads go on meanwhile."""

from __future__ import annotations

import threading

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ramify.text.tokenizer import Tokenizer


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def test_a_long_text_is_its_parts() -> None:
    made, part = tokenizer(), "Zürich, 日本 and a dog. "
    assert made.encode(part * 1_000) == made.encode(part) * 1_000
    assert made.decode(made.encode(part * 1_000)) == part * 1_000


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """`Tokenizer.encode` of the library keeps the interpreter's lock: a prompt of a megabyte stopped every stream."""
    made, text = tokenizer(), "The quick brown fox. " * 20_000
    ids: list[int] = []
    working = threading.Thread(target=lambda: ids.extend(made.encode(text)))
    num_turns = 0
    working.start()
    while working.is_alive():
        num_turns += 1
        working.join(0.001)
    assert len(ids) == len(text)
    assert num_turns >= 20, "with the lock held there are a few"
