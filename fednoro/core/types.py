"""The words everything else speaks: what a server asks, what a client answers, what is carried on.

One *exchange* is ``plan → work → fold``: the server plans a `Task` for each client,
each client works and sends a `Reply`, the server folds the replies into the next
`State`. A round may take several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # so that `fednoro --help` does not wait for torch
    from collections.abc import Callable

    from torch import Tensor, nn

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Precision = Literal["fp32", "tf32", "bf16"]  # of arithmetic on CUDA


class UserError(ValueError):
    """A mistake the user can correct: the command line prints its one line and exits with 2."""


class FedNoRoWarning(UserWarning):
    """Something degenerate was met and handled; the message says what was done instead."""


@dataclass(frozen=True)
class Weights:
    """One model as one vector: trainable parameters, then floating-point buffers;
    integer counters apart.
    """

    values: Tensor  # P
    counters: Tensor  # int64, such as BatchNorm's num_batches_tracked
    segments: tuple[int, ...] = ()  # sizes of the tensors that `values` is made of

    def extent(self) -> Tensor:
        """The least and the largest value and the least counter, 3;
        a NaN comes through as the first two.
        """
        import torch

        counters = self.counters if self.counters.numel() else self.counters.new_zeros(1)
        return torch.stack([*torch.aminmax(self.values), counters.min().to(self.values)])


@dataclass(frozen=True)
class Task:
    """What the server asks of one client in one exchange.

    `name` and `round` also key the client's random draws, so equal tasks see equal numbers.
    """

    name: str
    round: int
    weights: Weights
    settings: Mapping[str, float | int | bool | str] = field(default_factory=dict)
    arrays: Mapping[str, FloatArray] = field(default_factory=dict)  # such as class centroids


@dataclass(frozen=True)
class Reply:
    """What one client sends back: never data, only weights, counts,
    sums over images and metrics.
    """

    client: int
    size: int
    weights: Weights | None = None
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)
    arrays: Mapping[str, FloatArray] = field(default_factory=dict)
    # name and round of its task, where it came by way of a network
    answers: tuple[str, int] | None = None
    # of its weights, where the engine has looked already
    extent: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Failure:
    """A client that was asked and did not answer, or answered with something unusable."""

    client: int
    reason: str
    error: Exception | None = None


@dataclass(frozen=True)
class Replies:
    """The answers to one exchange, in client order; clients that failed are simply not among them.

    Iterate once: an engine may produce replies while they are folded, so that a method which needs
    one model at a time never holds them all.
    """

    task: str
    asked_clients: tuple[int, ...]
    stream: Iterable[Reply]

    def __iter__(self) -> Iterator[Reply]:
        return iter(self.stream)


@dataclass(frozen=True)
class Clients:
    """Whom the server can ask now: everyone reachable, and those drawn to train in this round."""

    present: tuple[int, ...]
    drawn: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """All that the server carries from one exchange to the next;
    saving and loading it is resuming.
    """

    model: Weights
    round: int  # rounds finished
    rounds: int  # rounds in all
    classes: int
    seed: int
    stage: str = "training"
    memo: Mapping[str, Any] = field(default_factory=dict)  # JSON values only
    # per client, from the last fold
    notes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    # earlier models that the method goes back to
    models: Mapping[str, Weights] = field(default_factory=dict)


@dataclass
class Step:
    """One batch as `Method.loss` sees it.

    `anchor` is the global model as received, in eval mode and without gradients. `u` holds uniforms
    on [0, 1), one row per image and one column per draw that the method asked for. `rows` has the
    batch's rows of the tensors that the method keeps per image.
    """

    net: nn.Module
    anchor: nn.Module
    x: Tensor  # B×C×H×W
    y: Tensor  # B
    index: Tensor  # B, positions within the client's own data
    aux: Mapping[str, Tensor]
    u: Tensor  # B×draws
    rows: Mapping[str, Tensor] = field(default_factory=dict)  # B×…


class Site(Protocol):
    """A client's own side: its data and the means to work on it, as the engine provides them."""

    @property
    def client(self) -> int:
        """The client's number."""

    @property
    def classes(self) -> int:
        """How many classes there are in all."""

    @property
    def memory(self) -> dict[str, Tensor]:
        """What a method keeps at this client, through rounds and resume;
        tensors are replaced, not changed in place.
        """

    @property
    def labels(self) -> Tensor:
        """The labels to train on: as observed, or as corrected in `memory["labels"]`."""

    @property
    def counts(self) -> Tensor:
        """How many of `labels` each class has, C."""

    @property
    def size(self) -> int:
        """How many images the client holds."""

    def train(
        self,
        task: Task,
        loss: Callable[[Step], Tensor],
        aux: Mapping[str, Tensor],
        draws: int = 0,
        epochs: int | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> tuple[Weights, Tensor]:
        """Local epochs from `task.weights`: the trained weights and the mean loss."""

    def logits(self, task: Task, weights: Weights, augment: bool = False) -> Tensor:
        """Outputs for all of the client's images in eval mode, N×C."""

    def features(self, weights: Weights) -> Tensor:
        """The penultimate layer for all of the client's images in eval mode, N×d."""

    def to_array(self, tensor: Tensor) -> FloatArray:
        """A tensor for `Reply.arrays`;
        it may be filled only when the engine hands the reply over.
        """
