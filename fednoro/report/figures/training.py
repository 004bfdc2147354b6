"""Figures over rounds: BACC with its stages, λ's ramp, and where the time went."""

from __future__ import annotations

import numpy as np

from fednoro.core.metrics import best_last
from fednoro.core.wording import percent, quantity
from fednoro.experiment.run_folder.recorded_run import Recorded
from fednoro.report.drawing.axes import (
    Box,
    Scale,
    draw_x,
    draw_y,
    round_ticks,
    short_names,
    whole_ticks,
)
from fednoro.report.drawing.figure import Figure, Table
from fednoro.report.drawing.scene import Scene, shorten, text_width
from fednoro.report.recorded_verdict import RecordedVerdict

LAST_ROUNDS = 10
POINTS = 600  # of a curve; more cannot be seen


def thin_out(count: int, most: int = POINTS) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which of `count` points to draw: all, or evenly spaced ones with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def whole_number(value: float) -> str:
    return f"{value:.0f}"


def bacc(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Balanced accuracy on the test set after each round, with stages, Best and Last."""
    if not run.rounds:
        return None
    numbers, values = run.numbers, run.bacc
    best, last, final = best_last(values, LAST_ROUNDS)
    at = int(values.argmax())
    validation_bacc = [record["validation_bacc"] for record in run.rounds]
    end = max(run.planned_rounds, int(numbers[-1]))
    low = max(0.0, np.floor(10 * min(values.min(), best - 0.2)) / 10)

    def draw(width: float) -> Scene:
        box = Box(46, 28, width - 12, 28 + (300 if width > 600 else 220))
        scene = Scene(width, box.bottom + (62 if width > 600 else 96))
        x, y = box.scales((int(numbers[0]), max(end, int(numbers[0]) + 1)), (low, 1.0))
        stage_bands(scene, run, box, x)
        draw_y(scene, box, y, round_ticks(low, 1.0), percent)
        draw_x(scene, box, x, whole_ticks(int(numbers[0]), end), whole_number, "round")
        tail = numbers[-LAST_ROUNDS:]
        scene.rect(x(tail[0]), box.top, x(tail[-1]) - x(tail[0]), box.height, "span", series="last")
        scene.line([(x(tail[0]), y(last)), (x(tail[-1]), y(last))], "mark", series="last")
        _draw_rounds(scene, (x, y), run, low)
        _mark_best(scene, (x, y), run, box.top)
        entries = [
            ("curve", "BACC on the test set", "bacc"),
            ("span", f"Last {last:.2%}: mean of {len(tail)} rounds", "last"),
        ]
        if all(value is not None for value in validation_bacc):
            entries.insert(1, ("curve2", "on the validation part", "validation"))
        scene.legend(box.left, box.bottom + 56, entries)
        return scene

    caption = (
        "Balanced accuracy: the mean over classes of the share of test images that is recognised. "
        f"Best is {best:.2%} (round {numbers[at]}), Last {last:.2%} (mean of the last "
        f"{min(LAST_ROUNDS, len(values))} rounds) and final {final:.2%}. Best is chosen on the "
        "test set and therefore flatters; Last does not."
    )
    label = (
        f"Line chart of balanced accuracy over {len(values)} rounds, "
        f"from {values[0]:.0%} to {final:.0%}."
    )
    return Figure("bacc", "Balanced accuracy", caption, label, draw, _bacc_table(run))


def _draw_rounds(scene: Scene, scales: tuple[Scale, Scale], run: Recorded, low: float) -> None:
    """The curves of the test set and of the validation part, with a tip for each round."""
    numbers, values = run.numbers, run.bacc
    validation_bacc = [record["validation_bacc"] for record in run.rounds]
    x, y = scales
    indices = thin_out(len(values))
    if all(value is not None for value in validation_bacc):
        points = [(x(numbers[i]), y(max(validation_bacc[i], low))) for i in indices]
        scene.line(points, "curve2", series="validation")
    scene.line([(x(numbers[i]), y(values[i])) for i in indices], "curve", series="bacc")
    for i in indices:
        tip = f"round {numbers[i]}, {run.rounds[i]['stage']}: BACC {values[i]:.2%}"
        tip += (
            ""
            if validation_bacc[i] is None
            else f", on the validation part {validation_bacc[i]:.2%}"
        )
        scene.circle(
            x(numbers[i]),
            y(values[i]),
            6 if len(values) < 120 else 3,
            "hit",
            tip=tip,
            series="bacc",
        )


def _mark_best(scene: Scene, scales: tuple[Scale, Scale], run: Recorded, top: float) -> None:
    """A dot and a label where BACC is highest."""
    numbers, best = run.numbers, best_last(run.bacc, LAST_ROUNDS).best
    at = int(run.bacc.argmax())
    x, y = scales
    scene.circle(
        x(numbers[at]),
        y(best),
        5,
        "accent",
        tip=f"Best: {best:.2%} in round {numbers[at]}",
        series="bacc",
    )
    right, below = x(numbers[at]) > scene.width - 120, y(best) < top + 26
    scene.text(
        x(numbers[at]) + (6 if not right else 0),
        y(best) + (20 if below else -9),
        f"Best {best:.2%}",
        "strong",
        anchor="end" if right else "start",
    )


def _bacc_table(run: Recorded) -> Table:
    rows = tuple(
        (
            r["round"],
            r["stage"],
            f"{r['bacc']:.4f}",
            *(
                f"{r[k]:.4f}" if r[k] is not None else "–"
                for k in ("validation_bacc", "loss", "train_loss")
            ),
        )
        for r in run.rounds
    )
    head = ("round", "stage", "BACC", "validation BACC", "test loss", "training loss")
    return Table(head, rows)


def stage_bands(scene: Scene, run: Recorded, box: Box, x: Scale) -> None:
    """Every other stage shaded, with its name above where there is room."""
    stages = run.stages
    for i, (name, first, last, _) in enumerate(stages):
        start = box.left if i == 0 else x(first - 0.5)
        end = x(min(last + 0.5, x.high)) if i < len(stages) - 1 else x(last)
        if i % 2 == 0:
            scene.rect(start, box.top, end - start, box.height, "band")
        elif i:
            scene.line([(start, box.top), (start, box.bottom)], "grid")
        room = int((end - start) / text_width("n", 11))
        if room >= 6:
            scene.text(
                (start + end) / 2, box.top - 9, shorten(name, room), anchor="middle", size=11
            )


def ramp(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """The weight of distillation over rounds."""
    if run.ledger is None:
        return None
    values = run.ledger.series("lam")
    if not values:
        return None
    by_round = {
        int(r): float(v)
        for rounds, lams in values.values()
        for r, v in zip(rounds, lams, strict=True)
    }
    rounds = sorted(by_round)
    end = max(run.planned_rounds, rounds[-1])
    top = max(max(by_round.values()), 0.1)

    def draw(width: float) -> Scene:
        box = Box(46, 24, width - 12, 24 + 150)
        scene = Scene(width, box.bottom + 44)
        x, y = box.scales((1, max(end, 2)), (0, 1))
        draw_y(scene, box, y, (0, 0.25, 0.5, 0.75, 1), lambda v: f"{v:g}", "λ")
        draw_x(scene, box, x, whole_ticks(1, end), whole_number, "round")
        marked_rounds = [rounds[i] for i in thin_out(len(rounds))]
        scene.line([(x(r), y(by_round[r])) for r in marked_rounds], "curve")
        for r in marked_rounds:
            scene.circle(x(r), y(by_round[r]), 5, "hit", tip=f"round {r}: λ = {by_round[r]:.3f}")
        return scene

    caption = (
        "How much clients that look noisy learn from the global model’s answers instead of from "
        f"their own labels. λ begins at {by_round[rounds[0]]:.2f} in round {rounds[0]} and is "
        f"{by_round[rounds[-1]]:.2f} in round {rounds[-1]}."
    )
    table = Table(("round", "λ"), tuple((r, f"{by_round[r]:.4f}") for r in rounds))
    return Figure("ramp", "The ramp of λ", caption, f"λ rises to {top:.2f}.", draw, table)


def time(run: Recorded, verdict: RecordedVerdict | None) -> Figure | None:
    """Seconds that the rounds of each stage took."""
    stages = run.stages
    if not stages or not sum(stage[3] for stage in stages):
        return None
    total = sum(stage[3] for stage in stages)
    longest = max(stage[3] for stage in stages)

    def draw(width: float) -> Scene:
        names = short_names([stage[0] for stage in stages], 24)
        margin = min(max(text_width(name) for name in names) + 14, width * 0.45)
        scene = Scene(width, 12 + 32 * len(stages))
        scale = Scale(0, longest, margin, width - 96)
        for i, (name, first, last, seconds) in enumerate(stages):
            y = 8 + 32 * i
            scene.text(margin - 8, y + 16, names[i], "name", anchor="end")
            each = duration(seconds / (last - first + 1))
            tip = f"{name}, rounds {first} to {last}: {duration(seconds)}, {each} a round"
            scene.rect(margin, y + 3, max(scale(seconds) - margin, 1), 18, "accent", tip=tip)
            scene.text(scale(seconds) + 7, y + 16, duration(seconds))
        return scene

    caption = (
        f"The {quantity(len(run.rounds), 'round')} took {duration(total)}, "
        f"{duration(total / len(run.rounds))} each on average. Preparation, and exchanges between "
        "rounds such as scoring, are not among them."
    )
    rows = tuple((n, f"{a} to {b}", f"{s:.2f}", f"{s / (b - a + 1):.3f}") for n, a, b, s in stages)
    table = Table(("stage", "rounds", "seconds", "seconds a round"), rows)
    return Figure(
        "time",
        "Time by stage",
        caption,
        f"Bars of seconds for {quantity(len(stages), 'stage')}.",
        draw,
        table,
    )


def duration(seconds: float) -> str:
    """A time as it is said."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
