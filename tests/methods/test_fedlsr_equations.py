"""FedLSR's objective and second view against slow float64 loops."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fednoro.core.losses import entropy, js_divergence, sharpen
from fednoro.core.types import Step
from fednoro.methods import FedLSR
from fednoro.methods.fedlsr import recolour, rotate, shift_hue
from fednoro.models import Cnn, initialise

both_behaviours = pytest.mark.parametrize("behaviour", ["paper", "reference"])


def softmax(row: list[float]) -> list[float]:
    parts = [math.exp(v - max(row)) for v in row]
    return [p / sum(parts) for p in parts]


def slow_entropy(rows: list[list[float]]) -> float:
    return sum(-v * math.log(v) for row in rows for v in row) / len(rows)


def slow_js(first: list[list[float]], second: list[list[float]]) -> float:
    total = 0.0
    for p, q in zip(first, second, strict=True):
        for a, b in zip(p, q, strict=True):
            m = (a + b) / 2
            total += (a * math.log(a / m) + b * math.log(b / m)) / 2
    return total / len(first)


def slow_loss(
    f_1: Tensor, f_2: Tensor, labels: Tensor, lam: float, gamma: float, lam_e: float, behaviour: str
) -> float:
    ce, classes, q_1, q_2 = 0.0, f_1.shape[1], [], []
    for a, b, y in zip(f_1.tolist(), f_2.tolist(), labels.tolist(), strict=True):
        mixed = [lam * v + (1 - lam) * w for v, w in zip(softmax(a), softmax(b), strict=True)]
        sharp = [v**2 / sum(w**2 for w in mixed) for v in mixed]
        ce -= math.log(softmax(sharp)[y] if behaviour == "reference" else sharp[y])
        q_1.append([max(v, 1e-6) for v in softmax([3 * v for v in a])])
        q_2.append([max(v, 1e-6) for v in softmax([3 * v for v in b])])
    if behaviour == "reference":
        h, js = slow_entropy([softmax(q) for q in q_1]), slow_js(q_1, q_2) / classes
    else:
        h, js = (slow_entropy(q_1) + slow_entropy(q_2)) / 2, slow_js(q_1, q_2)
    return ce / len(f_1) + gamma * js + lam_e * h


class Said(torch.nn.Module):
    """A network that says what it was told to, whatever it sees:
    first one thing, then the other.
    """

    def __init__(self, *logits: Tensor) -> None:
        super().__init__()
        self.logits = list(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.pop(0)


def logits(scale: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(2)
    f_1, f_2 = (torch.from_numpy(rng.normal(scale=scale, size=(6, 4))) for _ in range(2))
    return f_1, f_2, torch.from_numpy(rng.integers(0, 4, 6))


def step_that_says(f_1: Tensor, f_2: Tensor, y: Tensor, lam: float, gamma: float) -> Step:
    u = torch.full((len(y), 8), 0.9, dtype=torch.float64)  # the λ of the others must not count
    u[0, 0] = lam
    aux = {"gamma": torch.tensor(gamma, dtype=torch.float64)}
    return Step(
        Said(f_1, f_2), Said(), torch.zeros(len(y), 1, 4, 4), y, torch.arange(len(y)), aux, u
    )


@both_behaviours
@pytest.mark.parametrize("scale", [1.5, 8.0])  # with 8 many q are at their floor
@pytest.mark.parametrize(
    ("lam", "gamma", "lam_e"), [(0.3, 0.4, 0.6), (0.0, 0.2, 0.0), (0.95, 0.0, 1.3)]
)
def test_the_objective_matches_the_loops(
    behaviour: Any, scale: float, lam: float, gamma: float, lam_e: float
) -> None:
    f_1, f_2, y = logits(scale)
    value = FedLSR(lam_e=lam_e, behaviour=behaviour).loss(step_that_says(f_1, f_2, y, lam, gamma))
    assert value.item() == pytest.approx(
        slow_loss(f_1, f_2, y, lam, gamma, lam_e, behaviour), rel=1e-10
    )


@both_behaviours
def test_the_gradient_matches_the_loops(behaviour: Any) -> None:
    f_1, f_2, y = logits()
    a, b = f_1.clone().requires_grad_(), f_2.clone().requires_grad_()
    value = FedLSR(behaviour=behaviour).loss(step_that_says(a, b, y, 0.3, 0.4))
    for found, which in zip(torch.autograd.grad(value, (a, b)), (0, 1), strict=True):
        slow = torch.zeros_like(found)
        for i in range(found.numel()):
            ends = []
            for h in (1e-6, -1e-6):
                moved = [f_1.clone(), f_2.clone()]
                moved[which].view(-1)[i] += h
                ends.append(slow_loss(moved[0], moved[1], y, 0.3, 0.4, 0.6, behaviour))
            slow.view(-1)[i] = (ends[0] - ends[1]) / 2e-6
        torch.testing.assert_close(found, slow, rtol=1e-6, atol=1e-8)


@both_behaviours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1 - 2**-24])
def test_it_is_finite_for_extreme_logits(behaviour: Any, dtype: torch.dtype, lam: float) -> None:
    f_1, f_2, y = logits()
    for scale in (1.0, 1e3, 1e6):
        a, b = ((scale * f).to(dtype).requires_grad_() for f in (f_1, f_2))
        step = step_that_says(a, b, y, lam, 0.4)
        step.u = step.u.float()
        value = FedLSR(behaviour=behaviour).loss(step)
        assert value.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, (a, b)))


def test_the_pieces_match_the_loops() -> None:
    p, q = (torch.softmax(f, dim=1) for f in logits()[:2])
    assert entropy(p).item() == pytest.approx(slow_entropy(p.tolist()), rel=1e-12)
    assert js_divergence(p, q).item() == pytest.approx(slow_js(p.tolist(), q.tolist()), rel=1e-12)
    assert js_divergence(p, p).item() == pytest.approx(0, abs=1e-15)
    assert js_divergence(p, q).item() == pytest.approx(js_divergence(q, p).item(), rel=1e-12)
    squares = p.square()
    torch.testing.assert_close(sharpen(p.log()).exp(), squares / squares.sum(dim=1, keepdim=True))


# The second view


def pictures(channels: int = 3, height: int = 5, width: int = 6, count: int = 8) -> Tensor:
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.random((count, channels, height, width)))
    x[0, :, 0] = x[0, :1, 0]  # some grey,
    x[0, :, 1], x[0, :, 2] = 0.0, 1.0  # black and white pixels
    return x


def clipped(v: float) -> float:
    return min(max(v, 0.0), 1.0)


def grey(pixel: list[float]) -> float:
    return 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]


def slow_view(image: Tensor, u: list[float]) -> Tensor:
    """One RGB image, pixel by pixel."""
    _, height, width = image.shape
    rows = [[image[:, i, j].tolist() for j in range(width)] for i in range(height)]
    if u[0] < 0.5:
        rows = [row[::-1] for row in rows]
    if u[1] < 0.8:
        bright, contrast, saturation = (0.2 + 1.6 * v for v in u[2:5])
        rows = [[[clipped(v * bright) for v in pixel] for pixel in row] for row in rows]
        mean = sum(grey(pixel) for row in rows for pixel in row) / (height * width)
        rows = [
            [[clipped(contrast * v + (1 - contrast) * mean) for v in pixel] for pixel in row]
            for row in rows
        ]
        for row in rows:
            for j, pixel in enumerate(row):
                level = grey(pixel)
                faded = [clipped(saturation * v + (1 - saturation) * level) for v in pixel]
                h, s, value = colorsys.rgb_to_hsv(*faded)
                row[j] = list(colorsys.hsv_to_rgb((h - 0.2 + 0.4 * u[5]) % 1.0, s, value))
    if u[6] < 0.2:
        rows = [[[grey(pixel)] * 3 for pixel in row] for row in rows]
    return torch.tensor(rows, dtype=torch.float64).permute(2, 0, 1)


def test_colours_change_as_in_the_loops() -> None:
    x, u = pictures(), torch.from_numpy(np.random.default_rng(6).random((8, 7)))
    u[:4, 1], u[4, 1] = 0.3, 0.9
    u[:3, 6], u[3, 6] = 0.7, 0.1
    found = recolour(x, u)
    for image, expected, v in zip(found, x, u.tolist(), strict=True):
        torch.testing.assert_close(image, slow_view(expected, v), rtol=1e-9, atol=1e-9)


def test_hue_turns_as_in_the_standard_library() -> None:
    x = pictures(count=2)
    shift = torch.tensor([0.17, -0.2], dtype=torch.float64).view(2, 1, 1, 1)
    found = shift_hue(x, shift)
    for b in range(2):
        for i in range(5):
            for j in range(6):
                h, s, v = colorsys.rgb_to_hsv(*x[b, :, i, j].tolist())
                expected = colorsys.hsv_to_rgb((h + shift[b].item()) % 1.0, s, v)
                assert found[b, :, i, j].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", [(5, 5), (5, 8)])
def test_rotation_reads_each_pixel_from_where_it_came(shape: tuple[int, int]) -> None:
    height, width = shape
    x, u = pictures(2, height, width, 4), torch.tensor([0.0, 0.35, 0.5, 0.99], dtype=torch.float64)
    found = rotate(x, u)
    for b in range(4):
        angle = math.radians((2 * u[b].item() - 1) * 30)
        for i in range(height):
            for j in range(width):
                dy, dx = i - (height - 1) / 2, j - (width - 1) / 2
                column = math.cos(angle) * dx - math.sin(angle) * dy + (width - 1) / 2
                row = math.sin(angle) * dx + math.cos(angle) * dy + (height - 1) / 2
                value = torch.zeros(2, dtype=torch.float64)
                for r in (math.floor(row), math.floor(row) + 1):
                    for c in (math.floor(column), math.floor(column) + 1):
                        if 0 <= r < height and 0 <= c < width:
                            value += (1 - abs(row - r)) * (1 - abs(column - c)) * x[b, :, r, c]
                torch.testing.assert_close(found[b, :, i, j], value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[2], x[2])


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("view", ["colour", "rotation"])
def test_the_view_of_normalised_images_is_the_normalised_view(view: Any, channels: int) -> None:
    x, u = pictures(channels), torch.from_numpy(np.random.default_rng(8).random((8, 7)))
    means, deviations = {3: ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])}.get(
        channels, ([0.449] * channels, [0.226] * channels)
    )
    mean, deviation = (
        torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (means, deviations)
    )
    expected = recolour(x, u) if view == "colour" else rotate(x, u[:, 0])
    found = FedLSR(view=view).second_view((x - mean) / deviation, u)
    torch.testing.assert_close(found * deviation + mean, expected, rtol=1e-9, atol=1e-9)


@both_behaviours
def test_the_loss_of_a_network_is_that_of_its_two_outputs(behaviour: Any) -> None:
    net = initialise(Cnn(width=2), 3, 4, 0).double().eval()
    rng = np.random.default_rng(9)
    x, u = torch.from_numpy(rng.normal(size=(6, 3, 8, 8))), torch.from_numpy(rng.random((6, 8)))
    y, aux = torch.tensor([0, 1, 2, 3, 0, 1]), {"gamma": torch.tensor(0.25, dtype=torch.float64)}
    method = FedLSR(behaviour=behaviour)
    value = method.loss(Step(net, net, x, y, torch.arange(6), aux, u)).item()
    with torch.no_grad():
        f_1, f_2 = net(x), net(method.second_view(x, u[:, 1:]))
    assert value == pytest.approx(
        slow_loss(f_1, f_2, y, u[0, 0].item(), 0.25, 0.6, behaviour), rel=1e-9
    )
