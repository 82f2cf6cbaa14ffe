"""llama.cpp's server, over HTTP."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

from protocol import THREADS, Load, converted, serve

HOME = Path(sys.prefix)  # beside the environment's own files: `source`, as unpacked, and `build`
SERVER = HOME / "build" / "bin" / "llama-server"


class LlamaCpp:
    def __init__(self) -> None:
        self._load: Load | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""
        atexit.register(self._stop)

    def load(self, load: Load) -> str:
        if load != self._load:  # requests cannot choose their depth
            self._stop()
            self._start(load)
            self._load = load
        return f"llama.cpp {_version()}"

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        options = {
            "n_predict": max_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        # One request for all, or some would start before the others have arrived.
        answers = self._ask("/completion", {"prompt": prompts, **options})
        if len(prompts) == 1:  # for which the server makes no list
            return [answers["tokens"]]
        return [answer["tokens"] for answer in sorted(answers, key=lambda answer: answer["index"])]

    def _start(self, load: Load) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command: list[str | Path] = [SERVER, "--model", converted(load.target, _convert), "--port", str(port)]
        command += ["--parallel", str(load.streams), "--ctx-size", str(load.streams * load.length)]
        command += ["--threads", str(THREADS), "--threads-batch", str(THREADS), "--cache-ram", "0", "--no-ui"]
        if load.depth != 0:
            command += ["--spec-type", "draft-simple", "--model-draft", converted(load.draft, _convert)]
        if load.depth:
            command += ["--spec-draft-n-max", str(load.depth)]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._ready():
            time.sleep(0.1)

    def _ready(self) -> bool:
        assert self._server is not None
        if self._server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {self._server.returncode}")
        try:
            self._ask("/health")
        except URLError:  # refused, or 503 while the model loads
            return False
        return True

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


def _version() -> str:
    done = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).split("\n")[0]


def _convert(source: Path, destination: Path) -> None:
    script = Path(__file__).with_name("to_gguf.py")
    subprocess.run([sys.executable, script, HOME / "source", source, destination], check=True)


if __name__ == "__main__":
    serve(LlamaCpp())
