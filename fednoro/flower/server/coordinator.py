"""The coordinator: the run folder, the rounds and the evaluation,
over sites that Flower reaches.
"""

from __future__ import annotations

import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import MessageType
from flwr.common import log
from flwr.serverapp import Grid
from safetensors import SafetensorError, safe_open

from fednoro.core.aggregate import average
from fednoro.core.files import write_json, write_whole
from fednoro.core.types import Failure, FedNoRoWarning, Reply, State, Task, UserError, Weights
from fednoro.engine.choose import choose_device
from fednoro.experiment.checkpoint import (
    check_unchanged,
    checkpoints,
    environment,
    restore,
    to_device,
)
from fednoro.experiment.config.configuration import (
    Config,
    dump,
    resolve,
    section_name,
    with_absolute_paths,
)
from fednoro.experiment.drive import (
    Run,
    Setting,
    Watcher,
    drive,
    finish,
    load,
    lock_run,
    warnings_to,
)
from fednoro.experiment.rounds import Evaluation, Turn
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.experiment.simulation import (
    free_folder,
    laboratory,
    load_or_make_federation,
    make_evaluator,
)
from fednoro.experiment.watch.trackers import with_trackers
from fednoro.flower.server.message_exchange import FlowerExchange
from fednoro.flower.server.roster import Kind, Roster, known_sites, number_by_partition
from fednoro.flower.server.run_config import Deployment
from fednoro.flower.site.station import run_order
from fednoro.models import Packed, initialise
from fednoro.report import write_or_warn

ATTEMPTS = 3  # at an evaluation that no site answers


class LogWatcher(Watcher):
    """Says what happens in the run's log, which `flwr log` shows."""

    def progress(self, what: str, done: int, total: int) -> None:
        if done == total:
            log(INFO, "%s: %d of %d", what, done, total)

    def warned(self, message: str) -> None:
        log(WARNING, "%s", message)

    def turned(self, turn: Turn) -> None:
        if turn.task == "score" and "detection" in turn.state.memo:
            log(
                INFO, "after round %d: %s", turn.state.round, turn.state.memo["detection"]["reason"]
            )
        if turn.evaluation is not None:
            numbers = (
                turn.state.round,
                turn.state.rounds,
                turn.state.stage,
                100 * turn.evaluation.bacc,
                turn.seconds,
            )
            log(INFO, "round %d/%d  %s  BACC %.2f%%  %.1f s", *numbers)

    def finished(self, run: Run) -> None:
        log(
            INFO,
            "best %.2f%%, last %.2f%%: everything is in %s",
            100 * run.best,
            100 * run.last,
            run.folder,
        )


@dataclass(frozen=True)
class Ground:
    """What a run stands on, once the sites are known."""

    net: Packed
    start: Weights
    setting: Callable[[], Setting]
    evaluate: Callable[[Weights], Evaluation] | None  # None: the sites evaluate
    split: Path | None = None  # of a simulation


def coordinate(grid: Grid, run_config: Mapping[str, Any], watcher: Watcher | None = None) -> Run:
    """Plays the run that the run-config describes, or carries one on."""
    resume_path = str(run_config.get("resume", ""))
    if resume_path:
        folder, config, options = _reopen(Path(resume_path).expanduser())
    else:
        config, options = read_config(run_config), Deployment.read(run_config)
        folder = RunFolder(free_folder(config))
    watcher = with_trackers(config, watcher or LogWatcher())
    if not resume_path:
        folder.create()
    try:
        with lock_run(folder, watcher):
            if folder.finished:
                return load(folder.path)
            if not resume_path:
                settings = {"simulation": bool(run_config.get("simulation")), **options.as_dict()}
                write_whole(folder.path / "config.yaml", dump(with_absolute_paths(config)).encode())
                write_json(folder.path / "flower.json", {"run": uuid.uuid4().hex, **settings})
            check_unchanged(folder.path, config if resume_path else with_absolute_paths(config))
            return _Coordinator(grid, folder, config, options, watcher).run()
    except Exception:
        if not resume_path and not known_sites(folder.path):
            # Nothing was begun that could be resumed.
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def read_config(run_config: Mapping[str, Any]) -> Config:
    """The configuration: `fednoro`, one JSON string, or `fednoro-config`, a preset or a file."""
    text, source = str(run_config.get("fednoro", "")), str(run_config.get("fednoro-config", ""))
    if text:
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise UserError(f"run-config fednoro is not valid JSON: {error}") from error
        if not isinstance(tree, dict):
            raise UserError("run-config fednoro must be a JSON object of sections")
        return resolve(tree)
    if not source:
        raise UserError(
            "run-config has neither fednoro (JSON) nor "
            "fednoro-config (a preset or a YAML file): set one"
        )
    return resolve(source)


