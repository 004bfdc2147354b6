"""Intracranial haemorrhage:
the RSNA 2019 challenge as Kaggle ships it, reduced to slices of a single type.

    stage_2_train/ID_000012eaf.dcm     one CT slice
    stage_2_train.csv                  ID,Label
                                       ID_000012eaf_epidural,0   a row per slice and type: six

(A. E. Flanders et al., Construction of a machine learning dataset through collaboration: the RSNA
2019 brain CT hemorrhage challenge, Radiology: Artificial Intelligence 2(3), 2020.)
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache as memoize
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from fednoro.core.files import disk_errors, write_json
from fednoro.core.options import Options, option
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache import preparation
from fednoro.data.cache.archive import Tree, open_tree
from fednoro.data.cache.csv_table import parse_table
from fednoro.data.cache.dicom import check_pydicom, decode_dicom, patient
from fednoro.data.cache.preparation import Plan, Recipe, Record, home_folder
from fednoro.data.cache.rows import Progress
from fednoro.data.dataset import Dataset

# the paper's order
CLASSES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
PUBLISHED_COUNTS = (1497, 13932, 8914, 14717, 28909)
_TRAIN_COUNTS = (1046, 9776, 6198, 10275, 20283)  # the paper's part of them
_TEST_COUNTS = tuple(
    all_ - train for all_, train in zip(PUBLISHED_COUNTS, _TRAIN_COUNTS, strict=True)
)
_HEADER_BYTES = 64 * 1024  # bytes that hold the patient's id, whatever follows
_TYPES = (*CLASSES, "any")
_ID_COLUMNS = ("id", "image", "image_id", "filename")
_ID = re.compile(rb"ID_[0-9A-Za-z]+")

Omissions = list[tuple[str, str]]  # name and reason
# What a label file says of each slice: bit t for type t labelled 1, bit 6 + t for type t labelled
# 0. Rows may come in any order and more than once, and a file of 4.5 million rows fits.
Labels = dict[bytes, int]
_BITS = {
    f"{kind},{label}".encode(): 1 << (t + 6 * (1 - label))
    for t, kind in enumerate(_TYPES)
    for label in (0, 1)
}
_CLASS_BITS = (1 << len(CLASSES)) - 1


@dataclass(frozen=True)
class Ich(Options):
    """RSNA 2019 brain CT: slices with exactly one of five types of haemorrhage."""

    section: ClassVar[str] = "data"

    path: str = option(
        help="folder that Kaggle's archive was unpacked to, or the zip itself", example="~/rsna"
    )
    size: int = option(128, "height and width in pixels", ge=8, le=2048)
    window: Literal["file", "brain", "triple"] = option(
        "file", "file: as each file says; brain; triple: brain, subdural and bone as channels"
    )
    ids: str | None = option(
        None, "CSV of ids with one column per type, or a folder with train.csv and test.csv"
    )
    groups: bool = option(
        False, "read each slice's patient first, so that a split can keep patients together"
    )
    cache: str | None = option(
        None, "where decoded images are kept; default $FEDNORO_CACHE or ~/.cache/fednoro"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window not in ("file", "brain", "triple"):
            raise UserError(f"data.window must be file, brain or triple, got {self.window!r}")

    def load(self, seed: int, progress: Progress | None = None) -> Dataset:
        """The slices, prepared on the first call and taken from the cache later;
        `seed` changes nothing.
        """
        recipe, decode, omissions = self.plan(progress)
        return preparation.load(recipe, decode, self.cache, progress, omissions)

    def plan(self, progress: Progress | None = None) -> Plan:
        """Which slices are to be decoded, and how."""
        check_pydicom()
        tree = open_tree(Path(self.path))
        if self.ids is None:
            name = _label_file(tree)
            file, folder = str(tree.path / name), name.removesuffix(".csv") + "/"
            labels = read_labels(tree.read(name), file)
            published_counts: list[tuple[int, ...]] = [PUBLISHED_COUNTS]
        else:
            file, folder = self.ids, ""
            labels = read_ids(Path(self.ids).expanduser())
            published_counts = [PUBLISHED_COUNTS, _TRAIN_COUNTS, _TEST_COUNTS]
        images = {
            name[:-4].rpartition("/")[2]: name for name in tree.names if _is_image(name, folder)
        }
        if not images:
            raise UserError(
                f"{tree.path} has no images {folder}ID_*.dcm: unpack all of Kaggle's archive"
            )
        records, omissions = _match(labels, images, file, published_counts)
        if self.ids is None:
            omissions += [
                (name, f"no row in {file}")
                for id, name in images.items()
                if id.encode() not in labels
            ]
        if not records:
            raise UserError(
                f"none of the {len(images):,} images in {tree.path} has exactly one type in {file}"
            )
        if self.groups:
            records = _add_patients(tree, records, self.cache, progress)
        recipe = Recipe(
            tree=tree,
            name="ich",
            records=tuple(records),
            classes=CLASSES,
            shape=(self.size, self.size, 3 if self.window == "triple" else 1),
            settings={"size": self.size, "window": self.window},
            processes=True,
        )
        return Plan(recipe, partial(decode_dicom, size=self.size, window=self.window), omissions)


def _label_file(tree: Tree) -> str:
    """The label file, at the top or one folder down; stage 2's before stage 1's."""
    for stage in ("stage_2_train", "stage_1_train"):
        label_files = [name for name in tree.names if re.fullmatch(rf"([^/]+/)?{stage}\.csv", name)]
        if len(label_files) > 1:
            raise UserError(
                f"{tree.path} has {label_files[0]} and {label_files[1]}: "
                "give the folder of one as data.path"
            )
        if label_files:
            return label_files[0]
    raise UserError(
        f"{tree.path} has no stage_2_train.csv at its top or one folder down: data.path "
        "must be the folder that Kaggle's rsna-intracranial-hemorrhage-detection was unpacked to"
    )


def _is_image(name: str, folder: str) -> bool:
    return name.startswith(folder) and name[-4:].lower() == ".dcm"


def read_labels(data: bytes, file: str) -> Labels:
    """Kaggle's label file, one row per slice and type;
    a `UserError` names the line that is not as it should be.
    """
    lines = io.BytesIO(data)
    header = lines.readline().removeprefix(b"\xef\xbb\xbf").strip()
    if header.lower() != b"id,label":
        raise UserError(f"{file} must begin with the line ID,Label, got {_text(header)}")
    labels: Labels = {}
    for number, line in enumerate(lines, 2):
        id, _, answer = line.rpartition(b"_")
        bit = _BITS.get(answer.rstrip())
        if bit is None and not line.strip():
            continue
        earlier_bits = labels.get(id)
        if bit is None or (earlier_bits is None and not _ID.fullmatch(id)):
            raise UserError(f"{file}, line {number}: {_describe_error(line)}")
        labels[id] = (earlier_bits or 0) | bit
    if not labels:
        raise UserError(f"{file} has no rows")
    return labels


def _describe_error(line: bytes) -> str:
    name, comma, label = line.strip().partition(b",")
    id, _, kind = name.rpartition(b"_")
    if not comma or not _ID.fullmatch(id):
        return f"expected a row such as ID_000012eaf_epidural,0, got {_text(line)}"
    if kind.decode("utf-8", "replace") not in _TYPES:
        return f"unknown type {_text(kind)}; known are {', '.join(_TYPES)}"
    return f"Label must be 0 or 1, got {_text(label)}"


def _text(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace").strip()[:80])


def read_ids(path: Path) -> Labels:
    """Ids with one-hot labels, from a file or from the train.csv and test.csv of a folder."""
    files = (
        [path]
        if path.is_file()
        else [path / name for name in ("train.csv", "test.csv") if (path / name).is_file()]
    )
    if not files:
        raise UserError(
            f"data.ids {path} is neither a CSV file nor a folder with train.csv or test.csv"
        )
    labels: Labels = {}
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from error
        head, newline, rest = data.partition(b"\n")  # names of columns in lower case
        for line, row in parse_table(head.lower() + newline + rest, str(file), CLASSES):
            id_text = next((row[name] for name in _ID_COLUMNS if name in row), None)
            if id_text is None:
                raise UserError(
                    f"{file} must have a column {' or '.join(_ID_COLUMNS)}, got {', '.join(row)}"
                )
            id = (
                re.sub(r"\.(dcm|png|jpe?g)$", "", id_text, flags=re.IGNORECASE)
                .rpartition("/")[2]
                .encode()
            )
            if not _ID.fullmatch(id):
                raise UserError(
                    f"{file}, line {line}: expected an id such as ID_000012eaf, got {id_text!r}"
                )
            ones = [kind for kind in CLASSES if row[kind] in ("1", "1.0")]
            if len(ones) != 1 or any(
                row[kind] not in ("0", "0.0") for kind in CLASSES if kind not in ones
            ):
                cells = ", ".join(row[kind] or "nothing" for kind in CLASSES)
                raise UserError(
                    f"{file}, line {line}: "
                    f"one of the five types must be 1, the others 0, got {cells}"
                )
            for kind in CLASSES:
                labels[id] = labels.get(id, 0) | _BITS[f"{kind},{int(kind in ones)}".encode()]
    if not labels:
        raise UserError(f"{files[0]} lists no ids")
    return labels


@memoize
def _verdict(bits: int) -> tuple[str | None, str | None]:
    """A slice's single type, or why it cannot be told; neither where it has none or several."""
    yes, no = bits & 63, bits >> 6
    for t, kind in enumerate(_TYPES):
        if yes & no & 1 << t:
            return None, f"labelled both 0 and 1 as {kind}"
    for t, kind in enumerate(CLASSES):
        if not (yes | no) & 1 << t:
            return None, f"no row for {kind}"
    single = (yes & _CLASS_BITS).bit_count() == 1
    return (_TYPES[(yes & _CLASS_BITS).bit_length() - 1] if single else None), None


