"""A run's figures for TensorBoard and MLflow: `track: [tensorboard, mlflow]`, off by default.

    RUN/tensorboard/        event files: tensorboard --logdir RUN/tensorboard
    RUN/mlruns/mlflow.db    one run of one experiment: mlflow ui --backend-store-uri sqlite:///RUN/mlruns/mlflow.db

Everything stays in the run folder and nothing is sent anywhere. rounds.jsonl is the truth: a run
that starts or goes on hands its trackers every round that it has behind it, and each takes what it
does not have. A tracker that fails is given up with a warning; the run goes on.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from fednoro.core.types import State, UserError
from fednoro.data.federation import Federation
from fednoro.experiment.config.configuration import Config, flatten_config
from fednoro.experiment.drive import Run, Watcher
from fednoro.experiment.rounds import Turn
from fednoro.experiment.run_folder.run_files import RunFolder, round_record

Values = Mapping[str, float]
RESULTS = ("best", "last", "final", "seconds")
TAG_LENGTH = 100  # characters of a class's name in a tag


class Tracker(Protocol):
    """Writes figures where its program looks for them."""

    needs: ClassVar[tuple[str, ...]]  # modules

    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Opens its place in a run folder;
        `settings` are the configuration's options, `method.warmup` and so on.
        """

    def log(self, values: Values, step: int, moment: float) -> None:
        """Figures after round `step`, at `moment` in seconds since 1970."""

    def log_verdict(self, text: str, step: int, moment: float) -> None:
        """The clients were judged; `text` is Markdown."""

    def end(self, status: str, results: Values) -> None:
        """The run is FINISHED, with its results, or was KILLED."""


class TensorBoard:
    """Event files. A run that goes on writes them anew:
    what was in them is in rounds.jsonl as well.
    """

    needs: ClassVar[tuple[str, ...]] = ("tensorboard",)

    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        directory = folder / "tensorboard"
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = cast(Any, SummaryWriter(str(directory), purge_step=0))
        plain = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in settings.items()
        }
        metrics = {f"result/{name}": math.nan for name in RESULTS}
        experiment, session_start, self._session_end = hparams(plain, metrics)  # type: ignore[no-untyped-call]
        for summary in (experiment, session_start):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def log(self, values: Values, step: int, moment: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=moment)
        self._writer.flush()

    def log_verdict(self, text: str, step: int, moment: float) -> None:
        self._writer.add_text("detection/verdict", text, step, walltime=moment)

    def end(self, status: str, results: Values) -> None:
        if status == "FINISHED":
            self._writer.file_writer.add_summary(self._session_end)
        self._writer.close()


class MLflow:
    """A SQLite store. A run that goes on is the same MLflow run,
    and rounds that it does again keep their figures.
    """

    needs: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")

    def begin(self, folder: Path, settings: Mapping[str, Any]) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
        import logging

        from mlflow.tracking import MlflowClient

        directory = (folder / "mlruns").absolute()
        directory.mkdir(exist_ok=True)
        # It logs every table that it makes.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own use of SQLAlchemy
            self._client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
            self._run = self._open(folder.name, directory)
        self._logged_points: set[tuple[str, int]] = set()
        existing = self._client.get_run(self._run).data
        for name in existing.metrics:
            self._logged_points |= {
                (name, point.step) for point in self._client.get_metric_history(self._run, name)
            }
        for name, value in settings.items():
            if name not in existing.params:
                self._client.log_param(self._run, name, str(value)[:6000])

    def _open(self, name: str, directory: Path) -> str:
        existing = self._client.get_experiment_by_name("fednoro")
        if existing is None:
            artifacts = (directory / "artifacts").as_uri()
            experiment = self._client.create_experiment("fednoro", artifact_location=artifacts)
        else:
            experiment = existing.experiment_id
        for run in self._client.search_runs([experiment], max_results=1):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def log(self, values: Values, step: int, moment: float) -> None:
        from mlflow.entities import Metric

        new = {
            name: value for name, value in values.items() if (name, step) not in self._logged_points
        }
        stamp = round(1000 * moment)
        points = [Metric(name, value, stamp, step) for name, value in new.items()]
        for first in range(0, len(points), 1000):  # the most that it takes at once
            self._client.log_batch(self._run, metrics=points[first : first + 1000])
        self._logged_points |= {(name, step) for name in new}

    def log_verdict(self, text: str, step: int, moment: float) -> None:
        self._client.set_tag(self._run, "detection", text.partition("\n")[0])
        self._client.set_tag(self._run, "mlflow.note.content", text)

    def end(self, status: str, results: Values) -> None:
        self._client.set_terminated(self._run, status)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def with_trackers(config: Config, watcher: Watcher) -> Watcher:
    """`watcher`, beside which the trackers of the configuration are told what happens."""
    trackers = {name: TRACKERS[name]() for name in config.track}
    for name, tracker in trackers.items():
        if missing := [module for module in tracker.needs if find_spec(module) is None]:
            raise UserError(
                f"track: {name} needs {missing[0]}, which is not installed: "
                "pip install 'fednoro[track]'"
            )
    return Tracked(watcher, trackers) if trackers else watcher


