"""The pieces of work behind a table, each done once: federations, warm-ups, runs, scores.

    federations/NAME/  split.npz, split.csv; by data, split, partition, noise, annotators and seed
    warmups/NAME/      a run folder of T1 rounds; FedNoRo and FedLA start from one
    runs/NAME/         a run folder
    scores/NAME.npz    what each client of a warm-up measures, for the ablation of the first stage

A job is a value that another process can be sent. It is done when its last file is there, so that
doing the same jobs again costs nothing, and one that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from safetensors import safe_open
from safetensors.torch import save

from fednoro.core.files import disk_errors, write_whole
from fednoro.core.types import Failure, FloatArray, Reply, Site, State, Task, UserError, Weights
from fednoro.data.federation import Federation
from fednoro.detection.indicators import INDICATORS
from fednoro.experiment import simulation
from fednoro.experiment.checkpoint import Snapshot, checkpoints, load_checkpoint, write_checkpoint
from fednoro.experiment.config.configuration import (
    Config,
    dump,
    flatten_config,
    resolve,
    with_absolute_paths,
)
from fednoro.experiment.drive import Run, Watcher
from fednoro.experiment.rounds import Turn
from fednoro.experiment.run_folder.run_files import LOGS, RunFolder
from fednoro.methods import FedLA, FedNoRo, Method
from fednoro.report import write_or_warn

KEYS_WITHOUT_EFFECT = ("name", "out", "checkpoint_every")  # what a run's numbers do not depend on
FEDERATION_SECTIONS = ("data.", "split.", "partition.", "noise.", "model.", "train.augment.")
FEDERATION_KEYS = (
    "train.batch",
    "train.lr",
    "train.weight_decay",
    "seed",
    "device",
    "engine",
    "compile",
)


@dataclass(frozen=True)
class Job:
    """Something to be made once, after what it needs."""

    name: str
    config: Config
    path: Path  # a folder, or a file
    needs: tuple[Job, ...] = ()

    @property
    def rounds(self) -> int:
        """How long it takes, about, as a number of rounds."""
        return 1

    @property
    def done(self) -> bool:
        return self.path.exists()

    def check(self) -> None:
        """Raises a `UserError` where what is there already belongs to another configuration."""

    def perform(self, watcher: Watcher) -> None:
        """Makes it, or goes on making it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Federate(Job):
    """Split, partition, annotators and noise: everything before the first round."""

    @property
    def done(self) -> bool:
        return (self.path / "split.npz").exists()

    def perform(self, watcher: Watcher) -> None:
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with simulation.laboratory(self.config, watcher) as lab:
            lab.federate(self.path)


@dataclass(frozen=True)
class Train(Job):
    """A run, from a federation that exists and perhaps from rounds that were played before."""

    earlier_run: Train | None = None
    stage: str = "training"  # what this run calls those rounds
    keep: bool = False  # keep each round's model

    @property
    def rounds(self) -> int:
        return self.config.train.rounds - (
            self.earlier_run.config.train.rounds if self.earlier_run else 0
        )

    @property
    def done(self) -> bool:
        return RunFolder(self.path).finished

    def check(self) -> None:
        stored = self.path / "config.yaml"
        if not stored.exists():
            return
        stored_values = flatten_config(resolve(stored))
        requested_values = flatten_config(with_absolute_paths(self.config))
        stored_method = yaml.safe_load(stored.read_text(encoding="utf-8"))["method"]
        options = dict.fromkeys(
            key.split(".")[1] for key in requested_values if key.startswith("method.")
        )
        if new_options := [name for name in options if name not in stored_method]:
            message = (
                f"{self.path} was made by an earlier version, "
                f"which had no method.{new_options[0]}: use another --out"
            )
            raise UserError(message)
        for key in (
            key for key in {**requested_values, **stored_values} if key not in KEYS_WITHOUT_EFFECT
        ):
            if stored_values.get(key) != requested_values.get(key):
                raise UserError(
                    f"{self.path} was made with {key}={stored_values.get(key)}, "
                    f"asked is {requested_values.get(key)}: use another --out"
                )

    def perform(self, watcher: Watcher) -> None:
        if not self.done and not checkpoints(RunFolder(self.path)):
            if self.path.exists():
                _clear(RunFolder(self.path))
            begin(
                self.config,
                self.needs[0].path,
                self.earlier_run.path if self.earlier_run else None,
                self.stage,
            )
        run_watcher = _ModelSaver(watcher, self.path / "models") if self.keep else watcher
        simulation.resume(self.path, run_watcher, write_or_warn)


def _clear(folder: RunFolder) -> None:
    """Removes a run that was stopped before there was anything to go on from."""
    folder.lock()  # nobody else may be at it
    folder.unlock()
    with disk_errors(folder.path):
        shutil.rmtree(folder.path)


