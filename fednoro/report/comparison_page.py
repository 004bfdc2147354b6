"""A comparison as a page:
curves with their spread, the table, and differences with their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from fednoro.core.types import FloatArray
from fednoro.core.wording import join_words, percent, quantity
from fednoro.report.comparison import CONFIDENCE, MEASURES, Comparison, Difference, Group, interval
from fednoro.report.drawing.axes import Box, Scale, draw_x, draw_y, round_ticks, whole_ticks
from fednoro.report.drawing.figure import Cell, Figure, Table
from fednoro.report.drawing.scene import Scene, shorten
from fednoro.report.figures.training import thin_out, whole_number
from fednoro.report.page import drawing, page
from fednoro.report.web.palette import SERIES

LABEL_LETTERS = 34  # of a group's label in a figure


def render(comparison: Comparison) -> str:
    """The comparison as HTML."""
    charts = [curves(comparison), *([differences(comparison)] if comparison.differences else [])]
    return page(
        "compare.html",
        title=" and ".join(group.label for group in comparison.groups[:3]),
        headline=_headline(comparison),
        comparison=comparison,
        summary=summary(comparison),
        differences=difference_table(comparison),
        figures=[drawing(figure) for figure in charts],
    )


def summary(comparison: Comparison) -> Table:
    """Mean ± std of each group, in percent."""
    rows: list[tuple[Cell, ...]] = []
    for group in comparison.groups:
        cells = [mean_std(np.array(list(group.values(measure).values()))) for measure in MEASURES]
        exact = "–" if group.exact is None else f"{group.exact[0]} of {group.exact[1]}"
        rows.append((group.label, len(group.runs), *cells, exact))
    return Table(("group", "seeds", "Best", "Last", "final", "flagged exactly"), tuple(rows))


def difference_table(comparison: Comparison) -> Table:
    """Paired differences in percentage points."""
    head = (
        "group",
        "against",
        "BACC",
        "pairs",
        "mean difference",
        "std",
        f"{CONFIDENCE:.0%} interval",
    )
    return Table(head, tuple(_row(item) for item in comparison.differences))


def mean_std(values: FloatArray) -> str:
    mean, std, _, _ = interval(values)
    return f"{100 * mean:.2f}" if math.isnan(std) else f"{100 * mean:.2f} ± {100 * std:.2f}"


def _row(item: Difference) -> tuple[str | int, ...]:
    std = "–" if math.isnan(item.std) else f"{100 * item.std:.2f}"
    between = (
        "one pair has no spread"
        if math.isnan(item.low)
        else f"{100 * item.low:+.2f} to {100 * item.high:+.2f}"
    )
    return (
        item.group,
        item.against,
        item.measure.capitalize(),
        len(item.pairs),
        f"{100 * item.mean:+.2f}",
        std,
        between,
    )


def _headline(comparison: Comparison) -> str:
    runs = sum(len(group.runs) for group in comparison.groups)
    start = f"{quantity(runs, 'run')} in {quantity(len(comparison.groups), 'group')}."
    clear_items = [
        item
        for item in comparison.differences
        if item.measure == "last" and (item.low > 0 or item.high < 0)
    ]
    clear_differences = [
        f"{item.group} is {100 * abs(item.mean):.1f} points "
        f"{'above' if item.mean > 0 else 'below'} {item.against}"
        for item in clear_items
    ]
    if clear_differences:
        return f"{start} Over the last rounds {join_words(clear_differences, 4)}."
    if comparison.differences:
        return f"{start} No difference over the last rounds is clear of chance with these seeds."
    return start


def curves(comparison: Comparison) -> Figure:
    """BACC over rounds: the mean over seeds, and one standard deviation to either side."""
    series = [_series(group) for group in comparison.groups]
    low = max(0.0, math.floor(10 * min(float((mean - std).min()) for _, mean, std in series)) / 10)
    end = max(int(rounds[-1]) for rounds, _, _ in series)

    def draw(width: float) -> Scene:
        box = Box(46, 14, width - 12, 14 + (340 if width > 600 else 240))
        scene = Scene(width, box.bottom + 62 + 17 * (len(series) // (3 if width > 600 else 1)))
        x, y = box.scales((1, max(end, 2)), (low, 1))
        draw_y(scene, box, y, round_ticks(low, 1), percent)
        draw_x(scene, box, x, whole_ticks(1, end), whole_number, "round")
        for i, (rounds, mean, std) in enumerate(series):
            indices, key = thin_out(len(rounds)), f"g{i}"
            upper = [(x(int(rounds[j])), y(min(float(mean[j] + std[j]), 1.0))) for j in indices]
            lower = [(x(int(rounds[j])), y(max(float(mean[j] - std[j]), low))) for j in indices]
            if std.any():
                scene.area([*upper, *reversed(lower)], f"spread{i % SERIES + 1}", series=key)
            scene.line(
                [(x(int(rounds[j])), y(float(mean[j]))) for j in indices],
                f"series{i % SERIES + 1}",
                series=key,
            )
        for i, (rounds, mean, std) in enumerate(series):
            for j in thin_out(len(rounds)):
                tip = (
                    f"{comparison.groups[i].label}, round {rounds[j]}: "
                    f"{mean[j]:.2%} ± {100 * std[j]:.2f}"
                )
                scene.circle(
                    x(int(rounds[j])), y(float(mean[j])), 5, "hit", tip=tip, series=f"g{i}"
                )
        entries = [
            (f"series{i % SERIES + 1}", shorten(g.label, LABEL_LETTERS), f"g{i}")
            for i, g in enumerate(comparison.groups)
        ]
        scene.legend(box.left, box.bottom + 56, entries)
        return scene

    caption = (
        "Balanced accuracy on the test set: the mean over the seeds of a group; "
        "shading is one standard deviation to either side."
    )
    rows = tuple(
        (group.label, int(rounds[j]), f"{mean[j]:.4f}", f"{std[j]:.4f}")
        for group, (rounds, mean, std) in zip(comparison.groups, series, strict=True)
        for j in thin_out(len(rounds))
    )
    label = f"Balanced accuracy over rounds of {quantity(len(series), 'group')}."
    return Figure(
        "curves",
        "Balanced accuracy",
        caption,
        label,
        draw,
        Table(("group", "round", "mean", "std"), rows),
    )


def _series(group: Group) -> tuple[FloatArray, FloatArray, FloatArray]:
    length = min(len(run.rounds) for run in group.runs.values())
    table = np.array([run.bacc[:length] for run in group.runs.values()])
    std = table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros(length)
    return (
        next(iter(group.runs.values())).numbers[:length].astype(np.float64),
        table.mean(axis=0),
        std,
    )


def differences(comparison: Comparison) -> Figure:
    """Each seed's difference, their mean, and its interval."""
    items = comparison.differences
    ends = [
        100 * v for d in items for v in (*d.pairs.values(), d.low, d.high, 0.0) if math.isfinite(v)
    ]
    low, high = min(ends), max(ends)
    margin = max((high - low) * 0.06, 0.1)
    few = min(len(item.pairs) for item in items)
    caption = (
        "Differences between runs with the same seed and the very same clients, labels and test "
        "images, in percentage points. The interval is Student’s t over the pairs (at least "
        f"{few}); it takes the seeds for a sample of all seeds, not of all data sets. Several "
        "intervals at once will miss more often than each alone."
    )
    table = difference_table(comparison)
    return Figure(
        "differences",
        "Differences, paired by seed",
        caption,
        "Paired differences with intervals.",
        partial(_draw_differences, items, (low - margin, high + margin)),
        table,
    )


