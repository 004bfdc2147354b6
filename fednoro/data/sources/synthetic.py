"""Made-up images of any number, size and imbalance, with a known and adjustable difficulty.

A class c is a smooth periodic texture T_c: a low-frequency random field and an oriented grating. An
image of class c is, with a random confuser class k and both textures shifted and flipped at random,

    x = contrast · (s · T_c + (1 − s) · T_k) + noise,    s = (1 − d²) · (1 − d·u/2),  u ~ U(0, 1)

where d is the difficulty. At d = 0 nothing but a little noise is added; at d = 1 the class has no
weight in its own images, so that no model can do better than chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fednoro.core.options import Options, option
from fednoro.core.seeds import generator
from fednoro.core.types import IntArray, UserError
from fednoro.data.dataset import Dataset

_CHUNK_VALUES = 4_000_000  # pixels drawn at once: bounds memory whatever the size of the images


@dataclass(frozen=True)
class Synthetic(Options):
    """Made-up textures: any number of images, classes and pixels,
    with a chosen imbalance and difficulty.
    """

    section: ClassVar[str] = "data"

    images: int = option(2000, "how many images, over all classes", ge=2)
    classes: int = option(5, "how many classes", ge=2, le=10_000)
    size: int = option(32, "height and width in pixels", ge=4, le=1024)
    channels: int = option(3, "1 for grey, 3 for colour", ge=1, le=4)
    imbalance: float = option(10.0, "largest over smallest class", ge=1, le=1e6)
    difficulty: float = option(
        0.5, "0: a linear model is nearly perfect; 1: nobody beats chance", ge=0, le=1
    )
    sites: int = option(
        0, "how many natural sites to spread the images over; 0: no site column", ge=0
    )

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """Draws textures and images from `seed`."""
        if self.images < self.classes:
            raise UserError(
                f"data.images must be at least data.classes ({self.classes}) "
                f"so that no class is empty, got {self.images}"
            )
        rng = generator(seed, "synthetic textures")
        textures = _textures(self.classes, self.size, self.channels, rng)
        labels = rng.permutation(
            np.repeat(np.arange(self.classes), long_tail(self.images, self.classes, self.imbalance))
        )
        images = np.empty((self.images, self.size, self.size, self.channels), np.uint8)
        step = max(1, _CHUNK_VALUES // images[0].size)
        for number, start in enumerate(range(0, self.images, step)):
            chunk = slice(start, start + step)
            images[chunk] = _draw(
                textures,
                labels[chunk],
                self.difficulty,
                generator(seed, "synthetic images", number),
            )
            if progress:
                progress("drawing images", min(start + step, self.images), self.images)
        site = (
            generator(seed, "synthetic sites").integers(self.sites, size=self.images)
            if self.sites
            else None
        )
        return Dataset(
            images=images,
            labels=labels,
            classes=tuple(f"class {c}" for c in range(self.classes)),
            ids=tuple(str(i) for i in range(self.images)),
            sites=None if site is None else tuple(f"site {s}" for s in site),
        )


def long_tail(images: int, classes: int, imbalance: float) -> IntArray:
    """How many images each class gets:
    falling exponentially, at least one each, `images` in all.
    """
    share = imbalance ** -(np.arange(classes) / (classes - 1))
    quota = share / share.sum() * (images - classes)
    counts: IntArray = np.floor(quota).astype(np.int64)
    most_cut = np.argsort(counts - quota, kind="stable")[: images - classes - counts.sum()]
    counts[most_cut] += 1
    counts += 1
    return counts


def _textures(
    classes: int, size: int, channels: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """One texture per class with zero mean and unit variance, C×S×S×channels;
    periodic, so a shift leaves no seam.
    """
    row, col = np.meshgrid(*[2 * np.pi * np.arange(size) / size] * 2, indexing="ij")
    textures = np.empty((classes, size, size, channels), np.float32)
    for c in range(classes):
        waves = rng.integers(-3, 4, size=(8, 2))
        phase = rng.uniform(0, 2 * np.pi, size=(8, channels))
        field = sum(
            np.cos(f * row[..., None] + g * col[..., None] + p)
            for (f, g), p in zip(waves, phase, strict=True)
        )
        angle, frequency = np.pi * c / classes, rng.uniform(2, size / 5 if size > 10 else 2)
        f, g = np.rint(frequency * np.sin(angle)), np.rint(frequency * np.cos(angle))
        texture = field / 2 + np.cos(f * row + g * col + rng.uniform(0, 2 * np.pi))[..., None]
        textures[c] = (texture - texture.mean()) / (texture.std() + 1e-6)
    return textures


def _draw(
    textures: NDArray[np.float32], labels: IntArray, difficulty: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    n, d = len(labels), difficulty
    # It may be the class itself, else d = 1 would give it away.
    confuser = rng.integers(len(textures), size=n)
    s = (1 - d**2) * (1 - d * rng.random(n) / 2)
    contrast = 1 - d * rng.random(n) / 2
    own_weight = (s * contrast).astype(np.float32)[:, None, None, None]
    other_weight = ((1 - s) * contrast).astype(np.float32)[:, None, None, None]
    x: NDArray[np.float32] = own_weight * _shift_and_flip(textures, labels, d, rng)
    x += other_weight * _shift_and_flip(textures, confuser, d, rng)
    x += np.float32(0.1 + d) * rng.standard_normal(x.shape, dtype=np.float32)
    return (128 + 40 * x).clip(0, 255).astype(np.uint8)


def _shift_and_flip(
    textures: NDArray[np.float32], classes: IntArray, difficulty: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """`textures[classes]`, each shifted by up to a quarter of its size and flipped,
    the more the harder.
    """
    n, size = len(classes), textures.shape[1]
    reach = round(difficulty * size / 4)
    # Both are n×S.
    row, col = (rng.integers(-reach, reach + 1, size=(2, n, 1)) + np.arange(size)) % size
    is_flipped = rng.random((n, 1)) < difficulty / 2
    col = np.where(is_flipped, col[:, ::-1], col)
    shifted_textures: NDArray[np.float32] = textures[
        classes[:, None, None], row[:, :, None], col[:, None, :]
    ]
    return shifted_textures
