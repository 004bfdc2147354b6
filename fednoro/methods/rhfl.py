"""RHFL without a public data set:
a noise-tolerant local loss, and models weighted by how well clients learn.

Fang and Ye, Robust Federated Learning with Noisy and Heterogeneous Clients, CVPR 2022. As in
FedNoRo's comparison, there are no public images to exchange opinions on, and the confidence in
clients weighs their models in FedAvg.

    client    SCE = α CE(f(x), y) + β RCE,   RCE = −Σ_c p_c log ȳ_c,  log 0 taken as log 1e-4
    server    L_k^t = mean SCE of client k's trained model on its own data
              F_k = (L_k^{t−1} − L_k^t) / L_k^t
              v_k = 1/(K − 1) + η F_k / Σ_j F_j
              W = softmax(v),   w_g = Σ_k N_k W_k w_k / Σ_j N_j W_j

Where losses no longer fall, some F_j are negative, Σ F_j crosses 0, and the quotient makes one
client the whole model. `guarded` divides by Σ |F_j| instead: then no client has more than
e^{2η} times another's confidence.

L_k^{t−1} is what the client's last training ended with, however many rounds ago. A client that has
not trained before has F_k = 0, so that all are equal in the first round.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from fednoro.core.aggregate import average
from fednoro.core.losses import symmetric_ce
from fednoro.core.options import option
from fednoro.core.types import FedNoRoWarning, FloatArray, Replies, Reply, Site, State, Step, Task
from fednoro.methods.method import Method, advance, nobody_answered


@dataclass(frozen=True)
class RHFL(Method):
    """Symmetric cross-entropy on every client;
    models weighted by how fast their clients' losses fall.
    """

    alpha: float = option(0.1, "weight of the cross-entropy", ge=0)
    beta: float = option(1.0, "weight of the reverse cross-entropy", ge=0)
    eta: float = option(0.5, "how much progress counts in the confidence", ge=0)
    behaviour: Literal["guarded", "paper"] = option(
        "guarded", "progress as a share of Σ|F|, or of ΣF as in the paper"
    )
    weighting: Literal["size_and_confidence", "confidence"] = option(
        "size_and_confidence", "models weighted by N_k·W_k, or by W_k alone"
    )

    def loss(self, step: Step) -> Tensor:
        return symmetric_ce(step.net(step.x), step.y, self.alpha, self.beta)

    def work(self, task: Task, site: Site) -> Reply:
        reply = super().work(task, site)
        assert reply.weights is not None
        after = symmetric_ce(
            site.logits(task, reply.weights).double(), site.labels, self.alpha, self.beta
        )
        return replace(reply, metrics={**reply.metrics, "sce": after})

    def fold(self, state: State, replies: Replies) -> State:
        answers = [(reply, reply.weights) for reply in replies if reply.weights is not None]
        if not answers:
            return nobody_answered(state)
        last_losses: dict[str, float] = state.memo.get("sce", {})
        losses = {str(reply.client): float(reply.metrics["sce"]) for reply, _ in answers}
        confidence = confidences(
            [progress(last_losses.get(k), loss) for k, loss in losses.items()],
            self.eta,
            self.behaviour,
        )
        by_size = self.weighting == "size_and_confidence"
        raw = [
            w * reply.size if by_size else w
            for (reply, _), w in zip(answers, confidence.tolist(), strict=True)
        ]
        shares = [weight / math.fsum(raw) for weight in raw]
        notes = {
            reply.client: {"weight": share, "confidence": w}
            for (reply, _), share, w in zip(answers, shares, confidence.tolist(), strict=True)
        }
        model = average(
            (weights, share) for (_, weights), share in zip(answers, shares, strict=True)
        )
        finite_losses = {k: loss for k, loss in losses.items() if math.isfinite(loss)}
        return replace(
            advance(state, model, notes),
            memo={**state.memo, "sce": {**last_losses, **finite_losses}},
        )


def progress(before: float | None, now: float) -> float:
    """F_k, the fall of a client's loss as a share of what is left; 0 where it is not known."""
    if before is None or not now > 0:
        return 0.0
    fall = (before - now) / now
    return fall if math.isfinite(fall) else 0.0


def confidences(
    falls: Sequence[float], eta: float = 0.5, behaviour: Literal["guarded", "paper"] = "guarded"
) -> FloatArray:
    """W = softmax(1/(K − 1) + η F_k / Σ_j F_j), with Σ_j |F_j| for "guarded";
    uniform where nobody made progress.
    """
    f = np.array(falls, dtype=np.float64)
    uniform = np.full(len(f), 1 / len(f))
    if not f.any():
        return uniform
    total = np.abs(f).sum() if behaviour == "guarded" else f.sum()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        v = 1 / max(len(f) - 1, 1) + eta * f / total
    if not np.isfinite(v).all():
        warnings.warn(
            "the clients' progress adds up to 0: all have the same confidence",
            FedNoRoWarning,
            stacklevel=2,
        )
        return uniform
    w = np.exp(v - v.max())
    return np.asarray(w / w.sum(), dtype=np.float64)
