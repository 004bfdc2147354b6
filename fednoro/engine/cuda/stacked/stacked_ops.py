"""Convolution, batch normalisation and pooling of many networks at once, with gradients, and Adam.

On a GPU they are the kernels of `stacked_kernels`; elsewhere the same formulas, one network after
another, in PyTorch. Maps are S×B×H×W×C, in the type that is computed in. A gradient goes straight
into its `place`, unless that is taken: a loss may show the network several views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fednoro.engine.cuda.stacked import stacked_kernels as kernels
from fednoro.engine.streams import SideStream


@dataclass
class Place:
    """Where a weight's gradient goes: a part of one vector per network."""

    tensor: Tensor
    taken: bool = False

    def take(self) -> Tensor:
        """The place, once; after that memory of its own."""
        if self.taken:
            return torch.empty_strided(
                self.tensor.shape,
                _dense(self.tensor),
                dtype=self.tensor.dtype,
                device=self.tensor.device,
            )
        self.taken = True
        return self.tensor


def _dense(tensor: Tensor) -> list[int]:
    """Strides of a copy in which only the first dimension lies closer together."""
    return [tensor[0].numel(), *tensor.stride()[1:]]


@dataclass
class Kernel:
    """A convolution's weights in all networks: S×O×I×h×w, channels last in memory."""

    low: Tensor  # of the type that is computed in
    place: Place
    stride: int
    pad: int
    # where its gradient is computed: nothing on the way back waits for that
    side_stream: SideStream


@dataclass
class Norm:
    """A batch normalisation in all networks:
    everything is S×C, in float32 but for the gradients and their handles.
    """

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    handles: tuple[Tensor, Tensor]
    places: tuple[Place, Place]
    eps: float
    momentum: float


class Convolve(Function):
    """A convolution without bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, kernel: Kernel, active: Tensor) -> Tensor:
        ctx.kernel, ctx.active, ctx.shape = kernel, active, x.shape
        w = _channels_last(low)
        slots, batch, height, width, _ = x.shape
        sides = [
            (side + 2 * kernel.pad - k) // kernel.stride + 1
            for side, k in zip((height, width), w.shape[2:4], strict=True)
        ]
        y = torch.empty((slots, batch, *sides, w.shape[1]), dtype=w.dtype, device=x.device)
        if x.device.type == "cuda":
            x = kernels.padded(x, w.dtype)
            kernels.convolve(x, w, y, active, kernel.stride, kernel.pad)
        else:
            for a, b, c in zip(x, kernel.low, y, strict=True):
                c.copy_(
                    F.conv2d(
                        _channels_first(a, b), b, stride=kernel.stride, padding=kernel.pad
                    ).permute(0, 2, 3, 1)
                )
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x,), kernel, active = ctx.saved_tensors, ctx.kernel, ctx.active
        dy, needs_dx = dy.contiguous(), ctx.needs_input_grad[0]
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=x.device) if needs_dx else None
        is_second, dw = kernel.place.taken, kernel.place.take()
        if x.device.type == "cuda":
            with kernel.side_stream.work(x, dy):
                kernels.convolve_weights(
                    x, dy, _channels_last(dw), active, kernel.stride, kernel.pad
                )
            if dx is not None:
                kernels.convolve_back(
                    dy, _channels_last(kernel.low), dx, active, kernel.stride, kernel.pad
                )
            if is_second:
                kernel.side_stream.join()  # autograd adds the two up at once
            return dx, dw, None, None
        options = (
            [kernel.stride] * 2,
            [kernel.pad] * 2,
            [1, 1],
            False,
            [0, 0],
            1,
            [needs_dx, True, False],
        )
        for s, (a, b, g) in enumerate(zip(x, kernel.low, dy, strict=True)):
            left, right, _ = torch.ops.aten.convolution_backward(
                _channels_first(g, b), _channels_first(a, b), b, None, *options
            )
            dw[s].copy_(right)
            if dx is not None:
                dx[s].copy_(left.permute(0, 2, 3, 1))
        return dx, dw, None, None


class Normalise(Function):
    """relu(norm(y) + shortcut), by the statistics of each network's own batch."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        _gamma: Tensor,
        _beta: Tensor,
        shortcut: Tensor | None,
        norm: Norm,
        relu: bool,
        active: Tensor,
    ) -> Tensor:
        statistics = torch.empty((y.shape[0], 2, y.shape[4]), device=y.device)
        z = torch.empty_like(y)
        if y.device.type == "cuda":
            kernels.normalise(
                y, norm.gamma, norm.beta, shortcut, z, statistics, norm.mean, norm.var, active,
                norm.eps, norm.momentum, relu,
            )  # fmt: skip
        else:
            _normalise(y, shortcut, z, statistics, norm, relu, active)
        ctx.save_for_backward(y, z, statistics)
        ctx.norm, ctx.relu, ctx.active, ctx.has_shortcut = norm, relu, active, shortcut is not None
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        (y, z, statistics), gamma = ctx.saved_tensors, ctx.norm.gamma
        dz, dy = dz.contiguous(), torch.empty_like(y)
        dshortcut = torch.empty_like(y) if ctx.has_shortcut else None
        dgamma, dbeta = (place.take() for place in ctx.norm.places)
        if y.device.type == "cuda":
            kernels.normalise_back(
                dz, z, y, statistics, gamma, dy, dshortcut, dgamma, dbeta, ctx.active, ctx.relu
            )
        else:
            _normalise_back(dz, z, y, statistics, gamma, dy, dshortcut, dgamma, dbeta, ctx.relu)
        return dy, dgamma, dbeta, dshortcut, None, None, None


