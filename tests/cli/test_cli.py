"""The command line as people use it: real processes, exit codes, what they print
and what they leave on disk.
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import fednoro
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.experiment.config.configuration import REGISTRIES, dump, presets, resolve

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDS, WARMUP, CLIENTS = 60, 5, 5
TINY = (  # whole sections, so that a test may choose another part and leave these options behind
    "digits",
    "data={name: synthetic, images: 160, classes: 4, size: 8, channels: 1, difficulty: 0.1}",
    f"partition={{name: bernoulli_dirichlet, clients: {CLIENTS}}}",
    "noise={name: h_idn, epochs: 40}",
    "model={name: cnn, width: 4}",
    f"method={{name: fednoro, warmup: {WARMUP}}}",
    f"train.rounds={ROUNDS}",
    "train.epochs=1",
    "train.batch=32",
    "train.lr=0.01",
    "device=cpu",
)
BRIEF = (*TINY, "train.rounds=2", "method={warmup: 1}", "noise={epochs: 1}")
COMMAND = (sys.executable, "-m", "fednoro")
SCRIPT = str(Path(sys.executable).with_name("fednoro"))
ENVIRONMENT = {
    **{
        key: value
        for key, value in os.environ.items()
        if key not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")
    },
    "OMP_NUM_THREADS": "1",  # on busy cores the threads of a tiny network wait for each other
    "TERM": "xterm-256color",
}


class Ended(NamedTuple):
    """What became of a command."""

    code: int
    out: str
    err: str


def process(
    *args: str, cwd: Path | None = None, command: tuple[str, ...] = COMMAND, **environment: str
) -> Ended:
    """Runs the command line as a process of its own."""
    done = subprocess.run(
        [*command, *args],
        capture_output=True,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


Call = Callable[..., Ended]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line's entry point in this process: a second, not five."""
    with warnings.catch_warnings():
        # typer uses what click is about to drop
        warnings.simplefilter("ignore", DeprecationWarning)
        from fednoro.cli import main

    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fednoro", *args])
        monkeypatch.setattr(sys, "path", [*sys.path])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    out = tmp_path_factory.mktemp("finished")
    ended = process("run", *TINY, f"out={out}")
    assert ended.code == 0, ended
    return ended, out / "synthetic-fednoro-seed0"


def assert_one_line(ended: Ended, about: str) -> None:
    """A user's mistake: exit code 2, and one line that says what is wrong."""
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1 and ended.err.startswith("error: "), ended.err
    assert about in ended.err, ended.err
    assert "Traceback" not in ended.out + ended.err and "\x1b" not in ended.err


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def assert_same_run(folder: Path, other: Path) -> None:
    for name in ("model.safetensors", "clients.csv", "detection.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for mine, theirs in zip(records(folder), records(other), strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}


# A run to the end


def test_a_run_ends_well_and_says_so_in_plain_lines(finished: tuple[Ended, Path]) -> None:
    (code, out, err), folder = finished
    assert (code, err) == (0, "")
    assert "\x1b" not in out and "\r" not in out
    lines = out.splitlines()
    progress = [line for line in lines if re.match(r"round +\d+/60 ", line)]
    assert [int(re.findall(r"\d+", line)[0]) for line in progress] == list(range(1, ROUNDS + 1))
    assert all(re.search(r"BACC +[\d.]+%  best +[\d.]+%  ETA \d+ s$", line) for line in progress)
    stages = Counter(re.sub(r"^round +\d+/60  (.*?)  .*", r"\1", line) for line in progress)
    assert stages == {"warm-up": WARMUP, "noise-robust training": ROUNDS - WARMUP}
    assert str(folder) in lines[-1]
    assert any(line.startswith("after round 5: ") for line in lines)
    verdicts = [line for line in lines if re.search(r"client \d .*(noisy|clean)", line)]
    assert len(verdicts) == CLIENTS


def test_the_run_folder_holds_what_it_should(finished: tuple[Ended, Path]) -> None:
    folder = finished[1]
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "environment.json",
        "split.csv",
        "split.npz",
        "rounds.jsonl",
        "clients.csv",
        "detection.json",
        "checkpoints",
        "model.safetensors",
        "result.json",
        "report.html",
        ".lock",
    }
    made = resolve(folder / "config.yaml")
    assert made == resolve(TINY[0], [*TINY[1:], f"out={folder.parent}"])
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["device"] == "cpu" and environment["command"][1:3] == ["run", "digits"]
    assert (
        sorted(path.name for path in (folder / "checkpoints").iterdir())[-1]
        == "round-00060.safetensors"
    )


