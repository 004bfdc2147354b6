"""An app's own network and data: scikit-learn's digits, shared out among the sites."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


def network() -> nn.Module:
    """Any torch module will do."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES)
    )  # fmt: skip


@cache
def data(
    site: int, sites: int
) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]], Tensor]:
    """A site's training and test images, and its labels; those of
    every third site are often wrong.
    """
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    mine = torch.arange(len(y)) % sites == site
    x, y = x[mine], y[mine]
    cut = int(0.8 * len(y))
    given = y[:cut].clone()
    if site % 3 == 2:
        random = torch.Generator().manual_seed(site)
        wrong = torch.rand(cut, generator=random) < 0.6
        given[wrong] = (
            given[wrong] + torch.randint(1, CLASSES, (cut,), generator=random)[wrong]
        ) % CLASSES
    train = DataLoader(TensorDataset(x[:cut], given), batch_size=32, shuffle=True)
    test = DataLoader(TensorDataset(x[cut:], y[cut:]), batch_size=256)
    return train, test, given
