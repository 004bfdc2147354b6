"""Mixtures from 10,000 seeds: the batched fits against a loop over scikit-learn,
in time and in what they find.

python -m benchmarks.mixture [--fits 10000] [--loop 300] [--repeat 3]

Both fit the same K×C class losses from the same seeds, on one thread, one after the other within
each repeat. The loop is timed on its first fits and scaled to all. Every fit of the loop is
compared with the batched one of its seed: the largest difference in weights, means, covariances and
lower bound, and whether the same clients are flagged.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

from benchmarks.machine import best_and_median, describe, markdown, ratio
from fednoro.core.types import FloatArray
from fednoro.detection.mixture import Covariance, Init, fit_mixtures, flagged_sets, starting_points
from fednoro.detection.mixture_detector import min_max

CLASSES = (8, 5)  # ISIC 2019 and ICH
HEADER = (
    "matrix",
    "covariance",
    "start",
    "loop, s",
    "batched, s",
    "as flagged sets, s",
    "loop / batched",
    "loop / flagged sets",
    "largest difference",
    "same clients flagged",
    "sets found",
    "commonest set, batched / loop",
)


def class_losses(clients: int, classes: int, seed: int = 0) -> FloatArray:
    """Normalised losses of clients that overlap, so that seeds disagree about whom to flag."""
    rng = np.random.default_rng([seed, classes])
    noisy = np.arange(clients) < 0.4 * clients
    losses = rng.gamma(4.0, 0.1, (clients, classes)) * np.where(
        noisy[:, None], rng.uniform(1, 2.5, classes), 1.0
    )
    return min_max(losses)


def loop(
    points: FloatArray, seeds: Sequence[int], covariance: Covariance, init: Init
) -> list[tuple[Any, FloatArray]]:
    """What one would write: a scikit-learn mixture and its labels for each seed."""
    fits = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for seed in seeds:
            mixture = GaussianMixture(
                2, covariance_type=covariance, init_params=init, random_state=seed
            )
            fits.append((mixture, mixture.fit_predict(points)))
    return fits


def row(
    points: FloatArray, covariance: Covariance, init: Init, fits: int, looped: int, repeat: int
) -> list[str]:
    """Times and agreement for one matrix, covariance and kind of starting point."""
    spent: dict[str, list[float]] = {"loop": [], "batched": [], "flagged": []}
    for _ in range(repeat):
        clock = [time.perf_counter()]
        theirs = loop(points, range(looped), covariance, init)
        clock.append(time.perf_counter())
        ours = fit_mixtures(points, starting_points(points, range(fits), init), covariance)
        clock.append(time.perf_counter())
        flags = flagged_sets(points, fits, covariance, init)
        clock.append(time.perf_counter())
        for name, took in zip(spent, np.diff(clock), strict=True):
            spent[name].append(float(took) * (fits / looped if name == "loop" else 1))

    apart, their_flags = 0.0, []
    for s, (mixture, labels) in enumerate(theirs):
        pairs = (
            (mixture.weights_, ours.weights[s]),
            (mixture.means_, ours.means[s]),
            (mixture.covariances_, ours.covariances[s]),
            (mixture.lower_bound_, ours.lower_bound[s]),
        )
        apart = max(apart, *(float(np.abs(a - b).max()) for a, b in pairs))
        their_flags.append(labels == np.linalg.norm(mixture.means_, axis=1).argmax())
    same = (np.array(their_flags) == flags[:looped]).all(axis=1).mean()
    sets, which = np.unique(np.concatenate([flags, their_flags]), axis=0, return_inverse=True)
    which = which.reshape(-1)
    commonest = np.bincount(which[:fits]).argmax()
    often = " / ".join(
        f"{100 * (part == commonest).mean():.1f} %" for part in (which[:fits], which[fits:])
    )
    return [
        f"{points.shape[0]}×{points.shape[1]}", covariance, init,
        *(best_and_median(times, 2) for times in spent.values()),
        ratio(spent["loop"], spent["batched"]), ratio(spent["loop"], spent["flagged"]),
        f"{apart:.0e}", f"{100 * same:.1f} %", f"{len(sets)}", often,
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fits", type=int, default=10_000)
    parser.add_argument("--loop", type=int, default=300, help="fits that scikit-learn is timed on")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    looped = min(options.loop, options.fits)
    with threadpool_limits(1):
        rows = [
            row(
                class_losses(options.clients, classes),
                covariance,
                init,
                options.fits,
                looped,
                options.repeat,
            )
            for classes in CLASSES
            for covariance in get_args(Covariance)
            for init in get_args(Init)
        ]
    print(
        f"{options.fits:,} fits; scikit-learn's loop timed on {looped} of them, "
        f"times {options.fits / looped:g}."
    )
    print(
        "Batched: draws, starting points, every fit. As flagged sets: equal "
        "starting points are fitted once."
    )
    print(
        "Commonest set: how often seeds flag it, over all batched "
        "fits and over those of the loop.\n"
    )
    print(markdown(HEADER, rows))
    print(
        f"\n{describe(torch.device('cpu'))} All on one thread. Best (median) of {options.repeat}."
    )


if __name__ == "__main__":
    main()
