"""What the archives of dermoscopic images have in common:
images by their id, tables beside them, published counts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from posixpath import basename, splitext

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache.archive import Member, Tree, open_tree
from fednoro.data.cache.csv_table import Row, read_bytes
from fednoro.data.cache.image_file import Crop, decode_image
from fednoro.data.cache.preparation import Plan, Recipe, Record


@dataclass(frozen=True)
class Zips:
    """Some zips of a folder as one tree,
    with names such as `HAM10000_images_part_1.zip/ISIC_0024306.jpg`.
    """

    path: Path
    zips: Mapping[str, Tree]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._place_of))

    @cached_property
    def _place_of(self) -> dict[str, tuple[Tree, str]]:
        return {
            f"{zip_name}/{name}": (tree, name)
            for zip_name, tree in self.zips.items()
            for name in tree.names
        }

    def stamp(self, name: str) -> tuple[int, int] | None:
        if name not in self._place_of:
            return None
        tree, name_in_zip = self._place_of[name]
        return tree.stamp(name_in_zip)

    def member(self, name: str) -> Member:
        if name not in self._place_of:
            raise UserError("no such file")
        tree, name_in_zip = self._place_of[name]
        return tree.member(name_in_zip)

    def read(self, name: str) -> bytes:
        return self.member(name).read()


def open_path(path: str) -> Tree:
    """The folder or zip that `data.path` names."""
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"data.path {path} does not exist")
    return open_tree(root)


def find_images(tree: Tree, is_image_path: Callable[[str], bool]) -> tuple[Tree, dict[str, str]]:
    """The JPEG files whose path `is_image_path` accepts, by id, and the tree they are in.

    Where the folder has none, they are looked for in its zips, which need not be unpacked.
    """
    images = _images_by_id(tree, is_image_path)
    zips = [
        name
        for name in tree.names
        if name.lower().endswith(".zip") and is_image_path(f"{tree.path.name}/{name}")
    ]
    if images or not zips:
        return tree, images
    if not tree.path.is_dir():
        raise UserError(
            f"{tree.path} holds {zips[0]}, a zip in a zip: unpack the outer one and give its folder"
        )
    zipped_tree = Zips(tree.path, {name: open_tree(tree.path / name) for name in zips})
    return zipped_tree, _images_by_id(zipped_tree, is_image_path)


def _images_by_id(tree: Tree, is_image_path: Callable[[str], bool]) -> dict[str, str]:
    names = [name for name in tree.names if name.lower().endswith((".jpg", ".jpeg"))]
    # Backwards, so that the first of several copies stays.
    image_names = [name for name in reversed(names) if is_image_path(f"{tree.path.name}/{name}")]
    return {plain_id(splitext(basename(name))[0]): name for name in image_names}


def plain_id(image: str) -> str:
    """An image's id without the mark that the ISIC archive gives to reduced copies,
    of which tables know or do not.
    """
    return image.removesuffix("_downsampled")


def find_table(tree: Tree, *names: str) -> tuple[str, bytes] | None:
    """Where the first of these files is, in the tree or beside it, and its content."""
    for table_name in names:
        matches = [name for name in tree.names if basename(name) == table_name]
        if matches:
            name = min(matches, key=lambda name: name.count("/"))
            file = f"{tree.path}/{name}"
            try:
                return file, tree.read(name)
            except (OSError, UserError) as error:
                raise UserError(f"cannot read {file}: {error}") from error
        neighbour = tree.path.parent / table_name
        if neighbour.is_file():
            return str(neighbour), read_bytes(neighbour)
    return None


def refuse_duplicates(rows: Iterable[Row], column: str, file: str) -> None:
    """A `UserError` for a table that has an image twice, or a row without one."""
    line_of: dict[str, int] = {}
    for line, row in rows:
        if not row[column]:
            raise UserError(f"{file}, line {line}: {column} is empty")
        first_line = line_of.setdefault(plain_id(row[column]), line)
        if first_line != line:
            raise UserError(
                f"{file}, line {line}: {row[column]!r} is listed on line {first_line} already"
            )


def compare_counts(
    records: Sequence[Record], published_counts: Mapping[str, int], file: str
) -> None:
    """Warns where a label file has not the images per class that its authors published."""
    counts = Counter(record.label for record in records)
    differences = [
        f"{name} {counts[name]:,} ({n:,})"
        for name, n in published_counts.items()
        if counts[name] != n
    ]
    if differences:
        warnings.warn(
            f"{file} has {len(records):,} images; the published one has "
            f"{sum(published_counts.values()):,} and other counts per class: "
            f"{', '.join(differences)}",
            FedNoRoWarning,
            stacklevel=2,
        )


def plan_matched(
    name: str,
    tree: Tree,
    images: Mapping[str, str],
    records: Sequence[Record],
    classes: tuple[str, ...],
    size: int,
    crop: Crop,
) -> Plan:
    """What to ask of the cache: the labelled images that are there.
    `records` get their paths here, by id.

    Part of an archive is a data set too, so any number of labels may be without an image and of
    images without a label, as long as no class vanishes.
    """
    matches = [
        replace(record, path=images[plain_id(record.id)])
        for record in records
        if plain_id(record.id) in images
    ]
    absent_records = [record for record in records if plain_id(record.id) not in images]
    labelled_ids = {plain_id(record.id) for record in records}
    unlabelled_files = [file for image, file in sorted(images.items()) if image not in labelled_ids]
    if not matches:
        first = f"; first: {absent_records[0].id}.jpg" if absent_records else ""
        raise UserError(
            f"none of the {len(absent_records):,} labelled images is in {tree.path}{first}"
        )
    matched_labels = {record.label for record in matches}
    lost_records = [record for record in absent_records if record.label not in matched_labels]
    if lost_records:
        label, image = lost_records[0].label, lost_records[0].id
        raise UserError(
            f"no image of class {label} is in {tree.path}; the first labelled so is {image}.jpg"
        )
    if absent_records or unlabelled_files:
        warnings.warn(
            f"{tree.path}: {len(absent_records):,} of {len(records):,} labelled images are not "
            f"there and {len(unlabelled_files):,} images there have no label; both are left out",
            FedNoRoWarning,
            stacklevel=2,
        )
    return Plan(
        Recipe(tree, name, tuple(matches), classes, (size, size, 3), {"size": size, "crop": crop}),
        partial(decode_image, size=size, crop=crop, mode="RGB"),
        [
            *((f"{record.id}.jpg", "labelled, but not there") for record in absent_records),
            *((file, "has no label") for file in unlabelled_files),
        ],
    )
