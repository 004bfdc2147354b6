"""The figure of the calibrated detector:
what clients explain, what the others' heads say, and the cut between them.
"""

from __future__ import annotations

import numpy as np

from fednoro.core.types import FloatArray
from fednoro.core.wording import is_are, percent, quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import (
    Box,
    Scale,
    draw_x,
    draw_y,
    round_ticks,
    short_names,
    stands_free,
)
from fednoro.report.drawing.figure import Figure, Table, number
from fednoro.report.drawing.scene import Scene, text_width
from fednoro.report.recorded_verdict import RecordedVerdict

FLOOR = 0.02  # that of `fednoro.detection.leave_one_out_heads`, which would load torch


def doubt(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Clients by what they explain of their labels and by the error of the others' heads;
    the cut is a curve.
    """
    if (
        verdict is None
        or verdict.doubt is None
        or verdict.error is None
        or verdict.explained_shares is None
    ):
        return None
    names = [run.names[int(k)] for k in verdict.clients]
    shares, error, cut = verdict.explained_shares, verdict.error, verdict.cut
    scored = np.isfinite(error) & np.isfinite(shares)
    right = max(float(shares[scored].max(initial=0.0)) * 1.08, 0.2)
    top = max(float(error[scored].max(initial=0.0)) * 1.08, 0.2)

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
        _draw_clients(scene, (x, y), verdict, names, shares, error)
        entries = [("clean", "truly clean", "clean"), ("noisy", "truly noisy", "noisy")]
        entries = entries if verdict.truth is not None else [("unknown", "truth not known", "")]
        entries += [("ring", "verdict is wrong", "")] if verdict.wrong.any() else []
        scene.legend(
            box.left, box.bottom + 58, [*entries, *([] if cut is None else [("mark", "cut", "")])]
        )
        return scene

    flagged, silent = int((verdict.noisy & scored).sum()), int((~scored).sum())
    caption = _caption(flagged, silent, cut is not None)
    title = "What clients explain, and what the others say"
    label = (
        f"Scatter plot of {len(names)} clients by explained share "
        "and by the error of the others' heads."
    )
    table = _table(verdict, names, (shares, error, verdict.doubt))
    return Figure("doubt", title, caption, label, draw, table)


def _draw_clients(
    scene: Scene,
    scales: tuple[Scale, Scale],
    verdict: RecordedVerdict,
    names: list[str],
    shares: FloatArray,
    error: FloatArray,
) -> None:
    """A dot for each client, with its name where there is room."""
    short, truth = short_names(names, 8), verdict.truth
    scored = np.isfinite(error) & np.isfinite(shares)
    x, y = scales
    dots = {int(k): (x(shares[k]) - 5, y(error[k]) + 4) for k in np.flatnonzero(scored)}
    labels: list[tuple[float, float]] = []
    for k in np.flatnonzero(scored):
        style = "unknown" if truth is None else "noisy" if truth[k] else "clean"
        at = x(float(shares[k])), y(float(error[k]))
        tip = (
            f"{names[k]}: {shares[k]:.0%} explained, error {error[k]:.2f}, "
            f"P(noisy) = {verdict.posterior[k]:.3f}"
        )
        scene.dot(*at, 5 if len(names) <= 60 else 3.5, style, tip=tip, series=style)
        if verdict.wrong[k]:
            scene.circle(*at, 9, "ring")
        place = at[0] + 7, at[1] - 5
        others = [dot for other, dot in dots.items() if other != k] + labels
        fits = place[0] + text_width(short[k], 10) + 2 < scene.width
        if fits and stands_free(place, short[k], others):
            scene.text(*place, short[k], size=10)
            labels.append(place)


def _caption(flagged: int, silent: int, with_cut: bool) -> str:
    caption = (
        "To the right: how much of a client’s labels the common model and its own explain. "
        "Upwards: how badly heads that are learnt from all other clients part its labels, 0 where "
        "they follow the images, 1 where they do not. "
    )
    if with_cut:
        caption += (
            f"{quantity(flagged, 'client')} above the curve "
            f"{'looks' if flagged == 1 else 'look'} noisy. "
        )
    if silent:
        why = (
            "one class alone tells nothing, "
            "and who was judged before the others is not on this scale"
        )
        caption += f"{quantity(silent, 'client')} {is_are(silent)} missing here: {why}. "
    return caption


def _table(verdict: RecordedVerdict, names: list[str], columns: tuple[FloatArray, ...]) -> Table:
    rows = tuple(
        (
            name,
            *(number(v[k]) for v in columns),
            "noisy" if verdict.noisy[k] else "clean",
        )
        for k, name in enumerate(names)
    )
    return Table(("client", "explained", "error", "doubt", "verdict"), rows)


def _curve(cut: float, right: float, top: float) -> list[tuple[float, float]]:
    """Where the doubt is that of the cut, within the axes."""
    points = []
    for share in np.linspace(0, right, 200):
        height = cut**2 / (1 - share + FLOOR) - FLOOR
        if 0 <= height <= top:
            points.append((float(share), height))
    return points
