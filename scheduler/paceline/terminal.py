"""What a person at a terminal does with a server: has prompts completed, and chats."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

from rich.console import Console

from paceline.client import (
    AsyncClient,
    ChatMessage,
    Client,
    ClientOptions,
    Finished,
    GenerateOptions,
    Generation,
    build_request,
)
from paceline.errors import PacelineError
from paceline.screen import Screen

# What a model writes must not move the cursor or rename the window.
CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PROMPT: Final = "> "
HELP: Final = """\
/retry         ask the last question again
/system TEXT   tell the model who it is; without TEXT, nothing
/reset         forget the conversation
/stats         figures of all answers so far
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer; what there is of it stays."""


def complete_prompts(
    target: str, connection: ClientOptions, prompts: Sequence[str], options: GenerateOptions, screen: Screen
) -> None:
    """Have a server complete prompts, all at once. The first that fails ends the others. Raises PacelineError."""
    n = options.get("n") or 1

    async def show(generation: Generation, first: int) -> None:
        ended: set[int] = set()
        async for delta in generation:
            screen.add(first + delta.choice, delta.text)
            for choice in generation.finished_by_choice.keys() - ended:
                ended.add(choice)
                screen.finish(first + choice)
        for choice in set(range(n)) - ended:
            screen.finish(first + choice)

    async def run() -> None:
        async with AsyncClient(target, **connection) as client, asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                group.create_task(show(client.generate(prompt, **options), index * n))

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class Chat:
    """A conversation at the terminal, until its end.

    Args:
        client: closed by whoever made it.
        options: of every answer.
        system: what the model is told about itself; "" for nothing.

    Raises:
        InvalidArgument: an option, or a text for the model, that no request can carry.
    """

    def __init__(self, client: Client, options: GenerateOptions, system: str = "") -> None:
        self._client = client
        self._options = options
        self._system = system
        self._answered: list[tuple[str, str]] = []  # questions and answers
        self._unanswered: str | None = None  # the last question, if it failed
        self._finished: list[Finished] = []
        self._console = Console(highlight=False, soft_wrap=True)
        build_request(self._messages(""), **options)

    def run(self) -> None:
        """Read, ask and print in turn. An answer that fails is told, and does not end the chat."""
        with suppress(ImportError):  # input() then has a history, and keys to edit the line with
            import readline  # noqa: F401
        _tolerate()
        if sys.stdin is None:  # closed by whoever started this: nobody will ask
            return
        while True:
            try:
                line = input(PROMPT).strip()
                if line == "/exit":
                    return
                if line:
                    self._obey(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                self._note("\n/exit or Ctrl-D leaves")

    def _obey(self, line: str) -> None:
        command, _, text = line.partition(" ")
        match command:
            case "/help":
                print(HELP)
            case "/reset":
                self._answered.clear()
                self._unanswered = None
                self._note("forgotten")
            case "/system":
                self._system = text.strip()
                self._note("the model is told so from now on" if self._system else "the model is told nothing")
            case "/retry":
                self._retry()
            case "/stats":
                self._note(
                    f"{len(self._finished)} answers, {_figures(self._finished)}" if self._finished else "none yet"
                )
            case _ if line.startswith("/"):
                self._note(f"no command {command}; /help has them")
            case _:
                self._ask(line)

    def _retry(self) -> None:
        if self._unanswered is not None:
            self._ask(self._unanswered)
        elif self._answered:
            self._ask(self._answered.pop()[0])
        else:
            self._note("nothing was asked yet")

    def _ask(self, question: str) -> None:
        self._unanswered = question
        parts: list[str] = []
        finished: Finished | None = None
        try:
            generation = self._client.generate(self._messages(question), **self._options)
            for delta in generation:
                parts.append(delta.text)
                print(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", delta.text), end="", flush=True)
        except KeyboardInterrupt:  # leaving the loop has told the server
            note = "stopped"
        except PacelineError as error:
            note = str(error)
        else:
            finished = generation.finished
            assert finished is not None, "a stream without its end is an error"
            self._finished.append(finished)
            note = _figures([finished])
        if parts:
            print()
        if parts or finished:
            self._answered.append((question, "".join(parts)))
            self._unanswered = None
        self._note(note)

    def _messages(self, question: str) -> list[ChatMessage]:
        messages = [ChatMessage("system", self._system)] if self._system else []
        for asked, answer in self._answered:
            messages += ChatMessage("user", asked), ChatMessage("assistant", answer)
        return [*messages, ChatMessage("user", question)]

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def _tolerate() -> None:
    """What is not UTF-8 ends nothing: it is refused as a question, and shown as it can be."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def _figures(answers: Sequence[Finished]) -> str:
    """Sum up one answer or several in a line. Rates are of what came after the first tokens."""
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    seconds = sum(answer.timing.total - answer.timing.time_to_first_token for answer in answers)
    steps = sum(answer.speculation.verify_steps for answer in answers)
    drafted = sum(answer.speculation.drafted_tokens for answer in answers)
    accepted = sum(answer.speculation.accepted_tokens for answer in answers)
    first = sum(answer.timing.time_to_first_token for answer in answers) / len(answers)
    figures = [f"{tokens} tokens"]
    if seconds > 0.0:
        figures.append(f"{(tokens - len(answers)) / seconds:.1f} tokens/s")
    figures.append(f"first after {first:.2f} s")
    if drafted:
        figures.append(f"accepted {accepted} of {drafted} drafts ({accepted / drafted:.0%})")
        figures.append(f"{tokens / max(1, steps):.2f} tokens per step")
    return ", ".join(figures)
