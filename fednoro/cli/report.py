"""`fednoro report`, `fednoro compare` and `fednoro figures`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fednoro.core.types import UserError

INTERVAL = 2.0  # seconds between looks at a run that is watched
WATCHED_FILES = (
    "config.yaml",
    "split.npz",
    "rounds.jsonl",
    "clients.csv",
    "detection.json",
    "result.json",
    ".lock",
)

Run = Annotated[
    str, typer.Argument(help="A run folder, such as runs/digits-fednoro-seed0.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(report)
    app.command(help=COMPARE_HELP)(compare)
    app.command()(figures)


def report(
    run: Run,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep it up to date until the run ends.")
    ] = False,
) -> None:
    """Write report.html into a run folder: one file that opens anywhere, without a network.

    It is also written at the end of every run. Parts that are missing or damaged are named in it.

    Example: fednoro report runs/digits-fednoro-seed0
    """
    from fednoro.report.page import write_report

    console = Console(emoji=False)
    target = write_report(run, watching=watch)
    _say(console, f"wrote {target}")
    if watch:
        _say(console, "watching; the page reloads itself. Ctrl-C ends it.")
        watch_run(Path(run).expanduser(), write_report, time.sleep)


def watch_run(folder: Path, write: Callable[..., Path], wait: Callable[[float], Any]) -> None:
    """Rewrites the report whenever the run's files change, until there is a result."""
    last_state = _state(folder)
    while not (folder / "result.json").exists():
        wait(INTERVAL)
        state = _state(folder)
        if state != last_state:
            try:
                write(folder, watching=True)
                last_state = state
            except UserError:
                # a run that resumes sweeps up unfinished files, maybe this one:
                # the next look repairs it
                continue
    write(folder)


def _state(folder: Path) -> tuple[object, ...]:
    from fednoro.experiment.run_folder.recorded_run import is_locked

    def stamp(name: str) -> tuple[int, int] | None:
        try:
            status = (folder / name).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    return (*map(stamp, WATCHED_FILES), is_locked(folder))


COMPARE_HELP = """Compare runs: groups that differ only in their seed, mean ± std, and differences \
paired by seed.

Runs are paired only where the seed, the clients, their labels and the test images are the same.

Example: fednoro compare runs/digits-fednoro-seed* runs/digits-fedavg-seed*
"""


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="The group that the others are compared with; the first run's if not given."
        ),
    ] = None,
    to: Annotated[str, typer.Option(help="Where to write: NAME.html and NAME.csv.")] = "compare",
) -> None:
    """Compares runs."""
    from fednoro.core.files import write_whole
    from fednoro.report.comparison import as_csv
    from fednoro.report.comparison import compare as compare_runs
    from fednoro.report.comparison_page import difference_table, render, summary

    comparison = compare_runs(runs, against)
    console = Console(emoji=False)
    _show(console, summary(comparison), "BACC in %, mean ± std")
    if comparison.differences:
        _show(console, difference_table(comparison), "differences in points, paired by seed")
    for line in comparison.remarks:
        _say(console, line)
    base = Path(to).expanduser()
    for ending, content in ((".html", render(comparison)), (".csv", as_csv(comparison))):
        target = base.with_name(base.name + ending)
        write_whole(target, content.encode("utf-8", "replace"))
        _say(console, f"wrote {target}")


def figures(
    run: Run,
    to: Annotated[
        str | None, typer.Option(help="Folder for the files; RUN/figures if not given.")
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Any of png, pdf and svg, with commas.")
    ] = "png,pdf,svg",
    only: Annotated[
        str, typer.Option(help="Names of figures, with commas; all if not given.")
    ] = "",
    column: Annotated[
        bool, typer.Option("--column", help="As wide as one of two columns, 3.6 inches.")
    ] = False,
) -> None:
    """Write the figures of a run as PNG, PDF and SVG files for a paper. Needs the extra report.

    Example: fednoro figures runs/digits-fednoro-seed0 --format pdf --only bacc,mixture --column
    """
    from fednoro.report.drawing.image_export import FORMATS, save_all

    kinds = tuple(kind.strip() for kind in formats.split(",") if kind.strip())
    if not kinds or (wrong := [kind for kind in kinds if kind not in FORMATS]):
        raise UserError(
            f"--format takes {', '.join(FORMATS)}, got {wrong[0] if kinds else formats!r}"
        )
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    folder = Path(to).expanduser() if to else Path(run).expanduser() / "figures"
    paths = save_all(run, folder, kinds, names, column)
    _say(Console(emoji=False), f"wrote {len(paths)} files to {folder}")


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def _show(console: Console, table: Any, title: str) -> None:
    from fednoro.report.drawing.scene import printable

    # As narrow as can be, so that 80 columns have room for names;
    # what is longer is folded, never cut.
    rich_table = RichTable(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for name in table.head:
        rich_table.add_column(name.replace(" ", "\n"), overflow="fold")
    for row in table.rows:
        rich_table.add_row(*(escape(printable(str(cell))) for cell in row))
    console.print(rich_table, "")
