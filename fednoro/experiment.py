"""From a configuration to a finished run: data, federation, engine, rounds, run folder."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fednoro.aggregate import average
from fednoro.clients import Client
from fednoro.config import Config, anchored, dump, resolve, section_name
from fednoro.data.dataset import Dataset
from fednoro.data.split import write_split
from fednoro.engine import EagerEngine, Hardware, choose_device, worthwhile_threads
from fednoro.federation import Federation, assemble, fingerprint
from fednoro.files import disk_errors, write_json, write_whole
from fednoro.methods import Method
from fednoro.metrics import best_last, confusion, detection
from fednoro.models import Packed, initialise
from fednoro.rounds import Evaluation, Turn, play
from fednoro.runs import RunFolder, Saver, environment, to_device
from fednoro.types import Failure, FedNoRoWarning, FloatArray, IntArray, Reply, Site, State, Task, UserError, Weights
from fednoro.verdicts import verdicts

ANNOTATORS = 16  # networks that are held at once


class Watcher:
    """Told what happens during a run; this one passes warnings on and keeps quiet otherwise."""

    def started(self, config: Config, folder: Path, federation: Federation, state: State, engine: str) -> None:
        """The federation stands and training begins, or goes on from `state`."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Preparation has come this far."""

    def warned(self, message: str) -> None:
        """Something degenerate was met and handled."""
        warnings.warn(message, FedNoRoWarning, stacklevel=2)

    def turned(self, turn: Turn) -> None:
        """An exchange was finished."""

    def stopped(self, folder: Path) -> None:
        """The run was interrupted and can be resumed."""

    def finished(self, run: Run) -> None:
        """All rounds are done."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    config: Config
    best: float
    last: float
    final: float
    detection: dict[str, Any] | None  # verdicts per client; recall, precision and exact match where the truth is known
    bacc: tuple[float, ...]  # per round
    seconds: float
    best_by_validation: float | None = None  # of the round that is best on the validation part, where there is one

    @cached_property
    def federation(self) -> Federation:
        return Federation.load(self.folder / "split.npz")


def run(
    config: Config | str | Path | Mapping[str, Any] = "digits", *overrides: str, watcher: Watcher | None = None
) -> Run:
    """Runs one experiment from the start: `fednoro.run("digits", "method=fedla", "seed=3")`."""
    if not isinstance(config, Config):
        config = resolve(config, overrides)
    elif overrides:
        raise UserError("overrides go with a preset, a file or a mapping, not with a finished Config")
    hardware, watcher = _hardware(config), watcher or Watcher()
    folder = RunFolder(_free_folder(config))
    folder.create()
    try:
        with _held(folder, watcher):
            write_whole(folder.path / "config.yaml", dump(anchored(config)).encode())
            return _carry_on(folder, config, hardware, watcher)
    except Exception:
        if not (folder.path / "split.npz").exists():
            shutil.rmtree(folder.path, ignore_errors=True)  # nothing was begun that could be resumed
        raise


def resume(path: str | Path, watcher: Watcher | None = None) -> Run:
    """Carries an unfinished run on from its last checkpoint, to the same bits as if it had never stopped."""
    folder = RunFolder(Path(path).expanduser())
    if not (folder.path / "config.yaml").is_file():
        raise UserError(f"{folder.path} is not a run folder: it has no config.yaml")
    config = resolve(folder.path / "config.yaml")
    hardware, watcher = _hardware(config), watcher or Watcher()
    with _held(folder, watcher):
        if folder.finished:
            return load(folder.path)
        return _carry_on(folder, config, hardware, watcher)


def _hardware(config: Config) -> Hardware:
    return Hardware(choose_device(config.device), config.engine, config.precision, config.compile)


def load(path: str | Path) -> Run:
    """A finished run from its folder."""
    folder = Path(path).expanduser()
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        facts = {key: result[key] for key in ("best", "last", "final", "detection", "seconds")}
        bacc = tuple(result["bacc"])
    except OSError as error:
        raise UserError(f"{folder} holds no finished run: result.json: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'result.json'} is damaged: delete it and resume the run ({error})") from error
    facts["best_by_validation"] = result.get("best_by_validation")
    return Run(folder, resolve(folder / "config.yaml"), bacc=bacc, **facts)


def _free_folder(config: Config) -> Path:
    out = Path(config.out).expanduser()
    if config.name is not None:
        return out / config.name
    stem = f"{section_name(config, 'data')}-{section_name(config, 'method')}-seed{config.seed}"
    number = 2
    path = out / stem
    with disk_errors(out):
        while path.exists():
            path, number = out / f"{stem}-{number}", number + 1
    return path


@contextmanager
def _held(folder: RunFolder, watcher: Watcher) -> Iterator[None]:
    """Keeps other processes out of the folder, and says how to go on where the user stops the run."""
    folder.lock()
    try:
        yield
    except KeyboardInterrupt:
        watcher.stopped(folder.path)
        raise
    finally:
        folder.unlock()


def _carry_on(folder: RunFolder, config: Config, hardware: Hardware, watcher: Watcher) -> Run:
    if hardware.device.type == "cpu":
        hardware = replace(hardware, lanes=torch.get_num_threads())  # before a small network is given one
    with _warnings_to(watcher):
        dataset = config.data.load(config.seed, watcher.progress)
        lab = _Lab(config, dataset, hardware, watcher)
        net = lab.network()  # before the annotators: a model that cannot be built fails at once
    with worthwhile_threads(net, (config.train.batch, lab.inputs, *dataset.images.shape[1:3])):
        if not (folder.path / "environment.json").exists():
            write_json(folder.path / "environment.json", environment(hardware.device))
        return _train(folder, lab, Packed(net).weights(), watcher)


def _train(folder: RunFolder, lab: _Lab, start: Weights, watcher: Watcher) -> Run:
    config, dataset = lab.config, lab.dataset
    with _warnings_to(watcher):
        federation = _federation(folder, lab, watcher)
        clients = {client.id: client for client in federation.clients()}
        engine = lab.engine
        engine.serve(clients.values())
        state = folder.restore(clients)
        if state is None:
            if config.model.recalibrate:
                start = _recalibrated(start, engine, watcher)
            state = State(start, 0, config.train.rounds, len(dataset.classes), config.seed)
    state = to_device(state, engine.device)

    def measure(weights: Weights, part: IntArray) -> Evaluation:
        truth = torch.from_numpy(dataset.labels[part])
        logits = engine.logits(weights, part).float().cpu()
        counts = confusion(truth.numpy(), logits.argmax(1).numpy(), len(dataset.classes))
        return Evaluation(counts, float(F.cross_entropy(logits, truth)))

    def evaluate(weights: Weights) -> Evaluation:
        tested = measure(weights, federation.test)
        if not len(federation.validation):
            return tested
        return replace(tested, validation_bacc=measure(weights, federation.validation).bacc)

    watcher.started(config, folder.path, federation, state, engine.describe())
    options = config.train
    unsaved, reached, saver = 0, folder.snapshot(state, clients), Saver(folder)
    try:
        for turn in play(
            config.method, state, engine.exchange, sorted(clients), evaluate, options.participation, options.failures
        ):
            folder.record(turn)
            state = turn.state
            reached = folder.snapshot(state, clients)
            watcher.turned(turn)
            for message in turn.warnings:
                watcher.warned(message)
            unsaved += 1  # exchanges: a method may have many before its first round ends
            if unsaved >= config.checkpoint_every or turn.task == "score" or state.round == state.rounds:
                saver.write(reached)
                unsaved = 0
        saver.wait()
    except KeyboardInterrupt:
        saver.write(reached)  # not what the logs and the clients' memories are now: that may be half a round
        saver.wait()
        raise
    result = _finish(folder, config, federation, state, engine.net)
    watcher.finished(result)
    return result


class _Lab:
    """What training needs before there are clients: the network, the data and the hardware."""

    def __init__(self, config: Config, dataset: Dataset, hardware: Hardware, watcher: Watcher) -> None:
        self.config, self.dataset, self.hardware, self.watcher = config, dataset, hardware, watcher
        self.inputs = config.model.inputs(dataset.images.shape[3])

    def network(self, purpose: str = "model", *keys: int) -> nn.Module:
        model, classes = self.config.model, len(self.dataset.classes)
        return initialise(model, self.inputs, classes, self.config.seed, purpose, *keys)

    @cached_property
    def engine(self) -> EagerEngine:
        return self._engine_on(self.hardware)

    def _engine_on(self, hardware: Hardware) -> EagerEngine:
        config = self.config
        return hardware.engine(self.network, self.dataset, self.inputs, config.train, config.seed)

    def annotate(self, parts: Mapping[int, IntArray]) -> dict[int, FloatArray]:
        """Algorithm 1, lines 3 to 5: for each client a network of its own, trained on its clean labels."""
        opinions: dict[int, FloatArray] = {}
        # The labels must not depend on how the training computes.
        exact = self.hardware.precision == "fp32"
        engine = self.engine if exact else self._engine_on(replace(self.hardware, precision="fp32"))
        engine.serve(Client(k, f"annotator {k}", index, self.dataset.labels[index]) for k, index in parts.items())
        todo = sorted(parts)
        for start in range(0, len(todo), ANNOTATORS):
            tasks = {
                k: Task("annotate", 0, Packed(self.network("annotator", k), engine.device).weights())
                for k in todo[start : start + ANNOTATORS]
            }
            self.watcher.progress("training annotators for the noisy clients", start, len(todo))
            for item in engine.exchange(_Annotator(getattr(self.config.noise, "epochs", 1)), tasks):
                if isinstance(item, Failure):
                    raise item.error or RuntimeError(item.reason)
                opinions[item.client] = torch.as_tensor(item.metrics["p"]).cpu().numpy()
                self.watcher.progress("training annotators for the noisy clients", len(opinions), len(todo))
        return opinions


@dataclass(frozen=True)
class _Annotator(Method):
    """Plain training on true labels, and what the trained network thinks of them."""

    epochs: int = 1

    def work(self, task: Task, site: Site) -> Reply:
        weights, _ = site.train(task, self.loss, {}, epochs=self.epochs)
        return Reply(site.client, site.size, metrics={"p": site.logits(task, weights).double().softmax(1)})


def _recalibrated(start: Weights, engine: EagerEngine, watcher: Watcher) -> Weights:
    """`start` with BatchNorm statistics from the clients' own images, averaged by size as in every round."""
    able = [client for client in engine.clients.values() if len(client.index) > 1]  # one image has no variance
    if not engine.net.norms or not able:
        why = "no client has two images" if engine.net.norms else "the network has no BatchNorm"
        warnings.warn(f"model.recalibrate changes nothing: {why}", FedNoRoWarning, stacklevel=2)
        return start

    def estimates() -> Iterator[tuple[Weights, float]]:
        for done, client in enumerate(able):
            watcher.progress("re-estimating BatchNorm statistics", done, len(able))
            yield engine.recalibrate(start, client), len(client.index)

    return average(estimates())


