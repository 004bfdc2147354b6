"""Randomness is derived, never global: one generator per (seed, purpose, keys…)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator of one purpose, for example `generator(seed, "train", round, client)`."""
    # numpy pads its entropy with zeros:
    # without the count, client 0 would share its stream with no client at all.
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(keys), *keys])


@contextmanager
def torch_seed(seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Seeds torch's global generator inside the block and restores it after."""
    import torch  # late: processes that decode images have no use for it

    # Seeding torch seeds its CUDA devices as well.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(generator(seed, purpose, *keys).integers(2**63)))
        yield
