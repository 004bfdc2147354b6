"""Figures of the clients over rounds:
what each weighs in the new model, and how far it is from a clean one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fednoro.core.types import FloatArray, IntArray
from fednoro.core.wording import quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import Box, Scale, draw_x, draw_y, round_ticks, whole_ticks
from fednoro.report.drawing.figure import Cell, Figure, Table
from fednoro.report.drawing.scene import Scene
from fednoro.report.figures.training import stage_bands, thin_out, whole_number
from fednoro.report.recorded_verdict import RecordedVerdict

Series = dict[int, tuple[IntArray, FloatArray]]
SIDES = ("clean", "noisy", "unknown")


def weights(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Aggregation weight of each client over rounds."""
    series = {} if run.ledger is None else run.ledger.series("weight")
    if not series:
        return None
    side = _sides(run, series, verdict)
    caption = (
        "Each thin line is a client’s share of the new global model, thick lines are group means. "
    )
    if any(len(_stretches(rounds)) > 1 for rounds, _ in series.values()):
        caption += "They are broken where a client, or a whole group, did not take part. "
    caption += _shift(run, series, side)
    label = f"Aggregation weights of {quantity(len(series), 'client')} over rounds."
    return _lines(
        run,
        series,
        side,
        ("weights", "Aggregation weights", caption, label, "weight"),
        verdict is None,
    )


def distances(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Distance of each client's model to the nearest clean one over rounds."""
    series = {} if run.ledger is None else run.ledger.series("distance")
    series = {k: item for k, item in series.items() if item[1].max(initial=0) > 0}
    if not series:
        return None
    caption = (
        "How far the weights of each client taken for noisy are from those of the nearest client "
        "taken for clean. A client’s share of the new model shrinks by exp(−d / largest d). "
        "Clients taken for clean are at 0 and not drawn."
    )
    label = f"Distances of {quantity(len(series), 'client')} over rounds."
    words = ("distances", "Distance to the nearest clean model", caption, label, "distance")
    return _lines(run, series, _sides(run, series, verdict), words, verdict is None)


def _sides(run: Recorded, series: Series, verdict: RecordedVerdict | None) -> dict[int, str]:
    noisy = {} if run.named_noisy is None else {k: k in run.named_noisy for k in run.names}
    if verdict is not None:
        noisy = dict(zip(verdict.clients.tolist(), verdict.noisy.tolist(), strict=True))
    return {k: "unknown" if k not in noisy else "noisy" if noisy[k] else "clean" for k in series}


def _shift(run: Recorded, series: Series, side: dict[int, str]) -> str:
    flagged = [k for k in series if side[k] == "noisy"]
    if run.holdings is None or not flagged:
        return "This method weighs clients by their size alone." if not flagged else ""
    sizes = run.holdings.observed.sum(axis=1)
    last = max(int(rounds[-1]) for rounds, _ in series.values())
    present = [k for k, (rounds, _) in series.items() if rounds[-1] == last]
    share = sum(float(series[k][1][-1]) for k in present if k in flagged)
    images = sizes[[k for k in present if k in flagged]].sum() / max(sizes[present].sum(), 1)
    return (
        f"Clients taken for noisy hold {images:.0%} of the images that took part in round {last} "
        f"and had {share:.0%} of the weight there."
    )


def _lines(
    run: Recorded, series: Series, side: dict[int, str], words: Sequence[str], without_verdict: bool
) -> Figure:
    name, title, caption, label, unit = words
    top = max(float(values.max()) for _, values in series.values()) * 1.06 or 1.0
    first = min(int(rounds[0]) for rounds, _ in series.values())
    end = max(run.planned_rounds, max(int(rounds[-1]) for rounds, _ in series.values()))
    groups = {s: [k for k in series if side[k] == s] for s in SIDES}
    means = {s: _mean(series, members) for s, members in groups.items() if len(members) > 1}

    def draw(width: float) -> Scene:
        box = Box(52, 30, width - 12, 30 + (250 if width > 600 else 200))
        scene = Scene(width, box.bottom + 62)
        x, y = box.scales((first, max(end, first + 1)), (0, top))
        if first == 1:
            stage_bands(scene, run, box, x)
        draw_y(scene, box, y, round_ticks(0, top), lambda v: f"{v:g}", unit)
        draw_x(scene, box, x, whole_ticks(first, end), whole_number, "round")
        _draw_clients(scene, (x, y), run, series, side, unit)
        _draw_means(scene, (x, y), means)
        legend_words = {"clean": "looks clean", "noisy": "looks noisy", "unknown": "client"}
        if without_verdict:  # then it is the user who said so
            legend_words |= {"clean": "not named noisy", "noisy": "named noisy"}
        scene.legend(
            box.left,
            box.bottom + 56,
            [(f"{s}mean", legend_words[s], s) for s in SIDES if groups[s]],
        )
        return scene

    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            run.names[k],
            side[k],
            len(rounds),
            *(f"{v:.4g}" for v in (values[0], values.mean(), values[-1])),
        )
        for k, (rounds, values) in series.items()
    )
    table = Table(
        ("client", "verdict", "rounds", "first", "mean", "last"),
        rows,
        "The whole series is in clients.csv.",
    )
    return Figure(name, title, caption, label, draw, table)


def _draw_clients(
    scene: Scene,
    scales: tuple[Scale, Scale],
    run: Recorded,
    series: Series,
    side: dict[int, str],
    unit: str,
) -> None:
    """A thin line for each client."""
    x, y = scales
    for k, (rounds, values) in series.items():
        tip = (
            f"{run.names[k]}: {unit} {values[0]:.3g} in round {rounds[0]}, "
            f"{values[-1]:.3g} in round {rounds[-1]}"
        )
        for stretch in _stretches(rounds):
            indices = stretch[thin_out(len(stretch), 600 if len(series) <= 50 else 150)]
            points = [(x(int(rounds[i])), y(float(values[i]))) for i in indices]
            if len(points) > 1:
                scene.line(points, f"{side[k]}line", tip=tip, series=side[k])
            else:
                scene.circle(
                    *points[0],
                    2.5 if len(rounds) == 1 else 1.5,
                    side[k],
                    tip=tip,
                    series=side[k],
                )


def _draw_means(
    scene: Scene, scales: tuple[Scale, Scale], means: dict[str, tuple[IntArray, FloatArray]]
) -> None:
    """A thick line for each group."""
    x, y = scales
    for s, (rounds, values) in means.items():
        for stretch in _stretches(rounds):
            points = [
                (x(int(rounds[i])), y(float(values[i]))) for i in stretch[thin_out(len(stretch))]
            ]
            if len(points) > 1:
                scene.line(points, f"{s}mean", series=s)
            else:
                scene.circle(*points[0], 3, s, series=s)


def _stretches(rounds: IntArray) -> list[IntArray]:
    """Places of rounds that follow each other,
    apart from those after a round without this client.
    """
    return np.split(np.arange(len(rounds)), np.flatnonzero(np.diff(rounds) > 1) + 1)


def _mean(series: Series, members: list[int]) -> tuple[IntArray, FloatArray]:
    rounds = np.concatenate([series[k][0] for k in members])
    values = np.concatenate([series[k][1] for k in members])
    unique_rounds, place = np.unique(rounds, return_inverse=True)
    return unique_rounds, np.bincount(place, weights=values) / np.bincount(place)
