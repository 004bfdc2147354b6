"""ISIC 2019 (BCN20000, HAM10000 and MSK):
25,331 dermoscopic images of eight classes, from the official archive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fednoro.core.options import Options, option
from fednoro.core.types import UserError
from fednoro.data.cache import preparation
from fednoro.data.cache.csv_table import parse_table, read_table
from fednoro.data.cache.preparation import Plan, Record
from fednoro.data.cache.rows import Progress
from fednoro.data.dataset import Dataset
from fednoro.data.sources.dermoscopy import (
    compare_counts,
    find_images,
    find_table,
    open_path,
    plain_id,
    plan_matched,
    refuse_duplicates,
)

PUBLISHED_COUNTS = {
    "MEL": 4522,
    "NV": 12875,
    "BCC": 3323,
    "AK": 867,
    "BKL": 2624,
    "DF": 239,
    "VASC": 253,
    "SCC": 628,
}
_INPUT, _LABELS, _METADATA = (
    f"ISIC_2019_Training_{name}" for name in ("Input", "GroundTruth.csv", "Metadata.csv")
)


@dataclass(frozen=True)
class Isic2019(Options):
    """ISIC 2019 as its archive ships it: images, ground truth CSV, and lesions from the metadata.

    An image without a `lesion_id` is a group of its own.
    """

    section: ClassVar[str] = "data"

    path: str = option(
        help="folder with ISIC_2019_Training_Input (or .zip) "
        "and ISIC_2019_Training_GroundTruth.csv",
        example="~/ISIC2019",
    )
    size: int = option(224, "height and width in pixels", ge=8, le=2048)
    crop: Literal["resize", "center"] = option(
        "resize", "resize: stretch to a square; center: short side, then the middle"
    )
    sites: str | None = option(
        None, "CSV with the columns image and flamby_center, for natural clients"
    )
    cache: str | None = option(
        None, "where decoded images are kept; default $FEDNORO_CACHE or ~/.cache/fednoro"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop not in ("resize", "center"):
            raise UserError(f"data.crop must be resize or center, got {self.crop!r}")

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images, prepared on the first call and taken from the cache later;
        `seed` changes nothing.
        """
        plan = self.plan()
        return preparation.load(plan.recipe, plan.decode, self.cache, progress, plan.omissions)

    def plan(self, progress: Progress | None = None) -> Plan:
        """What `prepare` and `load` decode."""
        archive = open_path(self.path)
        table, metadata = find_table(archive, _LABELS), find_table(archive, _METADATA)
        if table is None:
            raise UserError(
                f"no {_LABELS} in {archive.path} or beside it; the official archive has it"
            )
        tree, images = find_images(archive, lambda name: _INPUT in name)
        if not images:
            raise UserError(
                f"no images in {archive.path}; expected {_INPUT}/ISIC_*.jpg or {_INPUT}.zip"
            )
        label_of = _labels(*table)
        group_of = None if metadata is None else _lesions(*metadata)
        site_of = None if self.sites is None else _centres(Path(self.sites).expanduser())
        records = [
            Record(
                path="",
                label=label,
                id=image,
                site=None if site_of is None else site_of.get(plain_id(image)) or "unknown",
                group=None if group_of is None else group_of.get(plain_id(image)) or image,
            )
            for image, label in label_of.items()
            if label != "UNK"
        ]
        compare_counts(records, PUBLISHED_COUNTS, table[0])
        unknown_ids = [image for image, label in label_of.items() if label == "UNK"]
        for image in unknown_ids:
            images.pop(plain_id(image), None)
        omissions = [
            (f"{image}.jpg", "labelled UNK, which is none of the eight classes")
            for image in unknown_ids
        ]
        plan = plan_matched(
            "isic2019", tree, images, records, tuple(PUBLISHED_COUNTS), self.size, self.crop
        )
        return plan._replace(omissions=[*omissions, *plan.omissions])


def _labels(file: str, content: bytes) -> dict[str, str]:
    rows = parse_table(content, file, ["image", *PUBLISHED_COUNTS])
    refuse_duplicates(rows, "image", file)
    return {row["image"]: _class(row, f"{file}, line {line}") for line, row in rows}


def _class(row: dict[str, str], location: str) -> str:
    """The one column of nine that holds a 1."""
    cells = {name: row[name] for name in (*PUBLISHED_COUNTS, "UNK") if name in row}
    try:
        values = {name: float(cell) for name, cell in cells.items()}
    except ValueError:
        values = {}
    ones = [name for name, value in values.items() if value == 1]
    if len(ones) != 1 or any(value not in (0, 1) for value in values.values()):
        raise UserError(
            f"{location}: {row['image']} must have a 1 for one class "
            f"and 0 for all others, got {cells}"
        )
    return ones[0]


def _lesions(file: str, content: bytes) -> dict[str, str]:
    rows = parse_table(content, file, ["image", "lesion_id"])
    return {plain_id(row["image"]): row["lesion_id"] for _, row in rows}


def _centres(file: Path) -> dict[str, str]:
    rows = read_table(file, ["flamby_center"])
    image = next((name for name in ("image", "image_id") if rows and name in rows[0][1]), None)
    if image is None:
        raise UserError(
            f"data.sites {file} must have the columns image and flamby_center, and rows"
        )
    return {plain_id(row[image]): row["flamby_center"] for _, row in rows}
