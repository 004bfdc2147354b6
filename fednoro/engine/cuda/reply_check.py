"""One transfer from the GPU for all that the server wants to know of the replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from fednoro.core.types import Failure, Reply, Weights
from fednoro.engine.streams import current_stream, finish


def with_extents(items: Sequence[Reply | Failure], device: torch.device) -> list[Reply | Failure]:
    """The same with all numbers that the host wants to know:
    one transfer, because each is a wait for the GPU.
    """

    def is_on_device(value: float | Tensor) -> TypeGuard[Tensor]:
        return isinstance(value, Tensor) and value.ndim == 0 and value.device.type == device.type

    def has_values(weights: Weights | None) -> TypeGuard[Weights]:
        return (
            weights is not None
            and weights.values.numel() > 0
            and weights.values.device.type == device.type
        )

    tensors: list[Tensor] = []
    for item in items:
        if isinstance(item, Reply):
            tensors += [
                value.detach().view(1) for value in item.metrics.values() if is_on_device(value)
            ]
            tensors += [item.weights.extent()] if has_values(item.weights) else []
    numbers = iter(torch.cat([values.double() for values in tensors]).tolist() if tensors else ())
    finish(current_stream(device))  # arrays are read on the host as well

    def with_numbers(reply: Reply) -> Reply:
        metrics = {
            name: next(numbers) if is_on_device(value) else value
            for name, value in reply.metrics.items()
        }
        extent = (
            (next(numbers), next(numbers), next(numbers)) if has_values(reply.weights) else None
        )
        return replace(reply, metrics=metrics, extent=extent)

    return [with_numbers(item) if isinstance(item, Reply) else item for item in items]
