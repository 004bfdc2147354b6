"""Train and test: stratified by class and, where samples belong to groups, with every group on one side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from fednoro.types import BoolArray, FedNoRoWarning, IntArray, UserError


def train_test(
    dataset_labels: IntArray, test: float, rng: np.random.Generator, groups: Sequence[str] | None = None
) -> tuple[IntArray, IntArray]:
    """Positions to train on and to test on, both sorted.

    A class is on both sides wherever it has two images (two groups, where `groups` is given); with a
    single one it is trained on only. Images of one group, say of one patient, are never on both sides.
    """
    labels = np.asarray(dataset_labels)
    if not 0 < test < 1:
        raise UserError(f"the test share must be in (0, 1), got {test}")
    if not len(labels):
        raise UserError("there are no images to split")
    if groups is not None and len(groups) != len(labels):
        raise UserError(f"groups must have one entry per image ({len(labels)}), got {len(groups)}")

    _, label = np.unique(labels, return_inverse=True)
    if groups is None:
        tested = _by_class(label, test, rng)
    else:
        _, group = np.unique(np.asarray(groups), return_inverse=True)
        tested = _by_group(label, group, test, rng)

    unit = "image" if groups is None else "group"
    if not tested.any():
        raise UserError(f"nothing is left to test on: each {unit} is the only one of some class; add images")
    for side, here in (("test", tested), ("train", ~tested)):
        missing = np.setdiff1d(labels, labels[here])
        if len(missing):
            warnings.warn(
                f"too few {unit}s to have label {', '.join(map(str, missing))} on both sides: none in the {side} set",
                FedNoRoWarning,
                stacklevel=2,
            )
    return np.flatnonzero(~tested), np.flatnonzero(tested)


def _by_class(label: IntArray, test: float, rng: np.random.Generator) -> BoolArray:
    tested = np.zeros(len(label), bool)
    for c in range(label.max() + 1):
        members = rng.permutation(np.flatnonzero(label == c))
        n = len(members)
        if n > 1:
            tested[members[: min(max(round(n * test), 1), n - 1)]] = True
    return tested


def _by_group(label: IntArray, group: IntArray, test: float, rng: np.random.Generator) -> BoolArray:
    """Whole groups, the class with the fewest of them first; each to the side that keeps the shares nearest."""
    counts = np.zeros((group.max() + 1, label.max() + 1))  # G×C
    np.add.at(counts, (group, label), 1)
    per_class = counts.sum(axis=0)
    ahead = np.zeros_like(per_class)  # images tested so far beyond the share of those decided on
    side = np.full(len(counts), -1)  # −1 undecided, 0 train, 1 test

    for c in np.argsort((counts > 0).sum(axis=0), kind="stable"):
        holders = np.flatnonzero(counts[:, c])
        free = rng.permutation(holders[side[holders] < 0])
        for g in free:
            if_trained, if_tested = ahead - test * counts[g], ahead + (1 - test) * counts[g]
            side[g] = (if_tested**2 / per_class).sum() < (if_trained**2 / per_class).sum()
            ahead = if_tested if side[g] else if_trained
        if len(set(side[holders])) == 2:
            continue
        # The class is on one side only: its smallest group that no rarer class has claimed changes over.
        wanted = 0 if len(holders) == 1 else 1 - side[holders[0]]
        if len(free) and wanted != side[holders[0]]:
            smallest = free[np.argmin(counts[free].sum(axis=1))]
            side[smallest] = wanted
            ahead += (2 * wanted - 1) * counts[smallest]
    tested: BoolArray = side[group] == 1
    return tested
