"""How the samples are spread: each client's images of each class, by true and by given labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from fednoro.core.types import IntArray
from fednoro.core.wording import percent, quantity
from fednoro.experiment.run_folder.recorded_run import Holdings, Recorded
from fednoro.report.drawing.client_grid import Grid
from fednoro.report.drawing.figure import Figure, Table
from fednoro.report.drawing.scene import Scene
from fednoro.report.recorded_verdict import RecordedVerdict


def partition(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Dots sized by count: clients by classes, with true and with observed labels."""
    holdings = run.holdings
    if holdings is None or not len(holdings.names):
        return None
    truth_known = holdings.noisy is not None or bool((holdings.clean != holdings.observed).any())
    tables = [
        ("true labels", holdings.clean),
        ("labels as the clients have them", holdings.observed),
    ]
    tables = tables if truth_known else [("labels as the clients have them", holdings.observed)]
    most = max(int(table.max()) for _, table in tables) or 1
    sizes = holdings.observed.sum(axis=1)
    caption = (
        "Each dot is what one client holds of one class; its area is the number of images, "
        f"at most {most:,}. {quantity(len(holdings.names), 'client')} of {int(sizes.min()):,} "
        f"to {int(sizes.max()):,} images. "
    )
    caption += (
        "Where labels were changed, dots move up or down within their column "
        f"({quantity(int((holdings.clean != holdings.observed).any(axis=1).sum()), 'client')})."
        if truth_known
        else "Whether these labels are right is not known."
    )
    head = (
        "client",
        "images",
        *(("labels wrong",) if holdings.noisy is not None else ()),
        *holdings.classes,
    )
    rows = tuple(
        (
            name,
            int(sizes[k]),
            *((percent(holdings.rates[k]),) if holdings.noisy is not None else ()),
            *map(int, table),
        )
        for k, (name, table) in enumerate(zip(holdings.names, holdings.observed, strict=True))
    )
    label = (
        f"Dot chart of {len(holdings.names)} clients by {len(holdings.classes)} classes, "
        "dots sized by number of images."
    )
    table = Table(head, rows, "Labels as the clients have them.")
    draw = partial(_draw_partition, holdings, tables, most)
    return Figure("partition", "Who holds what", caption, label, draw, table, len(holdings.names))


def _draw_partition(
    holdings: Holdings, tables: Sequence[tuple[str, IntArray]], most: int, width: float
) -> Scene:
    noisy = (
        holdings.noisy if holdings.noisy is not None else np.zeros(len(holdings.names), dtype=bool)
    )
    grid = Grid(width, holdings.names, holdings.classes, len(tables))
    scene = grid.scene()
    largest = max(min(grid.step, grid.row) * 0.52, 2.4)
    for panel, (title, table) in enumerate(tables):
        grid.frame(scene, panel, title, ["strong" if flag else "tick" for flag in noisy])
        for c in range(len(holdings.classes)):
            y = grid.y(panel, c)
            scene.line([(grid.x(panel, 0), y), (grid.x(panel, len(holdings.names) - 1), y)], "grid")
        for k, c in zip(*np.nonzero(table), strict=True):
            radius = max(largest * math.sqrt(table[k, c] / most), 0.8)
            style = "unknown" if holdings.noisy is None else "noisy" if noisy[k] else "clean"
            tip = (
                f"{holdings.names[k]}, {holdings.classes[c]}: {quantity(int(table[k, c]), 'image')}"
            )
            if len(tables) > 1:
                tip += (
                    f" (truly {holdings.clean[k, c]})"
                    if panel
                    else f" (labelled so {holdings.observed[k, c]})"
                )
            scene.circle(
                grid.x(panel, int(k)),
                grid.y(panel, int(c)),
                radius,
                style,
                tip=tip,
                series=style,
            )
    sizes = [
        ("clean", "clean client", "clean"),
        ("noisy", "noisy client (name in bold)", "noisy"),
    ]
    scene.legend(
        grid.start,
        grid.foot,
        sizes if holdings.noisy is not None else [("unknown", "client", "")],
        True,
    )
    return scene
