"""The shape of the package: imports point one way, and everything stays small and in its place.

The rules are listed in docs/architecture.md. Lists of exceptions may only shrink.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fednoro

ROOT = Path(fednoro.__file__).parent
REPOSITORY = ROOT.parent
# A module imports only from packages to its left, or from its own.
ORDER = (
    ("core",), ("data", "models"), ("detection",), ("methods",), ("engine",), ("experiment",),
    ("report",), ("audit",), ("bench", "flower"), ("cli",), ("__main__",),
)  # fmt: skip
RANK = {name: rank for rank, packages in enumerate(ORDER) for name in packages}
# Imports against the order that later work removes, with the reason.
TERMINAL, FIRMNESS = "fednoro.experiment.watch.terminal", "it says how firm verdicts are"
EXCEPTIONS = {
    (TERMINAL, "fednoro.report.findings"): FIRMNESS,
    (TERMINAL, "fednoro.report.recorded_verdict"): FIRMNESS,
}
MOST_ENTRIES, MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 12, 450, 60, 7
# One file for each method, source, noise, figure or command.
COLLECTIONS = {"methods", "data/sources", "data/noise", "report/figures", "cli"}
# Functions with more parameters, and why.
MANY_PARAMETERS = {
    "fednoro.engine.cpu.CpuEngine.__init__": "an engine gets all that there is before a run",
    "fednoro.engine.cuda.cuda_engine.CudaEngine.__init__": "as every engine, and its own options",
    "fednoro.engine.eager.EagerEngine.__init__": "an engine gets all that there is before a run",
    "fednoro.experiment.drive.drive": "what a run and a deployment have to bring along",
    "fednoro.flower.own_app.strategy.FedNoRo.__init__": "options of a public constructor",
}
# Kernels, and what calls them with one argument for each array.
KERNELS = (
    "fednoro.engine.cuda.image_kernel",
    "fednoro.engine.cuda.stacked.stacked_kernels",
    "fednoro.engine.cuda.stacked.stacked_ops",
    "fednoro.engine.cuda.stacked.triton_convolution",
    "fednoro.engine.cuda.stacked.triton_layers",
)
RICH_OUTSIDE = {  # of cli and experiment.watch
    "fednoro.audit.audit_files",
    "fednoro.bench.formats",
    "fednoro.bench.progress_board",
    "fednoro.bench.tables_and_figures",
    "fednoro.flower.ops.run_follower",
}
TRAINING_PATH = ("core", "data", "detection", "methods", "engine")
EDGE_ONLY = ("pydantic", "typer", "rich", "PIL", "safetensors")
# Participles that say nothing of what a variable holds.
EMPTY_NAMES = {"found", "known", "kept", "given", "said", "begun", "held", "told"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def imports(source: str) -> Iterator[str]:
    """Every module that is imported anywhere in `source`, late imports and those for typing too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else str(node.module)


IMPORTS = {name: set(imports(source)) for name, source in SOURCES.items()}


