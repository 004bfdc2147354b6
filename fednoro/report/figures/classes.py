"""Figures by class: who holds what, what is recognised, what is taken for what."""

from __future__ import annotations

import math

import numpy as np

from fednoro.core.metrics import per_class_recall
from fednoro.core.types import IntArray
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import (
    Box,
    draw_x,
    names_below,
    percent,
    room_below,
    room_left,
    short_names,
)
from fednoro.report.drawing.client_grid import Grid
from fednoro.report.drawing.figure import Cell, Figure, Table, counted, listed, quoted
from fednoro.report.drawing.scene import Scene
from fednoro.report.recorded_verdict import Judged
from fednoro.report.web.palette import HEAT_STEPS


def partition(run: Recorded, found: Judged | None) -> Figure | None:
    """Dots sized by count: clients by classes, with true and with observed labels."""
    held = run.holdings
    if held is None or not len(held.names):
        return None
    known = held.noisy is not None or bool((held.clean != held.observed).any())
    tables = [("true labels", held.clean), ("labels as the clients have them", held.observed)]
    tables = tables if known else [("labels as the clients have them", held.observed)]
    noisy = held.noisy if held.noisy is not None else np.zeros(len(held.names), dtype=bool)
    most = max(int(table.max()) for _, table in tables) or 1

    def draw(width: float) -> Scene:
        grid = Grid(width, held.names, held.classes, len(tables))
        scene = grid.scene()
        largest = max(min(grid.step, grid.row) * 0.52, 2.4)
        for panel, (title, table) in enumerate(tables):
            grid.frame(scene, panel, title, ["strong" if flag else "tick" for flag in noisy])
            for c in range(len(held.classes)):
                y = grid.y(panel, c)
                scene.line([(grid.x(panel, 0), y), (grid.x(panel, len(held.names) - 1), y)], "grid")
            for k, c in zip(*np.nonzero(table), strict=True):
                radius = max(largest * math.sqrt(table[k, c] / most), 0.8)
                style = "unknown" if held.noisy is None else "noisy" if noisy[k] else "clean"
                tip = f"{held.names[k]}, {held.classes[c]}: {counted(int(table[k, c]), 'image')}"
                if known:
                    tip += (
                        f" (truly {held.clean[k, c]})"
                        if panel
                        else f" (labelled so {held.observed[k, c]})"
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
            sizes if held.noisy is not None else [("unknown", "client", "")],
            True,
        )
        return scene

    sizes = held.observed.sum(axis=1)
    caption = (
        "Each dot is what one client holds of one class; its area is the number of images, "
        f"at most {most:,}. {counted(len(held.names), 'client')} of {int(sizes.min()):,} "
        f"to {int(sizes.max()):,} images. "
    )
    caption += (
        "Where labels were changed, dots move up or down within their column "
        f"({counted(int((held.clean != held.observed).any(axis=1).sum()), 'client')})."
        if known
        else "Whether these labels are right is not known."
    )
    head = (
        "client",
        "images",
        *(("labels wrong",) if held.noisy is not None else ()),
        *held.classes,
    )
    rows = tuple(
        (
            name,
            int(sizes[k]),
            *((percent(held.rates[k]),) if held.noisy is not None else ()),
            *map(int, table),
        )
        for k, (name, table) in enumerate(zip(held.names, held.observed, strict=True))
    )
    label = (
        f"Dot chart of {len(held.names)} clients by {len(held.classes)} classes, "
        "dots sized by number of images."
    )
    table = Table(head, rows, "Labels as the clients have them.")
    return Figure("partition", "Who holds what", caption, label, draw, table, len(held.names))


