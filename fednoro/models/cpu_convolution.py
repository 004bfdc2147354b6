"""Convolution on a CPU as a product of matrices, whose gradient lies in memory that is kept.

The weights of a network's last layers are larger than their images: new memory for the gradient in
each step, which the system fills with zeros page by page, would take longer than the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class Spare:
    """Memory for the gradients of weights,
    for one who uses them up before asking for the next ones.

    It is given to the first gradient of each weight within `offer` alone: nobody
    else's gradients are overwritten.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[slice, Tensor]] = {}
        self._free: set[int] | None = None

    def __reduce__(self) -> tuple[type[Spare], tuple[()]]:
        # A copy of a network has memory of its own, if it finds somebody to offer it.
        return Spare, ()

    @contextmanager
    def offer(self) -> Iterator[None]:
        """The gradients that are asked for inside are used up before this is entered again."""
        self._free = set(self._places)
        try:
            yield
        finally:
            self._free = None

    def place(self, weight: Tensor, window: slice) -> Tensor | None:
        """Zeros like `weight`, but for the `window` of each kernel:
        that may hold anything. None if not offered.
        """
        key = id(weight)
        if self._free is None or (key in self._places and key not in self._free):
            return None
        self._free.discard(key)
        if key not in self._places or self._places[key][0] != window:
            self._places[key] = window, torch.zeros_like(weight)
        return self._places[key][1]


def product(patches: Tensor, weight: Tensor, window: slice, spare: Spare | None) -> Tensor:
    """Multiplies patches and Wᵀ,
    where `window` is the rows and the columns of each kernel that take part.
    """
    if spare is None or torch.is_autocast_enabled("cpu"):
        return patches @ weight[:, :, window, window].flatten(1).t()
    return _Product.apply(patches, weight, window, spare)[0]  # type: ignore[no-any-return, no-untyped-call]


class _Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        patches: Tensor, weight: Tensor, window: slice, spare: Spare
    ) -> tuple[Tensor, Tensor]:
        w = weight[:, :, window, window].flatten(1).contiguous()
        return patches @ w.t(), w

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, slice, Spare], output: tuple[Tensor, Tensor]
    ) -> None:
        patches, weight, ctx.window, ctx.spare = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(patches, weight, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        patches, weight, w = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to have a gradient
            w = weight[:, :, ctx.window, ctx.window].flatten(1)
        dx, dw = dy @ w if ctx.needs_input_grad[0] else None, None
        if ctx.needs_input_grad[1]:
            dw = None if torch.is_grad_enabled() else ctx.spare.place(weight, ctx.window)
            if dw is None:
                dw = _among_zeros(dy.t() @ patches, weight, ctx.window)
            elif (part := dw[:, :, ctx.window, ctx.window]).is_contiguous():
                torch.mm(dy.t(), patches, out=part.view(w.shape))
            else:
                part.copy_((dy.t() @ patches).view(part.shape))
        return dx, dw, None, None


def _among_zeros(part: Tensor, weight: Tensor, window: slice) -> Tensor:
    """The window of each kernel, in a tensor like `weight` that is zero elsewhere."""
    size, around = window.stop - window.start, (window.start, weight.shape[2] - window.stop)
    return F.pad(part.view(*weight.shape[:2], size, size), (*around, *around))
