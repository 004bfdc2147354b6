"""The figure of the calibrated detector: what clients explain, what the others' heads
say, and the cut between them.
"""

from __future__ import annotations

import numpy as np

from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import (
    Box,
    draw_x,
    draw_y,
    percent,
    round_ticks,
    short_names,
    stands_free,
)
from fednoro.report.drawing.figure import Figure, Table, counted, is_are, number
from fednoro.report.drawing.scene import Scene, text_width
from fednoro.report.recorded_verdict import Judged

FLOOR = 0.02  # that of `fednoro.detection.leave_one_out_heads`, which would load torch


def doubt(run: Recorded, found: Judged | None) -> Figure | None:
    """Clients by what they explain of their labels and by the error of the
    others' heads; the cut is a curve.
    """
    if found is None or found.doubt is None or found.error is None or found.explained is None:
        return None
    names = [run.names[int(k)] for k in found.clients]
    short, truth = short_names(names, 8), found.truth
    shares, error, cut = found.explained, found.error, found.cut
    shown = np.isfinite(error) & np.isfinite(shares)
    right = max(float(shares[shown].max(initial=0.0)) * 1.08, 0.2)
    top = max(float(error[shown].max(initial=0.0)) * 1.08, 0.2)

    def draw(width: float) -> Scene:
        box = Box(46, 22, width - 10, 22 + (360 if width > 600 else 260))
        scene = Scene(width, box.bottom + 64)
        x, y = box.scales((0, right), (0, top))
        draw_y(
            scene,
            box,
            y,
            round_ticks(0, top),
            lambda v: f"{v:g}",
            "error of heads learnt from the others",
        )
        draw_x(
            scene,
            box,
            x,
            round_ticks(0, right),
            percent,
            "share of its labels that a client explains",
        )
        if cut is not None:
            scene.line([(x(a), y(b)) for a, b in _curve(cut, right, top)], "mark")
        dots = {int(k): (x(shares[k]) - 5, y(error[k]) + 4) for k in np.flatnonzero(shown)}
        labels: list[tuple[float, float]] = []
        for k in np.flatnonzero(shown):
            style = "unknown" if truth is None else "noisy" if truth[k] else "clean"
            at = x(float(shares[k])), y(float(error[k]))
            said = (
                f"{names[k]}: {shares[k]:.0%} explained, error {error[k]:.2f}, "
                f"P(noisy) = {found.posterior[k]:.3f}"
            )
            scene.dot(*at, 5 if len(names) <= 60 else 3.5, style, tip=said, series=style)
            if found.wrong[k]:
                scene.circle(*at, 9, "ring")
            place = at[0] + 7, at[1] - 5
            others = [dot for other, dot in dots.items() if other != k] + labels
            fits = place[0] + text_width(short[k], 10) + 2 < width
            if fits and stands_free(place, short[k], others):
                scene.text(*place, short[k], size=10)
                labels.append(place)
        entries = [("clean", "truly clean", "clean"), ("noisy", "truly noisy", "noisy")]
        entries = entries if truth is not None else [("unknown", "truth not known", "")]
        entries += [("ring", "verdict is wrong", "")] if found.wrong.any() else []
        scene.legend(
            box.left, box.bottom + 58, [*entries, *([] if cut is None else [("mark", "cut", "")])]
        )
        return scene

    flagged, silent = int((found.noisy & shown).sum()), int((~shown).sum())
    caption = (
        "To the right: how much of a client’s labels the common model and its own explain. "
        "Upwards: how badly heads that are learnt from all other clients part its labels, 0 where "
        "they follow the images, 1 where they do not. "
    )
    if cut is not None:
        caption += (
            f"{counted(flagged, 'client')} above the curve "
            f"{'looks' if flagged == 1 else 'look'} noisy. "
        )
    if silent:
        why = (
            "one class alone tells nothing, and who was judged before "
            "the others is not on this scale"
        )
        caption += f"{counted(silent, 'client')} {is_are(silent)} missing here: {why}. "
    rows = tuple(
        (
            name,
            *(number(v[k]) for v in (shares, error, found.doubt)),
            "noisy" if found.noisy[k] else "clean",
        )
        for k, name in enumerate(names)
    )
    table = Table(("client", "explained", "error", "doubt", "verdict"), rows)
    title = "What clients explain, and what the others say"
    label = (
        f"Scatter plot of {len(names)} clients by explained share and by "
        "the error of the others' heads."
    )
    return Figure("doubt", title, caption, label, draw, table)


def _curve(cut: float, right: float, top: float) -> list[tuple[float, float]]:
    """Where the doubt is that of the cut, within the axes."""
    points = []
    for share in np.linspace(0, right, 200):
        height = cut**2 / (1 - share + FLOOR) - FLOOR
        if 0 <= height <= top:
            points.append((float(share), height))
    return points
