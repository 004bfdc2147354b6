"""From a configuration to a finished run: data, federation, engine, rounds, run folder."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fednoro.core.aggregate import average
from fednoro.core.files import disk_errors, write_json, write_whole
from fednoro.core.metrics import confusion
from fednoro.core.types import (
    Failure,
    FedNoRoWarning,
    FloatArray,
    IntArray,
    Reply,
    Site,
    State,
    Task,
    UserError,
    Weights,
)
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.data.federation import Federation, assemble, fingerprint
from fednoro.data.split import write_split
from fednoro.engine.choose import Hardware, choose_device
from fednoro.engine.eager import EagerEngine
from fednoro.engine.streams import release_memory
from fednoro.engine.threads import worthwhile_threads
from fednoro.experiment.checkpoint import check_unchanged, environment, restore, to_device
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
from fednoro.experiment.rounds import Evaluation
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.experiment.watch.trackers import with_trackers
from fednoro.methods import Method
from fednoro.models import Packed, initialise

ANNOTATORS = 16  # networks that are held at once

# Writes the page about a run into its folder; the second argument is told what went wrong.
WritePage = Callable[[Path, Callable[[str], None]], None]


def run(
    config: Config | str | Path | Mapping[str, Any] = "digits",
    *overrides: str,
    watcher: Watcher | None = None,
    write_page: WritePage | None = None,
) -> Run:
    """Runs one experiment from the start, see `fednoro.run`; `write_page` is called at its end."""
    if not isinstance(config, Config):
        config = resolve(config, overrides)
    elif overrides:
        raise UserError(
            "overrides go with a preset, a file or a mapping, not with a finished Config"
        )
    hardware, watcher = hardware_for(config), with_trackers(config, watcher or Watcher())
    folder = RunFolder(free_folder(config))
    folder.create()
    try:
        with lock_run(folder, watcher):
            write_whole(folder.path / "config.yaml", dump(with_absolute_paths(config)).encode())
            check_unchanged(folder.path, with_absolute_paths(config))
            return _carry_on(folder, config, hardware, watcher, write_page)
    except Exception:
        if not (folder.path / "split.npz").exists():
            # Nothing was begun that could be resumed.
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def resume(
    path: str | Path, watcher: Watcher | None = None, write_page: WritePage | None = None
) -> Run:
    """Carries an unfinished run on from its last checkpoint, see `fednoro.resume`."""
    folder = RunFolder(Path(path).expanduser())
    if not folder.path.exists():
        raise UserError(f"{folder.path} does not exist")
    if not (folder.path / "config.yaml").is_file():
        raise UserError(f"{folder.path} is not a run folder: it has no config.yaml")
    if (folder.path / "flower.json").exists() and not folder.finished:
        raise UserError(
            f"{folder.path} was run on Flower: "
            f"carry it on with `fednoro flower run --resume {folder.path}`"
        )
    config = resolve(folder.path / "config.yaml")
    hardware, watcher = hardware_for(config), with_trackers(config, watcher or Watcher())
    with lock_run(folder, watcher):
        if folder.finished:
            return load(folder.path)
        check_unchanged(folder.path, config)
        return _carry_on(folder, config, hardware, watcher, write_page)


def hardware_for(config: Config) -> Hardware:
    """What the configuration asks for."""
    return Hardware(
        choose_device(config.device), config.engine, config.precision, config.compile, config.stack
    )


def free_folder(config: Config) -> Path:
    """Where a new run goes: as named, or else a name that is not taken."""
    out = Path(config.out).expanduser()
    if config.name is not None:
        return out / config.name
    method = section_name(config, "method").rpartition(":")[2].lower()  # of module:Class the class
    stem = f"{section_name(config, 'data')}-{method}-seed{config.seed}"
    number = 2
    path = out / stem
    with disk_errors(out):
        while path.exists():
            path, number = out / f"{stem}-{number}", number + 1
    return path


def _carry_on(
    folder: RunFolder,
    config: Config,
    hardware: Hardware,
    watcher: Watcher,
    write_page: WritePage | None,
) -> Run:
    threading.Thread(target=hardware.warm_up, name="fednoro warm-up").start()
    with laboratory(config, watcher, hardware) as lab:
        if not (folder.path / "environment.json").exists():
            write_json(folder.path / "environment.json", environment(hardware.device))
        result = _train(folder, lab, Packed(lab.initial).weights(), watcher)
    if write_page is not None:
        write_page(folder.path, watcher.warned)
    watcher.finished(result)
    return result


@contextmanager
def laboratory(config: Config, watcher: Watcher, hardware: Hardware | None = None) -> Iterator[Lab]:
    """The data and an engine for it, for work that is no run:
    making a federation, scoring its clients.
    """
    hardware = hardware or hardware_for(config)
    if hardware.device.type == "cpu":
        # Counted before a small network is limited to one thread.
        hardware = replace(hardware, lanes=torch.get_num_threads())
    with warnings_to(watcher):
        dataset = config.data.load(config.seed, watcher.progress)
        lab = Lab(config, dataset, hardware, watcher)
        net = lab.initial  # before the annotators: a model that cannot be built fails at once
    batch = (config.train.batch, lab.inputs, *dataset.images.shape[1:3])
    with worthwhile_threads(net, batch) if hardware.device.type == "cpu" else nullcontext():
        yield lab


def _train(folder: RunFolder, lab: Lab, start: Weights, watcher: Watcher) -> Run:
    config, dataset = lab.config, lab.dataset
    with warnings_to(watcher):
        federation = load_or_make_federation(folder, lab)
        clients = {client.id: client for client in federation.clients()}
        engine = lab.engine
        engine.serve(clients.values())
        state = restore(folder, clients)
        if state is None:
            start = lab.calibrate(start)
            state = State(start, 0, config.train.rounds, len(dataset.classes), config.seed)
    state = to_device(state, engine.device)

    evaluate = make_evaluator(engine, dataset, federation.test, federation.validation)
    watcher.started(config, folder.path, federation, state, engine.describe())
    state = drive(
        folder, config, state, engine.exchange, sorted(clients), evaluate, watcher, clients
    )
    image = tuple(dataset.images.shape[1:])
    setting = Setting(federation.classes, len(clients), federation.noisy, federation.leakage, image)
    return finish(folder, config, setting, state, engine.net)


def make_evaluator(
    engine: EagerEngine, dataset: Dataset, test: IntArray, validation: IntArray
) -> Callable[[Weights], Evaluation]:
    """Evaluates models on the test part
    and, where there is one, the validation part of `dataset`.
    """

    def measure(weights: Weights, part: IntArray) -> Evaluation:
        truth = torch.from_numpy(dataset.labels[part])
        logits = engine.logits(weights, part).float().cpu()
        counts = confusion(truth.numpy(), logits.argmax(1).numpy(), len(dataset.classes))
        return Evaluation(counts, float(F.cross_entropy(logits, truth)))

    def evaluate(weights: Weights) -> Evaluation:
        evaluation = measure(weights, test)
        if not len(validation):
            return evaluation
        return replace(evaluation, validation_bacc=measure(weights, validation).bacc)

    return evaluate


class Lab:
    """What training needs before there are clients: the network, the data and the hardware."""

    def __init__(
        self, config: Config, dataset: Dataset, hardware: Hardware, watcher: Watcher
    ) -> None:
        self.config, self.dataset, self.hardware, self.watcher = config, dataset, hardware, watcher
        self.inputs = config.model.inputs(dataset.images.shape[3])

    def network(self, purpose: str = "model", *keys: int) -> nn.Module:
        model, classes = self.config.model, len(self.dataset.classes)
        return initialise(model, self.inputs, classes, self.config.seed, purpose, *keys)

    @cached_property
    def initial(self) -> nn.Module:
        return self.network()

    @cached_property
    def engine(self) -> EagerEngine:
        return self._engine_on(self.hardware)

    def _engine_on(self, hardware: Hardware) -> EagerEngine:
        config = self.config
        return hardware.engine(self.network, self.dataset, self.inputs, config.train, config.seed)

    def calibrate(self, start: Weights) -> Weights:
        """What training starts from:
        `start`, with the BatchNorm statistics of the engine's clients where asked.
        """
        return (
            _recalibrate(start, self.engine, self.watcher)
            if self.config.model.recalibrate
            else start
        )

    def federate(self, folder: Path) -> Federation:
        """Makes the federation that the configuration describes:
        split.npz and split.csv in `folder`.
        """
        config = self.config
        parts = (self.dataset, config.split, config.partition, config.noise)
        federation = assemble(*parts, config.seed, self.annotate, config.method.check_clients)
        write_split(folder / "split.csv", self.dataset, federation.split)
        federation.save(folder / "split.npz")
        return federation

    def annotate(self, parts: Mapping[int, IntArray]) -> dict[int, FloatArray]:
        """Algorithm 1, lines 3 to 5: for each client a network of its own,
        trained on its clean labels.
        """
        opinions: dict[int, FloatArray] = {}
        if not parts:
            return opinions
        # The labels must not depend on how the training computes.
        exact = self.hardware.precision == "fp32"
        engine = self.engine if exact else self._engine_on(replace(self.hardware, precision="fp32"))
        engine.serve(
            Client(k, f"annotator {k}", index, self.dataset.labels[index])
            for k, index in parts.items()
        )
        client_ids = sorted(parts)
        for start in range(0, len(client_ids), ANNOTATORS):
            tasks = {
                k: Task(
                    "annotate", 0, Packed(self.network("annotator", k), engine.device).weights()
                )
                for k in client_ids[start : start + ANNOTATORS]
            }
            self.watcher.progress(
                "training annotators for the noisy clients", start, len(client_ids)
            )
            for item in engine.exchange(_Annotator(getattr(self.config.noise, "epochs", 1)), tasks):
                if isinstance(item, Failure):
                    raise item.error or RuntimeError(item.reason)
                opinions[item.client] = torch.as_tensor(item.metrics["p"]).cpu().numpy()
                self.watcher.progress(
                    "training annotators for the noisy clients", len(opinions), len(client_ids)
                )
        if not exact:
            del engine, tasks
            release_memory()
        return opinions


@dataclass(frozen=True)
class _Annotator(Method):
    """Plain training on true labels, and what the trained network thinks of them."""

    epochs: int = 1

    def work(self, task: Task, site: Site) -> Reply:
        weights, _ = site.train(task, self.loss, {}, epochs=self.epochs)
        return Reply(
            site.client, site.size, metrics={"p": site.logits(task, weights).double().softmax(1)}
        )


def _recalibrate(start: Weights, engine: EagerEngine, watcher: Watcher) -> Weights:
    """`start` with BatchNorm statistics from the clients' own images,
    averaged by size as in every round.
    """
    # One image has no variance.
    eligible_clients = [client for client in engine.clients.values() if len(client.index) > 1]
    if not engine.net.norms or not eligible_clients:
        why = "no client has two images" if engine.net.norms else "the network has no BatchNorm"
        warnings.warn(f"model.recalibrate changes nothing: {why}", FedNoRoWarning, stacklevel=2)
        return start

    def estimates() -> Iterator[tuple[Weights, float]]:
        for done, client in enumerate(eligible_clients):
            watcher.progress("re-estimating BatchNorm statistics", done, len(eligible_clients))
            yield engine.recalibrate(start, client), len(client.index)

    return average(estimates())


def load_or_make_federation(folder: RunFolder, lab: Lab) -> Federation:
    """The run's federation, made on the first call."""
    path = folder.path / "split.npz"
    if not path.exists():
        return lab.federate(folder.path)
    federation = Federation.load(path)
    if federation.fingerprint != fingerprint(lab.dataset):
        raise UserError(f"the data has changed since {folder.path} began: it cannot be resumed")
    return federation
