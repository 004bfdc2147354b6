"""How much of its labels a client's own model can explain: a scale for label noise that needs no other client.

Wrong labels cannot be learnt in a few local epochs, right ones can. In each of the last warm-up rounds a client
measures, with the model that it has just trained, in eval mode on plain images,

    b_k = CE(f_k(x) + log π_k, ȳ) / H(π_k)

the share of its labels' entropy that is left: 1 for a model that knows the class frequencies alone. How far b falls
without anything to learn (small clients and many epochs memorise) is measured as well, with a replica that starts from
the same global model and learns a random permutation of the same labels: b⁰_k. The smallest over the rounds count:

    e_k = 1 − min b_k / min b⁰_k        0: no better than labels drawn at random, 1: every label explained

Clients are flagged whose e_k is below a cut: the middle of the widest empty interval between the e's inside a fixed
band. So the answer may be nobody or everybody. The cut stays; whoever comes later is judged by it, from one measure
with the model that the others were scored with.

Measures stay in a client's memory until it is scored. Then it sends three numbers: min b, its standard error, min b⁰.
They come from models that were trained on the same images, so that no noise of a known size would hide one image. A
site that protects its scores (`fednoro.privacy`) therefore refuses to send them, and is not judged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.losses import log_prior, logit_adjusted_ce
from fednoro.seeds import generator
from fednoro.types import FedNoRoWarning, FloatArray, Reply, Site, State, Step, Task, Weights
from fednoro.verdicts import SCORED, scoring_model

WATCH = "watch"  # the setting of tasks that ask for a measure: the run's seed
WATCHED = 5  # rounds: the smallest b of fewer still scatters
EVIDENCE = "explained"  # in a client's memory: min b, its standard error, min b⁰
SENT = ("left", "left_error", "left_replica")  # the same in its reply
BAND = (0.35, 0.50)
MEMORISED = 1e-3  # below this b⁰ even random labels are explained: nothing can be told


# Client


def left_over(logits: Tensor, labels: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """b, the share of the labels' entropy that the outputs leave unexplained, and its standard error, in float64.

    Labels of a single class have no entropy: nothing can be told from them, and both are 0.
    """
    log_pi = log_pi.double()
    entropy = -(log_pi.exp() * log_pi.masked_fill(log_pi == -math.inf, 0.0)).sum()
    losses = F.cross_entropy(logits.double() + log_pi, labels, reduction="none")
    deviation = losses.std(unbiased=False) / math.sqrt(len(labels))
    share = torch.where(entropy > 0, 1 / entropy, 0.0)
    return losses.mean() * share, deviation * share


def fit_loss(step: Step) -> Tensor:
    """Logit-adjusted cross-entropy on the labels, or on permuted ones."""
    return logit_adjusted_ce(step.net(step.x), step.rows["labels"], step.aux["log_pi"])


def measure(task: Task, site: Site, trained: Weights | None = None) -> Tensor:
    """The b of the model that was `trained` on this task (or is, here), its standard error, and b⁰ of a replica."""
    labels, log_pi = site.labels, log_prior(site.counts)

    def fitted(name: str, targets: Tensor) -> Weights:
        return site.train(replace(task, name=name), fit_loss, {"log_pi": log_pi}, rows={"labels": targets})[0]

    own = fitted(task.name, labels) if trained is None else trained
    b, error = left_over(site.logits(task, own), labels, log_pi)
    order = generator(int(task.settings[WATCH]), "replica.labels", task.round, site.client).permutation(site.size)
    # Without waiting for it: on a GPU the other clients' work is still to be queued.
    permuted = labels[torch.from_numpy(order).to(labels.device, non_blocking=True)]
    nothing, _ = left_over(site.logits(task, fitted("replica", permuted)), permuted, log_pi)
    return torch.stack([b, error, nothing])


def watch(task: Task, site: Site, trained: Weights | None = None) -> None:
    """Measures, and keeps the smallest b (with its error) and b⁰ so far; what is not a number changes nothing."""
    new = measure(task, site, trained)
    old = site.memory.get(EVIDENCE, torch.full_like(new, math.inf)).to(new.device, non_blocking=True)
    better = torch.stack([new[0] < old[0], new[0] < old[0], new[2] < old[2]])
    site.memory[EVIDENCE] = torch.where(better, new, old)


def score(task: Task, site: Site) -> Reply:
    """What a client says about its labels, from the rounds that it has watched, or else from this moment."""
    if EVIDENCE not in site.memory or not site.memory[EVIDENCE].isfinite().all():
        watch(task, site)
    return Reply(site.client, site.size, metrics=dict(zip(SENT, site.memory[EVIDENCE].tolist(), strict=True)))


# Server


def watching(state: State, warmup: int, rounds: int = WATCHED) -> dict[str, int]:
    """The settings of a warm-up task: in the last `rounds` clients measure."""
    return {WATCH: state.seed} if state.round >= warmup - rounds else {}


@dataclass(frozen=True)
class Judgement:
    """Verdicts by explained shares."""

    explained: FloatArray  # e, K
    noisy: tuple[bool, ...]
    posterior: FloatArray  # K, that e is really below the cut; ½ where nothing can be told
    cut: float
    reason: str


def judge(evidence: Sequence[Sequence[float]], cut: float | None = None, band: tuple[float, float] = BAND) -> Judgement:
    """Flags the clients whose explained share is below the cut, which is looked for unless it is given.

    A client that memorises random labels as well, or has one class alone, tells nothing, and is not flagged: e = 1.

    Args:
        evidence: per client [b, its standard error, b⁰], at least one.
        cut: of an earlier judgement, for clients that come later.
        band: where the cut may lie.
    """
    b, error, nothing = np.array(evidence, dtype=np.float64).reshape(-1, 3).T
    told = nothing > MEMORISED
    scale = np.where(told, nothing, 1.0)
    e = np.where(told, 1 - b / scale, 1.0)
    cut = widest_gap(e, *band) if cut is None else cut
    distance = np.where(told, (cut - e) / np.maximum(error / scale, 1e-12), 0.0)
    posterior = 0.5 * (1 + np.array([math.erf(d / math.sqrt(2)) for d in distance]))
    noisy = e < cut
    who = "nobody" if not noisy.any() else "everybody" if noisy.all() else f"{int(noisy.sum())} of {len(e)} clients"
    shares = f"{e.min():.2f} to {e.max():.2f}" if len(e) > 1 else f"{e[0]:.2f}"
    reason = f"{who} flagged: explained shares {shares}, cut at {cut:.2f}"
    return Judgement(e, tuple(bool(flag) for flag in noisy), posterior, float(cut), reason)


def widest_gap(values: FloatArray, low: float, high: float) -> float:
    """The middle of the widest interval inside [low, high] that holds none of the values."""
    inside = np.sort(values[(values > low) & (values < high)])
    edges = np.concatenate([[low], inside, [high]])
    widest = int(np.argmax(np.diff(edges)))
    return float(edges[widest : widest + 2].mean())


def record(state: State, scores: Sequence[Reply]) -> State:
    """Judges the clients that have answered, by the cut found before where there is one, and writes it to the memo."""
    memo = {**state.memo, "asked_in": state.round}
    usable = {str(reply.client): row for reply in scores if (row := _evidence(reply)) is not None}
    if not usable:
        message = f"round {state.round + 1}: no client could be scored, those not known are not trusted"
        warnings.warn(message, FedNoRoWarning, stacklevel=2)
        return replace(state, memo=memo, stage="detection", notes={})
    before: Mapping[str, Any] = memo.get("detection", {})
    found = judge(list(usable.values()), before.get("cut"))
    judged = {
        k: {"noisy": noisy, "posterior": float(p), "explained": float(e), **dict(zip(SENT, row, strict=True))}
        | {"round": state.round}
        for (k, row), noisy, p, e in zip(usable.items(), found.noisy, found.posterior, found.explained, strict=True)
    }
    clients = {**before.get("clients", {}), **judged}
    memo["detection"] = {"reason": before.get("reason", found.reason), "cut": found.cut, "clients": clients}
    if "detector" not in memo:
        memo["detector"] = {"trust": None if all(found.noisy) else found.cut}
    kept = {**state.kept, SCORED: scoring_model(state)}
    return replace(state, memo=memo, stage="detection", notes={}, kept=kept)


def _evidence(reply: Reply) -> list[float] | None:
    """The three numbers that a client has sent; None where they cannot be used."""
    row = [float(reply.metrics.get(name, math.nan)) for name in SENT]
    return row if all(0 <= value < math.inf for value in row) else None


def suspects(state: State, clients: Collection[int]) -> set[int]:
    """Those of `clients` that are not trusted: noisy, or not judged while others are.

    Where everybody was noisy at first, nobody is suspected more than others.
    """
    trust = state.memo.get("detector", {}).get("trust")
    if trust is None:
        return set()
    rows = state.memo["detection"]["clients"]
    return {k for k in clients if str(k) not in rows or rows[str(k)]["explained"] < trust}