def _draw_differences(
    items: Sequence[Difference], extent: tuple[float, float], width: float
) -> Scene:
    box = Box(12, 10, width - 12, 10 + 46 * len(items))
    scene = Scene(width, box.bottom + 66)
    x, _ = box.scales(extent, (0, 1))
    for tick in round_ticks(*extent):
        scene.line([(x(tick), box.top), (x(tick), box.bottom)], "grid")
    scene.line([(x(0), box.top), (x(0), box.bottom)], "axis")
    draw_x(
        scene,
        box,
        x,
        round_ticks(*extent),
        lambda v: f"{v:+g}" if v else "0",
        "points",
    )
    for i, item in enumerate(items):
        _draw_difference(scene, box.left, box.top + 46 * i + 32, x, item)
    scene.legend(
        box.left,
        box.bottom + 54,
        [
            ("accent", f"mean, {CONFIDENCE:.0%} interval", "mean"),
            ("hollow", "one seed", "seeds"),
        ],
    )
    return scene


def _draw_difference(scene: Scene, start: float, y: float, x: Scale, item: Difference) -> None:
    """One line: its name, the interval, each seed, and the mean."""
    letters = int((scene.width - 24) / 6.8)
    scene.text(
        start,
        y - 15,
        shorten(f"{item.measure.capitalize()}: {item.group} against {item.against}", letters),
        "name",
    )
    if math.isfinite(item.low):
        scene.line([(x(100 * item.low), y), (x(100 * item.high), y)], "curve", series="mean")
    for seed, value in item.pairs.items():
        scene.circle(
            x(100 * value),
            y,
            3.5,
            "hollow",
            tip=f"seed {seed}: {100 * value:+.2f} points",
            series="seeds",
        )
    tip = f"mean of {quantity(len(item.pairs), 'pair')}: {_row(item)[4]} points ({_row(item)[6]})"
    scene.circle(x(100 * item.mean), y, 5.5, "accent", tip=tip, series="mean")
