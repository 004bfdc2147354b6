"""Several clients at a time on one GPU, stacked in one network or on lanes,
with steps that are CUDA graphs.

A client's step is hundreds of small kernels, and starting them one by one costs more than running
them. Here a whole step (gather, forward, loss, backward, Adam) is captured once per loss and batch
size and replayed from then on: all that changes from step to step, client to client or round to
round is copied into fixed places that the graph reads. The host only queues replays, for one client
after another; the GPU runs the lanes side by side, each with a stream of its own. Where clients can
be stacked (`client_stack`), they meet at their training, and only what is left goes to lanes.

Images are prepared a block of batches at a time, because augmentation is some thirty kernels
whatever the number of images. The last batch of an epoch has a graph of its own size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fednoro.core.training import Training
from fednoro.core.types import Failure, FedNoRoWarning, IntArray, Precision, Reply, Task, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.cpu import cut, windows
from fednoro.engine.cuda.coroutines import Coroutine, run_all
from fednoro.engine.cuda.cuda_lane import CudaLane
from fednoro.engine.cuda.cuda_site import CudaSite
from fednoro.engine.cuda.graph_capture import EVALUATION_PIXELS, UnsuitableError
from fednoro.engine.cuda.reply_check import with_extents
from fednoro.engine.cuda.stacked.client_stack import PREPARED_BYTES, Stack
from fednoro.engine.cuda.stacked.stacked_kernels import SLOTS
from fednoro.engine.cuda.stacked.stacked_net import stackable
from fednoro.engine.cuda.training_request import Request
from fednoro.engine.eager import EagerEngine, EagerSite, failure
from fednoro.engine.images import Images
from fednoro.engine.streams import current_stream, event, make_wait, release_memory, synchronize
from fednoro.methods import Method

Answer = tuple[Reply | Failure, torch.cuda.Event | None]

STREAMS, LARGE_STREAMS = 12, 6  # large images fill more of the GPU by themselves
LARGE = 128 * 128  # pixels
STACKS = 2  # side by side
LANES_BESIDE = 6  # for what its clients do alone
STACKED_PIXELS = 320 * 320  # larger images gain nothing
# Of a model that a stack holds: weights, their copy, gradient, Adam's moments, maps.
STACKED_COPIES = 6
STACKED_BYTES = 512  # for each pixel of a batch, in a ResNet-18


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
        stacked: bool | None = None,
    ) -> None:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        self.device, self.seed, self.training, self.precision = device, seed, training, precision
        self.classes = len(dataset.classes)
        self._eager: EagerEngine | None = None  # what goes on where graphs cannot
        # By client: labels, and how many of each class they are.
        self._counts: dict[int, tuple[Any, Tensor]] = {}
        self.serve(clients)
        self.images = Images(dataset.images, inputs, training.augment, device)
        self.shape = (inputs, *dataset.images.shape[1:3])
        self._arguments = (network, dataset, inputs, training, seed, device)
        self.pixels = self.shape[1] * self.shape[2]
        self.evaluation_batch = max(16, EVALUATION_PIXELS // self.pixels)
        self.streams = LARGE_STREAMS if self.pixels > LARGE else STREAMS
        self.max_lanes = lanes or self.streams
        self._make_lane = partial(
            CudaLane,
            device=device,
            precision=precision,
            shape=self.shape,
            training=training,
            compiled=compiled,
        )
        net = network()
        suitable = precision != "fp32" and training.batch > 1 and stackable(net, device)
        self.lane = self._make_lane(net)
        self.lanes = [self.lane]
        self.stacks: list[Stack] = []
        self._unstackable: set[Any] = set()  # kinds of step that cannot be stacked
        self._unmixable: set[Any] = set()  # and those that can, but not with others
        gains = self.lane.fused and self.pixels <= STACKED_PIXELS
        self._stacking = suitable and (
            (gains and not compiled and lanes is None) if stacked is None else stacked
        )
        if self._stacking:
            self.max_lanes = LANES_BESIDE

    def _widen(self, clients: int) -> None:
        """Lanes for so many clients at a time: few clients need few."""
        try:
            while len(self.lanes) < min(clients, self.max_lanes):
                self.lanes.append(self._make_lane(self.lane))
        except torch.OutOfMemoryError:
            del self.lanes[-(-len(self.lanes) // 2) :]  # room for what the steps themselves need
            self.max_lanes = len(self.lanes)
            release_memory()

    def serve(self, clients: Iterable[Client]) -> None:
        super().serve(clients)
        self._counts.clear()
        if self._eager is not None:
            self._eager.serve(self.clients.values())

    def describe(self) -> str:
        if self._eager is not None:
            return self._eager.describe()
        if self._stacking:
            return f"cuda graphs, up to {SLOTS} clients stacked, on {self.device}, {self.precision}"
        return f"cuda graphs on {self.max_lanes} streams of {self.device}, {self.precision}"

    def site(self, client: Client) -> EagerSite:
        return (
            CudaSite(self, self.lane, client) if self._eager is None else self._eager.site(client)
        )

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        """Each client's answer, in client order; a client that raises becomes a `Failure`."""
        if self._eager is None:
            self._widen(len(tasks))
        for window in self._windows(sorted(tasks)):
            answers = self._exchange_window(method, {k: tasks[k] for k in window})
            # Clients in a stack are done at the same time;
            # those on lanes are folded while others go on.
            for part in [window] if self._stacking else [[k] for k in window]:
                items, events = zip(*(answers.pop(k) for k in part), strict=True)
                for end in filter(None, events):
                    torch.cuda.current_stream(self.device).wait_event(end)
                replies = with_extents(items, self.device)
                del items
                # `pop`, because a reply that is folded need not be held any longer.
                yield from (replies.pop(0) for _ in part)

    def _windows(self, clients: Sequence[int]) -> Iterator[Sequence[int]]:
        """Clients who are asked at a time."""
        if not self._stacking:
            return windows(clients, self.net.values.nbytes, self._room(), 2 * len(self.lanes))
        # By rule: who is trained with whom shows in the last bits.
        return cut(clients, _equal_parts(len(clients), STACKS * self._slots()))

    def counts(self, client: Client) -> Tensor:
        """The same; labels are counted once."""
        labels = client.memory.get("labels", client.observed)
        if client.id not in self._counts or self._counts[client.id][0] is not labels:
            label_counts = np.bincount(client.labels.cpu().numpy(), minlength=self.classes)
            self._counts[client.id] = labels, self.upload(label_counts)
        return self._counts[client.id][1].clone()

    def _room(self) -> int:
        """Bytes of models that may wait to be folded."""
        return torch.cuda.mem_get_info(self.device)[0] // 4 if self.device.type == "cuda" else 2**30

    def _exchange_window(self, method: Method, tasks: Mapping[int, Task]) -> dict[int, Answer]:
        """Queues the work of all clients; the events say when each one's answer is there."""
        for lane in self.lanes:
            make_wait(lane.stream, current_stream(self.device))
        answers = (
            self._run_stacked(method, tasks)
            if self._stacking and len(tasks) > 1 and self._eager is None
            else {}
        )
        queue = sorted(
            tasks.keys() - answers.keys(), key=lambda k: (-len(self.clients[k].index), k)
        )
        while queue and self._eager is None:
            answers |= self._run_in_lanes(method, {k: tasks[k] for k in queue})
            queue = [k for k in queue if k not in answers]
        for k in queue:
            assert self._eager is not None
            answers[k] = next(self._eager.exchange(method, {k: tasks[k]})), None
        return answers

    def _coroutine(
        self, method: Method, task: Task, client: int, lane: CudaLane, stacked: bool
    ) -> Coroutine:
        """A client's work that others can wait for, and be waited for by."""
        main_stream = current_stream(self.device)

        def work() -> Reply:
            with torch.cuda.stream(lane.stream):
                return method.work(
                    task,
                    CudaSite(self, lane, self.clients[client], coroutine, main_stream, stacked),
                )

        coroutine = Coroutine(work)
        return coroutine

    def _answer(self, client: int, coroutine: Coroutine, lane: CudaLane) -> Answer:
        """What came of it; raises where the engine has to go on in another way."""
        if coroutine.error is None:
            return coroutine.result, event(lane.stream)
        if isinstance(coroutine.error, (torch.OutOfMemoryError, UnsuitableError)) or not isinstance(
            coroutine.error, Exception
        ):
            raise coroutine.error
        return failure(client, coroutine.error), event(lane.stream)

    def _run_in_lanes(self, method: Method, tasks: Mapping[int, Task]) -> dict[int, Answer]:
        """The work of all clients, in the order of `tasks`, each in the next lane that is free.

        A few steps of each are queued in turn: a lane that has all it can hold would keep the
        others from their work. Ends early where the engine has to go on in another way.
        """
        answers: dict[int, Answer] = {}
        waiting, busy = list(tasks), dict[int, tuple[int, Coroutine]]()  # by lane
        try:
            while waiting or busy:
                for number, lane in enumerate(self.lanes):
                    if waiting and number not in busy:
                        k = waiting.pop(0)
                        busy[number] = k, self._coroutine(method, tasks[k], k, lane, stacked=False)
                for number, (k, coroutine) in list(busy.items()):
                    coroutine.resume()
                    if coroutine.done:
                        del busy[number]
                        answers[k] = self._answer(k, coroutine, self.lanes[number])
        except BaseException as error:
            for _, coroutine in busy.values():
                coroutine.cancel()
            if not isinstance(error, (torch.OutOfMemoryError, UnsuitableError)):
                raise
            full, reason = isinstance(error, torch.OutOfMemoryError), str(error)
        else:
            return answers
        # Out here, where no error holds what is to be let go.
        busy.clear()
        del coroutine
        if full:
            self._shrink()
        else:
            self._fall_back(reason)
        return answers

    def _run_stacked(self, method: Method, tasks: Mapping[int, Task]) -> dict[int, Answer]:
        """The work of all clients, which meet wherever they are to be trained;
        who could not be served is left out.
        """
        # Last batches of one size are one graph where they share a lane;
        # of few sizes, one for each lane.
        last_sizes = {k: len(self.clients[k].index) % self.training.batch for k in tasks}
        sizes = sorted(set(last_sizes.values()))
        places = (
            map(sizes.index, last_sizes.values())
            if len(sizes) >= len(self.lanes)
            else range(len(last_sizes))
        )
        lanes = {
            k: self.lanes[place % len(self.lanes)]
            for k, place in zip(last_sizes, places, strict=True)
        }
        coroutines = {
            k: self._coroutine(method, task, k, lanes[k], stacked=True) for k, task in tasks.items()
        }
        run_all(list(coroutines.values()), self._train)
        answers: dict[int, Answer] = {}
        for k, coroutine in coroutines.items():
            with suppress(torch.OutOfMemoryError, UnsuitableError):
                answers[k] = self._answer(k, coroutine, lanes[k])
        if len(answers) < len(tasks):
            synchronize(self.device)  # whoever is left goes on in another lane
        return answers

    def _train(self, requests: Sequence[Request]) -> list[Any]:
        """Trains those together who can be; an exception is an answer as well."""
        full = False
        try:
            if self._stacking:
                self._train_stacked(requests)
        except torch.OutOfMemoryError:
            full = True  # while it is handled, the stack cannot be let go
        if full:
            self._unstack("the GPU's memory does not hold a stack of clients")
        return [request.answer or self._train_alone(request) for request in requests]

    def _groups(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Those who can be trained together, as many as a stack holds; who is left out cannot."""
        groups: dict[Any, list[Request]] = {}
        for request in requests:
            step, *start = request.kind
            if step not in self._unstackable:
                groups.setdefault((step if step in self._unmixable else None, *start), []).append(
                    request
                )
        slots = self._slots()
        return [
            group[i : i + slots]
            for group in groups.values()
            if len(group) > 1
            for i in range(0, len(group), slots)
        ]

    def _train_stacked(self, requests: Sequence[Request]) -> None:
        """Answers those of the requests that can be answered so."""
        waiting = self._groups(requests)
        running: dict[Stack, tuple[list[Request], Iterator[None]]] = {}
        while waiting or running:
            for stack in self._stacks(len(waiting) + len(running)):
                if stack not in running and waiting:
                    group = waiting.pop(0)
                    running[stack] = group, stack.train(group, self.images)
            for stack, (group, steps) in list(running.items()):
                # Each stack queues a step in turn, so that the GPU has work from all.
                try:
                    next(steps)
                    continue
                except StopIteration:
                    pass
                except torch.OutOfMemoryError:
                    raise
                except UnsuitableError as reason:
                    kinds = {request.kind[0] for request in group}
                    if len(kinds) > 1:
                        # Another group may get the same stack with other lanes.
                        synchronize(self.device)
                        self._unmixable |= kinds
                        waiting += self._groups(group)
                    else:
                        self._unstackable |= kinds
                        self.max_lanes = self.streams
                        warnings.warn(
                            f"one client per stream: {reason}", FedNoRoWarning, stacklevel=2
                        )
                except Exception:  # of one client: each by itself will show whose it is
                    pass
                del running[stack]

    def _stacks(self, count: int) -> Sequence[Stack]:
        while len(self.stacks) < min(count, STACKS):
            self.stacks.append(Stack(self.lane, self.shape, self.training, self._slots()))
        return self.stacks

    def _slots(self) -> int:
        """How many clients are stacked:
        equal parts of all, as far as half of the GPU holds them.
        """
        if self.stacks:
            return self.stacks[0].slots
        capacity = SLOTS
        if self.device.type == "cuda":
            memory = (
                torch.cuda.get_device_properties(self.device).total_memory // 2
                - STACKS * PREPARED_BYTES
            )
            images = self.training.batch * self.pixels * STACKED_BYTES
            capacity = max(
                2,
                min(SLOTS, memory // (STACKS * (STACKED_COPIES * self.net.values.nbytes + images))),
            )
        return _equal_parts(max(2, len(self.clients)), capacity)

    def _train_alone(self, request: Request) -> Any:
        try:
            return request.train_alone(self.images)
        except Exception as error:
            return error

    def _unstack(self, reason: str) -> None:
        synchronize(self.device)
        self.stacks, self._stacking, self.max_lanes = [], False, self.streams
        release_memory()
        warnings.warn(f"one client per stream: {reason}", FedNoRoWarning, stacklevel=2)

    def _shrink(self) -> None:
        synchronize(self.device)
        if self.stacks:
            self._unstack("the GPU's memory ran out")
            return
        if len(self.lanes) == 1:
            self._fall_back("the GPU has too little memory for graphs")
            return
        del self.lanes[-(len(self.lanes) // 2) :]
        self.max_lanes = len(self.lanes)
        release_memory()
        message = f"the GPU's memory ran out: going on with {len(self.lanes)} streams"
        warnings.warn(message, FedNoRoWarning, stacklevel=2)

    def _fall_back(self, reason: str) -> None:
        synchronize(self.device)
        for lane in self.lanes:
            lane.programs.clear()
        del self.lanes[1:]
        self.stacks, self._stacking = [], False
        release_memory()
        warnings.warn(
            f"going on with the eager engine in fp32: {reason}", FedNoRoWarning, stacklevel=2
        )
        self._eager = EagerEngine(*self._arguments, images=self.images)
        self._eager.clients = self.clients

    def upload(self, array: NDArray[Any]) -> Tensor:
        return self.lane.upload(array)

    def logits(self, weights: Weights, index: IntArray) -> Tensor:
        """Outputs in eval mode for the images at `index`, N×C."""
        if self._eager is not None:
            return self._eager.logits(weights, index)
        return super().logits(weights, index)


def _equal_parts(count: int, most: int) -> int:
    """The size of parts of `count`, as few and as equal as can be with `most` in each."""
    return max(1, -(-count // max(1, -(-count // most))))
