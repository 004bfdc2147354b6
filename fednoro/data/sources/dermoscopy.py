"""What the archives of dermoscopic images have in common: images by their id, tables
beside them, published counts.
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
    """Some zips of a folder as one tree, with names such as
    `HAM10000_images_part_1.zip/ISIC_0024306.jpg`.
    """

    path: Path
    zips: Mapping[str, Tree]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._inside))

    @cached_property
    def _inside(self) -> dict[str, tuple[Tree, str]]:
        return {
            f"{zipped}/{name}": (tree, name)
            for zipped, tree in self.zips.items()
            for name in tree.names
        }

    def stamp(self, name: str) -> tuple[int, int] | None:
        if name not in self._inside:
            return None
        tree, inside = self._inside[name]
        return tree.stamp(inside)

    def member(self, name: str) -> Member:
        if name not in self._inside:
            raise UserError("no such file")
        tree, inside = self._inside[name]
        return tree.member(inside)

    def read(self, name: str) -> bytes:
        return self.member(name).read()


def open_path(path: str) -> Tree:
    """The folder or zip that `data.path` names."""
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"data.path {path} does not exist")
    return open_tree(root)


def find_images(tree: Tree, wanted: Callable[[str], bool]) -> tuple[Tree, dict[str, str]]:
    """The JPEG files whose path is `wanted`, by id, and the tree they are in.

    Where the folder has none, they are looked for in its zips, which need not be unpacked.
    """
    images = _by_id(tree, wanted)
    zips = [
        name
        for name in tree.names
        if name.lower().endswith(".zip") and wanted(f"{tree.path.name}/{name}")
    ]
    if images or not zips:
        return tree, images
    if not tree.path.is_dir():
        raise UserError(
            f"{tree.path} holds {zips[0]}, a zip in a zip: unpack the outer one and give its folder"
        )
    packed = Zips(tree.path, {name: open_tree(tree.path / name) for name in zips})
    return packed, _by_id(packed, wanted)


def _by_id(tree: Tree, wanted: Callable[[str], bool]) -> dict[str, str]:
    names = [name for name in tree.names if name.lower().endswith((".jpg", ".jpeg"))]
    # Backwards, so that the first of several copies stays.
    found = [name for name in reversed(names) if wanted(f"{tree.path.name}/{name}")]
    return {plain(splitext(basename(name))[0]): name for name in found}


def plain(image: str) -> str:
    """An image's id without the mark that the ISIC archive gives to reduced copies, of
    which tables know or do not.
    """
    return image.removesuffix("_downsampled")


def find_table(tree: Tree, *names: str) -> tuple[str, bytes] | None:
    """Where the first of these files is, in the tree or beside it, and its content."""
    for wanted in names:
        inside = [name for name in tree.names if basename(name) == wanted]
        if inside:
            name = min(inside, key=lambda name: name.count("/"))
            file = f"{tree.path}/{name}"
            try:
                return file, tree.read(name)
            except (OSError, UserError) as error:
                raise UserError(f"cannot read {file}: {error}") from error
        beside = tree.path.parent / wanted
        if beside.is_file():
            return str(beside), read_bytes(beside)
    return None


def refuse_duplicates(rows: Iterable[Row], column: str, file: str) -> None:
    """A `UserError` for a table that has an image twice, or a row without one."""
    line_of: dict[str, int] = {}
    for line, row in rows:
        if not row[column]:
            raise UserError(f"{file}, line {line}: {column} is empty")
        before = line_of.setdefault(plain(row[column]), line)
        if before != line:
            raise UserError(
                f"{file}, line {line}: {row[column]!r} is listed on line {before} already"
            )


def compare_counts(records: Sequence[Record], published: Mapping[str, int], file: str) -> None:
    """Warns where a label file has not the images per class that its authors published."""
    found = Counter(record.label for record in records)
    other = [f"{name} {found[name]:,} ({n:,})" for name, n in published.items() if found[name] != n]
    if other:
        warnings.warn(
            f"{file} has {len(records):,} images; the published one has "
            f"{sum(published.values()):,} and other counts per class: {', '.join(other)}",
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
    left_out: Sequence[tuple[str, str]] = (),
) -> Plan:
    """What to ask of the cache: the labelled images that are there. `records`
    get their paths here, by id.

    Part of an archive is a data set too, so any number of labels may be without an image and of
    images without a label, as long as no class vanishes.
    """
    there = [
        replace(record, path=images[plain(record.id)])
        for record in records
        if plain(record.id) in images
    ]
    absent = [record for record in records if plain(record.id) not in images]
    labelled = {plain(record.id) for record in records}
    unlabelled = [file for image, file in sorted(images.items()) if image not in labelled]
    if not there:
        first = f"; first: {absent[0].id}.jpg" if absent else ""
        raise UserError(f"none of the {len(absent):,} labelled images is in {tree.path}{first}")
    found = {record.label for record in there}
    vanished = [record for record in absent if record.label not in found]
    if vanished:
        label, image = vanished[0].label, vanished[0].id
        raise UserError(
            f"no image of class {label} is in {tree.path}; the first labelled so is {image}.jpg"
        )
    if absent or unlabelled:
        warnings.warn(
            f"{tree.path}: {len(absent):,} of {len(records):,} labelled images are not there and "
            f"{len(unlabelled):,} images there have no label; both are left out",
            FedNoRoWarning,
            stacklevel=2,
        )
    return Plan(
        Recipe(tree, name, tuple(there), classes, (size, size, 3), {"size": size, "crop": crop}),
        partial(decode_image, size=size, crop=crop, mode="RGB"),
        [
            *left_out,
            *((f"{record.id}.jpg", "labelled, but not there") for record in absent),
            *((file, "has no label") for file in unlabelled),
        ],
    )
