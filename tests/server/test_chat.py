"""`paceline chat` and `paceline generate --server`: real processes against a real server around the scripted runner."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

import pytest

from fake_server import fake_server
from paceline.client import AsyncClient
from paceline.terminal import CONTROLS
from support.serving import MODEL, PATIENCE, Serving

# The processes have loops of their own.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

PACELINE = [sys.executable, "-m", "paceline"]
FIGURES = r"(\d+) tokens, (?:\d+\.\d tokens/s, )?first after \d+\.\d\d s"


async def start(*arguments: str, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    pipe = subprocess.PIPE
    variables = {**os.environ, **(env or {})}
    return await asyncio.create_subprocess_exec(
        *PACELINE, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=variables
    )


async def run(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr."""
    process = await start(*arguments, env=env)
    async with asyncio.timeout(PATIENCE):
        output, error = await process.communicate()
    return process.returncode, output.decode(), error.decode()


# ---- Chat ----------------------------------------------------------------------------------------------------------


class Talk:
    """A chat in a process of its own, whose standard input and output are pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._output = ""

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode(errors="surrogateescape"))

    async def hear(self, pattern: str) -> str:
        """Read until the pattern is there; gives what is before it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while not (match := re.search(pattern, self._output)):
                data = await self.process.stdout.read(4096)
                assert data, f"{pattern!r} never came; the last was {self._output!r}"
                self._output += data.decode()
        before, self._output = self._output[: match.start()], self._output[match.end() :]
        return before

    async def interrupt(self, pattern: str) -> str:
        """Ctrl-C, and `hear`. Between a prompt and the read behind it a signal is noted and then sleeps with the read,
        until another one comes.
        """
        async with asyncio.timeout(PATIENCE):
            while True:
                self.process.send_signal(signal.SIGINT)
                with suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        return await self.hear(pattern)

    async def ask(self, line: str) -> list[str]:
        """The lines up to the next prompt."""
        self.say(line)
        return (await self.hear(r"(?:\A|\n)> ")).split("\n")

    async def leave(self, line: str = "/exit") -> None:
        self.say(line)
        _, error = await self.process.communicate()
        assert (self.process.returncode, error) == (0, b"")


StartChat: TypeAlias = Callable[..., Awaitable[Talk]]


@pytest.fixture
async def chat() -> AsyncIterator[StartChat]:
    started: list[asyncio.subprocess.Process] = []

    async def chat_with(address: str, *arguments: str, env: Mapping[str, str] | None = None) -> Talk:
        process = await start("chat", "--server", address, "--max-tokens", "6", *arguments, env=env)
        started.append(process)
        talk = Talk(process)
        assert await talk.hear(r"; /help lists what can be said besides\n> ") == f"{MODEL} at {address}"
        return talk

    yield chat_with
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def answer_to(serving: Serving, *turns: str, system: str = "") -> str:
    """What the server says after these turns, the user's first, in six tokens."""
    messages = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": turn})
    async with AsyncClient(serving.address) as client:
        return (await client.complete(messages, max_tokens=6)).text


async def test_answers_know_what_was_said(free: Serving, chat: StartChat) -> None:
    talk = await chat(free.address)
    answer, figures = await talk.ask("hello")
    assert answer == await answer_to(free, "hello")
    assert re.fullmatch(FIGURES + r", accepted \d+ of \d+ drafts \(\d+%\), \d\.\d\d tokens per step", figures)
    assert figures.startswith("6 tokens")
    second, _ = await talk.ask("and now?")
    assert second == await answer_to(free, "hello", answer, "and now?")
    assert second != await answer_to(free, "and now?")
    await talk.leave()


async def test_what_can_be_said_besides(free: Serving, chat: StartChat) -> None:
    talk = await chat(free.address, "--system", "be short")
    assert await talk.ask("") == [""]
    assert await talk.ask("/stats") == ["none yet"]
    assert await talk.ask("/retry") == ["nothing was asked yet"]
    hello = (await talk.ask("hello"))[0]
    assert hello == await answer_to(free, "hello", system="be short")

    assert (await talk.ask("/retry"))[0] == hello, "the answer was taken back before it was asked for again"
    [stats] = await talk.ask("/stats")
    assert re.fullmatch("2 answers, 12 tokens, .*", stats)

    await talk.ask("/reset")
    assert (await talk.ask("hello"))[0] == hello
    await talk.ask("/reset")
    await talk.ask("/system be long")
    assert (await talk.ask("hello"))[0] == await answer_to(free, "hello", system="be long")
    await talk.ask("/reset")
    await talk.ask("/system")
    assert (await talk.ask("hello"))[0] == await answer_to(free, "hello")

    assert await talk.ask("/what") == ["no command /what; /help has them"]
    assert len(await talk.ask("/help")) == 6
    await talk.leave()