def package(module: str) -> str:
    """`fednoro.data.sources.folder` → `data`; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def upward(module: str, source: str) -> list[str]:
    """What `module` imports from beside or above."""
    own = package(module)
    inside = {name for name in imports(source) if name.split(".")[0] == "fednoro"}
    return sorted(
        name
        for name in inside
        if (module, name) not in EXCEPTIONS
        and package(name) != own
        and RANK.get(package(name), len(ORDER)) >= RANK.get(own, len(ORDER))
    )


def importers(library: str) -> set[str]:
    return {name for name, names in IMPORTS.items() if library in {n.split(".")[0] for n in names}}


def in_process(code: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


# Imports


def test_imports_point_to_the_left() -> None:
    for module in [name for name in MODULES if name != "fednoro"]:
        assert package(module) in RANK, f"{module} has no place in ORDER: give it one"
        wrong = upward(module, SOURCES[module])
        assert not wrong, f"{module} must not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    "source",
    [
        "import fednoro.experiment.rounds",
        "from fednoro.experiment.rounds import play",
        "from fednoro.experiment import rounds",
        "from fednoro.detection.mixture_detector import fill_missing",
        "import fednoro",  # the public API is above everything
        "def late():\n    from fednoro.experiment.rounds import play",
        "if TYPE_CHECKING:\n    from fednoro.experiment.rounds import play",
    ],
)
def test_an_import_against_the_order_is_noticed(source: str) -> None:
    assert upward("fednoro.core.losses", source)
    assert not upward("fednoro.core.losses", "from fednoro.core.types import UserError")
    assert upward("fednoro.models.networks", "from fednoro.data.dataset import Dataset")
    assert not upward("fednoro.data.sources.folder", "from fednoro.data.cache import rows")


def test_every_exception_is_still_needed() -> None:
    for module, name in EXCEPTIONS:
        assert name in IMPORTS[module], f"{module} no longer imports {name}: drop the exception"


def test_no_import_cycles() -> None:
    graph = {
        module: {name for name in names if name in MODULES and name != module}
        for module, names in IMPORTS.items()
        if module != "fednoro"
    }
    assert list(TopologicalSorter(graph).static_order())


def test_a_library_is_imported_where_it_belongs() -> None:
    assert {package(name) for name in importers("typer")} == {"cli"}
    assert {package(name) for name in importers("flwr")} == {"flower"}
    rich = {name for name in importers("rich") if package(name) != "cli"}
    assert {name for name in rich if not name.startswith("fednoro.experiment.watch.")} == (
        RICH_OUTSIDE
    )


def test_only_the_choice_of_an_engine_imports_the_cuda_code_and_late() -> None:
    cuda = "fednoro.engine.cuda"
    users = {
        name
        for name, names in IMPORTS.items()
        if not name.startswith(cuda) and any(other.startswith(cuda) for other in names)
    }
    assert users == {"fednoro.engine.choose"}
    loaded = in_process("import sys, fednoro.engine.choose; print(*sys.modules)").split()
    assert "fednoro.engine.eager" in loaded and cuda not in loaded and "greenlet" not in loaded
    assert {name for name in importers("greenlet") if not name.startswith(cuda)} == set()


def test_the_run_folder_is_read_without_torch() -> None:
    names = [name for name in MODULES if name.startswith("fednoro.experiment.run_folder")]
    assert len(names) > 2
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names!r}]"
    assert "torch" not in in_process(f"{code}; print(*sys.modules)").split()


def test_a_report_is_written_without_torch_or_methods() -> None:
    code = "import sys, fednoro.report.page, fednoro.cli.report; print(*sys.modules)"
    loaded = in_process(code).split()
    assert "fednoro.report.page" in loaded
    assert "torch" not in loaded and "fednoro.methods" not in loaded


def test_the_training_path_needs_torch_numpy_and_scikit_learn_alone() -> None:
    names = [name for name in MODULES if package(name) in TRAINING_PATH and ".triton_" not in name]
    assert len(names) > len(TRAINING_PATH)
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EDGE_ONLY!r}))
import importlib
for name in {names!r}:
    importlib.import_module(name)
assert not [name for name in {(*EDGE_ONLY, "torchvision")!r} if sys.modules.get(name)]
try:
    import fednoro.experiment.checkpoint
except ImportError:
    print("blocked")
"""
    assert in_process(code).strip() == "blocked", "the block itself does not work"


def test_torchvision_is_never_imported() -> None:
    roots = [ROOT, *(REPOSITORY / name for name in ("tests", "benchmarks"))]
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    assert Path(__file__).resolve() in [path.resolve() for path in files]
    for path in files:
        names = imports(path.read_text(encoding="utf-8"))
        assert "torchvision" not in {name.split(".")[0] for name in names}, path


# The public API


def test_the_package_loads_lazily() -> None:
    """`import fednoro` gives the pieces without configuration, display or the command line."""
    code = "import sys, fednoro; print(*(m for m in sys.modules if m.startswith('fednoro')))"
    assert in_process(code).split() == ["fednoro"]


