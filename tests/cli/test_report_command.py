"""`fednoro report`, `compare` and `figures` as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from run_folders import make_run
from typer.testing import CliRunner

from fednoro.cli import app
from fednoro.core.types import UserError


def typed(*words: object) -> str:
    ended = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_report_writes_the_page_and_says_where(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "".join(typed("report", run).split()) == "".join(f"wrote {run / 'report.html'}".split())
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_report_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "report.html").write_text("old")
    before = {path.name for path in run.iterdir()}
    typed("report", run)
    assert {path.name for path in run.iterdir()} == before and (
        run / "report.html"
    ).stat().st_size > 1000


def test_watching_a_finished_run_ends_at_once(tmp_path: Path) -> None:
    assert "watching" in typed("report", make_run(tmp_path / "run"), "--watch")


def test_compare_prints_its_tables_and_writes_both_files(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{m}{s}", method=m, seed=s)
        for m in ("fednoro", "fedavg")
        for s in range(2)
    ]
    out = typed("compare", *runs, "--to", tmp_path / "both.v1")
    assert "mean ± std" in out and "paired by seed" in out and "2 of 2" not in out.split("wrote")[1]
    assert (tmp_path / "both.v1.html").exists() and (tmp_path / "both.v1.csv").exists()


def test_compare_shows_names_whole_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [
        make_run(tmp_path / f"{m}{s}", method=m, seed=s)
        for m in ("fednoro-plus", "fedcorr-la")
        for s in range(3)
    ]
    lines = typed("compare", *runs, "--to", tmp_path / "both").splitlines()
    assert max(map(len, lines[: lines.index("")])) <= 80
    rows = [line.split() for line in lines if line.startswith("fed")]
    assert [row[0] for row in rows] == ["fednoro-plus", *["fedcorr-la"] * 4]
    assert [row[1] for row in rows[2:]] == ["fednoro-plus"] * 3


def test_compare_folds_labels_that_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    name = "a-partition-whose-name-is-longer-than-its-column-can-be"
    for run, chosen in zip(runs, ("iid", name), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "partition": {"name": chosen}}))
    out = typed("compare", *runs, "--to", tmp_path / "both")
    assert "…" not in out
    lines = out.split("\n\n")[0].splitlines()
    width = next(line.index("seeds") for line in lines if "seeds" in line)
    assert "".join(line[:width].strip() for line in lines).endswith(f"fednoro,partition={name}")


def test_figures_go_into_the_run_folder_unless_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    typed("figures", run, "--format", "svg", "--only", "ramp,time", "--column")
    assert sorted(path.name for path in (run / "figures").iterdir()) == ["ramp.svg", "time.svg"]


@pytest.mark.parametrize("formats", ["gif", "png,gif", "", ","])
def test_unknown_formats_are_refused(tmp_path: Path, formats: str) -> None:
    with pytest.raises(UserError, match="--format takes png, pdf, svg"):
        typed("figures", make_run(tmp_path / "run"), "--format", formats)