def _federation(folder: RunFolder, lab: _Lab, watcher: Watcher) -> Federation:
    path, config = folder.path / "split.npz", lab.config
    if path.exists():
        federation = Federation.load(path)
        if federation.fingerprint != fingerprint(lab.dataset):
            raise UserError(f"the data has changed since {folder.path} began: it cannot be resumed")
        return federation
    federation = assemble(lab.dataset, config.split, config.partition, config.noise, config.seed, lab.annotate)
    write_split(folder.path / "split.csv", lab.dataset, federation.split)
    federation.save(path)
    return federation


def _finish(folder: RunFolder, config: Config, federation: Federation, state: State, packed: Packed) -> Run:
    from safetensors.torch import save

    records = folder.rounds()
    bacc = [record["bacc"] for record in records]
    best, last, final = best_last(bacc)
    judged = state.memo.get("detection")
    verdict = None
    if judged is not None:
        known = verdicts(state)
        flagged = [known.get(k, True) for k in range(len(federation.parts))]  # as they were trained
        verdict = {**judged, "flagged": [k for k, noisy in enumerate(flagged) if noisy]}
        if federation.noisy is not None:
            recall, precision, exact = detection(flagged, federation.noisy)
            truth = [int(k) for k in federation.noisy.nonzero()[0]]
            verdict |= {"noisy": truth, "recall": recall, "precision": precision, "exact": exact}
        write_json(folder.path / "detection.json", verdict)
    # One entry: safetensors writes several in any order, and equal runs would end in different files.
    metadata = {"fednoro": json.dumps({"model": section_name(config, "model"), "classes": federation.classes})}
    write_whole(folder.path / "model.safetensors", save(packed.state_dict(state.model), metadata))
    result = {
        "best": best,
        "last": last,
        "final": final,
        "best_round": 1 + bacc.index(best),
        "rounds": len(bacc),
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "bacc": bacc,
        "detection": verdict,
        "leakage": federation.leakage,
    }
    if len(federation.validation):
        chosen = max(records, key=lambda record: record["validation_bacc"])  # the first of equals
        result |= {"best_by_validation": chosen["bacc"], "best_round_by_validation": chosen["round"]}
    write_json(folder.path / "result.json", result)
    return load(folder.path)


@contextmanager
def _warnings_to(watcher: Watcher) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, FedNoRoWarning):
            watcher.warned(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
