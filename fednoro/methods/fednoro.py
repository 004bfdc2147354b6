"""FedNoRo: find the noisy clients by their per-class losses, then train through them.

Wu et al., FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label Noise
Heterogeneity, IJCAI 2023.

Stage 1, rounds 1..T1: FedAvg with CE(f(x) + log π_k, y). Then every client scores its own data with the
global model and sends its mean loss per class, l_k^c. Missing ones are filled with min_k l^c, each class
is scaled to [0, 1], and a mixture of two Gaussians splits the clients: the component whose mean has the
smaller norm is clean, S_c, the other noisy, S_n.

Stage 2, rounds T1+1..T: clean clients as before. Noisy ones learn from the received global model too:

    y_G = softmax(f_G(x) / 0.8),   y_p = softmax(f(x) + log π_k)
    L = λ KL(y_G ‖ y_p) + (1 − λ) CE(y_p, ȳ),   λ(t) = λ_max exp(−5 (1 − u)²),  u = (t − T1) / (e − T1)

and the server weighs each model by its distance to the nearest clean one:

    d(k) = min_{j ∈ S_c} ‖w_k − w_j‖₂,   D(k) = d(k) / max_j d(j),   w_g = Σ_k N_k e^{−D(k)} w_k / Σ_j N_j e^{−D(j)}
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fednoro.aggregate import average, distance_weights, nearest_clean
from fednoro.detect import NoisyClientDetector
from fednoro.losses import distill, gaussian_ramp, log_prior, logit_adjusted_ce, per_class_losses
from fednoro.methods.fedavg import Method, advance, nobody_answered
from fednoro.options import option
from fednoro.types import Clients, FedNoRoWarning, Replies, Reply, Site, State, Step, Task, UserError
from fednoro.verdicts import judge, unscored, verdicts


@dataclass(frozen=True)
class FedNoRo(Method):
    """Finds noisy clients by per-class losses, distils on them, aggregates by distance to clean models."""

    warmup: int = option(10, "rounds before the clients are judged (T1)", ge=1)
    lam_max: float = option(0.8, "largest weight of distillation against the given labels", ge=0, le=1)
    ramp_end: int | None = option(None, "rounds after which that weight is reached; default: 39/90 of stage 2", ge=1)
    temperature: float = option(0.8, "temperature of the teacher", gt=0)
    behaviour: Literal["paper", "reference"] = option("paper", "as the paper says, or as its published code does")
    covariance: Literal["full", "tied", "diag", "spherical"] = option("full", "shape of the mixture's components")
    adjust: Literal["student", "none", "both"] = option("student", "where log π_k enters the distillation term")

    def check(self, rounds: int) -> None:
        if self.warmup >= rounds:
            raise UserError(f"method.warmup must be below train.rounds ({rounds}), got {self.warmup}: set either")
        if self.ramp_end is not None and self.ramp_end < self.warmup:
            raise UserError(f"method.ramp_end must be at least method.warmup ({self.warmup}), got {self.ramp_end}")

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        if state.round < self.warmup:
            return {k: Task("train", state.round, state.model) for k in clients.drawn}
        if unknown := unscored(state, clients):
            return {k: Task("score", state.round, state.model) for k in unknown}
        noisy, lam = verdicts(state), self.lam(state)
        return {
            k: Task("train", state.round, state.model, {"lam": lam} if noisy.get(k, True) else {})
            for k in clients.drawn
        }

    def lam(self, state: State) -> float:
        """The weight of distillation in the coming round."""
        share = 39 / 90  # of stage 2: the published code's 10 to 49 of 100 rounds
        end = self.warmup + round(share * (state.rounds - self.warmup)) if self.ramp_end is None else self.ramp_end
        return gaussian_ramp(state.round, self.warmup, end, self.lam_max, start_at_zero=self.behaviour == "paper")

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        log_pi = log_prior(site.counts)
        if "lam" not in task.settings:
            return {"log_pi": log_pi}
        return {"log_pi": log_pi, "lam": log_pi.new_full((), float(task.settings["lam"]))}

    def loss(self, step: Step) -> Tensor:
        logits, log_pi = step.net(step.x), step.aux["log_pi"]
        if "lam" not in step.aux:
            return logit_adjusted_ce(logits, step.y, log_pi)
        with torch.no_grad():
            teacher = step.anchor(step.x)
        return distill(logits, step.y, teacher, step.aux["lam"], self.temperature, log_pi, adjust=self.adjust)

    def work(self, task: Task, site: Site) -> Reply:
        if task.name != "score":
            return super().work(task, site)
        logits = site.logits(task, task.weights, augment=self.behaviour == "reference")
        losses, counts = per_class_losses(logits, site.labels, site.classes)
        return Reply(site.client, site.size, arrays={"losses": losses.cpu().numpy(), "counts": counts.cpu().numpy()})

    def fold(self, state: State, replies: Replies) -> State:
        if replies.task == "score":
            detector = NoisyClientDetector(self.behaviour, self.covariance, seed=state.seed)
            return judge(state, list(replies), detector)
        if state.round < self.warmup:
            return replace(super().fold(state, replies), stage="warm-up")
        noisy = verdicts(state)
        # Among clean clients every distance is 0: FedAvg, to the bit, without holding all models.
        fold = self._aggregate if any(noisy.get(k, True) for k in replies.asked) else super().fold
        return replace(fold(state, replies), stage="noise-robust training")

    def _aggregate(self, state: State, replies: Replies) -> State:
        kept = [reply for reply in replies if reply.weights is not None]
        models = [reply.weights for reply in kept if reply.weights is not None]
        if not models:
            return nobody_answered(state)
        noisy, sizes = verdicts(state), [reply.size for reply in kept]
        flags = [noisy.get(reply.client, True) for reply in kept]
        if all(flags):
            warnings.warn("no clean client took part: models are weighted by size", FedNoRoWarning, stacklevel=2)
            distances = torch.zeros(len(kept), dtype=torch.float64)
        else:
            vectors = [model.values for model in models]
            distances = nearest_clean(vectors, flags, self.behaviour, models[0].segments)
        shares = distance_weights(distances, sizes)
        lam, notes = self.lam(state), {}
        for i, reply in enumerate(kept):
            note = {"weight": float(shares[i]), "distance": float(distances[i])}
            notes[reply.client] = {**note, "lam": lam} if flags[i] else note
        return advance(state, average(zip(models, shares.tolist(), strict=True)), notes)
