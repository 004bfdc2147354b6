"""Checkpoints: all that a run needs to go on from, and what it was begun with.

A checkpoint is written beside its place and renamed into it. The two logs only grow; each
checkpoint knows how long they were, so that a resumed run cuts off whatever a killed one wrote
after it. A run is not resumed with other options than it was begun with (`check_unchanged`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fednoro.core.files import disk_errors, to_disk, whole_file, write_whole
from fednoro.core.types import State, UserError, Weights
from fednoro.core.wording import first_names
from fednoro.data.client import Client
from fednoro.engine.streams import current_stream, finish, stream
from fednoro.experiment.config.configuration import (
    RUNTIME_KEYS,
    Config,
    dump,
    flatten_config,
    resolve,
)
from fednoro.experiment.run_folder.run_files import LOGS, RunFolder

CHECKPOINTS_PER_RUN = 2
# What may change without another result than a run on other hardware or in another
# place would have. Data are told apart by what they are (`federation.fingerprint`), so
# that their files may move.
CHANGEABLE_KEYS = {*RUNTIME_KEYS, "data.path", "data.csv", "data.labels", "data.cache"}
LISTED_AT_MOST = 5  # changes that are told


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
        "packages": {
            name: package(name) for name in ("torch", "numpy", "scikit-learn", "safetensors")
        },
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def take_snapshot(folder: RunFolder, state: State, clients: Mapping[int, Client]) -> Snapshot:
    """This moment, to be saved now or later."""
    # Whoever copies the models need not wait for what is queued after this.
    finish(current_stream(state.model.values.device))
    memories = {k: dict(client.memory) for k, client in clients.items()}
    return Snapshot(state, memories, {name: _size(folder.path / name) for name in LOGS})


def save_checkpoint(folder: RunFolder, state: State, clients: Mapping[int, Client]) -> None:
    """Saves all that is needed to go on from here."""
    write_checkpoint(folder, take_snapshot(folder, state, clients))


def write_checkpoint(folder: RunFolder, snapshot: Snapshot) -> None:
    """Writes a checkpoint, then drops older ones."""
    state = snapshot.state
    tensors = {"values": state.model.values, "counters": state.model.counters}
    for name, model in state.models.items():
        tensors |= {f"kept.{name}.values": model.values, f"kept.{name}.counters": model.counters}
    for k, memory in snapshot.memories.items():
        tensors.update({f"memory.{k}.{name}": value for name, value in memory.items()})
    tensors = _copy_to_host(tensors)
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
    with disk_errors(folder.path):
        for log in (folder.path / name for name in LOGS):
            if log.exists():
                # Logs must not be shorter than the checkpoint says, even after a power cut.
                to_disk(log)
    with whole_file(
        folder.path / "checkpoints" / f"round-{state.round:05d}.safetensors"
    ) as temporary:
        _write_safetensors(temporary, tensors, metadata)
    for old in checkpoints(folder)[:-CHECKPOINTS_PER_RUN]:
        old.unlink(missing_ok=True)


def checkpoints(folder: RunFolder) -> list[Path]:
    """Checkpoint files, oldest first."""
    return sorted((folder.path / "checkpoints").glob("round-*.safetensors"))


def restore(folder: RunFolder, clients: Mapping[int, Client]) -> State | None:
    """The newest checkpoint's state, with the clients' memories put back and the logs cut to it."""
    with disk_errors(folder.path):
        for leftover in folder.path.rglob(".*.tmp"):
            leftover.unlink()
    paths = checkpoints(folder)
    if not paths:
        for name in LOGS:
            (folder.path / name).unlink(missing_ok=True)
        return None
    snapshot = load_checkpoint(paths[-1])
    for name, size in snapshot.logs.items():
        if _size(folder.path / name) < size:
            raise UserError(
                f"{folder.path / name} is shorter than it was at checkpoint {paths[-1]}: delete "
                "that checkpoint to resume from the one before"
            )
    for name, size in snapshot.logs.items():
        path = folder.path / name
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
        self._pending = self._thread.submit(write_checkpoint, self._folder, snapshot)

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
        names = [
            name.split(".")[1]
            for name in tensors
            if name.startswith("kept.") and name.endswith(".values")
        ]
        other_models = {
            name: Weights(
                tensors.pop(f"kept.{name}.values"), tensors.pop(f"kept.{name}.counters"), segments
            )
            for name in names
        }
        state = State(model, models=other_models, **facts)
    except Exception as error:  # each kind of damage raises another type
        why = (
            f"it has no {error}"
            if isinstance(error, KeyError)
            else (str(error).splitlines() or ["unreadable"])[0]
        )
        raise UserError(
            f"checkpoint {path} is corrupt ({why}): delete it to resume from the one before"
        ) from error
    memories: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        _, k, key = name.split(".", 2)
        memories.setdefault(int(k), {})[key] = value
    return Snapshot(state, memories, logs)


def to_device(state: State, device: torch.device) -> State:
    """The same state with its models on `device`."""

    def move(model: Weights) -> Weights:
        return replace(model, values=model.values.to(device))

    return replace(
        state,
        model=move(state.model),
        models={name: move(model) for name, model in state.models.items()},
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because safetensors refuses tensors that share storage;
    from a GPU past whatever it is busy with.
    """
    copies = dict[str, Tensor]()
    streams = {
        device: stream(device, priority=-1)
        for device in {tensor.device for tensor in tensors.values()}
    }
    for name, tensor in tensors.items():
        side_stream = streams[tensor.device]
        with torch.cuda.stream(side_stream):
            copies[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=side_stream is not None
            )
            copies[name].copy_(tensor.detach(), non_blocking=side_stream is not None)
    for side_stream in streams.values():
        finish(side_stream)
    return copies


def _write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """By the library's own way to a file, which leaves Python to others meanwhile."""
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error


def _checksum(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_unchanged(folder: Path, config: Config) -> None:
    """Keeps what the run in `folder` is begun with, or refuses what differs from it."""
    original = folder / "checkpoints" / "config.yaml"
    if not original.exists():
        write_whole(original, dump(config).encode())
        return
    try:
        first_options, options = flatten_config(resolve(original)), flatten_config(config)
    except UserError:
        # An earlier version had options that are gone. They had to be taken out of config.yaml.
        return
    if changed_keys := [
        key
        for key in {**first_options, **options}
        if key not in CHANGEABLE_KEYS and first_options.get(key) != options.get(key)
    ]:
        changes = [
            f"{key} (was {first_options.get(key)}, is {options.get(key)})" for key in changed_keys
        ]
        listing = first_names(changes, LISTED_AT_MOST)
        file = folder / "config.yaml"
        raise UserError(
            f"{file} has changed since the run began: {listing}. "
            f"Set it back, or begin another run with: fednoro run {file} name=another"
        )
