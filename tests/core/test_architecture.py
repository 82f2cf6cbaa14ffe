"""Who may import whom, read from the syntax trees, so that nothing needs to be importable."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = [ROOT / "scheduler", ROOT / "kernels", ROOT / "loadtest"]
PACKAGES = ("paceline", "paceline_kernels", "paceline_loadtest")

# What each part may import of ours besides itself, `paceline.errors`, `paceline.compiled` and the version. The most
# specific row counts, and a module without a row is an error: a new part says first where it stands.
ANYTHING = PACKAGES
PLANS = (
    "paceline.core.plan",
    "paceline.core.method",
    "paceline.core.sequence",
    "paceline.core.params",
    "paceline.core.config",
    "paceline.core.grammar",
)
ALLOWED: dict[str, tuple[str, ...]] = {
    "paceline.errors": (),
    "paceline.command_options": ("paceline.client",),
    "paceline.chat": (),
    "paceline.cores": (),
    "paceline.headers": (),
    "paceline.options": (),
    "paceline.device": (),
    "paceline.compiled": ("paceline.core.scheduler",),
    "paceline.core": (),
    "paceline.config_file": ("paceline.core",),
    "paceline.sim": ("paceline.core", "paceline.config_file", "paceline.whole_file"),
    "paceline.engine": ("paceline.core", "paceline.cores", "paceline.options"),
    "paceline.models": ("paceline_kernels",),
    "paceline.structured": ("paceline.core.grammar",),
    "paceline.runner": (*PLANS, "paceline.models", "paceline_kernels"),
    "paceline.speculation": (*PLANS, "paceline.runner", "paceline.models", "paceline_kernels"),
    "paceline.whole_file": (),
    "paceline.garbage": (),
    "paceline.settings": ("paceline.core", "paceline.headers", "paceline.options"),
    "paceline.backend": ("paceline.settings", "paceline.device", "paceline.models", "paceline_kernels"),
    "paceline.kv_blocks": (
        *("paceline.core.config", "paceline.settings", "paceline.device"),
        *("paceline.models", "paceline.runner", "paceline_kernels.cpu.memory"),
    ),
    "paceline.cost_cache": (
        *("paceline.core", "paceline.whole_file"),
        *("paceline_kernels.cpu.build", "paceline_kernels.cpu.identity"),
    ),
    "paceline.server": (
        *("paceline.engine", "paceline.core", "paceline.config_file", "paceline.garbage", "paceline.headers"),
        *("paceline.options", "paceline.v1"),
    ),
    "paceline.client": ("paceline.chat", "paceline.headers", "paceline.options", "paceline.v1"),
    "paceline.v1": (),
    "paceline_kernels": (),
    "paceline_loadtest": (
        *("paceline.v1", "paceline.client", "paceline.command_options", "paceline.options", "paceline.whole_file"),
    ),
    # Entry points: they alone wire concrete classes together.
    "paceline.wiring": ANYTHING,
    "paceline.llm": ANYTHING,
    "paceline.cli": ANYTHING,
    "paceline.screen": (),
    "paceline.terminal": ("paceline.client", "paceline.screen"),
    "paceline.bench": ANYTHING,
    "paceline.demo": ANYTHING,
    "paceline.doctor": ANYTHING,
    "paceline.__main__": ANYTHING,
}

# Third parties that a part must not reach, directly or through what it imports of ours.
HEAVY = {"torch", "numpy", "transformers", "tokenizers", "safetensors"}
UNREACHABLE: dict[str, set[str]] = {
    "paceline.core": {"torch", "transformers", "grpc"},
    "paceline.sim": {"torch", "transformers", "grpc"},
    "paceline.engine": {"torch", "transformers", "grpc"},
    "paceline.structured": {"torch", "grpc", "asyncio", "transformers", "tokenizers"},
    "paceline.server": {"torch", "transformers"},
    "paceline.runner": {"grpc", "asyncio"},
    "paceline.client": HEAVY,
    "paceline.terminal": HEAVY,
    "paceline.v1": HEAVY,
    "paceline_kernels": {"grpc", "asyncio"},
    "paceline_loadtest": {"torch", "transformers"},
}

# Sources of time, chance and concurrency: the core gets them as arguments.
IMPURE = {"asyncio", "concurrent", "datetime", "os", "random", "secrets", "subprocess", "threading", "time", "uuid"}


class _WithoutTyping(ast.NodeTransformer):
    """Drops what stands under `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


def imports_in(source: str, module: str, is_package: bool, typing: bool = True) -> set[str]:
    """Dotted names of all that a module imports, in functions too; `from a import b` gives `a.b`.

    With `typing`, imports for type checkers alone count as well.
    """
    names: set[str] = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    tree = ast.parse(source)
    for node in ast.walk(tree if typing else _WithoutTyping().visit(tree)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def modules() -> Iterator[tuple[str, Path]]:
    for root, package in zip(SOURCE_ROOTS, PACKAGES, strict=True):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


PATHS = dict(modules())
IMPORTS = {name: imports_in(path.read_text(), name, path.name == "__init__.py") for name, path in PATHS.items()}
EXECUTED = {name: imports_in(path.read_text(), name, path.name == "__init__.py", False) for name, path in PATHS.items()}


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def row_of(module: str) -> str | None:
    return max((row for row in ALLOWED if is_within(module, row)), key=len, default=None)


def forbidden(module: str, imports: set[str]) -> list[str]:
    """Of a module's imports, those of ours that its row does not allow."""
    row = row_of(module)
    assert row is not None, f"{module}: say in ALLOWED what it may import"
    allowed = (row, "paceline.errors", "paceline.compiled", "paceline.__version__", *ALLOWED[row])
    ours = {name for name in imports if any(is_within(name, package) for package in PACKAGES)}
    return sorted(name for name in ours if not any(is_within(name, part) for part in allowed))


def reach(module: str) -> set[str]:
    """All that a module may ever import, through modules of ours too; `a.b.c` also imports `a` and `a.b`."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        parts = todo.pop().split(".")
        for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if name not in seen:
                seen.add(name)
                todo.extend(EXECUTED.get(name, ()))
    return seen


@pytest.mark.parametrize("module", [name for name in IMPORTS if name != "paceline"])
def test_imports_point_down(module: str) -> None:
    assert forbidden(module, IMPORTS[module]) == []


@pytest.mark.parametrize("module", [name for name in IMPORTS if is_within(name, "paceline.core")])
def test_core_is_pure(module: str) -> None:
    allowed = (sys.stdlib_module_names - IMPURE) | {"numpy", "paceline"}
    assert {name.split(".")[0] for name in IMPORTS[module]} <= allowed
    assert not any(name.startswith("numpy.random") for name in IMPORTS[module]), "chance is an argument"


@pytest.mark.parametrize("part", UNREACHABLE)
def test_parts_do_without(part: str) -> None:
    for module in (name for name in IMPORTS if is_within(name, part)):
        found = {name.split(".")[0] for name in reach(module)} & UNREACHABLE[part]
        assert not found, f"{module} reaches {found}"


def test_the_package_itself_is_light() -> None:
    """`import paceline` comes with every import of ours, the client's included."""
    assert {name.split(".")[0] for name in IMPORTS["paceline"]} <= {"__future__"}


def test_names_that_would_shadow_others_stay_free() -> None:
    """transformers probes for a package `kernels`, proto-plus is `proto`: see docs on the layout."""
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not list((ROOT / "proto").rglob("__init__.py"))
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "tests/kernels").exists()


# -- the checks themselves can fail ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from paceline.engine import Engine", {"paceline.engine.Engine"}),
        ("def f():\n    from time import monotonic", {"time.monotonic"}),
        ("from . import plan", {"paceline.core.plan"}),
        ("from ..engine.loop import run", {"paceline.engine.loop.run"}),
    ],
)
def test_every_form_of_import_is_seen(source: str, found: set[str]) -> None:
    assert imports_in(source, "paceline.core.scheduler", is_package=False) == found


def test_imports_for_type_checkers_are_not_executed() -> None:
    source = "if TYPE_CHECKING:\n    import torch\nelse:\n    import json"
    assert imports_in(source, "m", is_package=False) == {"torch", "json"}
    assert imports_in(source, "m", is_package=False, typing=False) == {"json"}


def test_reach_goes_through_modules_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTED, "paceline.client.far", {"paceline.near.Thing"})
    monkeypatch.setitem(EXECUTED, "paceline.near", {"torch.nn"})
    assert "torch" in reach("paceline.client.far")


@pytest.mark.parametrize(
    ("module", "imported", "bad"),
    [
        ("paceline.core.scheduler", "paceline.engine.loop", True),
        ("paceline.core.scheduler", "paceline.errors.InvalidArgument", False),
        ("paceline.runner.model_runner", "paceline.core.plan.StepPlan", False),
        ("paceline.runner.model_runner", "paceline.core.scheduler.Scheduler", True),
        ("paceline.runner.model_runner", "paceline.speculation.ngram.Ngram", True),
        ("paceline.server.generation", "paceline.runner.model_runner", True),
        ("paceline.client.client", "paceline.server.generation", True),
        ("paceline.cli", "paceline.runner.model_runner", False),
        ("paceline_kernels.reference", "paceline.core.plan", True),
    ],
)
def test_direction(module: str, imported: str, bad: bool) -> None:
    assert forbidden(module, {imported}) == ([imported] if bad else [])
