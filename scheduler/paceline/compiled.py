"""The hot path as machine code: `python -m paceline.compiled` makes it of the sources, with mypyc.

The same files, compiled as they stand, take half the time. Packages with compiled modules take them from here if they
were made of exactly the sources that there are; else, and with PACELINE_COMPILED=0, Python interprets the sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "PACELINE_COMPILED"
SOURCES: Final = Path(__file__).parent
BUILDS: Final = SOURCES / ".compiled"
SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")
# What a step of the scheduler or of a simulation spends its time in, and what a token passes through on its way out.
MODULES: Final = (
    "core/acceptance.py",
    "core/adaptive_depth.py",
    "core/batch.py",
    "core/block_pool.py",
    "core/cost_model.py",
    "core/crowd.py",
    "core/curve.py",
    "core/deadlines.py",
    "core/depth.py",
    "core/depth_choices.py",
    "core/drafts.py",
    "core/kv_cache_manager.py",
    "core/method.py",
    "core/ngram_slots.py",
    "core/plan.py",
    "core/prefix_cache.py",
    "core/prefixes.py",
    "core/priced_step.py",
    "core/prices.py",
    "core/probes.py",
    "core/prompt_budget.py",
    "core/queue.py",
    "core/request.py",
    "core/review.py",
    "core/scheduler.py",
    "core/service_rate.py",
    "core/share.py",
    "core/speculation.py",
    "core/speculation_counts.py",
    "core/slot_order.py",
    "core/slots.py",
    "core/slowdown.py",
    "core/standing.py",
    "core/step_bill.py",
    "core/step_builder.py",
    "core/stopping.py",
    "core/tenants.py",
    "engine/completions.py",
    "engine/delta.py",
    "engine/stop_matcher.py",
    "engine/stops.py",
    "engine/stream.py",
    "engine/turns.py",
    "server/delivery.py",
    "server/keyed.py",
    "server/watch.py",
    "sim/clock.py",
    "sim/counting_runner.py",
    "sim/order.py",
    "sim/population.py",
    "sim/study.py",
    "speculation/ngram_index.py",
)
# Types of these are of no use to what is compiled, and reading them takes minutes.
CONFIG: Final = """
[mypy]
explicit_package_bases = true
namespace_packages = true
[mypy-transformers.*,torch.*,tokenizers.*,numba.*]
follow_imports = skip
"""
# Calls go straight to where they lead, not by stubs: out of cold caches those were a seventh of the policy's time.
DIRECT_CALLS: Final = ("-fno-plt", "-fno-semantic-interposition", "-fvisibility=hidden")


class CompileError(Exception):
    """mypyc, the compiler or the disk did not do it."""


def path_of(package: str, sources: Sequence[str]) -> list[str]:
    """Where to look for the modules of a package: a compiled one before its source.

    Args:
        package: such as "core".
        sources: its `__path__`.
    """
    build = BUILDS / _digest()
    if os.environ.get(VARIABLE) == "0" or not build.is_dir():
        return list(sources)
    _load_shared(build)
    return [str(build / "paceline" / package), *sources]


def is_compiled() -> bool:
    """What this process runs is machine code."""
    import paceline.core.scheduler as scheduler

    return not (scheduler.__file__ or "").endswith(".py")


def build() -> Path:
    """Compile the sources as they are, unless that was done before; the folder. Takes about a minute.

    Other builds are deleted, but for those that somebody is making.

    Raises:
        CompileError: it cannot be done, with what was missing.
    """
    folder = BUILDS / _digest()
    if folder.is_dir():
        return folder
    said = io.StringIO()
    try:
        BUILDS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as made, redirect_stdout(said), redirect_stderr(said):
            _compile(Path(made))
            for other in BUILDS.iterdir():
                # What somebody is making stays, and what somebody else has made of the same sources meanwhile.
                if other != folder and not other.name.startswith("tmp"):
                    shutil.rmtree(other, ignore_errors=True)
            if not folder.is_dir():
                (Path(made) / "lib").rename(folder)
    except ImportError as error:
        raise CompileError(f"{error}; try: pip install mypy setuptools") from error
    except (OSError, SystemExit) as error:
        raise CompileError(f"the scheduler could not be compiled: {error}\n{said.getvalue()}") from error
    return folder


def _compile(folder: Path) -> None:
    """Put libraries into its `lib`."""
    from mypyc.build import mypycify
    from setuptools import setup

    config = folder / "mypy.ini"
    config.write_text(CONFIG)
    flags = [f"--config-file={config}", f"--cache-dir={folder}/mypy"]
    before = Path.cwd()
    os.chdir(SOURCES.parent)  # modules are named by where they lie
    try:
        paths = [f"paceline/{module}" for module in MODULES]
        extensions = mypycify([*flags, *paths], opt_level="2", target_dir=f"{folder}/c", group_name="paceline")
        for extension in extensions:
            extension.extra_compile_args += DIRECT_CALLS if sys.platform == "linux" else ()
        arguments = ["--quiet", "build_ext", f"--build-lib={folder}/lib", f"--build-temp={folder}/objects"]
        setup(name="paceline-compiled", packages=[], ext_modules=list[Any](extensions), script_args=arguments)
    finally:
        os.chdir(before)


def _digest() -> str:
    """Tell builds apart by all that goes into one."""
    digest = hashlib.sha256(f"{sys.version} {SUFFIX}".encode())
    for module in ("compiled.py", *MODULES):
        digest.update((SOURCES / module).read_bytes())
    return digest.hexdigest()[:16]


def _load_shared(build: Path) -> None:
    """All compiled modules are parts of one library, which they import by its name."""
    for library in build.glob(f"*__mypyc{SUFFIX}"):
        name = library.name.removesuffix(SUFFIX)
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, library)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


if __name__ == "__main__":
    try:
        print(f"scheduler: {build()}")
    except CompileError as error:
        sys.exit(f"paceline: {error}; Python interprets the scheduler instead, which takes twice the time")
