"""RoFL: class centroids, shared by all clients, tell which labels to believe.

Yang et al., Robust Federated Learning with Noisy Labels, IEEE Intelligent Systems 2022.

The server keeps a centroid per class, f_G (C×d, first drawn from N(0, 1)), and sends it with w_g. A
client begins round t (from 0) with f_k = f_G, in the first round with the mean feature of each of
its labels (a class it does not hold: 0), and with pseudo-labels ŷ = argmax f(x; w_g), used from
round T_pl on; before, ŷ = y. In each batch it keeps the ⌊(1 − R_t) B⌋ samples of lowest
CE(f(x), y), where R_t rises linearly from 0 to R over the first rounds, and on those

    ỹ = argmax_c cos(f_k[c], z),  z the feature of x,   m = [ỹ = y],   target = y where m, else ŷ
    L = mean CE(f(x), target) + λ_cen(t) Σ m ‖z − f_k[y]‖² + λ_e mean H(f(x))
    λ_cen(t) = λ_cen min(1, t / T_pl)
    f̂[c] = mean z of label c,   s = cos(f_k, f̂)
    f_k ← (1 − s²) f_k + s² f̂,   unchanged for absent classes

The server takes the plain mean of the models,
and of the centroids a mean by their similarity to the last ones:

    w_g = Σ_k w_k / K,   f_G[c] ← Σ_k s_k f_k[c] / Σ_k s_k,   s_k = cos(f_G[c], f_k[c])

The published code, from which the figures in the FedNoRo paper come, detaches z: its centroid term
counts in L and trains nothing. With `features: attached` it has its gradient; the small network on
`digits`, from random weights, then stays at chance level with λ_cen = 1 and learns with 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.core.losses import one_hot
from fednoro.core.options import option
from fednoro.core.seeds import generator
from fednoro.core.types import (
    BoolArray,
    Clients,
    FloatArray,
    Replies,
    Reply,
    Site,
    State,
    Step,
    Task,
)
from fednoro.methods.method import Method

SLACK = 1e-4  # so that 0.8 of 5 is 4 in float32 as well
# Share of Σ|s_k| that Σ s_k must be: with less, opposite similarities throw the centroid far out.
LEAST = 0.1


@dataclass(frozen=True)
class RoFL(Method):
    """Keeps samples of small loss,
    and believes their labels where they agree with shared class centroids.
    """

    warmup: int = option(10, "rounds before pseudo-labels are used (T_pl)", ge=0)
    forget: float = option(0.2, "share of each batch that is left out in the end (R)", ge=0, lt=1)
    gradual: int = option(
        10, "rounds in which that share rises from 0: the last of them has all of it", ge=1
    )
    lam_cen: float = option(1.0, "weight of the distance to the centroids", ge=0)
    lam_e: float = option(0.8, "weight of the entropy", ge=0)
    features: Literal["detached", "attached"] = option(
        "detached",
        "attached: the centroid term trains the features, which the published code detaches",
    )

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        centroids = state.memo.get("centroids")  # none until anybody has answered
        arrays = {} if centroids is None else {"centroids": np.array(centroids, dtype=np.float64)}
        return {k: Task("train", state.round, state.model, arrays=arrays) for k in clients.drawn}

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        labels = site.labels
        if "centroids" in task.arrays:
            centroids = torch.from_numpy(task.arrays["centroids"]).to(torch.float32, copy=True)
            f_k = centroids.to(labels.device, non_blocking=True)
        else:
            f_k = class_means(site.features(task.weights), one_hot(labels, site.classes))
        r_t = self.forget * (min(1.0, task.round / (self.gradual - 1)) if self.gradual > 1 else 1.0)
        ramp = min(1.0, task.round / self.warmup) if self.warmup else 1.0
        return {
            "f_k": f_k,
            "keep": f_k.new_full((), 1 - r_t),
            "lam_cen": f_k.new_full((), self.lam_cen * ramp),
        }

    def rows(self, task: Task, site: Site) -> dict[str, Tensor]:
        early = task.round < self.warmup
        return {"pseudo": site.labels if early else site.logits(task, task.weights).argmax(1)}

    def loss(self, step: Step) -> Tensor:
        f_k, y = step.aux["f_k"], step.y
        net: Any = step.net
        feature: Tensor = net.features(step.x)
        logits: Tensor = net.fc(feature).to(f_k.dtype)
        z = (feature.detach() if self.features == "detached" else feature).to(f_k.dtype)
        log_p = F.log_softmax(logits, dim=1)
        mask = small_loss(F.nll_loss(log_p, y, reduction="none"), step.aux["keep"])
        with torch.no_grad():
            agree = F.cosine_similarity(z[:, None], f_k, dim=2).argmax(1) == y  # m, B
        ce = F.nll_loss(log_p, torch.where(agree, y, step.rows["pseudo"]), reduction="none")
        entropy = -(log_p.exp() * log_p).sum(1)
        cen = (z - f_k[y]).square().sum(1)
        value = (mask * (ce + self.lam_e * entropy)).sum() / mask.sum()
        value = value + step.aux["lam_cen"] * (mask * agree * cen).sum()
        with torch.no_grad():
            f_k.copy_(move_centroids(f_k, class_means(z, one_hot(y, len(f_k)) * mask[:, None])))
        return value

    def work(self, task: Task, site: Site) -> Reply:
        aux, rows = self.aux(task, site), self.rows(task, site)
        weights, loss = site.train(task, self.loss, aux, self.draws, rows=rows)
        return Reply(
            site.client,
            site.size,
            weights,
            {"loss": loss},
            {"centroids": site.to_array(aux["f_k"])},
        )

    def fold(self, state: State, replies: Replies) -> State:
        centroids: list[FloatArray] = []

        def equal_sized() -> Iterator[Reply]:
            for reply in replies:
                if reply.weights is not None:
                    centroids.append(reply.arrays["centroids"])
                yield replace(reply, size=1)

        after = super().fold(state, Replies(replies.task, replies.asked_clients, equal_sized()))
        if not centroids:
            return after
        f_k = np.stack(centroids)  # K×C×d
        if "centroids" in state.memo:
            f_g = np.array(state.memo["centroids"], dtype=np.float64)
        else:  # only now is the width known, and nobody has used them before
            f_g = generator(state.seed, "centroids").standard_normal(f_k.shape[1:])
        return replace(after, memo={**state.memo, "centroids": shared_centroids(f_g, f_k).tolist()})


def class_means(z: Tensor, members: Tensor) -> Tensor:
    """The mean of the features (B×d) of each class's members (B×C), C×d; 0 for a class without."""
    weights = members.to(z.dtype)
    with torch.autocast(z.device.type, enabled=False):
        # In bfloat16 a sum of many features would lose its digits.
        return weights.T @ z / weights.sum(0).clamp(min=1)[:, None]