def _match(
    labels: Labels, images: dict[str, str], file: str, published_counts: Collection[tuple[int, ...]]
) -> tuple[list[Record], Omissions]:
    """Slices with one type and an image, in the order of their ids;
    those that should have had both, and why not.
    """
    records: list[Record] = []
    omissions: Omissions = []
    count: Counter[str] = Counter()
    for key, bits in labels.items():
        label, doubt = _verdict(bits)
        if label is None and doubt is None:
            continue
        id = key.decode()
        count.update([label] if label else [])
        if doubt or id not in images:
            omissions.append(
                (images.get(id, f"{id}.dcm"), doubt or f"in {file}, but there is no such image")
            )
        elif label:
            records.append(Record(images[id], label, id))
    if tuple(count[kind] for kind in CLASSES) not in published_counts:
        differences = [
            f"{kind} {count[kind]:,}, not {n:,}"
            for kind, n in zip(CLASSES, PUBLISHED_COUNTS, strict=True)
            if count[kind] != n
        ]
        warnings.warn(
            f"{file} is not the published label file: {count.total():,} slices of one type, "
            f"not {sum(PUBLISHED_COUNTS):,} ({'; '.join(differences)})",
            FedNoRoWarning,
            stacklevel=3,
        )
    return sorted(records, key=lambda record: record.id), sorted(omissions)


def _add_patients(
    tree: Tree, records: list[Record], home: str | None, progress: Progress | None
) -> list[Record]:
    """The records with their patients, whose ids are in the headers;
    those are read once and remembered.
    """
    files = [(record.path, tree.stamp(record.path)) for record in records]
    key = hashlib.sha256(json.dumps([str(tree.path), files]).encode()).hexdigest()[:16]
    root = home_folder(home)
    patients_file = root / f"ich-patients-{key}.json"
    try:
        groups = json.loads(patients_file.read_text("utf-8"))
    except (OSError, ValueError):
        groups = []
        for record in records:
            groups.append(_patient(tree, record))
            if progress:
                progress("reading headers", len(groups), len(records))
        with disk_errors(patients_file):
            root.mkdir(parents=True, exist_ok=True)
        write_json(patients_file, groups)
    return [replace(record, group=group) for record, group in zip(records, groups, strict=True)]


def _patient(tree: Tree, record: Record) -> str:
    try:
        if tree.path.is_dir():
            with (tree.path / record.path).open("rb") as file:
                return patient(file.read(_HEADER_BYTES)) or record.id
        return patient(tree.read(record.path)) or record.id
    except (UserError, OSError):
        return record.id  # a patient of its own; the cache will say what is wrong with the file
