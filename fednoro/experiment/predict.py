"""A run's model on image files: decoded and normalised as the run's own images were."""

from __future__ import annotations

import csv
import glob
import io
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednoro.core.files import write_whole
from fednoro.core.types import FloatArray, UserError
from fednoro.data.cache.archive import LIMIT
from fednoro.experiment.drive import Run
from fednoro.experiment.trained_model import Trained, open_trained_model

# Of files in folders; archives of hospitals name DICOM files without an ending.
ENDINGS = {"", ".jpg", ".jpeg", ".png", ".dcm", ".dicom"}
BATCH = 64

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prediction:
    """What the model says of one file; without probabilities, why it could not be read."""

    path: str
    probabilities: FloatArray | None
    error: str = ""


@dataclass(frozen=True)
class Predictions:
    """All files in the order they were given."""

    classes: tuple[str, ...]
    rows: tuple[Prediction, ...]

    @property
    def readable(self) -> int:
        return sum(row.probabilities is not None for row in self.rows)

    def top(self, row: Prediction, count: int) -> list[tuple[str, float]]:
        """The most probable classes of a row, best first."""
        if row.probabilities is None:
            return []
        order = np.argsort(-row.probabilities, kind="stable")[:count]
        return [(self.classes[c], float(row.probabilities[c])) for c in order]


def predict(
    run: Run | str | Path,
    images: Iterable[str | Path],
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Predictions:
    """Class probabilities for files, folders and patterns such as `scans/*.png`;
    unreadable files have a reason.
    """
    if batch < 1:
        raise UserError(f"batch must be >= 1, got {batch}")
    model = open_trained_model(run)
    files = list(dict(list_files(images)).items())
    rows: list[Prediction] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("ignore")  # odd metadata of readable images
        for start in range(0, len(files), batch):
            part = files[start : start + batch]
            images_or_reasons = list(pool.map(partial(_decode, model), part))
            rows += _predict_decoded(model, [path for path, _ in part], images_or_reasons)
            if progress:
                progress("predicting", len(rows), len(files))
    return Predictions(model.classes, tuple(rows))


def list_files(images: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    """Every file that is meant, with the reason where there is none."""
    for pattern in map(str, images):
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if _may_be_image(file, path))
            yield from ((str(file), "") for file in files)
            if not files:
                yield str(path), "no JPEG, PNG or DICOM file in this folder"
        elif path.exists():
            yield str(path), "" if path.is_file() else "not a file"
        elif matches := sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207 - absolute patterns too
            yield from ((name, "") for name in matches if Path(name).is_file())
        else:
            yield str(path), "no such file"


def _may_be_image(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and file.suffix.lower() in ENDINGS and file.is_file()


def _decode(model: Trained, item: tuple[str, str]) -> NDArray[np.uint8] | str:
    """The pixels, or why there are none."""
    name, reason = item
    if reason:
        return reason
    try:
        with Path(name).open("rb") as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            return f"has more than {LIMIT // 2**20} MiB"
        return model.decode(data)
    except OSError as error:
        return error.strerror or " ".join(str(error).split()) or type(error).__name__
    except MemoryError:
        raise
    except Exception as error:  # damaged files make decoders raise anything
        return " ".join(str(error).split()) or type(error).__name__


def _predict_decoded(
    model: Trained, paths: Sequence[str], images_or_reasons: Sequence[NDArray[np.uint8] | str]
) -> list[Prediction]:
    pixels = [image for image in images_or_reasons if not isinstance(image, str)]
    probabilities = iter(
        model.logits(np.stack(pixels)).double().softmax(1).numpy() if pixels else ()
    )
    return [
        Prediction(path, None, image)
        if isinstance(image, str)
        else Prediction(path, next(probabilities))
        for path, image in zip(paths, images_or_reasons, strict=True)
    ]


def write(predictions: Predictions, path: Path) -> None:
    """All probabilities, as .csv or .json by the file's ending."""
    kinds = {".csv": _csv, ".json": _json}
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"--to takes a file that ends in {' or '.join(kinds)}, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, kind(predictions).encode("utf-8", "replace"))


def _csv(predictions: Predictions) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        [
            "path",
            "predicted",
            "probability",
            *(f"p({name})" for name in predictions.classes),
            "error",
        ]
    )
    for row in predictions.rows:
        best = [(name, f"{value:.6g}") for name, value in predictions.top(row, 1)] or [("", "")]
        shares = (
            [""] * len(predictions.classes)
            if row.probabilities is None
            else [f"{p:.6g}" for p in row.probabilities]
        )
        table.writerow([row.path, *best[0], *shares, row.error])
    return text.getvalue()


def _json(predictions: Predictions) -> str:
    rows: list[dict[str, Any]] = []
    for row in predictions.rows:
        if row.probabilities is None:
            rows.append({"path": row.path, "error": row.error})
            continue
        shares = {
            name: float(p) for name, p in zip(predictions.classes, row.probabilities, strict=True)
        }
        rows.append(
            {"path": row.path, "predicted": predictions.top(row, 1)[0][0], "probabilities": shares}
        )
    return (
        json.dumps({"classes": predictions.classes, "images": rows}, indent=1, ensure_ascii=False)
        + "\n"
    )
