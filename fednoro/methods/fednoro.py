"""FedNoRo: find the noisy clients by their per-class losses, then train through them.

Wu et al., FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and Label
Noise Heterogeneity, IJCAI 2023.

Stage 1, rounds 1..T1: FedAvg with CE(f(x) + log π_k, y). Then every client scores its own data with
the global model and sends its mean loss per class, l_k^c. Missing ones are filled with min_k l^c,
each class is scaled to [0, 1], and a mixture of two Gaussians splits the clients: the component
whose mean has the smaller norm is clean, S_c, the other noisy, S_n.

Stage 2, rounds T1+1..T: clean clients as before.
Noisy ones learn from the received global model too:

    y_G = softmax(f_G(x) / 0.8),   y_p = softmax(f(x) + log π_k)
    L = λ KL(y_G ‖ y_p) + (1 − λ) CE(y_p, ȳ)
    λ(t) = λ_max exp(−5 (1 − u)²),   u = (t − T1) / (e − T1)

and the server weighs each model by its distance to the nearest clean one:

    d(k) = min_{j ∈ S_c} ‖w_k − w_j‖₂,   D(k) = d(k) / max_j d(j)
    w_g = Σ_k N_k e^{−D(k)} w_k / Σ_j N_j e^{−D(j)}

With `detector: calibrated` clients are judged by what they can explain of their labels and by what
heads that are learnt from the others say about them instead (`fednoro.detection.calibrated`), with
`detector: sketched` by heads on 64 numbers of each image, with `detector: shares` by the first
alone (`fednoro.detection.explained`). Each may flag nobody or everybody; stage 2 is the same.

The paper's ablation takes pieces of stage 2 away: `noisy_clients` says whether flagged clients
distil, train as clean ones do, or are left out (unless nobody else was drawn), `aggregation`
whether distances count or sizes alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.core.aggregate import average, distance_weights, nearest_clean
from fednoro.core.losses import (
    distill,
    gaussian_ramp,
    log_prior,
    logit_adjusted_ce,
    per_class_losses,
)
from fednoro.core.options import option
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    FloatArray,
    Replies,
    Reply,
    Site,
    State,
    Step,
    Task,
    UserError,
)
from fednoro.detection.calibrated import (
    MOMENTS,
    WIDTHS,
    add_up,
    questions,
    record,
    score,
    sum_features,
)
from fednoro.detection.explained import WATCH, watch, watching
from fednoro.detection.mixture_detector import Behaviour, NoisyClientDetector
from fednoro.detection.score_privacy import (
    NOISE_SEED,
    noise_generator,
    noisy_class_losses,
    withhold,
)
from fednoro.detection.verdicts import clients_to_score, judge, scoring_model, verdicts
from fednoro.methods.method import Method, advance, nobody_answered


@dataclass(frozen=True)
class FedNoRo(Method):
    """Finds noisy clients by per-class losses,
    distils on them, aggregates by distance to clean models.
    """

    warmup: int = option(10, "rounds before the clients are judged (T1)", ge=1)
    lam_max: float = option(
        0.8, "largest weight of distillation against the given labels", ge=0, le=1
    )
    ramp_end: int | None = option(
        None, "rounds after which that weight is reached; default: 39/90 of stage 2", ge=1
    )
    temperature: float = option(0.8, "temperature of the teacher", gt=0)
    behaviour: Literal["paper", "reference"] = option(
        "paper", "as the paper says, or as its published code does"
    )
    detector: Literal["paper", "reference", "calibrated", "sketched", "shares"] | None = option(
        None,
        "how clients are judged: by a mixture over class losses (paper, reference), by what they "
        "explain and what others' heads say (calibrated), the same with heads on 64 numbers of an "
        "image (sketched), or by what they explain (shares); default: as `behaviour`",
    )
    covariance: Literal["full", "tied", "diag", "spherical"] = option(
        "full", "shape of the mixture's components"
    )
    adjust: Literal["student", "none", "both"] = option(
        "student", "where log π_k enters the distillation term"
    )
    noisy_clients: Literal["distil", "train", "leave_out"] = option(
        "distil", "what flagged clients do in stage 2"
    )
    aggregation: Literal["distance", "size"] = option(
        "distance", "what models are weighted by in stage 2"
    )
    score_min_count: int = option(0, "clients send no loss of classes with fewer images", ge=0)
    score_epsilon: float | None = option(
        None, "noise on the class losses: ε of one scoring; default: no noise", gt=0
    )

    def check(self, rounds: int) -> None:
        if self.warmup >= rounds:
            raise UserError(
                f"method.warmup must be below train.rounds ({rounds}), "
                f"got {self.warmup}: set either"
            )
        if self.ramp_end is not None and self.ramp_end < self.warmup:
            raise UserError(
                f"method.ramp_end must be at least method.warmup ({self.warmup}), "
                f"got {self.ramp_end}"
            )
        self._refuse_to_blur()

    def _refuse_to_blur(self) -> None:
        if self._calibrated and (self.score_min_count or self.score_epsilon is not None):
            raise UserError(
                f"method.detector={self.detector} sends no class losses that score_min_count "
                "or score_epsilon could protect: set method.detector=paper, or leave these two out"
            )

    @property
    def _calibrated(self) -> bool:
        return self.detector in WIDTHS

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        if state.round < self.warmup:
            watch_settings = watching(state, self.warmup) if self._calibrated else {}
            return {
                k: Task("train", state.round, state.model, watch_settings) for k in clients.drawn
            }
        if unscored_clients := clients_to_score(state, clients):
            if self._calibrated:
                return questions(state, clients, unscored_clients, WIDTHS[str(self.detector)])
            settings = {NOISE_SEED: state.seed} if self.score_epsilon is not None else {}
            return {
                k: Task("score", state.round, scoring_model(state), settings)
                for k in unscored_clients
            }
        noisy, lam, participants = verdicts(state), self.lam(state), clients.drawn
        if self.noisy_clients == "leave_out":
            participants = tuple(k for k in participants if not noisy.get(k, True)) or participants
        distilling_clients = (
            {k for k in participants if noisy.get(k, True)}
            if self.noisy_clients == "distil"
            else set()
        )
        return {
            k: Task(
                "train", state.round, state.model, {"lam": lam} if k in distilling_clients else {}
            )
            for k in participants
        }

    def lam(self, state: State) -> float:
        """The weight of distillation in the coming round."""
        share = 39 / 90  # of stage 2: the published code's 10 to 49 of 100 rounds
        end = (
            self.warmup + round(share * (state.rounds - self.warmup))
            if self.ramp_end is None
            else self.ramp_end
        )
        return gaussian_ramp(
            state.round, self.warmup, end, self.lam_max, start_at_zero=self.behaviour == "paper"
        )

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
        return distill(
            logits, step.y, teacher, step.aux["lam"], self.temperature, log_pi, adjust=self.adjust
        )

    def work(self, task: Task, site: Site) -> Reply:
        if task.name == "train":
            reply = super().work(task, site)
            if WATCH in task.settings:
                watch(task, site, reply.weights)
            return reply
        if self._calibrated:
            self._refuse_to_blur()  # a site may have asked for it
            return sum_features(task, site) if task.name == MOMENTS else score(task, site)
        logits = site.logits(
            task, task.weights, augment=(self.detector or self.behaviour) == "reference"
        )
        losses, counts = self._scores(logits, task, site)
        return Reply(site.client, site.size, arrays={"losses": losses, "counts": counts})

    def _scores(self, logits: Tensor, task: Task, site: Site) -> tuple[FloatArray, FloatArray]:
        if self.score_epsilon is None:
            losses, counts = per_class_losses(logits, site.labels, site.classes)
            return withhold(losses.cpu().numpy(), counts.cpu().numpy(), self.score_min_count)
        samples = F.cross_entropy(logits.double(), site.labels, reduction="none").cpu().numpy()
        rng, labels = noise_generator(task, site.client), site.labels.cpu().numpy()
        return noisy_class_losses(
            samples, labels, site.classes, self.score_epsilon, rng, self.score_min_count
        )

    def fold(self, state: State, replies: Replies) -> State:
        if replies.task == MOMENTS:
            return add_up(state, replies)
        if replies.task == "score":
            if self._calibrated:
                return record(state, list(replies))
            rule: Behaviour = (
                "reference" if (self.detector or self.behaviour) == "reference" else "paper"
            )
            return judge(
                state, list(replies), NoisyClientDetector(rule, self.covariance, seed=state.seed)
            )
        if state.round < self.warmup:
            return replace(super().fold(state, replies), stage="warm-up")
        noisy, lam = verdicts(state), self.lam(state)
        # Among clean clients every distance is 0: FedAvg, to the bit, without holding all models.
        distant = self.aggregation == "distance" and any(
            noisy.get(k, True) for k in replies.asked_clients
        )
        after = (
            by_distance(state, replies, noisy, self.behaviour)
            if distant
            else super().fold(state, replies)
        )
        distils = self.noisy_clients == "distil"
        notes = {
            k: {**note, "lam": lam} if distils and noisy.get(k, True) else note
            for k, note in after.notes.items()
        }
        return replace(after, notes=notes, stage="noise-robust training")


def by_distance(
    state: State, replies: Replies, noisy: Mapping[int, bool], behaviour: Behaviour = "paper"
) -> State:
    """The state one round on, its model the average of the clients' weighted by N_k e^{−D(k)}."""
    answers = [reply for reply in replies if reply.weights is not None]
    models = [reply.weights for reply in answers if reply.weights is not None]
    if not models:
        return nobody_answered(state)
    flags = [noisy.get(reply.client, True) for reply in answers]
    if all(flags):
        warnings.warn(
            "no clean client took part: models are weighted by size", FedNoRoWarning, stacklevel=2
        )
        distances = torch.zeros(len(answers), dtype=torch.float64)
    else:
        distances = nearest_clean(
            [model.values for model in models], flags, behaviour, models[0].segments
        )
    shares = distance_weights(distances, [reply.size for reply in answers])
    notes = {
        reply.client: {"weight": float(shares[i]), "distance": float(distances[i])}
        for i, reply in enumerate(answers)
    }
    return advance(state, average(zip(models, shares.tolist(), strict=True)), notes)
