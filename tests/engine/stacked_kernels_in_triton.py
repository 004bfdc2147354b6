"""The Triton kernels against PyTorch, on a GPU or, with TRITON_INTERPRET=1, in
Triton's interpreter on a CPU.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.engine.cuda.stacked import stacked_kernels, stacked_ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = DEVICE.type == "cpu"  # a GPU multiplies float32 as TF32
SLOTS, ACTIVE = 3, [0, 2]


def close(found: Tensor, expected: Tensor, off: float) -> None:
    for s in ACTIVE:
        error = float((found[s] - expected[s]).abs().max() / expected[s].abs().max())
        assert error < off, error


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def first(maps: Tensor) -> Tensor:
    """…×H×W×C as …×C×H×W."""
    return maps.movedim(-1, -3)


def check_convolution(
    active: Tensor,
    dtype: torch.dtype,
    batch: int,
    side: int,
    inputs: int,
    outputs: int,
    k: int,
    stride: int,
) -> None:
    pad, out = k // 2, (side + 2 * (k // 2) - k) // stride + 1
    x, w = (
        random(SLOTS, batch, side, side, inputs).to(dtype),
        0.1 * random(SLOTS, outputs, k, k, inputs).to(dtype),
    )
    y, dy = (random(SLOTS, batch, out, out, outputs).to(dtype) for _ in range(2))
    dx, dw = torch.zeros_like(x), torch.zeros_like(w)
    maps = stacked_kernels.padded(x, w.dtype)
    stacked_kernels.convolve(maps, w, y, active, stride, pad)
    stacked_kernels.convolve_weights(maps, dy, dw, active, stride, pad)
    if inputs > stacked_kernels.FEW_CHANNELS:
        stacked_kernels.convolve_back(dy, w, dx, active, stride, pad)
    expected = [torch.zeros_like(t, dtype=torch.float64) for t in (y, dx, dw)]
    for s in range(SLOTS):
        a, b = (first(t[s]).double().requires_grad_() for t in (x, w))
        c = F.conv2d(a, b, stride=stride, padding=pad)
        da, db = torch.autograd.grad(c, [a, b], first(dy[s]).double())
        for place, value in zip(expected, (c.detach(), da, db), strict=True):
            place[s] = value.movedim(-3, -1)
    off = 1e-5 if EXACT else 1e-2 if dtype == torch.float32 else 2e-2
    close(y, expected[0], off)
    close(dw, expected[2], off)
    if inputs > stacked_kernels.FEW_CHANNELS:
        close(dx, expected[1], off)


def check_norm(active: Tensor, side: int, relu: bool, add: bool) -> None:
    y, dz = 2 * random(SLOTS, 4, side, side, 64) + 5, random(SLOTS, 4, side, side, 64)
    shortcut = random(*y.shape) if add else None
    gamma, beta, mean, var = (
        random(SLOTS, 64).abs() + 0.5,
        random(SLOTS, 64),
        random(SLOTS, 64),
        random(SLOTS, 64),
    )
    places = tuple(stacked_ops.Place(random(SLOTS, 64)) for _ in range(2))
    norm = stacked_ops.Norm(gamma, beta, mean.clone(), var.clone(), places, places, 1e-5, 0.1)  # type: ignore[arg-type]
    z, saved, z_expected, saved_expected = (
        torch.empty_like(t) for t in (y, y[:, 0, 0, :2], y, y[:, 0, 0, :2])
    )
    stacked_kernels.normalise(
        y, gamma, beta, shortcut, z, saved, mean, var, active, 1e-5, 0.1, relu
    )
    stacked_ops._normalise(y, shortcut, z_expected, saved_expected, norm, relu, active)
    for found, expected in (
        (z, z_expected),
        (saved, saved_expected),
        (mean, norm.mean),
        (var, norm.var),
    ):
        close(found, expected, 2e-5)
    assert torch.equal(mean[1], norm.mean[1]), "who is not active keeps what it has"
    given = dz, z_expected, y, saved_expected, gamma
    found_all, expected_all = (
        [torch.empty_like(t) for t in (y, y, gamma, gamma)] for _ in range(2)
    )
    for results, function in (
        (found_all, stacked_kernels.normalise_back),
        (expected_all, stacked_ops._normalise_back),
    ):
        dy, dshortcut, dgamma, dbeta = results
        last = (active, relu) if function is stacked_kernels.normalise_back else (relu,)
        function(*given, dy, dshortcut if add else None, dgamma, dbeta, *last)  # type: ignore[operator]
    for number, (found, expected) in enumerate(zip(found_all, expected_all, strict=True)):
        if number != 1 or add:
            close(found, expected, 1e-4)


def check_pool(active: Tensor, height: int, width: int) -> None:
    x = random(SLOTS, 2, height, width, 64)
    y = random(SLOTS, 2, (height + 1) // 2, (width + 1) // 2, 64)
    taps, dy, dx = (
        torch.zeros(y.shape, dtype=torch.int8, device=DEVICE),
        random(*y.shape),
        torch.zeros_like(x),
    )
    stacked_kernels.pool(x, y, taps, active)
    stacked_kernels.unpool(dy, taps, dx, active)
    maps = first(x.flatten(0, 1)).requires_grad_()
    pooled = F.max_pool2d(maps, 3, 2, padding=1)
    (gradient,) = torch.autograd.grad(pooled, maps, first(dy.flatten(0, 1)))
    close(y, pooled.detach().movedim(1, -1).reshape(y.shape), 1e-6)
    close(dx, gradient.movedim(1, -1).reshape(x.shape), 1e-5)


def check_adam(active: Tensor, add: bool) -> None:
    values, gradient, direct, means, squares = (random(SLOTS, 5008) for _ in range(5))
    squares.abs_()
    low, factors, trainable = torch.zeros_like(values), random(SLOTS, 2).abs(), 4500
    before = [t.clone() for t in (values, means, squares)]
    stacked_kernels.adam(
        values,
        gradient,
        direct if add else None,
        means,
        squares,
        low,
        factors,
        active,
        trainable,
        5e-4,
    )
    w, m, v = (t.double() for t in before)
    g = gradient.double() + 5e-4 * w + (direct.double() if add else 0)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    w = w - factors[:, :1] * m / (v.sqrt() * factors[:, 1:] + 1e-8)
    for found, expected, old in zip((values, means, squares), (w, m, v), before, strict=True):
        close(found[:, :trainable], expected[:, :trainable], 1e-5)
        assert torch.equal(found[1], old[1]) and torch.equal(
            found[:, trainable:], old[:, trainable:]
        )
    assert torch.equal(low[ACTIVE, :trainable], values[ACTIVE, :trainable])


def main() -> None:
    torch.manual_seed(0)
    active = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    shapes = [
        (2, 8, 64, 64, 3, 1),
        (2, 8, 64, 128, 3, 2),
        (3, 8, 64, 128, 1, 2),
        (2, 10, 3, 64, 7, 2),
        (4, 32, 3, 64, 7, 2),
        (4, 2, 512, 512, 3, 1),
        (4, 6, 128, 128, 3, 1),
        (8, 6, 128, 256, 3, 1),
    ]
    for dtype in [torch.float32] if EXACT else [torch.float32, torch.bfloat16]:
        # the interpreter has no bfloat16
        for shape in shapes:
            check_convolution(active, dtype, *shape)
    for side, relu, add in itertools.product((3, 6, 9), (True, False), (True, False)):
        check_norm(active, side, relu, add)
    for height, width in ((8, 8), (7, 9)):
        check_pool(active, height, width)
    for add in (True, False):
        check_adam(active, add)


if __name__ == "__main__":
    main()