async def test_the_end_of_the_input_is_the_end(free: Serving, chat: StartChat) -> None:
    talk = await chat(free.address)
    assert talk.process.stdin is not None
    talk.process.stdin.close()
    output, error = await talk.process.communicate()
    assert (talk.process.returncode, output, error) == (0, b"\n", b"")


async def test_control_c_stops_the_answer_and_not_the_program(serving: Serving, chat: StartChat) -> None:
    talk = await chat(serving.address)
    assert await talk.interrupt(r"/exit or Ctrl-D leaves\n> ") == "\n"

    talk.say("hello")
    serving.runner.allow(2)
    begin = await talk.hear(r"(?=[a-z])")
    talk.process.send_signal(signal.SIGINT)
    part = begin + (await talk.hear(r"\nstopped\n> "))
    serving.runner.open()
    await serving.until(lambda: serving.idle)
    whole = await answer_to(serving, "hello")
    assert whole.startswith(part)
    assert 0 < len(part) < len(whole)
    # The beginning of the answer is a part of the conversation.
    assert (await talk.ask("go on"))[0] == await answer_to(serving, "hello", part, "go on")
    await talk.leave()


async def test_an_answer_that_fails_can_be_asked_for_again(serving: Serving, chat: StartChat) -> None:
    talk = await chat(serving.address)
    talk.say("hello")
    await serving.until(lambda: serving.scheduler.has_requests)
    async with AsyncClient(serving.address) as client:
        [live] = await client.admin.requests()
        await client.admin.cancel(live.request_id)
    serving.runner.open()
    assert re.fullmatch("CANCELLED: .*", await talk.hear(r"\n> "))
    assert (await talk.ask("/retry"))[0] == await answer_to(serving, "hello")
    await talk.leave()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
async def test_what_is_not_utf8_does_not_end_the_chat(free: Serving, chat: StartChat, errors: str) -> None:
    """Which of the two Python takes is the locale's to say."""
    talk = await chat(free.address, env={"PYTHONIOENCODING": f"utf-8:{errors}"})
    hello = (await talk.ask("hello"))[0]
    [told] = await talk.ask("caf\udce9")
    assert told == r"chat.messages[2].content = 'caf\udce9': must be text that UTF-8 can hold"
    assert (await talk.ask("go on"))[0] == await answer_to(free, "hello", hello, "go on")
    [told] = await talk.ask("/caf\udce9")
    assert re.fullmatch(r"no command /caf.*; /help has them", told)
    await talk.leave()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-tokens", "-1", "stop.max_tokens = -1: must be an integer in 0..2^32-1"),
        ("--system", "caf\udce9", r"chat.messages[0].content = 'caf\udce9': must be text that UTF-8 can hold"),
    ],
)
async def test_what_can_never_work_is_refused_at_the_start(free: Serving, option: str, value: str, said: str) -> None:
    code, output, error = await run("chat", "--server", free.address, option, value)
    assert (code, output, error) == (2, "", f"paceline: {said}\n")


async def test_a_model_cannot_steer_the_terminal() -> None:
    assert CONTROLS.sub("?", "a\x1b[2Jb\x07\r\x9b\n\tc\u200d\xa0") == "a?[2Jb???\n\tc\u200d\xa0"


async def test_nobody_to_chat_with() -> None:
    code, output, error = await run("chat")
    assert (code, output) == (2, "")
    assert error.startswith("paceline: there is no server to chat with: start a server by `paceline serve")
    code, output, error = await run("chat", "--server", "127.0.0.1:1")
    assert (code, output) == (2, "")
    assert error.startswith("paceline: UNAVAILABLE")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "generate x --max-tokens 3"])
async def test_a_full_disk_is_no_traceback(free: Serving, command: str) -> None:
    command = f"echo hello | {shlex.join(PACELINE)} {command} --server {free.address} > /dev/full"
    process = await asyncio.create_subprocess_shell(command, stderr=subprocess.PIPE)
    async with asyncio.timeout(PATIENCE):
        _, error = await process.communicate()
    message = "paceline: No space left on device: the output is not whole\n"
    assert (process.returncode, error.decode()) == (1, message)


