"""What TensorBoard and MLflow find in a run folder, read back by their own readers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flower_grid import MemoryGrid
from hypothesis import given
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import fednoro
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import flatten_tree, resolve
from fednoro.experiment.drive import Run, Watcher
from fednoro.experiment.rounds import Turn
from fednoro.experiment.watch import trackers
from fednoro.flower.client_app import app
from fednoro.flower.ops.run_follower import as_json
from fednoro.flower.server.coordinator import coordinate

ROUNDS, WARMUP = 6, 3
TINY = (
    "digits",
    "data=synthetic",
    "data.images=120",
    "data.classes=4",
    "data.size=8",
    "data.channels=1",
    "partition.clients=5",
    "noise.epochs=5",
    "model.width=4",
    "train.epochs=1",
    "train.batch=32",
    "device=cpu",
    f"train.rounds={ROUNDS}",
    f"method.warmup={WARMUP}",
    "checkpoint_every=2",
    "name=run",
)
BOTH = "track=[tensorboard,mlflow]"
pytestmark = pytest.mark.usefixtures("one_thread")


class Stops(Watcher):
    """Presses Ctrl-C after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def turned(self, turn: Turn) -> None:
        if turn.state.round == self.after and turn.evaluation is not None:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Run]:
    """The same run without trackers, with one, with both but killed
    in between, and so on Flower.
    """
    home = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        plain = fednoro.run(*TINY, "out=plain")
        whole = fednoro.run(*TINY, "out=whole", "track=tensorboard")
        with pytest.raises(KeyboardInterrupt):
            fednoro.run(*TINY, "out=killed", BOTH, watcher=Stops(after=5))
        folder = Path("killed/run")
        (before,) = _mlflow(folder)[0].search_runs(["1"])
        # As after a kill: round 5 was tracked, and no checkpoint knows of it.
        sorted((folder / "checkpoints").iterdir())[-1].unlink()
        killed = fednoro.resume(folder)
        flower = _on_flower(*TINY, "out=flower", BOTH)
        assert {path.name for path in home.iterdir()} == {"plain", "whole", "killed", "flower"}, (
            "written elsewhere"
        )
        found = {"plain": plain, "whole": whole, "killed": killed, "flower": flower}
    assert before.info.status == "KILLED"
    assert _mlflow(home / "killed" / "run")[1].info.run_id == before.info.run_id
    for run in found.values():
        object.__setattr__(run, "folder", home / run.folder)
    return found


def _on_flower(source: str, *overrides: str) -> Run:
    """Stopped after a round, and resumed."""
    nodes = {100 + k: {"partition-id": k, "num-partitions": 5} for k in range(5)}
    asked = {"fednoro": as_json(resolve(source, overrides)), "round-timeout": 60.0}
    with pytest.raises(KeyboardInterrupt):
        coordinate(MemoryGrid(app, nodes), asked, watcher=Stops(after=5))
    assert _mlflow(Path("flower/run"))[1].info.status == "KILLED"
    return coordinate(MemoryGrid(app, nodes), {"resume": "flower/run"})


def _events(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    ).Reload()