def test_every_round_is_recorded_with_consistent_figures(finished: tuple[Ended, Path]) -> None:
    folder = finished[1]
    assert [record["round"] for record in records(folder)] == list(range(1, ROUNDS + 1))
    with np.load(folder / "split.npz") as split:
        tested = np.bincount(split["clean"][split["test"]], minlength=4)
    for record in records(folder):
        confusion = np.array(record["confusion"])
        np.testing.assert_array_equal(confusion.sum(1), tested)
        np.testing.assert_allclose(record["recall"], confusion.diagonal() / tested)
        assert record["bacc"] == pytest.approx(np.mean(record["recall"]))
        assert record["loss"] > 0 and record["train_loss"] > 0 and record["seconds"] > 0


def test_every_client_is_logged_in_every_exchange(finished: tuple[Ended, Path]) -> None:
    folder = finished[1]
    with (folder / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    trained = [row for row in rows if row["task"] == "train"]
    assert len(trained) == ROUNDS * CLIENTS and len(rows) - len(trained) == CLIENTS
    assert {row["round"] for row in rows if row["task"] == "score"} == {str(WARMUP + 1)}
    with np.load(folder / "split.npz") as split:
        assert [int(row["size"]) for row in rows[:CLIENTS]] == split["sizes"].tolist()
    for number in range(1, ROUNDS + 1):
        weights = [float(row["weight"]) for row in trained if row["round"] == str(number)]
        assert len(weights) == CLIENTS and sum(weights) == pytest.approx(1, abs=1e-4)
    flagged = json.loads((folder / "detection.json").read_text())["flagged"]
    later = [row for row in trained if int(row["round"]) > WARMUP]
    assert {int(row["client"]) for row in later if row["lam"]} == set(flagged)


def test_the_split_says_what_was_flipped(finished: tuple[Ended, Path]) -> None:
    with np.load(finished[1] / "split.npz") as split:
        np.testing.assert_array_equal(split["flipped"], split["clean"] != split["observed"])
        np.testing.assert_array_equal(np.sort(split["members"]), np.sort(split["train"]))
        assert not set(split["train"]) & set(split["test"])
        assert not split["flipped"][split["test"]].any() and split["flipped"].any()
        parts = np.split(split["flipped"][split["members"]], np.cumsum(split["sizes"])[:-1])
        np.testing.assert_allclose([part.mean() for part in parts], split["rates"])
        np.testing.assert_array_equal(split["rates"] > 0, split["noisy"])
        assert split["noisy"].sum() == round(0.4 * CLIENTS)


def test_the_detection_is_judged_against_the_truth(finished: tuple[Ended, Path]) -> None:
    folder = finished[1]
    judged = json.loads((folder / "detection.json").read_text())
    with np.load(folder / "split.npz") as split:
        truth = set(np.flatnonzero(split["noisy"]).tolist())
    flagged = {int(k) for k, row in judged["clients"].items() if row["noisy"]}
    assert (
        set(judged["flagged"]) == flagged
        and set(judged["noisy"]) == truth
        and len(judged["clients"]) == CLIENTS
    )
    assert judged["recall"] == pytest.approx(len(flagged & truth) / len(truth))
    assert judged["precision"] == pytest.approx(
        len(flagged & truth) / len(flagged) if flagged else 1
    )
    assert judged["exact"] == (flagged == truth)


def test_the_saved_model_reproduces_the_final_figures(finished: tuple[Ended, Path]) -> None:
    folder, config = finished[1], resolve(finished[1] / "config.yaml")
    data = config.data.load(config.seed)
    net = config.model.build(1, 4)
    net.load_state_dict(load_file(folder / "model.safetensors"))
    with np.load(folder / "split.npz") as split:
        test = split["test"]
    x = torch.from_numpy((data.images[test].transpose(0, 3, 1, 2) / 255 - 0.449) / 0.226).float()
    with torch.no_grad():
        predicted = net.eval()(x).argmax(1).numpy()
    truth = data.labels[test]
    bacc = np.mean([(predicted[truth == c] == c).mean() for c in range(4)])
    assert bacc == pytest.approx(records(folder)[-1]["bacc"], abs=1e-12)
    assert bacc > 0.3, "a model that learned nothing would prove little"


def test_the_result_is_best_last_and_final(finished: tuple[Ended, Path]) -> None:
    folder = finished[1]
    bacc = [record["bacc"] for record in records(folder)]
    run = fednoro.load(folder)
    assert (run.best, run.final, run.folder) == (max(bacc), bacc[-1], folder)
    assert run.last == pytest.approx(np.mean(bacc[-10:])) and run.bacc == tuple(bacc)
    assert run.detection == json.loads((folder / "detection.json").read_text())
    assert f"best {run.best:.2%}  last {run.last:.2%}" in finished[0].out
    result = json.loads((folder / "result.json").read_text())
    assert bacc[result["best_round"] - 1] == run.best and result["rounds"] == ROUNDS


def test_several_seeds_end_in_a_table_with_mean_and_deviation(tmp_path: Path) -> None:
    code, out, err = process("run", *BRIEF, f"out={tmp_path}", "name=x", "seed=0..1", "--quiet")
    assert (code, err) == (0, "")
    runs = [fednoro.load(tmp_path / f"x-seed{seed}") for seed in (0, 1)]
    assert [run.config.seed for run in runs] == [0, 1]
    table = out[out.index("2 seeds") :]
    for name in ("best", "last", "final"):
        values = np.array([getattr(run, name) for run in runs])
        assert f"{100 * values.mean():.2f} ± {100 * values.std(ddof=1):.2f}" in table
    for run in runs:
        assert f"{run.best:.2%}" in table


# Ctrl-C, full disks, resuming


def test_ctrl_c_in_a_terminal_leaves_a_run_that_resumes_to_the_same_bits(
    finished: tuple[Ended, Path], tmp_path: Path
) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))

    def own_the_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    command = [*COMMAND, "run", *TINY, f"out={tmp_path}"]
    running = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=own_the_terminal,
        env=ENVIRONMENT,
    )
    os.close(slave)
    folder, screen, pressed = tmp_path / "synthetic-fednoro-seed0", b"", False
    log = folder / "rounds.jsonl"
    try:
        while True:
            screen += os.read(master, 65536)
            if not pressed and log.exists() and log.read_bytes().count(b"\n") >= WARMUP + 3:
                os.write(master, b"\x03")
                pressed = True
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(master)
        assert running.wait(60) == 130
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.decode())
    assert pressed and f"stopped; carry on with: fednoro resume {folder}" in text.replace(
        "\r\n", "\n"
    )
    assert "Traceback" not in text
    assert b"\x1b[?25l" in screen and screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l"), (
        "the cursor is back"
    )
    assert re.search(r"(warm-up|noise-robust training).*round \d+/60 .*BACC .*ETA", text)
    assert len(re.findall(r"client \d +│ +\d+ │ +[\d.]+ │ (?:noisy|clean)", text)) == CLIENTS
    assert not (folder / "result.json").exists() and records(folder)[-1]["round"] < ROUNDS

    ended = process("resume", str(folder))
    assert (ended.code, ended.err) == (0, "")
    assert re.search(r"going on after round \d+", ended.out)
    assert_same_run(folder, finished[1])


