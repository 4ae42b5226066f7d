"""Python's collector, paused while modules and vocabularies are loaded; and templates, which nobody waits for."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tokenizers

from ramify.errors import ChatTemplateError
from ramify.process.garbage import collector_paused
from ramify.text.codec import TextCodec
from ramify.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_pauses_and_goes_on() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled(), "the outer pause lasts"
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), collector_paused():
        raise ValueError("broken")
    assert gc.isenabled()


def test_what_was_made_is_old_afterwards() -> None:
    """Else the next look at new objects would be one at all of them."""
    with collector_paused():
        made = [[] for _ in range(5000)]  # type: ignore[var-annotated]
    assert gc.get_count()[0] < 1000
    assert any(each is made for each in gc.get_objects(generation=2))


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        assert gc.get_freeze_count() >= frozen - 100
    finally:
        gc.unfreeze()


def test_public_names_are_loaded_without_collections_and_without_jinja() -> None:
    program = """
import gc, sys
looked = []
gc.callbacks.append(lambda phase, facts: looked.append(phase))
import ramify
before = len(looked)
from ramify import RequestOutput, SamplingParams, EngineConfig
print(len(looked) - before, gc.isenabled(), "jinja2" in sys.modules)
import ramify.text.codec
print("jinja2" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "False", "False"]


def test_a_malformed_template_is_told_by_chats_alone() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    codec = TextCodec(Tokenizer(backend, chat_templates={"default": "{% for %}"}))
    assert codec.encode("aa", add_special_tokens=True) == [0, 0]
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="malformed"):
            codec.render_chat([{"role": "user", "content": "a"}])
    assert codec.render_chat([{"role": "user", "content": "a"}], chat_template="own") == "own"
