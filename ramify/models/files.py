"""ModelFiles: what a config names, found or fetched, and all that is read of it beside weights: without torch."""

from __future__ import annotations

from collections.abc import Callable

from ramify.config import EngineConfig, ModelConfig
from ramify.errors import InvalidInputError
from ramify.files.json_file import read_optional_json
from ramify.models import embedded, source
from ramify.models.families import Architecture
from ramify.models.generation_defaults import (
    CONFIG_FILE,
    NO_DEFAULTS,
    GenerationDefaults,
    defaults_from_config,
    defaults_from_gguf,
)
from ramify.models.gguf_architecture import architecture_of
from ramify.models.gguf_header import GGUFHeader
from ramify.models.safetensors_folder import read_architecture
from ramify.process.garbage import collector_paused
from ramify.text.gguf_tokenizer import tokenizer_from_gguf
from ramify.text.tokenizer import Tokenizer
from ramify.text.tokenizer_folder import load_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelFiles:
    """Of one model; they are found, or fetched, once."""

    def __init__(self, config: ModelConfig | EngineConfig, say: Callable[[str], None] = lambda _: None) -> None:
        self.config = config.model_config if isinstance(config, EngineConfig) else config
        self.path = source.resolve(self.config.model, say)
        if self.config.load_format == "gguf" and self.path.is_dir():
            raise InvalidInputError("load_format 'gguf' needs a .gguf file, and model names a folder")
        if self.config.load_format in ("safetensors", "dummy") and self.path.is_file():
            raise InvalidInputError(f"load_format {self.config.load_format!r} needs a folder, and model names a file")
        self.gguf = GGUFHeader.open(self.path) if self.path.is_file() else None
        self._gguf_architecture = None if self.gguf is None else architecture_of(self.gguf)

    @property
    def architecture(self) -> Architecture:
        return read_architecture(self.path) if self._gguf_architecture is None else self._gguf_architecture

    @collector_paused()
    def load_tokenizer(self) -> Tokenizer | None:
        if self.config.tokenizer is not None:
            path = source.resolve(self.config.tokenizer)
            if path.is_file():
                return tokenizer_from_gguf(GGUFHeader.open(path).metadata)
            return load_folder(path)
        if self.gguf is not None:
            return tokenizer_from_gguf(self.gguf.metadata)
        named = any((self.path / name).exists() for name in TOKENIZER_FILES)
        return load_folder(self.path) if named else None

    def load_generation_defaults(self) -> GenerationDefaults:
        """What the checkpoint recommends; nothing if it says nothing, or if generation_config is "none"."""
        if self.config.generation_config == "none":
            return NO_DEFAULTS
        if self.gguf is None:
            return defaults_from_config(read_optional_json(self.path / CONFIG_FILE))
        said = defaults_from_gguf(self.gguf.metadata)
        if not said and self.config.model == embedded.NAME:
            return GenerationDefaults(embedded.RECOMMENDED, f"the model card of {embedded.NAME}")
        return said