class Tracked(Watcher):
    """Tells another watcher, then the trackers."""

    def __init__(self, other: Watcher, trackers: Mapping[str, Tracker]) -> None:
        self.other, self.trackers = other, dict(trackers)
        self._classes: tuple[str, ...] = ()
        self._names: Sequence[str] = ()
        self._verdict: Any = None

    def started(
        self, config: Config, folder: Path, federation: Federation, state: State, engine: str
    ) -> None:
        self.other.started(config, folder, federation, state, engine)
        self._begin(config, folder, federation.classes, federation.names, state)

    def joined(
        self,
        config: Config,
        folder: Path,
        classes: tuple[str, ...],
        sites: Sequence[str],
        state: State,
    ) -> None:
        self.other.joined(config, folder, classes, sites, state)
        self._begin(config, folder, classes, sites, state)

    def _begin(
        self,
        config: Config,
        folder: Path,
        classes: tuple[str, ...],
        names: Sequence[str],
        state: State,
    ) -> None:
        """The trackers begin, and get the rounds that the run has behind it."""
        self._classes, self._names = class_tags(classes), names
        settings = flatten_config(config)
        self._for_each_tracker(lambda tracker: tracker.begin(folder, settings))
        records = RunFolder(folder).rounds()
        # As if the run had never stopped, so that its time axis has no gap.
        moment = time.time() - sum(record["seconds"] for record in records)
        for record in records:
            moment += record["seconds"]
            self._log(round_values(record, self._classes), record["round"], moment)
        self._log_verdict(state)

    def progress(self, what: str, done: int, total: int) -> None:
        self.other.progress(what, done, total)

    def warned(self, message: str) -> None:
        self.other.warned(message)

    def turned(self, turn: Turn) -> None:
        self.other.turned(turn)
        self._log_verdict(turn.state)
        if turn.evaluation is not None:
            self._log(
                round_values(round_record(turn), self._classes), turn.state.round, time.time()
            )

    def stopped(self, folder: Path) -> None:
        self._for_each_tracker(lambda tracker: tracker.end("KILLED", {}))
        self.other.stopped(folder)

    def finished(self, run: Run) -> None:
        results = {f"result/{name}": float(getattr(run, name)) for name in RESULTS}
        if run.detection is not None and "exact" in run.detection:
            results |= {
                f"detection/{key}": float(run.detection[key])
                for key in ("recall", "precision", "exact")
            }
        self._log(results, len(run.bacc), time.time())
        self._for_each_tracker(lambda tracker: tracker.end("FINISHED", results))
        self.other.finished(run)

    def _log_verdict(self, state: State) -> None:
        detection = state.memo.get("detection")
        if detection is None or detection == self._verdict:
            return
        self._verdict = detection
        rows: Mapping[str, Any] = detection["clients"]
        # By what it says itself, so that a scoring that is done again falls on the same step.
        step = max((row.get("round", state.round) for row in rows.values()), default=state.round)
        text, moment = verdict_text(detection, self._names), time.time()
        self._log(
            {"detection/flagged": sum(bool(row["noisy"]) for row in rows.values())}, step, moment
        )
        self._for_each_tracker(lambda tracker: tracker.log_verdict(text, step, moment))

    def _log(self, values: Values, step: int, moment: float) -> None:
        self._for_each_tracker(lambda tracker: tracker.log(values, step, moment))

    def _for_each_tracker(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                action(tracker)
            except Exception as error:
                # A full disk, a locked database: a tracker is no reason to lose a run.
                del self.trackers[name]
                why = (str(error).splitlines() or [""])[0]
                self.other.warned(
                    f"{name} is given up ({type(error).__name__}: {why}); "
                    "the run goes on without it"
                )


def round_values(record: Mapping[str, Any], classes: Sequence[str]) -> dict[str, float]:
    """The figures of one line of rounds.jsonl;
    those that are not there or not finite are left out.
    """
    values = {
        name: record.get(name)
        for name in ("bacc", "validation_bacc", "loss", "train_loss", "seconds")
    }
    values |= {
        f"recall/{name}": value
        for name, value in zip(classes, record.get("recall", ()), strict=False)
    }
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def class_tags(classes: Sequence[str]) -> tuple[str, ...]:
    """Class names as both programs take them in a tag: letters, digits, - and _; no two alike."""
    plain = [re.sub(r"[^\w-]", "_", name)[:TAG_LENGTH] or "_" for name in classes]
    return tuple(f"{name}-{c}" if plain.count(name) > 1 else name for c, name in enumerate(plain))


def verdict_text(detection: Mapping[str, Any], names: Sequence[str]) -> str:
    """Why and who, as Markdown."""
    lines = [str(detection["reason"]), "", "| client | P(noisy) | verdict |", "|---|---|---|"]
    for key, row in sorted(detection["clients"].items(), key=lambda item: int(item[0])):
        name = names[int(key)] if int(key) < len(names) else f"client {key}"
        posterior = "not scored" if row["posterior"] is None else f"{row['posterior']:.3f}"
        plain = re.sub(r"[|<>\r\n]", " ", name)
        lines.append(f"| {plain} | {posterior} | {'noisy' if row['noisy'] else 'clean'} |")
    return "\n".join(lines)
