"""Makes and locks a run folder, and writes its logs: what each round and each client did.

A folder has everything that a resumed run, a report or a table needs:

    config.yaml  environment.json  split.csv  split.npz (partition, noise, what was flipped)
    rounds.jsonl  clients.csv  detection.json  checkpoints/  model.safetensors  result.json

`recorded_run` reads it, damaged or not.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from fednoro.core.files import disk_errors, take_lock, write_json
from fednoro.core.types import UserError

if TYPE_CHECKING:  # it loads torch
    from fednoro.experiment.rounds import Turn

CLIENT_COLUMNS = (
    "round", "task", "client", "status", "size", "loss", "weight", "distance", "lam",
    "sce", "confidence", "lid", "mu", "relabelled", "left_received", "left_own", "reason",
)  # fmt: skip
LOGS = ("rounds.jsonl", "clients.csv")


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
                resumable = (self.path / "config.yaml").exists() and not self.finished
                advice = (
                    f", or carry it on with: fednoro resume {shlex.quote(str(self.path))}"
                    if resumable
                    else ""
                )
                raise UserError(
                    f"{self.path} exists already: choose another name={advice}"
                ) from error
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
            figures = {
                key: f"{value:.6g}"
                for key, value in {**answer.metrics, **note}.items()
                if key in CLIENT_COLUMNS
            }
            row = {
                "round": number,
                "task": turn.task,
                "client": answer.client,
                "status": answer.status,
            }
            writer.writerow({**row, "size": answer.size, "reason": answer.reason, **figures})
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
            # The last line was not finished by a run that was killed, or is empty.
            *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
            return [record for record in map(json.loads, lines) if "bacc" in record]
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}") from error


def round_record(turn: Turn) -> dict[str, Any]:
    """One line of rounds.jsonl."""
    record: dict[str, Any] = {
        "round": turn.state.round,
        "stage": turn.state.stage,
        "seconds": round(turn.seconds, 4),
    }
    if turn.evaluation is not None:
        training_answers = [a for a in turn.answers if a.status == "ok" and "loss" in a.metrics]
        images = sum(a.size for a in training_answers)
        record |= {
            "bacc": turn.evaluation.bacc,
            "loss": _number(turn.evaluation.loss),
            "recall": [_number(value) for value in turn.evaluation.recall],
            "confusion": turn.evaluation.confusion.tolist(),
            "train_loss": _number(
                sum(a.metrics["loss"] * a.size for a in training_answers) / images
            )
            if images
            else None,
            "clients": len(training_answers),
        }
        if turn.evaluation.validation_bacc is not None:
            record["validation_bacc"] = turn.evaluation.validation_bacc
    failed_clients = [a.client for a in turn.answers if a.status != "ok"]
    return (
        record
        | ({"failed": failed_clients} if failed_clients else {})
        | ({"warnings": turn.warnings} if turn.warnings else {})
    )


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
