"""A model that writes what it is told to, a byte a token, behind the engine's own parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from ramify.drive.async_engine import AsyncEngine
from ramify.drive.intake import Intake
from ramify.engine.core import EngineCore
from ramify.server.service import ServedModel
from ramify.structured.grammars import Grammars
from ramify.text.codec import TextCodec
from ramify.text.token_text import byte_of_character
from ramify.text.tokenizer import Tokenizer
from tests.fake import VOCAB, FakeDevice, fake_engine

END, ANSWER = "<end>", "<answer>"  # the prompt ends with the latter


class Script:
    """`texts` are what may be answered. Where they differ, all ways are equally likely."""

    def __init__(self, codec: TextCodec, texts: Sequence[str] = ()) -> None:
        assert codec.tokenizer is not None
        self.texts = list(texts)
        self.prompt = ""  # the last one that was answered
        self.url = ""  # of the server, where there is one
        self.codec = codec
        self._wanted: list[list[int]] = []
        [self._end] = codec.encode(END, add_special_tokens=False)
        [self._answer] = codec.encode(ANSWER, add_special_tokens=False)

    def logits(self, seen: list[int]) -> Tensor:
        logits = torch.full((VOCAB,), -1e4)
        if self._answer not in seen:
            return logits
        begin = len(seen) - seen[::-1].index(self._answer)
        said = seen[begin:]
        if not said:
            self.prompt = self.codec.decode(seen[: begin - 1])
            self._wanted = [[*self.codec.encode(text, add_special_tokens=False), self._end] for text in self.texts]
        for wanted in self._wanted:
            if wanted[: len(said)] == said and len(said) < len(wanted):
                logits[wanted[len(said)]] = 0.0
        return logits


def bytes_codec(chat_template: str, special_tokens: Sequence[str] = ()) -> TextCodec:
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_of_character(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text) for text in (END, ANSWER, *special_tokens)])
    return TextCodec(
        Tokenizer(backend, special_tokens={"eos_token": END}, chat_templates={"default": chat_template + ANSWER})
    )


def scripted_core(codec: TextCodec) -> tuple[EngineCore, Script]:
    """An engine whose model writes what the script says."""
    assert codec.tokenizer is not None
    core = fake_engine(
        num_blocks=512,
        block_size=16,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        eos_token_ids=codec.tokenizer.eos_token_ids,
        make_text=codec.make_stream,
    )
    core.begin_matcher = Grammars(codec).begin
    script = Script(codec)
    device = core.device
    assert isinstance(device, FakeDevice)
    device.layers[0].logits_of = script.logits
    return core, script


@contextmanager
def scripted_model(codec: TextCodec, name: str = "scripted") -> Iterator[tuple[ServedModel, Script]]:
    core, script = scripted_core(codec)
    engine = AsyncEngine(core)
    intake = Intake(codec, vocab_size=VOCAB, max_logprobs=20, check_request=core.check)
    yield ServedModel(name, engine, intake, 4096), script
    engine.stop()
