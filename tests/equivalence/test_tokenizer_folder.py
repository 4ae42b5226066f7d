"""Tokenizers read from model folders against `transformers` reading the same folders."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from ramify import LLM, SamplingParams
from ramify.errors import FileFormatError, InvalidInputError, ModelNotFoundError, UnsupportedError
from ramify.text.chat_template import ChatTemplate
from ramify.text.codec import TextCodec
from ramify.text.hugging_face_tokenizer import HuggingFaceTokenizer
from ramify.text.tokenizer import Tokenizer
from ramify.text.tokenizer_folder import load_folder
from tests.conftest import CheckpointMaker

CHATML = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAMPLES = ["", " ", "Hello world", "  two  spaces ", "héllo 日本 👩‍👧", "a<|im_end|>b", "<s>x</s> y", "1234\n\tx"]
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind: é 日本"},
    {"role": "user", "content": "  Hello\n"},
]


def byte_level_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    trainee = tokenizers.Tokenizer(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trainee.train_from_iterator(["Hello world, hello words, two spaces"] * 5, trainer)
    model = json.loads(trainee.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def save_llama2(folder: Path) -> None:
    """SentencePiece style with byte fallback, BOS by the post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *"Helo wrdtspac123", "He", "ll", "Hell", "Hello", "▁Hello", "wo", "▁wo"]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces + letters))}
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("▁", "Hello"), ("w", "o"), ("▁", "wo")]
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, chat_template=CHATML)
    tokenizer.save_pretrained(folder)


def save_llama3(folder: Path) -> None:
    """Byte-level BPE whose post-processor adds BOS, saved as a plain fast tokenizer."""
    vocabulary, merges = byte_level_parts()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    pattern = Regex(r"\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"])
    begin = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|im_end|>", chat_template=CHATML
    ).save_pretrained(folder)


def save_qwen2(folder: Path) -> None:
    """Byte-level BPE without BOS, composed characters."""
    vocabulary, merges = byte_level_parts()
    vocabulary["<|endoftext|>"] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    tokenizer.save_pretrained(folder)


@pytest.fixture(params=[save_llama2, save_llama3, save_qwen2])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save: Callable[[Path], None] = request.param
    save(tmp_path)
    return tmp_path


def theirs_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def untruncated(theirs: Any, text: str) -> list[int]:
    ids: list[int] = theirs(text, truncation=False, padding=False)["input_ids"]
    return ids


def test_ids_and_special_tokens(folder: Path) -> None:
    ours, theirs = load_folder(folder), theirs_of(folder)
    for text in SAMPLES:
        ids = untruncated(theirs, text)
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False, truncation=False
        )
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    assert ours.id_to_token(0) == theirs.convert_ids_to_tokens(0)
    assert ours.id_to_token(ours.vocab_size) is None


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template(folder: Path, prompt: bool) -> None:
    ours, theirs = load_folder(folder), theirs_of(folder)
    assert ours.chat_template is not None
    template = ChatTemplate(ours.chat_template, ours.special_tokens)
    for tools in (None, [{"name": "f", "description": "<ü>"}]):
        wanted = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False)
        assert template.render(MESSAGES, add_generation_prompt=prompt, tools=tools) == wanted
    ids = ours.encode(wanted, add_special_tokens=False)
    if ours.bos_token_id is not None:
        assert ids.count(ours.bos_token_id) == 1


