"""Batches of images, gathered, normalised and augmented on the compute device."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fednoro.core.training import Augment, normalisation

DRAWS = 4  # uniforms that augmenting one image takes: angle, two shifts, flip


class Images:
    """All images of a data set, on the device.

    A memory map stays on disk where the device is the CPU; with `resident=False`
    any array stays where it is.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        inputs: int,
        augment: Augment,
        device: torch.device,
        resident: bool = True,
    ) -> None:
        self.device, self.augment = device, augment
        mapped = isinstance(images, np.memmap) and device.type == "cpu"
        self._host_images = images if mapped or not resident else None
        self.pixels: Tensor | None = None
        # On a CPU, oneDNN, pooling and normalisation are faster with channels last.
        self._channels_last = device.type == "cpu"
        if self._host_images is None:  # copied only where torch could not take the array as it is
            self.pixels = torch.from_numpy(np.require(images, requirements=["C", "W"])).to(device)
        mean, deviation = normalisation(inputs)
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self.deviation = torch.tensor(deviation, device=device).view(1, -1, 1, 1)

    def batch(self, index: Tensor, u: Tensor | None = None) -> Tensor:
        """The images at `index` as B×C×H×W floats; augmented where uniforms `u` (B×4) are given."""
        if self.pixels is not None:
            raw = self.pixels.index_select(0, index)
        else:
            assert self._host_images is not None
            raw = torch.from_numpy(np.ascontiguousarray(self._host_images[index.cpu().numpy()])).to(
                self.device
            )
        x = raw.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format) / 255
        if u is not None and self.augment.active:
            x = affine(x, u, self.augment)
        # Broadcasting repeats grey to all inputs, as if the image were RGB.
        x = (x - self.mean) / self.deviation
        return _channels_last(x) if self._channels_last else x.contiguous()


def _channels_last(x: Tensor) -> Tensor:
    """Channels last for all layers to come:
    with one channel the layouts are the same and only the strides tell.
    """
    _, channels, height, width = x.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def affine(x: Tensor, u: Tensor, augment: Augment) -> Tensor:
    """Rotates, shifts and mirrors each image by its own uniforms;
    what comes in from outside is black.
    """
    height, width = x.shape[2:]
    angle = (2 * u[:, 0] - 1) * math.radians(augment.rotate)
    shift_x, shift_y = ((2 * u[:, i] - 1) * 2 * augment.translate for i in (1, 2))
    mirror = torch.where(u[:, 3] < 0.5, -1.0, 1.0) if augment.flip else torch.ones_like(angle)
    cos, sin = torch.cos(angle), torch.sin(angle)
    # Output to input coordinates, each axis in [-1, 1]:
    # the ratio keeps rotation rigid on oblong images.
    ratio = height / width
    theta = torch.stack(
        [
            torch.stack([mirror * cos, -mirror * sin * ratio, mirror * shift_x], 1),
            torch.stack([sin / ratio, cos, shift_y], 1),
        ],
        1,
    )
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