async def test_a_closed_stdin_ends_the_chat(free: Serving) -> None:
    command = f"{shlex.join(PACELINE)} chat --server {free.address} <&-"
    process = await asyncio.create_subprocess_shell(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    async with asyncio.timeout(PATIENCE):
        output, error = await process.communicate()
    assert (process.returncode, error) == (0, b"")
    assert output.startswith(MODEL.encode())


# ---- Generate ------------------------------------------------------------------------------------------------------


async def completion_of(serving: Serving, prompt: str, **options: int) -> str:
    async with AsyncClient(serving.address) as client:
        return (await client.complete(prompt, **options)).text  # type: ignore[arg-type]


async def test_prompts_come_in_turn(free: Serving) -> None:
    prompts = ["one", "two", "three"]
    code, output, error = await run("generate", *prompts, "--server", free.address, "--max-tokens", "5")
    assert (code, error) == (0, "")
    texts = [await completion_of(free, prompt, max_tokens=5) for prompt in prompts]
    assert output == "".join(f"==> {prompt}\n{text}\n\n" for prompt, text in zip(prompts, texts, strict=True))


async def test_options_are_the_requests(free: Serving) -> None:
    options = ["--max-tokens", "5", "--temperature", "1", "--request-seed", "7", "--n", "2", "--stop", "zz"]
    code, output, error = await run("generate", "one", "--server", free.address, "--model", MODEL, *options)
    assert (code, error) == (0, "")
    assert output.count("==> one\n") == 2


async def test_the_request_says_what_was_written() -> None:
    async with fake_server() as fake:
        options = ["--temperature", "0.5", "--top-p", "0.25", "--top-k", "3", "--min-p", "0.125", "--request-seed", "7"]
        shape = ["--max-tokens", "4", "--stop", "a", "--stop", "b", "--regex", "[a-z]+"]
        done = await run(
            "generate", "hello", "--server", fake.address, *options, *shape, env={"PACELINE_API_KEY": "sk-1"}
        )
        assert done == (0, "abc\n", "")
        [request] = fake.requests
        sampling, stop = request.sampling, request.stop
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
        assert (sampling.seed, stop.max_tokens, list(stop.strings)) == (7, 4, ["a", "b"])
        assert (request.structured.regex, request.model, request.n) == ("[a-z]+", "", 1)
        assert fake.metadata[0]["authorization"] == "Bearer sk-1"
        await run("generate", "several", "--server", fake.address, "--model", "m", "--n", "2", "--api-key", "sk-2")
        assert (fake.requests[1].model, fake.requests[1].n) == ("m", 2)
        assert fake.metadata[1]["authorization"] == "Bearer sk-2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "--max-tokens", "5"], "prompt_text = ''"),
        (["x", "--top-p", "1.5"], "sampling.top_p = 1.5"),
        (["x", "--model", "another"], "'another'"),
        (["x", "--depth", "2", "--max-num-seqs", "4"], "given without --max-num-seqs, --depth"),
        (["x", "--tls-ca", "/no/such/file"], "tls_ca = '/no/such/file'"),
    ],
)
async def test_bad_values_are_one_line(free: Serving, arguments: list[str], said: str) -> None:
    code, output, error = await run("generate", *arguments, "--server", free.address)
    assert (code, output) == (2, "")
    assert error.startswith("paceline: ")
    assert said in error
    assert error.count("\n") == 1


async def test_a_key_stays_out_of_errors() -> None:
    _, output, error = await run("generate", "x", "--server", "example.invalid:1", "--api-key", "sk-secret")
    assert "api_key = '(not shown)'" in error
    assert "sk-secret" not in output + error


async def test_the_first_failure_ends_all(serving: Serving) -> None:
    """One prompt waits for a step that does not come; the other is refused."""
    code, output, error = await run("generate", "waits", "", "--server", serving.address)
    assert (code, output) == (2, "")
    assert "prompt_text = ''" in error
    serving.runner.open()
    await serving.until(lambda: serving.idle)


async def test_without_an_engine() -> None:
    """A client's installation has typer and rich besides, and nothing that computes."""
    code = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "transformers", "tokenizers", "uvloop", "llguidance"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
from paceline.__main__ import main
main()
"""

    async def run_blocked(*arguments: str) -> tuple[bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        return await process.communicate()

    async with fake_server() as fake:
        assert await run_blocked("generate", "hello", "--server", fake.address) == (b"abc\n", b"")
    output, error = await run_blocked("generate", "hello")
    assert output == b""
    assert re.fullmatch(rb"paceline: \w+ is not installed; try: pip install 'paceline\[serve\]'.*\n", error)
