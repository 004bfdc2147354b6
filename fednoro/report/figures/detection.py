"""Figures of the detection: class losses, probabilities, the
mixture, and FedCorr's noise levels.
"""

from __future__ import annotations

import math

import numpy as np

from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import (
    Box,
    draw_x,
    draw_y,
    names_below,
    room_below,
    round_ticks,
    short_names,
    stands_free,
)
from fednoro.report.drawing.client_grid import GAP, LEAST, Grid
from fednoro.report.drawing.figure import Figure, Table, counted, is_are, listed, number
from fednoro.report.drawing.scene import Scene, shortened, text_width
from fednoro.report.recorded_verdict import Judged


def losses(run: Recorded, found: Judged | None) -> Figure | None:
    """Client by class: the mean loss as sent, and as the mixture saw it."""
    if found is None or found.losses is None or found.normalised is None:
        return None
    order = found.order
    names = tuple(run.names[int(k)] for k in found.clients[order])
    raw, scaled = found.losses[order], found.normalised[order]
    clean = int((~found.noisy).sum())
    groups = (clean,) if 0 < clean < len(names) else ()
    truth = None if found.truth is None else found.truth[order]
    top = float(np.nanmax(raw)) if np.isfinite(raw).any() else 1.0
    classes = run.classes or tuple(f"class {c}" for c in range(raw.shape[1]))

    def draw(width: float) -> Scene:
        grid = Grid(width, names, classes, 2, groups, above=40, legend=34)
        scene = grid.scene()
        for panel, (title, table, most) in enumerate(
            ((f"as sent: 0 to {top:.2g}", raw, top), ("normalised: 0 to 1", scaled, 1.0))
        ):
            styles = ["strong" if flag else "tick" for flag in truth] if truth is not None else None
            grid.frame(scene, panel, "", styles)
            left, upper = grid.corner(panel)
            scene.text(left, upper - 26, f"mean loss {title}", "strong")
            if groups:
                _group_names(scene, grid, panel, clean)
            for k, c in np.ndindex(*table.shape):
                _cell(
                    scene,
                    grid,
                    panel,
                    k,
                    c,
                    float(table[k, c]),
                    most,
                    f"{names[k]}, {classes[c]}",
                    bool(np.isnan(raw[k, c])),
                )
        _shades(scene, grid.start, grid.foot, found.truth is not None)
        return scene

    held = np.isfinite(raw)
    caption = (
        "Each column is a client, each row a class; the fuller the shade, the larger the model’s "
        "mean loss on the labels that the client has. First as sent, then as the mixture saw it: "
        "each class scaled from 0 to 1. "
    )
    if not held.all():
        caption += f"{int((~held).sum())} of {held.size} cells are struck out: no loss was sent, "
        caption += "and the smallest of the class is used. "
    if groups:
        sums = np.nanmean(np.where(held, scaled, np.nan), axis=1)
        caption += (
            f"Mean over the cells that were sent: {np.nanmean(sums[:clean]):.2f} for clients that "
            f"look clean, {np.nanmean(sums[clean:]):.2f} for those that look noisy."
        )
    rows = tuple(
        (
            name,
            "noisy" if found.noisy[order][k] else "clean",
            *(number(v) for v in raw[k]),
            *(number(v) for v in scaled[k]),
        )
        for k, name in enumerate(names)
    )
    head = ("client", "verdict", *classes, *(f"{name}, normalised" for name in classes))
    label = (
        f"Heat map of mean losses, {len(names)} clients by {len(classes)} classes, "
        "before and after normalisation."
    )
    return Figure(
        "losses", "Losses by client and class", caption, label, draw, Table(head, rows), len(names)
    )


def _group_names(scene: Scene, grid: Grid, panel: int, clean: int) -> None:
    for first, last, words in (
        (0, clean - 1, "looks clean"),
        (clean, len(grid.columns) - 1, "looks noisy"),
    ):
        left, right = grid.x(panel, first) - grid.step / 2, grid.x(panel, last) + grid.step / 2
        y = grid.corner(panel)[1] - 5
        style = "cleanmean" if words == "looks clean" else "noisymean"
        scene.line([(left, y), (right - 1, y)], style)
        if right - left > 70:
            scene.text(left, y - 5, words, size=11)


def _cell(
    scene: Scene,
    grid: Grid,
    panel: int,
    k: int,
    c: int,
    value: float,
    most: float,
    whose: str,
    missing: bool,
) -> None:
    space = 0.5 if grid.step >= 6 else 0.0
    x, y = grid.x(panel, k) - grid.step / 2 + space, grid.y(panel, c) - grid.row / 2 + 0.5
    width, height = grid.step - 2 * space, grid.row - 1
    if missing:
        tip = f"{whose}: no loss sent" + (
            f", counted as {value:.2f}" if panel and math.isfinite(value) else ""
        )
        scene.rect(x, y, width, height, "hit", tip=tip)
        scene.line([(x + 1, y + height - 2), (x + width - 1, y + 2)], "gap")
    elif math.isfinite(value):
        alpha = min(max(value / most, 0.0), 1.0) if most else 0.0
        scene.rect(
            x, y, width, height, "heat", alpha=max(alpha, 0.025), tip=f"{whose}: {value:.3f}"
        )


