"""The plain loop on any device: one client after another, one batch after another.

It is the reference that every faster engine is compared with. Nothing is reallocated from client to
client: one network and one anchor take over each client's weights in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from fednoro.clients import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.images import DRAWS, Images
from fednoro.methods import Method
from fednoro.models import Packed
from fednoro.seeds import generator, torch_seed
from fednoro.training import Training
from fednoro.types import Failure, IntArray, Reply, Step, Task, Weights

EVALUATION_BATCH = 512


class EagerEngine:
    """Runs local work for simulated clients on one device."""

    name = "eager"

    def __init__(
        self,
        network: Callable[[], nn.Module],
        dataset: Dataset,
        inputs: int,
        training: Training,
        seed: int,
        device: torch.device,
        clients: Sequence[Client] = (),
    ) -> None:
        if device.type == "cuda":
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            torch.backends.cudnn.allow_tf32 = False  # a reference that keeps all of float32's digits
        self.device, self.seed, self.training = device, seed, training
        self.classes = len(dataset.classes)
        self.images = Images(dataset.images, inputs, training.augment, device)
        self.net, self.anchor = Packed(network(), device), Packed(network(), device)
        self.adam = Adam(self.net)
        self.anchor.net.eval().requires_grad_(False)
        self.clients = {client.id: client for client in clients}

    def site(self, client: Client) -> EagerSite:
        return EagerSite(self, client)

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        """Each client's answer, in client order; a client that raises becomes a `Failure`."""
        for k in sorted(tasks):
            try:
                yield method.work(tasks[k], self.site(self.clients[k]))
            except Exception as error:
                yield Failure(k, f"{type(error).__name__}: {error}", error)

    def logits(self, weights: Weights, index: IntArray, u: Tensor | None = None) -> Tensor:
        """Outputs in eval mode for the images at `index`, N×C."""
        self.anchor.load(weights)
        where = torch.from_numpy(index).to(self.device)
        with torch.inference_mode():
            parts = [
                self.anchor.net(self.images.batch(part, None if u is None else u[i * EVALUATION_BATCH :][: len(part)]))
                for i, part in enumerate(torch.split(where, EVALUATION_BATCH))
            ]
        return torch.cat(parts)

    def recalibrate(self, weights: Weights, client: Client) -> Weights:
        """`weights` with BatchNorm's running statistics re-estimated on the client's images, of which it needs two."""
        self.net.load(weights)
        self.net.net.eval()  # no dropout
        momenta = [norm.train().momentum for norm in self.net.norms]
        where, seen = torch.from_numpy(client.index).to(self.device), 0
        with torch.no_grad():
            for part in torch.tensor_split(where, -(-len(where) // EVALUATION_BATCH)):  # of equal size, never one alone
                seen += len(part)
                for norm in self.net.norms:
                    norm.momentum = len(part) / seen  # so that each image counts the same
                self.net.net(self.images.batch(part))
        for norm, momentum in zip(self.net.norms, momenta, strict=True):
            norm.momentum = momentum
        return replace(self.net.weights(), counters=weights.counters)


@dataclass
class EagerSite:
    """One client's data on the engine's device."""

    engine: EagerEngine
    data: Client

    @property
    def client(self) -> int:
        return self.data.id

    @property
    def classes(self) -> int:
        return self.engine.classes

    @property
    def memory(self) -> dict[str, Tensor]:
        return self.data.memory

    @property
    def size(self) -> int:
        return len(self.data.index)

    @property
    def labels(self) -> Tensor:
        return self.data.labels.to(self.engine.device)

    def train(
        self,
        task: Task,
        loss: Callable[[Step], Tensor],
        aux: Mapping[str, Tensor],
        draws: int = 0,
        epochs: int | None = None,
    ) -> tuple[Weights, Tensor]:
        """Local epochs from `task.weights` with a fresh Adam: the trained weights and the mean loss."""
        engine, device, options = self.engine, self.engine.device, self.engine.training
        engine.net.load(task.weights)
        engine.anchor.load(task.weights)
        engine.adam.reset()
        where, labels = torch.from_numpy(self.data.index).to(device), self.labels
        rng = generator(engine.seed, task.name, task.round, self.client)
        total, seen = torch.zeros((), device=device), 0
        engine.net.net.train()
        with torch_seed(engine.seed, f"{task.name}.network", task.round, self.client):  # for dropout and the like
            for _ in range(options.epochs if epochs is None else epochs):
                order = torch.from_numpy(rng.permutation(self.size)).to(device)
                u = torch.from_numpy(rng.random((self.size, DRAWS + draws), dtype=np.float32)).to(device)
                for start in range(0, self.size, options.batch):
                    index = order[start : start + options.batch]
                    uniforms = u[start : start + options.batch]
                    x = engine.images.batch(where[index], uniforms[:, :DRAWS])
                    step = Step(engine.net.net, engine.anchor.net, x, labels[index], index, aux, uniforms[:, DRAWS:])
                    _normalise_by_running_statistics(engine.net, alone=len(index) == 1)
                    engine.net.gradient.zero_()
                    value = loss(step)
                    value.backward()  # type: ignore[no-untyped-call]
                    engine.adam.step(options)
                    total += value.detach() * len(index)
                    seen += len(index)
        return engine.net.weights(), total / max(seen, 1)

    def logits(self, task: Task, weights: Weights, augment: bool = False) -> Tensor:
        """Outputs for all of the client's images in eval mode, N×C; on augmented images if asked."""
        u = None
        if augment:
            rng = generator(self.engine.seed, f"{task.name}.augment", task.round, self.client)
            u = torch.from_numpy(rng.random((self.size, DRAWS), dtype=np.float32)).to(self.engine.device)
        return self.engine.logits(weights, self.data.index, u)


class Adam:
    """Adam over a packed network: one elementwise update of one vector, and state that is reset in place.

    The functional form does what `torch.optim.Adam` does without loading the compiler at start-up.
    """

    def __init__(self, packed: Packed) -> None:
        self.values, self.gradient = packed.values[: packed.trainable], packed.gradient
        self.mean, self.square = torch.zeros_like(self.gradient), torch.zeros_like(self.gradient)
        self.steps = torch.zeros((), device=self.gradient.device)

    def reset(self) -> None:
        """As new: every client begins every round with a fresh optimizer."""
        for tensor in (self.mean, self.square, self.steps):
            tensor.zero_()

    def step(self, options: Training) -> None:
        with torch.no_grad():
            adam(
                [self.values], [self.gradient], [self.mean], [self.square], [], [self.steps],
                lr=options.lr, weight_decay=options.weight_decay, beta1=0.9, beta2=0.999, eps=1e-8,
                fused=True, foreach=False, amsgrad=False, maximize=False,
            )  # fmt: skip


def _normalise_by_running_statistics(packed: Packed, alone: bool) -> None:
    # A single image has no batch statistics (PyTorch refuses them on 1×1 maps): use the running ones.
    for norm in packed.norms:
        norm.training = not alone
