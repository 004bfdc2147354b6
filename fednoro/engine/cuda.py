"""Several clients at a time on one GPU: each lane has a stream, and its steps are CUDA graphs.

A client's step is hundreds of small kernels, and starting them one by one costs more than running them. Here a whole
step (gather, forward, loss, backward, Adam) is captured once per loss and batch size and replayed from then on: all
that changes from step to step, client to client or round to round is copied into fixed places that the graph reads.
The host only queues replays, for one client after another; the GPU runs the lanes side by side.

Images are prepared a block of batches at a time, because augmentation is some thirty kernels whatever the number of
images. The last batch of an epoch has a graph of its own size.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fednoro.clients import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.cpu import windows
from fednoro.engine.eager import EagerEngine, EagerSite, failure
from fednoro.engine.graphs import CudaLane, Inputs, Precision, UnsuitableError
from fednoro.engine.images import DRAWS, Images
from fednoro.engine.lane import batches, schedule
from fednoro.engine.streams import after, current, synchronize
from fednoro.methods import Method
from fednoro.training import Training
from fednoro.types import Failure, FedNoRoWarning, FloatArray, IntArray, Reply, Step, Task, Weights

STREAMS = 12
EVALUATION_PIXELS = 2**24  # in one batch without gradients


class CudaEngine(EagerEngine):
    """Runs local work on a GPU by replaying captured steps, several clients in flight."""

    name = "cuda"
    lane: CudaLane

    def __init__(
        self,
        network: Callable[[], nn.Module],
        dataset: Dataset,
        inputs: int,
        training: Training,
        seed: int,
        device: torch.device,
        clients: Sequence[Client] = (),
        precision: Precision = "fp32",
        compiled: bool = False,
        lanes: int | None = None,
    ) -> None:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        self.device, self.seed, self.training, self.precision = device, seed, training, precision
        self.classes = len(dataset.classes)
        self._eager: EagerEngine | None = None  # what goes on where graphs cannot
        self.serve(clients)
        self.images = Images(dataset.images, inputs, training.augment, device)
        self.shape = (inputs, *dataset.images.shape[1:3])
        self._given = (network, dataset, inputs, training, seed, device)
        self.evaluation_batch = max(16, EVALUATION_PIXELS // (self.shape[1] * self.shape[2]))
        self.most = lanes or STREAMS
        self._make = partial(
            CudaLane, device=device, precision=precision, shape=self.shape, training=training, compiled=compiled
        )
        self._net = network()
        self.lane = self._make(copy.deepcopy(self._net))
        self.lanes = [self.lane]

    def _widen(self, clients: int) -> None:
        """Lanes for so many clients at a time: few clients need few."""
        try:
            while len(self.lanes) < min(clients, self.most):
                self.lanes.append(self._make(copy.deepcopy(self._net), like=self.lane))
        except torch.OutOfMemoryError:
            del self.lanes[-(len(self.lanes) // 2) :]  # room for what the steps themselves need
            self.most = len(self.lanes)
            torch.cuda.empty_cache()

    def serve(self, clients: Iterable[Client]) -> None:
        super().serve(clients)
        if self._eager is not None:
            self._eager.serve(self.clients.values())

    def describe(self) -> str:
        if self._eager is not None:
            return self._eager.describe()
        return f"cuda graphs on {self.most} streams of {self.device}, {self.precision}"

    def site(self, client: Client) -> EagerSite:
        return self._site(self.lane, client) if self._eager is None else self._eager.site(client)

    def _site(self, lane: CudaLane, client: Client) -> EagerSite:
        return CudaSite(self, lane, client)

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        """Each client's answer, in client order; a client that raises becomes a `Failure`."""
        if self._eager is None:
            self._widen(len(tasks))
        for window in windows(sorted(tasks), self.net.values.nbytes, self._room(), 2 * len(self.lanes)):
            answers = self._together(method, {k: tasks[k] for k in window})
            for k in window:
                item, done = answers.pop(k)
                if done is not None:
                    torch.cuda.current_stream(self.device).wait_event(done)
                    if isinstance(item, Reply) and item.arrays:
                        done.synchronize()  # they are read on the host
                yield item

    def _room(self) -> int:
        """Bytes of models that may wait to be folded."""
        return torch.cuda.mem_get_info(self.device)[0] // 4 if self.device.type == "cuda" else 2**30

    def _together(
        self, method: Method, tasks: Mapping[int, Task]
    ) -> dict[int, tuple[Reply | Failure, torch.cuda.Event | None]]:
        """Queues the work of all clients; the events say when each one's answer is there."""
        answers: dict[int, tuple[Reply | Failure, torch.cuda.Event | None]] = {}
        # The largest first, each to the lane with the least to do.
        queue = sorted(tasks, key=lambda k: (-len(self.clients[k].index), k))
        queued = [0] * len(self.lanes)
        for lane in self.lanes:
            after(lane.stream, current(self.device))
        while queue:
            k = queue[0]
            if self._eager is not None:
                answers[k] = next(self._eager.exchange(method, {k: tasks[k]})), None
                queue.pop(0)
                continue
            number = queued.index(min(queued))
            lane = self.lanes[number]
            try:
                with torch.cuda.stream(lane.stream):
                    item: Reply | Failure = method.work(tasks[k], self._site(lane, self.clients[k]))
            except torch.OutOfMemoryError:
                self._shrink()
                queued = [0] * len(self.lanes)
                continue
            except UnsuitableError as reason:
                self._fall_back(str(reason))
                continue
            except Exception as error:
                item = failure(k, error)
            answers[k] = item, None if lane.stream is None else lane.stream.record_event()
            queue.pop(0)
            queued[number] += len(self.clients[k].index) + self.training.batch
        return answers

    def _shrink(self) -> None:
        synchronize(self.device)
        if len(self.lanes) == 1:
            self._fall_back("the GPU has too little memory for graphs")
            return
        del self.lanes[-(len(self.lanes) // 2) :]
        self.most = len(self.lanes)
        torch.cuda.empty_cache()
        message = f"the GPU's memory ran out: going on with {len(self.lanes)} streams"
        warnings.warn(message, FedNoRoWarning, stacklevel=2)

    def _fall_back(self, reason: str) -> None:
        synchronize(self.device)
        for lane in self.lanes:
            lane.programs.clear()
        del self.lanes[1:]
        torch.cuda.empty_cache()
        warnings.warn(f"going on with the eager engine in fp32: {reason}", FedNoRoWarning, stacklevel=2)
        self._eager = EagerEngine(*self._given, images=self.images)
        self._eager.clients = self.clients

    def logits(self, weights: Weights, index: IntArray) -> Tensor:
        """Outputs in eval mode for the images at `index`, N×C."""
        if self._eager is not None:
            return self._eager.logits(weights, index)
        return super().logits(weights, index)


@dataclass
class CudaSite(EagerSite):
    """One client's data on the GPU. Its work is queued on the lane's stream, and not yet done when a call returns."""

    lane: CudaLane

    @property
    def labels(self) -> Tensor:
        return self.lane.upload(self.data.labels.cpu().numpy())

    @property
    def counts(self) -> Tensor:
        return self.lane.upload(np.bincount(self.data.labels.cpu().numpy(), minlength=self.classes))

    def to_array(self, tensor: Tensor) -> FloatArray:
        """A tensor for `Reply.arrays`, copied when the lane gets there: to wait for it would keep other lanes idle."""
        if self.lane.device.type != "cuda":
            return super().to_array(tensor)
        place = torch.empty(tensor.shape, dtype=torch.float64, pin_memory=True)
        return place.copy_(tensor.detach().double(), non_blocking=True).numpy()

    def train(
        self,
        task: Task,
        loss: Callable[[Step], Tensor],
        aux: Mapping[str, Tensor],
        draws: int = 0,
        epochs: int | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> tuple[Weights, Tensor]:
        """See `EagerSite.train`."""
        engine, lane, count = self.engine, self.lane, self.engine.training.epochs if epochs is None else epochs
        drawn = list(schedule(engine.seed, task, self.client, self.size, draws, count))
        order = np.concatenate([e.order for e in drawn]) if drawn else np.empty(0, np.int64)
        u = np.concatenate([e.u for e in drawn]) if drawn else np.empty((0, DRAWS + draws), np.float32)
        sizes = batches(self.size, engine.training.batch) * count
        data = Inputs(
            lane.upload(self.data.index), self.labels, lane.upload(order), lane.upload(u), rows or {}, aux, sizes
        )
        program = lane.program(loss, data, draws)
        total = lane.run(program, engine.images, task.weights, data)
        return lane.weights_after(program, task.weights, sizes), total / max(self.size * count, 1)
