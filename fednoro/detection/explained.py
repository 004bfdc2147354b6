"""How much of its labels a client can explain: a scale for label noise that needs no other client.

Wrong labels cannot be predicted, and cannot be learnt in a few local epochs; right ones can. In
each of the rounds before a verdict a client measures on its plain images, in eval mode, with the
model f_G that it has received and with the model f_k that it has trained from it, which share of
its labels' entropy they leave:

    b_G = CE(f_G(x) + log π_k, ȳ) / H(π_k),   b_k = CE(f_k(x) + log π_k, ȳ) / H(π_k)

1 for a model that knows the class frequencies alone. The smallest of either over the rounds count,
and what is left of both together:

    e_k = 1 − (min b_G + min b_k) / 2, at least 0        0: nothing explained, 1: every label

f_G has averaged out what one client has learnt by heart, but is spoilt by the noise of all; f_k
is less so, but knows wrong labels by heart where clients are few. Together they told noisy
clients from clean ones best.

The server sorts the e's and cuts them where two groups are likeliest (Gaussians of one variance).
The lower group is noisy if two are likelier than one and its mean is well below the upper one's,
and if either the upper group explains as much as clean labels do, or the two are far apart.
Otherwise all clients are alike, and nobody is flagged, or everybody, by the median. Everybody may
also mean that the warm-up was too short to tell; either way nobody is to be trusted more than
others. `fednoro.detection.calibrated` cuts by this alone where it has nothing better.

Measures stay in a client's memory; when it is scored, it adds a last one of the model that all are
scored with, and sends two numbers: min b_G and min b_k. They come from models that were trained on
the same images, so that no noise of a known size would hide one image. A site that protects its
scores (`fednoro.detection.score_privacy`) therefore refuses to send them, and is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednoro.core.losses import log_prior, logit_adjusted_ce
from fednoro.core.types import FloatArray, Reply, Site, State, Step, Task, Weights
from fednoro.detection.leave_one_out_heads import Scale, chance, likeliest

WATCH = "watch"  # the setting of tasks that ask for a measure
WATCHED = 5  # rounds: the smallest b of fewer still scatters
EVIDENCE = "left"  # in a client's memory: min b_G, min b_k
SENT = ("left_received", "left_own")  # the same in its reply

# Of the cut. Chosen on digits and HAM10000, and not sensitive: benchmarks/detection.py.
BELOW, FAR_BELOW = 0.72, 0.5  # the lower mean as a share of the upper one
APART = 0.05  # the two means at least
FEW, FEW_BELOW = 4, 0.6  # so few clients are not enough to tell a scatter by
# What clients with clean labels explain at least on average, where others spoil the model.
CLEAN = 0.33
ALIKE = 0.42  # what they explain where all are alike
SCATTER = 1e-4  # variance that no group is below


# Client


def left_over(logits: Tensor, labels: Tensor, log_pi: Tensor) -> Tensor:
    """b, the share of the labels' entropy that the outputs leave unexplained, in float64.

    Labels of a single class have no entropy: nothing can be told from them, and b is 0.
    """
    log_pi = log_pi.double()
    entropy = -(log_pi.exp() * log_pi.masked_fill(log_pi == -math.inf, 0.0)).sum()
    per_entropy = torch.where(entropy > 0, 1 / entropy, 0.0)
    return logit_adjusted_ce(logits.double(), labels, log_pi) * per_entropy


def fit_loss(step: Step) -> Tensor:
    """Logit-adjusted cross-entropy, FedLA's."""
    return logit_adjusted_ce(step.net(step.x), step.y, step.aux["log_pi"])


def measure(task: Task, site: Site, trained: Weights | None = None) -> Tensor:
    """What is left by the received model,
    and by the one that was `trained` from it (or is, here).
    """
    labels, log_pi = site.labels, log_prior(site.counts)
    own = site.train(task, fit_loss, {"log_pi": log_pi})[0] if trained is None else trained
    return torch.stack(
        [left_over(site.logits(task, model), labels, log_pi) for model in (task.weights, own)]
    )


def watch(task: Task, site: Site, trained: Weights | None = None) -> None:
    """Measures, and keeps the smallest of each so far; what is not a number changes nothing."""
    _keep(site, measure(task, site, trained))


def _keep(site: Site, new: Tensor) -> None:
    old = site.memory.get(EVIDENCE, torch.full_like(new, math.inf)).to(
        new.device, non_blocking=True
    )
    site.memory[EVIDENCE] = torch.where(new < old, new, old)


def score(task: Task, site: Site) -> Reply:
    """What a client says about its labels,
    from the rounds that it has watched and the model that it receives now.
    """
    if EVIDENCE not in site.memory or not site.memory[EVIDENCE].isfinite().all():
        watch(task, site)
    else:
        received = left_over(site.logits(task, task.weights), site.labels, log_prior(site.counts))
        _keep(site, torch.stack([received, torch.full_like(received, math.inf)]))
    return Reply(
        site.client, site.size, metrics=dict(zip(SENT, site.memory[EVIDENCE].tolist(), strict=True))
    )


