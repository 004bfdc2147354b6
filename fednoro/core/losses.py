"""The equations of local training as pure tensor functions.

Wu et al., "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class
Imbalance and Label Noise Heterogeneity", IJCAI 2023. With client k's class frequencies
π_k and y_p = softmax(f(x) + log π_k):

    clean clients   L = CE(y_p, ȳ)
    noisy clients   L = λ·KL(y_G ‖ y_p) + (1 − λ)·CE(y_p, ȳ),   y_G = softmax(f_G(x) / T)

Nothing here reads a tensor's value on the host, so that every step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.core.types import UserError

Adjust = Literal["student", "none", "both"]


def log_prior(counts: Tensor) -> Tensor:
    """A client's log π from its class counts; −inf for the classes it does not hold."""
    return torch.log(counts / counts.sum())


def logit_adjusted_ce(logits: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """Mean cross-entropy of softmax(logits + log π);
    finite as long as every label has a non-zero prior.
    """
    return F.cross_entropy(logits + log_prior, labels)


def distill(
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    lam: float | Tensor,
    temperature: float,
    log_prior: Tensor,
    *,
    adjust: Adjust = "student",
) -> Tensor:
    """λ·KL(y_G ‖ y_p) + (1 − λ)·CE(y_p, ȳ), averaged over the batch.

    Args:
        logits: the student's outputs f(x), B×C.
        labels: observed labels ȳ, B.
        teacher_logits: the global model's outputs f_G(x), B×C; a target, so
            no gradient flows into them.
        lam: weight λ of the distillation term, a float or a 0-d tensor.
        temperature: T in y_G = softmax(f_G(x) / T).
        log_prior: log π_k with −inf for absent classes, C; the KL leaves log y_p of those out.
        adjust: where log π_k enters the KL: on the student's side, on neither, or
            on both. The CE always has it.
    """
    if adjust not in get_args(Adjust):
        raise UserError(f"adjust must be one of {', '.join(get_args(Adjust))}, got {adjust!r}")
    log_y = F.log_softmax(logits + log_prior, dim=-1)
    log_p = F.log_softmax(logits.to(log_y.dtype), dim=-1) if adjust == "none" else log_y
    teacher = teacher_logits.detach().to(log_y.dtype) / temperature
    y_g = torch.softmax(teacher + log_prior if adjust == "both" else teacher, dim=-1)
    # y_G·(−inf) would be an infinite loss, and NaN where y_G = 0; a constant has no gradient either
    kl = (torch.xlogy(y_g, y_g) - y_g * log_p.masked_fill(log_p == -math.inf, 0.0)).sum()
    kl = kl / len(log_p)
    return lam * kl + (1 - lam) * F.nll_loss(log_y, labels)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Which class each label is, N×C booleans."""
    return labels[:, None] == torch.arange(classes, device=labels.device)


def per_class_losses(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of each class (NaN where there is no sample)
    and its sample count, both float64.
    """
    losses = F.cross_entropy(logits.double(), labels, reduction="none")
    members = one_hot(labels, classes)
    counts = members.sum(dim=0, dtype=torch.float64)
    # A masked sum is deterministic on every device, and an infinite loss stays within its class.
    return torch.where(members, losses[:, None], 0.0).sum(dim=0) / counts, counts


def gaussian_ramp(
    t: float, begin: float, end: float, peak: float, start_at_zero: bool = True
) -> float:
    """λ(t) = peak·exp(−5(1 − u)²) with u = (t − begin) / (end − begin) clipped to [0, 1].

    Args:
        t: the round.
        begin: where the ramp begins (u = 0).
        end: where it reaches the peak (u = 1); with `end <= begin` it is a step at `begin`.
        peak: the largest value.
        start_at_zero: λ is exactly 0 up to `begin`, as in the paper; otherwise peak·exp(−5).
    """
    u = min(max((t - begin) / (end - begin), 0.0), 1.0) if end > begin else float(t >= begin)
    return 0.0 if start_at_zero and u == 0 else peak * math.exp(-5 * (1 - u) ** 2)


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in a precision that exponentials and logarithms can be taken in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def symmetric_ce(logits: Tensor, labels: Tensor, alpha: float = 0.1, beta: float = 1.0) -> Tensor:
    """α·CE + β·RCE (Wang et al., ICCV 2019), averaged over the batch.

    RCE = −Σ_c p_c log ȳ_c with p ≥ 1e-7 and log 0 taken as log 1e-4: a bounded
    loss, as noisy labels want it.
    """
    logits = at_least_float32(logits)
    p = torch.softmax(logits, dim=1).clamp(min=1e-7)
    # At the given label log 1 = 0.
    rce = -math.log(1e-4) * p.masked_fill(one_hot(labels, p.shape[1]), 0.0).sum(dim=1)
    return alpha * F.cross_entropy(logits, labels) + beta * rce.mean()


def sharpen(log_p: Tensor) -> Tensor:
    """The logarithm of P² / Σ P², from that of P (B×C)."""
    return F.log_softmax(2 * log_p, dim=1)


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """JS(p, q) = (KL(p ‖ m) + KL(q ‖ m)) / 2, m = (p + q) / 2,
    averaged over the batch; all entries above 0.
    """
    log_m = torch.log((p + q) / 2)
    return ((p * (torch.log(p) - log_m) + q * (torch.log(q) - log_m)) / 2).sum(dim=1).mean()


def entropy(p: Tensor) -> Tensor:
    """−Σ p log p, averaged over the batch; all entries above 0."""
    return -(p * torch.log(p)).sum(dim=1).mean()


def drift(w: Iterable[Tensor], w_g: Iterable[Tensor]) -> Tensor:
    """The vector w − w_g over the tensors of `w` that are trained;
    their counterparts come in the same order.
    """
    pairs = [(a, b.detach()) for a, b in zip(w, w_g, strict=True) if _is_trained(a)]
    # One vector: a network has many small tensors,
    # and three operations on each would outnumber its own.
    return torch.cat([a.flatten() for a, _ in pairs]) - torch.cat([b.flatten() for _, b in pairs])


def _is_trained(tensor: Tensor) -> bool:
    """Whether it has a gradient;
    inside `torch.vmap` a tensor does not say so, and only trained ones come there.
    """
    return tensor.requires_grad or torch._C._functorch.is_batchedtensor(tensor)


def squared_distance(w: Iterable[Tensor], w_g: Iterable[Tensor]) -> Tensor:
    """‖w − w_g‖² over the tensors of `w` that are trained."""
    return drift(w, w_g).square().sum()
