"""The shape of the package: imports point one way, files stay short,
the training path stays light.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fednoro

ROOT = Path(fednoro.__file__).parent
# A module imports only from packages to its left, or from its own.
ORDER = (
    ("core",), ("data", "models"), ("detection",), ("methods",), ("engine",), ("experiment",),
    ("report",), ("audit",), ("bench", "flower"), ("cli",), ("__main__",),
)  # fmt: skip
# Imports against the order that later work removes, with the reason.
EXCEPTIONS = {
    (
        "fednoro.experiment.watch.terminal",
        "fednoro.report.findings",
    ): "the terminal says how firm a verdict is",
    (
        "fednoro.experiment.watch.terminal",
        "fednoro.report.recorded_verdict",
    ): "the terminal says how firm a verdict is",
}
RANK = {name: rank for rank, layer in enumerate(ORDER) for name in layer}
TRAINING_PATH = ("core", "data", "detection", "methods", "engine")
EDGE_ONLY = ("pydantic", "typer", "rich", "PIL", "safetensors")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(source: str) -> Iterator[str]:
    """Every module that is imported anywhere in `source`, late imports
    and those for typing included.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else str(node.module)


def unit(module: str) -> str:
    """`fednoro.data.sources.folder` → `data`; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def upward(module: str, source: str) -> list[str]:
    """What `module` imports from beside or above."""
    own = unit(module)
    inside = {name for name in imports(source) if name.split(".")[0] == "fednoro"}
    allowed = {name for name in inside if (module, name) in EXCEPTIONS}
    return sorted(
        name
        for name in inside - allowed
        if unit(name) != own and RANK.get(unit(name), len(ORDER)) >= RANK.get(own, len(ORDER))
    )


@pytest.mark.parametrize("module", [name for name in MODULES if name != "fednoro"])
def test_imports_point_downwards(module: str) -> None:
    assert unit(module) in RANK, f"{module} has no place in ORDER: give it one"
    found = upward(module, MODULES[module].read_text(encoding="utf-8"))
    assert not found, f"{module} must not import {', '.join(found)}"


def test_every_package_has_its_place() -> None:
    assert {unit(name) for name in MODULES} - {""} <= set(RANK)


@pytest.mark.parametrize(
    "source",
    [
        "import fednoro.experiment.rounds",
        "from fednoro.experiment.rounds import play",
        "from fednoro import rounds",
        "from fednoro.detection.mixture_detector import fill_missing",
        "import fednoro",  # the front door is above everything
        "def late():\n    from fednoro.experiment.rounds import play",
        "if TYPE_CHECKING:\n    from fednoro.experiment.rounds import play",
    ],
)
def test_upward_import_is_noticed(source: str) -> None:
    assert upward("fednoro.core.losses", source)
    assert not upward(
        "fednoro.core.losses", "import torch\nfrom fednoro.core.types import UserError"
    )
    assert not upward("fednoro.data.sources.folder", "from fednoro.data.cache import rows")


def test_no_import_cycles() -> None:
    graph = {
        module: {
            name
            for name in imports(path.read_text(encoding="utf-8"))
            if name in MODULES and name != module
        }
        for module, path in MODULES.items()
        if module != "fednoro"
    }
    assert list(TopologicalSorter(graph).static_order())


def test_package_loads_lazily() -> None:
    """`import fednoro` gives the pieces without configuration, display or the command line."""
    code = (
        "import sys, fednoro; print(*(name for name in sys.modules if name.startswith('fednoro')))"
    )
    assert in_subprocess(code).split() == ["fednoro"]


def test_names_say_what_lives_in_them() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
    assert not [name for name in MODULES if vague & set(name.split("."))]


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_short(module: str) -> None:
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= 450, f"{module} has {lines} lines: split it"


def in_subprocess(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_training_path_needs_torch_numpy_and_scikit_learn_alone() -> None:
    # for CUDA alone
    modules = [name for name in MODULES if unit(name) in TRAINING_PATH and ".triton_" not in name]
    assert len(modules) > len(TRAINING_PATH)
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EDGE_ONLY!r}))
import importlib
for name in {modules!r}:
    importlib.import_module(name)
assert not [name for name in {(*EDGE_ONLY, "torchvision")!r} if sys.modules.get(name)]
try:
    import fednoro.experiment.checkpoint
except ImportError:
    print("blocked")
"""
    assert in_subprocess(code).strip() == "blocked", "the block itself does not work"


def test_torchvision_is_never_imported() -> None:
    roots = [ROOT, *(ROOT.parent / name for name in ("tests", "benchmarks"))]
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    assert Path(__file__).resolve() in [path.resolve() for path in files]
    for path in files:
        found = [
            name
            for name in imports(path.read_text(encoding="utf-8"))
            if name.split(".")[0] == "torchvision"
        ]
        assert not found, f"{path} imports torchvision"


def test_the_pieces_are_reached_from_the_package() -> None:
    code = (
        "import fednoro; print(fednoro.detect.NoisyClientDetector, "
        "fednoro.partition.iid, fednoro.losses.distill)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_package_tells_what_it_has() -> None:
    names = dir(fednoro)
    assert {"run", "resume", "load", "detect", "losses"} <= set(names)
    assert all(getattr(fednoro, name) is not None for name in names)
