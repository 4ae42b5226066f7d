"""`ramify chat`: a conversation in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.conversation import Conversation, Messages
from ramify.cli.line_editor import LineEditor
from ramify.cli.messages import say, say_error
from ramify.cli.options import ENGINE_FLAGS, SAMPLING_FIELDS, flags_of, made, told_in_flags, with_flags
from ramify.cli.recommendation import completed, said_fields, sampling_flags
from ramify.errors import InvalidInputError, RamifyError
from ramify.outputs import FinishReason
from ramify.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from ramify.llm import LLM

# A chat shows one answer as it comes: many samples, searches and numbers have no place in it.
SIBLINGS = ("n", "best_of", "child", "strategy", "score", "diversity_penalty")
BEAMS = ("beam_width", "length_penalty", "early_stopping", "num_beam_groups")
NOT_IN_A_CHAT = frozenset((*SIBLINGS, *BEAMS, "logprobs", "prompt_logprobs"))
ENGINE = flags_of(ENGINE_FLAGS, "Engine")
# Shown to people: longer than the library's bare default.
SAMPLING = sampling_flags({"max_tokens": 512}, without=NOT_IN_A_CHAT)
COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)


@with_flags(SAMPLING, ENGINE)
def chat(
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message: who the model is to be.")
    ] = None,
    **values: Any,
) -> None:
    """Talk with the model.

    /help lists what can be typed beside messages. Ctrl-C stops an answer; Ctrl-D or /exit ends the chat. From a pipe,
    every line is a message.
    """
    made(SamplingParams, values, said_fields(values))  # refuses what is wrong before anything is loaded
    from ramify import LLM  # torch takes a moment: what is wrong above is told without it

    llm = made(LLM, values, ENGINE_FLAGS, say=say)
    params = completed(llm, values, output_kind=OutputKind.DELTA)
    Chat(llm, params, Conversation(system)).run()


class Chat:
    """A model, a conversation, and what is typed."""

    def __init__(self, llm: LLM, params: SamplingParams, conversation: Conversation) -> None:
        self._llm = llm
        self._params = params
        self._conversation = conversation
        self._name = Path(llm.config.model_config.model).name
        cache = llm.stats()["blocks_total"] * llm.config.cache_config.block_size
        self._context = min(llm.max_model_len, cache)
        self._editor = LineEditor("you: ")
        self._has_ended = False
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "help": ("", "this list", self._help),
            "reset": ("", "forget what was said; the system message stays", self._reset),
            "system": ("[TEXT]", 'set the system message, show it, or remove it with ""', self._system),
            "save": ("FILE", "write the conversation to a new file.json or file.md", self._save),
            "exit": ("", "end the chat, as Ctrl-D does", self._exit),
        }

    def run(self) -> None:
        self._count_tokens(self._conversation.messages("?"))  # a model without a chat template is told at once
        if self._editor.is_interactive:
            say(f"{self._name}, a context of {self._context} tokens. /help lists commands; Ctrl-D ends.")
        while not self._has_ended:
            try:
                said = self._editor.read()
            except KeyboardInterrupt:
                if not self._editor.is_interactive:
                    raise
                say("\nCtrl-D or /exit ends the chat.")
                continue
            if said is None:
                if self._editor.is_interactive:
                    print()  # the shell's prompt is not to stand behind ours
                break
            try:
                self._take(said.strip())
            except RamifyError as error:
                if not self._editor.is_interactive:
                    raise
                say_error(str(error))  # the conversation is as it was before

    def _take(self, said: str) -> None:
        command = COMMAND.fullmatch(said)
        if command is None:
            if said:
                self._answer(said)
            return
        name, argument = command[1], (command[2] or "").strip()
        if name not in self._commands:
            raise InvalidInputError(
                f"there is no command /{name}; /help lists them. To say it to the model, begin with another word"
            )
        takes, _, act = self._commands[name]
        if argument and not takes:
            raise InvalidInputError(f"/{name} takes nothing after it, got {argument!r}")
        act(argument)

    # -- answers ---------------------------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        conversation, longest = self._conversation, self._params.max_tokens
        num_dropped, room = conversation.make_room(question, self._count_tokens, context=self._context, longest=longest)
        if num_dropped:
            turns = "the oldest turn was" if num_dropped == 1 else f"the {num_dropped} oldest turns were"
            say(f"(the context is full: {turns} dropped)")
        limit = room if longest is None else min(longest, room)
        params = replace(self._params, max_tokens=limit, min_tokens=min(self._params.min_tokens, limit))
        with told_in_flags(SAMPLING_FIELDS):
            answer, reason = self._stream(conversation.messages(question), params)
        if reason is FinishReason.LENGTH:
            why = f"--max-tokens = {limit}" if limit == longest else f"the context's end after {limit} tokens"
            say(f"(cut off by {why})")
        if reason is FinishReason.ABORT:
            say("(stopped)" if answer else "(stopped before the first word: the question is taken back)")
        if answer or reason is not FinishReason.ABORT:
            conversation.turns.append((question, answer))

    def _stream(self, messages: Messages, params: SamplingParams) -> tuple[str, FinishReason]:
        """Prints an answer as it comes; returns it with why it ended."""
        pieces, reason = [], FinishReason.ABORT
        stream = self._llm.stream_chat(messages, params)
        try:
            for output in stream:
                if output.error is not None:
                    raise RamifyError(output.error)
                [completion] = output.outputs
                pieces.append(completion.text)
                reason = completion.finish_reason or reason
                print(completion.text, end="", flush=True)
        except KeyboardInterrupt:
            if not self._editor.is_interactive:
                raise
            reason = FinishReason.ABORT
        finally:
            stream.close()  # ends the request, if it is still running
            print()
        return "".join(pieces), reason

    def _count_tokens(self, messages: Messages) -> int:
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise InvalidInputError("this model has no tokenizer, so it cannot chat")
        return len(tokenizer.encode(self._llm.render_chat(messages), add_special_tokens=False))

    # -- commands --------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        for name, (takes, does, _act) in self._commands.items():
            say(f"  {f'/{name} {takes}':<16}{does}")
        say("Ctrl-C stops an answer. The arrow keys edit and bring back earlier lines.")
        say("A paste of several lines is one message; so are lines that end in \\ with the one after them.")

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()
        say("(forgotten)")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text in ('""', "''") else text
        say(f"(system message: {self._conversation.system or 'none'})")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidInputError("/save needs a file's name that ends in .json or .md")
        if not self._conversation.turns:
            raise InvalidInputError("there is nothing to save yet")
        path = Path(name).expanduser()
        self._conversation.save(path, self._name)
        say(f"(saved to {path})")

    def _exit(self, _: str) -> None:
        self._has_ended = True
