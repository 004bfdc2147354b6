"""What every data source yields: uint8 images, labels and, where known, ids, groups and sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fednoro.core.types import IntArray, UserError


@dataclass(frozen=True)
class Dataset:
    """Images [N, H, W, C] as uint8 (an array or a memory map) with their labels."""

    images: NDArray[np.uint8]
    labels: IntArray
    classes: tuple[str, ...]
    ids: tuple[str, ...] | None = None  # one per sample, for files of observed labels
    groups: tuple[str, ...] | None = None  # patient or lesion: kept on one side of the split
    sites: tuple[str, ...] | None = None  # the natural client of a sample

    def __post_init__(self) -> None:
        n = len(self.labels)
        if self.images.ndim != 4 or self.images.dtype != np.uint8 or len(self.images) != n:
            raise UserError(
                f"images must be uint8 [N, H, W, C] with N = {n}, "
                f"got {self.images.dtype} {self.images.shape}"
            )
        if n and not 0 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise UserError(
                f"labels must be in 0..{len(self.classes) - 1}, "
                f"got {self.labels.min()}..{self.labels.max()}"
            )
        for name in ("ids", "groups", "sites"):
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise UserError(f"{name} must have one entry per image ({n}), got {len(column)}")

    def __len__(self) -> int:
        return len(self.labels)
