"""Imports only point down, siblings do not know each other, and what has to be light stays light.

Would catch: an engine that reaches into training, a base module that needs a kernel, a scheduler that drags torch into
a property test, an `import finback` that takes seconds. Imports are read from the source, those inside functions too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# Lower may not import higher, and two components of one floor may not import each other. "finback" is the facade:
# __init__ and __main__, which name everything and which nothing below the command line may import.
FLOORS = {
    "base": 0,
    "kernels": 1,
    "parallel": 2,
    "nn": 3,
    "models": 4,
    "io": 5,
    "engine": 6,
    "train": 6,
    "server": 7,
    "tools": 7,
    "integrations": 7,
    "cli": 8,
    "finback": 8,
}
# Parts of one component that may not import each other: here, the twins and the model families.
TWINS = ("finback.kernels.torch", "finback.kernels.triton")
SHARED_MODEL_MODULES = ("finback.models", "finback.models.base")
# Plain Python, so that their logic can be tested in milliseconds.
WITHOUT_TORCH = (
    "finback",
    "finback.cli",
    "finback.engine.request",
    "finback.engine.blocks",
    "finback.engine.scheduler",
    "finback.server.protocol",
)


@dataclass(frozen=True)
class Import:
    """One imported module; `eager` if it is loaded together with the importing module."""

    source: str
    target: str
    line: int
    eager: bool


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(name: str, source: str, known: set[str], is_package: bool = False) -> Iterator[Import]:
    """Every import of module `name`; `from p import x` counts as p.x where that is one of the `known` modules."""

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, eager)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: None if is_package else -1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in known else base, node.lineno, eager)
        else:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                eager = False
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                for child in node.body:
                    yield from visit(child, False)
                for child in node.orelse:
                    yield from visit(child, eager)
                return
            for child in ast.iter_child_nodes(node):
                yield from visit(child, eager)

    yield from visit(ast.parse(source), True)


def component(module: str) -> str:
    parts = module.split(".")
    return "finback" if len(parts) == 1 or parts[1] == "__main__" else parts[1]


def under(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def family(module: str) -> str | None:
    """The model family a module belongs to, None for what families share."""
    if not under(module, "finback.models") or module in SHARED_MODEL_MODULES:
        return None
    return module.split(".")[2]


def complaint(found: Import) -> str | None:
    """Why this import breaks the floors, or None."""
    if not under(found.target, "finback"):
        return None
    here, there = component(found.source), component(found.target)
    if here == there:
        for one, other in (TWINS, TWINS[::-1]):
            if under(found.source, one) and under(found.target, other):
                return "kernel twins do not import each other"
        if family(found.source) != family(found.target) and family(found.target):
            if family(found.source):
                return "model families do not import each other"
            if found.eager:
                return "what the families share may load them inside functions only"
        return None
    if FLOORS[there] > FLOORS[here]:
        return f"{here} (floor {FLOORS[here]}) may not import {there} (floor {FLOORS[there]})"
    if FLOORS[there] == FLOORS[here] and "finback" not in (here, there):
        return f"{here} and {there} are siblings"
    return None


def package() -> dict[str, tuple[str, bool]]:
    """Module name -> (source, is a package), for the whole of finback."""
    files = {module_name(path, SRC): path for path in sorted((SRC / "finback").rglob("*.py"))}
    return {name: (path.read_text(encoding="utf-8"), path.name == "__init__.py") for name, path in files.items()}


MODULES = package()
IMPORTS = {name: list(read_imports(name, text, set(MODULES), pkg)) for name, (text, pkg) in MODULES.items()}


def loaded_with(module: str) -> set[str]:
    """Everything that `import module` loads: its parents, its eager imports, and theirs."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += [name.rsplit(".", 1)[0]] if "." in name else []
        todo += [found.target for found in IMPORTS.get(name, []) if found.eager]
    return seen


def test_every_component_has_a_floor():
    """A new top-level module that nobody placed would escape the other tests."""
    assert {component(name) for name in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str):
    found = [(i.line, i.target, complaint(i)) for i in IMPORTS[name]]
    bad = [f"{name}:{line} imports {target}: {why}" for line, target, why in found if why]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("name", [name for name in WITHOUT_TORCH if name in MODULES])
def test_light_modules_load_no_torch(name: str):
    heavy = sorted(m for m in loaded_with(name) if m.split(".")[0] in ("torch", "triton"))
    assert not heavy, f"import {name} loads {heavy}"


@pytest.mark.parametrize(
    ("source", "text", "why"),
    [
        ("finback.base.formats", "import finback.kernels", "may not import kernels"),
        ("finback.nn.linear", "from finback.io import load", "may not import io"),
        ("finback.models.base", "def f():\n    from finback.engine.llm import LLM", "may not import engine"),
        ("finback.engine.runner", "from finback.train import loss", "siblings"),
        ("finback.train.loss", "import finback.engine.llm", "siblings"),
        ("finback.server.app", "from finback.tools import plan", "siblings"),
        ("finback.kernels.torch.moe", "from finback.kernels.triton import moe", "twins"),
        ("finback.kernels.triton.moe", "from ..torch import moe", "twins"),
        ("finback.models.spikewhale", "from .deepseek_v41.config import Config", "families"),
        ("finback.models.deepseek_v41.model", "import finback.models.deepseek_v32", "families"),
        ("finback.models.base", "from finback.models import spikewhale", "inside functions"),
        ("finback.io.load", "from finback import LLM", "may not import finback"),
        ("finback.cli", "from finback import __version__\nimport finback.tools.inspect", None),
        ("finback.models.base", "def f():\n    from finback.models import spikewhale", None),
        ("finback.models.deepseek_v41.model", "from finback.models.base import Model\nfrom . import config", None),
        ("finback.kernels.torch.moe", "import torch", None),
    ],
)
def test_the_checker_itself(source: str, text: str, why: str | None):
    """A checker that lets everything through would be green for ever."""
    known = {"finback.kernels", "finback.train", "finback.train.loss", "finback.io.load", "finback.tools.plan"}
    known |= {"finback.models.spikewhale", "finback.models.deepseek_v41.config", "finback.kernels.triton.moe"}
    found = [complaint(i) for i in read_imports(source, text, known)]
    assert [f for f in found if f] == [] if why is None else any(why in f for f in found if f)


def test_type_checking_imports_are_not_loaded():
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
    assert {i.target: i.eager for i in read_imports("finback.x", text, set())} == {
        "typing": True,
        "torch": False,
        "json": True,
    }


def test_import_finback_is_quick_and_light():
    """Nothing happens at import: no torch, no numpy, under 0.2 s (the best of three, as the machine may be busy)."""
    code = (
        "import sys, time; start = time.perf_counter(); import finback; took = time.perf_counter() - start;"
        "print(took, *sorted({'torch', 'numpy', 'rich', 'tyro', 'tokenizers'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert [run[1:] for run in runs] == [[]] * 3
    assert min(float(run[0]) for run in runs) < 0.2


def test_public_names_have_a_home():
    """A lazy name whose module is not there would fail only in the hands of the first user."""
    import finback

    assert {"LLM", "SamplingParams", "load_model"} <= set(dir(finback))
    for name in finback._HOME:
        assert getattr(finback, name).__name__ == name
    with pytest.raises(AttributeError, match="nope"):
        finback.nope  # noqa: B018
