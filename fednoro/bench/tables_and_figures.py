"""From a command to files:
what is missing is made, then the tables are filled, shown and written.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from fednoro.bench.formats import WRITERS, terminal
from fednoro.bench.jobs import closure
from fednoro.bench.paper_figures import Partition, WarmUp
from fednoro.bench.plan import Order
from fednoro.bench.plots import matplotlib
from fednoro.bench.progress_board import Board
from fednoro.bench.tables import (
    METHODS,
    STAGE_2,
    Comparison,
    Grid,
    Indicators,
    Table,
    paper_grid,
    settings_of,
)
from fednoro.bench.workers import perform_all
from fednoro.core.files import disk_errors, take_lock, write_whole
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import seeds as read_seeds
from fednoro.methods import METHODS as REGISTERED

DATA = {"table2": "isic2019"}  # of the paper; ICH elsewhere


@dataclass(frozen=True)
class Quick:
    """The small version of one table or figure, on digits."""

    rounds: int | None
    seeds: str
    rates: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...] = ((0.5, 0.7),)
    longest: int | None = None  # warm-up of figure-t1


QUICK = {
    "table1": Quick(20, "0..1", (0.4,)),
    "table2": Quick(20, "0", (0.0, 0.4)),
    "table3": Quick(None, "0..2", (0.4,)),
    "table4": Quick(20, "0..1", (0.4,)),
    "figure-partition": Quick(None, "0", (0.4,)),
    "figure-t1": Quick(None, "0..2", (0.4,), longest=24),
}


@dataclass(frozen=True)
class Wish:
    """What was said on the command line; None where nothing was."""

    data: str | None = None
    overrides: tuple[str, ...] = ()
    seeds: str | None = None
    rounds: int | None = None
    out: Path | None = None
    rates: tuple[float, ...] | None = None
    ranges: tuple[tuple[float, float], ...] | None = None
    methods: tuple[str, ...] | None = None
    mixture_seeds: int | None = None
    quick: bool = False
    longest: int | None = None  # the warm-up of figure-t1

    def grid(self, name: str) -> Grid:
        """The table's cells."""
        quick = QUICK[name] if self.quick else None
        source = self.data or ("digits" if quick else DATA.get(name, "ich"))
        seeds, _ = read_seeds([f"seed={self.seeds or (quick.seeds if quick else '0..2')}"])
        stem = f"{Path(source).stem}-quick" if quick else Path(source).stem
        rounds = self.rounds or (quick.rounds if quick else None)
        out = (self.out or Path("bench") / stem).expanduser().absolute()
        order = Order(source, self.overrides, tuple(seeds), out, rounds)
        rates, ranges = (quick.rates, quick.ranges) if quick else paper_grid(name, order.data)
        settings = settings_of(self.rates or rates, self.ranges or ranges)
        if name == "table3":
            return Indicators(order, settings, mixture_seeds=self.mixture_seeds or 10_000)
        if name == "figure-partition":
            return Partition(order, settings)
        if name == "figure-t1":
            longest = self.longest or (quick.longest if quick else None)
            return WarmUp(
                order, settings, mixture_seeds=self.mixture_seeds or 10_000, longest=longest
            )
        if name == "table4":
            return Comparison(order, settings, tuple(STAGE_2), name=name)
        for method in self.methods or ():
            if method not in REGISTERED and ":" not in method:
                method_names = ", ".join(REGISTERED)
                raise UserError(
                    f"--methods must be among {method_names}, or module:Class of your own; "
                    f"got {method!r}"
                )
        return Comparison(order, settings, tuple(dict.fromkeys(self.methods or METHODS)), name=name)


def make(
    names: Sequence[str], wish: Wish, workers: int, console: Console, quiet: bool = False
) -> dict[str, str]:
    """Makes the tables and figures of those names; returns what failed."""
    if any(name.startswith("figure") for name in names):
        matplotlib()  # before hours of work
    grids = {name: wish.grid(name) for name in names}
    out = next(iter(grids.values())).order.out
    with _lock_folder(out):
        targets = [job for grid in grids.values() for job in grid.jobs()]
        open_jobs = closure(targets)
        finished_count = len({job.name for job in targets} - {job.name for job in open_jobs})
        board = Board(console, open_jobs, finished_count, quiet)
        if open_jobs and not quiet:
            console.print(
                f"{len(open_jobs)} jobs to do, {finished_count} done before, in {out}",
                highlight=False,
                soft_wrap=True,
            )
        try:
            failures = perform_all(open_jobs, workers, board, out / "errors")
        finally:
            board.close()
        for name, grid in grids.items():
            show(_write(grid, out / name, failures), console)
    return failures


def _write(grid: Grid, stem: Path, failures: Mapping[str, str]) -> tuple[Table, list[Path]]:
    """The filled table, or the data behind a figure, and the files that were written."""
    table = _with_notes(grid.fill(failures), grid, failures)
    pictures = grid.draw(stem)
    texts = {
        stem.with_name(f"{stem.name}.{kind}"): WRITERS[kind]
        for kind in (("csv",) if pictures else WRITERS)
    }
    for path, writer in texts.items():
        write_whole(path, writer(table).encode())
    return table, [*pictures, *texts]


def show(output: tuple[Table, list[Path]], console: Console) -> None:
    """A table in full, however wide, with its notes, and which files hold it."""
    table, paths = output
    if table.rows:
        console_table = terminal(table)
        wide_options = console.options.update(width=10_000)
        # A file or a pipe has no width, and a terminal folds long lines better than cells.
        console_table.width = console.measure(console_table, options=wide_options).maximum
        console.print(console_table, crop=False, soft_wrap=True)
    for line in (*table.notes, f"written: {', '.join(map(str, paths))}"):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _with_notes(table: Table, grid: Grid, failures: Mapping[str, str]) -> Table:
    seeds = ", ".join(map(str, grid.order.seeds))
    notes = [
        f"Mean ± sample standard deviation over seeds {seeds}."
        if len(grid.order.seeds) > 1
        else f"Seed {seeds}."
    ]
    if isinstance(grid, Comparison):
        notes.append("Best: the highest of all rounds. Last: the mean of the last 10 rounds.")
    elif isinstance(grid, Partition):
        notes.clear()
    else:
        notes.append(
            f"Over {grid.mixture_seeds:,} mixture seeds: "
            "mean recall (Re), mean precision (Pr), exact matches (MR)."
        )
    if any(cell.paper is not None for row in table.rows for cell in row.cells):
        notes.append("In parentheses: the paper's figures.")
    notes += [f"Failed: {name}: {reason}" for name, reason in failures.items()]
    notes.append(f"Made by: {shlex.join(['fednoro', *sys.argv[1:]])}")
    return replace(table, notes=tuple(notes))


@contextmanager
def _lock_folder(out: Path) -> Iterator[None]:
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    with lock:
        if not take_lock(lock):
            raise UserError(f"{out} is in use by another bench: wait for it, or use another --out")
        yield
