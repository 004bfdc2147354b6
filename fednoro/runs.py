"""The run folder: everything that a resumed run, a report or a table needs.

    config.yaml  environment.json  split.csv  split.npz (partition, noise, what was flipped)
    rounds.jsonl  clients.csv  detection.json  checkpoints/  model.safetensors  result.json

Whole files are written beside their place and renamed into it. The two logs only grow; each checkpoint
knows how long they were, so that a resumed run cuts off whatever a killed one wrote after it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fednoro.core.files import disk_errors, take_lock, to_disk, whole, write_json
from fednoro.core.types import State, UserError, Weights
from fednoro.data.client import Client
from fednoro.engine.streams import current, finish, stream
from fednoro.rounds import Turn

CLIENT_COLUMNS = (
    "round", "task", "client", "status", "size", "loss", "weight", "distance", "lam",
    "sce", "confidence", "lid", "mu", "relabelled", "left_received", "left_own", "reason",
)  # fmt: skip
LOGS = ("rounds.jsonl", "clients.csv")
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class Snapshot:
    """A moment that a run can go on from."""

    state: State
    memories: Mapping[int, Mapping[str, Tensor]]  # what each client remembers
    logs: Mapping[str, int]  # how long each log was


def environment(device: torch.device) -> dict[str, Any]:
    """What the run was made with."""

    def package(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "fednoro": package("fednoro"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "packages": {name: package(name) for name in ("torch", "numpy", "scikit-learn", "safetensors")},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


class RunFolder:
    """One run's files, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    def create(self) -> None:
        """Makes the folder; an existing one is an error."""
        with disk_errors(self.path):
            try:
                self.path.mkdir(parents=True)
            except FileExistsError as error:
                begun = (self.path / "config.yaml").exists() and not self.finished
                on = f", or carry it on with: fednoro resume {shlex.quote(str(self.path))}" if begun else ""
                raise UserError(f"{self.path} exists already: choose another name={on}") from error
            (self.path / "checkpoints").mkdir()

    def lock(self) -> None:
        """Keeps a second process out; the lock goes with the process, however that ends."""
        with disk_errors(self.path):
            self._lock = (self.path / ".lock").open("w")
            free = take_lock(self._lock)
        if not free:
            self.unlock()
            raise UserError(f"{self.path} is in use by another process")

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    # The logs

    def record(self, turn: Turn) -> None:
        """Appends what happened in one exchange."""
        rows = io.StringIO()
        writer = csv.DictWriter(rows, CLIENT_COLUMNS, lineterminator="\n")
        log = self.path / "clients.csv"
        if not log.exists() or log.stat().st_size == 0:
            writer.writeheader()
        number = turn.state.round + (1 if turn.evaluation is None else 0)
        for answer in turn.answers:
            note = turn.state.notes.get(answer.client, {})
            known = {key: f"{value:.6g}" for key, value in {**answer.metrics, **note}.items() if key in CLIENT_COLUMNS}
            row = {"round": number, "task": turn.task, "client": answer.client, "status": answer.status}
            writer.writerow({**row, "size": answer.size, "reason": answer.reason, **known})
        self._append("clients.csv", rows.getvalue())
        if turn.evaluation is not None or turn.warnings:
            self._append("rounds.jsonl", json.dumps(round_record(turn)) + "\n")
        if "detection" in turn.state.memo and turn.task == "score":
            write_json(self.path / "detection.json", turn.state.memo["detection"])

    def _append(self, name: str, text: str) -> None:
        path = self.path / name
        with disk_errors(path), path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)

    def rounds(self) -> list[dict[str, Any]]:
        """The records of the finished rounds."""
        path = self.path / "rounds.jsonl"
        if not path.exists():
            return []
        try:
            *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")  # by a run that was killed meanwhile
            return [record for record in map(json.loads, lines) if "bacc" in record]
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}") from error

    # Checkpoints

    def snapshot(self, state: State, clients: Mapping[int, Client]) -> Snapshot:
        """This moment, to be saved now or later."""
        finish(current(state.model.values.device))  # whoever copies it need not wait for what comes after
        memories = {k: dict(client.memory) for k, client in clients.items()}
        return Snapshot(state, memories, {name: _size(self.path / name) for name in LOGS})

    def save(self, state: State, clients: Mapping[int, Client]) -> None:
        """Saves all that is needed to go on from here."""
        self.write(self.snapshot(state, clients))

    def write(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint, then drops older ones."""
        state = snapshot.state
        tensors = {"values": state.model.values, "counters": state.model.counters}
        for name, model in state.kept.items():
            tensors |= {f"kept.{name}.values": model.values, f"kept.{name}.counters": model.counters}
        for k, memory in snapshot.memories.items():
            tensors.update({f"memory.{k}.{name}": value for name, value in memory.items()})
        tensors = _on_host(tensors)
        facts = {
            "segments": state.model.segments,
            "round": state.round,
            "rounds": state.rounds,
            "classes": state.classes,
            "seed": state.seed,
            "stage": state.stage,
            "memo": state.memo,
            "logs": snapshot.logs,
        }
        metadata = {"state": json.dumps({**facts, "checksum": _checksum(facts, tensors)})}
        with disk_errors(self.path):
            for log in (self.path / name for name in LOGS):
                if log.exists():  # they must not be shorter than the checkpoint says, even after a power cut
                    to_disk(log)
        with whole(self.path / "checkpoints" / f"round-{state.round:05d}.safetensors") as beside:
            _write_safetensors(beside, tensors, metadata)
        for old in self.checkpoints()[:-KEPT_CHECKPOINTS]:
            old.unlink(missing_ok=True)

    def checkpoints(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"))

    def restore(self, clients: Mapping[int, Client]) -> State | None:
        """The newest checkpoint's state, with the clients' memories put back and the logs cut to it."""
        with disk_errors(self.path):
            for remains in self.path.rglob(".*.tmp"):
                remains.unlink()
        saved = self.checkpoints()
        if not saved:
            for name in LOGS:
                (self.path / name).unlink(missing_ok=True)
            return None
        snapshot = load_checkpoint(saved[-1])
        for name, size in snapshot.logs.items():
            if _size(self.path / name) < size:
                raise UserError(
                    f"{self.path / name} is shorter than it was at checkpoint {saved[-1]}: "
                    "delete that checkpoint to resume from the one before"
                )
        for name, size in snapshot.logs.items():
            path = self.path / name
            with disk_errors(path):
                if path.exists():
                    os.truncate(path, size)
        for k, client in clients.items():
            client.memory.clear()
            client.memory.update(snapshot.memories.get(k, {}))
        return snapshot.state


class Saver:
    """Writes checkpoints while the training goes on, one at a time."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def write(self, snapshot: Snapshot) -> None:
        """Begins to write; raises what went wrong with the one before."""
        self.wait()
        self._pending = self._thread.submit(self._folder.write, snapshot)

    def wait(self) -> None:
        """Returns when everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def load_checkpoint(path: Path) -> Snapshot:
    """What a checkpoint holds."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts.pop("checksum") != _checksum(facts, tensors):
            raise ValueError("its checksum does not match")
        logs, segments = facts.pop("logs"), tuple(facts.pop("segments"))
        model = Weights(tensors.pop("values"), tensors.pop("counters"), segments)
        names = [name.split(".")[1] for name in tensors if name.startswith("kept.") and name.endswith(".values")]
        kept = {
            name: Weights(tensors.pop(f"kept.{name}.values"), tensors.pop(f"kept.{name}.counters"), segments)
            for name in names
        }
        state = State(model, kept=kept, **facts)
    except Exception as error:  # each kind of damage raises another type
        why = f"it has no {error}" if isinstance(error, KeyError) else (str(error).splitlines() or ["unreadable"])[0]
        raise UserError(f"checkpoint {path} is corrupt ({why}): delete it to resume from the one before") from error
    memories: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        _, k, key = name.split(".", 2)
        memories.setdefault(int(k), {})[key] = value
    return Snapshot(state, memories, logs)


def to_device(state: State, device: torch.device) -> State:
    """The same state with its models on `device`."""

    def moved(model: Weights) -> Weights:
        return replace(model, values=model.values.to(device))

    return replace(state, model=moved(state.model), kept={name: moved(model) for name, model in state.kept.items()})


def round_record(turn: Turn) -> dict[str, Any]:
    """One line of rounds.jsonl."""
    record: dict[str, Any] = {"round": turn.state.round, "stage": turn.state.stage, "seconds": round(turn.seconds, 4)}
    if turn.evaluation is not None:
        trained = [a for a in turn.answers if a.status == "ok" and "loss" in a.metrics]
        images = sum(a.size for a in trained)
        record |= {
            "bacc": turn.evaluation.bacc,
            "loss": _number(turn.evaluation.loss),
            "recall": [_number(value) for value in turn.evaluation.recall],
            "confusion": turn.evaluation.confusion.tolist(),
            "train_loss": _number(sum(a.metrics["loss"] * a.size for a in trained) / images) if images else None,
            "clients": len(trained),
        }
        if turn.evaluation.validation_bacc is not None:
            record["validation_bacc"] = turn.evaluation.validation_bacc
    failed = [a.client for a in turn.answers if a.status != "ok"]
    return record | ({"failed": failed} if failed else {}) | ({"warnings": turn.warnings} if turn.warnings else {})


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because safetensors refuses tensors that share storage; from a GPU past whatever it is busy with."""
    copies = dict[str, Tensor]()
    streams = {device: stream(device, priority=-1) for device in {tensor.device for tensor in tensors.values()}}
    for name, tensor in tensors.items():
        beside = streams[tensor.device]
        with torch.cuda.stream(beside):
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=beside is not None)
            copies[name].copy_(tensor.detach(), non_blocking=beside is not None)
    for beside in streams.values():
        finish(beside)
    return copies


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """By the library's own way to a file, which leaves Python to others meanwhile."""
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:
        known = re.search(r"os error (\d+)", str(error))
        if known is None:
            raise
        raise OSError(int(known[1]), os.strerror(int(known[1]))) from error


def _checksum(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
