"""Figures by class: what is recognised, and what is taken for what."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from fednoro.core.metrics import per_class_recall
from fednoro.core.types import FloatArray, IntArray
from fednoro.core.wording import join_words, percent, quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import Box, draw_x, names_below, room_below, room_left, short_names
from fednoro.report.drawing.figure import Cell, Figure, Table, quote
from fednoro.report.drawing.scene import Scene
from fednoro.report.recorded_verdict import RecordedVerdict
from fednoro.report.web.palette import HEAT_STEPS


def recall(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Recall of each class in the last round,
    and at the end of the first stage where there are several.
    """
    final = run.confusion
    if final is None:
        return None
    stages = run.stages
    turning_round = (
        next((r for r in run.rounds if r["round"] == stages[0][2]), None)
        if len(stages) > 1
        else None
    )
    recall_before = (
        None
        if turning_round is None or turning_round["confusion"] is None
        else per_class_recall(turning_round["confusion"])
    )
    recall_after, test_images = per_class_recall(final), final.sum(axis=1)
    names = run.classes
    worst = int(np.nanargmin(recall_after))
    caption = (
        "The share of each class's test images that is recognised. Their mean is BACC. Worst is "
        f"{quote(names[worst])} with {recall_after[worst]:.0%} of "
        f"{quantity(int(test_images[worst]), 'test image')}."
    )
    if recall_before is not None:
        change = recall_after - recall_before
        worse_classes = [quote(names[c]) for c in np.flatnonzero(change < -0.02)]
        caption += (
            f" Since the end of {stages[0][0]}, recall fell for {join_words(worse_classes)}."
            if worse_classes
            else (f" No class lost more than 2 points since the end of {stages[0][0]}.")
        )
    first = () if turning_round is None else (f"recall in round {turning_round['round']}",)
    rows = tuple(
        (
            name, int(test_images[c]),
            *(() if recall_before is None else (_share(recall_before[c]),)),
            _share(recall_after[c]),
        )
        for c, name in enumerate(names)
    )  # fmt: skip
    head = (
        "class",
        "test images",
        *(first if recall_before is not None else ()),
        f"recall in round {run.numbers[-1]}",
    )
    draw = partial(_draw_recall, run, recall_after, test_images, turning_round, recall_before)
    return Figure(
        "recall", "What is recognised", caption, "Recall of each class.", draw, Table(head, rows)
    )


def _draw_recall(
    run: Recorded,
    recall_after: FloatArray,
    test_images: IntArray,
    turning_round: dict[str, Any] | None,
    recall_before: FloatArray | None,
    width: float,
) -> Scene:
    names = run.classes
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
        if math.isnan(recall_after[c]):
            scene.text(box.left + 6, y + 4, "no test image", size=11)
            continue
        images = quantity(int(test_images[c]), "test image")
        tip = f"{name}: {recall_after[c]:.1%} of {images} recognised in round {run.numbers[-1]}"
        if recall_before is not None and turning_round is not None:
            scene.line([(x(recall_before[c]), y), (x(recall_after[c]), y)], "link")
            scene.circle(
                x(recall_before[c]),
                y,
                4,
                "hollow",
                tip=f"{name}: {recall_before[c]:.1%} in round {turning_round['round']}",
                series="before",
            )
        scene.circle(x(recall_after[c]), y, 5.5, "accent", tip=tip, series="after")
        scene.text(width - 2, y + 4, f"{recall_after[c]:.0%}", "name", anchor="end")
    entries = [("accent", f"round {run.numbers[-1]}", "after")]
    if turning_round is not None:
        entries.append(
            ("hollow", f"round {turning_round['round']}, end of {run.stages[0][0]}", "before")
        )
    scene.legend(box.left if width > 600 else 2, box.bottom + 48, entries)
    return scene


def confusion(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """The confusion matrix of the last round, shaded by row."""
    counts = run.confusion
    if counts is None:
        return None
    names = run.classes
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
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
        partial(_draw_confusion, names, counts, shares),
        Table(("true class", *names), rows),
    )


def _draw_confusion(
    names: tuple[str, ...], counts: IntArray, shares: FloatArray, width: float
) -> Scene:
    short = short_names(names)
    margin = room_left(short) + 14
    cell = min((width - margin - 4) / len(names), 46.0)
    room = room_below(short, cell)
    scene = Scene(width, 26 + cell * len(names) + room + 20)
    start = margin if width < 600 else (width - margin - cell * len(names)) / 2 + margin
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


def _largest_mistakes(counts: IntArray, names: tuple[str, ...]) -> str:
    mistake_counts = counts - np.diag(np.diag(counts))
    order = [
        divmod(int(at), len(names))
        for at in np.argsort(-mistake_counts, axis=None, kind="stable")[:3]
    ]
    mistakes = [
        f"{quote(names[i])} for {quote(names[j])} ({quantity(int(mistake_counts[i, j]), 'time')})"
        for i, j in order
        if mistake_counts[i, j]
    ]
    return f"Most often it takes {join_words(mistakes)}." if mistakes else "It makes no mistake."


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"
