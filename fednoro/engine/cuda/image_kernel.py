"""A GPU kernel (Triton): gather, augment and normalise in one pass over the output.

The tensor operations of `Images.batch` are some thirty kernels, whatever the number
of images. Triton comes with PyTorch's CUDA builds; without it `available()` is False
and those operations are used.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fednoro.core.training import Augment
from fednoro.engine.images import Images

PIXELS = 1024  # that one block draws


@functools.cache
def available() -> bool:
    """Whether Triton is there."""
    try:
        _kernel()
    except Exception:
        return False
    return True


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def draw(  # type: ignore[no-untyped-def]
        images, index, u, columns, average, deviation, out, height, width, rotate, translate,
        FLIP: tl.constexpr, AUGMENT: tl.constexpr, INPUTS: tl.constexpr,  # noqa: N803
        CHANNELS: tl.constexpr, P: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        n = tl.program_id(0)
        at = tl.program_id(1) * P + tl.arange(0, P)
        inside = at < height * width
        row, column = at // width, at % width
        picture = images + tl.load(index + n) * height * width * INPUTS
        if AUGMENT:
            angle = (2 * tl.load(u + n * columns) - 1) * rotate
            shift_x = (2 * tl.load(u + n * columns + 1) - 1) * 2 * translate
            shift_y = (2 * tl.load(u + n * columns + 2) - 1) * 2 * translate
            mirror = 1.0
            if FLIP:
                mirror = tl.where(tl.load(u + n * columns + 3) < 0.5, -1.0, 1.0)
            cos, sin = tl.cos(angle), tl.sin(angle)
            ratio = height * 1.0 / width
            x = (2.0 * column + 1) / width - 1
            y = (2.0 * row + 1) / height - 1
            from_x = ((mirror * (cos * x - sin * ratio * y + shift_x) + 1) * width - 1) / 2
            from_y = ((sin / ratio * x + cos * y + shift_y + 1) * height - 1) / 2
            left, top = tl.floor(from_x), tl.floor(from_y)
            right_share, low_share = from_x - left, from_y - top
            left, top = left.to(tl.int32), top.to(tl.int32)
        for c in tl.static_range(CHANNELS):
            channel = c if INPUTS > 1 else 0
            if AUGMENT:
                value = tl.zeros((P,), tl.float32)
                for dy in tl.static_range(2):
                    for dx in tl.static_range(2):
                        r, k = top + dy, left + dx
                        valid = inside & (r >= 0) & (r < height) & (k >= 0) & (k < width)
                        share = (right_share if dx else 1 - right_share) * (
                            low_share if dy else 1 - low_share
                        )
                        pixel = tl.load(
                            picture + (r * width + k) * INPUTS + channel, mask=valid, other=0
                        )
                        value += share * (pixel.to(tl.float32) / 255)
            else:
                value = (
                    tl.load(picture + at * INPUTS + channel, mask=inside, other=0).to(tl.float32)
                    / 255
                )
            value = (value - tl.load(average + c)) / tl.load(deviation + c)
            tl.store(out + (n * height * width + at) * CHANNELS + c, value, mask=inside)

    return draw


def warm_up(device: torch.device) -> None:
    """Runs the kernel on one pixel:
    Triton takes half a second before its first, whichever that is.
    """
    pixel, number = (
        torch.zeros((1, 1, 1, 1), dtype=torch.uint8, device=device),
        torch.zeros(1, device=device),
    )
    prepare(
        pixel, number.long(), None, number, number + 1, Augment(),
        torch.empty((1, 1, 1, 1), device=device),
    )  # fmt: skip


def fill(out: Tensor, images: Images, index: Tensor, u: Tensor | None = None) -> Tensor:
    """As `Images.batch`, in one kernel:
    fills B×H×W×C and returns it as B×C×H×W; for images on a GPU.
    """
    assert images.pixels is not None
    mean, deviation = images.mean.flatten(), images.deviation.flatten()
    prepare(images.pixels, index, u, mean, deviation, images.augment, out)
    return out.permute(0, 3, 1, 2)


def prepare(
    images: Tensor,
    index: Tensor,
    u: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    augment: Augment,
    out: Tensor,
) -> None:
    """The images at `index`, augmented by their uniforms and normalised, into `out`,
    N×H×W×C: see `Images.batch`.
    """
    _, height, width, inputs = images.shape
    active = u is not None and augment.active
    _kernel()[(len(index), -(-height * width // PIXELS))](
        images, index, index if u is None else u, 0 if u is None else u.stride(0), mean, deviation,
        out, height, width, math.radians(augment.rotate), augment.translate,
        FLIP=augment.flip, AUGMENT=active, INPUTS=inputs, CHANNELS=out.shape[3], P=PIXELS,
    )  # fmt: skip
