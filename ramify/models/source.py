"""A model's name to local files: the embedded default, a folder, a .gguf file or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ramify.errors import ModelNotFoundError
from ramify.files import disk
from ramify.models import embedded

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, configuration and tokenizer; no code.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve(model: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """A local folder or .gguf file; the embedded model and hub snapshots are fetched first."""
    if model == embedded.NAME:
        return embedded.fetch(say)
    path, is_folder, is_file = _look_up(model)
    if is_folder:
        return path
    if is_file:
        if path.suffix == ".gguf":
            return path
        hint = "give the folder it is in" if path.suffix == ".safetensors" else "a folder or a .gguf file is needed"
        raise ModelNotFoundError(f"{path.name} is a file, but not a .gguf file: {hint}")
    if HUB_ID.fullmatch(model):
        return _from_hub(model, say)
    if model.endswith((".gguf", ".safetensors")) or model.startswith(("/", "./", "../", "~")):
        raise ModelNotFoundError(f"model {model!r:.200} is a path at which no file or folder can be found")
    raise ModelNotFoundError(
        f"model {model!r:.200} is not a folder, a .gguf file, a hub id (owner/name) or {embedded.NAME!r}, the default"
    )


def _look_up(model: str) -> tuple[Path, bool, bool]:
    """The path that a name may be, and whether a folder or a file is there."""
    path = Path(model)
    try:
        path = path.expanduser()
        return path, path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError):  # a name too long for a path, or the home of nobody
        return path, False, False


def _from_hub(model: str, say: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ModelNotFoundError(
            f"{model!r} is no local folder, and fetching from the hub needs the package huggingface_hub"
        ) from None
    say(f"Looking for {model} in the local hub cache and on the hub")
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if disk.is_full(error):
            reason = disk.no_room(Path(constants.HF_HUB_CACHE))
        raise ModelNotFoundError(
            f"{model!r} could not be fetched from the hub ({reason}); name a local folder, a .gguf file or "
            f"{embedded.NAME!r}"
        ) from None
