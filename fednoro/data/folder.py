"""The user's own images, decoded once into a cache (see `cache.py`) and memory-mapped from then on."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fednoro.data import cache
from fednoro.data.cache import Record
from fednoro.data.dataset import Dataset
from fednoro.options import Options, option
from fednoro.types import UserError

_SUFFIXES = {".jpg", ".jpeg", ".png"}


@dataclass(frozen=True)
class Folder(Options):
    """Your own JPEG or PNG images: one folder per class, or a CSV of paths and labels."""

    section: ClassVar[str] = "data"

    path: str = option(help="folder with one folder per class, or that the CSV's paths are relative to")
    csv: str | None = option(None, "CSV with the columns path, label and optionally id, site, group")
    size: int = option(224, "height and width in pixels", ge=8, le=2048)
    crop: Literal["resize", "center"] = option("resize", "resize: stretch to a square; center: keep the middle")
    cache: str | None = option(None, "where decoded images are kept; default $FEDNORO_CACHE or ~/.cache/fednoro")
    grey: bool = option(False, "one channel in place of three")
    classes: tuple[str, ...] | None = option(
        None, "class names in order, the same at every site; default: those found, sorted"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop not in ("resize", "center"):
            raise UserError(f"data.crop must be resize or center, got {self.crop!r}")

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images, prepared on the first call and taken from the cache later; `seed` changes nothing."""
        root = Path(self.path).expanduser().resolve()
        if not root.is_dir():
            raise UserError(f"data.path {self.path} {'is not a folder' if root.exists() else 'does not exist'}")
        if self.csv is None:
            records = _from_class_folders(root)
        else:
            records = _from_csv(_find_csv(self.csv, root))
        recipe = cache.Recipe(
            root=root,
            records=tuple(records),
            classes=_classes(self.classes, records, root),
            shape=(self.size, self.size, 1 if self.grey else 3),
            settings={"size": self.size, "crop": self.crop, "grey": self.grey},
        )
        decode = partial(_decode, size=self.size, crop=self.crop, mode="L" if self.grey else "RGB")
        return cache.load(recipe, decode, self.cache, progress)


def _from_class_folders(root: Path) -> list[Record]:
    records = []
    for top in root.iterdir():
        if top.name.startswith(".") or not top.is_dir():
            continue
        for file in top.rglob("*"):
            inside = file.relative_to(root)
            hidden = any(part.startswith(".") for part in inside.parts)
            if file.suffix.lower() in _SUFFIXES and not hidden and not file.is_dir():
                records.append(Record(inside.as_posix(), top.name, inside.as_posix()))
    if not records:
        raise UserError(
            f"no images in {root}; expected CLASS/IMAGE.jpg, .jpeg or .png; "
            "name a CSV of paths and labels with data.csv where they are kept otherwise"
        )
    return sorted(records, key=lambda record: record.path)


def _find_csv(name: str, root: Path) -> Path:
    given = Path(name).expanduser()
    for file in (given, root / given):
        if file.is_file():
            return file
    raise UserError(f"data.csv {name} does not exist, neither here nor in {root}")


def _from_csv(file: Path) -> list[Record]:
    records: list[Record] = []
    label_of: dict[str, tuple[str, int]] = {}
    line_of: dict[str, int] = {}
    for line, row in _rows(file):
        record = _record(row, f"{file}, line {line}")
        label, before = label_of.setdefault(record.path, (record.label, line))
        if label != record.label:
            raise UserError(
                f"{file}, line {line}: {record.path} is labelled {record.label!r}, but {label!r} on line {before}"
            )
        if record.id in line_of:
            raise UserError(f"{file}, line {line}: {record.id!r} is listed on line {line_of[record.id]} already")
        line_of[record.id] = line
        records.append(record)
    if not records:
        raise UserError(f"{file} lists no images")
    return records


def _rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    """The table's rows with the line each one ends on."""
    rows = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text)
            header = [name.strip() for name in next(reader, [])]
            for column in ("path", "label"):
                if column not in header:
                    raise UserError(
                        f"{file} must have the columns path and label, got {', '.join(header) or 'nothing'}"
                    )
            for cells in reader:
                if len(cells) > len(header):
                    raise UserError(
                        f"{file}, line {reader.line_num}: {len(cells)} cells under {len(header)} columns; "
                        "put quotes around cells with commas"
                    )
                if any(cells):
                    padded = [cell.strip() for cell in cells] + [""] * (len(header) - len(cells))
                    rows.append((reader.line_num, dict(zip(header, padded, strict=True))))
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    return rows


def _record(row: dict[str, str], where: str) -> Record:
    for column in ("path", "label", "id", "site"):
        if row.get(column) == "":
            raise UserError(f"{where}: {column} is empty")
    path = PurePath(row["path"])
    if path.is_absolute() or path.drive or ".." in path.parts:
        raise UserError(f"{where}: {row['path']} leaves data.path; paths must be relative to it and without ..")
    name = row.get("id", path.as_posix())
    # An image without a group is a group of its own: patients are often known for some images only.
    group = row["group"] or name if "group" in row else None
    return Record(path.as_posix(), row["label"], name, row.get("site"), group)


def _classes(wanted: tuple[str, ...] | None, records: list[Record], root: Path) -> tuple[str, ...]:
    found = sorted({record.label for record in records})
    if wanted is None:
        if len(found) < 2:
            raise UserError(
                f"{root} has a single class, {found[0]!r}; at least two are needed, or name all in data.classes"
            )
        return tuple(found)
    if len(set(wanted)) != len(wanted) or len(wanted) < 2:
        raise UserError(f"data.classes must be two or more different names, got {', '.join(wanted) or 'none'}")
    for name in found:
        if name not in wanted:
            raise UserError(f"class {name!r} in {root} is not among data.classes ({', '.join(wanted)})")
    return tuple(wanted)


def _decode(file: Path, size: int, crop: str, mode: str) -> NDArray[np.uint8]:
    """One image, upright, 8 bits, size×size×channels."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file, formats=("JPEG", "PNG")) as opened:
            opened.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
            image: Image.Image = ImageOps.exif_transpose(opened)
    except UnidentifiedImageError:
        raise UserError("not a JPEG or PNG image") from None
    if image.mode.startswith("I"):
        image = Image.fromarray(np.rint(np.clip(np.asarray(image), 0, 65535) / 257).astype(np.uint8))
    elif image.has_transparency_data:
        # Dropping alpha would bring back colours nobody was meant to see.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    image = image.convert(mode)
    if crop == "center":
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    else:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size, size, -1)