def recall(run: Recorded, found: Judged | None) -> Figure | None:
    """Recall of each class in the last round, and at the end of the first
    stage where there are several.
    """
    final = run.confusion
    if final is None:
        return None
    stages = run.stages
    turning = (
        next((r for r in run.rounds if r["round"] == stages[0][2]), None)
        if len(stages) > 1
        else None
    )
    before = (
        None
        if turning is None or turning["confusion"] is None
        else per_class_recall(turning["confusion"])
    )
    after, tested = per_class_recall(final), final.sum(axis=1)
    names = run.classes

    def draw(width: float) -> Scene:
        short = short_names(names)
        step = 24.0 if len(names) <= 12 else 19.0
        box = Box(room_left(short, 12), 8, width - 62, 8 + step * len(names))
        scene = Scene(width, box.bottom + 66)
        x, _ = box.scales((0, 1), (0, 1))
        for tick in (0, 0.25, 0.5, 0.75, 1):
            scene.line([(x(tick), box.top), (x(tick), box.bottom)], "grid")
        draw_x(scene, box, x, (0, 0.25, 0.5, 0.75, 1), percent)
        for c, name in enumerate(names):
            y = box.top + (c + 0.5) * step
            scene.text(box.left - 8, y + 4, short[c], "name", anchor="end")
            if math.isnan(after[c]):
                scene.text(box.left + 6, y + 4, "no test image", size=11)
                continue
            of = counted(int(tested[c]), "test image")
            tip = f"{name}: {after[c]:.1%} of {of} recognised in round {run.numbers[-1]}"
            if before is not None and turning is not None:
                scene.line([(x(before[c]), y), (x(after[c]), y)], "link")
                scene.circle(
                    x(before[c]),
                    y,
                    4,
                    "hollow",
                    tip=f"{name}: {before[c]:.1%} in round {turning['round']}",
                    series="before",
                )
            scene.circle(x(after[c]), y, 5.5, "accent", tip=tip, series="after")
            scene.text(width - 2, y + 4, f"{after[c]:.0%}", "name", anchor="end")
        entries = [("accent", f"round {run.numbers[-1]}", "after")]
        if turning is not None:
            entries.append(("hollow", f"round {turning['round']}, end of {stages[0][0]}", "before"))
        scene.legend(box.left if width > 600 else 2, box.bottom + 48, entries)
        return scene

    worst = int(np.nanargmin(after))
    caption = (
        "The share of each class's test images that is recognised. Their mean is BACC. Worst is "
        f"{quoted(names[worst])} with {after[worst]:.0%} of "
        f"{counted(int(tested[worst]), 'test image')}."
    )
    if before is not None:
        change = after - before
        lost = [quoted(names[c]) for c in np.flatnonzero(change < -0.02)]
        caption += (
            f" Since the end of {stages[0][0]}, recall fell for {listed(lost)}."
            if lost
            else (f" No class lost more than 2 points since the end of {stages[0][0]}.")
        )
    first = () if turning is None else (f"recall in round {turning['round']}",)
    rows = tuple(
        (
            name, int(tested[c]),
            *(() if before is None else (_share(before[c]),)),
            _share(after[c]),
        )
        for c, name in enumerate(names)
    )  # fmt: skip
    head = (
        "class",
        "test images",
        *(first if before is not None else ()),
        f"recall in round {run.numbers[-1]}",
    )
    return Figure(
        "recall", "What is recognised", caption, "Recall of each class.", draw, Table(head, rows)
    )


def confusion(run: Recorded, found: Judged | None) -> Figure | None:
    """The confusion matrix of the last round, shaded by row."""
    counts = run.confusion
    if counts is None:
        return None
    names = run.classes
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    def draw(width: float) -> Scene:
        short = short_names(names)
        left = room_left(short) + 14
        cell = min((width - left - 4) / len(names), 46.0)
        room = room_below(short, cell)
        scene = Scene(width, 26 + cell * len(names) + room + 20)
        start = left if width < 600 else (width - left - cell * len(names)) / 2 + left
        scene.text(
            start if width > 600 else 2,
            14,
            "rows: the true class; columns: what the model says",
            size=11,
        )
        for i, name in enumerate(short):
            scene.text(start - 7, 26 + (i + 0.5) * cell + 4, name, size=11, anchor="end")
        for i, j in np.ndindex(*counts.shape):
            alpha = float(shares[i, j])
            at = start + j * cell, 26 + i * cell
            tip = f"{names[i]} taken for {names[j]}" if i != j else f"{names[i]} recognised"
            tip += f": {counts[i, j]} of {counts[i].sum()} ({alpha:.1%})"
            scene.rect(
                at[0] + 0.5,
                at[1] + 0.5,
                cell - 1,
                cell - 1,
                "heat",
                alpha=max(alpha, 0.025),
                tip=tip,
            )
            if counts[i, j] and cell >= 20:
                step = round(HEAT_STEPS * max(alpha, 0.025))
                size = 12 if cell >= 28 else 10
                text = str(counts[i, j])
                if 0.62 * size * len(text) < cell:
                    scene.text(
                        at[0] + cell / 2,
                        at[1] + cell / 2 + 4,
                        text,
                        f"h{step}",
                        anchor="middle",
                        size=size,
                    )
        places = [start + (j + 0.5) * cell for j in range(len(names))]
        names_below(scene, places, short, 26 + cell * len(names) + 3)
        return scene

    caption = (
        f"Test images in round {run.numbers[-1]}: rows are true classes, columns what the model "
        f"says; shading is the share of the row. {_largest_mistakes(counts, names)}"
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *map(int, row)) for name, row in zip(names, counts, strict=True)
    )
    label = f"Confusion matrix of {len(names)} classes. {_largest_mistakes(counts, names)}"
    return Figure(
        "confusion",
        "What is taken for what",
        caption,
        label,
        draw,
        Table(("true class", *names), rows),
    )


def _largest_mistakes(counts: IntArray, names: tuple[str, ...]) -> str:
    off = counts - np.diag(np.diag(counts))
    order = [divmod(int(at), len(names)) for at in np.argsort(-off, axis=None, kind="stable")[:3]]
    said = [
        f"{quoted(names[i])} for {quoted(names[j])} ({counted(int(off[i, j]), 'time')})"
        for i, j in order
        if off[i, j]
    ]
    return f"Most often it takes {listed(said)}." if said else "It makes no mistake."


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"
