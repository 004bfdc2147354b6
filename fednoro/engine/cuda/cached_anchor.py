"""The anchor as a step sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class Anchor(nn.Module):
    """The received model; what it says about a step's own images may be known already."""

    def __init__(self, net: nn.Module, x: Tensor, outputs: Tensor | None) -> None:
        super().__init__()
        vars(self).update(_net=net, _x=x, _outputs=outputs, new_outputs=None)
        self.training = False

    def forward(self, x: Tensor) -> Any:
        if x is not self._x:
            return self._net(x)
        if self._outputs is None:
            vars(self)["new_outputs"] = self._net(x)
            return self.new_outputs
        return self._outputs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._net.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self._net.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_net"], name)