def _mlflow(folder: Path) -> tuple[MlflowClient, Any]:
    client = MlflowClient(tracking_uri=f"sqlite:///{(folder / 'mlruns' / 'mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("fednoro")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def _records(run: Run) -> list[dict[str, Any]]:
    lines = (run.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "bacc" in record]


def test_trackers_are_off_by_default_and_change_nothing(runs: dict[str, Run]) -> None:
    assert resolve("digits").track == ()
    assert not {"tensorboard", "mlruns"} & {path.name for path in runs["plain"].folder.iterdir()}
    models = {(run.folder / "model.safetensors").read_bytes() for run in runs.values()}
    assert len(models) == 1


@pytest.mark.parametrize("which", ["whole", "killed", "flower"])
def test_tensorboard_has_every_round_once(runs: dict[str, Run], which: str) -> None:
    run = runs[which]
    events, records = _events(run.folder), _records(run)
    assert len(records) == ROUNDS
    for tag in ("bacc", "loss", "train_loss", "seconds"):
        points = events.Scalars(tag)
        assert [point.step for point in points] == list(range(1, ROUNDS + 1)), tag
        assert [point.value for point in points] == pytest.approx(
            [record[tag] for record in records], rel=1e-6
        )
    for c in range(4):
        values = [point.value for point in events.Scalars(f"recall/class_{c}")]
        assert values == pytest.approx([record["recall"][c] for record in records], rel=1e-6)
    times = [point.wall_time for point in events.Scalars("bacc")]
    assert times == sorted(times)
    assert len(list((run.folder / "tensorboard").iterdir())) == 1, (
        "a resumed run writes its events anew"
    )


@pytest.mark.parametrize("which", ["whole", "killed", "flower"])
def test_tensorboard_has_verdict_result_and_options(runs: dict[str, Run], which: str) -> None:
    run = runs[which]
    events = _events(run.folder)
    assert run.detection is not None
    (flagged,) = events.Scalars("detection/flagged")
    noisy = sum(row["noisy"] for row in run.detection["clients"].values())
    assert (flagged.step, flagged.value) == (WARMUP, noisy)
    (text,) = events.Tensors("detection/verdict/text_summary")
    said = text.tensor_proto.string_val[0].decode()
    assert run.detection["reason"] in said and said.count("| noisy |") == noisy
    for name, value in {"best": run.best, "last": run.last, "final": run.final}.items():
        (point,) = events.Scalars(f"result/{name}")
        assert (point.step, point.value) == (ROUNDS, pytest.approx(value, rel=1e-6))
    assert events.Scalars("detection/exact")[0].value == float(run.detection["exact"])
    begun = plugin_data_pb2.HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info.hparams
    assert (
        begun["method.warmup"].number_value == WARMUP
        and begun["data.name"].string_value == "synthetic"
    )
    assert "_hparams_/session_end_info" in events.summary_metadata


@pytest.mark.parametrize("which", ["killed", "flower"])
def test_mlflow_has_every_figure_once_although_the_run_was_killed(
    runs: dict[str, Run], which: str
) -> None:
    run = runs[which]
    client, found = _mlflow(run.folder)
    records = _records(run)
    for name in found.data.metrics:
        steps = Counter(point.step for point in client.get_metric_history(found.info.run_id, name))
        assert set(steps.values()) == {1}, name
    history = sorted(
        client.get_metric_history(found.info.run_id, "bacc"), key=lambda point: point.step
    )
    assert [(point.step, point.value) for point in history] == [
        (r["round"], r["bacc"]) for r in records
    ]
    assert {f"recall/class_{c}" for c in range(4)} <= set(found.data.metrics)
    assert (
        found.data.metrics["result/best"] == run.best
        and found.data.metrics["result/last"] == run.last
    )
    assert found.info.status == "FINISHED"
    assert (
        found.data.params["method.warmup"] == str(WARMUP)
        and found.data.params["method.name"] == "fednoro"
    )
    assert run.detection is not None and found.data.tags["detection"] == run.detection["reason"]


def test_mlflow_keeps_to_itself(runs: dict[str, Run]) -> None:
    """No telemetry, and nothing about the person or the program that ran it."""
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    _, found = _mlflow(runs["killed"].folder)
    assert not {"mlflow.user", "mlflow.source.name", "mlflow.source.git.commit"} & set(
        found.data.tags
    )


def test_a_missing_package_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trackers, "find_spec", lambda name: None if name == "tensorboard" else object()
    )
    with pytest.raises(UserError, match=r"pip install 'fednoro\[track\]'"):
        fednoro.run(*TINY, f"out={tmp_path / 'runs'}", "track=tensorboard")
    with pytest.raises(UserError, match=r"pip install 'fednoro\[track\]'"):
        _on_flower(*TINY, f"out={tmp_path / 'runs'}", "track=tensorboard")
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    told: list[str] = []

    class Obstructs(Watcher):
        def started(self, config: Any, folder: Path, *_: Any) -> None:
            (folder / "tensorboard").write_text("in the way")

        def warned(self, message: str) -> None:
            told.append(message)

    run = fednoro.run(
        *TINY, f"out={tmp_path}", "method.warmup=1", "track=tensorboard", watcher=Obstructs()
    )
    assert len(run.bacc) == ROUNDS
    assert len([line for line in told if "tensorboard is given up" in line]) == 1


def test_trackers_are_chosen_by_name() -> None:
    assert resolve("digits", ["track=mlflow"]).track == ("mlflow",)
    assert resolve("digits", ["track=[tensorboard, mlflow]"]).track == ("tensorboard", "mlflow")
    with pytest.raises(
        UserError, match="unknown tracker 'tensorbord' in track: did you mean tensorboard"
    ):
        resolve("digits", ["track=[tensorbord]"])
    with pytest.raises(UserError, match="track"):
        resolve("digits", ["track=3"])


@given(st.lists(st.text(max_size=120), min_size=1, max_size=6, unique=True))
def test_class_tags_are_distinct_and_plain(classes: list[str]) -> None:
    tags = trackers.class_tags(classes)
    assert len(tags) == len(classes)
    assert all(tag and not set(tag) & set("./\\ |<>\n") and len(tag) < 200 for tag in tags)


def test_classes_that_would_have_one_tag_get_two() -> None:
    assert trackers.class_tags(["a b", "a/b", "c"]) == ("a_b-0", "a_b-1", "c")
    assert flatten_tree({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
