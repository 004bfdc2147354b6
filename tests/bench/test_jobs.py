"""What runs of a bench share, and that sharing leaves their bits as they are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import fednoro
from fednoro.bench.jobs import (
    Federate,
    Job,
    Score,
    Train,
    closure,
    federate,
    share_warmups,
    train,
    warm_up,
)
from fednoro.bench.paper import Setting
from fednoro.bench.paper_figures import Partition, WarmUp, counts
from fednoro.bench.plan import Order
from fednoro.bench.progress_board import Board
from fednoro.bench.tables import Comparison, Indicators
from fednoro.bench.workers import perform_all
from fednoro.core.types import UserError
from fednoro.data.federation import Federation
from fednoro.detection.indicators import INDICATORS
from fednoro.experiment.checkpoint import checkpoints
from fednoro.experiment.config.configuration import Config
from fednoro.experiment.drive import Watcher
from fednoro.experiment.rounds import Turn
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.methods import FedLA

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = (
    "data={name: synthetic, images: 160, classes: 3, size: 8, channels: 1}",
    "partition={name: iid, clients: 6}",
    "noise={name: h_idn, epochs: 2}",
    "model={name: cnn, width: 4}",
    "train={rounds: 6, epochs: 1, batch: 16, lr: 0.01}",
    "methods.fednoro.warmup=3",
    "device=cpu",
)
HARD = Setting(0.5, 0.5, 0.7)


def order(out: Path, *overrides: str, seeds: tuple[int, ...] = (0,)) -> Order:
    return Order("digits", (*TINY, *overrides), seeds, out)


def quiet(jobs: list[Job], out: Path) -> dict[str, str]:
    return perform_all(jobs, 1, Board(Console(quiet=True), jobs, 0, quiet=True), out / "errors")


def ablation(out: Path) -> Comparison:
    return Comparison(order(out), (HARD,), ("fedla", "kd-only", "fednoro"), name="table4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that share a federation and a warm-up."""
    out = tmp_path_factory.mktemp("made")
    left = closure(ablation(out).jobs())
    assert [type(job) for job in left] == [Federate, Train, Train, Train, Train]
    assert quiet(left, out) == {}
    return out


def records(folder: Path) -> list[dict[str, Any]]:
    return [
        {**json.loads(line), "seconds": 0}
        for line in (folder / "rounds.jsonl").read_text().splitlines()
    ]


def test_a_run_from_a_shared_federation_and_warm_up_has_the_bits_of_one_that_made_them_itself(
    made: Path, tmp_path: Path
) -> None:
    assert (
        len(list((made / "federations").iterdir())) == len(list((made / "warmups").iterdir())) == 1
    )
    for (row, _, _), job in ablation(made).runs().items():
        alone = fednoro.run(replace(job.config, out=str(tmp_path)))
        for name in ("model.safetensors", "clients.csv", "split.csv", "split.npz"):
            assert (alone.folder / name).read_bytes() == (job.path / name).read_bytes(), (row, name)
        assert records(alone.folder) == records(job.path), row
        assert fednoro.load(job.path).bacc == alone.bacc
        assert fednoro.load(job.path).detection == alone.detection
        assert (alone.detection is None) == (row == "fedla")
    assert {record["stage"] for record in records(job.path)} == {"warm-up", "noise-robust training"}


def test_what_is_done_is_not_done_again_and_other_rows_only_add_what_is_missing(made: Path) -> None:
    assert closure(ablation(made).jobs()) == []
    more = Comparison(
        order(made), (HARD,), ("fedla", "kd-only", "fednoro", "clean-only"), name="table4"
    )
    assert [job.name for job in closure(more.jobs())] == [
        "runs/synthetic-fednoro-clean-only-rho0.5-eta0.5-0.7-seed0"
    ]


def test_the_table_is_filled_from_the_runs(made: Path) -> None:
    grid = ablation(made)
    table = grid.fill({})
    runs = {row: fednoro.load(job.path) for (row, _, _), job in grid.runs().items()}
    assert [row.heading[-1] for row in table.rows] == ["Best", "Last"] * 3
    assert [row.cells[0].values for row in table.rows] == [
        (100 * value,) for run in runs.values() for value in (run.best, run.last)
    ]
    kd = next(record for record in table.records if record["row"] == "kd-only")
    assert (
        kd["best"] == runs["kd-only"].best
        and kd["rate"] == 0.5
        and kd["detection_exact"] in (True, False)
    )


