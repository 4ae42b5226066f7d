"""What is known of models before their weights are read: files, tokenizers, recommendations; and the intake of these.

An engine is built from it where the weights are; a process that only talks to an engine needs no more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.config import EngineConfig
from ramify.drive.intake import Intake
from ramify.drive.pair_intake import PairIntake, Side
from ramify.engine.request import Request
from ramify.errors import InvalidInputError
from ramify.models.files import ModelFiles
from ramify.structured.grammars import Grammars
from ramify.text.codec import TextCodec
from ramify.text.tokenizer import Tokenizer

CheckRequest = Callable[[Request], None]


class PreparedModel:
    """One model. Making it reads its tokenizer."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.config = config
        self.files = (files,)
        self.defaults = files.load_generation_defaults()
        self.codec = TextCodec(files.load_tokenizer())
        self.grammars = Grammars(self.codec)

    def intake(self, check_request: CheckRequest) -> Intake:
        return Intake(
            self.codec,
            vocab_size=self.files[0].architecture.vocab_size,
            max_logprobs=self.config.model_config.max_logprobs,
            check_request=check_request,
            defaults=self.defaults,
            grammars=self.grammars,
        )


class PreparedPair:
    """A teacher and a student, in this order."""

    def __init__(
        self,
        config: EngineConfig,
        files: Sequence[ModelFiles],
        *,
        system_prompts: tuple[str | None, str | None] = (None, None),
        enable_chat_template: bool = False,
    ) -> None:
        self.config = config
        self.files = tuple(files)
        self.tokenizers = [each.load_tokenizer() for each in files]
        codecs = [TextCodec(tokenizer) for tokenizer in self.tokenizers]
        self.codec = codecs[0] if self.tokenizers[0] is not None else codecs[1]
        self.grammars = Grammars(self.codec)
        self.vocab_size = check_same_tokens(
            self.tokenizers, [each.architecture.vocab_size for each in self.files[: self.num_distinct]]
        )
        self._sides = [
            Side(each, system, enable_chat_template) for each, system in zip(codecs, system_prompts, strict=True)
        ]

    @property
    def num_distinct(self) -> int:
        """1 where both models are one checkpoint in one place, which is then held once."""
        teacher, theta = self.files
        is_one = teacher.path.resolve() == theta.path.resolve() and teacher.config.device == theta.config.device
        return 1 if is_one else 2

    def intake(self, check_request: CheckRequest) -> PairIntake:
        return PairIntake(
            *self._sides,
            codec=self.codec,
            theta_model=self.num_distinct - 1,
            vocab_size=self.vocab_size,
            max_logprobs=self.config.model_config.max_logprobs,
            check_request=check_request,
            grammars=self.grammars,
        )


def check_same_tokens(tokenizers: Sequence[Tokenizer | None], vocab_sizes: Sequence[int]) -> int:
    """The size of the common vocabulary; models may pad it differently, but an id must mean the same token in both."""
    known = [tokenizer for tokenizer in tokenizers if tokenizer is not None]
    if len(known) < 2:
        if len(set(vocab_sizes)) > 1:
            raise InvalidInputError(
                f"teacher and theta must have the same tokens; without two tokenizers only their vocabularies can be "
                f"compared, and these have {vocab_sizes[0]} and {vocab_sizes[1]} entries"
            )
        return min(vocab_sizes)
    one, other = (tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in known)
    if one != other:
        differing = sorted(one.items() ^ other.items(), key=lambda item: item[1])
        token, token_id = differing[0]
        raise InvalidInputError(
            f"teacher and theta must have the same tokenizer: an id must mean the same token to both, and they differ "
            f"in {len(differing)} entries, the first {token!r} ({token_id})"
        )
    return min(vocab_sizes)
