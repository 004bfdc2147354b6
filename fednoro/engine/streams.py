"""Streams of a GPU; on other devices there are none, and nothing has to be waited for."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

QUEUED_AT_MOST = 2  # pieces of work on the side that the main stream may be ahead of


def stream(device: torch.device, priority: int = 0) -> Any:
    return torch.cuda.Stream(device, priority) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def make_wait(later: Any, earlier: Any) -> None:
    """What is queued on `later` from now on waits for what is queued on `earlier` already."""
    if later is not None and earlier is not None:
        later.wait_stream(earlier)


def event(stream: Any) -> Any:
    """What says when all that is queued on a stream is done."""
    return None if stream is None else stream.record_event()


def finish(stream: Any) -> None:
    """Waits for all that is queued on a stream."""
    if stream is not None:
        stream.synchronize()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SideStream:
    """A second stream of a GPU, for what the main one does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = stream(device)
        # For each piece of work: when it is done, and what it reads until then.
        self._pending_work: deque[tuple[Any, tuple[Tensor, ...]]] = deque()

    @contextmanager
    def work(self, *tensors: Tensor) -> Iterator[None]:
        """Queues what is in the block behind all that the main stream has now;
        what it reads is kept until it is done.

        The main stream waits where it would be too far ahead.
        """
        main = torch.cuda.current_stream(self.stream.device)
        while len(self._pending_work) >= QUEUED_AT_MOST:
            end, _ = self._pending_work.popleft()
            main.wait_event(end)
        make_wait(self.stream, main)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            self._pending_work.append((event(self.stream), tensors))

    def join(self) -> None:
        """What is queued on the current stream from now on waits for all that is queued aside."""
        if self._pending_work:
            self._pending_work.clear()  # first: a capture that broke off may refuse to wait
            make_wait(torch.cuda.current_stream(self.stream.device), self.stream)


def release_memory() -> None:
    """Gives the memory of engines that are gone back to the GPU,
    where other processes may need it.
    """
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
