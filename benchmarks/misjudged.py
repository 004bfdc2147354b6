"""What a wrong verdict costs FedNoRo+: noisy clients named right, and one or two of them wrong.

python -m benchmarks.misjudged [--preset digits] [--rates 0.4 0.6] [--seeds 0 1 2]
                               [--jobs 2] [key=value …]

The clients are drawn at random from the truth: missed ones train as clean ones do and teach the
correction, clean ones too many are left out of the purge and have their labels corrected. Last is
the mean of the last 10 rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import fednoro
from benchmarks.machine import describe, in_processes, markdown, overrides_in, spread
from fednoro.bench.jobs import begin
from fednoro.core.types import FedNoRoWarning
from fednoro.engine.choose import choose_device
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher
from fednoro.experiment.simulation import laboratory

MISTAKES = {
    "none": (0, 0),
    "one missed": (1, 0),
    "two missed": (2, 0),
    "one too many": (0, 1),
    "two too many": (0, 2),
    "one of each": (1, 1),
}


@dataclass(frozen=True)
class Federation:
    """One share of noisy clients and one seed."""

    preset: str
    overrides: tuple[str, ...]
    rate: float
    seed: int


def play(of: Federation) -> dict[str, float]:
    """Last by mistake."""
    torch.set_num_threads(1)
    settings = [*of.overrides, "method=fednoro-plus", f"noise.rate={of.rate:g}", f"seed={of.seed}"]
    with tempfile.TemporaryDirectory(prefix="fednoro-") as out, warnings.catch_warnings():
        # there would be one of each kind for every run
        warnings.simplefilter("ignore", FedNoRoWarning)
        with laboratory(resolve(of.preset, settings), Watcher()) as lab:
            truth = lab.federate(Path(out)).noisy
        assert truth is not None, "artificial noise is known"
        rng = np.random.default_rng(of.seed)
        noisy, clean = (
            [int(k) for k in rng.permutation(np.flatnonzero(truth == kind))]
            for kind in (True, False)
        )
        found = {}
        for number, (name, (missed, many)) in enumerate(MISTAKES.items()):
            told = sorted([*noisy[missed:], *clean[:many]])
            given = [f"method.noisy={told}", f"out={out}", f"name=mistake-{number}"]
            # annotators are not trained again
            folder = begin(resolve(of.preset, [*settings, *given]), Path(out))
            found[name] = fednoro.resume(folder).last
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.6])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    words, overrides = overrides_in(arguments)
    options = parser.parse_args(words)
    cells = [
        Federation(options.preset, overrides, rate, seed)
        for rate in options.rates
        for seed in options.seeds
    ]
    results = list(in_processes(play, cells, options.jobs, "federations"))
    rows = []
    for rate in options.rates:
        mine = [found for cell, found in zip(cells, results, strict=True) if cell.rate == rate]
        for name in MISTAKES:
            less = [found[name] - found["none"] for found in mine]
            rows.append(
                [f"{rate:g}", name, spread([found[name] for found in mine]), spread(less, "+")]
            )
    print(
        f"{' '.join([options.preset, *overrides])}, seeds "
        f"{', '.join(map(str, options.seeds))}, Last in %\n"
    )
    print(markdown(["ρ", "mistakes", "Last", "− none"], rows))
    print(f"\n{describe(choose_device('auto'))}")


if __name__ == "__main__":
    main()
