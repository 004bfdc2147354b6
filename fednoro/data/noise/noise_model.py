"""What every kind of noise is given, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from fednoro.core.options import Options
from fednoro.core.types import BoolArray, FloatArray, IntArray, UserError


def read_content(path: str | Path) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not content.strip():
        raise UserError(f"{path}, line 1: the file is empty")
    return content


@dataclass(frozen=True)
class Context:
    """What a kind of noise may need besides the labels."""

    classes: tuple[str, ...]
    ids: tuple[str, ...] | None
    rng: Callable[..., np.random.Generator]  # (purpose, *keys)
    # clients' indices → N_k×C by annotators
    annotate: Callable[[Mapping[int, IntArray]], Mapping[int, FloatArray]]


@dataclass(frozen=True)
class Noise:
    """The labels that the clients see, and the truth about them."""

    observed: IntArray  # N
    noisy: BoolArray | None  # K; None where nobody knows
    rates: FloatArray  # K, the share of labels that differ from the given ones


def changed_share(observed: IntArray, labels: IntArray, parts: Sequence[IntArray]) -> FloatArray:
    return np.array(
        [np.mean(observed[part] != labels[part]) if len(part) else 0.0 for part in parts]
    )


class NoiseModel(Protocol):
    """What every entry of `NOISES` is: an options dataclass that can be applied."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """The observed labels for the true ones; samples outside all parts keep theirs."""


@dataclass(frozen=True)
class NoNoise(Options):
    """The labels as they are; nobody knows which of them are wrong."""

    section: ClassVar[str] = "noise"

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """See `NoiseModel.apply`."""
        return Noise(np.array(labels, dtype=np.int64), None, np.zeros(len(parts)))
