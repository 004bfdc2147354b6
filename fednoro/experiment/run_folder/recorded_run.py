"""A run folder as it is found: what can be read, and what is missing or damaged.

A report must come out of a killed run, an older version's folder and one with holes, so
every part is read for itself and a part that cannot be read becomes a line in
`missing`. Nothing here needs torch.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from fednoro.core.files import take_lock
from fednoro.core.types import BoolArray, FloatArray, IntArray, UserError

Content = TypeVar("Content")
PARTS = (
    "config.yaml",
    "rounds.jsonl",
    "clients.csv",
    "split.npz",
    "result.json",
    "environment.json",
    "detection.json",
)


@dataclass(frozen=True)
class Holdings:
    """Who holds what, before and after noise."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    clean: IntArray  # K×C counts
    observed: IntArray  # K×C counts
    noisy: BoolArray | None  # K; None where the truth is not known
    rates: FloatArray  # K
    test: IntArray  # C counts
    validation: int
    leakage: dict[str, dict[str, int]]
    digest: str  # equal for runs on the same data with the same clients, labels and test part


@dataclass(frozen=True)
class Ledger:
    """clients.csv by columns; NaN where a cell is empty."""

    round: IntArray
    client: IntArray
    task: tuple[str, ...]
    status: tuple[str, ...]
    weight: FloatArray
    distance: FloatArray
    lam: FloatArray

    def series(self, column: str) -> dict[int, tuple[IntArray, FloatArray]]:
        """For each client its training rounds and the column's values there, where it has any."""
        values: FloatArray = getattr(self, column)
        # A prefix of the task may be a visit before the rounds; only rounds belong to a curve.
        mask = np.isfinite(values) & np.array([task == "train" for task in self.task], dtype=bool)
        rounds, clients, values = self.round[mask], self.client[mask], values[mask]
        return {int(k): (rounds[clients == k], values[clients == k]) for k in np.unique(clients)}


@dataclass
class Recorded:
    """All that was found in one run folder."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    warnings: dict[str, list[int]] = field(default_factory=dict)  # message → rounds
    holdings: Holdings | None = None
    ledger: Ledger | None = None
    detection: dict[str, Any] | None = None
    status: str = "unfinished"  # finished, running, unfinished
    # on Flower: names and classes, without anybody's data
    sites: dict[str, Any] = field(default_factory=dict)
    missing: list[tuple[str, str]] = field(default_factory=list)  # file, what is wrong with it

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def bacc(self) -> FloatArray:
        return np.array([record["bacc"] for record in self.rounds], dtype=np.float64)

    @property
    def numbers(self) -> IntArray:
        return np.array([record["round"] for record in self.rounds], dtype=np.int64)

    @property
    def planned_rounds(self) -> int:
        """Rounds in all, as configured; those done where that is not known."""
        rounds = self.option("train", "rounds")
        return rounds if isinstance(rounds, int) and rounds > 0 else len(self.rounds)

    @property
    def confusion(self) -> IntArray | None:
        """Of the last round."""
        return self.rounds[-1].get("confusion") if self.rounds else None

    @property
    def classes(self) -> tuple[str, ...]:
        if self.holdings is not None:
            return self.holdings.classes
        count = 0 if self.confusion is None else len(self.confusion)
        names = self.sites.get("classes") or []
        return (
            tuple(map(str, names))
            if len(names) == count
            else tuple(f"class {c}" for c in range(count))
        )

    @property
    def names(self) -> dict[int, str]:
        """Names of the clients; made up from their numbers where split.npz is gone."""
        if self.holdings is not None:
            return dict(enumerate(self.holdings.names))
        client_ids = set() if self.ledger is None else {int(k) for k in self.ledger.client}
        client_ids |= {int(k) for k in (self.detection or {}).get("clients", {})}
        site_names = dict(enumerate(map(str, self.sites.get("sites") or [])))
        return {
            k: site_names.get(k, f"client {k:02d}") for k in sorted(client_ids | set(site_names))
        }

    @property
    def stages(self) -> list[tuple[str, int, int, float]]:
        """Name, first round, last round and seconds of each stretch of rounds."""
        stretches: list[tuple[str, int, int, float]] = []
        for record in self.rounds:
            name, number, seconds = record["stage"], record["round"], record["seconds"]
            if stretches and stretches[-1][0] == name:
                stretches[-1] = (name, stretches[-1][1], number, stretches[-1][3] + seconds)
            else:
                stretches.append((name, number, number, seconds))
        return stretches

    @property
    def named_noisy(self) -> tuple[int, ...] | None:
        """Clients that the configuration names noisy, so that none were looked for;
        None where it names nobody.
        """
        noisy = self.option("method", "noisy")
        return tuple(k for k in noisy if isinstance(k, int)) if isinstance(noisy, list) else None

    def option(self, section: str, key: str) -> Any:
        part = self.config.get(section)
        return part.get(key) if isinstance(part, dict) else None

    def choice(self, section: str) -> str:
        """What a section of the configuration chose."""
        value = self.config.get(section)
        name = value.get("name") if isinstance(value, dict) else value
        return str(name) if name is not None else "unknown"


def read(path: str | Path) -> Recorded:
    """Reads what there is; a folder without any part of a run is a mistake of the user's."""
    folder = Path(path).expanduser()
    if not any((folder / name).exists() for name in PARTS):
        what = "has nothing of a run in it" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {what}: give a run folder, such as runs/digits-fednoro-seed0")
    run = Recorded(folder)
    run.config_text = _attempt(
        run, "config.yaml", lambda file: file.read_text(encoding="utf-8"), ""
    )
    run.config = _attempt(
        run, "config.yaml", lambda file: _mapping(yaml.safe_load(run.config_text)), {}
    )
    run.environment = _attempt(run, "environment.json", _json, {})
    _attempt(run, "rounds.jsonl", lambda file: _read_rounds(run, file), None)
    run.ledger = _attempt(run, "clients.csv", _ledger, None)
    if (folder / "flower.json").exists() and not (folder / "split.npz").exists():
        # At real sites nobody else knows who holds what.
        run.sites = _attempt(run, "sites.json", _json, {})
    else:
        run.holdings = _attempt(run, "split.npz", _holdings, None)
    if (folder / "detection.json").exists():
        run.detection = _attempt(run, "detection.json", _detection, None)
    if (folder / "result.json").exists():
        run.result = _attempt(run, "result.json", _json, {})
        run.status = "finished"
    elif is_locked(folder):
        run.status = "running"
    _check_sizes(run)
    return run


