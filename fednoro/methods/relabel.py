"""Which of a client's labels are wrong, judged by their losses,
and what a trusted model says instead.

Xu et al., FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022. A
mixture of two Gaussians splits the losses of a client's samples: those outside the component of
the lower mean are taken for wrong.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fednoro.core.losses import one_hot
from fednoro.core.types import FloatArray
from fednoro.detection.mixture import fit_mixtures


def upper_component(values: FloatArray) -> FloatArray:
    """Each value's probability of belonging to the component with the larger mean;
    0 where there are no two groups.

    EM begins with the split in two that k-means looks for. In one dimension it is found by trying
    all, so that nothing depends on a seed.
    """
    if len(values) < 2 or not np.isfinite(values).all() or values.min() == values.max():
        return np.zeros(len(values))
    x = values.astype(np.float64) - values.mean()
    upper = x > _best_cut(np.sort(x))
    fits = fit_mixtures(x[:, None], np.stack([~upper, upper], axis=1)[None])
    posterior: FloatArray = fits.posterior[0, :, fits.means[0, :, 0].argmax()]
    return np.nan_to_num(posterior)  # a fit that broke down has found nothing


def _best_cut(ordered: FloatArray) -> float:
    """The last value of the lower group,
    where the sum of squares between the groups is largest; their mean is 0.
    """
    n = np.arange(1, len(ordered))
    between = np.cumsum(ordered)[:-1] ** 2 * (1 / n + 1 / (len(ordered) - n))
    return float(ordered[np.argmax(np.where(ordered[:-1] < ordered[1:], between, -np.inf))])


def sure_labels(
    labels: Tensor, probabilities: Tensor, confidence: float, candidates: Tensor | None = None
) -> Tensor:
    """New labels: the model's where it is surer than `confidence`,
    if asked only for the `candidates`; else as given.

    Args:
        labels: N.
        probabilities: the model's, N×C.
        confidence: what its largest probability must exceed.
        candidates: indices of the samples that may change; all if not given.
    """
    surest, predictions = probabilities.max(dim=1)
    sure = surest > confidence
    if candidates is not None:
        sure &= torch.zeros_like(sure).index_fill(0, candidates, True)
    return torch.where(sure, predictions, labels)


def largest_losses(losses: FloatArray, count: int) -> Tensor:
    """Indices of the `count` largest losses, of equal ones the first."""
    return torch.from_numpy(np.argsort(-losses, kind="stable")[:count].copy())


def soft_labels(
    probabilities: Tensor, labels: Tensor, classes: int, iterations: int, opinion: float
) -> Tensor:
    """What each image's label really is, q, N×C in float64:
    the teacher's opinion, and EM over noise transitions.

    Args:
        probabilities: the teacher's, N×C.
        labels: as given, N.
        classes: C.
        iterations: of EM.
        opinion: the teacher's share in q.
    """
    # Uniform for an image about which the teacher says nothing.
    p = torch.where(probabilities.isnan(), 1 / classes, probabilities.double())
    observed = one_hot(labels, classes).double()  # N×C
    p = p * (observed.sum(dim=0) + 0.5).sqrt()
    p = p / p.sum(dim=1, keepdim=True)
    if opinion == 1:
        return p
    prior = 2 * torch.eye(classes, dtype=p.dtype, device=p.device) + 2 / classes
    transitions = prior / prior.sum(dim=1, keepdim=True)  # T[y, ȳ]
    r = p
    for _ in range(iterations):
        r = p * (observed @ transitions.t())
        r = r / r.sum(dim=1, keepdim=True)
        counts = r.t() @ observed + prior
        transitions = counts / counts.sum(dim=1, keepdim=True)
    return opinion * p + (1 - opinion) * r
