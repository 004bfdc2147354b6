"""Which engine runs local steps: by the device, the precision and the memory there is.

No other module imports `engine.cuda`, and this one only where a GPU is used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import conv2d

from fednoro.core.training import Training
from fednoro.core.types import FedNoRoWarning, Precision, UserError
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.cpu import CpuEngine
from fednoro.engine.eager import EagerEngine

Kind = Literal["auto", "eager", "cpu", "cuda"]

SHARE_OF_MEMORY = 0.5  # of a GPU that images may take


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one; anything else is a torch device name."""
    # Streams that share a hardware queue wait for each other;
    # eight queues, the driver's default, are too few.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"device {name!r} is unknown: use auto, cpu, cuda, or cuda:1 and so on"
        ) from error
    try:
        torch.zeros(1, device=device).item()  # a device may be listed and yet run nothing
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {name!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return device


@dataclass(frozen=True)
class Hardware:
    """What runs the local steps: a device, an engine for it, and the arithmetic."""

    device: torch.device
    kind: Kind = "auto"
    precision: Precision = "fp32"
    compiled: bool = False
    stack: bool = True  # where that is faster
    lanes: int | None = None  # clients at a time; by default what the machine and the memory allow

    def __post_init__(self) -> None:
        device = self.device.type
        if self.kind in ("cpu", "cuda") and self.kind != device:
            raise UserError(
                f"engine {self.kind} runs on a {self.kind} device, "
                f"got device {self.device}: use engine=auto"
            )
        if device != "cuda" and self.precision != "fp32":
            raise UserError(
                f"precision {self.precision} needs a CUDA device, "
                f"got device {self.device}: use fp32"
            )
        if self.kind == "eager" and self.precision != "fp32":
            raise UserError(
                "the eager engine computes in fp32, "
                f"got precision {self.precision}: use engine=auto"
            )

    def warm_up(self) -> None:
        """Wakes the GPU, its libraries and its compiler,
        each of which takes a while at first use.
        """
        if self.device.type != "cuda":
            return
        from fednoro.engine.cuda import image_kernel

        # An error is not lost: an engine will meet it again.
        with suppress(Exception), torch.cuda.device(self.device):
            # Label noise is made in float32, whatever precision comes after.
            _convolve(self.device, torch.float32)
            if self.precision == "bf16" and image_kernel.available():
                image_kernel.warm_up(self.device)
                _convolve(self.device, torch.bfloat16)

    def engine(
        self,
        network: Callable[[], nn.Module],
        dataset: Dataset,
        inputs: int,
        training: Training,
        seed: int,
        clients: Sequence[Client] = (),
    ) -> EagerEngine:
        """The engine that serves best here; it describes itself."""
        arguments = (network, dataset, inputs, training, seed, self.device, clients)
        if self.kind == "eager" or self.device.type not in ("cpu", "cuda"):
            return EagerEngine(*arguments)
        if self.device.type == "cpu":
            return CpuEngine(*arguments, lanes=self.lanes)
        from fednoro.engine.cuda.cuda_engine import CudaEngine

        free, _ = torch.cuda.mem_get_info(self.device)
        if dataset.images.nbytes > SHARE_OF_MEMORY * free:
            need, have = (f"{size / 2**30:.1f} GiB" for size in (dataset.images.nbytes, free))
            message = (
                "the eager engine in fp32, "
                f"because the images ({need}) leave too little of the GPU's {have} free"
            )
            warnings.warn(message, FedNoRoWarning, stacklevel=2)
            return EagerEngine(*arguments, resident=False)
        try:
            stacked = None if self.stack else False
            return CudaEngine(
                *arguments,
                precision=self.precision,
                compiled=self.compiled,
                lanes=self.lanes,
                stacked=stacked,
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            message = (
                "the eager engine in fp32, "
                "because the GPU's memory does not hold one network per stream"
            )
            warnings.warn(message, FedNoRoWarning, stacklevel=2)
            return EagerEngine(*arguments)


def _convolve(device: torch.device, dtype: torch.dtype) -> None:
    """One convolution as in each layer of a ResNet at 64 pixels, forward and backward."""
    for width, side in ((64, 16), (128, 8), (256, 4), (512, 2)):
        x = torch.zeros((16, width, side, side), dtype=dtype, device=device, requires_grad=True)
        kernel = torch.zeros((width, width, 3, 3), dtype=dtype, device=device, requires_grad=True)
        if dtype == torch.bfloat16:  # as engines lay it out
            x, kernel = (tensor.to(memory_format=torch.channels_last) for tensor in (x, kernel))
        conv2d(x, kernel, padding=1).sum().backward()  # type: ignore[no-untyped-call]
