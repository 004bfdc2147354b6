"""Figures of the detection: class losses, probabilities and the mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from fednoro.core.types import BoolArray, FloatArray
from fednoro.core.wording import is_are, join_words, quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import (
    Box,
    Scale,
    draw_x,
    draw_y,
    names_below,
    room_below,
    round_ticks,
    short_names,
    stands_free,
)
from fednoro.report.drawing.client_grid import GROUP_GAP, NARROWEST_COLUMN, Grid
from fednoro.report.drawing.figure import Figure, Table, number
from fednoro.report.drawing.scene import Scene, shorten, text_width
from fednoro.report.recorded_verdict import Mixture, RecordedVerdict


def losses(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Client by class: the mean loss as sent, and as the mixture saw it."""
    if verdict is None or verdict.losses is None or verdict.normalised_losses is None:
        return None
    order = verdict.order
    names = tuple(run.names[int(k)] for k in verdict.clients[order])
    raw, scaled = verdict.losses[order], verdict.normalised_losses[order]
    clean = int((~verdict.noisy).sum())
    groups = (clean,) if 0 < clean < len(names) else ()
    truth = None if verdict.truth is None else verdict.truth[order]
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
            start, upper = grid.corner(panel)
            scene.text(start, upper - 26, f"mean loss {title}", "strong")
            if groups:
                _group_names(scene, grid, panel, clean)
            _draw_cells(scene, grid, panel, table, most, np.isnan(raw))
        _draw_key(scene, grid.start, grid.foot, verdict.truth is not None)
        return scene

    caption = _losses_caption(raw, scaled, clean if groups else None)
    rows = tuple(
        (
            name,
            "noisy" if verdict.noisy[order][k] else "clean",
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


def _losses_caption(raw: FloatArray, scaled: FloatArray, clean: int | None) -> str:
    """Means for the first `clean` clients and the others, where there are two groups."""
    has_loss = np.isfinite(raw)
    caption = (
        "Each column is a client, each row a class; the fuller the shade, the larger the model’s "
        "mean loss on the labels that the client has. First as sent, then as the mixture saw it: "
        "each class scaled from 0 to 1. "
    )
    if not has_loss.all():
        caption += (
            f"{int((~has_loss).sum())} of {has_loss.size} cells are struck out: no loss was sent, "
        )
        caption += "and the smallest of the class is used. "
    if clean is not None:
        sums = np.nanmean(np.where(has_loss, scaled, np.nan), axis=1)
        caption += (
            f"Mean over the cells that were sent: {np.nanmean(sums[:clean]):.2f} for clients "
            f"that look clean, {np.nanmean(sums[clean:]):.2f} for those that look noisy."
        )
    return caption


def _group_names(scene: Scene, grid: Grid, panel: int, clean: int) -> None:
    for first, last, words in (
        (0, clean - 1, "looks clean"),
        (clean, len(grid.columns) - 1, "looks noisy"),
    ):
        start, end = grid.x(panel, first) - grid.step / 2, grid.x(panel, last) + grid.step / 2
        y = grid.corner(panel)[1] - 5
        style = "cleanmean" if words == "looks clean" else "noisymean"
        scene.line([(start, y), (end - 1, y)], style)
        if end - start > 70:
            scene.text(start, y - 5, words, size=11)


def _draw_cells(
    scene: Scene, grid: Grid, panel: int, table: FloatArray, most: float, missing: BoolArray
) -> None:
    """A panel's shades, and a struck-out cell for each missing loss."""
    space = 0.5 if grid.step >= 6 else 0.0
    width, height = grid.step - 2 * space, grid.row - 1
    for k, c in np.ndindex(*table.shape):
        value, cell = float(table[k, c]), f"{grid.columns[k]}, {grid.rows[c]}"
        x, y = grid.x(panel, k) - grid.step / 2 + space, grid.y(panel, c) - grid.row / 2 + 0.5
        if missing[k, c]:
            tip = f"{cell}: no loss sent" + (
                f", counted as {value:.2f}" if panel and math.isfinite(value) else ""
            )
            scene.rect(x, y, width, height, "hit", tip=tip)
            scene.line([(x + 1, y + height - 2), (x + width - 1, y + 2)], "gap")
        elif math.isfinite(value):
            alpha = min(max(value / most, 0.0), 1.0) if most else 0.0
            scene.rect(
                x, y, width, height, "heat", alpha=max(alpha, 0.025), tip=f"{cell}: {value:.3f}"
            )


def _draw_key(scene: Scene, x: float, y: float, truth_known: bool) -> None:
    """The scale of shades, and the sign for a missing cell."""
    scene.text(x, y, "low")
    for step in range(10):
        scene.rect(x + 26 + 6 * step, y - 10, 6, 11, "heat", alpha=(step + 0.5) / 10)
    scene.text(x + 92, y, "high")
    scene.rect(x + 140, y - 10, 12, 11, "frame")
    scene.line([(x + 141, y), (x + 151, y - 9)], "gap")
    scene.text(x + 158, y, "not sent")
    if truth_known:
        scene.text(x + 222, y, "bold: truly noisy", "strong")


@dataclass(frozen=True)
class _Probabilities:
    """How likely each client is noisy, in the order of the figure."""

    names: tuple[str, ...]
    values: FloatArray
    noisy: BoolArray  # the verdict
    wrong: BoolArray
    truth: BoolArray | None
    rates: FloatArray | None
    agreement: FloatArray | None


def posterior(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """The probability of being noisy for each client, coloured by the truth where it is known."""
    if verdict is None:
        return None
    order = verdict.order
    clients = _Probabilities(
        names=tuple(run.names[int(k)] for k in verdict.clients[order]),
        values=verdict.posterior[order],
        noisy=verdict.noisy[order],
        wrong=verdict.wrong[order],
        truth=None if verdict.truth is None else verdict.truth[order],
        rates=None if verdict.rates is None else verdict.rates[order],
        agreement=None if verdict.agreement is None else verdict.agreement[order],
    )
    count, flagged = len(clients.names), int(clients.noisy.sum())
    return Figure(
        "posterior",
        "How likely each client is noisy",
        _posterior_caption(verdict.reason, clients),
        f"Probability of being noisy for {count} clients; {flagged} are above one half.",
        partial(_draw_posterior, clients),
        _posterior_table(clients),
        count,
    )


def _draw_posterior(clients: _Probabilities, width: float) -> Scene:
    names, agreement = clients.names, clients.agreement
    clean = int((~clients.noisy).sum())
    short = short_names(names)
    margin = 46.0
    step = min(max((width - margin - GROUP_GAP - 8) / len(names), NARROWEST_COLUMN), 72.0)
    room, strip = room_below(short, step), 26.0 if agreement is not None else 8.0
    box = Box(margin, 26, margin + step * len(names) + GROUP_GAP, 26 + 190)
    scene = Scene(max(width, box.right + 4), box.bottom + strip + room + 34)
    _, y = box.scales((0, 1), (0, 1))
    scene.rect(box.left, y(1), box.width, y(0.5) - y(1), "band")
    scene.text(box.left + 6, y(0.5) - 6, "looks noisy above", size=11)
    draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), lambda v: f"{v:g}", "P(noisy)")
    places = [
        margin + (k + 0.5) * step + (GROUP_GAP if k >= clean else 0) for k in range(len(names))
    ]
    for k, x in enumerate(places):
        _draw_probability(scene, x, y, box.bottom, step, clients, k)
    if agreement is not None:
        scene.text(margin - 7, box.bottom + 21, "agree", size=11, anchor="end")
    names_below(scene, places, short, box.bottom + strip + 4)
    entries = [("clean", "truly clean", "clean"), ("noisy", "truly noisy", "noisy")]
    if clients.wrong.any():
        entries.append(("ring", "verdict is wrong", ""))
    scene.legend(
        margin,
        scene.height - 8,
        entries if clients.truth is not None else [("unknown", "truth not known", "")],
    )
    return scene


def _draw_probability(
    scene: Scene,
    x: float,
    y: Scale,
    bottom: float,
    step: float,
    clients: _Probabilities,
    k: int,
) -> None:
    """One client's dot, and its cell in the strip below."""
    names, agreement = clients.names, clients.agreement
    truth, rates = clients.truth, clients.rates
    style = "unknown" if truth is None else "noisy" if truth[k] else "clean"
    value = clients.values[k]
    probability = "not scored, so not trusted" if math.isnan(value) else f"P(noisy) = {value:.3f}"
    tip = f"{names[k]}: {probability}"
    if truth is not None and rates is not None:
        tip += f"; truly {'noisy' if truth[k] else 'clean'}, {rates[k]:.0%} of labels wrong"
    height = y(1.0 if math.isnan(value) else value)
    scene.line([(x, y(0)), (x, height)], "link")
    radius = min(max(step * 0.32, 1.8), 6)
    scene.dot(x, height, radius, "hollow" if math.isnan(value) else style, tip=tip, series=style)
    if clients.wrong[k]:
        scene.circle(x, height, radius + 4, "ring")
    if agreement is not None:
        scene.rect(
            x - step / 2 + 0.5,
            bottom + 10,
            step - 1,
            14,
            "heat",
            alpha=max(float(agreement[k]), 0.04),
            tip=f"{names[k]}: {agreement[k]:.0%} of other starts of the mixture agree",
        )


def _posterior_caption(reason: str, clients: _Probabilities) -> str:
    values, agreement = clients.values, clients.agreement
    caption = f"{reason[:1].upper()}{reason[1:]}. "
    close_calls = int(((values > 0.05) & (values < 0.95)).sum())
    caption += (
        f"{quantity(close_calls, 'client')} {is_are(close_calls)} between 0.05 and 0.95. "
        if close_calls
        else "No probability is between 0.05 and 0.95. "
    )
    if clients.truth is not None:
        wrong_names = [shorten(clients.names[k], 40) for k in np.flatnonzero(clients.wrong)]
        caption += (
            f"The verdict is wrong for {join_words(wrong_names)} (ringed). "
            if wrong_names
            else "Every verdict agrees with the truth. "
        )
    else:
        caption += "The truth is not known. "
    if agreement is not None:
        caption += (
            "The strip under the chart shows how many of nine other starting points of the mixture "
        )
        caption += "give the same verdict: the fuller, the more."
    return caption


def _posterior_table(clients: _Probabilities) -> Table:
    names, truth, rates = clients.names, clients.truth, clients.rates
    agreement = clients.agreement
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
            number(clients.values[k]),
            "noisy" if clients.noisy[k] else "clean",
            *(
                ()
                if truth is None or rates is None
                else ("noisy" if truth[k] else "clean", f"{rates[k]:.0%}")
            ),
            *(() if agreement is None else (f"{agreement[k]:.0%}",)),
        )
        for k in range(len(names))
    )
    return Table(head, rows)