class Pool(Function):
    """The largest of 3×3 pixels, every other row and column, with a border."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, active: Tensor) -> Tensor:
        slots, batch, height, width, channels = x.shape
        y = torch.empty(
            (slots, batch, (height + 1) // 2, (width + 1) // 2, channels),
            dtype=x.dtype,
            device=x.device,
        )
        taps = torch.empty(y.shape, dtype=torch.int8, device=x.device)
        kernels.pool(x, y, taps, active)
        ctx.save_for_backward(taps, active)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        taps, active = ctx.saved_tensors
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device)
        kernels.unpool(dy.contiguous(), taps, dx, active)
        return dx, None


def pool(x: Tensor, active: Tensor) -> Tensor:
    """See `Pool`."""
    if x.device.type == "cuda":
        return Pool.apply(x, active)  # type: ignore[no-any-return,no-untyped-call]
    maps = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 3, 2, padding=1).permute(0, 2, 3, 1)
    return maps.reshape(*x.shape[:2], *maps.shape[1:])


def adam(
    values: Tensor, gradient: Tensor, direct: Tensor | None, means: Tensor, squares: Tensor,
    low: Tensor, factors: Tensor, active: Tensor, trainable: int, decay: float,
) -> None:  # fmt: skip
    """See `stacked_kernels.adam`."""
    if values.device.type == "cuda":
        kernels.adam(
            values, gradient, direct, means, squares, low, factors, active, trainable, decay
        )
        return
    for k in torch.nonzero(active).flatten().tolist():
        w, g, m, v = (matrix[k, :trainable] for matrix in (values, gradient, means, squares))
        rate, correction = factors[k]
        g = g.float() + decay * w
        g = g if direct is None else g + direct[k, :trainable]
        m.mul_(0.9).add_(g, alpha=1 - 0.9)
        v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
        w.sub_(rate * m / (v.sqrt() * correction + 1e-8))
        low[k, :trainable].copy_(w)


def _normalise(
    y: Tensor, shortcut: Tensor | None, z: Tensor, statistics: Tensor, norm: Norm, relu: bool,
    active: Tensor,
) -> None:  # fmt: skip
    values, count = y.float(), y[0, ..., 0].numel()
    mean, var = values.mean((1, 2, 3)), values.var((1, 2, 3), correction=0)
    statistics[:, 0], statistics[:, 1] = mean, (var + norm.eps).rsqrt()
    for average, value in ((norm.mean, mean), (norm.var, var * (count / (count - 1)))):
        average.copy_(
            torch.where(
                active[:, None].bool(),
                average + norm.momentum * (value - average),
                average,
            )
        )
    out = ((values - _wide(mean)) * _wide(statistics[:, 1] * norm.gamma) + _wide(norm.beta)).to(
        y.dtype
    )
    out = out if shortcut is None else out + shortcut
    z.copy_(out.relu() if relu else out)


def _normalise_back(
    dz: Tensor, z: Tensor, y: Tensor, statistics: Tensor, gamma: Tensor, dy: Tensor,
    dshortcut: Tensor | None, dgamma: Tensor, dbeta: Tensor, relu: bool,
) -> None:  # fmt: skip
    g = dz.float() * (z > 0) if relu else dz.float()
    if dshortcut is not None:
        dshortcut.copy_(g)
    v = (y.float() - _wide(statistics[:, 0])) * _wide(statistics[:, 1])
    dgamma.copy_((g * v).sum((1, 2, 3)))
    dbeta.copy_(g.sum((1, 2, 3)))
    g = g - g.mean((1, 2, 3), keepdim=True) - v * (g * v).mean((1, 2, 3), keepdim=True)
    dy.copy_(g * _wide(statistics[:, 1] * gamma))


def _wide(per_channel: Tensor) -> Tensor:
    """S×C beside maps."""
    return per_channel[:, None, None, None]


def _channels_last(w: Tensor) -> Tensor:
    """S×O×I×h×w as it lies in memory: S×O×h×w×I."""
    return w.permute(0, 1, 3, 4, 2)


def _channels_first(maps: Tensor, like: Tensor) -> Tensor:
    """B×H×W×C as B×C×H×W of another tensor's type."""
    return maps.to(like.dtype).permute(0, 3, 1, 2)