def _reopen(path: Path) -> tuple[RunFolder, Config, Deployment]:
    if not (path / "flower.json").is_file():
        raise UserError(f"{path} is not the folder of a run on Flower: it has no flower.json")
    settings = json.loads((path / "flower.json").read_text(encoding="utf-8"))
    del settings["run"], settings["simulation"]
    return RunFolder(path), resolve(path / "config.yaml"), Deployment(**settings)


class _Coordinator:
    def __init__(
        self, grid: Grid, folder: RunFolder, config: Config, options: Deployment, watcher: Watcher
    ) -> None:
        self.grid, self.folder, self.config, self.watcher = grid, folder, config, watcher
        settings = json.loads((folder.path / "flower.json").read_text(encoding="utf-8"))
        self.roster = Roster(
            grid, folder, options, lambda line: log(INFO, "%s", line), bool(settings["simulation"])
        )
        self.options, self.key = options, str(settings["run"])
        self.order = ""

    def run(self) -> Run:
        device = choose_device(self.config.device)
        if not (self.folder.path / "environment.json").exists():
            facts = {**environment(device), "flwr": version("flwr")}
            write_json(self.folder.path / "environment.json", facts)
        visitors = self.roster.assemble()
        with self._ground(visitors[0].simulated) as ground:
            classes = ground.setting().classes
            self.order = run_order(self.config, classes, ground.evaluate is None, ground.split)
            exchange = FlowerExchange(
                self.grid,
                self.roster,
                lambda: moment(self.folder, self.key, self.order),
                self.options.round_timeout,
            )
            state = self._initial_state(exchange, ground)
            self.watcher.joined(self.config, self.folder.path, classes, self.roster.sites, state)
            evaluate = ground.evaluate or SiteEvaluation(exchange, self.roster, len(classes))
            state = drive(
                self.folder,
                self.config,
                state,
                exchange,
                self.roster.clients,
                evaluate,
                self.watcher,
                {},
            )
            result = finish(self.folder, self.config, ground.setting(), state, ground.net)
        write_or_warn(self.folder.path, self.watcher.warned)
        self.watcher.finished(result)
        return result

    @contextmanager
    def _ground(self, simulated: bool) -> Iterator[Ground]:
        config = self.config
        if not simulated and section_name(config, "data") == "sites":
            self.roster.settle(None)
            yield self._without_data()
            return
        with laboratory(config, self.watcher) as lab:
            dataset = lab.dataset
            shape = tuple(int(side) for side in dataset.images.shape[1:])
            if simulated:
                with warnings_to(self.watcher):
                    federation = load_or_make_federation(self.folder, lab)
                count = len(federation.parts)
                self._check_partitions(count)
                number_by_partition(self.roster, count)
                self.roster.settle((dataset.classes, shape))
                setting = Setting(
                    federation.classes, count, federation.noisy, federation.leakage, shape
                )
                evaluate = make_evaluator(
                    lab.engine, dataset, federation.test, federation.validation
                )
                split = self.folder.path.absolute() / "split.npz"
                yield Ground(
                    lab.engine.net,
                    Packed(lab.network()).weights(),
                    lambda: setting,
                    evaluate,
                    split,
                )
            else:
                self.roster.settle((dataset.classes, shape))
                everything = np.arange(len(dataset))
                evaluate = make_evaluator(lab.engine, dataset, everything, everything[:0])
                yield Ground(
                    lab.engine.net,
                    Packed(lab.network()).weights(),
                    lambda: Setting(dataset.classes, len(self.roster.sites), image=shape),
                    evaluate,
                )

    def _without_data(self) -> Ground:
        kind = self.roster.kind
        assert kind is not None
        packed, (classes, shape) = network_for(self.config, kind), kind
        return Ground(
            packed,
            packed.weights(),
            lambda: Setting(classes, len(self.roster.sites), image=shape),
            None,
        )

    def _check_partitions(self, count: int) -> None:
        partition_counts = {visitor.partitions for visitor in self.roster.assemble()}
        if partition_counts != {count}:
            nodes = ", ".join(map(str, sorted(partition_counts)))
            raise UserError(
                f"the federation has {count} clients, the nodes were started for {nodes}: "
                "set partition.clients or the number of nodes"
            )

    def _initial_state(self, exchange: FlowerExchange, ground: Ground) -> State:
        state, config = restore(self.folder, {}), self.config
        if state is None:
            start = ground.start
            if config.model.recalibrate:
                start = recalibrate_at_sites(start, exchange, self.roster, self.watcher)
            state = State(start, 0, config.train.rounds, len(ground.setting().classes), config.seed)
        else:
            log(INFO, "going on after round %d", state.round)
        return to_device(state, torch.device("cpu"))