def mixture(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Clients in the two leading directions of their normalised losses, with the two components."""
    if verdict is None or verdict.mixture is None or verdict.normalised_losses is None:
        return None
    cloud = verdict.mixture
    names = [run.names[int(k)] for k in verdict.clients]
    scored = np.isfinite(cloud.points).all(axis=1)
    extent = np.vstack([cloud.points[scored], *(outline for _, outline in cloud.ellipses)])
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
            _axis_title("second", cloud.variance_shares[1]),
        )
        draw_x(
            scene,
            box,
            x,
            round_ticks(low[0], high[0]),
            lambda v: f"{v:g}",
            _axis_title("first", cloud.variance_shares[0]),
        )
        for side, outline in cloud.ellipses:
            scene.area([(x(a), y(b)) for a, b in outline], f"{side}area", series=side)
        _draw_clients(scene, (x, y), verdict, cloud.points, names)
        entries = [("clean", "looks clean", "clean"), ("noisy", "looks noisy", "noisy")]
        if verdict.wrong.any():
            entries.append(("ring", "verdict is wrong", ""))
        scene.legend(box.left, box.bottom + 58, entries)
        return scene

    caption = _mixture_caption(cloud, verdict.reproduced)
    points = tuple(
        (names[k], *map(number, cloud.points[k]), "noisy" if verdict.noisy[k] else "clean")
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


def _draw_clients(
    scene: Scene,
    scales: tuple[Scale, Scale],
    verdict: RecordedVerdict,
    points: FloatArray,
    names: list[str],
) -> None:
    """A dot for each client, with its name where there is room."""
    short, scored = short_names(names, 8), np.isfinite(points).all(axis=1)
    x, y = scales
    dots = {int(k): (x(points[k, 0]) - 5, y(points[k, 1]) + 4) for k in np.flatnonzero(scored)}
    labels: list[tuple[float, float]] = []
    for k in np.flatnonzero(scored):
        style = "noisy" if verdict.noisy[k] else "clean"
        at = x(points[k, 0]), y(points[k, 1])
        truth = (
            "" if verdict.truth is None else f"; truly {'noisy' if verdict.truth[k] else 'clean'}"
        )
        tip = f"{names[k]}: looks {style}, P(noisy) = {verdict.posterior[k]:.3f}{truth}"
        scene.dot(*at, 5 if len(names) <= 60 else 3.5, style, tip=tip, series=style)
        if verdict.wrong[k]:
            scene.circle(*at, 9, "ring")
        label = at[0] + 7, at[1] - 5
        others = [place for other, place in dots.items() if other != k] + labels
        if stands_free(label, short[k], others):
            edge = label[0] + text_width(short[k], 10) > scene.width
            scene.text(
                label[0] - (14 if edge else 0),
                label[1],
                short[k],
                size=10,
                anchor="end" if edge else "start",
            )
            labels.append(label)


def _mixture_caption(cloud: Mixture, reproduced: bool) -> str:
    caption = (
        "The clients’ normalised losses, seen along the two directions in which they "
        f"differ most: {cloud.variance_shares[0]:.0%} and {cloud.variance_shares[1]:.0%} of their "
        "variance. To the right is a larger loss. "
    )
    caption += (
        "Outlines are the two components of the mixture at two deviations. "
        if cloud.ellipses
        else "There is no mixture: no two groups were found. "
    )
    if not reproduced:
        caption += (
            "The mixture was fitted again for this figure "
            "and does not give exactly the recorded probabilities."
        )
    return caption


def _axis_title(which: str, share: float) -> str:
    return f"{which} direction ({share:.0%} of the variance)"
