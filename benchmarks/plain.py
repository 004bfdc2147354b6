"""The plain loop of public federated simulators: what the engines are compared with.

For each client a deep copy of the global model, a DataLoader whose workers make a PIL image and
transform it, one image at a time, a new Adam, eager float32 with `loss.item()` in every step; then
state dicts averaged key by key.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fednoro.core.training import Augment, Training
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_DEVIATION = 0.449, 0.226


def stock(net: nn.Module) -> nn.Module:
    """The network with PyTorch's own convolutions, whatever it had."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.__class__ = nn.Conv2d
    return net


class Pictures(TorchDataset[tuple[Tensor, int]]):
    """One client's images, decoded to PIL and transformed one at a time."""

    def __init__(
        self, images: NDArray[np.uint8], client: Client, inputs: int, augment: Augment
    ) -> None:
        self.images, self.index, self.labels = images, client.index, client.observed
        self.inputs, self.augment = inputs, augment
        grey = inputs == 1
        self.mean = torch.tensor((GREY_MEAN,) if grey else MEAN).view(-1, 1, 1)
        self.deviation = torch.tensor((GREY_DEVIATION,) if grey else DEVIATION).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        pixels = self.images[self.index[i]]
        picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        if self.inputs == 3 and picture.mode != "RGB":
            picture = picture.convert("RGB")
        picture = random_affine(picture, self.augment)
        if self.augment.flip and random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(picture)).view(*picture.size[::-1], -1)
        x = x.permute(2, 0, 1).contiguous().float().div(255)
        return x.sub_(self.mean).div_(self.deviation), int(self.labels[i])


def random_affine(picture: Image.Image, augment: Augment) -> Image.Image:
    """Rotated about the centre and shifted, nearest neighbour: the usual
    transform's default, and its fastest.
    """
    width, height = picture.size
    angle = math.radians(random.uniform(-augment.rotate, augment.rotate))
    x, y = width / 2, height / 2
    to_x = x + random.uniform(-augment.translate, augment.translate) * width
    to_y = y + random.uniform(-augment.translate, augment.translate) * height
    cos, sin = math.cos(angle), math.sin(angle)
    # Pillow asks where each pixel of the result comes from.
    inverse = (cos, sin, x - cos * to_x - sin * to_y, -sin, cos, y + sin * to_x - cos * to_y)
    return picture.transform(
        picture.size, Image.Transform.AFFINE, inverse, Image.Resampling.NEAREST
    )


def train(
    net: nn.Module, loader: DataLoader[tuple[Tensor, int]], options: Training, device: torch.device
) -> float:
    """Local epochs with a new Adam; the mean loss."""
    optimizer = torch.optim.Adam(net.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    net.train()
    total = seen = 0.0
    for _ in range(options.epochs):
        for images, labels in loader:
            x, y = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(y)
            seen += len(y)
    return total / seen


def average(states: Sequence[dict[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """State dicts averaged by size, key by key; integers are the first client's."""
    total, mean = sum(sizes), copy.deepcopy(states[0])
    for key, value in mean.items():
        if value.is_floating_point():
            mean[key] = sum(
                (state[key] * (n / total) for state, n in zip(states, sizes, strict=True)),
                0 * value,
            )
    return mean


def play_round(
    net: nn.Module,
    dataset: Dataset,
    clients: Sequence[Client],
    inputs: int,
    options: Training,
    device: torch.device,
    workers: int = 0,
) -> nn.Module:
    """One round of FedAvg from `net`, which is left as it is; the next global model."""
    states = []
    for client in clients:
        pictures = Pictures(dataset.images, client, inputs, options.augment)
        loader = DataLoader(pictures, options.batch, shuffle=True, num_workers=workers)
        local = copy.deepcopy(net)
        train(local, loader, options, device)
        states.append(local.state_dict())
    following = copy.deepcopy(net)
    following.load_state_dict(average(states, [len(client.index) for client in clients]))
    return following
