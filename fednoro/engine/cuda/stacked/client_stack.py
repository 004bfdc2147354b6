"""A stack: clients that are trained together, one batch of each per step.

Their networks are the rows of one matrix (`StackedNet`), so a step is a few large operations in
place of many small ones. Whoever has no more batches is skipped by the kernels. The last, smaller
batch of an epoch is each client's own, in a lane.

Clients may have several kinds of loss. The networks are asked once for everybody; then each loss is
computed for all, and counts for those whose it is. Losses that ask for more than a network's
outputs on the step's own images cannot be mixed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednoro.core.training import Training
from fednoro.core.types import IntArray, Weights
from fednoro.engine.cuda import image_kernel
from fednoro.engine.cuda.cuda_lane import CudaLane
from fednoro.engine.cuda.graph_capture import (
    EVALUATION_PIXELS,
    PROGRAMS,
    Inputs,
    Program,
    Programs,
    TrainingState,
    UnsuitableError,
    autocast,
    capture,
)
from fednoro.engine.cuda.half_precision import Half
from fednoro.engine.cuda.stacked import stacked_kernels
from fednoro.engine.cuda.stacked.stacked_loss import restrict_to_members, slot_losses
from fednoro.engine.cuda.stacked.stacked_net import StackedNet
from fednoro.engine.cuda.stacked.stacked_ops import adam
from fednoro.engine.cuda.training_request import Request
from fednoro.engine.images import DRAWS, Images
from fednoro.engine.streams import current_stream, make_wait, stream, synchronize

STEPS = 20_000  # of Adam, after which its corrections are 1 in float32
PREPARED_BYTES = 2**30  # bytes of images that are prepared at once
KINDS = 4  # of loss that are mixed: fewer than a stack keeps


@dataclass(frozen=True)
class Part:
    """Clients with one kind of loss, who have neighbouring slots."""

    program: Program
    first: int  # slot
    requests: Sequence[Request]


class Participant:
    """A client in a stack, and what it does alone there."""

    def __init__(self, stack: Stack, program: Program, k: int, request: Request) -> None:
        self.stack, self.program, self.k, self.request = stack, program, k, request
        # Both until the next batch of its own:
        # memory that is let go on another stream would be used again too early.
        self.aux: Mapping[str, Tensor] = {}
        self.count: Tensor | None = None

    @cached_property
    def inputs(self) -> Inputs:
        return self.request.inputs()

    @cached_property
    def lane_program(self) -> Program:
        return self.request.lane.program(self.request.loss, self.inputs, self.request.draws)

    def finish_epoch(self, images: Images, epoch: int) -> None:
        """The last, smaller batch, in a lane.
        The steps of others do not touch the rows that it writes.
        """
        stack, request, lane, k = self.stack, self.request, self.request.lane, self.k
        batch, end = stack.training.batch, (epoch + 1) * self.request.size
        self.aux = {name: self.program.aux[name][k].clone() for name in self.variable_aux}
        data = replace(self.inputs, aux={**request.aux, **self.aux})
        values, means, squares = (
            matrix[k, : stack.width] for matrix in (stack.nets.values, stack.means, stack.squares)
        )
        state = TrainingState(
            values, means, squares, stack.count[k], end - request.size % batch, end
        )
        stack.lane_total[k].add_(
            lane.resume(self.lane_program, images, request.task.weights, data, state)
        )
        values.copy_(lane.net.values)
        self.count = lane.adam.count.clone()
        if epoch + 1 < len(request.epochs):
            stack.nets.low[k, : stack.width].copy_(values)
            moments, places = lane.adam.moments_and_places(lane.net, means, squares)
            torch._foreach_copy_(places, moments)

    @property
    def variable_aux(self) -> Collection[str]:
        """What the loss may update from batch to batch."""
        return self.program.aux if self.program.updated_aux is None else self.program.updated_aux

    def rejoin(self) -> None:
        """Brings to the others what their steps would have overwritten."""
        if self.count is not None:
            self.stack.count[self.k].copy_(self.count)
        for name, value in self.aux.items():
            self.program.aux[name][self.k].copy_(value)

    def passes(self) -> NDArray[np.int64]:
        """How often each norm has seen a batch."""
        batch, epochs = self.stack.training.batch, len(self.request.epochs)
        full, last_batch = divmod(self.request.size, batch)
        passes = epochs * full * np.array(self.program.passes.get(batch, [0]))
        if last_batch > 1 and epochs:
            passes = passes + epochs * np.array(self.lane_program.passes[last_batch])
        return np.broadcast_to(passes, len(self.stack.packed.norms)).astype(np.int64)


class Stack:
    """Room for so many clients, and what their steps read and write."""

    def __init__(
        self, lane: CudaLane, shape: tuple[int, ...], training: Training, slots: int
    ) -> None:
        self.device, self.training, self.slots, self.upload = (
            lane.device, training, slots, lane.upload,
        )  # fmt: skip
        device, batch = self.device, training.batch
        packed = lane.pattern.twin()
        self.precision = lane.precision
        half = self.precision == "bf16"
        self.nets = StackedNet(packed, slots, torch.bfloat16 if half else torch.float32)
        self.packed, self.width = packed, len(packed.values)
        self.anchor = lane.pattern.twin()
        self.anchor.net.eval().requires_grad_(False)
        self.teacher: Any = Half(self.anchor) if half else self.anchor.net
        self._anchor_values: Tensor | None = None
        self.means, self.squares = (
            torch.zeros_like(self.nets.values),
            torch.zeros_like(self.nets.values),
        )
        self.count = torch.zeros(slots, dtype=torch.int64, device=device)
        steps = torch.arange(STEPS, dtype=torch.float64).clamp_(min=1)
        factors = [training.lr / (1 - 0.9**steps), (1 - 0.999**steps).rsqrt()]
        self.factors = torch.stack(factors, 1).float().to(device)  # of Adam, by its step
        channels, height, width = shape
        self.room = max(
            slots * batch, PREPARED_BYTES // (4 * channels * height * width) // batch * batch
        )
        self.anchor_batch = max(batch, EVALUATION_PIXELS // (height * width))
        self.fused = device.type == "cuda"
        self.x = torch.zeros((self.room, height, width, channels), device=device)
        self.y = torch.zeros(self.room, dtype=torch.int64, device=device)
        self.index = torch.zeros(self.room, dtype=torch.int64, device=device)
        self.offsets = torch.arange(batch, device=device)
        self.start = torch.zeros(slots, dtype=torch.int64, device=device)
        # How many full batches each client has prepared.
        self.batch_counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        # Sums of the losses, in steps together and in steps alone.
        self.total = torch.zeros(slots, device=device)
        self.lane_total = torch.zeros(slots, device=device)
        # It goes before what clients do alone, and before gradients for weights.
        self.stream = stream(device, priority=-1)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.programs = Programs(device, self.room, slots)
        # By slot, the number of its loss.
        self.loss_numbers = torch.zeros(slots, dtype=torch.int64, device=device)
        # By their programs: the order of the losses, and the graph.
        self._graphs: dict[frozenset[Program], tuple[Iterable[Program], Any]] = {}
        make_wait(self.stream, current_stream(device))

    # One exchange

    def train(self, requests: Sequence[Request], images: Images) -> Iterator[None]:
        """Trains clients, who have their answers in the end;
        pauses after each step that it has queued.

        They start from the same weights, and have the same number of epochs.
        """
        lanes = list({id(r.lane): r.lane for r in requests}.values())
        batch = self.training.batch
        for lane in lanes:
            make_wait(self.stream, lane.stream)
        with torch.cuda.stream(self.stream):
            parts = self._parts_of(requests)
            graph = self._graph(parts, images)
            self._begin(parts)
        ordered_requests = [request for part in parts for request in part.requests]
        by_batch_count: dict[int, list[Participant]] = {}
        participants = [
            Participant(self, part.program, part.first + i, request)
            for part in parts
            for i, request in enumerate(part.requests)
        ]
        for participant in participants:
            by_batch_count.setdefault(participant.request.size // batch, []).append(participant)
        for epoch in range(len(ordered_requests[0].epochs)):
            self._finish_epochs(by_batch_count.get(0, []), images, epoch)
            for first, last in self._step_runs(ordered_requests):
                with torch.cuda.stream(self.stream):
                    self._prepare(parts, images, epoch, first, last)
                for step in range(first, last):
                    with torch.cuda.stream(self.stream):
                        graph.replay()
                    self._finish_epochs(by_batch_count.get(step + 1, []), images, epoch)
                    yield
            for lane in lanes:
                make_wait(self.stream, lane.stream)
            with torch.cuda.stream(self.stream):
                for participant in participants:
                    participant.rejoin()
        with torch.cuda.stream(self.stream):
            self._answer(participants)
        for lane in lanes:
            make_wait(lane.stream, self.stream)

    def _parts_of(self, requests: Sequence[Request]) -> list[Part]:
        groups: dict[Program, list[Request]] = {}
        if len({request.kind for request in requests}) > KINDS:
            raise UnsuitableError(f"more than {KINDS} kinds of loss")
        for r in requests:
            groups.setdefault(self.programs.find(r.loss, r.aux, r.rows, r.draws), []).append(r)
        # The order of losses is that of the graph, whoever comes first this time.
        order, _ = self._graphs.get(frozenset(groups), (groups, None))
        parts: list[Part] = []
        for program in order:
            first = parts[-1].first + len(parts[-1].requests) if parts else 0
            parts.append(Part(program, first, sorted(groups[program], key=lambda r: -r.size)))
        return parts

    def _answer(self, participants: Sequence[Participant]) -> None:
        """Puts the trained weights and the mean losses into the requests."""
        requests = [participant.request for participant in participants]
        start, count = requests[0].task.weights, len(requests)
        passes = self.upload(np.stack([participant.passes() for participant in participants]))
        counters = start.counters.to(self.device) + passes
        images = self.upload(
            np.array([max(r.size * len(r.epochs), 1) for r in requests], dtype=np.float32)
        )
        means = (self.total + self.lane_total)[:count] / images
        for participant, counts, loss in zip(participants, counters, means, strict=True):
            values = self.packed.ordinary(self.nets.values[participant.k, : self.width])
            for name in participant.variable_aux:
                participant.request.aux[name].copy_(participant.program.aux[name][participant.k])
            participant.request.answer = Weights(values, counts, self.packed.segments), loss

    def _finish_epochs(
        self, participants: Sequence[Participant], images: Images, epoch: int
    ) -> None:
        """Their last, smaller batches, each in its lane, while the others go on."""
        for participant in participants:
            if participant.request.size % self.training.batch:
                lane = participant.request.lane
                make_wait(lane.stream, self.stream)
                with torch.cuda.stream(lane.stream):
                    participant.finish_epoch(images, epoch)

    # Where things are put

    def _begin(self, parts: Sequence[Part]) -> None:
        weights = parts[0].requests[0].task.weights
        self.packed.load(weights, counters=False)
        self.nets.load(self.packed.values)
        if self._anchor_values is not weights.values:
            self.anchor.load(weights, counters=False)
            if self.precision == "bf16":
                self.teacher.refresh()
            self._anchor_values = weights.values
        torch._foreach_zero_(
            [self.means, self.squares, self.count, self.total, self.lane_total, self.loss_numbers]
        )
        for number, part in enumerate(parts):
            first, last = part.first, part.first + len(part.requests)
            self.loss_numbers[first:last] = number
            for name, place in part.program.aux.items():
                aux = torch.stack([request.aux[name].to(self.device) for request in part.requests])
                place.copy_(aux[0])  # somebody's values for those whose loss it is not
                place[first:last].copy_(aux)

    def _step_runs(self, requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
        """Runs of steps whose images fit into the room: first and last step of an epoch."""
        full = [request.size // self.training.batch for request in requests]
        first, image_count = 0, 0
        for step in range(max(full)):
            step_images = self.training.batch * sum(count > step for count in full)
            if image_count + step_images > self.room:
                yield first, step
                first, image_count = step, 0
            image_count += step_images
        if first < max(full):
            yield first, max(full)

    def _prepare(
        self, parts: Sequence[Part], images: Images, epoch: int, first: int, last: int
    ) -> None:
        """Puts the images of these steps into place, one client's after another's."""
        counts = np.zeros(self.slots, dtype=np.int64)
        begin = 0
        for part in parts:
            full = [min(last, r.size // self.training.batch) for r in part.requests]
            slices = [
                slice(min(first, n) * self.training.batch, n * self.training.batch) for n in full
            ]
            orders = [r.epochs[epoch].order[s] for r, s in zip(part.requests, slices, strict=True)]
            counts[part.first : part.first + len(orders)] = [len(order) for order in orders]
            u = np.concatenate(
                [r.epochs[epoch].u[s] for r, s in zip(part.requests, slices, strict=True)]
            )
            self._place(part, images, orders, u, begin)
            begin += len(u)
        self.start.copy_(self.upload(np.cumsum(counts) - counts))
        self.batch_counts.copy_(self.upload(counts // self.training.batch))
        self.cursor.zero_()

    def _place(
        self,
        part: Part,
        images: Images,
        orders: Sequence[IntArray],
        uniforms: NDArray[np.float32],
        begin: int,
    ) -> None:
        """Images of clients with one kind of loss, from place `begin` on."""
        if not len(uniforms):  # others of another kind have some left
            return
        program, requests = part.program, part.requests
        block = slice(begin, begin + len(uniforms))
        positions = self.upload(
            np.concatenate([r.client.index[o] for r, o in zip(requests, orders, strict=True)])
        )
        u = self.upload(uniforms)
        if self.fused:
            image_kernel.fill(self.x[block], images, positions, u)
        else:
            self.x[block].copy_(images.batch(positions, u[:, :DRAWS]).permute(0, 2, 3, 1))
        labels = [r.client.labels.cpu().numpy()[o] for r, o in zip(requests, orders, strict=True)]
        self.y[block].copy_(self.upload(np.concatenate(labels)))
        self.index[block].copy_(self.upload(np.concatenate(orders)))
        program.u[block].copy_(u[:, DRAWS:])
        for name, place in program.rows.items():
            client_rows = [
                r.rows[name].to(self.device)[self.upload(o)]
                for r, o in zip(requests, orders, strict=True)
            ]
            place[block].copy_(torch.cat(client_rows))
        if program.anchor_outputs is not None:
            with torch.no_grad(), autocast(self.device, self.precision):
                pairs = (
                    torch.split(flat[block], self.anchor_batch)
                    for flat in (self.x, program.anchor_outputs)
                )
                for x, place in zip(*pairs, strict=True):
                    place.copy_(self.teacher(x.permute(0, 3, 1, 2)))

    # A step

    def _graph(self, parts: Sequence[Part], images: Images) -> Any:
        """A step of these kinds, made if need be; nothing where nobody has a full batch."""
        programs = [part.program for part in parts]
        key = frozenset(programs)
        largest = max(request.size for part in parts for request in part.requests)
        if (
            key not in self._graphs
            and largest >= self.training.batch
            and parts[0].requests[0].epochs
        ):
            while len(self._graphs) >= PROGRAMS:
                synchronize(self.device)  # the one that was not used for longest may be running
                del self._graphs[next(iter(self._graphs))]
            self._rehearse(parts, images)
            synchronize(self.device)
            graph = capture(self.device, self.pool, lambda: self.step(programs))
            self._graphs[key] = programs, graph
        if key not in self._graphs:
            return None
        self._graphs[key] = entry = self._graphs.pop(key)  # the one that was used last
        return entry[1]

    def _rehearse(self, parts: Sequence[Part], images: Images) -> None:
        """A step outside of a graph, where kernels are compiled."""
        programs = [part.program for part in parts]
        self._begin(parts)
        self._prepare(parts, images, 0, 0, 1)
        try:
            if self.fused:
                stacked_kernels.compile_ahead(self.device, lambda: self.step(programs))
                self._begin(parts)
                self.cursor.zero_()
            self.nets.calls = 0
            self.step(programs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # The method's loss, vmap or Triton failed: one client by one may still work.
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise UnsuitableError(
                f"a step of several clients at once has failed ({why})"
            ) from error
        for program in programs:
            program.passes[self.training.batch] = [self.nets.calls]

    def step(self, programs: Sequence[Program]) -> None:
        """One batch of every client that has one."""
        nets, slots, batch = self.nets, self.slots, self.training.batch
        active = self.cursor < self.batch_counts * batch
        nets.active.copy_(active)
        rows = (
            (self.start[:, None] + self.cursor + self.offsets).clamp_(max=self.room - 1).flatten()
        )

        def gather(flat: Tensor) -> Tensor:
            return flat.index_select(0, rows).view(slots, batch, *flat.shape[1:])

        inputs: dict[str, Any] = {
            "x": gather(self.x).permute(0, 1, 4, 2, 3), "y": gather(self.y),
            "index": gather(self.index), "parameters": list(nets.leaves.values()),
        }  # fmt: skip
        if len(programs) == 1:
            values = slot_losses(
                programs[0], nets, self.teacher, inputs, gather, active, self.precision
            )
        else:
            values = torch.zeros(slots, device=self.device)
            inputs["logits"] = nets.logits(inputs["x"])
            for number, program in enumerate(programs):
                members = self.loss_numbers == number
                common = restrict_to_members(inputs, members, active)
                member_losses = slot_losses(
                    program, nets, self.teacher, common, gather, active & members, self.precision
                )
                values = values + torch.where(members, member_losses, 0)
        self._descend(active, nets.collect(values.sum()))
        self.total.add_(torch.where(active, values.detach() * batch, 0))
        self.cursor.add_(batch)

    def _descend(self, active: Tensor, direct: Tensor | None) -> None:
        nets, trainable, decay = self.nets, self.packed.trainable, self.training.weight_decay
        self.count.add_(active)
        factors = self.factors.index_select(0, self.count.clamp(max=STEPS - 1))
        state = nets.values, nets.gradient, direct, self.means, self.squares, nets.low
        adam(*state, factors, nets.active, trainable, decay)