def is_locked(folder: Path) -> bool:
    """Whether a process is working in the folder now."""
    try:
        with (folder / ".lock").open("r+") as file:
            return not take_lock(file)
    except OSError:
        return False


def _attempt(
    run: Recorded, name: str, reader: Callable[[Path], Content], default: Content
) -> Content:
    file = run.path / name
    try:
        return reader(file)
    except FileNotFoundError:
        why = "is not there"
    except Exception as error:  # each kind of damage raises another type
        lines = str(error).splitlines() or [type(error).__name__]
        why = f"cannot be read: {lines[0][:200]}"
    if (name, why) not in run.missing:
        run.missing.append((name, why))
    return default


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping")
    return value


def _json(file: Path) -> dict[str, Any]:
    return _mapping(json.loads(file.read_text(encoding="utf-8")))


def _read_rounds(run: Recorded, file: Path) -> None:
    damaged_lines = 0
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = _round(_mapping(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            # The last line may be half written by a run that goes on.
            damaged_lines += index < len(lines) - 1
            continue
        for message in record["warnings"]:
            run.warnings.setdefault(message, []).append(record["round"])
        if record["bacc"] is not None:
            run.rounds.append(record)
    if damaged_lines:
        lines_are = "line, which is" if damaged_lines == 1 else "lines, which are"
        run.missing.append((file.name, f"has {damaged_lines} damaged {lines_are} left out"))


def _round(record: dict[str, Any]) -> dict[str, Any]:
    """One line with the types that the figures rely on."""

    def number(key: str) -> float | None:
        value = record.get(key)
        return None if value is None or not math.isfinite(float(value)) else float(value)

    confusion = (
        None if record.get("confusion") is None else np.array(record["confusion"], dtype=np.int64)
    )
    if confusion is not None and (confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1]):
        raise ValueError("confusion is not square")
    bacc = number("bacc")
    if (bacc is not None and not 0 <= bacc <= 1) or (
        confusion is not None and confusion.min(initial=0) < 0
    ):
        raise ValueError("a share or a count is out of range")
    return {
        "round": int(record["round"]),
        "stage": str(record.get("stage", "training")),
        "seconds": number("seconds") or 0.0,
        "bacc": bacc,
        "loss": number("loss"),
        "train_loss": number("train_loss"),
        "validation_bacc": number("validation_bacc"),
        "confusion": confusion,
        "clients": record.get("clients"),
        "failed": [int(k) for k in record.get("failed", [])],
        "warnings": [str(message) for message in record.get("warnings", [])],
    }


def _ledger(file: Path) -> Ledger:
    with file.open(encoding="utf-8", errors="replace", newline="") as content:
        rows = csv.reader(content)
        header = next(rows, [])
        columns = {name: index for index, name in enumerate(header)}
        if not {"round", "client"} <= set(columns):
            raise ValueError("it has no columns round and client")
        records = [
            row for row in rows if len(row) == len(header) and row[columns["round"]].isdigit()
        ]

    def numbers(name: str) -> FloatArray:
        index = columns.get(name)
        return np.array(
            [float(row[index] or "nan") if index is not None else math.nan for row in records],
            dtype=np.float64,
        )

    def words(name: str) -> tuple[str, ...]:
        index = columns.get(name)
        return tuple("" if index is None else row[index] for row in records)

    return Ledger(
        np.array([int(row[columns["round"]]) for row in records], dtype=np.int64),
        np.array([int(row[columns["client"]]) for row in records], dtype=np.int64),
        words("task"),
        words("status"),
        numbers("weight"),
        numbers("distance"),
        numbers("lam"),
    )


def _holdings(path: Path) -> Holdings:
    with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
        members, sizes = file["members"].astype(np.int64), file["sizes"].astype(np.int64)
        clean, observed = file["clean"].astype(np.int64), file["observed"].astype(np.int64)
        test, noisy = file["test"].astype(np.int64), file["noisy"]
        classes = tuple(str(name) for name in file["classes"])
        names = tuple(str(name) for name in file["names"])
        rates = (
            file["rates"].astype(np.float64) if "rates" in file else np.full(len(names), math.nan)
        )
        validation = len(file["validation"]) if "validation" in file else 0
        leakage = json.loads(str(file["leakage"])) if "leakage" in file else {}
        fingerprint = str(file["fingerprint"]) if "fingerprint" in file else ""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if len(sizes) != len(names) or len(owner) != len(members):
        raise ValueError("its clients do not fit together")
    digest = hashlib.sha256(fingerprint.encode())
    for array in (members, sizes, observed[members], test):
        digest.update(np.ascontiguousarray(array).tobytes())

    def table(labels: IntArray) -> IntArray:
        cells = owner * len(classes) + labels[members]
        return np.bincount(cells, minlength=len(names) * len(classes)).reshape(
            len(names), len(classes)
        )

    return Holdings(
        names=names,
        classes=classes,
        clean=table(clean),
        observed=table(observed),
        noisy=noisy.astype(bool) if len(noisy) == len(names) else None,
        rates=rates,
        test=np.bincount(clean[test], minlength=len(classes)),
        validation=validation,
        leakage=leakage,
        digest=digest.hexdigest(),
    )


def _detection(file: Path) -> dict[str, Any]:
    content = _json(file)
    clients = {str(int(k)): _mapping(row) for k, row in _mapping(content["clients"]).items()}
    for row in clients.values():
        row["noisy"] = bool(row["noisy"])
        row["posterior"] = None if row.get("posterior") is None else float(row["posterior"])
    return {**content, "clients": clients, "reason": str(content.get("reason", ""))}


def _check_sizes(run: Recorded) -> None:
    """Parts that do not fit the others are taken for missing."""
    if run.holdings is None:
        return
    clients, classes = len(run.holdings.names), len(run.holdings.classes)
    if run.detection is not None and any(int(k) >= clients for k in run.detection["clients"]):
        run.detection = None
        run.missing.append(("detection.json", "names clients that split.npz does not have"))
    if any(
        record["confusion"] is not None and len(record["confusion"]) != classes
        for record in run.rounds
    ):
        for record in run.rounds:
            record["confusion"] = None
        run.missing.append(
            ("rounds.jsonl", "has confusion matrices of another number of classes than split.npz")
        )
    if run.ledger is not None and len(run.ledger.client) and run.ledger.client.max() >= clients:
        run.ledger = None
        run.missing.append(("clients.csv", "names clients that split.npz does not have"))
