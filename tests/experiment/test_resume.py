"""Runs that are killed, again and again, and end with the same bits as one that was left alone.

The processes are real and die by SIGKILL; they are forked from a server that has loaded torch
already, so that a life costs a tenth of a second and not five.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fednoro
from fednoro.core.types import Reply, Site, Task, UserError
from fednoro.experiment import simulation
from fednoro.experiment.checkpoint import checkpoints
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.methods import METHODS, Method

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

ROUNDS, WARMUP = 48, 5
TINY = (
    "digits",
    "data=synthetic",
    "data.images=160",
    "data.classes=4",
    "data.size=8",
    "data.channels=1",
    "partition.clients=5",
    "noise.epochs=60",
    "model.width=4",
    "train.epochs=1",
    "train.batch=32",
    f"train.rounds={ROUNDS}",
    f"method.warmup={WARMUP}",
    "device=cpu",
    "train.participation=0.8",
    "train.failures=0.1",
    "train.augment.rotate=10",
    "train.augment.flip=true",
)

Start = Callable[..., ForkServerProcess]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts `target(*args)` in a process of its own."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fednoro.experiment.simulation"])
    started: list[ForkServerProcess] = []

    def begin(target: Callable[..., Any], *args: str) -> ForkServerProcess:
        process = context.Process(target=target, args=args)
        process.start()
        started.append(process)
        return process

    with pytest.MonkeyPatch.context() as patch:
        # on busy cores the threads of a tiny network wait for each other
        patch.setenv("OMP_NUM_THREADS", "1")
        yield begin
    for process in started:
        process.kill()
        process.join()
        process.close()


def run_to_the_end(start: Start, out: Path, *overrides: str) -> Path:
    finish(start(simulation.run, *TINY, f"out={out}", "name=run", *overrides))
    return out / "run"


def finish(process: ForkServerProcess) -> None:
    process.join(60)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_to_the_end(start, tmp_path_factory.mktemp("undisturbed"))


def rounds(folder: Path) -> list[dict[str, Any]]:
    """All that is recorded of each round but the time it took."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for line in lines
    ]


def results(folder: Path) -> dict[str, bytes]:
    files = {
        name: (folder / name).read_bytes()
        for name in ("model.safetensors", "clients.csv", "detection.json")
    }
    with np.load(folder / "split.npz") as split:
        return files | {name: split[name].tobytes() for name in ("members", "observed", "test")}


def assert_same(folder: Path, other: Path) -> None:
    assert [record["bacc"] for record in rounds(folder) if "bacc" in record] == list(
        fednoro.load(other).bacc
    )
    assert rounds(folder) == rounds(other)
    assert results(folder) == results(other)
    assert not [path.name for path in folder.rglob(".*.tmp")]


def written(folder: Path) -> int:
    """How many lines the log of rounds has by now."""
    log = folder / "rounds.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_until(condition: Callable[[], bool], process: ForkServerProcess) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.is_alive() and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.001)


def kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -9, "the run had ended before it was killed"


@pytest.mark.parametrize("every", [1, 3])
def test_ten_kills_at_random_moments_change_nothing(
    every: int, start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(every)
    folder, reached = tmp_path / "run", []
    pace = fednoro.load(undisturbed).seconds / ROUNDS
    process = start(
        simulation.run, *TINY, f"out={tmp_path}", "name=run", f"checkpoint_every={every}"
    )
    wait_until((folder / "config.yaml").exists, process)
    for _ in range(10):
        seen = written(folder) + int(rng.integers(4))
        wait_until(lambda seen=seen: written(folder) >= seen, process)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 2 * pace))
        kill(process)
        reached.append(written(folder))
        assert not (folder / "result.json").exists()
        process = start(simulation.resume, str(folder))
    finish(process)

    assert len(set(reached)) >= 5 and reached[-1] > WARMUP, f"kills landed at rounds {reached} only"
    assert_same(folder, undisturbed)