def test_the_tokenizer_that_callers_get_is_theirs_by_name_and_default(folder: Path) -> None:
    ours, theirs = HuggingFaceTokenizer(TextCodec(load_folder(folder))), theirs_of(folder)
    for text in SAMPLES:
        ids = untruncated(theirs, text)
        assert ours.encode(text) == ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.tokenize(text) == theirs.tokenize(text, truncation=False)
    both = (ours(list(SAMPLES)), theirs(list(SAMPLES), truncation=False))
    assert both[0].input_ids == both[1].input_ids
    assert both[0].attention_mask == both[1].attention_mask
    assert copy.deepcopy(both[0]) == pickle.loads(pickle.dumps(both[0])) == both[0]
    assert not hasattr(both[0], "token_type_ids")
    assert ours.convert_ids_to_tokens([1, 5, 260]) == theirs.convert_ids_to_tokens([1, 5, 260])
    for token in ("H", "no such token"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
        assert ours.convert_tokens_to_ids([token]) == theirs.convert_tokens_to_ids([token])
    assert [ours.vocab_size, len(ours), ours.get_vocab()] == [theirs.vocab_size, len(theirs), theirs.get_vocab()]
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, role) == getattr(theirs, role), role
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_id"), role
    assert set(ours.all_special_ids) >= set(theirs.all_special_ids)
    assert ours.batch_decode([[1], [5, 6]]) == theirs.batch_decode([[1], [5, 6]])


def test_what_the_tokenizer_that_callers_get_cannot_do_is_refused(tmp_path: Path) -> None:
    save_llama3(tmp_path)
    ours = HuggingFaceTokenizer(TextCodec(load_folder(tmp_path)))
    ids = ours.encode("Hello", truncation=False, return_tensors=None)  # type: ignore[call-arg]
    assert ours.decode(numpy.array(ids), clean_up_tokenization_spaces=False) == ours.decode(ids)  # type: ignore[call-arg]
    assert ours.decode(ids[1]) == ours.decode([numpy.int64(ids[1])])
    calls: list[Callable[[], Any]] = [
        lambda: ours.encode("Hello", return_tensors="pt"),  # type: ignore[call-arg]
        lambda: ours(["Hello"], padding=True),  # type: ignore[call-arg]
        lambda: ours.apply_chat_template(MESSAGES, return_tensors="pt"),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="token ids come as lists, whole and unpadded"):
            call()
    wrong: list[Any] = [None, "abc", [1.5], [None], 1.5, object()]
    for given in wrong:
        with pytest.raises(InvalidInputError, match="token ids must be one id, or a list, an array or a tensor"):
            ours.decode(given)
        with pytest.raises(InvalidInputError):
            ours.convert_ids_to_tokens(given)
    for text in (None, 5, [None]):
        with pytest.raises(InvalidInputError):
            ours(text)  # type: ignore[arg-type]


CONVERSATIONS: list[Any] = [MESSAGES, [*MESSAGES, {"role": "assistant", "content": "Well, I "}]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": [{"name": "f"}]},
        {"continue_final_message": True},
        {"chat_template": "{{ messages[-1].content | trim }}</s>", "continue_final_message": True},
        {"chat_template": "{{ messages | length }} {{ enable_thinking }}", "enable_thinking": False},
    ],
    ids=str,
)
def test_apply_chat_template_is_theirs(folder: Path, options: dict[str, Any]) -> None:
    ours, theirs = HuggingFaceTokenizer(TextCodec(load_folder(folder))), theirs_of(folder)
    for conversation in CONVERSATIONS:
        wanted = theirs.apply_chat_template(conversation, tokenize=False, **options)
        assert ours.apply_chat_template(conversation, tokenize=False, **options) == wanted
        ids = ours.encode(wanted, add_special_tokens=False)
        assert ours.apply_chat_template(conversation, **options) == ids
        assert ours.apply_chat_template(conversation, return_dict=True, **options)["input_ids"] == ids
    several = ours.apply_chat_template(CONVERSATIONS, tokenize=False, **options)
    assert several == theirs.apply_chat_template(CONVERSATIONS, tokenize=False, **options)


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_the_post_processor_outranks_the_configuration(folder: Path, flags: dict[str, bool]) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **flags}))
    ours, theirs = load_folder(folder), theirs_of(folder)
    for text in SAMPLES:
        assert ours.encode(text) == untruncated(theirs, text)


