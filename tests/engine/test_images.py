"""Batches of images against slow float64 loops: normalisation, rotation, shift and mirror."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fednoro.core.training import Augment
from fednoro.engine.images import DRAWS, Images, affine
from fednoro.models import Resnet18

CPU = torch.device("cpu")
PLAIN = Augment()
MEAN = {1: [0.449], 2: [0.449, 0.449], 3: [0.485, 0.456, 0.406]}
DEVIATION = {1: [0.226], 2: [0.226, 0.226], 3: [0.229, 0.224, 0.225]}


def pictures(n: int, height: int, width: int, channels: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(
        0, 256, (n, height, width, channels), dtype=np.uint8
    )


def uniforms(*rows: tuple[float, float, float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def slow_normalise(images: NDArray[np.uint8], index: list[int]) -> NDArray[np.float64]:
    n, (_, height, width, channels) = len(index), images.shape
    out = np.zeros((n, channels, height, width))
    for b, i in enumerate(index):
        for c in range(channels):
            out[b, c] = (images[i, :, :, c] / 255.0 - MEAN[channels][c]) / DEVIATION[channels][c]
    return out


def slow_affine(
    image: NDArray[np.float64], degrees: float, right: float, down: float, mirror: bool
) -> Tensor:
    """One C×H×W image, sampled per output pixel; `right` and `down` in
    pixels, about the image's centre.
    """
    channels, height, width = image.shape
    out = np.zeros_like(image)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    for i in range(height):
        for j in range(width):
            x, y = j - (width - 1) / 2, i - (height - 1) / 2
            source_x, source_y = cos * x - sin * y + right, sin * x + cos * y + down
            column = (-source_x if mirror else source_x) + (width - 1) / 2
            row = source_y + (height - 1) / 2
            left, top = math.floor(column), math.floor(row)
            for r, c in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
                if 0 <= r < height and 0 <= c < width:
                    share = (1 - abs(row - r)) * (1 - abs(column - c))
                    for channel in range(channels):
                        out[channel, i, j] += share * image[channel, r, c]
    return torch.from_numpy(out)


# Normalisation.


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_images_are_scaled_and_normalised_per_channel(channels: int) -> None:
    data = pictures(5, 4, 7, channels)
    data[0], data[1] = 0, 255
    index = [3, 0, 1, 3]
    batch = Images(data, channels, PLAIN, CPU).batch(torch.tensor(index))
    assert batch.dtype == torch.float32
    assert batch.shape == (4, channels, 4, 7)
    np.testing.assert_allclose(batch.numpy(), slow_normalise(data, index), rtol=0, atol=1e-6)


def test_grey_images_enter_a_network_for_rgb_as_if_they_were_rgb() -> None:
    data = pictures(3, 5, 6, 1)
    index, u, augment = torch.tensor([2, 1]), torch.rand(2, DRAWS), Augment(rotate=20, flip=True)
    grey, rgb = (
        Images(images, Resnet18().inputs(1), augment, CPU)
        for images in (data, data.repeat(3, axis=3))
    )
    assert grey.batch(index).shape == (2, 3, 5, 6)
    np.testing.assert_allclose(
        grey.batch(index).numpy(), slow_normalise(data.repeat(3, axis=3), [2, 1]), rtol=0, atol=1e-6
    )
    assert torch.equal(grey.batch(index), rgb.batch(index))
    torch.testing.assert_close(grey.batch(index, u), rgb.batch(index, u), rtol=0, atol=1e-6)
    assert not torch.equal(grey.batch(index)[:, 0], grey.batch(index)[:, 2]), (
        "each channel has its own mean"
    )


def test_nothing_is_augmented_without_uniforms_or_without_an_augmentation() -> None:
    data, index = pictures(4, 6, 6, 3), torch.arange(4)
    plain = Images(data, 3, PLAIN, CPU).batch(index)
    u = torch.rand(4, DRAWS)
    active = Images(data, 3, Augment(rotate=10, translate=0.1, flip=True), CPU)
    assert torch.equal(active.batch(index), plain)
    assert torch.equal(Images(data, 3, PLAIN, CPU).batch(index, u), plain)
    assert not torch.equal(active.batch(index, u), plain)


def test_augmenting_comes_before_normalising() -> None:
    data, u = pictures(2, 6, 8, 3), uniforms((0.9, 0.1, 0.7, 0.2), (0.2, 0.6, 0.4, 0.8))
    augment = Augment(rotate=30, translate=0.2, flip=True)
    batch = Images(data, 3, augment, CPU).batch(torch.arange(2), u)
    raw = torch.from_numpy(data).permute(0, 3, 1, 2).float() / 255
    mean, deviation = (
        torch.tensor(MEAN[3]).view(1, 3, 1, 1),
        torch.tensor(DEVIATION[3]).view(1, 3, 1, 1),
    )
    torch.testing.assert_close(
        batch, (affine(raw, u, augment) - mean) / deviation, rtol=0, atol=1e-6
    )


def test_what_comes_in_from_outside_is_black() -> None:
    white = np.full((1, 4, 8, 3), 255, np.uint8)
    augment = Augment(translate=0.5)
    u = uniforms((0.5, 1.0, 0.5, 0.5))  # by half the width
    moved = affine(torch.ones(1, 3, 4, 8), u, augment)
    torch.testing.assert_close(moved[..., :4], torch.ones(1, 3, 4, 4), rtol=0, atol=1e-6)
    assert torch.equal(moved[..., 4:], torch.zeros(1, 3, 4, 4))
    batch = Images(white, 3, augment, CPU).batch(torch.tensor([0]), u)
    black = Images(np.zeros_like(white), 3, PLAIN, CPU).batch(torch.tensor([0]))
    torch.testing.assert_close(batch[..., 4:], black[..., 4:], rtol=0, atol=1e-6)


# Where the images are kept.


def test_a_read_only_memory_map_gives_the_same_batches_without_warnings(tmp_path: Path) -> None:
    data, augment = pictures(6, 5, 7, 3), Augment(rotate=10, translate=0.1, flip=True)
    np.save(tmp_path / "images.npy", data)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_disk, in_memory = Images(mapped, 3, augment, CPU), Images(data, 3, augment, CPU)
        for index in ([4, 0, 4, 2], [5], list(range(6))):
            where, u = torch.tensor(index), torch.rand(len(index), DRAWS)
            assert torch.equal(on_disk.batch(where), in_memory.batch(where))
            assert torch.equal(on_disk.batch(where, u), in_memory.batch(where, u))


def test_a_memory_map_is_read_batch_by_batch_on_the_cpu(tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "images", np.uint8, "w+", shape=(2, 3, 3, 1))
    images = Images(
        np.memmap(tmp_path / "images", np.uint8, "r", shape=(2, 3, 3, 1)), 1, PLAIN, CPU
    )
    before = images.batch(torch.tensor([1]))
    file[1] = 255
    assert not torch.equal(images.batch(torch.tensor([1])), before)


def test_images_in_memory_are_not_copied_on_the_cpu() -> None:
    data = pictures(2, 3, 3, 1)
    images = Images(data, 1, PLAIN, CPU)
    data[1] = 255
    np.testing.assert_allclose(
        images.batch(torch.tensor([1])).numpy(), slow_normalise(data, [1]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("layout", ["read-only", "channels first", "reversed"])
def test_any_layout_of_an_array_gives_the_same_batches_without_warnings(layout: str) -> None:
    data = pictures(4, 3, 5, 3)
    given = data.copy()
    if layout == "read-only":
        given.flags.writeable = False
    elif layout == "channels first":
        given = np.ascontiguousarray(given.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    else:
        given = np.ascontiguousarray(given[:, ::-1])[:, ::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = Images(given, 3, PLAIN, CPU).batch(torch.arange(4))
    assert torch.equal(batch, Images(data, 3, PLAIN, CPU).batch(torch.arange(4)))


# Rotation, shift and mirror.


@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 12), (1, 1)])
def test_middle_uniforms_leave_the_image_as_it_is(height: int, width: int) -> None:
    x = torch.rand(2, 3, height, width)
    u = torch.full((2, DRAWS), 0.5)
    torch.testing.assert_close(
        affine(x, u, Augment(rotate=90, translate=0.5, flip=True)), x, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 12), (6, 7)])
def test_mirroring_is_left_to_right_and_exact(height: int, width: int) -> None:
    x = torch.rand(4, 2, height, width)
    u = uniforms(*((0.5, 0.5, 0.5, draw) for draw in (0.0, 0.4999, 0.5, 0.9999)))
    expected = torch.cat([x[:2].flip(3), x[2:]])
    torch.testing.assert_close(affine(x, u, Augment(flip=True)), expected, rtol=0, atol=1e-6)
    # no flip asked
    torch.testing.assert_close(affine(x, u, Augment(rotate=10)), x, rtol=0, atol=1e-6)


def test_a_quarter_turn_of_a_square_moves_every_pixel_to_its_place() -> None:
    x = torch.rand(2, 3, 6, 6)
    turned = affine(x, uniforms((1.0, 0.5, 0.5, 0.9), (0.0, 0.5, 0.5, 0.9)), Augment(rotate=90))
    torch.testing.assert_close(turned[0], x[0].rot90(1, (1, 2)), rtol=0, atol=2e-6)
    torch.testing.assert_close(turned[1], x[1].rot90(-1, (1, 2)), rtol=0, atol=2e-6)


def test_a_shift_is_a_share_of_each_side() -> None:
    x = torch.rand(2, 1, 8, 12)
    moved = affine(x, uniforms((0.5, 1.0, 0.5, 0.9), (0.5, 0.5, 0.0, 0.9)), Augment(translate=0.25))
    torch.testing.assert_close(moved[0, 0, :, :9], x[0, 0, :, 3:], rtol=0, atol=2e-6)
    torch.testing.assert_close(moved[1, 0, 2:], x[1, 0, :6], rtol=0, atol=2e-6)
    assert moved[0, 0, :, 9:].abs().max() < 1e-6
    assert moved[1, 0, :2].abs().max() < 1e-6


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.tuples(*[st.floats(0, 1, exclude_max=True, width=32)] * DRAWS),
    st.floats(0, 180),
    st.floats(0, 0.75),
    st.booleans(),
)
def test_rotation_is_rigid_and_sampling_bilinear_as_in_a_per_pixel_loop(
    height: int,
    width: int,
    draw: tuple[float, float, float, float],
    rotate: float,
    translate: float,
    flip: bool,
) -> None:
    image = np.random.default_rng(height * 16 + width).random((2, height, width))
    augment = Augment(rotate=rotate, translate=translate, flip=flip)
    expected = slow_affine(
        image,
        degrees=(2 * draw[0] - 1) * rotate,
        right=(2 * draw[1] - 1) * translate * width,
        down=(2 * draw[2] - 1) * translate * height,
        mirror=flip and draw[3] < 0.5,
    )
    moved = affine(torch.from_numpy(image[None]).float(), uniforms(draw), augment)[0].double()
    torch.testing.assert_close(moved, expected, rtol=0, atol=2e-5)


def test_each_image_is_moved_by_its_own_uniforms() -> None:
    picture, u = torch.rand(1, 3, 7, 9), torch.rand(5, DRAWS)
    augment = Augment(rotate=45, translate=0.3, flip=True)
    together = affine(picture.expand(5, -1, -1, -1), u, augment)
    for i in range(5):
        torch.testing.assert_close(
            together[i], affine(picture, u[i : i + 1], augment)[0], rtol=0, atol=1e-6
        )
        for j in range(i):
            assert not torch.allclose(together[i], together[j], atol=1e-3)


def test_shifts_reach_their_limits_and_never_pass_them() -> None:
    height, width, translate = 41, 61, 0.2
    x = torch.zeros(2000, 1, height, width)
    x[:, :, height // 2, width // 2] = 1
    u = torch.from_numpy(np.random.default_rng(0).random((2000, DRAWS), dtype=np.float32))
    dots = affine(x, u, Augment(translate=translate))[:, 0]
    right = (dots.sum(1) @ torch.arange(width).float() / dots.sum((1, 2)) - width // 2).abs()
    down = (dots.sum(2) @ torch.arange(height).float() / dots.sum((1, 2)) - height // 2).abs()
    for moved, side in ((right, width), (down, height)):
        assert 0.98 * translate * side < moved.max() <= translate * side + 1e-3
        assert abs(float(moved.mean()) - translate * side / 2) < 0.05 * translate * side  # uniform


def test_angles_reach_their_limit_and_never_pass_it_on_an_oblong_image() -> None:
    height, width, rotate = 31, 61, 25.0
    rows, columns = torch.meshgrid(
        torch.arange(height) - 15.0, torch.arange(width) - 30.0, indexing="ij"
    )
    blob = torch.exp(-((rows**2) + (columns - 10) ** 2) / 8)  # ten pixels right of the centre
    u = torch.from_numpy(np.random.default_rng(0).random((1000, DRAWS), dtype=np.float32))
    turned = affine(blob.expand(1000, 1, -1, -1), u, Augment(rotate=rotate))[:, 0]
    mass = turned.sum((1, 2))
    y, x = (turned * rows).sum((1, 2)) / mass, (turned * columns).sum((1, 2)) / mass
    torch.testing.assert_close(torch.hypot(x, y), torch.full((1000,), 10.0), rtol=0, atol=0.01)
    degrees = torch.rad2deg(torch.atan2(y, x)).abs()
    assert 0.98 * rotate < degrees.max() <= rotate + 0.05
    assert abs(float(degrees.mean()) - rotate / 2) < 0.05 * rotate