def _shades(scene: Scene, x: float, y: float, known: bool) -> None:
    """The scale of shades, and the sign for a missing cell."""
    scene.text(x, y, "low")
    for step in range(10):
        scene.rect(x + 26 + 6 * step, y - 10, 6, 11, "heat", alpha=(step + 0.5) / 10)
    scene.text(x + 92, y, "high")
    scene.rect(x + 140, y - 10, 12, 11, "frame")
    scene.line([(x + 141, y), (x + 151, y - 9)], "gap")
    scene.text(x + 158, y, "not sent")
    if known:
        scene.text(x + 222, y, "bold: truly noisy", "strong")


def posterior(run: Recorded, found: Judged | None) -> Figure | None:
    """The probability of being noisy for each client, coloured by the truth where it is known."""
    if found is None:
        return None
    order = found.order
    names = [run.names[int(k)] for k in found.clients[order]]
    values, wrong = found.posterior[order], found.wrong[order]
    truth = None if found.truth is None else found.truth[order]
    rates = None if found.rates is None else found.rates[order]
    agreement = None if found.agreement is None else found.agreement[order]
    clean = int((~found.noisy).sum())

    def draw(width: float) -> Scene:
        short = short_names(names)
        left = 46.0
        step = min(max((width - left - GAP - 8) / len(names), LEAST), 72.0)
        room, strip = room_below(short, step), 26.0 if agreement is not None else 8.0
        box = Box(left, 26, left + step * len(names) + GAP, 26 + 190)
        scene = Scene(max(width, box.right + 4), box.bottom + strip + room + 34)
        _, y = box.scales((0, 1), (0, 1))
        scene.rect(box.left, y(1), box.width, y(0.5) - y(1), "band")
        scene.text(box.left + 6, y(0.5) - 6, "looks noisy above", size=11)
        draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), lambda v: f"{v:g}", "P(noisy)")
        places = [left + (k + 0.5) * step + (GAP if k >= clean else 0) for k in range(len(names))]
        for k, x in enumerate(places):
            style = "unknown" if truth is None else "noisy" if truth[k] else "clean"
            value = values[k]
            said = "not scored, so not trusted" if math.isnan(value) else f"P(noisy) = {value:.3f}"
            tip = f"{names[k]}: {said}"
            if truth is not None and rates is not None:
                tip += f"; truly {'noisy' if truth[k] else 'clean'}, {rates[k]:.0%} of labels wrong"
            height = y(1.0 if math.isnan(value) else value)
            scene.line([(x, y(0)), (x, height)], "link")
            radius = min(max(step * 0.32, 1.8), 6)
            scene.dot(
                x, height, radius, "hollow" if math.isnan(value) else style, tip=tip, series=style
            )
            if wrong[k]:
                scene.circle(x, height, radius + 4, "ring")
            if agreement is not None:
                scene.rect(
                    x - step / 2 + 0.5,
                    box.bottom + 10,
                    step - 1,
                    14,
                    "heat",
                    alpha=max(float(agreement[k]), 0.04),
                    tip=f"{names[k]}: {agreement[k]:.0%} of other starts of the mixture agree",
                )
        if agreement is not None:
            scene.text(left - 7, box.bottom + 21, "agree", size=11, anchor="end")
        names_below(scene, places, short, box.bottom + strip + 4)
        entries = [("clean", "truly clean", "clean"), ("noisy", "truly noisy", "noisy")]
        if wrong.any():
            entries.append(("ring", "verdict is wrong", ""))
        scene.legend(
            left,
            scene.height - 8,
            entries if truth is not None else [("unknown", "truth not known", "")],
        )
        return scene

    flagged = int(found.noisy.sum())
    caption = f"{found.reason[:1].upper()}{found.reason[1:]}. "
    unsure = int(((values > 0.05) & (values < 0.95)).sum())
    caption += (
        f"{counted(unsure, 'client')} {is_are(unsure)} between 0.05 and 0.95. "
        if unsure
        else "No probability is between 0.05 and 0.95. "
    )
    if truth is not None:
        said = [shortened(names[k], 40) for k in np.flatnonzero(wrong)]
        caption += (
            f"The verdict is wrong for {listed(said)} (ringed). "
            if said
            else "Every verdict agrees with the truth. "
        )
    else:
        caption += "The truth is not known. "
    if agreement is not None:
        caption += (
            "The strip under the chart shows how many of nine other starting points of the mixture "
        )
        caption += "give the same verdict: the fuller, the more."
    head = (
        "client",
        "P(noisy)",
        "verdict",
        *(("truth", "labels wrong") if truth is not None else ()),
        *(("starts that agree",) if agreement is not None else ()),
    )
    rows = tuple(
        (
            names[k],
            number(values[k]),
            "noisy" if found.noisy[order][k] else "clean",
            *(
                ()
                if truth is None or rates is None
                else ("noisy" if truth[k] else "clean", f"{rates[k]:.0%}")
            ),
            *(() if agreement is None else (f"{agreement[k]:.0%}",)),
        )
        for k in range(len(names))
    )
    label = f"Probability of being noisy for {len(names)} clients; {flagged} are above one half."
    title = "How likely each client is noisy"
    return Figure("posterior", title, caption, label, draw, Table(head, rows), len(names))


