"""Clients of other makers, and ours, against a real server: `make test-clients`.

Each is a process of its own that is given the server's address and keys, and says what it has checked. They all check
the same, by the contract alone: a stream, a cancelled one whose slot is free afterwards, a deadline, a wrong key, no
key, and the typed details of errors.

- grpc-js: gRPC's own implementation for Node, over Node's HTTP/2; stubs made from proto/ at run time
- grpclib: another implementation of gRPC in Python, over h2; the generated code on the oldest and the newest protobuf
- paceline.client: ours
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
SITES: Final = ROOT / "build" / "clients"  # what pip installs for them, away from what the project itself uses
NODE_MODULES: Final = HERE / "node_modules"
START_SECONDS: Final = 300.0
CLIENT_SECONDS: Final = 120.0
# The generated code must load on every protobuf that pyproject.toml admits: its oldest, and the newest known.
PROTOBUFS: Final = ("6.33.5", "7.36.2")
GRPCLIB: Final = ("grpclib==0.4.9", "h2==4.3.0", "googleapis-common-protos==1.76.0")
TENANT: Final = "acme"
MAX_BLOCKS: Final = 200  # of this tenant: so one request alone can be too large for it

TENANTS: Final = """
unknown = "refuse"

[tenants.{tenant}]
max_blocks = {max_blocks}
keys = ["{tenant_hash}"]

[admins.operator]
keys = ["{admin_hash}"]
"""


class Failed(Exception):
    """Something that was to be tested cannot be, or is wrong."""


def main() -> int:
    passed = [attempt(load_stubs, version) for version in PROTOBUFS]
    has_node = NODE_MODULES.exists()
    with server() as environment:
        for version in PROTOBUFS:
            passed.append(attempt(run, [sys.executable, HERE / "grpclib_client.py"], environment | site(version)))
        passed.append(attempt(run, [sys.executable, HERE / "paceline_client.py"], environment))
        if has_node:
            passed.append(attempt(run, ["node", HERE / "client.mjs"], environment))
        else:
            print("grpc-js: skipped, because there is no npm here")
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed, {int(not has_node)} skipped")
    return 0 if all(passed) else 1


def attempt(check: Callable[..., None], *arguments: object) -> bool:
    try:
        check(*arguments)
    except Failed as error:
        print(f"FAILED: {error}", flush=True)
        return False
    return True


# -- protobuf ---------------------------------------------------------------------------------------------------------


def site(version: str) -> dict[str, str]:
    """The environment in which this protobuf goes before the project's own, with grpclib beside it."""
    folder = SITES / f"protobuf-{version}"
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        subprocess.run([*command, f"protobuf=={version}", *GRPCLIB], check=True, timeout=START_SECONDS)
        (folder / ".installed").touch()
    return {"PYTHONPATH": str(folder)}


def load_stubs(version: str) -> None:
    """Every module of `paceline.v1`, with warnings as errors: protobuf warns before it breaks."""
    modules = sorted(path.stem for path in (ROOT / "scheduler" / "paceline" / "v1").glob("*_pb2*.py"))
    imports = "; ".join(f"import paceline.v1.{module}" for module in modules)
    check = f"import google.protobuf as p; assert p.__version__ == {version!r}, p.__version__"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{check}; {imports}"],
        env=os.environ | site(version),
        capture_output=True,
        text=True,
        timeout=CLIENT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{len(modules)} modules on protobuf {version}: {done.stderr}")
    print(f"protobuf {version}: {', '.join(modules)} load")


# -- the server and its clients ---------------------------------------------------------------------------------------


def run(command: list[object], environment: Mapping[str, str]) -> None:
    """Raises Failed if the client finds something wrong, or takes too long."""
    print(f"-- {' '.join(Path(str(part)).name for part in command)}", flush=True)
    try:
        subprocess.run(
            [str(part) for part in command], env=os.environ | environment, check=True, timeout=CLIENT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{command[-1]}: not done after {CLIENT_SECONDS:g} s") from error
    except subprocess.CalledProcessError as error:
        raise Failed(f"{command[-1]}: exit status {error.returncode}") from error


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """`paceline serve` with keys, on a free port, until the end. What its clients have to know, as an environment."""
    keys = {name: "paceline_" + secrets.token_urlsafe(32) for name in ("tenant", "admin")}
    hashes = {f"{name}_hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        tenants.write_text(TENANTS.format(tenant=TENANT, max_blocks=MAX_BLOCKS, **hashes))
        command = [sys.executable, "-m", "support.quick_command", "serve", "--model", "demo", "--draft", "demo"]
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--port", "0", "--tenants", tenants],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=HERE.parent,
            )
        watchdog = threading.Timer(START_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("serving on ")), None)
            watchdog.cancel()
            if line is None:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            yield {
                "PACELINE_ADDRESS": line.split()[-1],
                "PACELINE_KEY": keys["tenant"],
                "PACELINE_ADMIN_KEY": keys["admin"],
                "PACELINE_TENANT": TENANT,
                "PACELINE_PROTO": str(ROOT / "proto"),
                "GOOGLE_PROTO": google_protos(),
            }
        finally:
            watchdog.cancel()
            process.terminate()
            process.wait(timeout=CLIENT_SECONDS)
            print(*(line for line in log.read_text().splitlines() if " ERROR " in line), sep="\n")


def google_protos() -> str:
    """The folder with google/rpc/*.proto."""
    import google.rpc.status_pb2 as module  # type: ignore[import-untyped]

    return str(Path(module.__file__).parents[2])


if __name__ == "__main__":
    sys.exit(main())
