"""HAM10000 (Tschandl et al., Scientific Data 2018):
10,015 dermoscopic images of 7,470 lesions from four sites.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename
from typing import ClassVar, Literal

from fednoro.core.options import Options, option
from fednoro.core.types import UserError
from fednoro.data.cache import preparation
from fednoro.data.cache.archive import Tree
from fednoro.data.cache.csv_table import parse_table, read_bytes
from fednoro.data.cache.preparation import Plan, Record
from fednoro.data.cache.rows import Progress
from fednoro.data.dataset import Dataset
from fednoro.data.sources.dermoscopy import (
    compare_counts,
    find_images,
    find_table,
    open_path,
    plan_matched,
    refuse_duplicates,
)

PUBLISHED_COUNTS = {
    7: {"mel": 1113, "nv": 6705, "bcc": 514, "akiec": 327, "bkl": 1099, "df": 115, "vasc": 142},
    8: {
        "MEL": 1113,
        "NV": 6705,
        "BCC": 514,
        "AK": 130,
        "BKL": 1099,
        "DF": 115,
        "VASC": 142,
        "SCC": 197,
    },
}
_LABELS = (
    "HAM10000_metadata.csv",
    "HAM10000_metadata",
    "HAM10000_metadata.tab",
    "ham10000_labels.csv",
)


@dataclass(frozen=True)
class Ham10000(Options):
    """HAM10000 as Harvard Dataverse ships it,
    or any folder or zip of its ISIC_*.jpg with a CSV of labels.

    Images of one lesion are a group; the column `site` or `dataset`, where there
    is one, makes natural clients.
    """

    section: ClassVar[str] = "data"

    path: str = option(
        help="folder with HAM10000_images_part_1 and _2 (or .zip) and the metadata, or a zip of "
        "images",
        example="~/HAM10000",
    )
    labels: str | None = option(
        None, "CSV with image_id, dx and more; default: HAM10000_metadata in or beside path"
    )
    size: int = option(224, "height and width in pixels", ge=8, le=2048)
    crop: Literal["resize", "center"] = option(
        "center", "resize: stretch to a square; center: short side, then the middle"
    )
    classes: Literal[7, 8] = option(7, "7: by dx; 8: as in ISIC 2019, by the column isic2019_class")
    cache: str | None = option(
        None, "where decoded images are kept; default $FEDNORO_CACHE or ~/.cache/fednoro"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop not in ("resize", "center"):
            raise UserError(f"data.crop must be resize or center, got {self.crop!r}")
        if self.classes not in PUBLISHED_COUNTS:
            raise UserError(f"data.classes must be 7 or 8, got {self.classes}")

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images, prepared on the first call and taken from the cache later;
        `seed` changes nothing.
        """
        plan = self.plan()
        return preparation.load(plan.recipe, plan.decode, self.cache, progress, plan.omissions)

    def plan(self, progress: Progress | None = None) -> Plan:
        """What `prepare` and `load` decode."""
        archive = open_path(self.path)
        file, content = self._table(archive)
        published_counts = PUBLISHED_COUNTS[self.classes]
        records = _records(content, file, self.classes)
        compare_counts(records, published_counts, file)
        tree, images = find_images(archive, _is_archive_file)
        if not images:
            raise UserError(
                f"no images in {archive.path}; "
                "expected HAM10000_images_part_1/ISIC_*.jpg or zips of them"
            )
        return plan_matched(
            "ham10000", tree, images, records, tuple(published_counts), self.size, self.crop
        )

    def _table(self, archive: Tree) -> tuple[str, bytes]:
        if self.labels is None:
            table = find_table(archive, *_LABELS)
            if table is None:
                raise UserError(
                    f"no {_LABELS[0]} in {archive.path} or beside it; name it in data.labels"
                )
            return table
        labels_path = Path(self.labels).expanduser()
        for file in (labels_path, archive.path / labels_path, archive.path.parent / labels_path):
            if file.is_file():
                return str(file), read_bytes(file)
        raise UserError(
            f"data.labels {self.labels} does not exist, "
            f"neither here nor in {archive.path} or beside it"
        )


def _is_archive_file(name: str) -> bool:
    """Any image that is named as the archive's are, and any zip that is named after it."""
    return bool(re.match(r"ISIC_.*\.jpe?g$|ham10000.*\.zip$", basename(name), re.IGNORECASE))


def _records(content: bytes, file: str, classes: int) -> list[Record]:
    rows = parse_table(content, file, ["image_id", "dx"])
    columns = rows[0][1].keys() if rows else ()
    label = "dx" if classes == 7 else "isic2019_class"
    if rows and label not in columns:
        raise UserError(
            f"{file} has no column isic2019_class, which tells actinic keratoses (AK) "
            "from carcinomas (SCC) among the akiec; add it or set data.classes=7"
        )
    refuse_duplicates(rows, "image_id", file)
    site = next((name for name in ("site", "dataset") if name in columns), None)
    records = []
    for line, row in rows:
        if row[label] not in PUBLISHED_COUNTS[classes]:
            class_names = ", ".join(PUBLISHED_COUNTS[classes])
            raise UserError(
                f"{file}, line {line}: {label} must be one of {class_names}, got {row[label]!r}"
            )
        records.append(
            Record(
                path="",
                label=row[label],
                id=row["image_id"],
                site=None if site is None else row[site] or "unknown",
                group=row["lesion_id"] or row["image_id"] if "lesion_id" in columns else None,
            )
        )
    return records