def mixture(run: Recorded, found: Judged | None) -> Figure | None:
    """Clients in the two leading directions of their normalised losses, with the two components."""
    if found is None or found.mixture is None or found.normalised is None:
        return None
    cloud = found.mixture
    names = [run.names[int(k)] for k in found.clients]
    short = short_names(names, 8)
    shown = np.isfinite(cloud.points).all(axis=1)
    extent = np.vstack([cloud.points[shown], *(outline for _, outline in cloud.ellipses)])
    low, high = extent.min(axis=0), extent.max(axis=0)
    margin = np.maximum((high - low) * 0.06, 1e-3)
    low, high = low - margin, high + margin

    def draw(width: float) -> Scene:
        box = Box(46, 22, width - 10, 22 + (400 if width > 600 else 280))
        scene = Scene(width, box.bottom + 64)
        x, y = box.scales((low[0], high[0]), (low[1], high[1]))
        draw_y(
            scene,
            box,
            y,
            round_ticks(low[1], high[1]),
            lambda v: f"{v:g}",
            _axis("second", cloud.explained[1]),
        )
        draw_x(
            scene,
            box,
            x,
            round_ticks(low[0], high[0]),
            lambda v: f"{v:g}",
            _axis("first", cloud.explained[0]),
        )
        for side, outline in cloud.ellipses:
            scene.area([(x(a), y(b)) for a, b in outline], f"{side}area", series=side)
        taken = {
            int(k): (x(cloud.points[k, 0]) - 5, y(cloud.points[k, 1]) + 4)
            for k in np.flatnonzero(shown)
        }
        labels: list[tuple[float, float]] = []
        for k in np.flatnonzero(shown):
            style = "noisy" if found.noisy[k] else "clean"
            at = x(cloud.points[k, 0]), y(cloud.points[k, 1])
            truth = (
                "" if found.truth is None else f"; truly {'noisy' if found.truth[k] else 'clean'}"
            )
            tip = f"{names[k]}: looks {style}, P(noisy) = {found.posterior[k]:.3f}{truth}"
            scene.dot(*at, 5 if len(names) <= 60 else 3.5, style, tip=tip, series=style)
            if found.wrong[k]:
                scene.circle(*at, 9, "ring")
            label = at[0] + 7, at[1] - 5
            others = [place for other, place in taken.items() if other != k] + labels
            if stands_free(label, short[k], others):
                edge = label[0] + text_width(short[k], 10) > width
                scene.text(
                    label[0] - (14 if edge else 0),
                    label[1],
                    short[k],
                    size=10,
                    anchor="end" if edge else "start",
                )
                labels.append(label)
        entries = [("clean", "looks clean", "clean"), ("noisy", "looks noisy", "noisy")]
        if found.wrong.any():
            entries.append(("ring", "verdict is wrong", ""))
        scene.legend(box.left, box.bottom + 58, entries)
        return scene

    caption = (
        "The clients’ normalised losses, seen along the two directions in which they "
        f"differ most: {cloud.explained[0]:.0%} and {cloud.explained[1]:.0%} of their "
        "variance. To the right is a larger loss. "
    )
    caption += (
        "Outlines are the two components of the mixture at two deviations. "
        if cloud.ellipses
        else "There is no mixture: no two groups were found. "
    )
    if not found.reproduced:
        caption += (
            "The mixture was fitted again for this figure and does not give "
            "exactly the recorded probabilities."
        )
    points = tuple(
        (names[k], *map(number, cloud.points[k]), "noisy" if found.noisy[k] else "clean")
        for k in range(len(names))
    )
    table = Table(("client", "first direction", "second direction", "verdict"), points)
    return Figure(
        "mixture",
        "The two groups",
        caption,
        "Scatter plot of the clients in two groups.",
        draw,
        table,
    )


def _axis(which: str, share: float) -> str:
    return f"{which} direction ({share:.0%} of the variance)"
