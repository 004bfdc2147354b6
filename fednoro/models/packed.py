"""The vector that carries a network: loading, sending and averaging a model are then single operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednoro.types import Weights


class Packed:
    """A network whose floating-point tensors are views into one vector: parameters first, then buffers."""

    def __init__(self, net: nn.Module, device: torch.device | str = "cpu") -> None:
        self.net = net.to(device)
        named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        rest = [(name, p) for name, p in self.net.named_parameters() if not p.requires_grad]
        buffers = list(self.net.named_buffers())
        floats = [(n, b) for n, b in buffers if b.is_floating_point()]
        self._counters = [(n, b) for n, b in buffers if not b.is_floating_point()]
        tensors = [*named, *rest, *floats]
        first = {id(tensor): name for name, tensor in [*tensors, *self._counters]}
        every = [*self.net.named_parameters(remove_duplicate=False), *self.net.named_buffers(remove_duplicate=False)]
        self._stored_as = {name: first[id(tensor)] for name, tensor in every}  # tied tensors have several names
        self.names = tuple(name for name, _ in tensors)
        self.shapes = tuple(tensor.shape for _, tensor in tensors)
        self.segments = tuple(tensor.numel() for _, tensor in tensors)
        self.trainable = sum(p.numel() for _, p in named)
        self.values = torch.cat([tensor.detach().flatten() for _, tensor in tensors])
        for (_, tensor), view in zip(tensors, self._views(self.values), strict=True):
            tensor.data = view
        self.gradient = torch.zeros_like(self.values[: self.trainable])
        for (_, parameter), view in zip(named, self._views(self.gradient), strict=False):
            parameter.grad = view
        self.norms = [m for m in self.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def _views(self, vector: Tensor) -> list[Tensor]:
        views, start = [], 0
        for shape, size in zip(self.shapes, self.segments, strict=True):
            if start + size > vector.numel():
                break
            views.append(vector[start : start + size].view(shape))
            start += size
        return views

    def load(self, weights: Weights) -> None:
        """Takes over `weights`, in place."""
        self.values.copy_(weights.values)
        start = 0
        for _, counter in self._counters:
            counter.copy_(weights.counters[start : start + counter.numel()].view(counter.shape))
            start += counter.numel()

    def weights(self) -> Weights:
        """A copy of the present weights."""
        counters = [counter.flatten().to(torch.int64) for _, counter in self._counters]
        together = torch.cat(counters) if counters else torch.empty(0, dtype=torch.int64)
        return Weights(self.values.clone(), together, self.segments)

    def state_dict(self, weights: Weights) -> dict[str, Tensor]:
        """`weights` under the network's own tensor names, ready for `load_state_dict` anywhere."""
        tensors = dict(zip(self.names, self._views(weights.values.detach().cpu()), strict=True))
        start = 0
        for name, counter in self._counters:
            part = weights.counters[start : start + counter.numel()]
            tensors[name] = part.view(counter.shape).to("cpu", counter.dtype)
            start += counter.numel()
        own = (name for name in self.net.state_dict() if name in self._stored_as)
        return {name: tensors[self._stored_as[name]].clone() for name in own}
