"""A lane whose steps are CUDA graphs, and the fixed places in memory that they read and write."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fednoro.core.training import Training
from fednoro.core.types import FedNoRoWarning, Precision, Step, Weights
from fednoro.engine.cuda import image_kernel
from fednoro.engine.cuda.cached_anchor import Anchor
from fednoro.engine.cuda.graph_capture import (
    Inputs,
    Program,
    Programs,
    Rehearsal,
    TrainingState,
    UnsuitableError,
    autocast,
    capture,
)
from fednoro.engine.cuda.half_precision import Half, HalfAdam
from fednoro.engine.images import DRAWS, Images
from fednoro.engine.lane import Adam, Lane, blocks, normalise_by_running_statistics, room
from fednoro.engine.streams import stream
from fednoro.models import Packed

ANCHOR_BATCH = 512  # images that the anchor sees at once
PAUSE = 16  # steps that are queued before others have their turn


class CudaLane(Lane):
    """A lane with a stream, and the fixed places that its graphs read and write."""

    pattern: Packed  # of more lanes
    rehearsals: dict[Any, Rehearsal]

    def __init__(
        self,
        net: nn.Module | CudaLane,  # or another lane with such a network
        device: torch.device,
        precision: Precision,
        shape: tuple[int, ...],
        training: Training,
        compiled: bool,
    ) -> None:
        self.device, self.precision, self.training = device, precision, training
        self.channels_last = precision != "fp32"
        self.fused = precision == "bf16" and device.type == "cuda" and image_kernel.available()
        if isinstance(net, CudaLane):
            self.pattern, self._host_counts, self.rehearsals = (
                net.pattern,
                net._host_counts,
                net.rehearsals,
            )
            self.net = self.pattern.twin()
        else:
            self.net = Packed(net.train(), device, self.channels_last)
            self._host_counts = _stop_counting(self.net)
            self.pattern = self.net.alias()  # one that has been trained may resist to be copied
            self.rehearsals = {}
        self.anchor = self.net.twin()
        self.anchor.net.eval().requires_grad_(False)
        self._anchor_values: Tensor | None = None
        self.parameters = [p for p in self.net.net.parameters() if p.requires_grad]
        self.student: Any = self.net.net
        self.teacher: Any = self.anchor.net
        self.norms = self.net.norms
        if precision == "bf16":
            self.student, self.teacher = Half(self.net), Half(self.anchor)
            self.norms = self.student.norms
            self.adam: Adam = HalfAdam(self.net, self.student, self.parameters)
        else:
            self.adam = Adam(self.parameters)
        self.forward: Any = self.student
        if compiled:
            # Each lane has a network of its own, and all share the code.
            torch._dynamo.config.recompile_limit = 64
            half = isinstance(self.student, Half)
            self.forward = (
                self.student.with_compiled_forward()
                if half
                else torch.compile(self.student, dynamic=False)
            )
        self.stream = stream(device)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        channels, height, width = shape
        layout = (height, width, channels) if self.channels_last else shape
        self.block = room(channels * height * width, training.batch)
        self.programs = Programs(device, self.block)
        self.x = torch.zeros((self.block, *layout), device=device)
        self.y = torch.zeros(self.block, dtype=torch.int64, device=device)
        self.index = torch.zeros(self.block, dtype=torch.int64, device=device)
        self.offsets = torch.arange(training.batch, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros((), device=device)

    # Where things are put

    def upload(self, array: NDArray[Any]) -> Tensor:
        """An array on the GPU, without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return (
            tensor.pin_memory().to(self.device, non_blocking=True)
            if self.device.type == "cuda"
            else tensor
        )

    def load(self, weights: Weights) -> None:
        super().load(weights)
        if self.precision == "bf16":
            self.student.refresh()

    def anchor_to(self, weights: Weights) -> None:
        before = self._anchor_values
        super().anchor_to(weights)
        if self.precision == "bf16" and self._anchor_values is not before:
            self.teacher.refresh()

    def program(self, loss: Callable[[Step], Tensor], data: Inputs, draws: int) -> Program:
        """The program of this kind of step, with room for its inputs."""
        return self.programs.find(loss, data.aux, data.rows, draws)

    # What runs

    def run(
        self,
        program: Program,
        images: Images,
        weights: Weights,
        data: Inputs,
        pause: Callable[[], Any],
    ) -> Tensor:
        """Trains one client; returns the sum of its losses. `pause` is called now and then."""
        parts = list(blocks(data.sizes, self.block))
        for size in sorted(set(data.sizes), reverse=True):
            self._capture(program, images, weights, data, size, *parts[0][:2])
        self._begin(program, weights, data)
        step_count = 0
        for first, last, sizes in parts:
            self._prepare(program, images, data, first, last)
            for size in sizes:
                program.graphs[size].replay()
                step_count += 1
                if step_count % PAUSE == 0:
                    pause()
        return self._end(program, data)

    def resume(
        self, program: Program, images: Images, weights: Weights, data: Inputs, state: TrainingState
    ) -> Tensor:
        """The batch after `state` for a client that was trained elsewhere
        until then; returns its loss.
        """
        first, last = state.first, state.last
        self._capture(program, images, weights, data, last - first, first, last)
        self._begin(program, weights, data)
        self.net.values.copy_(state.values)
        torch._foreach_copy_(*self.adam.moments_and_places(self.net, state.means, state.squares))
        self.adam.count.copy_(state.count)
        if self.precision == "bf16":
            self.student.refresh()
        self._prepare(program, images, data, first, last)
        program.graphs[last - first].replay()
        return self._end(program, data)

    def _end(self, program: Program, data: Inputs) -> Tensor:
        """Hands back what the loss updated from batch to batch, and the sum of the losses."""
        for name, place in program.aux.items():
            data.aux[name].copy_(place)
        return self.total.clone()

    def _capture(
        self,
        program: Program,
        images: Images,
        weights: Weights,
        data: Inputs,
        size: int,
        first: int,
        last: int,
    ) -> None:
        """Makes the graph for batches of this size, unless it is there;
        rehearsed on the images from `first` on.
        """
        if size in program.graphs or self._capture_at_once(program, size):
            return
        if not self._take_rehearsal(program, size):
            # Overwrites whatever was left behind: a rehearsal must not meet NaN.
            self._begin(program, weights, data)
            self._prepare(program, images, data, first, last)
            self._rehearse(program, size)
        program.graphs[size] = self._make_graph(program, size)

    def _begin(self, program: Program, weights: Weights, data: Inputs) -> None:
        self.load(weights)
        self.total.zero_()
        for name, place in program.aux.items():
            place.copy_(data.aux[name])

    def _prepare(
        self, program: Program, images: Images, data: Inputs, first: int, last: int
    ) -> None:
        """Puts the images from `first` to `last` of the training's order into the block,
        the cursor at its start.
        """
        index, n = data.order[first:last], last - first
        if self.fused:
            image_kernel.fill(self.x[:n], images, data.positions[index], data.u[first:last])
        else:
            x = images.batch(data.positions[index], data.u[first:last, :DRAWS])
            self.x[:n].copy_(x.permute(0, 2, 3, 1) if self.channels_last else x)
        self.y[:n].copy_(data.labels[index])
        self.index[:n].copy_(index)
        program.u[:n].copy_(data.u[first:last, DRAWS:])
        for name, place in program.rows.items():
            place[:n].copy_(data.rows[name].to(self.device)[index])
        self._ask_anchor(program, n)
        self.cursor.zero_()

    def _ask_anchor(self, program: Program, n: int) -> None:
        """The anchor stays the same for a whole round:
        large batches of it cost far less than one in each step.
        """
        if program.anchor_outputs is None:
            return
        with torch.no_grad(), self._autocast():
            for x, place in zip(
                torch.split(self.x[:n], ANCHOR_BATCH),
                torch.split(program.anchor_outputs[:n], ANCHOR_BATCH),
                strict=True,
            ):
                place.copy_(self.teacher(x.permute(0, 3, 1, 2) if self.channels_last else x))

    def _autocast(self) -> torch.autocast:
        return autocast(self.device, self.precision)

    def _take_rehearsal(self, program: Program, size: int) -> bool:
        """Whether another lane has rehearsed this step;
        a network that is compiled rehearses in every lane.
        """
        rehearsal = self.rehearsals.get((program.key, size))
        if rehearsal is None or self.forward is not self.student:
            return False
        program.passes[size] = rehearsal.passes
        self._make_room(program, rehearsal)
        return True

    def _capture_at_once(self, program: Program, size: int) -> bool:
        """Captures a step that has been rehearsed in another size; whether that worked."""
        rehearsals = [
            rehearsal
            for (key, other), rehearsal in self.rehearsals.items()
            if key == program.key and min(other, size) > 1
        ]
        is_new = (program.key, size) not in self.rehearsals
        if (
            not rehearsals
            or not is_new
            or self.forward is not self.student
            or self.device.type != "cuda"
        ):
            return False
        self._make_room(program, rehearsals[0])
        uses_anchor = program.anchor_outputs is not None
        try:
            with self._count_passes(program, size):
                graph = self._make_graph(program, size)
        except UnsuitableError:  # libraries may have to set themselves up for this size
            self.pool = torch.cuda.graph_pool_handle()
            return False
        if uses_anchor != (program.anchor_outputs is not None):
            # The loss asks the anchor in this size alone: the graph makes the outputs.
            program.anchor_outputs = None
            return False
        program.graphs[size] = graph
        self.rehearsals[program.key, size] = Rehearsal(
            program.passes[size], rehearsals[0].anchor_outputs
        )
        return True

    def _make_room(self, program: Program, rehearsal: Rehearsal) -> None:
        if rehearsal.anchor_outputs is not None and program.anchor_outputs is None:
            program.anchor_outputs = rehearsal.anchor_outputs.new_zeros(
                (self.block, *rehearsal.anchor_outputs.shape[1:])
            )

    def _make_graph(self, program: Program, size: int) -> Any:
        def step() -> None:
            normalise_by_running_statistics(self.norms, alone=size == 1)
            self.step(program, size)

        return capture(self.device, self.pool, step)

    def _rehearse(self, program: Program, size: int) -> None:
        """A step outside of the graph,
        where libraries set themselves up and a network is compiled.
        """
        normalise_by_running_statistics(self.norms, alone=size == 1)
        cuda = self.device.type == "cuda"
        random_state = torch.cuda.get_rng_state(self.device) if cuda else None
        with self._count_passes(program, size):
            self.step(program, size, compiled=False)
        if self.forward is not self.student:
            self._rehearse_compiled(program, size)
        if random_state is not None and not torch.equal(
            random_state, torch.cuda.get_rng_state(self.device)
        ):
            raise UnsuitableError(
                "the network draws random numbers, and a captured step would repeat them"
            )
        empty_outputs = None if program.anchor_outputs is None else program.anchor_outputs[:0]
        self.rehearsals[program.key, size] = Rehearsal(program.passes[size], empty_outputs)

    def _rehearse_compiled(self, program: Program, size: int) -> None:
        self.cursor.zero_()  # the block may hold no more than one batch
        try:
            self.step(program, size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.forward = self.student
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            warnings.warn(
                f"going on without torch.compile, which failed ({why})",
                FedNoRoWarning,
                stacklevel=2,
            )

    @contextmanager
    def _count_passes(self, program: Program, size: int) -> Iterator[None]:
        """Counts how often each norm is called inside the block:
        a loss may show the network several views.
        """
        counts = [0] * len(self.norms)

        def count(number: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                counts[number] += 1

            return hook

        hooks = [
            norm.register_forward_hook(count(number)) for number, norm in enumerate(self.norms)
        ]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()
        program.passes[size] = counts

    def step(self, program: Program, size: int, compiled: bool = True) -> None:
        """One batch of the block, from the cursor on."""
        rows = self.cursor + self.offsets[:size]
        x = self.x.index_select(0, rows)
        full = size == self.training.batch
        x = x.permute(0, 3, 1, 2) if self.channels_last else x
        outputs = (
            None if program.anchor_outputs is None else program.anchor_outputs.index_select(0, rows)
        )
        anchor = Anchor(self.teacher, x, outputs)
        step = Step(
            self.forward if full and compiled else self.student,
            anchor,
            x,
            self.y.index_select(0, rows),
            self.index.index_select(0, rows),
            program.aux,
            program.u.index_select(0, rows),
            {name: place.index_select(0, rows) for name, place in program.rows.items()},
        )
        with self._autocast():
            value = program.loss(step)
        if anchor.new_outputs is not None and program.anchor_outputs is None:
            # From now on they are made for whole blocks, and have a place here.
            program.anchor_outputs = anchor.new_outputs.new_zeros(
                (self.block, *anchor.new_outputs.shape[1:])
            )
        self.descend(value, self.training)
        self.total.add_(value.detach() * size)
        self.cursor.add_(size)

    def descend(self, loss: Tensor, options: Training) -> None:
        if not isinstance(self.adam, HalfAdam):
            super().descend(loss, options)
            return
        # A loss reaches a weight through its copy,
        # and through the original where it looks at parameters themselves.
        leaves = self.adam.leaves
        originals = [p for p, leaf in zip(self.parameters, leaves, strict=True) if p is not leaf]
        gradients = torch.autograd.grad(loss, [*leaves, *originals], allow_unused=True)
        direct = dict(zip(map(id, originals), gradients[len(leaves) :], strict=True))
        sums = [
            _sum(g, direct.get(id(p)))
            for g, p in zip(gradients[: len(leaves)], self.parameters, strict=True)
        ]
        self.adam.step(sums, options)

    def weights_after(self, program: Program, start: Weights, sizes: Sequence[int]) -> Weights:
        """The trained weights, with counters as BatchNorm would have counted."""
        if not self._host_counts:
            return self.net.weights()
        passes = [program.passes[size] for size in sizes if size > 1]
        counters = self.upload(
            np.array(passes, dtype=np.int64).reshape(-1, len(self.norms)).sum(axis=0)
        )
        return Weights(
            self.net.ordinary(), start.counters.to(self.device) + counters, self.net.segments
        )

    def logits(
        self,
        images: Images,
        weights: Weights,
        parts: Sequence[Tensor],
        u: Sequence[Tensor | None],
        features: bool = False,
    ) -> Tensor:
        return super().logits(images, weights, parts, u, features).float()

    def _images(self, images: Images, index: Tensor, u: Tensor | None) -> Tensor:
        if self.fused:
            place = torch.empty((len(index), *self.x.shape[1:]), device=self.device)
            return image_kernel.fill(place, images, index, u)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.batch(index, u).contiguous(memory_format=layout)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _stop_counting(packed: Packed) -> bool:
    """Takes BatchNorm's counters out of the network, each a kernel of its own;
    False where it has other counters.
    """
    norms = [n for n in packed.norms if n.num_batches_tracked is not None]
    if any(norm.momentum is None for norm in norms) or len(norms) != packed.counters:
        return False
    for norm in norms:
        norm.num_batches_tracked = None
    return True
