"""Products of images and weights whose gradient lies in memory that is kept from step to step.

The weights of a network's last layers are larger than their images: new memory for the gradient,
which the system fills with zeros page by page, would take longer than the product.
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
    """Memory for the gradients of weights, for one who uses them up
    before asking for the next ones.

    It is given to the first gradient of each weight within `offered` alone: nobody
    else's gradients are overwritten.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[slice, Tensor]] = {}
        self._free: set[int] | None = None

    def __reduce__(self) -> tuple[type[Spare], tuple[()]]:
        # a copy of a network has memory of its own, if it finds somebody to offer it
        return Spare, ()

    @contextmanager
    def offered(self) -> Iterator[None]:
        """The gradients that are asked for inside are used up before this is entered again."""
        self._free = set(self._kept)
        try:
            yield
        finally:
            self._free = None

    def place(self, weight: Tensor, met: slice) -> Tensor | None:
        """Zeros like `weight`, but for what is `met` of each kernel: that may hold
        anything. None if not offered.
        """
        key = id(weight)
        if self._free is None or (key in self._kept and key not in self._free):
            return None
        self._free.discard(key)
        if key not in self._kept or self._kept[key][0] != met:
            self._kept[key] = met, torch.zeros_like(weight)
        return self._kept[key][1]


def product(patches: Tensor, weight: Tensor, met: slice, spare: Spare | None) -> Tensor:
    """Multiplies patches and Wᵀ, where `met` are the rows and the columns
    of each kernel that take part.
    """
    if spare is None or torch.is_autocast_enabled("cpu"):
        return patches @ weight[:, :, met, met].flatten(1).t()
    return _Product.apply(patches, weight, met, spare)[0]  # type: ignore[no-any-return, no-untyped-call]


class _Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(patches: Tensor, weight: Tensor, met: slice, spare: Spare) -> tuple[Tensor, Tensor]:
        w = weight[:, :, met, met].flatten(1).contiguous()
        return patches @ w.t(), w

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, slice, Spare], output: tuple[Tensor, Tensor]
    ) -> None:
        patches, weight, ctx.met, ctx.spare = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(patches, weight, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        patches, weight, w = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to have a gradient
            w = weight[:, :, ctx.met, ctx.met].flatten(1)
        dx, dw = dy @ w if ctx.needs_input_grad[0] else None, None
        if ctx.needs_input_grad[1]:
            dw = None if torch.is_grad_enabled() else ctx.spare.place(weight, ctx.met)
            if dw is None:
                dw = _among_zeros(dy.t() @ patches, weight, ctx.met)
            elif (part := dw[:, :, ctx.met, ctx.met]).is_contiguous():
                torch.mm(dy.t(), patches, out=part.view(w.shape))
            else:
                part.copy_((dy.t() @ patches).view(part.shape))
        return dx, dw, None, None


def _among_zeros(part: Tensor, weight: Tensor, met: slice) -> Tensor:
    """What is met of each kernel, in a tensor like `weight` that is zero elsewhere."""
    size, around = met.stop - met.start, (met.start, weight.shape[2] - met.stop)
    return F.pad(part.view(*weight.shape[:2], size, size), (*around, *around))
