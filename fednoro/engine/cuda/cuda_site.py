"""A client's own side on a GPU: its work is queued, and not yet done when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednoro.core.types import FloatArray, Step, Task, Weights
from fednoro.engine.cuda.coroutines import Coroutine
from fednoro.engine.cuda.cuda_lane import CudaLane
from fednoro.engine.cuda.training_request import Request
from fednoro.engine.eager import EagerSite
from fednoro.engine.lane import schedule

CLIENT_BATCH = 256  # images of a client in one batch without gradients


@dataclass
class CudaSite(EagerSite):
    """One client's data on the GPU.
    Its work is queued on the lane's stream, and not yet done when a call returns.
    """

    lane: CudaLane
    coroutine: Coroutine | None = None  # where others work meanwhile,
    main_stream: torch.cuda.Stream | None = None  # the stream of whoever sees to that,
    stacked: bool = False  # and whether several are trained together

    @property
    def labels(self) -> Tensor:
        return self.lane.upload(self.data.labels.cpu().numpy())

    def _batches(self, array: NDArray[Any]) -> Sequence[Tensor]:
        """All of one size: cuDNN plans for every other,
        which takes longer than the images themselves.
        """
        size = min(CLIENT_BATCH, self.engine.evaluation_batch)
        padding = [(0, -len(array) % size), *[(0, 0)] * (array.ndim - 1)]
        return torch.split(self.engine.upload(np.pad(array, padding, mode="edge")), size)

    def to_array(self, tensor: Tensor) -> FloatArray:
        """A tensor for `Reply.arrays`, copied when the lane gets there:
        to wait for it would keep other lanes idle.
        """
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
        options = self.engine.training
        count = options.epochs if epochs is None else epochs
        epoch_list = list(
            schedule(self.engine.seed, task, self.client, self.size, draws, count, options.augment)
        )
        request = Request(task, self.data, loss, aux, draws, rows or {}, epoch_list, self.lane)
        if self.stacked:
            return self._ask(request)  # type: ignore[no-any-return]
        return request.train_alone(self.engine.images, self._ask)

    def _ask(self, request: Request | None = None) -> Any:
        """Lets others work, until the request is fulfilled."""
        if self.coroutine is None:
            return None
        # Coroutines share a thread, and with it the current stream and whether there are gradients.
        with torch.cuda.stream(self.main_stream), torch.enable_grad():
            return self.coroutine.ask(request)