# Server


def watching(state: State, warmup: int, rounds: int = WATCHED) -> dict[str, bool]:
    """The settings of a warm-up task: in the last `rounds` clients measure."""
    return {WATCH: True} if state.round >= warmup - rounds else {}


@dataclass(frozen=True)
class Judgement:
    """Verdicts by explained shares, or by doubts where there are some."""

    explained: FloatArray  # e, K
    noisy: tuple[bool, ...]
    posterior: FloatArray  # K, of being noisy; ½ where nothing can be told
    cut: float  # of doubts, above it clients are noisy; of explained shares, below it
    steepness: float  # of the posterior around the cut
    parted: bool  # the cut lies between two groups
    everybody: bool  # who can be told anything about is noisy
    reason: str
    error: FloatArray | None = None  # K, of the others' heads
    doubt: FloatArray | None = None  # K
    scale: Scale | None = None

    def row(self, client: int) -> dict[str, Any]:
        """What was found about the client at this place, as JSON."""
        more = {"error": self.error, "doubt": self.doubt}
        values = {name: float(array[client]) for name, array in more.items() if array is not None}
        verdict = {"noisy": self.noisy[client], "posterior": float(self.posterior[client])}
        measures = {name: None if math.isnan(value) else value for name, value in values.items()}
        return {**verdict, "explained": float(self.explained[client]), **measures}


def judge(
    evidence: Sequence[Sequence[float]],
    before: tuple[float, float] | None = None,
    alike: bool = False,
) -> Judgement:
    """Flags the clients whose explained share is below the cut,
    which is looked for unless it is given.

    A client with one class alone tells nothing, and is not flagged: e = 1.

    Args:
        evidence: per client [b of the received model, b of its own], at least one.
        before: cut and steepness of an earlier judgement, for clients that come later.
        alike: clients are known to be of one kind.
    """
    remainders = np.array(evidence, dtype=np.float64).reshape(-1, 2)
    valid = remainders.any(axis=1)
    # One client far below 0 would set the scale for all others.
    e = np.clip(1 - remainders.mean(axis=1), 0, 1)
    look = cut_beyond if alike else find_cut
    split = look(e[valid]) if before is None and valid.any() else (ALIKE, 1.0, False)
    cut, steepness, parted = split if before is None else (*before, True)
    noisy = valid & (e < cut)
    power = np.where(valid, steepness * (e - cut), 0.0)
    posterior = chance(power)
    count, of, everybody = (
        int(noisy.sum()),
        len(e),
        bool(valid.any() and noisy[valid].all()),
    )
    who = "nobody" if not count else "everybody" if everybody else f"{count} of {of} clients"
    shares = f"{e.min():.2f} to {e.max():.2f}" if of > 1 else f"{e[0]:.2f}"
    reason = f"{who} flagged: explained shares {shares}, cut at {cut:.2f}"
    if everybody:
        reason += " (or the warm-up was too short to tell)"
    return Judgement(
        e, tuple(bool(flag) for flag in noisy), posterior, cut, steepness, parted, everybody, reason
    )


def find_cut(shares: FloatArray) -> tuple[float, float, bool]:
    """Where noisy clients end, how steep the posterior is there,
    and whether it lies between two groups.

    Where all are alike it lies below all or above all of them.
    """
    x = np.sort(shares)
    # The trusted group has two members at least, except among very few.
    split = likeliest(x, range(1, len(x) if len(x) <= FEW else len(x) - 1), SCATTER)
    if split is not None:
        number, likelier, variance = split
        low, high = float(x[:number].mean()), float(x[number:].mean())
        if high - low >= APART and _two_kinds(low, high, likelier, len(x)):
            return float(x[number - 1 : number + 1].mean()), (high - low) / variance, True
    return cut_beyond(x)


def cut_beyond(shares: FloatArray) -> tuple[float, float, bool]:
    """The same where all are alike: below all or above all of them, by the median."""
    x = np.sort(shares)
    middle, variance = float(np.median(x)), float(x.var()) + SCATTER
    if middle < ALIKE:
        return max(ALIKE, float(x[-1]) + math.sqrt(SCATTER)), (ALIKE - middle) / variance, False
    return (
        min(BELOW * middle, float(x[0]) - math.sqrt(SCATTER)),
        (1 - BELOW) * middle / variance,
        False,
    )


def _two_kinds(low: float, high: float, likelier: float, clients: int) -> bool:
    """Whether groups with these means are noisy and clean clients, and not all of one kind."""
    far = low <= FAR_BELOW * high
    if high < CLEAN:  # not enough to be clean for sure
        return far and likelier >= 6
    if clients <= FEW:
        return low <= FEW_BELOW * high and likelier >= 1
    return (far and likelier >= 1) or (low <= min(BELOW * high, ALIKE) and likelier >= 3)
