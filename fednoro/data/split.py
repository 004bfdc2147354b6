"""Train, validation and test:
stratified by class and, where samples belong to groups, with every group on one side.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fednoro.core.files import write_whole
from fednoro.core.options import Options, option
from fednoro.core.types import BoolArray, FedNoRoWarning, IntArray, UserError
from fednoro.data.cache.csv_table import read_table
from fednoro.data.dataset import Dataset

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Parts:
    """Positions in the data set, each part sorted; without validation that part is empty."""

    train: IntArray
    validation: IntArray
    test: IntArray


@dataclass(frozen=True)
class Split(Options):
    """Which images are trained on, and which are kept to validate and to test."""

    section: ClassVar[str] = "split"

    test: float = option(0.3, "share of the images kept for testing", gt=0, lt=1)
    validation: float = option(0.0, "share kept to choose a round by", ge=0, lt=1)
    grouped: bool = option(
        True, "keep images of one group (patient, lesion) in one part, where the data has groups"
    )
    file: str | None = option(
        None, "a CSV of id,part, such as another run's split.csv, to use in place of all this"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test + self.validation >= 1:
            raise UserError(
                "split.test and split.validation must leave images to train on, "
                f"got {self.test} and {self.validation}"
            )

    def parts(self, dataset: Dataset, rng: np.random.Generator) -> Parts:
        """The parts: as the file says, or else drawn."""
        if self.file is not None:
            return read_split(Path(self.file).expanduser(), dataset)
        groups = dataset.groups if self.grouped else None
        train, test = train_test(dataset.labels, self.test, rng, groups)
        if not self.validation:
            return Parts(train, train[:0], test)
        # From the rest, so that the test part is the same with and without validation.
        train_groups = None if groups is None else [groups[i] for i in train]
        share = self.validation / (1 - self.test)
        train_rows, validation_rows = _split_in_two(
            dataset.labels[train], share, rng, train_groups, "validation"
        )
        return Parts(train[train_rows], train[validation_rows], test)


def read_split(path: Path, dataset: Dataset) -> Parts:
    """The parts that a CSV of `id,part` names; it must list every image once."""
    ids = _ids(dataset)
    position = {sample: i for i, sample in enumerate(ids)}
    if len(position) != len(ids):
        raise UserError(
            f"split.file {path}: the data's ids are not unique, "
            "so a split cannot be looked up by id"
        )
    part_numbers, line_of = np.full(len(ids), -1), dict[str, int]()
    for line, row in read_table(path, ("id", "part")):
        sample, location = row["id"], f"split.file {path}, line {line}"
        if sample not in position:
            raise UserError(
                f"{location}: "
                f"no image has the id {sample!r} (the first is {next(iter(ids), None)!r})"
            )
        if sample in line_of:
            raise UserError(
                f"{location}: id {sample!r} is on line {line_of[sample]} already; keep one"
            )
        if row["part"] not in PARTS:
            raise UserError(
                f"{location}: part must be train, validation or test, got {row['part']!r}"
            )
        line_of[sample] = line
        part_numbers[position[sample]] = PARTS.index(row["part"])
    unlisted = np.flatnonzero(part_numbers < 0)
    if len(unlisted):
        raise UserError(
            f"split.file {path} does not list {len(unlisted)} of the {len(ids)} images, "
            f"{ids[unlisted[0]]!r} first: it must give each a part"
        )
    for side in ("train", "test"):
        missing = np.setdiff1d(dataset.labels, dataset.labels[part_numbers == PARTS.index(side)])
        if len(missing) == len(np.unique(dataset.labels)):
            raise UserError(f"split.file {path} has no image in the {side} part")
        if len(missing):
            names = ", ".join(dataset.classes[c] for c in missing)
            warnings.warn(
                f"{path} has no image of {names} in the {side} part", FedNoRoWarning, stacklevel=2
            )
    return Parts(*(np.flatnonzero(part_numbers == i) for i in range(len(PARTS))))


def write_split(path: Path, dataset: Dataset, parts: Parts) -> None:
    """The split as a file that `split.file` takes."""
    part_of = {int(i): name for name in PARTS for i in getattr(parts, name)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("id", "part"))
    writer.writerows((sample, part_of[i]) for i, sample in enumerate(_ids(dataset)))
    # Ids may be names that are not UTF-8.
    write_whole(path, text.getvalue().encode(errors="surrogateescape"))


def _ids(dataset: Dataset) -> list[str]:
    # Stripped, as the cells of a table are.
    return (
        [str(i) for i in range(len(dataset))]
        if dataset.ids is None
        else [sample.strip() for sample in dataset.ids]
    )


def train_test(
    dataset_labels: IntArray,
    test: float,
    rng: np.random.Generator,
    groups: Sequence[str] | None = None,
) -> tuple[IntArray, IntArray]:
    """Positions to train on and to test on, both sorted.

    A class is on both sides wherever it has two images (two groups, where `groups` is
    given); with a single one it is trained on only. Images of one group, say of one
    patient, are never on both sides.
    """
    return _split_in_two(dataset_labels, test, rng, groups, "test")


def _split_in_two(
    dataset_labels: IntArray,
    share: float,
    rng: np.random.Generator,
    groups: Sequence[str] | None,
    part_name: str,
) -> tuple[IntArray, IntArray]:
    labels = np.asarray(dataset_labels)
    if not 0 < share < 1:
        raise UserError(f"the {part_name} share must be in (0, 1), got {share}")
    if not len(labels):
        raise UserError("there are no images to split")
    if groups is not None and len(groups) != len(labels):
        raise UserError(f"groups must have one entry per image ({len(labels)}), got {len(groups)}")

    _, label = np.unique(labels, return_inverse=True)
    if groups is None:
        held_out = _hold_out_images(label, share, rng)
    else:
        _, group = np.unique(np.asarray(groups), return_inverse=True)
        held_out = _hold_out_groups(label, group, share, rng)

    unit = "image" if groups is None else "group"
    if not held_out.any():
        raise UserError(
            f"nothing is left for the {part_name} set: each {unit} is the only one of some class"
        )
    for side, side_rows in ((part_name, held_out), ("train", ~held_out)):
        missing = np.setdiff1d(labels, labels[side_rows])
        if len(missing):
            warnings.warn(
                f"too few {unit}s to have label {', '.join(map(str, missing))} on both sides: "
                f"none in the {side} set",
                FedNoRoWarning,
                stacklevel=3,
            )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _hold_out_images(label: IntArray, share: float, rng: np.random.Generator) -> BoolArray:
    held_out = np.zeros(len(label), bool)
    for c in range(label.max() + 1):
        members = rng.permutation(np.flatnonzero(label == c))
        n = len(members)
        if n > 1:
            held_out[members[: min(max(round(n * share), 1), n - 1)]] = True
    return held_out


def _hold_out_groups(
    label: IntArray, group: IntArray, share: float, rng: np.random.Generator
) -> BoolArray:
    """Whole groups, the class with the fewest of them first;
    each to the side that keeps the shares nearest.
    """
    counts = np.zeros((group.max() + 1, label.max() + 1))  # G×C
    np.add.at(counts, (group, label), 1)
    per_class = counts.sum(axis=0)
    surplus = np.zeros_like(per_class)  # images kept so far beyond the share of those decided on
    side = np.full(len(counts), -1)  # −1 undecided, 0 train, 1 kept

    for c in np.argsort((counts > 0).sum(axis=0), kind="stable"):
        holders = np.flatnonzero(counts[:, c])
        undecided = rng.permutation(holders[side[holders] < 0])
        for g in undecided:
            if_trained, if_held_out = surplus - share * counts[g], surplus + (1 - share) * counts[g]
            side[g] = (if_held_out**2 / per_class).sum() < (if_trained**2 / per_class).sum()
            surplus = if_held_out if side[g] else if_trained
        if len(set(side[holders])) == 2:
            continue
        # The class is on one side only:
        # its smallest group that no rarer class has claimed changes over.
        missing_side = 0 if len(holders) == 1 else 1 - side[holders[0]]
        if len(undecided) and missing_side != side[holders[0]]:
            smallest = undecided[np.argmin(counts[undecided].sum(axis=1))]
            side[smallest] = missing_side
            surplus += (2 * missing_side - 1) * counts[smallest]
    held_out: BoolArray = side[group] == 1
    return held_out