def test_sigterm_ends_a_run_as_ctrl_c_does_with_143(
    finished: tuple[Ended, Path], tmp_path: Path
) -> None:
    running = subprocess.Popen(
        [*COMMAND, "run", *TINY, f"out={tmp_path}", "name=x"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    folder = tmp_path / "x"
    while (
        not (log := folder / "rounds.jsonl").exists() or log.read_bytes().count(b"\n") < WARMUP + 3
    ):
        assert running.poll() is None
        time.sleep(0.01)
    for _ in range(3):  # some schedulers say it more than once
        running.terminate()
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (143, b"")
    assert out.decode().endswith(f"stopped; carry on with: fednoro resume {folder}\n")
    assert_one_line(
        process("run", *TINY, f"out={tmp_path}", "name=x"),
        f"carry it on with: fednoro resume {folder}",
    )
    assert process("resume", str(folder)).code == 0
    assert_same_run(folder, finished[1])


def test_an_interrupt_before_the_first_round_is_resumable_too(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [*COMMAND, "run", *TINY, f"out={tmp_path}", "noise.epochs=100000", "name=x"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not (tmp_path / "x" / "environment.json").exists():
        assert running.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, b"")
    assert out.decode().endswith(f"stopped; carry on with: fednoro resume {tmp_path / 'x'}\n")
    assert (tmp_path / "x" / "config.yaml").exists() and not (tmp_path / "x" / "split.npz").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(filler: Path, leave: int) -> None:
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            file.truncate(file.tell() - leave)


def test_a_full_disk_is_one_line_and_the_run_resumes_once_there_is_space(
    small_disk: Path, finished: tuple[Ended, Path], call: Call
) -> None:
    filler = small_disk / "filler"
    fill(filler, leave=0)
    assert_one_line(
        call("run", *TINY, f"out={small_disk}", "name=none"), "no space left while writing"
    )
    assert not (small_disk / "none").exists(), "a run that never began leaves nothing"

    fill(filler, leave=64 * 1024)
    ended = process("run", *TINY, f"out={small_disk}", "name=x", "checkpoint_every=1")
    folder = small_disk / "x"
    assert_one_line(ended, f"no space left while writing {folder}")
    assert WARMUP < len((folder / "rounds.jsonl").read_text().splitlines()) < ROUNDS

    filler.unlink()
    ended = process("resume", str(folder))
    assert (ended.code, ended.err) == (0, "")
    assert_same_run(folder, finished[1])


def test_resuming_a_finished_run_shows_it_and_changes_nothing(
    finished: tuple[Ended, Path], call: Call
) -> None:
    folder = finished[1]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    code, out, err = call("resume", str(folder))
    assert (code, err) == (0, "") and f"best {fednoro.load(folder).best:.2%}" in out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_resuming_what_is_no_run_is_one_line(call: Call, tmp_path: Path) -> None:
    assert_one_line(
        call("resume", str(tmp_path)), f"{tmp_path} is not a run folder: it has no config.yaml"
    )
    assert_one_line(call("resume", str(tmp_path / "none")), f"{tmp_path / 'none'} does not exist")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.yaml").write_text("train: [")
    assert_one_line(call("resume", str(tmp_path)), "config.yaml is not valid YAML")


def images(folder: Path, count: int = 12) -> Path:
    rng = np.random.default_rng(0)
    for name in ("ill", "well"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
                folder / name / f"{i}.png"
            )
    return folder


def test_a_run_whose_images_have_changed_is_not_resumed(call: Call, tmp_path: Path) -> None:
    data = images(tmp_path / "images")
    ended = call(
        "run",
        *BRIEF,
        "data=folder",
        f"data.path={data}",
        f"data.cache={tmp_path / 'cache'}",
        "data.size=8",
        "partition=iid",
        "partition.clients=3",
        f"out={tmp_path}",
        "name=x",
    )
    assert ended.code == 0 and "preparing images" in ended.out
    folder = tmp_path / "x"
    (folder / "result.json").unlink()
    assert call("resume", str(folder)).code == 0, "the same images, still there"

    (folder / "result.json").unlink()
    Image.new("RGB", (8, 8), "red").save(data / "ill" / "0.png")
    assert_one_line(
        call("resume", str(folder)),
        f"the data has changed since {folder} began: it cannot be resumed",
    )
    (data / "ill" / "0.png").unlink()
    assert_one_line(call("resume", str(folder)), "the data has changed")
    shutil.rmtree(data)
    assert_one_line(call("resume", str(folder)), f"data.path {data} does not exist")


# Mistakes


def broken_images(folder: Path) -> Path:
    for name in ("ill", "well"):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            (folder / name / f"{i}.png").write_bytes(b"not an image")
    return folder


LONG = "a" * 90 + "/" + "b" * 90 + "/" + "c" * 90 + ".yaml"


def test_a_mistake_is_one_line_on_stderr_exit_code_2_and_no_run_folder(tmp_path: Path) -> None:
    pictures, labels, file = (
        broken_images(tmp_path / "pictures"),
        tmp_path / "labels.csv",
        tmp_path / "file",
    )
    labels.write_text("id,label\nnobody,3\n")
    file.write_text("")
    commands = {
        "unknown key train.round: did you mean rounds?": ["run", *BRIEF, "train.round=3"],
        f"{LONG!r} is neither a preset (digits, ham10000, ich, isic2019) nor a file": ["run", LONG],
        f"6 of 6 images in {pictures} could not be read": [
            "run",
            *BRIEF,
            "data=folder",
            f"data.path={pictures}",
            f"data.cache={tmp_path / 'cache'}",
        ],
        f"{labels}, line 2: no sample has the id 'nobody'": [
            "run",
            *BRIEF,
            "noise=from_file",
            f"noise.path={labels}",
        ],
        f"cannot write {file / 'synthetic-fednoro-seed0'}: Not a directory": [
            "run",
            *BRIEF,
            f"out={file}",
        ],
        "--bogus. See: fednoro run --help": ["run", "--bogus"],
    }
    homes = [tmp_path / f"home {i}" for i in range(len(commands))]
    for home in homes:
        home.mkdir()
    with ThreadPoolExecutor(2) as pool:
        endings = list(
            pool.map(lambda args, home: process(*args, cwd=home), commands.values(), homes)
        )
    for about, ended, home in zip(commands, endings, homes, strict=True):
        assert_one_line(ended, about)
        assert [path.name for path in home.rglob("*") if path.name != "runs"] == []


@pytest.mark.parametrize(
    ("args", "about"),
    [
        (["train.rounds=many"], "train.rounds should be a valid integer"),
        (["noise.rate=1.4"], "noise.rate must be in [0, 1], got 1.4"),
        (["method.warmup=2"], "method.warmup must be below train.rounds (2), got 2"),
        (["method=fednroo"], "unknown method 'fednroo': did you mean fednoro?"),
        (["data=folder"], "data.path is required"),
        (["data=folder", "data.path=/no/such/folder"], "data.path /no/such/folder does not exist"),
        (["noise=from_file", "noise.path=/no/such.csv"], "/no/such.csv: cannot be read"),
        (["noise=transition", "noise.matrix=[[1, 0], [0, 1]]"], "noise.matrix must be 4×4"),
        (["noise=transition", "noise.matrix=/no/such.npy"], "/no/such.npy: cannot be read"),
        (
            ["model=resnet18", "model.weights=/no/such.pth"],
            "model.weights: no such file: /no/such.pth",
        ),
        (["model=no_such_module:net", "noise=none"], "'no_such_module:net' cannot be imported"),
        (["device=abacus"], "device 'abacus' is unknown: use auto, cpu, cuda"),
        (["device=cuda:99"], "device 'cuda:99' cannot be used here"),
        (["name=a/b"], "name must be a plain folder name, got 'a/b'"),
        (["name=" + "x" * 300], "File name too long"),
        (["partition.clients=200"], "200"),
        (["seed=0..x"], "seed must be a number, a list or a range"),
        (["digits"], "one preset or file at a time, got digits and digits"),
        (["partition=by_column"], "site"),
    ],
)
def test_each_mistake_is_named_and_leaves_no_run_folder(
    args: list[str], about: str, call: Call, tmp_path: Path
) -> None:
    assert_one_line(call("run", *BRIEF, f"out={tmp_path / 'runs'}", *args), about)
    assert list(tmp_path.rglob("runs/*")) == []


def test_a_name_that_is_taken_is_refused_and_the_folder_left_alone(
    finished: tuple[Ended, Path], call: Call, tmp_path: Path
) -> None:
    folder = finished[1]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    ended = call("run", *TINY, f"out={folder.parent}", f"name={folder.name}")
    assert ended.err == f"error: {folder} exists already: choose another name=\n", (
        "there is nothing to carry on"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    assert_one_line(
        call("run", *BRIEF, f"out={tmp_path}", "name=precious", "noise=from_file", "noise.path=x"),
        "exists",
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["precious", "notes.txt"]


@pytest.mark.parametrize(
    "args", [["nonsense"], ["run", "--rounds", "3"], ["resume"], ["ls", "a", "b"]]
)
def test_wrong_usage_is_one_line_that_points_to_the_help(args: list[str], call: Call) -> None:
    assert_one_line(call(*args), "--help")
    assert_one_line(call("bench", "tabel1"), "? See: fednoro bench --help")


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["run", "--seed", "3"], "seed=3"),
        (["run", "digits", "--method=fedavg"], "method=fedavg"),
        (["run", "--train.rounds", "5"], "train.rounds=5"),
        (["run", "--checkpoint-every", "5"], "checkpoint_every=5"),
        (["run", "--out", "my runs"], "out='my runs'"),
        (["config", "--seed"], "seed=…"),
    ],
)
def test_an_override_that_is_written_as_an_option_is_answered_with_the_override(
    args: list[str], meant: str, call: Call
) -> None:
    flag = next(arg for arg in args if arg.startswith("--")).partition("=")[0]
    assert_one_line(
        call(*args), f"no such option: {flag}; did you mean {meant}? See: fednoro {args[0]} --help"
    )


@pytest.mark.parametrize(
    ("torn", "whole"),
    [
        (["method.noisy=[0,", "3]"], "method.noisy=[0, 3]"),
        (
            ["seed=1", "model={name:", "cnn,", "width:", "4}", "device=cpu"],
            "model={name: cnn, width: 4}",
        ),
    ],
)
def test_a_list_that_the_shell_has_split_is_shown_in_quotes(
    torn: list[str], whole: str, call: Call
) -> None:
    ended = call("run", "digits", *torn)
    assert_one_line(ended, f"the shell has split {whole} at its spaces: quote it, as in '{whole}'")


def test_noise_on_own_labels_is_warned_about_on_stderr_before_anything_runs(tmp_path: Path) -> None:
    ended = process("run", "digits", "data=folder", "data.path=none", "seed=0..1", cwd=tmp_path)
    warned, failed = ended.err.splitlines()
    assert warned == "warning: noise h_idn changes your own labels: noise=none keeps them"
    assert failed == f"error: data.path {tmp_path / 'none'} does not exist" and ended.code == 2


# Looking around


def test_the_console_script_and_the_module_are_the_same_command(tmp_path: Path) -> None:
    from importlib.metadata import version

    expected = (0, f"fednoro {version('fednoro')}\n", "")
    assert process("--version") == expected == process("--version", command=(SCRIPT,), cwd=tmp_path)


def test_a_network_from_the_current_folder_and_a_terminal_without_unicode(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(channels, classes, width=3):\n"
        "    layers = nn.Linear(64 * channels, width), nn.ReLU(), nn.Linear(width, classes)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    ended = process(
        "run", *BRIEF, "model=mine:net", "model.options={width: 5}", "name=x",
        command=(SCRIPT,), cwd=tmp_path, PYTHONIOENCODING="ascii",
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, "") and "model mine:net" in ended.out
    weights = load_file(tmp_path / "runs" / "x" / "model.safetensors")
    assert weights["1.weight"].shape == (5, 64) and weights["3.weight"].shape == (4, 5)


@pytest.mark.parametrize("command", [[], ["run"], ["resume"], ["config"], ["ls"]])
def test_help_shows_examples(command: list[str], call: Call) -> None:
    code, out, _ = call(*command, "--help")
    assert code == 0 and re.search(r"Examples?:?\s+fednoro " + (command or ["run"])[0], out)
    assert call(*command, "-h").out == out


def test_config_prints_what_would_run(call: Call, tmp_path: Path) -> None:
    code, out, err = call("config", "ich", "data.path=ich", "method=fedla", "train.lr=1e-4")
    expected = resolve("ich", ["data.path=ich", "method=fedla", "train.lr=1e-4"])
    assert (code, err, out) == (0, "", dump(expected))
    file = tmp_path / "my.yaml"
    file.write_text(out)
    assert yaml.safe_load(call("config", str(file), "seed=3").out) == {
        **yaml.safe_load(out),
        "seed": 3,
    }
    assert call("config").out == dump(resolve("digits"))
    assert_one_line(call("config", "ich"), "data.path is required")


@pytest.mark.parametrize(
    ("what", "section"),
    [
        ("methods", "method"),
        ("data", "data"),
        ("partitions", "partition"),
        ("noise", "noise"),
        ("models", "model"),
    ],
)
def test_ls_shows_every_choice_with_every_option(what: str, section: str, call: Call) -> None:
    code, out, err = call("ls", what)
    assert (code, err) == (0, "")
    for name, kind in REGISTRIES[section].items():
        assert re.search(rf"^{name}  \S", out, re.M)
        for item in dataclasses.fields(kind):
            assert re.search(rf"^   {item.name} ", out, re.M), f"{name}.{item.name}"


def test_ls_alone_shows_what_can_be_listed(call: Call) -> None:
    out = " ".join(call("ls").out.split())
    for section in REGISTRIES.values():
        assert ", ".join(section) in out
    assert ", ".join(presets()) in out and "train its options" in out


def test_ls_shows_presets_and_settings(call: Call) -> None:
    out = call("ls", "presets").out
    assert all(re.search(rf"^ *{name} ", out, re.M) for name in presets())
    assert re.search(r"^   rounds +100 ", call("ls", "train").out, re.M)
    assert re.search(r"^   checkpoint_every +5 ", call("ls", "general").out, re.M)
    assert_one_line(
        call("ls", "everything"), "ls takes one of methods, data, partitions, noise, models"
    )


@pytest.mark.parametrize(
    "name", ["fednoro-plus", "folder", "pair_flip", "h_idn", "by_column", "cnn", "split"]
)
def test_ls_shows_one_entry_alone(name: str, call: Call) -> None:
    code, out, err = call("ls", name)
    assert (code, err) == (0, "")
    (head,) = re.findall(r"^(\S+)  \S", out, re.M)
    section = next((section for section, known in REGISTRIES.items() if name in known), None)
    assert head == (f"{section}={name}" if section else name)


def test_ls_shows_all_that_go_by_one_name_and_guesses_at_a_slip(call: Call) -> None:
    assert re.findall(r"^\S.*?(?=  )", call("ls", "digits").out, re.M) == [
        "data=digits",
        "fednoro run digits",
    ]
    assert_one_line(call("ls", "fednoro-puls"), "got 'fednoro-puls': did you mean fednoro-plus?")


@pytest.mark.parametrize(
    ("command", "also"), [("run", True), ("resume", False), ("prepare", False)]
)
def test_the_help_of_quiet_is_true_of_each_command(command: str, also: bool, call: Call) -> None:
    out = " ".join(re.sub("[│╭╮╰╯]", " ", call(command, "--help").out).split())
    assert ("Only warnings, errors and the table of several seeds." in out) == also
    assert ("Only warnings and errors." in out) != also


def test_quiet_says_nothing_but_warnings(call: Call, tmp_path: Path) -> None:
    assert call("run", *BRIEF, f"out={tmp_path}", "name=a", "-q") == (0, "", "")
    ended = call(
        "run", *BRIEF, f"out={tmp_path}", "name=b", "--quiet", "noise=symmetric", "noise.rate=0.01"
    )
    assert (
        ended.code == 0
        and "warning: noise.rate = 0.01 of 5 clients rounds to none" in ended.out + ended.err
    )
    assert "round " not in ended.out


# From Python


def test_a_run_from_python_is_the_finished_run(tmp_path: Path) -> None:
    run = fednoro.run(*BRIEF, f"out={tmp_path}", "seed=2")
    assert run.folder == tmp_path / "synthetic-fednoro-seed2" and run.folder.is_dir()
    assert len(run.bacc) == 2 and run.best == max(run.bacc) and run.final == run.bacc[-1]
    assert run.last == pytest.approx(np.mean(run.bacc))
    assert run.detection is not None and set(run.detection) >= {
        "clients",
        "flagged",
        "recall",
        "precision",
        "exact",
    }
    assert run.config.seed == 2 and len(run.federation.parts) == CLIENTS
    assert fednoro.load(run.folder) == run == fednoro.resume(run.folder)

    again = fednoro.run(*BRIEF, f"out={tmp_path}", "seed=2")
    assert again.folder.name == "synthetic-fednoro-seed2-2" and again.bacc == run.bacc


def test_a_run_takes_a_mapping_a_file_or_a_configuration(tmp_path: Path) -> None:
    config = resolve(BRIEF[0], [*BRIEF[1:], f"out={tmp_path}", "method=fedavg", "noise=none"])
    file = tmp_path / "my.yaml"
    file.write_text(dump(config))
    tree = yaml.safe_load(dump(config))
    runs = [
        fednoro.run(config),
        fednoro.run(tree),
        fednoro.run(file),
        fednoro.run(str(file), "name=x"),
    ]
    assert len({run.bacc for run in runs}) == 1 and len({run.folder for run in runs}) == 4
    assert runs[0].detection is None and not (runs[0].folder / "detection.json").exists()
    with pytest.raises(UserError, match="overrides go with a preset, a file or a mapping"):
        fednoro.run(config, "seed=3")


def test_warnings_reach_whoever_runs_from_python(tmp_path: Path) -> None:
    with pytest.warns(FedNoRoWarning, match=r"noise\.rate = 0\.01 of 5 clients rounds to none"):
        fednoro.run(
            *BRIEF, f"out={tmp_path}", "noise=symmetric", "noise.rate=0.01", "method=fedavg"
        )


def test_names_that_the_package_lacks_are_ordinary_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        fednoro.walk  # noqa: B018
