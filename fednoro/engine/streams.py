"""Streams of a GPU; on other devices there are none, and nothing has to be waited for."""

from __future__ import annotations

import gc
from typing import Any

import torch


def stream(device: torch.device, priority: int = 0) -> Any:
    return torch.cuda.Stream(device, priority) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def after(later: Any, earlier: Any) -> None:
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


def release_memory() -> None:
    """Gives the memory of engines that are gone back to the GPU, where other processes may need it."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
