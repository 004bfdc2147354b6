"""Several clients at a time on the CPU's cores: one lane and one thread each.

Within a client nothing is parallel, so its numbers are the eager engine's on one thread, whatever
the number of lanes. Small operations gain nothing from more threads, and large ones less than a
second client does; PyTorch lets go of Python's lock inside its operations, so threads are enough,
and share the images and the memory.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from fednoro.core.seeds import torch_seed
from fednoro.core.training import Training
from fednoro.core.types import Failure, IntArray, Reply, Task, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.eager import EagerEngine, EagerSite, reply_or_failure
from fednoro.engine.lane import Lane
from fednoro.methods import Method

WAITING_BYTES = 2**30  # bytes of models that may wait to be folded
# Of a model that a lane holds: network, anchor, gradient, Adam's two moments, and the one it sends.
COPIES = 6


class HaltedError(Exception):
    """The answers are no longer wanted."""


class CpuEngine(EagerEngine):
    """Runs the local work of several clients at once."""

    name = "cpu"

    def __init__(
        self,
        network: Callable[[], nn.Module],
        dataset: Dataset,
        inputs: int,
        training: Training,
        seed: int,
        device: torch.device,
        clients: Sequence[Client] = (),
        lanes: int | None = None,
    ) -> None:
        super().__init__(network, dataset, inputs, training, seed, device, clients)
        lane_count = min(lanes or torch.get_num_threads(), _lanes_in_memory(self.lane))
        if lane_count > 1 and self._draws_at_random():
            # PyTorch's generator is shared by all threads: one client would take another's draws
            lane_count = 1
        self.lanes = [
            self.lane,
            *(Lane(copy.deepcopy(self.net.net), device) for _ in range(lane_count - 1)),
        ]
        for lane in self.lanes:
            lane.net.copies = self.net.copies
        self._halted = threading.Event()
        _wake_mathematics()
        self._threads = ThreadPoolExecutor(len(self.lanes), "lane", torch.set_num_threads, (1,))

    def describe(self) -> str:
        return f"cpu, {len(self.lanes)} {'client' if len(self.lanes) == 1 else 'clients'} at a time"

    def check_halted(self) -> None:
        if self._halted.is_set():
            raise HaltedError

    def seed_torch(self, task: Task, client: int) -> AbstractContextManager[None]:
        # With several lanes nothing draws,
        # and lanes that restore one generator would leave each other's state in it.
        return super().seed_torch(task, client) if len(self.lanes) == 1 else nullcontext()

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        """Each client's answer, in client order; a client that raises becomes a `Failure`."""
        if len(self.lanes) == 1:
            yield from super().exchange(method, tasks)
            return
        with self._pool() as run:
            for window in windows(
                sorted(tasks), self.net.values.nbytes, WAITING_BYTES, 2 * len(self.lanes)
            ):
                # The largest first: a large client that starts last would keep one lane busy alone.
                order = sorted(window, key=lambda k: -len(self.clients[k].index))
                answers = {k: run(self._work, method, tasks[k], k) for k in order}
                for k in window:
                    yield answers.pop(k).result()

    def _work(self, lane: Lane, method: Method, task: Task, k: int) -> Reply | Failure:
        return reply_or_failure(
            k, lambda: method.work(task, EagerSite(self, lane, self.clients[k]))
        )

    def logits(self, weights: Weights, index: IntArray) -> Tensor:
        """Outputs in eval mode for the images at `index`, N×C."""
        parts = self.parts(index)
        if len(self.lanes) == 1 or len(parts) == 1:
            return super().logits(weights, index)
        share = -(-len(parts) // len(self.lanes))

        def work(lane: Lane, lane_parts: Sequence[Tensor]) -> Tensor:
            return lane.logits(self.images, weights, lane_parts, [None] * len(lane_parts))

        with self._pool() as run:
            results = [run(work, parts[i : i + share]) for i in range(0, len(parts), share)]
            return torch.cat([result.result() for result in results])

    @contextmanager
    def _pool(self) -> Iterator[Callable[..., Future[Any]]]:
        """Runs functions on idle lanes;
        on the way out, whatever is still running is stopped and waited for.
        """
        idle: SimpleQueue[Lane] = SimpleQueue()
        for lane in self.lanes:
            idle.put(lane)

        def run_on_lane(function: Callable[..., Any], *arguments: Any) -> Any:
            lane = idle.get()
            try:
                return function(lane, *arguments)
            finally:
                idle.put(lane)

        futures: set[Future[Any]] = set()

        def run(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future = self._threads.submit(run_on_lane, function, *arguments)
            futures.add(future)
            # A result that was folded must not be kept alive.
            future.add_done_callback(futures.discard)
            return future

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield run
        finally:
            self._halted.set()
            for future in list(futures):
                future.cancel()
            wait(list(futures))
            self._halted.clear()
            torch.set_num_threads(threads)

    def _draws_at_random(self) -> bool:
        """Whether the network draws random numbers when it is trained, as dropout does."""
        index = torch.zeros(2, dtype=torch.int64)
        weights = self.net.weights()
        with torch_seed(0, "probe"), torch.no_grad():
            state = torch.get_rng_state()
            self.net.net.train()(self.images.batch(index))
            is_random = not torch.equal(state, torch.get_rng_state())
        self.net.load(weights)
        return is_random


def windows(
    clients: Sequence[int], model_bytes: int, memory: int, least: int
) -> Iterator[Sequence[int]]:
    """Cuts clients into runs of which all models (of so many bytes each) may be held at once."""
    return cut(clients, max(least, memory // max(model_bytes, 1)))


def cut(clients: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Cuts clients into runs of this size."""
    for start in range(0, len(clients), size):
        yield clients[start : start + size]


def _wake_mathematics() -> None:
    """Calls what PyTorch leaves to a library that sets itself up at the first call.

    Two lanes that came first at the same time had logarithms with other
    last bits, in one run of twenty.
    """
    x = torch.full((64,), 0.5)
    for function in (
        torch.log, torch.log1p, torch.log2, torch.log10,
        torch.exp, torch.expm1, torch.tanh, torch.erf,
    ):  # fmt: skip
        function(x)
        function(x.double())


def _lanes_in_memory(lane: Lane) -> int:
    """How many lanes a quarter of the machine's memory holds."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        memory = 8 * 2**30
    return max(1, memory // 4 // max(1, COPIES * lane.net.values.nbytes))
