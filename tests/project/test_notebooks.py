"""The notebooks: executed in real kernels, and kept with what they show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SHOWN = {  # what a run must say anew, whatever the machine
    "add-a-method": [
        r"method\.q must be in \(0, 1\], got 2",
        r"fedavg: best \d",
        r"fedgce: best \d",
    ],
    "simulate-and-detect": [
        "8 of 20 clients flagged",
        "flagged exactly the noisy ones: True",
        "report.html",
    ],
    "your-own-data": [
        r"north\s+looks noisy",
        r"west\s+looks noisy",
        r"coast\s+looks clean",
        "largest difference 0",
    ],
}


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(book: NotebookNode) -> str:
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs
    )


def figures(book: NotebookNode) -> int:
    return sum(
        "image/png" in output.get("data", {})
        for cell in book.cells
        for output in cell.get("outputs", ())
    )


# of the kernel's sockets
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_and_shows_what_it_says(
    name: str, execute: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = execute.executed(FOLDER / f"{name}.ipynb", tmp_path)
    text = said(book)
    for pattern in SHOWN[name]:
        assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"
    assert figures(book) == 1
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in book.cells]


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_is_kept_with_its_outputs_and_without_traces_of_a_machine(name: str) -> None:
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), (
        "make notebooks"
    )
    for pattern in SHOWN[name]:
        assert re.search(pattern, said(kept))
    assert figures(kept) == 1
    kinds = {output.get("name", output.output_type) for cell in cells for output in cell.outputs}
    assert not kinds & {"stderr", "error"}
    assert not re.search(
        r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt|opt|var)/|[A-Z]:\\\\", said(kept)
    )
    assert not any(cell.metadata for cell in kept.cells)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 100_000


def test_all_three_are_there() -> None:
    assert set(BOOKS) == set(SHOWN)
