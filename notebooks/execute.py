"""Runs the notebooks, each in a new kernel and an empty folder, and keeps
their outputs: `make notebooks`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).parent
LONGEST = 300  # seconds for one cell


def executed(path: Path, where: Path) -> NotebookNode:
    """The notebook with the outputs of a run in `where`; the first cell that
    raises ends it with an error.
    """
    book = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(where)}}
    with tempfile.TemporaryDirectory() as sockets:
        # Files and no open ports, by a short name: the names of sockets are limited.
        ipc = {} if os.name == "nt" else {"transport": "ipc", "ip": f"{sockets}/k"}
        config = Config({"KernelManager": ipc})
        options = {"timeout": LONGEST, "kernel_name": "python3", "record_timing": False}
        NotebookClient(book, config=config, resources=place, **options).execute()
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    return book


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as where:
            book = executed(path, Path(where))
        nbformat.write(book, path)
        print(f"{path.name}: {len(book.cells)} cells")


if __name__ == "__main__":
    main()
