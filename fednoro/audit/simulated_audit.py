"""An audit of a simulated run:
the run's federation, network and hardware, with the audit's exchanges.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fednoro.audit.audit_method import LEVELS, PROBABILITIES, Answers, Audit
from fednoro.core.types import FedNoRoWarning, FloatArray, State, UserError, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.data.federation import Federation, fingerprint
from fednoro.experiment.checkpoint import Snapshot, checkpoints, load_checkpoint, to_device
from fednoro.experiment.config.configuration import Config, resolve
from fednoro.experiment.drive import Watcher
from fednoro.experiment.rounds import Evaluation, play
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.experiment.simulation import Lab, laboratory
from fednoro.methods.fednoro_plus import CORRECTED
from fednoro.models import Packed

# rounds before a model judges labels, where the run's method has no warm-up; FedNoRo's default
EARLY_ROUNDS = 10


@dataclass(frozen=True)
class Subject:
    """A run to be audited, with its data at hand; it may be unfinished."""

    folder: Path
    config: Config
    federation: Federation
    lab: Lab
    detection: Mapping[str, Any] | None  # the detector's verdicts, where the run has come that far

    @property
    def dataset(self) -> Dataset:
        return self.lab.dataset

    @property
    def warmup(self) -> int:
        return warmup_of(self.config)


def warmup_of(config: Config) -> int:
    """How many rounds a model is trained before it judges labels:
    the run's own warm-up, if its method has one.
    """
    return int(getattr(config.method, "warmup", 0) or min(EARLY_ROUNDS, config.train.rounds))


@contextmanager
def open_subject(folder: Path, watcher: Watcher, device: str | None = None) -> Iterator[Subject]:
    """Opens a run folder, loads its data and makes an engine ready."""
    if (folder / "flower.json").is_file() and not (folder / "split.npz").is_file():
        raise UserError(
            f"the images of {folder} are at its sites: "
            f"audit it there, with `fednoro flower audit {folder}`"
        )
    for name in ("config.yaml", "split.npz"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} cannot be audited: it has no {name}; "
                "give a folder that `fednoro run` made"
            )
    config, federation = resolve(folder / "config.yaml"), Federation.load(folder / "split.npz")
    config = config if device is None else replace(config, device=device)
    with laboratory(config, watcher) as lab:
        if fingerprint(lab.dataset) != federation.fingerprint:
            raise UserError(
                f"the data has changed since {folder} was made: run it anew, then audit that"
            )
        yield Subject(folder, config, federation, lab, verdicts_in(folder / "detection.json"))


@dataclass(frozen=True)
class Outcome(Answers):
    """What came of the exchanges: what the coordinator was sent, and what stayed at each site."""

    probabilities: Mapping[int, FloatArray]  # at the sites; the coordinator has none of these


def examine(subject: Subject, audit: Audit, clients: Sequence[Client] | None = None) -> Outcome:
    """Plays the audit's exchanges over the run's clients,
    or over others that hold the same data.
    """
    engine, config, watcher = subject.lab.engine, subject.config, subject.lab.watcher
    engine.serve(subject.federation.clients() if clients is None else clients)
    start = (
        _last_model(subject)
        if audit.scores == "corrected"
        else subject.lab.calibrate(Packed(subject.lab.initial, engine.device).weights())
    )
    what = "training the models that judge the labels" if audit.training else "judging labels"
    state = State(start, 0, audit.rounds, engine.classes, config.seed)
    for turn in play(
        audit,
        state,
        engine.exchange,
        sorted(engine.clients),
        skip_evaluation,
        config.train.participation,
    ):
        state = turn.state
        for message in turn.warnings:
            watcher.warned(message)
        watcher.progress(what, state.round, audit.rounds)
    answers, engine_clients = Answers.of(state), engine.clients
    return Outcome(
        answers.counts,
        answers.joints,
        answers.thresholds,
        {
            k: engine_clients[k].memory[PROBABILITIES].numpy()
            for k in engine_clients
            if LEVELS in engine_clients[k].memory
        },
    )


def _last_model(subject: Subject) -> Weights:
    """The run's last model; the engine's clients remember what they did then."""
    if (subject.folder / "flower.json").exists():
        raise UserError(
            f"{subject.folder} was simulated on Flower, and its clients' memories are not in "
            "its checkpoints: for --scores corrected make the same run with `fednoro "
            "run`, or use early or cross_fit"
        )
    snapshot = end_of_run(subject.folder)
    for k, client in subject.lab.engine.clients.items():
        client.memory.update(snapshot.memories.get(k, {}))
    return to_device(snapshot.state, subject.lab.engine.device).model


def end_of_run(run: Path) -> Snapshot:
    """The newest checkpoint of a run that has corrected labels."""
    paths = checkpoints(RunFolder(run))
    snapshot = load_checkpoint(paths[-1]) if paths else None
    if snapshot is None or not snapshot.state.memo.get(CORRECTED):
        raise UserError(
            f"{run} has no corrected labels: fednoro-plus leaves them, where it has flagged some "
            "clients and come to its last stage; use --scores early or cross_fit"
        )
    return snapshot


def skip_evaluation(weights: Weights) -> Evaluation:
    """An audit looks at no test set."""
    return Evaluation(np.zeros((1, 1), dtype=np.int64), float("nan"))


def verdicts_in(path: Path) -> dict[str, Any] | None:
    """The verdicts of a detection.json; None where there is none that can be read."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {
            "clients": {
                str(k): {**row, "noisy": bool(row["noisy"])} for k, row in record["clients"].items()
            }
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        message = f"{path} cannot be read, so the page has no verdicts of the detector ({error})"
        warnings.warn(message, FedNoRoWarning, stacklevel=2)
        return None
