"""Every registered method with small options, and a federation of a
few small images to try it on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from fednoro.core.training import Training
from fednoro.core.types import State, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.methods import METHODS, Method
from fednoro.models import Cnn, Packed, initialise

CLASSES, ROUNDS, BATCH = 4, 5, 4
TRAINING = Training(rounds=ROUNDS, batch=BATCH, lr=0.01)
SMALL = {"warmup": 2}  # so that every stage falls within `ROUNDS`; each method takes what it knows

# What each client was told its images are. Batches of 4: the first ends its epochs
# with a batch of one image.
ORDINARY, GAPPED, SINGLE_CLASS, ONE_IMAGE = (
    [0, 1, 2, 3, 0, 1, 2, 3, 0],
    [0, 1, 2, 0, 1, 2, 0, 1],
    [2] * 5,
    [1],
)
MIXED = [ORDINARY, GAPPED, SINGLE_CLASS, ONE_IMAGE, [3, 0, 1, 2, 1, 3, 2, 1, 0, 3]]


def small(cls: type[Method], **options: Any) -> Method:
    known = {f.name for f in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in SMALL.items() if key in known}, **options)


def variants() -> Iterator[Any]:
    """Every registered method as it is by default, and with every other
    named behaviour that it has.
    """
    for name, cls in METHODS.items():
        yield pytest.param(small(cls), id=name)
        hints = get_type_hints(cls)
        for f in dataclasses.fields(cls):
            for kind in (hints[f.name], *get_args(hints[f.name])):  # also in `Literal[…] | None`
                for value in (
                    set(get_args(kind)) - {f.default} if get_origin(kind) is Literal else ()
                ):
                    yield pytest.param(small(cls, **{f.name: value}), id=f"{name}-{f.name}={value}")


every_method = pytest.mark.parametrize(
    "method", [pytest.param(small(cls), id=name) for name, cls in METHODS.items()]
)
every_variant = pytest.mark.parametrize(
    "method", sorted(variants(), key=lambda param: str(param.id))
)


def network() -> nn.Module:
    return initialise(Cnn(width=2), 1, CLASSES, seed=0)


def federation(
    parts: Sequence[Sequence[int]] = MIXED, side: int = 4
) -> tuple[Dataset, list[Client]]:
    """Clients given by their labels.

    Images of 4×4 end as maps of 1×1, where BatchNorm refuses a batch of one.
    """
    labels = np.concatenate(parts).astype(np.int64)
    images = np.random.default_rng(7).integers(0, 90, (len(labels), side, side, 1)).astype(np.uint8)
    images[np.arange(len(labels)), labels] += 150
    ends = np.cumsum([len(part) for part in parts])
    indices = [np.arange(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
    clients = [Client(k, f"site {k}", index, labels[index]) for k, index in enumerate(indices)]
    return Dataset(images, labels, tuple("abcd")), clients


def start(rounds: int = ROUNDS, seed: int = 0) -> State:
    return State(Packed(network()).weights(), 0, rounds, CLASSES, seed)


def three_channels() -> nn.Module:
    return initialise(Cnn(width=4), 3, CLASSES, seed=0)


def distance(a: Weights, b: Weights) -> float:
    return float((a.values.cpu() - b.values.cpu()).norm())


def same(a: Weights, b: Weights) -> bool:
    return torch.equal(a.values, b.values) and torch.equal(a.counters, b.counters)
