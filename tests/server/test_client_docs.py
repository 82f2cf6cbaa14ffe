"""The examples of docs/client.md, each as a process of its own, against a real server around the scripted runner."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.serving import MODEL, PATIENCE, Serving

# The processes have loops of their own.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

TEXT = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
EXAMPLES = {title: re.findall(r"```python\n(.*?)```", body, re.DOTALL) for title, body in SECTIONS}
WORD = r"[a-z]+\n"

# What each prints, in the scripted runner's words.
PRINTED = {
    "Streams and completions": rf"{WORD}max_tokens Usage\(.*\) Timing\(.*\)\n[a-z]+ 32 \d\S*\n({WORD}){{3}}",
    "Chat, and a program without an event loop": rf"({WORD}){{2}}",
    "Errors, retries and deadlines": (
        r"sampling\.top_p SAMPLING_PARAM_OUT_OF_RANGE INVALID_ARGUMENT: sampling\.top_p = .*\n"
    ),
    "Cancelling, and many at once": rf"{WORD}Delta\(text=.*\)\n({WORD}){{8}}",
    "Keys, certificates and what else a server can be asked": (
        rf"{MODEL} \d+ \(.*\) {{.*}}\n14 [a-z]+\nserving\n0\n(.* \d+ \d\S* {{.*}}\n)*"
    ),
}


async def test_every_section_has_an_example() -> None:
    assert {title: len(examples) for title, examples in EXAMPLES.items()} == dict.fromkeys(PRINTED, 1)


@pytest.mark.parametrize("title", PRINTED)
async def test_examples(free: Serving, title: str) -> None:
    [code] = EXAMPLES[title]
    assert "127.0.0.1:50051" in code
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", code.replace("127.0.0.1:50051", free.address)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE):
        output, error = await process.communicate()
    assert (process.returncode, error.decode()) == (0, "")
    assert re.fullmatch(PRINTED[title], output.decode())
    await free.until(lambda: free.idle)
