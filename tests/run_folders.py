"""Run folders made up for tests: any number of clients, classes and rounds, any
names, with or without the truth.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from fednoro.data.federation import Federation
from fednoro.experiment.run_folder.run_files import CLIENT_COLUMNS

WARMUP = 2


def make_run(
    path: Path,
    clients: int = 6,
    classes: int = 3,
    rounds: int = 5,
    names: Sequence[str] = (),
    class_names: Sequence[str] = (),
    known: bool = True,
    method: str = "fednoro",
    seed: int = 0,
    lift: float = 0.0,
    finished: bool = True,
) -> Path:
    """Writes what a run writes; every third client is noisy."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    noisy = np.arange(clients) % 3 == 2
    federation = _federation(rng, noisy, classes, names, class_names, known)
    federation.save(path / "split.npz")
    train = {"rounds": rounds}
    config = {
        "seed": seed,
        "data": {"name": "digits"},
        "noise": {"name": "symmetric"},
        "train": train,
    }
    config["method"] = {
        "name": method,
        **({"warmup": WARMUP, "behaviour": "paper"} if method == "fednoro" else {}),
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (path / "environment.json").write_text(
        json.dumps({"python": "3.11", "command": ["fednoro", "run"]})
    )
    bacc = _logs(path, rng, federation, noisy, rounds, method, lift)
    if method == "fednoro":
        (path / "detection.json").write_text(json.dumps(_detection(rng, federation, noisy, known)))
    if finished:
        (path / "result.json").write_text(
            json.dumps({"best": max(bacc), "bacc": bacc, "detection": None})
        )
    return path


def _federation(
    rng: np.random.Generator,
    noisy: np.ndarray,
    classes: int,
    names: Sequence[str],
    class_names: Sequence[str],
    known: bool,
) -> Federation:
    sizes = rng.integers(classes + 2, 4 * classes + 4, len(noisy))
    parts = tuple(np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1]))
    test = np.arange(sizes.sum(), sizes.sum() + 10 * classes)
    clean = np.concatenate(
        [rng.integers(0, classes, sizes.sum()), np.arange(10 * classes) % classes]
    )
    observed = clean.copy()
    for k in np.flatnonzero(noisy if known else []):
        observed[parts[k][::2]] = (observed[parts[k][::2]] + 1) % classes
    return Federation(
        train=np.arange(sizes.sum()),
        validation=np.arange(0),
        test=test,
        parts=parts,
        names=tuple(names) or tuple(f"client {k:02d}" for k in range(len(noisy))),
        classes=tuple(class_names) or tuple(f"kind {c}" for c in range(classes)),
        clean=clean,
        observed=observed,
        noisy=noisy if known else None,
        rates=np.where(noisy & known, 0.5, 0.0),
        fingerprint="made up",
    )


def _logs(
    path: Path,
    rng: np.random.Generator,
    federation: Federation,
    noisy: np.ndarray,
    rounds: int,
    method: str,
    lift: float,
) -> list[float]:
    classes, bacc = len(federation.classes), []
    with (
        (path / "clients.csv").open("w", newline="") as log,
        (path / "rounds.jsonl").open("w") as lines,
    ):
        table = csv.DictWriter(log, CLIENT_COLUMNS, lineterminator="\n")
        table.writeheader()
        for number in range(1, rounds + 1):
            robust = method == "fednoro" and number > WARMUP
            hits = rng.binomial(10, min(0.95, 0.4 + 0.5 * number / rounds + lift), classes)
            confusion = np.diag(hits)
            confusion[np.arange(classes), (np.arange(classes) + 1) % classes] += 10 - hits
            bacc.append(float(hits.mean() / 10))
            stage = (
                ("noise-robust training" if robust else "warm-up")
                if method == "fednoro"
                else "training"
            )
            record = {
                "round": number,
                "stage": stage,
                "seconds": 0.5,
                "bacc": bacc[-1],
                "loss": 1.0,
                "train_loss": 0.9,
            }
            lines.write(
                json.dumps({**record, "confusion": confusion.tolist(), "clients": len(noisy)})
                + "\n"
            )
            for k, part in enumerate(federation.parts):
                row = {
                    "round": number,
                    "task": "train",
                    "client": k,
                    "status": "ok",
                    "size": len(part),
                    "weight": 1 / len(noisy),
                }
                if robust:
                    row["distance"] = 0.5 + 0.1 * rng.random() if noisy[k] else 0
                    row |= {"lam": 0.8 * number / rounds} if noisy[k] else {}
                table.writerow(row)
    return bacc


def _detection(
    rng: np.random.Generator, federation: Federation, noisy: np.ndarray, known: bool
) -> dict[str, object]:
    rows = {}
    for k, part in enumerate(federation.parts):
        counts = np.bincount(federation.observed[part], minlength=len(federation.classes))
        losses = (1.8 if noisy[k] else 0.4) + 0.2 * rng.random(len(counts))
        rows[str(k)] = {
            "losses": [float(v) if n else None for v, n in zip(losses, counts, strict=True)],
            "counts": counts.tolist(),
            "round": WARMUP,
            "noisy": bool(noisy[k]),
            "posterior": float(noisy[k]),
        }
    found: dict[str, object] = {
        "reason": f"{noisy.sum()} of {len(noisy)} clients flagged",
        "clients": rows,
    }
    return {**found, **({"exact": True} if known else {})}
