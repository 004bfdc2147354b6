"""The audit as exchanges: train, predict, sums, joint.

    train   FedLA for a few rounds; in cross-fitting once per fold, each time anew and without the
            fold's labels
    predict each site keeps the model's outputs f, in cross-fitting for the fold's images; it sends
            its class counts
    sums    the coordinator says how frequent each class is over all sites, π: FedLA's outputs are
            for classes of equal frequency, so that p = softmax(f + log π); each site sends Σ p_j
            and its counts, and receives thresholds t_j
    joint   each site sends its C×C counts

The probabilities stay in the site's memory, where its letter is made from them. `scores` says why
the model has not memorised the labels that it judges: `early` stops before it could, `cross_fit`
never shows it those labels. `corrected` trains nothing: it takes a finished run of FedNoRo+, with
what that has made of the labels of the clients it flagged. What is most probable counts then, as
sites were not judged by the same model and cannot share thresholds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fednoro.audit.confident_learning import NEVER, SLACK, site_counts, site_joint, thresholds
from fednoro.core.options import option
from fednoro.core.seeds import generator
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    FloatArray,
    IntArray,
    Replies,
    Reply,
    Site,
    State,
    Step,
    Task,
    UserError,
)
from fednoro.methods.fedla import FedLA
from fednoro.methods.fednoro_plus import CORRECTED_FROM, SOFT
from fednoro.methods.method import advance

Scores = Literal["early", "cross_fit", "corrected"]
# What a site keeps in its memory: softmax f, softmax(f + log π), and the thresholds.
OUTPUTS, PROBABILITIES, LEVELS = "audit.outputs", "audit.probabilities", "audit.thresholds"


@dataclass(frozen=True)
class Audit(FedLA):
    """Federated confident learning;
    its state's memo ends with each site's sums, counts and joint.
    """

    scores: Literal["early", "cross_fit", "corrected"] = option(
        "early",
        "early: a model after few rounds; "
        "cross_fit: models that never saw the label; corrected: FedNoRo+'s",
    )
    warmup: int = option(10, "rounds that a model is trained before it scores", ge=1)
    folds: int = option(5, "parts of each site's images in cross-fitting", ge=2)
    run: str = option(
        "", "key of the run on Flower whose corrected labels sites take from their memory"
    )

    @property
    def models(self) -> int:
        """How many models are trained."""
        return self.folds if self.scores == "cross_fit" else 1

    @property
    def training(self) -> int:
        """Rounds of training."""
        return 0 if self.scores == "corrected" else self.models * self.warmup

    @property
    def rounds(self) -> int:
        """Rounds in all; the last one has no training and ends with the joint."""
        return self.training + 1

    def explain(self) -> str:
        """Where the probabilities come from,
        and why they can be trusted with labels that the models learn from.
        """
        rounds = "one round" if self.warmup == 1 else f"{self.warmup} rounds"
        if self.scores == "early":
            return (
                f"The labels were judged by the common model after {rounds} of training. A model "
                "learns what most images of a class have in common before it learns single wrong "
                "labels by heart, so it was stopped early."
            )
        if self.scores == "corrected":
            return (
                "At sites that the run had flagged, labels were judged by what it had corrected "
                "them to: by a model of the other sites, and by how often the site's labels differ "
                "from it. At the others they were judged by the run's last model, which has learnt "
                "from them and may know wrong ones by heart. Correction leaves what may be right "
                "as it is: at flagged sites more labels are wrong, also beyond the interval."
            )
        return (
            f"The labels were judged by {self.folds} models, each trained for {rounds} without the "
            f"labels of one in {self.folds} of every site's images, and asked about those alone. "
            "No model has seen a label that it judges."
        )

    # Coordinator

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        scored_folds = state.memo.get("scored", 0)
        if scored_folds < (1 if self.scores == "corrected" else state.round // self.warmup):
            settings = self._settings(state, scored_folds)
            return {k: Task("predict", state.round, state.model, settings) for k in clients.present}
        if state.round < self.training:
            starts_anew = state.round % self.warmup == 0
            model = state.models.get("start", state.model) if starts_anew else state.model
            settings = self._settings(state, state.round // self.warmup)
            return {k: Task("train", state.round, model, settings) for k in clients.drawn}
        if "thresholds" not in state.memo:
            prior = np.array(state.memo["prior"])
            return {
                k: Task("sums", state.round, state.model, arrays={"prior": prior})
                for k in clients.present
            }
        level = np.array(state.memo["thresholds"])
        clients_with_sums = [k for k in clients.present if str(k) in state.memo["sums"]]
        return {
            k: Task("joint", state.round, state.model, arrays={"thresholds": level})
            for k in clients_with_sums
        }

    def _settings(self, state: State, fold: int) -> dict[str, float | int | bool | str]:
        return (
            {"fold": fold, "folds": self.folds, "seed": state.seed}
            if self.scores == "cross_fit"
            else {}
        )

    def fold(self, state: State, replies: Replies) -> State:
        if replies.task == "train":
            # The model of every fold begins here.
            models = {"start": state.models.get("start", state.model)}
            return replace(super().fold(state, replies), stage="training to audit", models=models)
        if replies.task == "predict":
            counts = {
                str(reply.client): class_counts
                for reply in replies
                if (class_counts := _counts(reply)) is not None
            }
            all_counts = {
                **state.memo.get("counts", {}),
                **{k: class_counts.tolist() for k, class_counts in counts.items()},
            }
            total = (
                np.sum(list(all_counts.values()), axis=0) if all_counts else np.ones(state.classes)
            )
            prior = (total / total.sum()).tolist()
            scored_folds = state.memo.get("scored", 0) + 1
            return replace(
                state,
                memo={**state.memo, "scored": scored_folds, "counts": all_counts, "prior": prior},
                notes={},
            )
        if replies.task == "sums":
            site_sums = dict(
                filter(None, (_usable_sums(reply, state.classes) for reply in replies))
            )
            if not site_sums:
                raise UserError(
                    "the audit ends here: no site sent its sums, so there are no thresholds"
                )
            level = thresholds(
                [row["sums"] for row in site_sums.values()],
                [row["counts"] for row in site_sums.values()],
            )
            if self.scores == "corrected":
                # Models of different kinds share no threshold: the most probable class counts.
                level = np.where(level < NEVER, 2 * SLACK, NEVER)
            return replace(
                state,
                memo={**state.memo, "sums": site_sums, "thresholds": level.tolist()},
                notes={},
            )
        site_sums = state.memo["sums"]
        joints = dict(filter(None, (_usable_joint(reply, site_sums) for reply in replies)))
        return advance(
            replace(state, memo={**state.memo, "joints": joints}, stage="audit"), state.model, {}
        )

    # Site

    def rows(self, task: Task, site: Site) -> dict[str, Tensor]:
        if "fold" not in task.settings:
            return {}
        in_training = _folds(task, site) != int(task.settings["fold"])
        return {"kept": torch.from_numpy(in_training.astype(np.float32)).to(site.labels.device)}

    def loss(self, step: Step) -> Tensor:
        if "kept" not in step.rows:
            return super().loss(step)
        in_training = step.rows["kept"]
        losses = F.cross_entropy(step.net(step.x) + step.aux["log_pi"], step.y, reduction="none")
        return (losses * in_training).sum() / in_training.sum().clamp(min=1)

    def work(self, task: Task, site: Site) -> Reply:
        if task.name == "train":
            return super().work(task, site)
        if task.name == "predict":
            site.memory[OUTPUTS] = self._fill_outputs(task, site)
            return Reply(
                site.client, site.size, arrays={"counts": site.counts.double().cpu().numpy()}
            )
        if OUTPUTS not in site.memory:
            raise UserError(
                "this site was away when the models judged its labels: "
                "it can take part in the next audit"
            )
        y = site.labels.cpu().numpy()
        if task.name == "sums":
            prior = torch.from_numpy(np.array(task.arrays["prior"], dtype=np.float64))
            corrected = self.scores == "corrected" and SOFT in site.memory
            if corrected and not torch.equal(site.memory[CORRECTED_FROM].cpu(), site.labels.cpu()):
                raise UserError(
                    "labels have changed since the run: "
                    "what it corrected is not about them; use early"
                )
            likelihoods = (
                site.memory[SOFT].double().cpu() if corrected else site.memory[OUTPUTS] * prior
            )
            site.memory[PROBABILITIES] = likelihoods / likelihoods.sum(dim=1, keepdim=True)
            sums, counts = site_counts(site.memory[PROBABILITIES].numpy(), y)
            return Reply(
                site.client, site.size, arrays={"sums": sums, "counts": counts.astype(np.float64)}
            )
        p, level = (
            site.memory[PROBABILITIES].numpy(),
            np.array(task.arrays["thresholds"], dtype=np.float64),
        )
        site.memory[LEVELS] = torch.from_numpy(level)
        return Reply(
            site.client, site.size, arrays={"joint": site_joint(p, y, level).astype(np.float64)}
        )

    def _fill_outputs(self, task: Task, site: Site) -> Tensor:
        """The site's outputs with those that this model may give filled in;
        NaN where none may yet.
        """
        p = site.logits(task, task.weights).double().softmax(1).cpu()
        if "fold" not in task.settings:
            return p
        outputs = site.memory.get(OUTPUTS)
        if outputs is None or outputs.shape != p.shape:
            outputs = torch.full_like(p, torch.nan)
        unseen = torch.from_numpy(_folds(task, site) == int(task.settings["fold"]))
        return torch.where(unseen[:, None], p, outputs)


@dataclass(frozen=True)
class Answers:
    """What the coordinator has of the sites once the audit is over;
    clients without a joint are not in it.
    """

    counts: Mapping[int, IntArray]
    joints: Mapping[int, IntArray]
    thresholds: FloatArray

    @classmethod
    def of(cls, state: State) -> Answers:
        memo = state.memo
        return cls(
            counts={
                int(k): np.array(memo["sums"][k]["counts"], dtype=np.int64) for k in memo["joints"]
            },
            joints={int(k): np.array(joint, dtype=np.int64) for k, joint in memo["joints"].items()},
            thresholds=np.array(memo["thresholds"], dtype=np.float64),
        )


def folds_of(labels: IntArray, folds: int, rng: np.random.Generator) -> IntArray:
    """Each image's fold: at random, with every class spread as evenly as it can be."""
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), dtype=np.int64)
    fold[by_class] = (np.arange(len(labels)) + rng.integers(folds)) % folds
    return fold