def test_a_kill_while_the_annotators_train_changes_nothing(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(simulation.run, *TINY, f"out={tmp_path}", "name=run")
    wait_until((folder / "environment.json").exists, process)
    time.sleep(0.05)
    kill(process)
    assert not (folder / "split.npz").exists() and (folder / "config.yaml").exists()
    finish(start(simulation.resume, str(folder)))
    assert_same(folder, undisturbed)


def test_a_corrupt_checkpoint_is_refused_and_the_one_before_leads_to_the_same_bits(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(simulation.run, *TINY, f"out={tmp_path}", "name=run", "checkpoint_every=2")
    wait_until(lambda: written(folder) > WARMUP + 6, process)
    kill(process)
    shutil.copytree(folder, tmp_path / "bare")

    *_, newest = checkpoints(RunFolder(folder))
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    with pytest.raises(
        UserError,
        match=rf"checkpoint {newest} is corrupt .*: delete it to resume from the one before",
    ):
        fednoro.resume(folder)
    newest.unlink()
    finish(start(simulation.resume, str(folder)))
    assert_same(folder, undisturbed)

    for checkpoint in checkpoints(RunFolder(tmp_path / "bare")):
        checkpoint.unlink()
    finish(start(simulation.resume, str(tmp_path / "bare")))
    assert_same(tmp_path / "bare", undisturbed)


def test_two_processes_cannot_play_the_same_run(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(simulation.run, *TINY, f"out={tmp_path}", "name=run")
    wait_until(lambda: written(folder) > 0, process)
    with pytest.raises(UserError, match="in use by another process"):
        fednoro.resume(folder)
    assert process.is_alive()
    kill(process)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    assert_same(run_to_the_end(start, tmp_path / "same"), undisturbed)
    other = run_to_the_end(start, tmp_path / "other", "seed=1")
    assert all(results(other)[name] != content for name, content in results(undisturbed).items())
    assert fednoro.load(other).bacc != fednoro.load(undisturbed).bacc


@dataclass(frozen=True)
class Relabelling(Method):
    """Not registered: clients remember labels that change in every round, so
    half a round must not be saved.
    """

    stop: ClassVar[tuple[int, int] | None] = None

    def work(self, task: Task, site: Site) -> Reply:
        site.memory["labels"] = (site.labels + 1) % site.classes
        if (task.round, site.client) == self.stop:
            raise KeyboardInterrupt
        return super().work(task, site)


@pytest.mark.parametrize("moment", ["while a client trains", "between the two logs"])
def test_an_interrupt_in_the_middle_of_a_round_saves_the_round_before(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "relabelling", Relabelling)
    settings = [item for item in TINY if not item.startswith("method.")]
    overrides = (
        "method=relabelling",
        "train.rounds=5",
        "noise.epochs=1",
        "train.participation=1",
        "train.failures=0",
    )
    whole = fednoro.run(*settings, *overrides, f"out={tmp_path}", "name=whole")

    with monkeypatch.context() as patch:
        if moment == "while a client trains":
            patch.setattr(Relabelling, "stop", (3, 2))
        else:
            append = RunFolder._append

            def interrupted(folder: RunFolder, name: str, text: str) -> None:
                if name == "rounds.jsonl" and '"round": 4' in text:
                    raise KeyboardInterrupt
                append(folder, name, text)

            patch.setattr(RunFolder, "_append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fednoro.run(*settings, *overrides, f"out={tmp_path}", "name=run")
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(RunFolder(folder))] == ["round-00003.safetensors"]
    assert fednoro.resume(folder).bacc == whole.bacc
    assert (folder / "model.safetensors").read_bytes() == (
        whole.folder / "model.safetensors"
    ).read_bytes()
    assert (folder / "clients.csv").read_bytes() == (whole.folder / "clients.csv").read_bytes()
    assert rounds(folder) == rounds(whole.folder)
