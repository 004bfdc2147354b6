"""`fednoro audit`: which labels to look at,
told to the coordinator in numbers and to each site in images.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

HELP = """Estimate how many labels are wrong at each site, and write each site a letter with the \
images to look at.

Confident learning, federated: each site sends per-class sums and counts, receives thresholds, \
sends a table of counts.

The coordinator's page and JSON hold no image and no id. Each letter is for its site; a simulation \
keeps them in RUN.

[bold]Examples[/]

  fednoro audit runs/digits-fednoro-seed0

  fednoro audit runs/mine --scores cross_fit --min-cell 10 --out audits/mine

  fednoro audit runs/digits-fednoro-plus-seed0 --scores corrected

The list that a site saves goes back in: [bold]fednoro run digits noise=from_file noise.path=FILE[/]
"""


class Scores(StrEnum):
    """Why the model that judges a label has not memorised it."""

    early = "early"
    cross_fit = "cross_fit"
    corrected = "corrected"


MinCell = Annotated[
    int, typer.Option(min=0, help="Counts below this are not shown to the coordinator.")
]
Rounds = Annotated[
    int | None,
    typer.Option(min=1, help="Rounds before a model judges; the run's warm-up if not given."),
]
Folds = Annotated[int, typer.Option(min=2, help="Parts of each site's images in cross_fit.")]


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/digits-fednoro-seed0.")],
    scores: Annotated[
        Scores,
        typer.Option(
            help="early: a model after few rounds; cross_fit: models that never saw the label; "
            "corrected: what a run "
            "of fednoro-plus has made of it."
        ),
    ] = Scores.early,
    min_cell: MinCell = 5,
    out: Annotated[
        Path | None, typer.Option(help="Where the files go; RUN/audit if not given.")
    ] = None,
    rounds: Rounds = None,
    folds: Folds = 5,
    top: Annotated[
        int, typer.Option(min=1, help="Images in a letter; all are in its CSV files.")
    ] = 200,
    device: Annotated[
        str | None, typer.Option(help="Device to compute on; the run's own if not given.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over an audit that is there already.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    from rich.console import Console

    from fednoro.audit.audit_files import AuditOptions, audit_run, summary
    from fednoro.experiment.watch.terminal import Terminal

    console = Console(emoji=False)
    terminal = Terminal(console, quiet)
    try:
        result = audit_run(
            run.expanduser(),
            AuditOptions(scores.value, min_cell, out, rounds, folds, top, device, force),
            terminal,
        )
    finally:
        terminal.close()
    if not quiet:
        console.print(summary(result), soft_wrap=True)
