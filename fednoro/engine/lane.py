"""A lane: one network, its anchor and its optimizer, which train one client at a time.

Nothing is reallocated from client to client: a lane takes over each client's weights in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednoro.core.seeds import generator
from fednoro.core.training import FURTHER, Augment, Training
from fednoro.core.types import IntArray, Task, UserError, Weights
from fednoro.engine.images import DRAWS, Images
from fednoro.models import Packed
from fednoro.models.cpu_convolution import Spare
from fednoro.models.networks import Convolution

EVALUATION_BATCH = 512
BLOCK = 64 * 2**20  # bytes of images that a lane prepares at once


class Lane:
    """The networks that one client at a time is trained and scored with."""

    _host_counts = False  # whether BatchNorm's counters are left out of the networks
    _spare: Spare | None = None  # memory for gradients, where it is worth keeping

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self.device = device
        self.net, self.anchor = Packed(net, device), Packed(copy.deepcopy(net), device)
        self.anchor.net.eval().requires_grad_(False)
        self.teacher: Any = self.anchor.net  # what is asked for the anchor's outputs
        self._anchor_values: Tensor | None = None
        self.parameters = [p for p in self.net.net.parameters() if p.requires_grad]
        self.adam = Adam(self.parameters)
        self._spare = Spare()
        for module in self.net.net.modules():
            if isinstance(module, Convolution):
                module.spare = self._spare

    def load(self, weights: Weights) -> None:
        """A client's start: the received weights in both networks, and a fresh optimizer."""
        self.net.load(weights, counters=not self._host_counts)
        self.anchor_to(weights)
        self.adam.reset()

    def anchor_to(self, weights: Weights) -> None:
        """The anchor takes over `weights`, unless it has them:
        the clients of a round receive the same model.
        """
        if self._anchor_values is not weights.values:
            self.anchor.load(weights, counters=not self._host_counts)
            self._anchor_values = weights.values

    def descend(self, loss: Tensor, options: Training) -> None:
        """One step of Adam down the gradient of `loss`."""
        with self._spare.offer() if self._spare else nullcontext():
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self.adam.step(gradients, options)

    def logits(
        self,
        images: Images,
        weights: Weights,
        parts: Sequence[Tensor],
        u: Sequence[Tensor | None],
        features: bool = False,  # the penultimate layer instead
    ) -> Tensor:
        """Outputs in eval mode for the images at the indices in `parts`, one part at a time."""
        self.anchor_to(weights)
        forward = penultimate(self.teacher) if features else self.teacher
        with torch.inference_mode(), self._autocast():
            outputs = [forward(self._images(images, i, v)) for i, v in zip(parts, u, strict=True)]
        return torch.cat(outputs)  # out here: a loss may take them as its targets

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _images(self, images: Images, index: Tensor, u: Tensor | None) -> Tensor:
        return images.batch(index, u)

    def recalibrate(self, images: Images, weights: Weights, index: IntArray) -> Weights:
        """`weights` with BatchNorm's running statistics re-estimated
        on the images at `index`: two or more.
        """
        self.net.load(weights)
        self.net.net.eval()  # no dropout
        momenta = [norm.train().momentum for norm in self.net.norms]
        positions, image_count = torch.from_numpy(index).to(self.device), 0
        with torch.no_grad():
            for part in torch.tensor_split(positions, -(-len(positions) // EVALUATION_BATCH)):
                # Parts are of equal size, so that no image is alone in one.
                image_count += len(part)
                for norm in self.net.norms:
                    norm.momentum = len(part) / image_count  # so that each image counts the same
                self.net.net(images.batch(part))
        for norm, momentum in zip(self.net.norms, momenta, strict=True):
            norm.momentum = momentum
        self.net.net.train()  # a lane of graphs never asks again
        return replace(self.net.weights(), counters=weights.counters)


def penultimate(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layers of `net` before its classifier."""
    missing = [name for name in ("features", "fc") if not callable(getattr(net, name, None))]
    if missing:
        raise UserError(
            "this method needs a network with features(x), B×d, and a classifier fc after "
            f"them: the given one has no {' and no '.join(missing)}; add what is missing, or "
            "use model=cnn or model=resnet18"
        )

    def features(x: Tensor) -> Tensor:
        outputs: Tensor = net.features(x)  # type: ignore[operator]
        if outputs.ndim != 2:
            raise UserError(
                f"the network's features(x) must be B×d, got shape {tuple(outputs.shape)}"
            )
        return outputs

    return features


class Adam:
    """Adam with state that is reset in place, and one fused update for all tensors.

    The update is the one inside `torch.optim.Adam`. That class loads the compiler at start-up,
    counts steps for each tensor and sorts the tensors anew in every step, which costs a small
    network a fifth of its time.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.means = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.squares = [torch.zeros_like(tensor) for tensor in self.tensors]
        self.count = torch.zeros((), device=self.tensors[0].device if self.tensors else None)

    def moments_and_places(
        self, packed: Packed, means: Tensor, squares: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The moments here, and their places in vectors that are laid out as a network's."""
        places = [packed.views_of(vector)[: len(self.tensors)] for vector in (means, squares)]
        return [*self.means, *self.squares], [*places[0], *places[1]]

    def reset(self) -> None:
        """As new: every client begins every round with a fresh optimizer."""
        torch._foreach_zero_([*self.means, *self.squares, self.count])

    def step(self, gradients: Sequence[Tensor | None], options: Training) -> None:
        """One update; a tensor without a gradient has the gradient zero."""
        gradients_in_layout = [
            _in_layout_of(t, g) for g, t in zip(gradients, self.tensors, strict=True)
        ]
        with torch.no_grad():
            self.count.add_(1.0)
            torch._fused_adam_(
                self.tensors, gradients_in_layout, self.means, self.squares, [],
                [self.count] * len(gradients_in_layout), lr=options.lr,
                weight_decay=options.weight_decay, beta1=0.9, beta2=0.999, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip


def _in_layout_of(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient laid out as its tensor: the fused update walks through memory."""
    if gradient is None:
        return torch.zeros_like(tensor)
    return (
        gradient
        if gradient.stride() == tensor.stride()
        else torch.empty_like(tensor).copy_(gradient)
    )


@dataclass(frozen=True)
class Epoch:
    """The order in which a client's images come, and their uniforms;
    beyond [0, 1] for images that move further.
    """

    order: IntArray  # N
    u: np.ndarray[tuple[int, int], np.dtype[np.float32]]  # N×(DRAWS + draws)


def schedule(
    seed: int, task: Task, client: int, size: int, draws: int, epochs: int, augment: Augment
) -> Iterator[Epoch]:
    """All that is random in a client's training, the same on every engine."""
    rng = generator(seed, task.name, task.round, client)
    angle, shift = augment.spread(float(task.settings.get(FURTHER, 1.0)))
    factors = np.array([angle, shift, shift], dtype=np.float32)
    for _ in range(epochs):
        order, u = rng.permutation(size), rng.random((size, DRAWS + draws), dtype=np.float32)
        # ½ moves an image nowhere; times 1 they stay as they are, to the bit
        u[:, :3] = 0.5 + (u[:, :3] - 0.5) * factors
        yield Epoch(order, u)


def batches(size: int, batch: int) -> list[int]:
    """The sizes of one epoch's batches."""
    return [batch] * (size // batch) + ([size % batch] if size % batch else [])


def room(values: int, batch: int) -> int:
    """How many images of so many values a lane prepares at once: whole batches."""
    return max(batch, BLOCK // (4 * values) // batch * batch)


def blocks(sizes: Sequence[int], room: int) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of whole batches that fit into the room:
    first and last image, and the sizes of the batches.
    """
    first, batch_sizes = 0, list[int]()
    for size in sizes:
        if sum(batch_sizes) + size > room:
            yield first, first + sum(batch_sizes), batch_sizes
            first, batch_sizes = first + sum(batch_sizes), []
        batch_sizes.append(size)
    if batch_sizes:
        yield first, first + sum(batch_sizes), batch_sizes


def normalise_by_running_statistics(norms: Iterable[nn.Module], alone: bool) -> None:
    """A single image has no batch statistics (PyTorch refuses them on 1×1 maps):
    use the running ones.
    """
    for norm in norms:
        norm.training = not alone