def test_tokens_named_by_the_configuration_alone_are_added(tmp_path: Path) -> None:
    save_llama3(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["pad_token"] = "<|pad|>"
    config["eos_token"] = {"content": "<|eot|>", "special": True, "__type": "AddedToken"}
    config["extra_special_tokens"] = ["<|tool|>"]
    path.write_text(json.dumps(config))
    ours, theirs = load_folder(tmp_path), theirs_of(tmp_path)
    for text in [*SAMPLES, "a<|eot|>b<|pad|><|tool|> c"]:
        assert untruncated(theirs, text) == ours.encode(text), text
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.special_tokens["eos_token"] == "<|eot|>"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("lstrip", [True, False])
def test_named_tokens_keep_their_properties(tmp_path: Path, special: bool, lstrip: bool) -> None:
    """Making the EOS token special once dropped its `lstrip`, so a space before it became a token."""
    save_llama3(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token.update(special=special, lstrip=lstrip)
    path.write_text(json.dumps(content))
    ours, theirs = load_folder(tmp_path), theirs_of(tmp_path)
    ids = untruncated(theirs, "a <|im_end|> b")
    assert ours.encode("a <|im_end|> b") == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_older_files_are_converted(tmp_path: Path) -> None:
    vocabulary, merges = byte_level_parts()
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    ours, theirs = load_folder(tmp_path), theirs_of(tmp_path)
    for text in SAMPLES:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.eos_token_ids == {theirs.eos_token_id}


def minimal(folder: Path, **config: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_folder(folder)


def test_chat_templates_may_be_several(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    assert minimal(tmp_path, chat_template=named).chat_templates == {"default": "D", "rag": "R"}
    assert minimal(tmp_path, chat_template="C").chat_template == "C"
    assert minimal(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert minimal(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("FR")
    assert minimal(tmp_path, chat_template="C").chat_templates == {"default": "F", "rag": "FR"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"{'a'}"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"5": {"content": 7}}}'),
        ("special_tokens_map.json", b"\x00"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    minimal(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileFormatError, match=name):
        load_folder(tmp_path)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        load_folder(tmp_path)
    with pytest.raises(ModelNotFoundError, match="not a folder"):
        load_folder(tmp_path / "absent")


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    tokenizer = minimal(tmp_path)
    with pytest.raises(InvalidInputError, match="surrogate at position 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidInputError, match="str"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    for ids in ([-1], [2**40], ["a"]):
        with pytest.raises(InvalidInputError, match="token ids"):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    assert tokenizer.decode([0, 999, 1]) == "a b"
    assert tokenizer.encode("ab" * 200_000) == [0, 1] * 200_000


def test_a_panic_of_the_backend_is_an_error_like_others(tmp_path: Path) -> None:
    """Ten million spaces make the regular expressions of Llama 3 give up, by a Rust panic."""
    save_qwen2(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot be tokenized"):
        load_folder(tmp_path).encode(" " * 11_000_000 + "a")


def test_a_prompt_and_its_output_read_as_one(make_checkpoint: CheckpointMaker) -> None:
    """As transformers decodes both together: a decoder may strip the start of a text, but not of what goes on."""
    folder = make_checkpoint("llama")
    save_llama2(folder)
    llm, theirs, prompt = LLM(str(folder), max_model_len=64), theirs_of(folder), "Hello world"
    bias = {theirs.convert_tokens_to_ids("▁wo"): 100.0}
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias=bias, logprobs=1)
    [output] = llm.generate(prompt, params, use_tqdm=False)
    [sample] = output.outputs
    whole = theirs.decode([*output.prompt_token_ids, *sample.token_ids], skip_special_tokens=True)
    assert prompt + sample.text == whole == "Hello world wo wo wo"
    assert sample.logprobs is not None
    assert [row[token].decoded_token for row, token in zip(sample.logprobs, sample.token_ids, strict=True)] == [
        " wo"
    ] * 3
    [chat] = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    assert chat.outputs[0].text == " wo wo wo"  # the template's last words are no special token
    [begun] = llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
    assert begun.outputs[0].text == "wo wo wo"