def _folds(task: Task, site: Site) -> IntArray:
    rng = generator(int(task.settings["seed"]), "audit.folds", site.client)
    return folds_of(site.labels.cpu().numpy(), int(task.settings["folds"]), rng)


def _counts(reply: Reply) -> IntArray | None:
    """The class counts of a reply; None where they are not those of its images."""
    counts = _as_whole_numbers(reply.arrays.get("counts", np.zeros(0)))
    if counts is not None and counts.ndim == 1 and counts.sum() == reply.size:
        return counts
    message = (
        f"client {reply.client}: "
        "its counts do not add up to its images, and are not among the class frequencies"
    )
    warnings.warn(message, FedNoRoWarning, stacklevel=3)
    return None


def _usable_sums(reply: Reply, classes: int) -> tuple[str, dict[str, Any]] | None:
    sums, counts = reply.arrays["sums"], _as_whole_numbers(reply.arrays["counts"])
    if sums.shape != (classes,) or counts is None or counts.shape != (classes,):
        _warn_left_out(reply, "its sums or counts are not one number per class")
        return None
    if not (np.isfinite(sums) & (sums >= 0) & (sums <= counts + 1e-6)).all():
        _warn_left_out(reply, "its sums are not between 0 and its counts")
        return None
    return str(reply.client), {"sums": sums.tolist(), "counts": counts.tolist()}


def _usable_joint(reply: Reply, site_sums: Mapping[str, Any]) -> tuple[str, list[list[int]]] | None:
    joint, counts = (
        _as_whole_numbers(reply.arrays["joint"]),
        np.array(site_sums[str(reply.client)]["counts"]),
    )
    if (
        joint is None
        or joint.shape != (len(counts), len(counts))
        or (joint.sum(axis=1) > counts).any()
    ):
        _warn_left_out(reply, "its joint does not fit its counts")
        return None
    return str(reply.client), joint.tolist()


def _as_whole_numbers(values: FloatArray) -> IntArray | None:
    valid = np.isfinite(values).all() and (values >= 0).all() and (values == np.floor(values)).all()
    valid = valid and bool((values < 2**53).all())  # beyond that float64 has no ones
    return values.astype(np.int64) if valid else None


def _warn_left_out(reply: Reply, reason: str) -> None:
    warnings.warn(
        f"client {reply.client} is left out of the audit: {reason}", FedNoRoWarning, stacklevel=3
    )
