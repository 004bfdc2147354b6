"""FedCorr: estimate each client's noise level,
correct its labels, then train on clean clients and on all.

Xu et al., FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022.
Local training is mixup,

    x̃ = λ x_i + (1 − λ) x_j,   λ ~ Beta(1, 1),   j from the same batch
    L = λ CE(f(x̃), y_i) + (1 − λ) CE(f(x̃), y_j)

Stage 1, pre-processing, T1 iterations outside of the rounds. In each, every client is visited once,
in random order: it trains w_g on L + β μ_k ‖w − w_g‖₂, and w_g becomes its model. Then, with that
model and plain images, it computes each sample's CE, and the mean over its samples of

    LID_i = −k / Σ_j log(d_j / d_k),  d_j the distances to the k nearest neighbours in softmax space

A mixture of two Gaussians splits the clients by their LIDs so far; the component of the larger mean
is noisy. A noisy client splits its samples' losses by another: μ_k is the share outside the
component of the smaller mean (μ_k = 0 for the others), and of its N_k μ_k / 2 largest losses, those
for which w_g is sure, max p > ½, take the label argmax p for good.

Stage 2, fine-tuning, rounds 1..T2: FedAvg on the clients with μ_k ≤ 0.1. Then the others relabel
all of their samples for which w_g is sure.

Stage 3, usual training, rounds T2+1..T: FedAvg on all.

FedCorr+LA has f(x̃) + log π_k in L, with π_k of the labels as they are by then.

LIDs are averaged over a client's visits, not summed: the same split, and a client that missed a
visit does not look clean. A client that could never be judged (it was away, it failed, it has too
few images) is left out of stage 2, and keeps its labels.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.core.losses import drift, log_prior
from fednoro.core.options import option
from fednoro.core.seeds import generator
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    Replies,
    Reply,
    Site,
    State,
    Step,
    Task,
    UserError,
)
from fednoro.detection.indicators import lid
from fednoro.methods.method import Method
from fednoro.methods.relabel import largest_losses, sure_labels, upper_component

FEWEST = 5  # images for a LID: with fewer than 4 neighbours the estimate has no finite variance
UNTRUSTED = 1.0  # the noise level of a client that was flagged and did not say its own


@dataclass(frozen=True)
class FedCorr(Method):
    """Finds noisy clients by LID, corrects their labels,
    fine-tunes on clean clients, then trains on all.
    """

    draws: ClassVar[int] = 2  # λ, and the order of the images that are mixed in

    iterations: int = option(2, "visits to every client before the rounds begin (T1)", ge=1)
    finetune: int | None = option(
        None, "rounds on clean clients only (T2); default: half of train.rounds", ge=0
    )
    beta: float = option(5.0, "weight of the proximal term", ge=0)
    neighbours: int = option(20, "neighbours that a LID is estimated from (k)", ge=4)
    relabel: float = option(
        0.5, "share of the samples taken for wrong that may be relabelled in stage 1", ge=0, le=1
    )
    confidence: float = option(
        0.5, "probability that the global model must exceed to relabel a sample", ge=0, le=1
    )
    clean_level: float = option(0.1, "largest noise level of a clean client", ge=0, le=1)

    def check(self, rounds: int) -> None:
        if self.finetune is not None and self.finetune > rounds:
            raise UserError(
                f"method.finetune must be at most train.rounds ({rounds}), "
                f"got {self.finetune}: set either"
            )

    def last_of_stage_2(self, rounds: int) -> int:
        """T2."""
        return rounds // 2 if self.finetune is None else self.finetune

    # Server

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        if state.round == 0 and (tasks := self._preprocessing(state, clients)):
            return tasks
        mu, participants = self._levels(state, self.iterations), clients.drawn
        if state.round < self.last_of_stage_2(state.rounds):
            clean = sorted(k for k in clients.present if mu.get(k, UNTRUSTED) <= self.clean_level)
            if clean:
                rng = generator(state.seed, "fedcorr.clean", state.round)
                draw = rng.choice(
                    np.array(clean), min(len(clean), len(clients.drawn)), replace=False
                )
                participants = tuple(sorted(int(k) for k in draw))
        elif waiting := self._to_relabel(state, clients, mu):
            return {k: Task("relabel", state.round, state.model) for k in waiting}
        return {k: Task("train", state.round, state.model) for k in participants}

    def _preprocessing(self, state: State, clients: Clients) -> dict[int, Task]:
        """What comes next in stage 1; nothing when it is over."""
        memo = state.memo
        iteration, visited_clients = memo.get("iteration", 1), memo.get("visited", ())
        while iteration <= self.iterations:
            if unvisited := [k for k in clients.present if k not in visited_clients]:
                chance = {
                    k: generator(state.seed, "fedcorr.order", iteration, k).random()
                    for k in unvisited
                }
                k = min(unvisited, key=chance.__getitem__)
                mu = self._levels(state, iteration - 1).get(k, 0.0)
                return {
                    k: Task(
                        f"visit-{iteration}", state.round, state.model, {"mu": mu} if mu else {}
                    )
                }
            noisy = [k for k, p in _posteriors(state).items() if p > 0.5 and k in clients.present]
            if noisy and memo.get("corrected", 0) < iteration:
                return {k: Task(f"correct-{iteration}", state.round, state.model) for k in noisy}
            iteration, visited_clients = iteration + 1, ()
        return {}

    def _to_relabel(self, state: State, clients: Clients, mu: dict[int, float]) -> list[int]:
        """Noisy clients that have not relabelled yet:
        all at first, later those drawn, asked at most once a round.
        """
        last_round, relabelled_clients = (
            state.memo.get("asked_in"),
            state.memo.get("relabelled", ()),
        )
        if last_round == state.round:
            return []
        candidates = clients.present if last_round is None else clients.drawn
        return [
            k
            for k in candidates
            if mu.get(k, 0.0) > self.clean_level and k not in relabelled_clients
        ]

    def _levels(self, state: State, iteration: int) -> dict[int, float]:
        """μ_k after so many iterations, of every client that has been judged."""
        if state.memo.get("corrected", 0) == iteration:
            return {int(k): mu for k, mu in state.memo.get("mu", {}).items()}
        return dict.fromkeys(_posteriors(state), 0.0)  # nobody was noisy, so nobody was asked

    def fold(self, state: State, replies: Replies) -> State:
        kind, _, iteration = replies.task.partition("-")
        if kind == "visit":
            return _fold_visit(state, replies, int(iteration))
        if kind == "correct":
            return self._fold_corrections(state, replies, int(iteration))
        if kind == "relabel":
            relabelled_clients = {
                *state.memo.get("relabelled", ()),
                *(reply.client for reply in replies),
            }
            memo = {**state.memo, "relabelled": sorted(relabelled_clients), "asked_in": state.round}
            return replace(state, memo=memo, notes={})
        mu, stage = self._levels(state, self.iterations), "usual training"
        if state.round < self.last_of_stage_2(state.rounds):
            stage = "fine-tuning"
            if all(mu.get(k, UNTRUSTED) > self.clean_level for k in replies.asked_clients):
                warnings.warn(
                    "no clean client to fine-tune on: noisy ones take part",
                    FedNoRoWarning,
                    stacklevel=2,
                )
        memo = {
            **state.memo,
            "detection": state.memo.get("detection") or self._detection(state, mu),
        }
        return replace(super().fold(state, replies), stage=stage, memo=memo)

    def _fold_corrections(self, state: State, replies: Replies, iteration: int) -> State:
        reported_levels = {reply.client: float(reply.metrics["mu"]) for reply in replies}
        previous_levels = self._levels(state, iteration - 1)
        mu = {
            str(k): reported_levels.get(k, previous_levels.get(k) or UNTRUSTED) if p > 0.5 else 0.0
            for k, p in _posteriors(state).items()
        }
        return replace(state, memo={**state.memo, "corrected": iteration, "mu": mu}, notes={})

    def _detection(self, state: State, mu: dict[int, float]) -> dict[str, Any]:
        """Who is noisy, as the run folder keeps it."""
        rows = {
            str(k): {
                "noisy": mu.get(k, 0.0) > self.clean_level,
                "posterior": p,
                "lid": _lids(state)[k],
                "mu": mu[k],
            }
            for k, p in _posteriors(state).items()
            if k in mu
        }
        flagged = sum(row["noisy"] for row in rows.values())
        reason = f"{flagged} of {len(rows)} clients have a noise level above {self.clean_level:g}"
        return {"reason": reason, "clients": rows}

    # Client

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        if "mu" not in task.settings:
            return {}
        return {"mu": site.counts.new_full((), float(task.settings["mu"]), dtype=torch.float32)}

    def loss(self, step: Step) -> Tensor:
        lam, order = step.u[0, 0], torch.argsort(step.u[:, 1], stable=True)
        logits = step.net(lam * step.x + (1 - lam) * step.x[order])
        if "log_pi" in step.aux:
            logits = logits + step.aux["log_pi"]
        ce_i = F.cross_entropy(logits, step.y)
        ce_j = F.cross_entropy(logits, step.y[order])
        value = lam * ce_i + (1 - lam) * ce_j
        if "mu" in step.aux:
            # Unlike a square root's, the norm's gradient at w = w_g is 0.
            distance = torch.linalg.vector_norm(
                drift(step.net.parameters(), step.anchor.parameters())
            )
            value = value + self.beta * step.aux["mu"] * distance
        return value

    def work(self, task: Task, site: Site) -> Reply:
        kind = task.name.partition("-")[0]
        if kind in ("correct", "relabel"):
            return self._relabel(task, site, everything=kind == "relabel")
        reply = super().work(task, site)
        if kind != "visit" or reply.weights is None:
            return reply
        logits = site.logits(task, reply.weights).double()
        site.memory["losses"] = F.cross_entropy(logits, site.labels, reduction="none").cpu()
        if site.size < FEWEST:
            return reply
        return replace(
            reply, metrics={**reply.metrics, "lid": lid(logits.softmax(1), self.neighbours).mean()}
        )

    def _relabel(self, task: Task, site: Site, everything: bool) -> Reply:
        labels, p = site.labels.cpu(), site.logits(task, task.weights).double().softmax(1).cpu()
        metrics, candidates = dict[str, float](), None
        if not everything:
            losses = site.memory["losses"].numpy()
            wrong = int((upper_component(losses) > 0.5).sum())  # N_k μ_k
            candidates = largest_losses(losses, int(wrong * self.relabel))
            metrics["mu"] = wrong / site.size
        site.memory["labels"] = sure_labels(labels, p, self.confidence, candidates)
        changed = float((site.memory["labels"] != labels).sum())
        return Reply(site.client, site.size, metrics={**metrics, "relabelled": changed})


@dataclass(frozen=True)
class FedCorrLA(FedCorr):
    """FedCorr with logit adjustment by each client's class frequencies,
    as its labels are corrected.
    """

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        return {**super().aux(task, site), "log_pi": log_prior(site.counts)}


def _fold_visit(state: State, replies: Replies, iteration: int) -> State:
    """The visited client's model becomes the global one;
    without an answer the model stays as it is.
    """
    memo = state.memo
    visited_clients = memo["visited"] if memo.get("iteration") == iteration else []
    lids, model, notes = dict(memo.get("lids", {})), state.model, {}
    for reply in replies:
        value = float(reply.metrics.get("lid", math.nan))
        if math.isfinite(value):
            lids[str(reply.client)] = [*lids.get(str(reply.client), []), value]
        if reply.weights is not None:
            model, notes = reply.weights, {reply.client: {"weight": 1.0}}
    memo = {
        **memo,
        "iteration": iteration,
        "visited": sorted({*visited_clients, *replies.asked_clients}),
        "lids": lids,
    }
    return replace(state, model=model, memo=memo, notes=notes, stage="pre-processing")


def _lids(state: State) -> dict[int, float]:
    """The mean LID of each client's visits, in client order."""
    visits = state.memo.get("lids", {})
    return {int(k): math.fsum(visits[k]) / len(visits[k]) for k in sorted(visits, key=int)}


def _posteriors(state: State) -> dict[int, float]:
    """How probably each client that has a LID is noisy."""
    lids = _lids(state)
    return dict(zip(lids, upper_component(np.array(list(lids.values()))).tolist(), strict=True))
