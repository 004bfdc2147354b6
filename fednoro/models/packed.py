"""The vector that carries a network:
loading, sending and averaging a model are then single operations.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from fednoro.core.types import Weights

LARGE = 2**20  # bytes of a vector that is worth keeping


class Copies:
    """Memory for copies of a vector on the CPU,
    which is used again when nobody holds the copy any more.

    New memory comes from the system page by page: a ResNet-18's takes
    five times as long as its copy.
    """

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        return Copies, ()

    def of(self, values: Tensor) -> Tensor:
        """A copy that is the caller's for as long as anything refers to it."""
        if values.device.type != "cpu" or values.nbytes < LARGE:
            return values.clone()
        with self._lock:
            storage = next(
                (s for s in self._storages if s.nbytes() == values.nbytes and _holders(s) == 1),
                None,
            )
            if storage is None:
                storage = torch.UntypedStorage(values.nbytes)  # type: ignore[no-untyped-call]
                self._storages.append(storage)
            place = torch.empty(0, dtype=values.dtype).set_(storage)
        return place.view(values.shape).copy_(values)


def _holders(storage: torch.UntypedStorage) -> int:
    """How many refer to the memory, from Python and from within tensors."""
    return torch._C._storage_Use_Count(storage._cdata)


class Packed:
    """A network whose floating-point tensors are views into one vector:
    parameters first, then buffers.

    With `channels_last` the kernels of convolutions lie in that vector as a GPU's matrix units want
    them; `Weights` have the ordinary layout in any case.
    """

    def __init__(
        self,
        net: nn.Module,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.net, self.channels_last = net.to(device), channels_last
        parameters = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        frozen = [(name, p) for name, p in self.net.named_parameters() if not p.requires_grad]
        buffers = list(self.net.named_buffers())
        floats = [(n, b) for n, b in buffers if b.is_floating_point()]
        self._counters = [(n, b) for n, b in buffers if not b.is_floating_point()]
        tensors = [*parameters, *frozen, *floats]
        first = {id(tensor): name for name, tensor in [*tensors, *self._counters]}
        every = [
            *self.net.named_parameters(remove_duplicate=False),
            *self.net.named_buffers(remove_duplicate=False),
        ]
        # Tied tensors have several names.
        self._stored_as = {name: first[id(tensor)] for name, tensor in every}
        self._saved_names = [name for name in self.net.state_dict() if name in self._stored_as]
        self.names = tuple(name for name, _ in tensors)
        self.shapes = tuple(tensor.shape for _, tensor in tensors)
        self.segments = tuple(tensor.numel() for _, tensor in tensors)
        self.trainable = sum(p.numel() for _, p in parameters)
        self.values = torch.empty(sum(self.segments), device=device)
        self.tensors = tuple(tensor for _, tensor in tensors)
        for tensor, view in zip(self.tensors, self.views_of(self.values), strict=True):
            tensor.data = view.copy_(tensor.detach())
        # Where each entry of `values` is in the ordinary layout, and the other way round.
        self._order: tuple[Tensor, Tensor] | None = None
        if channels_last:
            positions = torch.arange(len(self.values), dtype=torch.int32, device=device)
            order = torch.empty_like(positions)
            for view, ordinary in zip(
                self._views(order, True), self._views(positions), strict=True
            ):
                view.copy_(ordinary)
            self._order = order, torch.empty_like(positions).index_copy_(0, order.long(), positions)
        self.norms = _norms(self.net)
        self.copies = Copies()

    def alias(self) -> Packed:
        """The same network once more, over the same vector."""
        return self._copy_with(
            {id(tensor): tensor for tensor in (*self.net.parameters(), *self.net.buffers())}
        )

    def twin(self) -> Packed:
        """One more network of this kind with a vector of its own, to be loaded:
        no weights are copied.
        """
        values = torch.empty_like(self.values)
        tensors_by_id: dict[int, Any] = {}
        for tensor, view in zip(self.tensors, self.views_of(values), strict=True):
            parameter = isinstance(tensor, nn.Parameter)
            tensors_by_id[id(tensor)] = (
                nn.Parameter(view, tensor.requires_grad) if parameter else view
            )
        tensors = tuple(tensors_by_id.values())
        other = self._copy_with(tensors_by_id)  # which fills `tensors_by_id` with what it copies
        other.values, other.tensors = values, tensors
        other._counters = [
            (name, copy.deepcopy(counter, tensors_by_id)) for name, counter in self._counters
        ]
        return other

    def _copy_with(self, tensors: dict[int, Any]) -> Packed:
        """A copy of the network that has these tensors, by the ids of its own."""
        other = copy.copy(self)
        other.net = copy.deepcopy(self.net, tensors)
        other.norms = _norms(other.net)
        return other

    @property
    def counters(self) -> int:
        """How many tensors of integers the network has."""
        return len(self._counters)

    def views_of(self, vector: Tensor) -> list[Tensor]:
        """The tensors inside a vector that is laid out as `values`,
        or inside several of them, …×P.
        """
        return self._views(vector, self.channels_last)

    def _views(self, vector: Tensor, channels_last: bool = False) -> list[Tensor]:
        views, leading_shape = [], vector.shape[:-1]
        for shape, part in zip(
            self.shapes, torch.split(vector, list(self.segments), dim=-1), strict=True
        ):
            if channels_last and len(shape) == 4:
                outputs, inputs, height, width = shape
                views.append(
                    part.view(*leading_shape, outputs, height, width, inputs).movedim(-1, -3)
                )
            else:
                views.append(part.view(*leading_shape, *shape))
        return views

    def load(self, weights: Weights, counters: bool = True) -> None:
        """Takes over `weights`, in place; the integers only if asked."""
        if self._order is None:
            self.values.copy_(weights.values)
        else:
            torch.index_select(
                weights.values.to(self.values.device), 0, self._order[0], out=self.values
            )
        start = 0
        for _, counter in self._counters if counters else ():
            counter.copy_(weights.counters[start : start + counter.numel()].view(counter.shape))
            start += counter.numel()

    def weights(self) -> Weights:
        """A copy of the present weights."""
        counters = [counter.flatten().to(torch.int64) for _, counter in self._counters]
        together = torch.cat(counters) if counters else torch.empty(0, dtype=torch.int64)
        return Weights(self.ordinary(), together, self.segments)

    def ordinary(self, values: Tensor | None = None) -> Tensor:
        """A copy of `values`, or of others that are laid out like them, in the ordinary layout."""
        vector = self.values if values is None else values
        return (
            self.copies.of(vector)
            if self._order is None
            else vector.index_select(0, self._order[1])
        )

    def state_dict(self, weights: Weights) -> dict[str, Tensor]:
        """`weights` under the network's own tensor names, ready for `load_state_dict` anywhere."""
        tensors = dict(zip(self.names, self._views(weights.values.detach().cpu()), strict=True))
        start = 0
        for name, counter in self._counters:
            part = weights.counters[start : start + counter.numel()]
            tensors[name] = part.view(counter.shape).to("cpu", counter.dtype)
            start += counter.numel()
        return {name: tensors[self._stored_as[name]].clone() for name in self._saved_names}


def _norms(net: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
