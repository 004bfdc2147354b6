"""What a held-out part shares with the parts before it:
samples, groups, and images of the same pixels.

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
    """Validation against training, and test against both:
    counts per part, each one above 0 with a warning.

    `samples` are in both, `groups` too, `grouped_images` are this part's images of such groups, and
    `identical_images` are this part's images with the same pixels as one over there.
    """
    if not len(parts.validation):
        return {"test": _count_shared(dataset, "test", parts.test, "training", parts.train)}
    earlier = np.concatenate([parts.train, parts.validation])
    return {
        "validation": _count_shared(
            dataset, "validation", parts.validation, "training", parts.train
        ),
        "test": _count_shared(dataset, "test", parts.test, "training or validation", earlier),
    }


def _count_shared(
    dataset: Dataset, name: str, part: IntArray, other_name: str, others: IntArray
) -> dict[str, int]:
    counts = {"samples": len(np.intersect1d(part, others))}
    if counts["samples"]:
        _warn(f"{counts['samples']} images of the {name} part are {other_name} images as well")
    if dataset.groups is not None:
        groups = np.asarray(dataset.groups)
        shared_groups = np.intersect1d(groups[part], groups[others])
        counts |= {
            "groups": len(shared_groups),
            "grouped_images": int(np.isin(groups[part], shared_groups).sum()),
        }
        if len(shared_groups):
            _warn(
                f"{counts['grouped_images']} images of the {name} part belong to "
                f"{len(shared_groups)} groups (patients, lesions) that have {other_name} images "
                "as well"
            )
    counts["identical_images"] = count_identical(dataset.images, part, others)
    if counts["identical_images"]:
        _warn(
            f"{counts['identical_images']} images of the {name} part are pixel-identical "
            f"to {other_name} images"
        )
    return counts


def count_identical(images: NDArray[np.uint8], part: IntArray, others: IntArray) -> int:
    """How many of the images at `part` have the same pixels as one at `others`.

    The middle rows are compared first, so that of a memory map little more
    than a page per image is read.
    """
    middle = images.shape[1] // 2

    def digest_middle_row(i: int) -> bytes:
        return _digest(images[i, middle])

    def digest_image(i: int) -> bytes:
        return _digest(images[i])

    def keep_equal(
        key: Callable[[int], bytes], indices: list[int], other_indices: list[int]
    ) -> tuple[list[int], list[int]]:
        """Those of either list that have an equal in the other."""
        keys, other_keys = [key(i) for i in indices], [key(i) for i in other_indices]
        common_keys = set(keys) & set(other_keys)
        return (
            [i for i, k in zip(indices, keys, strict=True) if k in common_keys],
            [i for i, k in zip(other_indices, other_keys, strict=True) if k in common_keys],
        )

    copies, _ = keep_equal(
        digest_image, *keep_equal(digest_middle_row, part.tolist(), others.tolist())
    )
    return len(copies)


def _digest(pixels: NDArray[np.uint8]) -> bytes:
    return blake2b(pixels.tobytes(), digest_size=16).digest()


def _warn(message: str) -> None:
    warnings.warn(message, FedNoRoWarning, stacklevel=4)