def small_loss(losses: Tensor, keep: Tensor) -> Tensor:
    """1 for the ⌊keep·B⌋ samples of lowest loss, and for one at least; 0 for the others."""
    rank = losses.detach().argsort(stable=True).argsort()
    return (rank < (keep * len(losses) + SLACK).floor().clamp(min=1)).to(losses.dtype)


def move_centroids(f_k: Tensor, f_hat: Tensor) -> Tensor:
    """(1 − s²) f_k + s² f̂, C×d; without members f̂ = 0 and s = 0, so that the centroid stays."""
    s = F.cosine_similarity(f_k, f_hat, dim=1)
    # A class that nobody held before has the centroid 0, similar to nothing:
    # it takes the first features that come.
    share = torch.where((f_k == 0).all(1), 1.0, s.square())[:, None]
    return (1 - share) * f_k + share * f_hat


def shared_centroids(f_g: FloatArray, f_k: FloatArray) -> FloatArray:
    """Σ s_k f_k[c] / Σ s_k, C×d, of the clients' centroids, K×C×d;
    those that are 0 or not finite do not count.

    Where Σ s_k is below 0 or near it, the plain mean.
    """
    usable: BoolArray = np.isfinite(f_k).all(axis=2) & (f_k != 0).any(axis=2)  # K×C
    f_k = np.where(usable[:, :, None], f_k, 0.0)
    norms = np.linalg.norm(f_k, axis=2) * np.linalg.norm(f_g, axis=1)
    s = (f_k * f_g).sum(axis=2) / np.where(norms > 0, norms, 1.0)  # K×C
    trusted = (s.sum(axis=0) > 0) & (s.sum(axis=0) >= LEAST * np.abs(s).sum(axis=0))
    weights = np.where(trusted, s, usable)
    total = weights.sum(axis=0)
    total = np.where(total > 0, total, 1.0)
    mean: FloatArray = (weights[:, :, None] * f_k).sum(axis=0) / total[:, None]
    return mean
