"""The user's own images,
decoded once into a cache (see `data/cache`) and memory-mapped from then on.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fednoro.core.options import Options, option
from fednoro.core.types import UserError
from fednoro.data.cache import preparation
from fednoro.data.cache.archive import Tree, open_tree
from fednoro.data.cache.csv_table import Row, parse_table, read_table
from fednoro.data.cache.image_file import Crop, decode_image
from fednoro.data.cache.preparation import Plan, Record
from fednoro.data.cache.rows import Progress
from fednoro.data.dataset import Dataset

if TYPE_CHECKING:
    from fednoro.data.cache.dicom import Window

_PICTURES, _DICOM = {".jpg", ".jpeg", ".png"}, {".dcm", ".dicom"}


@dataclass(frozen=True)
class Folder(Options):
    """Your own JPEG, PNG or DICOM images: one folder per class, or a CSV of paths and labels."""

    section: ClassVar[str] = "data"

    path: str = option(
        help="folder or zip with one folder per class, or that the CSV's paths are relative to",
        example="~/images",
    )
    csv: str | None = option(
        None, "CSV with the columns path, label and optionally id, site, group"
    )
    size: int = option(224, "height and width in pixels", ge=8, le=2048)
    crop: Literal["resize", "center"] = option(
        "resize", "resize: stretch to a square; center: keep the middle"
    )
    cache: str | None = option(
        None, "where decoded images are kept; default $FEDNORO_CACHE or ~/.cache/fednoro"
    )
    grey: bool = option(False, "one channel in place of three")
    window: Literal["file", "brain", "triple"] = option(
        "file",
        "DICOM grey values by the file's own window, "
        "the brain's, or brain, subdural and bone as channels",
    )
    classes: tuple[str, ...] | None = option(
        None, "class names in order, the same at every site; default: those found, sorted"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop not in ("resize", "center"):
            raise UserError(f"data.crop must be resize or center, got {self.crop!r}")
        if self.window not in ("file", "brain", "triple"):
            raise UserError(f"data.window must be file, brain or triple, got {self.window!r}")
        if self.window == "triple" and self.grey:
            raise UserError(
                "data.window triple has three channels: "
                "leave data.grey off, or choose file or brain"
            )

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images, prepared on the first call and taken from the cache later;
        `seed` changes nothing.
        """
        plan = self.plan()
        return preparation.load(plan.recipe, plan.decode, self.cache, progress, plan.omissions)

    def plan(self, progress: Progress | None = None) -> Plan:
        """What is to be decoded, and how."""
        tree = open_tree(Path(self.path))
        if self.csv is None:
            records = _records_from_folders(tree)
        else:
            records = _records_from_csv(*_read_csv(self.csv, tree), _finder(tree))
        kinds = {PurePosixPath(record.path).suffix.lower() for record in records}
        if kinds & _DICOM:
            from fednoro.data.cache.dicom import check_pydicom

            check_pydicom()
        recipe = preparation.Recipe(
            tree=tree,
            name=tree.path.name.removesuffix(".zip"),
            records=tuple(records),
            classes=_classes(self.classes, records, tree.path),
            shape=(self.size, self.size, 1 if self.grey else 3),
            settings={
                "size": self.size,
                "crop": self.crop,
                "grey": self.grey,
                "window": self.window,
            },
            processes=not kinds <= _PICTURES,
        )
        decode = partial(
            decode_file, size=self.size, crop=self.crop, grey=self.grey, window=self.window
        )
        return Plan(recipe, decode, _list_omissions(tree, records, has_csv=self.csv is not None))


def decode_file(
    data: bytes, size: int, crop: Crop, grey: bool, window: Window
) -> NDArray[np.uint8]:
    """By what the file holds, not by what its name says."""
    from fednoro.data.cache.dicom import decode_dicom, is_dicom

    if not is_dicom(data):
        return decode_image(data, size, crop, "L" if grey else "RGB")
    image = decode_dicom(data, size, window, crop)
    return image if grey or image.shape[2] == 3 else np.repeat(image, 3, axis=2)


def _records_from_folders(tree: Tree) -> list[Record]:
    top = _top_folder(tree)
    records = []
    for name in tree.names:
        inside = name.removeprefix(top)
        if "/" in inside and _may_be_image(name):
            records.append(Record(name, inside.partition("/")[0], inside))
    if not records:
        raise UserError(
            f"no images in {tree.path}; expected CLASS/IMAGE.jpg, .jpeg, .png or .dcm; "
            "name a CSV of paths and labels with data.csv where they are kept otherwise"
        )
    return records


