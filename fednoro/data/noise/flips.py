"""Wrong labels on some clients:
heterogeneous instance-dependent noise and the usual synthetic kinds.

H-IDN is Algorithm 1 of FedNoRo (Wu et al., IJCAI 2023): ρK clients are noisy; on noisy client k an
annotator trained on its own clean data gives p(Y|x), η_k ~ U(η_l, η_u), and η_k·N_k samples drawn
without replacement ∝ 1 − p(y|x) each get another label ∝ p(Y|x).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fednoro.core.options import Options, option
from fednoro.core.types import FedNoRoWarning, FloatArray, IntArray, UserError
from fednoro.data.noise.noise_model import (
    Context,
    Noise,
    changed_share,
    read_content,
)


def flip_labels(
    labels: IntArray, probabilities: FloatArray, rate: float, rng: np.random.Generator
) -> IntArray:
    """Lines 6–12 of Algorithm 1: exactly round(rate·N) labels change, the hard samples' first.

    Args:
        labels: the true labels y, N.
        probabilities: the annotator's p(Y|x), N×C.
        rate: η, the share of labels to change.
        rng: source of the draws.
    """
    p = _distributions(probabilities, "probabilities")
    noisy, n = _copy_labels(labels, p.shape[1], rate)
    if len(p) != len(noisy):
        raise UserError(f"probabilities must have one row per label ({len(noisy)}), got {len(p)}")

    # What remains of a row sums to 1 − p(y|x), also where 1 − p would round to 0.
    p[np.arange(len(p)), noisy] = 0
    doubt = p.sum(axis=1)
    if n > (changeable := np.count_nonzero(doubt)):
        warnings.warn(
            f"only {changeable} of {len(noisy)} samples have p(y|x) < 1: "
            f"the other {n - changeable} of the {n} labels to change are drawn uniformly",
            FedNoRoWarning,
            stacklevel=2,
        )
    # Sorting by Exp(1)/weight gives the order of successive draws ∝ weight without
    # replacement (Efraimidis and Spirakis, 2006); the second key orders the samples of weight
    # zero, which all come last, at random.
    flip_rows = np.lexsort((rng.random(len(noisy)), _race_times(doubt, rng)))[:n]

    weights = p[flip_rows]
    weights[doubt[flip_rows] == 0] = 1
    weights[np.arange(n), noisy[flip_rows]] = 0
    noisy[flip_rows] = _draw_columns(weights, rng)
    return noisy


def symmetric(labels: IntArray, classes: int, rate: float, rng: np.random.Generator) -> IntArray:
    """Exactly round(rate·N) labels change, each to any other class with equal probability."""
    noisy, n = _copy_labels(labels, classes, rate)
    noisy[rng.choice(len(noisy), n, replace=False)] += rng.integers(1, max(classes, 2), n)
    return noisy % classes


def pair_flip(labels: IntArray, classes: int, rate: float, rng: np.random.Generator) -> IntArray:
    """Exactly round(rate·N) labels change, each to the next class, y → (y + 1) mod C."""
    noisy, n = _copy_labels(labels, classes, rate)
    noisy[rng.choice(len(noisy), n, replace=False)] += 1
    return noisy % classes


def transition(labels: IntArray, matrix: ArrayLike, rng: np.random.Generator) -> IntArray:
    """Each label y is drawn anew from row y of a C×C matrix."""
    rows = _distributions(matrix, "the transition matrix")
    if rows.shape[0] != rows.shape[1]:
        raise UserError(
            f"the transition matrix must be square, got {rows.shape[0]}×{rows.shape[1]}"
        )
    true_labels, _ = _copy_labels(labels, len(rows), rate=0)
    return _draw_columns(rows[true_labels], rng)


def read_matrix(path: str | Path) -> FloatArray:
    """A matrix from a .npy file
    or from text with columns separated by commas, semicolons or spaces.
    """
    content = read_content(path)
    try:
        if Path(path).suffix == ".npy":
            stored = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
            return np.asarray(stored, dtype=np.float64)
        lines = content.decode("utf-8-sig").replace(",", " ").replace(";", " ").splitlines()
        return np.array([line.split() for line in lines if line.strip()], dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a matrix of numbers: {error}") from None


def _distributions(values: ArrayLike, name: str) -> FloatArray:
    """A normalised float64 copy of rows that are probabilities up to rounding."""
    try:
        p = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        raise UserError(f"{name} must be a matrix of numbers with rows of equal length") from None
    if p.ndim != 2 or p.shape[1] == 0:
        raise UserError(
            f"{name} must have two dimensions and at least one column, got shape {p.shape}"
        )
    invalid_rows = ~(np.isfinite(p) & (p >= 0)).all(axis=1)
    if invalid_rows.any():
        raise UserError(
            f"{name} must be finite and >= 0, "
            f"got {p[invalid_rows.argmax()]} in row {invalid_rows.argmax()}"
        )
    total = p.sum(axis=1)
    invalid_rows = abs(total - 1) > 1e-3
    if invalid_rows.any():
        raise UserError(
            f"{name} must have rows that sum to 1, "
            f"got {total[invalid_rows.argmax()]:g} in row {invalid_rows.argmax()}"
        )
    normalised: FloatArray = p / total[:, None]
    return normalised


def _copy_labels(labels: IntArray, classes: int, rate: float) -> tuple[IntArray, int]:
    """A copy of the labels, and how many of them are to change."""
    values = np.asarray(labels)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise UserError(
            f"labels must be a vector of integers, got {values.dtype} of shape {values.shape}"
        )
    if values.size and not 0 <= values.min() <= values.max() < classes:
        raise UserError(f"labels must be in 0..{classes - 1}, got {values.min()}..{values.max()}")
    if not 0 <= rate <= 1:
        raise UserError(f"rate must be in [0, 1], got {rate}")
    n = round(rate * len(values))
    if n and classes < 2:
        raise UserError(
            f"cannot change {n} labels with one class in all; "
            "use noise none or data with two classes"
        )
    return values.astype(np.int64), n


def _race_times(weights: FloatArray, rng: np.random.Generator) -> FloatArray:
    """log(E/weight), E ~ Exp(1): the smallest is at i with probability ∝ weight_i;
    +inf where the weight is 0.
    """
    with np.errstate(divide="ignore"):
        times: FloatArray = np.log(rng.standard_exponential(weights.shape)) - np.log(weights)
    return times


def _draw_columns(weights: FloatArray, rng: np.random.Generator) -> IntArray:
    """One column of each row, with probability ∝ its weight and never one of weight zero."""
    columns: IntArray = _race_times(weights, rng).argmin(axis=1)
    return columns


def _relabel_noisy_clients(
    rate: float,
    labels: IntArray,
    parts: Sequence[IntArray],
    context: Context,
    relabel: Callable[[int, IntArray, np.random.Generator], IntArray],
    prepare: Callable[[list[int]], None] = lambda noisy_clients: None,
) -> Noise:
    """Draws round(rate·K) clients;
    `relabel` gives client k's labels anew from the true ones and its own generator.
    """
    n = round(rate * len(parts))
    if rate and not n:
        message = (
            f"noise.rate = {rate:g} of {len(parts)} clients rounds to none: no client is noisy"
        )
        warnings.warn(message, FedNoRoWarning, stacklevel=3)
    observed = np.array(labels, dtype=np.int64)
    noisy_clients = np.sort(context.rng("noise.clients").choice(len(parts), n, replace=False))
    prepare(noisy_clients.tolist())
    for k in noisy_clients.tolist():
        observed[parts[k]] = relabel(k, labels[parts[k]], context.rng("noise", k))
    rates = changed_share(observed, labels, parts)
    for k in noisy_clients[rates[noisy_clients] == 0]:
        message = (
            f"client {k} was drawn as noisy but none of its {len(parts[k])} labels changed: "
            "it counts as clean"
        )
        warnings.warn(message, FedNoRoWarning, stacklevel=3)
    return Noise(observed, rates > 0, rates)


@dataclass(frozen=True)
class Flips(Options):
    """Noisy clients with a share η_k ~ U(low, high) of wrong labels;
    subclasses say which ones and to what.
    """

    section: ClassVar[str] = "noise"
    rate: float = option(0.4, "ρ, the share of noisy clients", ge=0, le=1)
    low: float = option(0.3, "least share of wrong labels on a noisy client", ge=0, le=1)
    high: float = option(0.5, "largest share of wrong labels on a noisy client", ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise UserError(f"noise.low must be <= noise.high, got {self.low} and {self.high}")

    def _flip(
        self,
        labels: IntArray,
        parts: Sequence[IntArray],
        context: Context,
        flip: Callable[[int, IntArray, float, np.random.Generator], IntArray],
        prepare: Callable[[list[int]], None] = lambda noisy_clients: None,
    ) -> Noise:
        def relabel(k: int, y: IntArray, rng: np.random.Generator) -> IntArray:
            return flip(k, y, rng.uniform(self.low, self.high), rng)

        return _relabel_noisy_clients(self.rate, labels, parts, context, relabel, prepare)


@dataclass(frozen=True)
class HIDN(Flips):
    """Heterogeneous instance-dependent noise, Algorithm 1."""

    epochs: int = option(5, "epochs that a client's annotator is trained", ge=1)

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """See `flip_labels`."""
        probabilities: dict[int, FloatArray] = {}

        def annotate(noisy_clients: list[int]) -> None:
            probabilities.update(context.annotate({k: parts[k] for k in noisy_clients}))

        def flip(k: int, y: IntArray, eta: float, rng: np.random.Generator) -> IntArray:
            return flip_labels(y, probabilities[k], eta, rng)

        return self._flip(labels, parts, context, flip, annotate)


@dataclass(frozen=True)
class Symmetric(Flips):
    """Wrong labels spread evenly over the other classes."""

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """See `symmetric`."""
        return self._flip(
            labels,
            parts,
            context,
            lambda k, y, eta, rng: symmetric(y, len(context.classes), eta, rng),
        )


@dataclass(frozen=True)
class PairFlip(Flips):
    """Wrong labels are the next class."""

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """See `pair_flip`."""
        return self._flip(
            labels,
            parts,
            context,
            lambda k, y, eta, rng: pair_flip(y, len(context.classes), eta, rng),
        )


@dataclass(frozen=True)
class Transition(Options):
    """Class-conditional noise by a matrix, on the noisy clients."""

    section: ClassVar[str] = "noise"
    matrix: str | tuple[tuple[float, ...], ...] = option(
        help="C×C, row = true class; or a .csv, .npy or text file"
    )
    rate: float = option(0.4, "ρ, the share of noisy clients", ge=0, le=1)

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """See `NoiseModel.apply`."""
        values = read_matrix(self.matrix) if isinstance(self.matrix, (str, Path)) else self.matrix
        matrix, classes = _distributions(values, "noise.matrix"), len(context.classes)
        if matrix.shape != (classes, classes):
            raise UserError(
                f"noise.matrix must be {classes}×{classes}, "
                f"a row per class, got shape {matrix.shape}"
            )
        return _relabel_noisy_clients(
            self.rate, labels, parts, context, lambda k, y, rng: transition(y, matrix, rng)
        )
