"""Handwritten digits: real images that need no download, small enough for a laptop's every test."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from fednoro.core.options import Options, option
from fednoro.core.seeds import generator
from fednoro.core.types import FloatArray, IntArray
from fednoro.data.dataset import Dataset


@dataclass(frozen=True)
class Digits(Options):
    """1,797 real 8×8 handwritten digits from scikit-learn, cut to a long tail."""

    section: ClassVar[str] = "data"

    imbalance: float = option(
        10.0, "largest over smallest class, as shares kept; 1 keeps every image", ge=1, le=100
    )

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """Class c keeps a share imbalance^(−c/(C−1)) of its images, drawn by `seed`."""
        pixels, target = load_pixels()
        class_indices = []
        for c in range(10):
            # One order per seed and class,
            # so that a steeper tail keeps a subset of a flatter one's images.
            order = generator(seed, "digits", c).permutation(np.flatnonzero(target == c))
            class_indices.append(order[: round(len(order) * self.imbalance ** (-c / 9))])
        index = np.sort(np.concatenate(class_indices))
        return Dataset(
            images=np.rint(pixels[index] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1),
            labels=target[index].astype(np.int64),
            classes=tuple(str(c) for c in range(10)),
            ids=tuple(str(i) for i in index),
        )


def load_pixels() -> tuple[FloatArray, IntArray]:
    """Pixels from 0 to 16, N×64, and classes;
    from its file if possible: the import alone takes a second.
    """
    spec = find_spec("sklearn")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    file = next((Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders), None)
    if file is None or not file.is_file():
        from sklearn.datasets import load_digits

        pixels, target = load_digits(return_X_y=True)
        return pixels, target
    with gzip.open(file) as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)
