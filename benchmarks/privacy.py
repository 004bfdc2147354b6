"""What withholding and noise do to detection: one warm-up per seed, scored
again under every protection.

python -m benchmarks.privacy [key=value …] [--seeds 10] [--first 10] [--draws 20]
                             [--epsilons 10 3 1] [--min-counts 0 3]

The warm-up is FedLA for as many rounds as FedNoRo's, which is the same training to the bit. The
alternative in the same table is ε = ∞ with nothing withheld: what FedNoRo sees by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file

import fednoro
from fednoro.core.losses import per_class_losses
from fednoro.core.metrics import detection
from fednoro.core.seeds import generator
from fednoro.core.types import BoolArray, FedNoRoWarning, FloatArray, IntArray
from fednoro.detection.mixture_detector import NoisyClientDetector
from fednoro.detection.score_privacy import noisy_class_losses, withhold
from fednoro.engine.choose import Hardware
from fednoro.experiment.config.configuration import resolve
from fednoro.methods.fednoro import FedNoRo
from fednoro.models import Packed, initialise


@dataclass(frozen=True)
class Warm:
    """One federation after the warm-up: every client's outputs on its own images."""

    seed: int
    logits: Sequence[torch.Tensor]  # K, each N_k×C
    labels: Sequence[IntArray]
    noisy: BoolArray
    detector: dict[str, Any]

    @property
    def classes(self) -> int:
        return int(self.logits[0].shape[1])


def warm_up(job: tuple[str, int, Sequence[str], str]) -> Warm:
    """Trains up to the moment of detection."""
    preset, seed, overrides, out = job
    judged = resolve(preset, ["method=fednoro", f"seed={seed}", *overrides])
    assert isinstance(judged.method, FedNoRo)
    others = [text for text in overrides if not text.startswith("method.")]
    rounds = f"train.rounds={judged.method.warmup}"
    run = fednoro.run(preset, *others, "method=fedla", rounds, f"seed={seed}", f"out={out}")
    config, federation = run.config, run.federation
    dataset = config.data.load(seed)
    inputs = config.model.inputs(dataset.images.shape[3])
    net = initialise(config.model, inputs, len(dataset.classes), seed)
    net.load_state_dict(load_file(run.folder / "model.safetensors"))
    engine = Hardware(torch.device("cpu"), "eager").engine(
        lambda: net, dataset, inputs, config.train, seed
    )
    weights = Packed(net).weights()
    assert federation.noisy is not None, "detection is measured where the truth is known"
    return Warm(
        seed,
        [engine.logits(weights, index) for index in federation.parts],
        [federation.observed[index] for index in federation.parts],
        federation.noisy,
        {
            "behaviour": judged.method.behaviour,
            "covariance": judged.method.covariance,
            "seed": seed,
        },
    )


def scores(
    warm: Warm, epsilon: float | None, min_count: int, draw: int
) -> tuple[FloatArray, FloatArray]:
    """The table that the server would see, K×C losses and counts."""
    rows = []
    for k, (logits, labels) in enumerate(zip(warm.logits, warm.labels, strict=True)):
        given = torch.from_numpy(labels)
        if epsilon is None:
            losses, counts = per_class_losses(logits, given, warm.classes)
            rows.append(withhold(losses.numpy(), counts.numpy(), min_count))
        else:
            samples = F.cross_entropy(logits.double(), given, reduction="none").numpy()
            rng = generator(warm.seed, "score.noise", draw, k)
            rows.append(noisy_class_losses(samples, labels, warm.classes, epsilon, rng, min_count))
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def judge(
    warm: Warm, epsilon: float | None, min_count: int, draw: int
) -> tuple[float, float, bool, float]:
    """Recall, precision, whether the flagged set is exact, and the share of
    held classes that were withheld.
    """
    losses, counts = scores(warm, epsilon, min_count, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        flagged = NoisyClientDetector(**warm.detector).fit(losses, counts).noisy_
    held = sum(len(np.unique(labels)) for labels in warm.labels)
    return *detection(flagged.tolist(), warm.noisy), 1 - float((counts > 0).sum()) / held


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--first", type=int, default=10, help="first seed; the bound B was chosen on seeds 0 to 5"
    )
    parser.add_argument("--draws", type=int, default=20, help="noise draws per seed")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[10, 3, 1, 0.3])
    parser.add_argument("--min-counts", type=int, nargs="+", default=[0, 3, 5, 10])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fednoro-") as out:
        jobs = [
            (options.preset, seed, options.overrides, out)
            for seed in range(options.first, options.first + options.seeds)
        ]
        with ProcessPoolExecutor(
            os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            warm = list(
                track(
                    pool.map(warm_up, jobs), "warming up", len(jobs), console=Console(stderr=True)
                )
            )
    sizes = [len(labels) / len(np.unique(labels)) for w in warm for labels in w.labels]
    what = " ".join([options.preset, *options.overrides])
    print(
        f"{what}, seeds {warm[0].seed} to {warm[-1].seed}, {options.draws} draws of noise each, "
        f"{statistics.median(sizes):.1f} images per class and client (median)\n"
    )
    print(
        "| ε | min_count | classes withheld | recall | precision | flagged set "
        "exact |\n|---|---|---|---|---|---|"
    )
    for epsilon in (None, *options.epsilons):
        for min_count in options.min_counts:
            draws = range(options.draws if epsilon is not None else 1)
            found = np.array(
                [judge(w, epsilon, min_count, draw) for w in warm for draw in draws],
                dtype=np.float64,
            )
            recall, precision, exact, withheld = np.nanmean(found, axis=0)
            shown = "∞" if epsilon is None else f"{epsilon:g}"
            shares = (
                f"{100 * withheld:.0f} % | {recall:.2f} | {precision:.2f} | {100 * exact:.0f} %"
            )
            print(f"| {shown} | {min_count} | {shares} |")


if __name__ == "__main__":
    main()
