"""`fednoro bench` as people use it: all rows, what is written, stopping and going on, failures."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import fednoro
from fednoro.bench.tables import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = (
    "--data",
    "digits",
    "--rates",
    "0.4",
    "--ranges",
    "0.5-0.7",
    "--seeds",
    "0",
    "--rounds",
    "4",
    "device=cpu",
    "data={name: synthetic, images: 120, classes: 3, size: 8, channels: 1}",
    "partition={name: iid, clients: 5}",
    "noise={name: symmetric}",
    "model={name: cnn, width: 4}",
    "train.epochs=1",
    "train.batch=16",
)
COMMAND = (sys.executable, "-m", "fednoro", "bench")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line's entry point in this process: exit code, and what it printed."""
    with warnings.catch_warnings():
        # typer uses what click is about to drop
        warnings.simplefilter("ignore", DeprecationWarning)
        from fednoro.cli import main

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fednoro", "bench", *args])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as end:
            main()
        return (int(end.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def table1(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("bench") / "out"
    command = [*COMMAND, "table1", *TINY, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def test_all_nine_methods_are_run_and_written(table1: tuple[Path, str]) -> None:
    out, text = table1
    assert {path.name for path in (out / "runs").iterdir()} == {
        f"synthetic-{method}-rho0.4-eta0.5-0.7-seed0" for method in METHODS
    }
    with (out / "table1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == list(METHODS)
    for row in rows:
        run = fednoro.load(out / row["folder"])
        assert (float(row["best"]), float(row["last"])) == (run.best, run.last)
        for kind in ("md", "tex"):
            assert f"{100 * run.best:.2f}" in (out / f"table1.{kind}").read_text()
        assert f"{100 * run.last:.2f}" in text
    for written in (text, (out / "table1.md").read_text()):
        assert (
            f"Made by: fednoro bench table1 {' '.join(TINY[:4])}" in written
            and "Seed 0." in written
        )


def test_a_finished_bench_does_nothing_again_and_other_rounds_want_another_folder(
    table1: tuple[Path, str], call: Call
) -> None:
    out, text = table1
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    code, again, err = call("table1", *TINY, "--out", str(out))
    assert (code, err) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == before
    assert again[again.index("BACC (%)") :] == text[text.index("BACC (%)") :]
    code, _, err = call("table1", *TINY, "--out", str(out), "--rounds", "5")
    assert code == 2 and err.count("\n") == 1
    assert "made with train.rounds=4, asked is 5: use another --out" in err


def test_ctrl_c_with_two_workers_leaves_a_bench_that_goes_on_to_the_same_bits(
    table1: tuple[Path, str], tmp_path: Path, call: Call
) -> None:
    out, rows = tmp_path / "out", "fedavg,fedla,fednoro"
    asked = ["table1", *TINY, "--out", str(out), "--methods", rows, "checkpoint_every=1"]
    running = subprocess.Popen(
        [*COMMAND, *asked, "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(out.glob("federations/*/split.npz")):
        assert running.poll() is None
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    text, err = running.communicate(timeout=120)
    assert (running.returncode, err) == (130, "")
    assert text.endswith("stopped; the same command goes on from here\n")
    assert len(list(out.glob("runs/*/result.json"))) < 3
    code, text, err = call(*asked)
    assert (code, err) == (0, "")
    for method in rows.split(","):
        name = f"runs/synthetic-{method}-rho0.4-eta0.5-0.7-seed0/model.safetensors"
        assert (out / name).read_bytes() == (table1[0] / name).read_bytes(), method


def test_a_run_that_fails_is_a_gap_with_its_reason_and_the_rest_goes_on(
    tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    (out / "runs" / "synthetic-fedprox-rho0.4-eta0.5-0.7-seed0").write_text("in the way")
    code, text, err = call("table1", *TINY, "--out", str(out), "--methods", "fedprox,fedavg")
    assert (code, err) == (1, "")
    assert "fedprox-rho0.4-eta0.5-0.7-seed0  failed: " in text
    lines = (out / "table1.md").read_text().splitlines()
    assert "| FedProx | Best | – |" in lines
    assert any(
        line.startswith("Failed: runs/synthetic-fedprox-rho0.4-eta0.5-0.7-seed0: ")
        for line in lines
    )
    run = fednoro.load(out / "runs" / "synthetic-fedavg-rho0.4-eta0.5-0.7-seed0")
    assert f"| FedAvg | Best | {100 * run.best:.2f} |" in lines


def test_the_ablations_and_figures_are_written_from_one_folder(
    table1: tuple[Path, str], call: Call
) -> None:
    pytest.importorskip("matplotlib")
    out, _ = table1
    runs = set((out / "runs").iterdir())
    code, text, err = call("all", *TINY, "--out", str(out), "--mixture-seeds", "30")
    assert (code, err) == (0, "")
    assert {
        path.name.removeprefix("synthetic-fednoro-")
        for path in set((out / "runs").iterdir()) - runs
    } == {f"{row}-rho0.4-eta0.5-0.7-seed0" for row in ("clean-only", "daagg-only", "kd-only")}
    assert len(list((out / "federations").iterdir())) == 1
    for name, kinds in {
        "table1": "md tex csv",
        "table2": "md tex csv",
        "table3": "md tex csv",
        "table4": "md tex csv",
        "figure-partition": "png pdf svg csv",
        "figure-t1": "png pdf svg csv",
    }.items():
        for kind in kinds.split():
            assert (out / f"{name}.{kind}").stat().st_size > 100, (name, kind)
    assert "KD and DaAgg (FedNoRo)" in text and "Over 30 mixture seeds" in text


def test_mistakes_are_one_line(call: Call) -> None:
    for args, about in (
        (("table1",), "data.path is required"),
        (("table1", "digits"), "data sets go with --data"),
        (
            ("table1", "--data", "digits", "--methods", "fedsomething"),
            "--methods must be among fedavg",
        ),
        (("table4", "--quick", "--rates", "a"), "--rates must be numbers"),
        (("table3", "--quick", "--ranges", "0.5"), "--ranges must be pairs"),
        (("table2", "--quick", "--seeds", "x"), "seed must be a number, a list or a range"),
    ):
        code, _, err = call(*args)
        assert code == 2 and err.count("\n") == 1 and about in err, (args, err)


def test_figures_without_matplotlib_say_what_to_install(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    code, _, err = call("figure-partition", "--quick", "--out", str(out))
    assert code == 2 and "pip install 'fednoro[report]'" in err and not out.exists()
