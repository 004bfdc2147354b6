"""Reports of folders that are not whole, and what the page says about a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_folders import WARMUP, make_run

from fednoro.cli.report import watch_run
from fednoro.core.types import UserError
from fednoro.experiment.run_folder.recorded_run import PARTS, read
from fednoro.report import write_or_warn
from fednoro.report.findings import findings
from fednoro.report.page import render, write_report
from fednoro.report.recorded_verdict import read_verdict

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Elements of a page, checked to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.figures: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag == "figure":
            self.figures.append(str(dict(attrs)["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def said(path: Path) -> str:
    return " ".join(" ".join(Outline(render(path)).words).split())


# What is missing


@pytest.mark.parametrize(
    "name", [name for name in PARTS if name not in ("detection.json", "result.json")]
)
def test_a_missing_part_is_named_and_the_rest_is_shown(run: Path, name: str) -> None:
    whole = Outline(render(run)).figures
    (run / name).unlink()
    assert f"{name} is not there" in said(run)
    assert set(Outline(render(run)).figures) < set(whole) or name in (
        "config.yaml",
        "environment.json",
        "split.npz",
    )


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("damage", [b"", b"\x00\xff[1, 2", b"{}"])
def test_a_damaged_part_never_stops_the_report(run: Path, name: str, damage: bytes) -> None:
    (run / name).write_bytes(damage)
    assert Outline(render(run)).seen.count("main") == 1


@pytest.mark.parametrize(
    "name", ["detection.json", "rounds.jsonl", "result.json", "environment.json", "config.yaml"]
)
def test_values_of_the_wrong_kind_never_stop_the_report(run: Path, name: str) -> None:
    text = (run / name).read_text()
    for wrong in ('"x"', "null", "1e999", "-3", "[[1]]"):
        (run / name).write_text(
            re.sub(r"(?<=[:\[,] )(\d[\d.]*|true|false|null)(?=[,\]\}\n])", wrong, text)
        )
        assert Outline(render(run)).seen.count("main") == 1


def test_a_half_written_last_line_is_not_damage_but_a_broken_middle_is(run: Path) -> None:
    log = run / "rounds.jsonl"
    log.write_text(log.read_text() + '{"round": 6, "ba')
    assert read(run).missing == [] and len(read(run).rounds) == 5
    log.write_text("broken\n" + log.read_text())
    assert read(run).missing == [("rounds.jsonl", "has 1 damaged line, which is left out")]


def test_parts_of_another_run_are_not_mixed_in(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", clients=9, classes=4)
    for name in ("detection.json", "clients.csv", "rounds.jsonl"):
        shutil.copy(other / name, run / name)
    found = read(run)
    assert {name for name, _ in found.missing} == {"detection.json", "clients.csv", "rounds.jsonl"}
    assert Outline(render(run)).figures == ["partition", "bacc", "time"]


def test_a_folder_without_a_run_is_a_clear_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has nothing of a run in it"):
        read(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        read(tmp_path / "nowhere")


def test_an_older_split_without_newer_parts_is_read(run: Path) -> None:
    with np.load(run / "split.npz") as file:
        kept = {
            name: file[name]
            for name in file
            if name not in ("validation", "leakage", "rates", "fingerprint")
        }
    np.savez(run / "split.npz", **kept)
    assert read(run).missing == [] and "partition" in Outline(render(run)).figures


def test_a_run_on_flower_has_its_sites_names_and_misses_nothing(run: Path) -> None:
    (run / "split.npz").unlink()
    (run / "flower.json").write_text("{}")
    names = [f"hospital {k}" for k in range(6)]
    (run / "sites.json").write_text(
        json.dumps({"sites": names, "classes": ["x", "y", "z"], "shape": [8, 8, 1]})
    )
    found = read(run)
    assert (
        found.missing == []
        and found.names == dict(enumerate(names))
        and found.classes == ("x", "y", "z")
    )
    assert "hospital 2" in said(run) and "Whether that is right is not known" in said(run)


# Running, stopped, finished


def test_stopped_running_and_finished_runs_are_told_apart(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", finished=False)
    assert read(path).status == "unfinished" and f"fednoro resume {path}" in said(path)
    hold = (
        "import sys, time; from fednoro.core.files import take_lock; f = "
        "open(sys.argv[1], 'w'); take_lock(f)"
    )
    wait = "print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", f"{hold}; {wait}", str(path / ".lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        assert read(path).status == "running" and "The run goes on: 5 of 5 rounds" in said(path)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    assert read(path).status == "unfinished"
    (path / "result.json").write_text("{}")
    assert read(path).status == "finished"


def test_only_the_page_of_a_watched_unfinished_run_reloads_itself(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", finished=False)
    assert 'http-equiv="refresh"' in render(path, watching=True)
    assert 'http-equiv="refresh"' not in render(path)
    (path / "result.json").write_text("{}")
    assert 'http-equiv="refresh"' not in render(path, watching=True)


def test_watching_follows_the_files_and_ends_with_the_run(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", finished=False)
    lines = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (path / "rounds.jsonl").write_text("".join(lines[:2]))
    pages: list[str] = []

    def events() -> list[Callable[[], object]]:
        return [
            lambda: None,
            lambda: (path / "rounds.jsonl").write_text("".join(lines[:4])),
            lambda: (path / "rounds.jsonl").write_text("".join(lines)),
            lambda: (path / "result.json").write_text("{}"),
        ]

    def record(folder: Path, watching: bool = False) -> Path:
        target = write_report(folder, watching)
        pages.append(target.read_text(encoding="utf-8"))
        return target

    coming = iter(events())
    watch_run(path, record, lambda _: next(coming)())
    done = [re.search(r"(\d) rounds in", page) for page in pages]
    assert [match and match.group(1) for match in done] == ["4", "5", "5", "5"][: len(pages)]
    assert "refresh" in pages[0] and 'http-equiv="refresh"' not in pages[-1]
    assert not list(path.glob(".*.tmp"))


def test_a_report_that_fails_is_a_warning_and_no_more(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "report.html").mkdir()
    warned: list[str] = []
    write_or_warn(run, warned.append)
    assert (
        len(warned) == 1
        and "the report could not be written" in warned[0]
        and "\n" not in warned[0]
    )


# What it says


def test_the_answer_names_the_noisy_clients_and_how_firm_that_is(run: Path) -> None:
    recorded = read(run)
    found = findings(recorded, read_verdict(recorded))
    assert found.flagged == ("client 02", "client 05")
    assert found.headline.startswith("2 of 6 clients look noisy")
    assert found.noisy[0] == "These are exactly the 2 clients whose labels were made wrong."
    assert found.noisy[1].startswith("Firm: 9 other starting points")


def test_wrong_verdicts_are_named(run: Path) -> None:
    detection = json.loads((run / "detection.json").read_text())
    for k, noisy in (("2", False), ("0", True)):
        detection["clients"][k] |= {"noisy": noisy, "posterior": float(noisy)}
    (run / "detection.json").write_text(json.dumps(detection))
    recorded = read(run)
    line = findings(recorded, read_verdict(recorded)).noisy[0]
    assert "missed: client 02" in line and "falsely flagged: client 00" in line


def test_groups_that_are_not_there_are_called_not_firm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=20, classes=8, known=False)
    detection = json.loads((run / "detection.json").read_text())
    rng = np.random.default_rng(1)
    from fednoro.detection.mixture_detector import NoisyClientDetector

    losses = rng.normal(1, 0.2, (20, 8))
    detector = NoisyClientDetector(seed=0).fit(losses)
    for k, row in detection["clients"].items():
        row |= {"losses": losses[int(k)].tolist(), "counts": [5] * 8}
        row |= {
            "noisy": bool(detector.noisy_[int(k)]),
            "posterior": float(detector.posterior_[int(k)]),
        }
    (run / "detection.json").write_text(json.dumps(detection))
    recorded = read(run)
    verdicts = read_verdict(recorded)
    assert verdicts is not None and verdicts.reproduced
    text = said(run)
    assert "but not firmly" in text and "There may be no two groups at all" in text
    assert "The mixture splits the clients in two whatever they are" in text


def test_unknown_truth_is_never_shown_as_clean(tmp_path: Path) -> None:
    page = render(make_run(tmp_path / "run", known=False))
    assert "truly" not in page and "the truth is not known" in page


def test_a_method_that_judges_nobody_says_so_and_has_no_detection(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", method="fedavg")
    assert Outline(render(run)).figures == [
        "partition",
        "bacc",
        "recall",
        "confusion",
        "weights",
        "time",
    ]
    assert "fedavg has not judged the clients" in said(run)


@pytest.mark.parametrize(
    ("noisy", "count", "whom"), [([0, 3], "2", "client 00 and client 03"), ([], "none", "nobody")]
)
def test_clients_that_the_user_names_are_not_said_to_want_judging(
    tmp_path: Path, noisy: list[int], count: str, whom: str
) -> None:
    run = make_run(tmp_path / "run", method="fednoro-plus")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["method"] |= {"noisy": noisy}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = said(run)
    assert f"; {count} of 6 clients named noisy by the user." in text
    assert (
        f"Named noisy by the user with method.noisy: {whom}." in text
        and "leave method.noisy out" in text
    )
    assert "run the same with method=fednoro" not in text
    assert (">named noisy<" in render(run)) == bool(noisy)


def test_other_marks_of_noise_have_figures_of_their_own(run: Path) -> None:
    detection = json.loads((run / "detection.json").read_text())
    for marks, figure in (
        ({"mu": 0.3, "lid": 2.0}, "level"),
        ({"explained": 0.3}, "explained"),
        ({"explained": 0.3, "error": 0.2, "doubt": 0.4}, "doubt"),
        ({"explained": 1.0, "error": None, "doubt": None}, "explained"),
    ):
        rows = {
            k: {"noisy": row["noisy"], "posterior": 0.7, **marks}
            for k, row in detection["clients"].items()
        }
        (run / "detection.json").write_text(
            json.dumps({"reason": "so", "cut": 0.4, "clients": rows})
        )
        page = Outline(render(run))
        assert page.figures[1:3] == ["posterior", figure] and "class losses" not in " ".join(
            page.words
        )


def test_warnings_failures_and_leaks_are_things_to_distrust(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for record in lines[1:3]:
        record["warnings"] = ["client 3 is left out: it <broke>"]
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    log = (run / "clients.csv").read_text()
    (run / "clients.csv").write_text(log.replace(",ok,", ",failed,", 3))
    with np.load(run / "split.npz") as file:
        parts = {name: file[name] for name in file}
    leak = {"test": {"samples": 0, "identical_images": 7}}
    np.savez(run / "split.npz", **{**parts, "leakage": np.array(json.dumps(leak))})
    text = said(run)
    assert "Warned in 2 rounds, first in 2: client 3 is left out: it <broke>" in text
    assert "3 of 30 answers are missing" in text
    assert "The test part shares 7 identical images with what was trained on" in text


def test_stages_are_stretches_of_rounds(run: Path) -> None:
    assert read(run).stages == [
        ("warm-up", 1, WARMUP, 0.5 * WARMUP),
        ("noise-robust training", 3, 5, 1.5),
    ]
