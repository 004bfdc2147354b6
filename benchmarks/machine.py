"""The machine that figures are measured on: its name, its clock, its
memory, and the tables they end in.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")
Result = TypeVar("Result")


def overrides_in(arguments: Sequence[str] | None) -> tuple[list[str], tuple[str, ...]]:
    """The command line without its `key=value`, and those: an option that takes
    several values would swallow them.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # not a path that has one in it
    overrides = [word for word in given if re.match(r"\w[\w.-]*=", word)]
    return [word for word in given if word not in overrides], tuple(overrides)


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int, what: str
) -> Iterator[Result]:
    """What `work` makes of each item, in order, so many at a time; shows how far it has come."""
    console, jobs = Console(stderr=True), min(jobs, len(items))
    if jobs <= 1:
        yield from track(map(work, items), what, len(items), console=console)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        # a fork would share the GPU
        yield from track(pool.map(work, items), what, len(items), console=console)


def keep(path: Path | None, line: Mapping[str, Any]) -> None:
    """What was measured, as a line of JSON at the end of a file, where one is wanted."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def kept(path: Path | None) -> list[dict[str, Any]]:
    """All lines of such a file."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def describe(device: torch.device) -> str:
    """One line that names the machine, for under a table."""
    threads = torch.get_num_threads()
    parts = [
        f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}",
        f"torch {torch.__version__}",
    ]
    if device.type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return f"Machine: {'; '.join(parts)}; Python {platform.python_version()}."


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Waits until all that was queued on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long `work` takes, to its end on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    try:
        # Not `ru_maxrss` where it can be avoided: Linux lets a new process
        # inherit that from its parent.
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best_and_median(values: Sequence[float], digits: int = 1) -> str:
    """For a cell: `12.3 (12.9)`, the best and the median."""
    if not values:
        return "–"
    return f"{min(values):.{digits}f} ({statistics.median(values):.{digits}f})"


def spread(values: Sequence[float], sign: str = "") -> str:
    """For a cell: mean ± standard deviation of shares, in points; a single one has no deviation."""
    mean = f"{100 * statistics.mean(values):{sign}.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """For a cell: the median of the ratios within each repeat, and the
    smallest and largest of them.

    What was measured in the same repeat met the same load of a shared machine; the
    best of either may not have.
    """
    if not over or not under:
        return "–"
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
