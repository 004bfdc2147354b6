"""Figures of other marks of noise: FedCorr's noise levels, and how much of
its labels a client explains.
"""

from __future__ import annotations

import math

import numpy as np

from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import Box, draw_y, names_below, percent, room_below, short_names
from fednoro.report.drawing.client_grid import LEAST
from fednoro.report.drawing.figure import Figure, Table, counted, number
from fednoro.report.drawing.scene import Scene
from fednoro.report.recorded_verdict import Judged


def level(run: Recorded, found: Judged | None) -> Figure | None:
    """FedCorr's estimate of each client's share of wrong labels, against
    the truth where it is known.
    """
    if found is None or found.level is None:
        return None
    names = [run.names[int(k)] for k in found.clients]
    levels, rates = found.level, found.rates

    def draw(width: float) -> Scene:
        short, left = short_names(names), 46.0
        step = min(max((width - left - 8) / len(names), LEAST), 72.0)
        box = Box(left, 26, left + step * len(names), 26 + 190)
        scene = Scene(max(width, box.right + 4), box.bottom + room_below(short, step) + 34)
        _, y = box.scales((0, 1), (0, 1))
        draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), percent, "share of labels")
        places = [left + (k + 0.5) * step for k in range(len(names))]
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
        names_below(scene, places, short, box.bottom + 6)
        entries = [
            ("accent", "estimated", "estimate"),
            *([("hollow", "truth", "truth")] if rates is not None else []),
        ]
        scene.legend(left, scene.height - 8, entries)
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


def explained(run: Recorded, found: Judged | None) -> Figure | None:
    """How much of its labels each client explains, and the cut below which it is flagged."""
    if found is None or found.explained is None or found.doubt is not None:
        return None
    order = np.argsort(-found.explained, kind="stable")
    names = [run.names[int(k)] for k in found.clients[order]]
    shares, wrong = found.explained[order], found.wrong[order]
    truth = None if found.truth is None else found.truth[order]
    low = min(0.0, float(np.nanmin(shares)))

    def draw(width: float) -> Scene:
        short, left = short_names(names), 46.0
        step = min(max((width - left - 8) / len(names), LEAST), 72.0)
        box = Box(left, 26, left + step * len(names), 26 + 190)
        scene = Scene(max(width, box.right + 4), box.bottom + room_below(short, step) + 42)
        _, y = box.scales((0, 1), (low, 1))
        draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), percent, "explained")
        if found.cut is not None:
            scene.line([(box.left, y(found.cut)), (box.right, y(found.cut))], "mark")
        places = [left + (k + 0.5) * step for k in range(len(names))]
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
            left,
            scene.height - 8,
            [*entries, *([] if found.cut is None else [("mark", "cut", "")])],
        )
        return scene

    caption = (
        "How much of a client’s labels the common model and its own explain, on average: 100% is "
        "all of them, 0 is no more than their frequencies do. "
    )
    if found.cut is not None:
        below = int((shares < found.cut).sum())
        caption += f"{counted(below, 'client')} below the cut at {found.cut:.0%} look noisy. "
        caption += "This rule can also flag nobody, or everybody."
    rows = tuple(
        (name, number(shares[k]), "noisy" if found.noisy[order][k] else "clean")
        for k, name in enumerate(names)
    )
    table = Table(("client", "explained", "verdict"), rows)
    title, label = (
        "How much of its labels a client explains",
        f"Explained shares of {len(names)} clients.",
    )
    return Figure("explained", title, caption, label, draw, table, len(names))