def _may_be_image(name: str) -> bool:
    # Archives of hospitals name DICOM files without an ending;
    # what such a file holds shows when it is decoded.
    return PurePosixPath(name).suffix.lower() in {"", *_PICTURES, *_DICOM}


def _list_omissions(tree: Tree, records: list[Record], has_csv: bool) -> list[tuple[str, str]]:
    """What lies among the images and is none of them:
    images that the CSV does not list, or else other files.
    """
    record_paths, top = {record.path for record in records}, _top_folder(tree)
    other_names = [name for name in tree.names if name not in record_paths]
    if has_csv:
        return [(name, "the CSV does not list it") for name in other_names if _may_be_image(name)]
    return [
        (name, "not a JPEG, PNG or DICOM file")
        for name in other_names
        if "/" in name.removeprefix(top)
    ]


def _top_folder(tree: Tree) -> str:
    """The folder that a zip was made of, where everything is inside it, with its slash."""
    if tree.path.is_dir():
        return ""
    top_names = {name.partition("/")[0] for name in tree.names}
    return (
        f"{top_names.pop()}/"
        if len(top_names) == 1 and all(name.count("/") > 1 for name in tree.names)
        else ""
    )


def _finder(tree: Tree) -> Callable[[str], str]:
    """From a path as a table spells it to a name in the tree: an ü may be one character or two."""
    name_of = {unicodedata.normalize("NFC", name): name for name in tree.names}
    top_names = {name.partition("/")[0] for name in name_of}
    prefixes = ("", f"{top_names.pop()}/") if len(top_names) == 1 else ("",)

    def find(path: str) -> str:
        candidates = (prefix + unicodedata.normalize("NFC", path) for prefix in prefixes)
        return next((name_of[name] for name in candidates if name in name_of), path)

    return find


def _read_csv(name: str, tree: Tree) -> tuple[str, list[Row]]:
    """The table from a file, or from the folder or zip itself; with what to call it in messages."""
    columns = ("path", "label")
    csv_path = Path(name).expanduser()
    for file in (csv_path, tree.path / csv_path):
        if file.is_file():
            return str(file), read_table(file, columns)
    name_in_tree = _finder(tree)(name)
    if name_in_tree in tree.names:
        location = f"{tree.path}/{name_in_tree}"
        return location, parse_table(tree.read(name_in_tree), location, columns)
    raise UserError(f"data.csv {name} does not exist, neither here nor in {tree.path}")


def _records_from_csv(file: str, rows: Iterable[Row], find: Callable[[str], str]) -> list[Record]:
    records: list[Record] = []
    label_of: dict[str, tuple[str, int]] = {}
    line_of: dict[str, int] = {}
    for line, row in rows:
        record = _record(row, f"{file}, line {line}", find)
        label, first_line = label_of.setdefault(record.path, (record.label, line))
        if label != record.label:
            raise UserError(
                f"{file}, line {line}: {record.path} is labelled {record.label!r}, "
                f"but {label!r} on line {first_line}"
            )
        if record.id in line_of:
            raise UserError(
                f"{file}, line {line}: {record.id!r} is listed on line {line_of[record.id]} already"
            )
        line_of[record.id] = line
        records.append(record)
    if not records:
        raise UserError(f"{file} lists no images")
    return records


def _record(row: dict[str, str], location: str, find: Callable[[str], str]) -> Record:
    for column in ("path", "label", "id", "site"):
        if row.get(column) == "":
            raise UserError(f"{location}: {column} is empty")
    path = PurePath(row["path"])
    if path.is_absolute() or path.drive or ".." in path.parts:
        raise UserError(
            f"{location}: {row['path']} leaves data.path; "
            "paths must be relative to it and without .."
        )
    name = row.get("id", path.as_posix())
    # An image without a group is a group of its own: patients are often known for some images only.
    group = row["group"] or name if "group" in row else None
    return Record(find(path.as_posix()), row["label"], name, row.get("site"), group)


def _classes(
    class_names: tuple[str, ...] | None, records: list[Record], root: Path
) -> tuple[str, ...]:
    labels = sorted({record.label for record in records})
    if class_names is None:
        if len(labels) < 2:
            raise UserError(
                f"{root} has a single class, {labels[0]!r}; "
                "at least two are needed, or name all in data.classes"
            )
        return tuple(labels)
    if len(set(class_names)) != len(class_names) or len(class_names) < 2:
        raise UserError(
            "data.classes must be two or more different names, "
            f"got {', '.join(class_names) or 'none'}"
        )
    for name in labels:
        if name not in class_names:
            raise UserError(
                f"class {name!r} in {root} is not among data.classes ({', '.join(class_names)})"
            )
    return tuple(class_names)
