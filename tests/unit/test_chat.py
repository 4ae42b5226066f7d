"""The chat of the command line, on a model that is no model: commands, a context that runs full, answers that end."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.cli.chat import SAMPLING, Chat
from ramify.cli.commands import main
from ramify.cli.conversation import Conversation, Messages
from ramify.errors import InvalidInputError, RamifyError
from ramify.outputs import CompletionOutput, FinishReason, RequestOutput
from ramify.sampling_params import OutputKind, SamplingParams

PARAMS = SamplingParams(max_tokens=8, output_kind=OutputKind.DELTA)


class WordLLM:
    """A token is a word; the answer to a question is the question in capitals, cut where params say so."""

    def __init__(self, context: int = 100, *, interrupted_at: int | None = None) -> None:
        self.max_model_len = context
        self.tokenizer = SimpleNamespace(encode=lambda text, **_: text.split())
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(model="/models/parrot"), cache_config=SimpleNamespace(block_size=16)
        )
        self.shown: list[Messages] = []
        self.limits: list[int | None] = []
        self._interrupted_at = interrupted_at

    def stats(self) -> dict[str, int]:
        return {"blocks_total": 1_000}

    def render_chat(self, messages: Messages) -> str:
        return " ".join(message["content"] for message in messages)

    def stream_chat(self, messages: Messages, params: SamplingParams) -> Iterator[RequestOutput]:
        self.shown.append(messages)
        self.limits.append(params.max_tokens)
        words = messages[-1]["content"].upper().split()
        for position, word in enumerate(words[: params.max_tokens]):
            if position == self._interrupted_at:
                raise KeyboardInterrupt
            last = position + 1 == min(len(words), params.max_tokens or len(words))
            reason = (FinishReason.LENGTH if len(words) > position + 1 else FinishReason.STOP) if last else None
            completion = CompletionOutput(0, word + " ", (1,), -1.0, finish_reason=reason)
            yield RequestOutput("request", None, (1,), (completion,), finished=last)


Said = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """talk(line, ...): what a person who types these lines sees; the model's shown messages, output, errors."""

    def talk(*lines: str, llm: Any = None, params: SamplingParams = PARAMS, **options: Any) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        llm = llm or WordLLM()
        chat = Chat(llm, params, Conversation(**options))
        chat._editor.is_interactive = True
        chat.run()
        return (llm, *capsys.readouterr())

    return talk


def contents(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def test_answers_and_questions_become_turns(talk: Said) -> None:
    llm, output, _ = talk("hello there", "", "  again  ")
    assert output.split() == ["HELLO", "THERE", "AGAIN"]
    assert contents(llm.shown[1]) == ["hello there", "HELLO THERE ", "again"]


def test_the_banner_names_the_model_and_its_context(talk: Said) -> None:
    assert "parrot, a context of 100 tokens. /help lists commands" in talk()[2]


def test_commands(talk: Said) -> None:
    llm, output, told = talk("/system Be kind.", "hi", "/reset", "/help", "ho", '/system ""', "/exit", "never said")
    assert output.split() == ["HI", "HO"]
    assert [contents(messages) for messages in llm.shown] == [["Be kind.", "hi"], ["Be kind.", "ho"]]
    assert all(f"/{name}" in told for name in ("help", "reset", "system", "save", "exit"))
    assert "(system message: none)" in told


@pytest.mark.parametrize(
    ("typed", "refusal"),
    [
        ("/nonsense", "there is no command /nonsense; /help lists them"),
        ("/reset now", "/reset takes nothing after it"),
        ("/save", "/save needs a file's name"),
        ("/save file.txt", "there is nothing to save yet"),
    ],
)
def test_mistakes_are_told_and_the_chat_goes_on(talk: Said, typed: str, refusal: str) -> None:
    _, output, told = talk(typed, "on")
    assert refusal in told
    assert output.split() == ["ON"]


def test_a_path_is_a_message(talk: Said) -> None:
    assert talk("/usr/bin is a folder")[1].split() == ["/USR/BIN", "IS", "A", "FOLDER"]


def test_save_writes_json_or_markdown_and_overwrites_nothing(talk: Said, tmp_path: Path) -> None:
    saved = [f"/save {tmp_path / name}" for name in ("chat.json", "chat.md", "chat.json", "chat.txt")]
    told = talk("hi", *saved, system="Be kind.")[2]
    assert "chat.json is there already, and nothing is overwritten" in " ".join(told.split())
    assert "must end in .json or .md" in " ".join(told.split())
    made = json.loads((tmp_path / "chat.json").read_text())
    assert made["model"] == "parrot"
    assert [message["role"] for message in made["messages"]] == ["system", "user", "assistant"]
    assert "**user**\n\nhi\n\n**assistant**\n\nHI" in (tmp_path / "chat.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.json", "chat.md"]


def test_a_full_context_drops_the_oldest_turns_and_says_so(talk: Said) -> None:
    llm, _, told = talk("a b c d", "e f g h", "i j k l", llm=WordLLM(context=24))
    # 4 words of question, 4 of answer; an answer has room for 6 of 24 at least.
    assert contents(llm.shown[1]) == ["a b c d", "A B C D ", "e f g h"]
    assert contents(llm.shown[2]) == ["e f g h", "E F G H ", "i j k l"]
    assert "(the context is full: the oldest turn was dropped)" in told
    assert max(llm.limits) == 8


def test_a_question_that_never_fits_is_refused_and_loses_nothing(talk: Said) -> None:
    llm, _, told = talk("a b", "x " * 30, "c d", llm=WordLLM(context=24))
    assert "this message needs 30 tokens, and the context has 24" in told
    assert contents(llm.shown[1]) == ["a b", "A B ", "c d"]


def test_an_answer_that_is_cut_off_says_why(talk: Said) -> None:
    assert "(cut off by --max-tokens = 8)" in talk("a " * 20)[2]
    endless = SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)
    assert "(cut off by the context's end after 4 tokens)" in talk("a " * 20, llm=WordLLM(24), params=endless)[2]