class _ModelSaver(Watcher):
    """Writes every round's model beside the checkpoints, then tells the other watcher."""

    def __init__(self, other: Watcher, folder: Path) -> None:
        self.other, self.folder = other, folder

    def started(
        self, config: Config, folder: Path, federation: Federation, state: State, engine: str
    ) -> None:
        self.other.started(config, folder, federation, state, engine)

    def progress(self, what: str, done: int, total: int) -> None:
        self.other.progress(what, done, total)

    def warned(self, message: str) -> None:
        self.other.warned(message)

    def finished(self, run: Run) -> None:
        self.other.finished(run)

    def turned(self, turn: Turn) -> None:
        if turn.evaluation is not None:
            with disk_errors(self.folder):
                self.folder.mkdir(exist_ok=True)
            tensors = {
                "values": turn.state.model.values.cpu(),
                "counters": turn.state.model.counters.cpu(),
            }
            facts = {"segments": json.dumps(turn.state.model.segments)}
            write_whole(
                self.folder / f"round-{turn.state.round:05d}.safetensors", save(tensors, facts)
            )
        self.other.turned(turn)


@dataclass(frozen=True)
class Score(Job):
    """What every client measures with a warm-up's models: the indicators, K×D each."""

    after_rounds: tuple[int, ...] = ()  # of which rounds
    indicators: tuple[str, ...] = tuple(INDICATORS)

    @property
    def warmup(self) -> Path:
        return self.needs[0].path

    def perform(self, watcher: Watcher) -> None:
        tables: dict[str, FloatArray] = {}
        federation = Federation.load(self.warmup / "split.npz")
        with simulation.laboratory(self.config, watcher) as lab:
            lab.engine.serve(federation.clients())
            for done, number in enumerate(self.after_rounds):
                watcher.progress("scoring clients", done, len(self.after_rounds))
                weights = _model_after(self.warmup, number)
                weights = replace(weights, values=weights.values.to(lab.engine.device))
                tasks = {k: Task("score", number, weights) for k in range(len(federation.parts))}
                for item in lab.engine.exchange(_IndicatorMethod(self.indicators), tasks):
                    if isinstance(item, Failure):
                        raise item.error or RuntimeError(item.reason)
                    for name, row in item.arrays.items():
                        tables.setdefault(f"{name}/{number}", np.zeros((len(tasks), len(row))))[
                            item.client
                        ] = row
        content = io.BytesIO()
        noisy = np.array([], dtype=bool) if federation.noisy is None else federation.noisy
        np.savez_compressed(content, noisy=noisy, **tables)  # type: ignore[arg-type]
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, content.getvalue())
        shutil.rmtree(self.warmup / "models", ignore_errors=True)


@dataclass(frozen=True)
class _IndicatorMethod(Method):
    """Every client's indicators on its own data with the model it is sent."""

    names: tuple[str, ...] = ()

    def work(self, task: Task, site: Site) -> Reply:
        logits = site.logits(task, task.weights)
        rows = {
            name: INDICATORS[name].row(logits, site.labels, site.classes) for name in self.names
        }
        return Reply(site.client, site.size, arrays=rows)


def _model_after(folder: Path, number: int) -> Weights:
    path = folder / "models" / f"round-{number:05d}.safetensors"
    if not path.exists():
        state = load_checkpoint(checkpoints(RunFolder(folder))[-1]).state
        if state.round != number:
            raise UserError(
                f"{folder} has not kept the model of round {number}: "
                "delete that folder to make it again"
            )
        return state.model
    with safe_open(path, framework="pt") as file:
        segments = tuple(json.loads((file.metadata() or {})["segments"]))
        return Weights(file.get_tensor("values"), file.get_tensor("counters"), segments)


# A run that others have begun


def begin(
    config: Config, federation: Path, earlier_run: Path | None = None, stage: str = "training"
) -> Path:
    """Makes a run folder that `experiment.resume` carries on,
    from a federation and rounds that were made before.

    It is as if the run had been stopped after those rounds, so that its result has
    the bits of a run that made them itself. That both configurations agree on those
    rounds is the caller's knowledge.

    Args:
        config: of the run, with a name.
        federation: a folder with split.npz and split.csv.
        earlier_run: a run folder, whose newest checkpoint and logs are taken over.
        stage: what this run calls those rounds.
    """
    folder = RunFolder(Path(config.out) / str(config.name))
    folder.create()
    write_whole(folder.path / "config.yaml", dump(with_absolute_paths(config)).encode())
    if earlier_run is not None:
        _take_over(folder, RunFolder(earlier_run), config.train.rounds, stage)
    for name in ("split.csv", "split.npz"):
        write_whole(folder.path / name, (federation / name).read_bytes())
    return folder.path


