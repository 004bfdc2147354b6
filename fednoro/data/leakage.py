"""What a held-out part shares with the parts before it: samples, groups,
and images of the same pixels.

Accuracy on an image whose patient, or whose very copy, was trained on
says little about new patients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fednoro.core.types import FedNoRoWarning, IntArray
from fednoro.data.dataset import Dataset
from fednoro.data.split import Parts

Report = dict[str, dict[str, int]]


def leakage(dataset: Dataset, parts: Parts) -> Report:
    """Validation against training, and test against both: counts per part,
    each one above 0 with a warning.

    `samples` are in both, `groups` too, `grouped_images` are this part's images of such groups, and
    `identical_images` are this part's images with the same pixels as one over there.
    """
    if not len(parts.validation):
        return {"test": _shared(dataset, "test", parts.test, "training", parts.train)}
    seen = np.concatenate([parts.train, parts.validation])
    return {
        "validation": _shared(dataset, "validation", parts.validation, "training", parts.train),
        "test": _shared(dataset, "test", parts.test, "training or validation", seen),
    }


def _shared(
    dataset: Dataset, name: str, part: IntArray, other_name: str, others: IntArray
) -> dict[str, int]:
    found = {"samples": len(np.intersect1d(part, others))}
    if found["samples"]:
        _warn(f"{found['samples']} images of the {name} part are {other_name} images as well")
    if dataset.groups is not None:
        groups = np.asarray(dataset.groups)
        both = np.intersect1d(groups[part], groups[others])
        found |= {"groups": len(both), "grouped_images": int(np.isin(groups[part], both).sum())}
        if len(both):
            _warn(
                f"{found['grouped_images']} images of the {name} part belong to {len(both)} groups "
                f"(patients, lesions) that have {other_name} images as well"
            )
    found["identical_images"] = identical(dataset.images, part, others)
    if found["identical_images"]:
        _warn(
            f"{found['identical_images']} images of the {name} part are "
            f"pixel-identical to {other_name} images"
        )
    return found


def identical(images: NDArray[np.uint8], part: IntArray, others: IntArray) -> int:
    """How many of the images at `part` have the same pixels as one at `others`.

    The middle rows are compared first, so that of a memory map little more
    than a page per image is read.
    """
    middle = images.shape[1] // 2

    def row(i: int) -> bytes:
        return _digest(images[i, middle])

    def whole(i: int) -> bytes:
        return _digest(images[i])

    def same(
        key: Callable[[int], bytes], these: list[int], those: list[int]
    ) -> tuple[list[int], list[int]]:
        """Those of either list that have an equal in the other."""
        here, there = [key(i) for i in these], [key(i) for i in those]
        both = set(here) & set(there)
        return (
            [i for i, k in zip(these, here, strict=True) if k in both],
            [i for i, k in zip(those, there, strict=True) if k in both],
        )

    found, _ = same(whole, *same(row, part.tolist(), others.tolist()))
    return len(found)


def _digest(pixels: NDArray[np.uint8]) -> bytes:
    return blake2b(pixels.tobytes(), digest_size=16).digest()


def _warn(message: str) -> None:
    warnings.warn(message, FedNoRoWarning, stacklevel=4)