def test_ctrl_c_stops_an_answer_and_keeps_what_came(talk: Said) -> None:
    llm, output, told = talk("a b c", "d", llm=WordLLM(interrupted_at=1))
    assert "(stopped)" in told
    assert contents(llm.shown[1]) == ["a b c", "A ", "d"]
    assert "D" not in output.split()[:1]


def test_ctrl_c_before_the_first_word_takes_the_question_back(talk: Said) -> None:
    llm, _, told = talk("a b c", "d", llm=WordLLM(interrupted_at=0))
    assert "the question is taken back" in told
    assert contents(llm.shown[1]) == ["d"]


def test_an_error_of_the_engine_takes_the_turn_back(talk: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = WordLLM()
    failed = RequestOutput("request", None, (1,), (), finished=True, error="it broke")
    monkeypatch.setattr(llm, "stream_chat", lambda *_: (output for output in [failed]))
    assert "error: it broke" in talk("hi", llm=llm)[2]


def test_from_a_pipe_a_mistake_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/nonsense\n"))
    with pytest.raises(RamifyError, match="no command /nonsense"):
        Chat(WordLLM(), PARAMS, Conversation()).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["-n", "--best-of", "--beam-width", "--logprobs", "--prompt-logprobs", "--strategy"])
def test_what_a_chat_cannot_use_is_refused_by_its_flag(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ramify", "chat", flag, "2"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"No such option: {flag}" in capsys.readouterr().err


def test_every_flag_of_a_chat_is_used_by_it() -> None:
    """What is left makes one stream of text with any of its values."""
    left = {flag.name for flag in SAMPLING}
    assert {"temperature", "top_p", "stop", "max_tokens", "seed"} <= left
    assert not left & {"n", "beam_width", "early_stopping", "num_beam_groups", "logprobs"}


@pytest.mark.parametrize("turns", range(6))
def test_room_is_made_by_dropping_as_little_as_possible(turns: int) -> None:
    conversation = Conversation("s", [(f"q{index}", "a") for index in range(turns)])
    # A message is a token; the answer gets 2 at least.
    dropped, room = conversation.make_room("q", len, context=10, longest=None)
    assert dropped == max(0, turns - 3)
    assert room == 10 - 2 - 2 * (turns - dropped)
    assert len(conversation.turns) == turns - dropped


def test_a_system_message_that_leaves_no_room_is_refused() -> None:
    conversation = Conversation("s", [("q", "a")])
    with pytest.raises(InvalidInputError, match="shorten it"):
        conversation.make_room("q", lambda messages: 8 + len(messages), context=10, longest=None)
    assert len(conversation.turns) == 1


READ_THRICE = """
from ramify.cli.line_editor import LineEditor
print("\\nread", [LineEditor(f"{name}: ").read() for name in ("one", "two", "three")], "so")
"""


def test_in_a_terminal_lines_are_edited_and_pasted_whole() -> None:
    pty, readline = pytest.importorskip("pty"), pytest.importorskip("readline")
    if "libedit" in readline.__doc__:
        pytest.skip("libedit knows no bracketed paste")
    paste, left, up = b"\x1b[200~first line\nsecond line\x1b[201~", b"\x1b[D", b"\x1b[A"
    typed = {b"one:": paste, b"two:": b"helo" + left + b"l", b"three:": up + up, b"so\r\n": b""}
    terminal, inside = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": "/dev/null"}
    command = [sys.executable, "-c", READ_THRICE]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environment) as editor:
        shown = b""
        for prompt, keys in typed.items():
            while prompt not in shown:
                if not select.select([terminal], [], [], 30)[0]:
                    editor.kill()
                    pytest.fail(f"no {prompt!r} came after {shown!r}")
                shown += os.read(terminal, 1024)
            os.write(terminal, keys + b"\r")
    os.close(inside)
    os.close(terminal)
    assert "read ['first line\\nsecond line', 'hello', 'first line\\nsecond line']" in shown.decode()
