"""Drawings: marks where the numbers are, everything escaped, colours that can be read."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_run

from fednoro.core.types import UserError
from fednoro.detection import leave_one_out_heads
from fednoro.detection.mixture_detector import NoisyClientDetector
from fednoro.experiment.run_folder.recorded_run import read
from fednoro.experiment.run_folder.run_files import CLIENT_COLUMNS
from fednoro.report.drawing.axes import round_ticks, short_names, whole_ticks
from fednoro.report.drawing.figure import NARROW, WIDE, Figure
from fednoro.report.drawing.image_export import export, save_all
from fednoro.report.drawing.scene import Scene, printable, shorten
from fednoro.report.figures import doubts, figures
from fednoro.report.page import render, write_report
from fednoro.report.recorded_verdict import read_verdict
from fednoro.report.web import palette

CLIENT = CLIENT_COLUMNS.index("client")
ALL = [
    "partition",
    "losses",
    "posterior",
    "mixture",
    "bacc",
    "recall",
    "confusion",
    "weights",
    "distances",
    "ramp",
    "time",
]


def made(path: Path) -> dict[str, Figure]:
    run = read(path)
    found = {figure.id: figure for _, figure in figures(run, read_verdict(run))}
    assert run.missing == []
    return found


def tips(scene: Scene) -> list[str]:
    return [mark.tip for mark in scene.marks if mark.tip]


# Sizes


def test_a_report_of_200_clients_and_300_rounds_is_below_10_megabytes(tmp_path: Path) -> None:
    report = write_report(make_run(tmp_path / "run", clients=200, classes=10, rounds=300))
    assert report.stat().st_size < 10e6


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (2, 2), (5, 30), (40, 4)])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_mark_stays_on_its_sheet(
    tmp_path: Path, clients: int, classes: int, width: float
) -> None:
    for name, figure in made(make_run(tmp_path / "run", clients, classes)).items():
        scene = figure.draw(width)
        assert scene.width >= width and math.isfinite(scene.height)
        for mark in scene.marks:
            points = (
                mark.points[:1]
                if mark.kind in ("rect", "circle", "triangle", "text")
                else mark.points
            )
            for x, y in points:
                assert -1 <= x <= scene.width + 1 and -1 <= y <= scene.height + 1, (name, mark)


# Numbers


def test_dots_of_the_partition_have_areas_in_the_ratio_of_counts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    held = read(path).holdings
    assert held is not None
    scene = made(path)["partition"].draw(WIDE)
    dots = [mark for mark in scene.marks if mark.kind == "circle" and mark.tip]
    counts = np.concatenate([table[table > 0] for table in (held.clean, held.observed)])
    areas = np.array([mark.points[1][0] ** 2 for mark in dots])
    np.testing.assert_allclose(areas / areas.max(), counts / counts.max(), rtol=1e-9)


def test_the_heat_map_shows_the_recorded_losses_and_strikes_out_missing_ones(
    tmp_path: Path,
) -> None:
    path = make_run(tmp_path / "run", clients=6, classes=8)
    rows = json.loads((path / "detection.json").read_text())["clients"]
    sent = [value for row in rows.values() for value in row["losses"] if value is not None]
    missing = sum(value is None for row in rows.values() for value in row["losses"])
    assert missing > 0
    scene = made(path)["losses"].draw(WIDE)
    heat = [mark for mark in scene.marks if mark.style == "heat" and mark.tip]
    shown = sorted(mark.tip.rpartition(": ")[2] for mark in heat[: len(sent)])
    assert shown == sorted(f"{value:.3f}" for value in sent)
    assert sum("no loss sent" in tip for tip in tips(scene)) == 2 * missing
    # and one in the legend
    assert sum(mark.style == "gap" for mark in scene.marks) == 2 * missing + 1


def test_the_mixture_is_the_one_the_detector_fits(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", clients=30, classes=3)
    rows = json.loads((path / "detection.json").read_text())["clients"].values()
    losses = np.array([row["losses"] for row in rows], dtype=float)
    detector = NoisyClientDetector(seed=0).fit(losses)
    found = read_verdict(read(path))
    assert (
        found is not None
        and found.mixture is not None
        and found.normalised_losses is not None
        and found.reproduced
    )
    np.testing.assert_allclose(found.normalised_losses, detector.normalised_, atol=1e-12)
    centred = detector.normalised_ - detector.normalised_.mean(axis=0)
    variance, vectors = np.linalg.eigh(centred.T @ centred)
    np.testing.assert_allclose(
        found.mixture.variance_shares, variance[::-1][:2] / variance.sum(), atol=1e-9
    )
    np.testing.assert_allclose(
        np.abs(found.mixture.points), np.abs(centred @ vectors[:, ::-1][:, :2]), atol=1e-9
    )
    for side, outline in found.mixture.ellipses:
        component = detector.noisy_component_ if side == "noisy" else 1 - detector.noisy_component_
        middle = (
            detector.mixture_.means_[component] - detector.normalised_.mean(axis=0)
        ) @ vectors[:, ::-1][:, :2]
        np.testing.assert_allclose(np.abs(outline[:-1].mean(axis=0)), np.abs(middle), atol=1e-9)


def test_the_curve_of_doubts_parts_the_verdicts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    detection = json.loads((path / "detection.json").read_text())
    rows, cut = {}, 0.3
    for i, (k, row) in enumerate(detection["clients"].items()):
        error, explained = (0.6, 0.2 + 0.01 * i) if row["noisy"] else (0.1 + 0.01 * i, 0.6)
        found = float(leave_one_out_heads.doubts(np.array(error), np.array(explained)))
        assert (found > cut) == row["noisy"]
        rows[k] = {
            "noisy": row["noisy"],
            "posterior": 0.5,
            "explained": explained,
            "error": error,
            "doubt": found,
        }
    silent = {"noisy": False, "posterior": 0.5, "explained": 1.0, "error": None, "doubt": None}
    flagged = [k for k, row in rows.items() if row["noisy"]]
    # by a cut on another scale
    earlier = {flagged[-1]: {"noisy": True, "posterior": 1.0, "explained": 0.3}}
    (path / "detection.json").write_text(
        json.dumps(
            {"reason": "so", "cut": cut, "clients": {**rows, next(iter(rows)): silent, **earlier}}
        )
    )
    figure = made(path)["doubt"]
    assert doubts.FLOOR == leave_one_out_heads.FLOOR
    for share, error in doubts._curve(cut, 0.7, 0.7):
        assert float(leave_one_out_heads.doubts(np.array(error), np.array(share))) == pytest.approx(
            cut
        )
    for width in (WIDE, 320):
        tips = {mark.tip for mark in figure.draw(width).marks if "explained, error" in mark.tip}
        assert len(tips) == len(rows) - 2
        assert [
            mark for mark in figure.draw(width).marks if mark.kind == "text" and mark.size == 10
        ], "some have names"
    assert [row[4] for row in figure.table.rows] == [
        "noisy" if row["noisy"] else "clean" for row in rows.values()
    ]
    assert "2 clients are missing here" in figure.caption and figure.table.rows[0][2] == "–"
    shown = len(flagged) - 1
    assert f"{shown} client{'s' * (shown != 1)} above the curve" in figure.caption


def test_confusion_and_recall_show_the_last_round(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    figure = made(path)
    assert [list(row[1:]) for row in figure["confusion"].table.rows] == last["confusion"]
    shares = [float(str(row[-1]).rstrip("%")) / 100 for row in figure["recall"].table.rows]
    assert np.mean(shares) == pytest.approx(last["bacc"], abs=1e-3)


def test_a_class_without_test_images_is_said_to_have_none(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for record in lines:
        record["confusion"][1] = [0, 0, 0]
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    figure = made(path)["recall"]
    assert "no test image" in [mark.text for mark in figure.draw(WIDE).marks]
    assert "The test set has no image of “kind 1”" in render(path)


def test_long_series_are_thinned_with_both_ends_kept(tmp_path: Path) -> None:
    figure = made(make_run(tmp_path / "run", clients=2, rounds=1500))["bacc"]
    curve = next(
        mark for mark in figure.draw(WIDE).marks if mark.style == "curve" and len(mark.points) > 2
    )
    assert len(curve.points) <= 600
    shown = [tip for tip in tips(figure.draw(WIDE)) if tip.startswith("round")]
    assert shown[0].startswith("round 1,") and shown[-1].startswith("round 1500,")


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 9))
def test_ticks_are_round_few_and_within(low: float, span: float, about: int) -> None:
    ticks = round_ticks(low, low + span, about)
    slack = 1e-6 * max(abs(low), span)
    assert len(ticks) <= about + 2
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert ticks == sorted(ticks)


@given(st.integers(1, 5000))
def test_rounds_have_ticks_at_both_ends(end: int) -> None:
    ticks = whole_ticks(1, max(end, 2))
    assert ticks[0] == 1 and ticks[-1] == max(end, 2) and len(ticks) <= 9


# Names


@given(st.lists(st.text(max_size=60), min_size=1, max_size=6), st.integers(2, 20))
def test_short_names_are_short_and_never_empty_without_need(names: list[str], longest: int) -> None:
    for name, short in zip(names, short_names(names, longest), strict=True):
        assert len(short) <= longest
        assert short.strip() or not printable(name).strip()


def test_a_shared_beginning_is_left_out_at_a_space() -> None:
    assert short_names(["client 01", "client 02"]) == ["01", "02"]
    assert short_names(["clinic a", "client a"]) == ["clinic a", "client a"]
    assert short_names(["only one"]) == ["only one"]
    assert shorten("abcdefghij", 5) == "ab…ij"


@given(st.text(max_size=40))
def test_whatever_is_written_is_valid_and_inert(text: str) -> None:
    scene = Scene(10, 10)
    scene.text(1, 1, text)
    scene.circle(1, 1, 1, "clean", tip=text or "x", series=text)
    root = ElementTree.fromstring(scene.svg(text))
    assert {element.tag for element in root.iter()} <= {"svg", "text", "circle", "title"}
    assert root[0].text in (printable(text), None if not text else printable(text))


# Colours


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_text_and_marks_have_enough_contrast(theme: dict[str, str]) -> None:
    def ratio(first: str, second: str) -> float:
        return palette.contrast(
            palette.mix(theme[first], theme["paper"], 1),
            palette.mix(theme[second], theme["paper"], 1),
        )

    for ground in ("paper", "panel", "band"):
        for text in ("ink", "soft"):
            assert ratio(text, ground) >= 4.5, (text, ground)
    # links and the names of clients
    assert ratio("accent", "paper") >= 4.5 and ratio("noisy", "paper") >= 4.5
    for mark in ("clean", "noisy", "unknown", *(f"s{i}" for i in range(1, palette.SERIES + 1))):
        assert ratio(mark, "paper") >= 3, mark
    for share in np.linspace(0, 1, 501):
        step = round(palette.HEAT_STEPS * share)
        text = palette.on_heat(step / palette.HEAT_STEPS, theme)
        cell = palette.mix(theme["heat"], theme["paper"], float(share))
        assert palette.contrast(cell, palette.mix(text, text, 1)) >= 4.5, share


# Machado, Oliveira and Fernandes 2009, full severity, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def seen_as(colour: str, blindness: str) -> np.ndarray:
    """CIELAB of a colour as somebody with that blindness sees it."""
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = (
        to_xyz
        @ np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
        / np.array([0.9505, 1, 1.089])
    )
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_that_mean_different_things_stay_apart_for_the_colour_blind(
    theme: dict[str, str], blindness: str
) -> None:
    series = [f"s{i}" for i in range(1, palette.SERIES + 1)]
    for first, second in [*itertools.combinations(series, 2), ("clean", "noisy")]:
        apart = np.linalg.norm(seen_as(theme[first], blindness) - seen_as(theme[second], blindness))
        assert apart > 20, (first, second, apart)


def test_every_series_has_a_line_of_its_own() -> None:
    assert len(set(palette.DASHES)) == palette.SERIES


# Files for a paper


def test_figures_for_a_paper_are_written_in_every_format(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=4, names=("$x^2$", "<b>", "名前", "a" * 300))
    files = save_all(run, tmp_path / "to", only=("losses", "bacc"))
    assert [file.name for file in files] == [
        f"{n}.{kind}" for n in ("losses", "bacc") for kind in ("png", "pdf", "svg")
    ]
    beginnings = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    assert all(file.read_bytes().startswith(beginnings[file.suffix]) for file in files)
    ElementTree.parse(tmp_path / "to" / "losses.svg")


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    scene = made(make_run(tmp_path / "run"))["ramp"].draw(NARROW)
    assert export(scene, "svg") == export(scene, "svg")
    assert export(scene, "pdf") == export(scene, "pdf")


def test_every_figure_can_be_drawn_on_paper(tmp_path: Path) -> None:
    found = made(make_run(tmp_path / "run", clients=3, classes=2, rounds=4))
    assert list(found) == ALL
    for figure in found.values():
        assert export(figure.draw(NARROW), "png", dpi=40).startswith(b"\x89PNG")


def test_an_unknown_figure_is_a_clear_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no figure 'beauty': it has partition, bacc"):
        save_all(make_run(tmp_path / "run", method="fedavg"), tmp_path, only=("beauty",))


# Clients over rounds


def lines_of(scene: Scene, style: str) -> list[int]:
    """How many points each drawn line of a style has."""
    return [
        len(mark.points)
        for mark in scene.marks
        if mark.kind == "line" and mark.style == style and not mark.toggle
    ]


def without(run: Path, gone: dict[int, tuple[int, ...]]) -> Path:
    """Takes the answers of clients in some rounds out of the log."""
    head, *rows = (run / "clients.csv").read_text().splitlines(keepends=True)
    kept = [
        row
        for row in rows
        if int(row.split(",")[0]) not in gone.get(int(row.split(",")[CLIENT]), ())
    ]
    assert len(kept) < len(rows)
    (run / "clients.csv").write_text("".join([head, *kept]))
    return run


def test_lines_are_broken_where_clients_did_not_take_part(tmp_path: Path) -> None:
    whole = made(make_run(tmp_path / "whole", rounds=9))["weights"]
    assert lines_of(whole.draw(WIDE), "noisyline") == [9, 9] and lines_of(
        whole.draw(WIDE), "noisymean"
    ) == [9]
    assert "broken" not in whole.caption
    purged = made(without(make_run(tmp_path / "run", rounds=9), dict.fromkeys((2, 5), (4, 5, 6))))[
        "weights"
    ]
    scene = purged.draw(WIDE)
    assert lines_of(scene, "noisyline") == [3, 3, 3, 3] and lines_of(scene, "noisymean") == [3, 3]
    assert lines_of(scene, "cleanline") == [9] * 4 and lines_of(scene, "cleanmean") == [9]
    assert "broken where a client" in purged.caption


def test_a_mean_goes_on_with_those_that_take_part_and_a_single_round_is_a_dot(
    tmp_path: Path,
) -> None:
    scene = made(without(make_run(tmp_path / "run", rounds=9), {2: (2, 4, 5)}))["weights"].draw(
        WIDE
    )
    assert lines_of(scene, "noisyline") == [4, 9] and lines_of(scene, "noisymean") == [9]
    dots = [mark for mark in scene.marks if mark.kind == "circle" and mark.series == "noisy"]
    assert len(dots) == 2  # rounds 1 and 3