def test_a_finished_run_of_another_configuration_is_an_error_that_names_the_key(made: Path) -> None:
    other = Comparison(order(made, "train.lr=0.02"), (HARD,), ("fedla",), name="table4")
    with pytest.raises(
        UserError,
        match=r"fedla-rho0\.5.*made with train\.lr=0\.01, asked is 0\.02: use another --out",
    ):
        closure(other.jobs())


def test_a_run_of_a_version_without_one_of_the_options_is_an_error(
    made: Path, tmp_path: Path
) -> None:
    """Its default may be something new."""
    grid = Comparison(order(made), (HARD,), ("fedla", "fednoro"), name="table4")
    job = next(job for (row, _, _), job in grid.runs().items() if row == "fednoro")
    job.check()
    copy = replace(job, path=tmp_path / "copy")
    shutil.copytree(job.path, copy.path)
    stored = copy.path / "config.yaml"
    stored.write_text(
        "".join(line for line in stored.read_text().splitlines(True) if "  adjust:" not in line)
    )
    with pytest.raises(
        UserError,
        match=r"copy was made by an earlier version, which had no method\.adjust: use another",
    ):
        copy.check()


def test_a_federation_is_keyed_by_all_it_depends_on_and_by_nothing_else(tmp_path: Path) -> None:
    def name(*overrides: str, row: str = "fedla", setting: Setting = HARD, seed: int = 0) -> str:
        return federate(order(tmp_path, *overrides).config(row, setting, seed), tmp_path).name

    same = [
        name(row="fednoro"),
        name("train.rounds=9"),
        name("train.epochs=2"),
        name("train.participation=0.5"),
        name("checkpoint_every=1"),
    ]
    assert {name(), *same} == {name()}
    others = [
        name("data.images=170"),
        name("split.test=0.2"),
        name("partition.clients=5"),
        name("noise.epochs=3"),
        name("model.width=5"),
        name("train.lr=0.02"),
        name("train.batch=8"),
        name("train.weight_decay=0"),
        name("train.augment.flip=true"),
        name("engine=eager"),
        name(seed=1),
        name(setting=Setting(0.4, 0.5, 0.7)),
        name(setting=Setting(0.5, 0.4, 0.7)),
    ]
    assert len({name(), *others}) == 1 + len(others)


def test_a_warm_up_is_shared_only_where_the_first_rounds_are_the_same(tmp_path: Path) -> None:
    def shared(*overrides: str, rows: tuple[str, ...] = ("fedla", "fednoro")) -> list[bool]:
        asked = order(tmp_path, *overrides)
        runs = [train(asked.config(row, HARD, 0), tmp_path) for row in rows]
        return [run.earlier_run is not None for run in share_warmups(runs, tmp_path, 3)]

    assert shared() == [True, True]
    assert shared("methods.fedla.tau=0.5") == [False, False], "FedNoRo adjusts by log π itself"
    assert shared(rows=("fedla",)) == [False], "alone it would only be one more folder"
    assert shared(rows=("fedavg", "fedla", "fedprox", "fednoro")) == [False, True, False, True]


def test_a_run_that_was_stopped_goes_on_and_one_that_had_not_begun_begins_anew(
    made: Path, tmp_path: Path
) -> None:
    class Stops(Watcher):
        def turned(self, turn: Turn) -> None:
            if turn.state.round == 4 and turn.evaluation is not None:
                raise KeyboardInterrupt

    job = next(job for (row, _, _), job in ablation(tmp_path).runs().items() if row == "fednoro")
    job.needs[0].perform(Watcher())
    job.path.mkdir(parents=True)
    (job.path / "config.yaml").write_text(
        (made / "runs" / job.path.name / "config.yaml").read_text()
    )
    with pytest.raises(KeyboardInterrupt):
        job.perform(Stops())
    assert not job.done and checkpoints(RunFolder(job.path))[-1].name == "round-00004.safetensors"
    assert closure([job]) == [job], "all it needs is in its folder"
    shutil.rmtree(tmp_path / "federations")
    job.perform(Watcher())
    assert (job.path / "model.safetensors").read_bytes() == (
        made / "runs" / job.path.name / "model.safetensors"
    ).read_bytes()


# Scores