def network_for(config: Config, kind: Kind) -> Packed:
    """The starting network, where the data are known by their classes and shape alone."""
    classes, shape = kind
    return Packed(
        initialise(config.model, config.model.inputs(shape[2]), len(classes), config.seed)
    )


def moment(folder: RunFolder, key: str, order: str) -> dict[str, str | int]:
    """What goes with every task: the run, and the moment in it."""
    log_file = folder.path / "clients.csv"
    return {
        "order": order,
        "run": key,
        "memory": str(folder.path.absolute() / "memory"),  # of simulated sites
        "clock": 1 + (log_file.stat().st_size if log_file.exists() else 0),
        "oldest": 1 + _oldest_position(folder),
    }


def recalibrate_at_sites(
    start: Weights, exchange: FlowerExchange, roster: Roster, watcher: Watcher
) -> Weights:
    """`start` with BatchNorm statistics from the sites' own images,
    averaged by size as in every round.
    """
    task = Task("recalibrate", 0, start)
    answers = list(exchange.ask(dict.fromkeys(roster.clients(), task)))
    models = [
        (a.weights, float(a.size))
        for a in answers
        if isinstance(a, Reply) and a.weights is not None
    ]
    for answer in answers:
        if isinstance(answer, Failure):
            watcher.warned(f"client {answer.client} did not recalibrate: {answer.reason}")
    if not models:
        warnings.warn(
            "model.recalibrate changes nothing: no site could", FedNoRoWarning, stacklevel=2
        )
        return start
    return average(models)


class SiteEvaluation:
    """Federated evaluation: each site's confusion counts on what it holds out, summed."""

    def __init__(self, exchange: FlowerExchange, roster: Roster, classes: int) -> None:
        self.exchange, self.roster, self.classes = exchange, roster, classes
        self.round = 0

    def __call__(self, weights: Weights) -> Evaluation:
        for _ in range(ATTEMPTS):
            task = Task("evaluate", self.round, weights)
            tasks = dict.fromkeys(self.roster.clients(), task)
            replies = [
                self._valid_reply(answer)
                for answer in self.exchange.ask(tasks, MessageType.EVALUATE)
            ]
            usable = [reply for reply in replies if reply is not None and reply.size > 0]
            if usable:
                self.round += 1
                counts = sum(reply.arrays["confusion"] for reply in usable)
                images = sum(reply.size for reply in usable)
                loss = sum(float(reply.metrics["loss"]) * reply.size for reply in usable) / images
                return Evaluation(np.asarray(counts).astype(np.int64), loss)
        raise UserError(
            "no site evaluated the model: each needs held_out above 0 and images of some class"
        )

    def _valid_reply(self, answer: Reply | Failure) -> Reply | None:
        if isinstance(answer, Failure):
            log(WARNING, "client %d did not evaluate: %s", answer.client, answer.reason)
            return None
        counts = answer.arrays.get("confusion")
        square = (self.classes, self.classes)
        well_formed = (
            counts is not None
            and counts.shape == square
            and np.array_equal(counts, np.floor(np.abs(counts)))
        )
        if (
            counts is None
            or not well_formed
            or counts.sum() != answer.size
            or "loss" not in answer.metrics
        ):
            log(
                WARNING,
                "client %d sent no confusion counts of its %d images",
                answer.client,
                answer.size,
            )
            return None
        return answer


def _oldest_position(folder: RunFolder) -> int:
    """How long clients.csv was at the oldest checkpoint
    that a resumed run may go back to; 0 without one.
    """
    saved_checkpoints = checkpoints(folder)
    try:
        with safe_open(saved_checkpoints[0], framework="pt") as file:
            return int(json.loads((file.metadata() or {})["state"])["logs"]["clients.csv"])
    except (IndexError, OSError, KeyError, ValueError, SafetensorError):
        return 0
