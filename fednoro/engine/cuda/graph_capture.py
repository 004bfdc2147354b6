"""Kinds of step, what they read, and how a step is captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fednoro.core.types import Precision, Step
from fednoro.engine.streams import synchronize

PROGRAMS = 8  # kinds of step that are kept captured
EVALUATION_PIXELS = 2**24  # in one batch without gradients


class UnsuitableError(Exception):
    """This network, loss or GPU cannot be served by graphs."""


@dataclass
class Inputs:
    """What one client's training reads."""

    positions: Tensor  # N, its images' positions in the data set
    labels: Tensor  # N
    order: Tensor  # all epochs, one after the other
    u: Tensor  # likewise, ×(DRAWS + draws)
    rows: Mapping[str, Tensor]  # N×…
    aux: Mapping[str, Tensor]
    sizes: Sequence[int]  # of the batches


@dataclass(eq=False)
class Program:
    """One kind of step in a lane or a stack:
    the places it reads from, and its graphs by batch size.
    """

    key: Any
    loss: Callable[[Step], Tensor]
    aux: dict[str, Tensor]
    rows: dict[str, Tensor]  # block×…
    u: Tensor  # block×draws
    # block×C, what the anchor says about the images, where the loss asks for it
    anchor_outputs: Tensor | None = None
    # those of `aux` that the loss changes, once that is known
    updated_aux: frozenset[str] | None = None
    graphs: dict[int, Any] = field(default_factory=dict)
    # by batch size, how often each norm sees a batch
    passes: dict[int, list[int]] = field(default_factory=dict)


class Programs(dict[Any, Program]):
    """The kinds of step that are kept, each with room for so many images;
    in a stack, for several clients' `aux`.
    """

    def __init__(self, device: torch.device, room: int, *slots: int) -> None:
        super().__init__()
        self.device, self.room, self.slots = device, room, slots

    def find(
        self,
        loss: Callable[[Step], Tensor],
        aux: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
        draws: int,
    ) -> Program:
        """The program of this kind of step, made if need be."""
        key = kind_of_step(loss, aux, rows, draws)
        if key not in self:
            while len(self) >= PROGRAMS:
                # The graphs of the program that was not used for longest may be running.
                synchronize(self.device)
                del self[next(iter(self))]

            def places(
                tensors: Mapping[str, Tensor], *shape: int, first_dim: int = 0
            ) -> dict[str, Tensor]:
                return {
                    name: torch.zeros(
                        (*shape, *value.shape[first_dim:]), dtype=value.dtype, device=self.device
                    )
                    for name, value in tensors.items()
                }

            u = torch.zeros((self.room, draws), device=self.device)
            self[key] = Program(
                key, loss, places(aux, *self.slots), places(rows, self.room, first_dim=1), u
            )
        self[key] = program = self.pop(key)  # the one that was used last
        return program


@dataclass(frozen=True)
class Rehearsal:
    """What a step outside of a graph has shown, for every lane that captures the same one."""

    passes: list[int]
    anchor_outputs: Tensor | None  # empty, of the shape and type of what the anchor says


@dataclass(frozen=True)
class TrainingState:
    """A client's training between two batches:
    its weights, Adam's state, and where its next images are.
    """

    values: Tensor
    means: Tensor
    squares: Tensor
    count: Tensor
    first: int
    last: int


def kind_of_step(
    loss: Callable[[Step], Tensor],
    aux: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    draws: int,
) -> Any:
    """Equal for steps that one graph serves."""
    structure = tuple((key, tuple(value.shape), value.dtype) for key, value in sorted(aux.items()))
    per_row = tuple(
        (key, tuple(value.shape[1:]), value.dtype) for key, value in sorted(rows.items())
    )
    return _identity(loss), structure, per_row, draws


def _identity(loss: Callable[[Step], Tensor]) -> Any:
    """Equal for the losses of equal methods, which compare by their options."""
    function, owner = getattr(loss, "__func__", loss), getattr(loss, "__self__", None)
    try:
        hash(owner)
    except TypeError:
        return loss
    return function, owner


@dataclass(frozen=True)
class UncapturedStep:
    """A step that is run anew each time:
    on a machine without a GPU, the same code as behind every graph.
    """

    replay: Callable[[], None]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether it began with that: a capture that breaks off may fail again on its way out."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None


def capture(device: torch.device, pool: Any, step: Callable[[], None]) -> Any:
    """What replays a step on the current stream."""
    if device.type != "cuda":
        return UncapturedStep(step)
    graph = torch.cuda.CUDAGraph()
    try:
        # torch.cuda.graph() would empty the allocator's cache as well,
        # and wait for the other lanes.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        with suppress(Exception):
            # Where the capture itself was broken off, the pool is still being recorded to.
            index = torch.cuda.current_device() if device.index is None else device.index
            torch._C._cuda_endAllocateToPool(index, pool)
        if _out_of_memory(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise UnsuitableError(
            f"a step could not be captured ({str(error).splitlines()[0]})"
        ) from error
    return graph
