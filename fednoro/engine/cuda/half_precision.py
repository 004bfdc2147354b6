"""A network that computes in bfloat16 and is trained in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fednoro.core.training import Training
from fednoro.engine.lane import Adam
from fednoro.models import Packed


class Half(nn.Module):
    """`packed`'s network with bfloat16 copies of the weights of its convolutions and linear layers.

    It computes what autocast computes. Autocast casts each weight anew in every forward pass and
    each gradient in every backward pass, one kernel at a time; here all weights are cast together
    after an update. Normalisation stays in float32. `parameters()` are the float32 originals, so
    that a proximal term sees all digits.
    """

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed_values = packed.values
        # A copy of everything, of which convolutions and linear layers use their part.
        self.values = packed.values.to(torch.bfloat16)
        net = packed.alias().net
        places = {
            id(p): view
            for p, view in zip(packed.tensors, packed.views_of(self.values), strict=True)
        }
        copies: dict[int, nn.Parameter] = {}
        for module in net.modules():
            if not isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
                continue
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    if id(tensor) not in copies:
                        copies[id(tensor)] = nn.Parameter(
                            places[id(tensor)], requires_grad=tensor.requires_grad
                        )
                    module._parameters[name] = copies[id(tensor)]
        # Not registered: neither is a part with a name of its own.
        vars(self).update(_original=packed.net, _low=net, _call=net)
        self.low = {id(p): copies[id(p)] for p in packed.net.parameters() if id(p) in copies}
        self.training = packed.net.training
        self.norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def refresh(self) -> None:
        """Takes the float32 weights over."""
        self.values.copy_(self.packed_values)

    def forward(self, x: Tensor) -> Any:
        return self._call(x)

    def with_compiled_forward(self) -> Half:
        """The same network, whose forward pass is compiled."""
        fast = copy.copy(self)
        vars(fast)["_call"] = torch.compile(self._low, dynamic=False)
        return fast

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._original.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self._original.named_buffers(*args, **kwargs)

    def train(self, mode: bool = True) -> Half:
        self.training = mode
        self._low.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_low"], name)


class HalfAdam(Adam):
    """Adam on the vector of float32 weights by bfloat16 gradients;
    it refreshes the bfloat16 copies as well.
    """

    def __init__(self, packed: Packed, net: Half, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__([packed.values[: packed.trainable]])
        self.leaves = [net.low.get(id(p), p) for p in parameters]
        self._net, self._gradient = net, torch.zeros_like(packed.values)
        places = {
            id(t): view
            for t, view in zip(packed.tensors, packed.views_of(self._gradient), strict=True)
        }
        self._places = [places[id(p)] for p in parameters]

    def moments_and_places(
        self, packed: Packed, means: Tensor, squares: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        return [*self.means, *self.squares], [
            means[: packed.trainable],
            squares[: packed.trainable],
        ]

    def step(self, gradients: Sequence[Tensor | None], options: Training) -> None:
        placed_gradients = [
            (place, g) for place, g in zip(self._places, gradients, strict=True) if g is not None
        ]
        for place, g in zip(self._places, gradients, strict=True):
            if g is None:  # another loss may have left a gradient there
                place.zero_()
        # One kernel copies all gradients of a type.
        for dtype in {g.dtype for _, g in placed_gradients}:
            pairs = [(place, g) for place, g in placed_gradients if g.dtype == dtype]
            torch._foreach_copy_([place for place, _ in pairs], [g for _, g in pairs])
        super().step([self._gradient[: len(self.tensors[0])]], options)
        self._net.refresh()
