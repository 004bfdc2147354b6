"""What a site may hold back, or blur, when it sends its losses per class to be judged.

A site with n_c samples of class c has per-sample losses l_1 … l_{n_c}. By default
it sends their mean and n_c.

Withholding. A class with n_c < `min_count` is sent as missing: loss NaN, count 0. The detector
fills it in as it does with a class that the site does not hold.

Noise. With `epsilon`, each loss is clipped to [0, B], B = ln C (the loss of a uniform guess; NaN
and inf count as B), and the site sends, for each class that it does not withhold,

    clip(mean + Laplace(B / (n_c ε)), 0, B)

with a count of 1 in place of n_c. *Neighbours* are two data sets of which one has one sample
replaced by another of the same class. That moves one class mean by at most B / n_c and
touches no other class, so the whole message is ε-differentially private: over the C classes
it stays ε (parallel composition), over k scorings it is k·ε. Clipping the result is
post-processing and costs nothing.

Not covered: which classes reach `min_count` (so neither labels nor the presence of a class), the
site's size, and above all the model weights, which are sent as they are. The noise is
floating-point Laplace noise without protection against attacks on its last bits.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from fednoro.core.options import Options, option
from fednoro.core.seeds import generator
from fednoro.core.types import FloatArray, IntArray, Task, UserError

NOISE_SEED = "score_seed"  # in a scoring task's settings: what the noise is drawn from

MethodT = TypeVar("MethodT")


@dataclass(frozen=True)
class Protection(Options):
    """What a site asks for, whatever the server's configuration says."""

    section: ClassVar[str] = "privacy"

    min_count: int = option(0, "classes with fewer samples are sent as missing", ge=0)
    score_epsilon: float | None = option(
        None, "noise on the class losses: ε of one scoring; none: no noise", gt=0
    )


def loss_bound(classes: int) -> float:
    """B = ln C: no sample counts for more than a uniform guess."""
    return math.log(classes)


def withhold(
    losses: FloatArray, counts: FloatArray, min_count: int
) -> tuple[FloatArray, FloatArray]:
    """Losses and counts with the classes of fewer than `min_count` samples
    as missing: NaN and 0.
    """
    sendable = counts >= min_count
    return np.where(sendable, losses, np.nan), np.where(sendable, counts, 0.0)


def noisy_class_losses(
    losses: FloatArray,
    labels: IntArray,
    classes: int,
    epsilon: float,
    rng: np.random.Generator,
    min_count: int = 0,
) -> tuple[FloatArray, FloatArray]:
    """Clipped mean loss of each class with Laplace noise,
    and 1 or 0 for a class that was sent or not.

    Args:
        losses: per sample, N; anything, also NaN.
        labels: 0..C−1, N.
        classes: C.
        epsilon: of the whole message, under replacement of one sample by another of its class.
        rng: what the noise is drawn from; outside a simulation nobody else may know its seed.
        min_count: classes with fewer samples are sent as missing.
    """
    if not 0 < epsilon < math.inf:
        raise UserError(f"score_epsilon must be a number above 0, got {epsilon}")
    bound = loss_bound(classes)
    clipped = np.clip(
        np.nan_to_num(losses.astype(np.float64), nan=bound, posinf=bound, neginf=0.0), 0.0, bound
    )
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    # Drawn for every class, so that one's presence does not move another's noise.
    noise = rng.laplace(size=classes)
    sendable = counts >= max(min_count, 1)
    scale = np.divide(bound / epsilon, counts, out=np.zeros(classes), where=sendable)
    sums = np.bincount(labels, clipped, minlength=classes)
    means = np.divide(sums, counts, out=np.zeros(classes), where=sendable) + noise * scale
    return np.where(sendable, np.clip(means, 0.0, bound), np.nan), sendable.astype(np.float64)


def noise_generator(task: Task, client: int) -> np.random.Generator:
    """The generator of one client's noise in one scoring, from the seed in the task's settings."""
    if NOISE_SEED not in task.settings:
        raise UserError(
            f"task {task.name!r} has no {NOISE_SEED!r} among its settings to draw noise from"
        )
    return generator(int(task.settings[NOISE_SEED]), "score.noise", task.round, client)


def protect(method: MethodT, task: Task, protection: Protection) -> tuple[MethodT, Task]:
    """The method and the task as a site carries them out:
    the stricter of what it and the server ask for.

    The noise is drawn from the system's entropy, anew for each answer. The server knows the
    run's seed, so it could take off noise that follows from it; and the same noise in two
    answers would cancel in their difference.
    """
    if task.name not in ("score", "moments"):
        return method, task
    field_names = {item.name for item in dataclasses.fields(method)}  # type: ignore[arg-type]
    if not {"score_min_count", "score_epsilon"} <= field_names:
        if protection == Protection():
            return method, task
        raise UserError(
            "this site holds back class losses (privacy in its site.yaml), "
            f"but {type(method).__name__} cannot"
        )
    server: Any = method
    epsilons = [e for e in (protection.score_epsilon, server.score_epsilon) if e is not None]
    stricter: MethodT = replace(
        server,
        score_min_count=max(protection.min_count, server.score_min_count),
        score_epsilon=min(epsilons, default=None),
    )
    return stricter, _with_fresh_noise(task) if epsilons else task


def _with_fresh_noise(task: Task) -> Task:
    return replace(task, settings={**task.settings, NOISE_SEED: secrets.randbits(128)})