def test_scores_are_what_fednoro_itself_was_told_at_the_end_of_its_warm_up(made: Path) -> None:
    grid = Indicators(order(made), (HARD,), mixture_seeds=50)
    left = closure(grid.jobs())
    assert [job.name.split("/")[0] for job in left] == ["warmups", "scores", "scores"], (
        "the warm-up with LA is there"
    )
    assert quiet(left, made) == {}
    job = grid.scores()[HARD, 0, True]
    run = made / "runs" / "synthetic-fednoro-rho0.5-eta0.5-0.7-seed0"
    clients = json.loads((run / "detection.json").read_text())["clients"]
    told = np.array([clients[str(k)]["losses"] for k in range(6)], dtype=np.float64)
    with np.load(job.path) as file:
        np.testing.assert_allclose(file["per_class/3"], told, rtol=1e-12)
        assert {key.split("/")[0] for key in file} == {*INDICATORS, "noisy"}
        assert file["noisy"].sum() == 3
    table = grid.fill({})
    assert (
        len(table.rows) == 10
        and len(table.records) == 10
        and all(cell.values for row in table.rows for cell in row.cells)
    )
    assert [row.heading for row in table.rows][:3] == [
        ("LID", "✗", "✗", "✗"),
        ("LID", "✓", "✗", "✗"),
        ("Conf.", "✗", "✗", "✗"),
    ]
    assert table.rows[-1].heading == ("Loss", "✓", "✓", "✓")


def test_a_long_warm_up_is_scored_after_every_round_as_shorter_ones_would_be(made: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = WarmUp(order(made), (HARD,), mixture_seeds=20, longest=4)
    assert quiet(closure(grid.jobs()), made) == {}
    (job,) = grid.scores().values()
    assert isinstance(job, Score) and job.after_rounds == (1, 2, 3, 4)
    short = Indicators(order(made), (HARD,)).scores()[HARD, 0, True]
    with np.load(job.path) as long, np.load(short.path) as other:
        np.testing.assert_array_equal(long["per_class_norm/3"], other["per_class_norm/3"])
        assert not np.array_equal(long["per_class_norm/3"], long["per_class_norm/4"])
    assert not (job.warmup / "models").exists(), "models are not needed after they were scored"
    table = grid.fill({})
    assert [row.heading for row in table.rows] == [("1",), ("2",), ("3",), ("4",)]
    paths = grid.draw(made / "figure-t1")
    assert [path.suffix for path in paths] == [".png", ".pdf", ".svg"] and all(
        path.stat().st_size > 1000 for path in paths
    )
    job.path.unlink()
    with pytest.raises(UserError, match="has not kept the model of round 1"):
        job.perform(Watcher())


def test_the_partition_is_counted_by_true_and_by_observed_labels(made: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = Partition(order(made), (HARD,))
    assert closure(grid.jobs()) == [], "a federation that runs made is enough"
    (job,) = grid.federations().values()
    federation = Federation.load(job.path / "split.npz")
    table = grid.fill({})
    for k, part in enumerate(federation.parts):
        rows = [record for record in table.records if record["client"] == k]
        assert [row["true"] for row in rows] == [
            int((federation.clean[part] == c).sum()) for c in range(3)
        ]
        assert [row["observed"] for row in rows] == [
            int((federation.observed[part] == c).sum()) for c in range(3)
        ]
    np.testing.assert_array_equal(
        counts(federation, federation.observed).sum(1), [len(part) for part in federation.parts]
    )
    first = [path.read_bytes() for path in grid.draw(made / "figure-partition")]
    assert [path.read_bytes() for path in grid.draw(made / "figure-partition")] == first


def test_one_warm_up_serves_the_ablation_of_the_first_stage_too(tmp_path: Path) -> None:
    config: Config = order(tmp_path).config("fednoro", HARD, 0)
    runs = share_warmups(
        [train(order(tmp_path).config(row, HARD, 0), tmp_path) for row in ("fedla", "fednoro")],
        tmp_path,
        3,
    )
    assert {run.earlier_run and run.earlier_run.name for run in runs} == {
        warm_up(config, tmp_path, 3, FedLA()).name
    }
    assert (
        Indicators(order(tmp_path), (HARD,)).scores()[HARD, 0, True].warmup
        == runs[0].earlier_run.path
    )  # type: ignore[union-attr]