def _take_over(folder: RunFolder, other: RunFolder, rounds: int, stage: str) -> None:
    snapshot, sizes = load_checkpoint(checkpoints(other)[-1]), {}
    for name in LOGS:
        content = (other.path / name).read_bytes()[: snapshot.logs[name]]
        if name == "rounds.jsonl":
            records = [
                {**json.loads(line), "stage": stage} for line in content.decode().splitlines()
            ]
            content = "".join(json.dumps(record) + "\n" for record in records).encode()
        write_whole(folder.path / name, content)
        sizes[name] = len(content)
    write_checkpoint(
        folder,
        Snapshot(replace(snapshot.state, rounds=rounds, stage=stage), snapshot.memories, sizes),
    )


# Which jobs a run needs


def federate(config: Config, out: Path) -> Federate:
    """The federation of a run, by all that it depends on: the method is not among it."""
    values = {
        k: v
        for k, v in flatten_config(with_absolute_paths(config)).items()
        if k.startswith(FEDERATION_SECTIONS) or k in FEDERATION_KEYS
    }
    name = f"{_readable_name(config)}-{_digest(values)}"
    return Federate(f"federations/{name}", config, out / "federations" / name)


def warm_up(
    config: Config, out: Path, rounds: int, method: Method | None = None, keep: bool = False
) -> Train:
    """The first rounds of a run, by `method` in place of its own."""
    method = config.method if method is None else method
    federation = federate(config, out)
    warmup_config = replace(
        config, method=method, train=replace(config.train, rounds=rounds), out=str(out / "warmups")
    )
    values = {
        k: v
        for k, v in flatten_config(with_absolute_paths(warmup_config)).items()
        if k not in (*KEYS_WITHOUT_EFFECT, "train.rounds")
    }
    kind = "fedla" if isinstance(method, FedLA) else "fedavg"
    name = (
        f"{_readable_name(config)}-{kind}-{rounds}rounds{'-each' if keep else ''}-{_digest(values)}"
    )
    return Train(
        f"warmups/{name}",
        replace(warmup_config, name=name),
        out / "warmups" / name,
        (federation,),
        keep=keep,
    )


def train(config: Config, out: Path) -> Train:
    """A run from its federation."""
    return Train(
        f"runs/{config.name}", config, out / "runs" / str(config.name), (federate(config, out),)
    )


def share_warmups(runs: Sequence[Train], out: Path, warmup: int) -> list[Train]:
    """The same runs, with the first rounds that two or more have in common played once.

    Args:
        runs: by `train`.
        out: the bench's folder.
        warmup: rounds after which FedLA's runs are joined, as they have
            no first stage of their own.
    """
    warmups: list[Train | None] = []
    for run in runs:
        round_count = _first_rounds(run.config, warmup)
        warmups.append(
            None if round_count is None else warm_up(run.config, out, round_count, FedLA())
        )
    names = [job.name for job in warmups if job is not None]
    return [
        run if job is None or names.count(job.name) < 2 else _continue_from(job, run)
        for run, job in zip(runs, warmups, strict=True)
    ]


def _continue_from(warmup: Train, run: Train) -> Train:
    stage = "warm-up" if type(run.config.method) is FedNoRo else "training"
    return replace(run, needs=(*run.needs, warmup), earlier_run=warmup, stage=stage)


def _first_rounds(config: Config, warmup: int) -> int | None:
    """How many of a run's first rounds are FedLA's (τ = 1), None for none."""
    method = config.method
    if type(method) is FedNoRo:  # what extends it may begin in its own way
        return method.warmup
    if method == FedLA() and warmup < config.train.rounds:
        return warmup
    return None


def closure(targets: Sequence[Job]) -> list[Job]:
    """What is left to do for `targets`, each job after those it needs."""
    open_jobs: dict[str, Job] = {}

    def visit(job: Job) -> None:
        job.check()
        if job.done or job.name in open_jobs:
            return
        if not (isinstance(job, Train) and checkpoints(RunFolder(job.path))):
            # A run with a checkpoint has all that it needs.
            for need in job.needs:
                visit(need)
        open_jobs[job.name] = job

    for target in targets:
        visit(target)
    # First what others wait for, then the longest.
    needed_names = {need.name for job in open_jobs.values() for need in job.needs}
    return sorted(
        open_jobs.values(), key=lambda job: (job.name not in needed_names, _depth(job), -job.rounds)
    )


def _depth(job: Job) -> int:
    return 1 + max((_depth(need) for need in job.needs), default=0)


def _readable_name(config: Config) -> str:
    values = flatten_config(config)
    eta = f"-eta{values['noise.low']:g}-{values['noise.high']:g}" if values["noise.rate"] else ""
    return f"{values['data.name']}-rho{values['noise.rate']:g}{eta}-seed{config.seed}"


def _digest(values: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