def test_the_pieces_are_reached_from_the_package() -> None:
    pieces = "fednoro.detect.NoisyClientDetector, fednoro.partition.iid, fednoro.losses.distill"
    assert in_process(f"import fednoro; print({pieces})")


def test_every_name_that_is_shown_is_there() -> None:
    assert all(getattr(fednoro, name) is not None for name in dir(fednoro))


def test_documentation_imports_from_the_public_api_alone() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    pages += [*(REPOSITORY / "notebooks").glob("*.ipynb"), *(REPOSITORY / "examples").rglob("*.py")]
    pattern = re.compile(r"(?:from|import) (fednoro(?:\.\w+)*)")
    names = {name for page in pages for name in pattern.findall(page.read_text(encoding="utf-8"))}
    assert names == {"fednoro", "fednoro.flower"}


# Sizes and names


def test_the_package_has_twelve_packages() -> None:
    names = {package(name) for name in MODULES} - {"", "__main__"}
    assert names == {name for packages in ORDER for name in packages} - {"__main__"}
    assert len(names) == MOST_ENTRIES


def test_folders_have_few_entries() -> None:
    apart = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    for folder in {path.parent for path in MODULES.values()}:
        entries = {entry.name for entry in folder.iterdir()} - apart
        if folder.relative_to(ROOT).as_posix() not in COLLECTIONS:
            assert len(entries) <= MOST_ENTRIES, f"{folder} has {len(entries)} entries: sort them"


def test_files_stay_short() -> None:
    for module, source in SOURCES.items():
        lines = len(source.splitlines())
        assert lines <= MOST_LINES, f"{module} has {lines} lines: split it"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, above: str) -> Iterator[tuple[str, Function]]:
    """Every function below a node, however deep, with its dotted name."""
    for child in ast.iter_child_nodes(node):
        has_name = isinstance(child, Function | ast.ClassDef)
        name = f"{above}.{child.name}" if has_name else above
        if isinstance(child, Function):
            yield name, child
        yield from functions(child, name)


FUNCTIONS = [(module, *item) for module, tree in TREES.items() for item in functions(tree, module)]


def parameters(function: Function) -> int:
    """How many there are besides `self` and the context of an autograd function."""
    a = function.args
    names = [item.arg for item in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    own = bool(names) and names[0] in ("self", "cls", "ctx")
    return len(names) + bool(a.vararg) + bool(a.kwarg) - own


def test_functions_stay_short() -> None:
    for module, name, function in FUNCTIONS:
        lines = (function.end_lineno or 0) - function.lineno + 1
        kernel = ".triton_" in module
        assert kernel or lines <= MOST_LINES_OF_A_FUNCTION, f"{name} has {lines} lines: split it"


def test_functions_have_few_parameters() -> None:
    for module, name, function in FUNCTIONS:
        if module in KERNELS or package(module) == "cli":  # each option of a command is one
            continue
        count = parameters(function)
        if name in MANY_PARAMETERS:
            assert count > MOST_PARAMETERS, f"{name} needs no exception any more"
        else:
            assert count <= MOST_PARAMETERS, f"{name} has {count} parameters"


def test_no_two_modules_share_a_name() -> None:
    """But for a command that bears its package's name, and a figure that bears what it draws."""
    names = Counter(
        path.stem if path.stem != "__init__" else path.parent.name
        for name, path in MODULES.items()
        if name != "fednoro" and not name.startswith(("fednoro.cli.", "fednoro.report.figures."))
    )
    assert [name for name, count in names.items() if count > 1] == []
    commands = {path.stem for name, path in MODULES.items() if package(name) == "cli"}
    packages = {name for names in ORDER for name in names}
    assert (commands & set(names)) - {"__init__"} <= packages


def test_names_say_what_lives_in_them() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
    assert not [name for name in MODULES if vague & set(name.split("."))]


def test_variables_say_what_they_hold() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if stored and node.id.lower().strip("_") in EMPTY_NAMES:
                pytest.fail(f"{module}, line {node.lineno}: {node.id} does not say what it holds")
