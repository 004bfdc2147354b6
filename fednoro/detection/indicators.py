"""Noisy-client indicators:
what a client says about its data, and the K×D matrix that a mixture splits.

Wu et al., "FedNoRo", IJCAI 2023, Table 3. All are taken on the warm-up's global
model, over client k's data:

    LID         mean over its samples of LID_i = −k / Σ_j log(d_j / d_k), its k nearest neighbours
                in softmax space
    confidence  mean softmax probability of the observed label
    loss        mean cross-entropy
    per class   mean cross-entropy of each class, with and without min-max normalisation

    row = INDICATORS["lid"].row(logits, labels, classes)   # at each client: D numbers
    features = INDICATORS["lid"].features(rows)            # at the server: K×D, larger is noisier
    flags = mixture.flagged_sets(features, seeds=10_000)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from fednoro.core.losses import per_class_losses
from fednoro.core.types import FloatArray, UserError
from fednoro.detection.mixture_detector import fill_missing, min_max

_ENTRIES = 2**22  # distances held at a time: 32 MiB


def lid(probabilities: Tensor, k: int = 20, eps: float = 1e-6) -> Tensor:
    """Local intrinsic dimensionality of each sample among the others,
    N float64 values in [0, √2 / eps].

    LID_i = −k / Σ_{j ≤ k} log(d_j / (d_k + eps)), d_1 ≤ … ≤ d_k the distances to its nearest
    neighbours, itself excluded. `eps` keeps it finite where all neighbours are equally far. With N
    ≤ k samples all N − 1 others are the neighbours; a single sample has none and its LID is NaN. A
    sample with an exact duplicate among the others (d = 0) has LID 0, the limit of the formula.
    Distances go in chunks: memory grows with N, not with N².

    Args:
        probabilities: softmax outputs of one client's samples, N×C.
        k: number of neighbours.
        eps: added to the largest distance.
    """
    x = probabilities.detach().double()
    samples = len(x)
    k = min(k, samples - 1)
    values = x.new_full((samples,), math.nan)
    if k < 1:
        return values
    rows = max(1, _ENTRIES // samples)
    for start in range(0, samples, rows):
        chunk = x[start : start + rows]
        # The expansion of |a − b|² in products would leave rounding
        # where duplicates have distance 0.
        distances = torch.cdist(chunk, x, compute_mode="donot_use_mm_for_euclid_dist")
        distances.diagonal(start).fill_(math.inf)  # itself
        nearest = distances.topk(k, dim=1, largest=False).values  # rows×k, ascending
        values[start : start + rows] = -k / (nearest / (nearest[:, -1:] + eps)).log().sum(dim=1)
    return values


def mean_lid(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean LID of a client's samples in softmax space; NaN with fewer than two."""
    return lid(torch.softmax(logits.double(), dim=1)).mean()


def confidence(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean softmax probability of the observed label; NaN without samples."""
    return torch.softmax(logits.double(), dim=1).gather(1, labels[:, None]).mean()


def mean_loss(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean cross-entropy; NaN without samples."""
    return F.cross_entropy(logits.double(), labels, reduction="none").mean()


def class_losses(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean cross-entropy of each class; NaN for classes without samples."""
    return per_class_losses(logits, labels, classes)[0]


@dataclass(frozen=True)
class Indicator:
    """One line of the first-stage ablation:
    what a client measures, and how the clients' rows become features.
    """

    title: str
    # (logits N×C, labels N, classes) → D numbers, or one
    measure: Callable[[Tensor, Tensor, int], Tensor]
    larger_is_noisier: bool = True
    normalise: bool = False

    def row(self, logits: Tensor, labels: Tensor, classes: int) -> FloatArray:
        """What one client reports, D numbers:
        NaN where it has nothing to measure, inf where its outputs are broken.
        """
        measurement = self.measure(logits, labels, classes).reshape(-1)
        if not torch.isfinite(logits).all():
            # Not NaN, which would pass for a class that the client does not hold.
            measurement = torch.full_like(measurement, math.inf)
        values: FloatArray = measurement.cpu().numpy()
        return values

    def features(self, rows: Sequence[ArrayLike] | FloatArray) -> FloatArray:
        """The K×D matrix that the mixture is fitted to, larger for noisier clients.

        Missing classes are filled with the smallest of the class, then each column is scaled to
        [0, 1] where the indicator is normalised. A client that measured nothing or whose outputs
        are broken has a row of NaN, which `mixture.flagged_sets` does not trust, and takes no
        part in filling and scaling.
        """
        table = np.array(rows, dtype=np.float64)
        if table.ndim != 2 or not table.size:
            raise UserError(
                f"rows must be K×D with at least one client and one column, got shape {table.shape}"
            )
        usable = ~np.isinf(table).any(axis=1) & ~np.isnan(table).all(axis=1)
        usable_rows = table[usable] if self.larger_is_noisier else 1 - table[usable]
        features = np.full_like(table, np.nan)
        if len(usable_rows):
            filled = fill_missing(usable_rows)
            features[usable] = min_max(filled) if self.normalise else filled
        return features


INDICATORS = {
    "lid": Indicator("LID", mean_lid),
    # 1 − confidence mirrors the points:
    # the same mixture, with the doubtful component at the larger mean
    "confidence": Indicator("Conf.", confidence, larger_is_noisier=False),
    "loss": Indicator("Loss", mean_loss),
    "per_class": Indicator("Loss, per class", class_losses),
    "per_class_norm": Indicator("Loss, per class, normalised", class_losses, normalise=True),
}
