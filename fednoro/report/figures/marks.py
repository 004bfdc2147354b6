"""Figures of other marks of noise:
FedCorr's noise levels, and how much of its labels a client explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fednoro.core.types import FloatArray
from fednoro.core.wording import percent, quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import Box, Scale, draw_y, names_below, room_below, short_names
from fednoro.report.drawing.client_grid import NARROWEST_COLUMN
from fednoro.report.drawing.figure import Figure, Table, number
from fednoro.report.drawing.scene import Scene
from fednoro.report.recorded_verdict import RecordedVerdict


def level(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """FedCorr's estimate of each client's share of wrong labels,
    against the truth where it is known.
    """
    if verdict is None or verdict.level is None:
        return None
    names = [run.names[int(k)] for k in verdict.clients]
    levels, rates = verdict.level, verdict.rates

    def draw(width: float) -> Scene:
        short, margin = short_names(names), 46.0
        step = min(max((width - margin - 8) / len(names), NARROWEST_COLUMN), 72.0)
        box = Box(margin, 26, margin + step * len(names), 26 + 190)
        scene = Scene(max(width, box.right + 4), box.bottom + room_below(short, step) + 34)
        _, y = box.scales((0, 1), (0, 1))
        draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), percent, "share of labels")
        places = [margin + (k + 0.5) * step for k in range(len(names))]
        _draw_levels(scene, places, y, step, names, levels, rates)
        names_below(scene, places, short, box.bottom + 6)
        entries = [
            ("accent", "estimated", "estimate"),
            *([("hollow", "truth", "truth")] if rates is not None else []),
        ]
        scene.legend(margin, scene.height - 8, entries)
        return scene

    caption = (
        "The method’s estimate of the share of wrong labels at each "
        "client; 0 for those taken for clean. "
    )
    if rates is not None:
        caption += (
            f"It is off by {np.nanmean(np.abs(levels - rates)):.0%} of the labels on average."
        )
    rows = tuple(
        (name, number(levels[k]), *(() if rates is None else (f"{rates[k]:.2f}",)))
        for k, name in enumerate(names)
    )
    head = ("client", "estimated", *(() if rates is None else ("truth",)))
    title = "Estimated share of wrong labels"
    return Figure(
        "level", title, caption, "Estimated noise levels.", draw, Table(head, rows), len(names)
    )


def _draw_levels(
    scene: Scene,
    places: Sequence[float],
    y: Scale,
    step: float,
    names: Sequence[str],
    levels: FloatArray,
    rates: FloatArray | None,
) -> None:
    """A dot for each client's estimate, joined to the truth where it is known."""
    for k, x in enumerate(places):
        value = 0.0 if math.isnan(levels[k]) else float(levels[k])
        if rates is not None:
            scene.line([(x, y(value)), (x, y(float(rates[k])))], "link")
            scene.circle(
                x,
                y(float(rates[k])),
                min(step * 0.25, 4),
                "hollow",
                tip=f"{names[k]}: truly {rates[k]:.0%}",
                series="truth",
            )
        scene.circle(
            x,
            y(value),
            min(step * 0.32, 5.5),
            "accent",
            tip=f"{names[k]}: estimated {value:.0%}",
            series="estimate",
        )


def explained(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """How much of its labels each client explains, and the cut below which it is flagged."""
    if verdict is None or verdict.explained_shares is None or verdict.doubt is not None:
        return None
    order = np.argsort(-verdict.explained_shares, kind="stable")
    names = [run.names[int(k)] for k in verdict.clients[order]]
    shares, wrong = verdict.explained_shares[order], verdict.wrong[order]
    truth = None if verdict.truth is None else verdict.truth[order]
    low = min(0.0, float(np.nanmin(shares)))

    def draw(width: float) -> Scene:
        short, margin = short_names(names), 46.0
        step = min(max((width - margin - 8) / len(names), NARROWEST_COLUMN), 72.0)
        box = Box(margin, 26, margin + step * len(names), 26 + 190)
        scene = Scene(max(width, box.right + 4), box.bottom + room_below(short, step) + 42)
        _, y = box.scales((0, 1), (low, 1))
        draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), percent, "explained")
        if verdict.cut is not None:
            scene.line([(box.left, y(verdict.cut)), (box.right, y(verdict.cut))], "mark")
        places = [margin + (k + 0.5) * step for k in range(len(names))]
        for k, x in enumerate(places):
            if math.isnan(shares[k]):
                continue
            style = "unknown" if truth is None else "noisy" if truth[k] else "clean"
            radius = min(max(step * 0.32, 1.8), 6)
            at = x, y(float(shares[k]))
            scene.dot(
                *at,
                radius,
                style,
                tip=f"{names[k]}: {shares[k]:.1%} of its labels explained",
                series=style,
            )
            if wrong[k]:
                scene.circle(*at, radius + 4, "ring")
        names_below(scene, places, short, box.bottom + 14)
        entries = [("clean", "truly clean", "clean"), ("noisy", "truly noisy", "noisy")]
        entries = entries if truth is not None else [("unknown", "truth not known", "")]
        scene.legend(
            margin,
            scene.height - 8,
            [*entries, *([] if verdict.cut is None else [("mark", "cut", "")])],
        )
        return scene

    caption = _explained_caption(shares, verdict.cut)
    rows = tuple(
        (name, number(shares[k]), "noisy" if verdict.noisy[order][k] else "clean")
        for k, name in enumerate(names)
    )
    table = Table(("client", "explained", "verdict"), rows)
    title, label = (
        "How much of its labels a client explains",
        f"Explained shares of {len(names)} clients.",
    )
    return Figure("explained", title, caption, label, draw, table, len(names))


def _explained_caption(shares: FloatArray, cut: float | None) -> str:
    caption = (
        "How much of a client’s labels the common model and its own explain, on average: 100% is "
        "all of them, 0 is no more than their frequencies do. "
    )
    if cut is not None:
        below = int((shares < cut).sum())
        caption += f"{quantity(below, 'client')} below the cut at {cut:.0%} look noisy. "
        caption += "This rule can also flag nobody, or everybody."
    return caption
