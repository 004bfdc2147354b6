"""The default experiment for every method over several seeds: what README.md shows.

python -m benchmarks.digits [--seeds 5] [--methods fedavg fedla fednoro]
                            [--figure FILE] [key=value …]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import fednoro
from fednoro.detection.mixture_detector import fill_missing, min_max


def _one(job: tuple[str, int, Sequence[str], str]) -> fednoro.Run:
    method, seed, overrides, out = job
    return fednoro.run("digits", f"method={method}", f"seed={seed}", f"out={out}", *overrides)


def _spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.2f} ± {100 * deviation:.2f}"


def main() -> None:
    """Prints a Markdown table and leaves the run folders under --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedla", "fednoro"])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--figure",
        type=Path,
        default=None,
        help="also draw curves and class losses (extra: report)",
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.figure:
        import matplotlib  # before the runs, not after them

        matplotlib.use("Agg")
    out = str(options.out or tempfile.mkdtemp(prefix="fednoro-"))
    jobs = [(m, s, options.overrides, out) for m in options.methods for s in range(options.seeds)]
    # One thread each: as many runs as cores are already at work.
    with ProcessPoolExecutor(
        os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        runs = list(track(pool.map(_one, jobs), "running", len(jobs), console=Console(stderr=True)))
    print(
        f"digits preset {' '.join(options.overrides)}, seeds 0 to "
        f"{options.seeds - 1}, BACC in %, mean ± std\n"
    )
    print("| method | Best | Last | flagged set exact | s per run |\n|---|---|---|---|---|")
    for method in options.methods:
        mine = [run for run, job in zip(runs, jobs, strict=True) if job[0] == method]
        known = [
            run.detection["exact"] for run in mine if run.detection and "exact" in run.detection
        ]
        exact = f"{sum(known)} of {len(known)}" if known else "–"
        best, last = _spread([run.best for run in mine]), _spread([run.last for run in mine])
        print(
            f"| {method} | {best} | {last} | {exact} | "
            f"{statistics.mean(run.seconds for run in mine):.1f} |"
        )
    print(f"\nrun folders: {out}")
    if options.figure:
        draw(
            {
                m: [run for run, job in zip(runs, jobs, strict=True) if job[0] == m]
                for m in options.methods
            },
            options.figure,
        )


def draw(runs: Mapping[str, Sequence[fednoro.Run]], path: Path) -> None:
    """What FedNoRo's detector saw in its first run, and every method's BACC over the rounds."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=[1, 1.25], layout="constrained"
    )
    judged = next((run for method in runs for run in runs[method] if run.detection), None)
    if judged is not None and judged.detection is not None:
        clients = sorted(
            judged.detection["clients"].items(), key=lambda item: (item[1]["noisy"], int(item[0]))
        )
        losses = np.array([row["losses"] for _, row in clients], dtype=np.float64)
        table = min_max(fill_missing(losses))
        drawn = left.imshow(
            np.where(np.isnan(losses), np.nan, table), aspect="auto", cmap="viridis"
        )
        truth = judged.detection.get("noisy", [])
        marks = [f"{'● ' if int(k) in truth else ''}{k}" for k, _ in clients]
        left.set_yticks(range(len(marks)), marks, fontsize=8)
        left.set_xticks(range(losses.shape[1]), judged.federation.classes)
        left.axhline(sum(not row["noisy"] for _, row in clients) - 0.5, color="crimson", lw=2)
        left.set(
            title="Class losses, scaled (● labels really noisy)\nflagged below the red line",
            xlabel="class",
            ylabel="client",
        )
        figure.colorbar(drawn, ax=left)
    for method, mine in runs.items():
        curves = 100 * np.array([run.bacc for run in mine])
        rounds, mean, spread = np.arange(1, curves.shape[1] + 1), curves.mean(0), curves.std(0)
        right.plot(rounds, mean, label=f"{method} ({mean[-10:].mean():.1f} in the last 10 rounds)")
        right.fill_between(rounds, mean - spread, mean + spread, alpha=0.15)
    seeds = len(next(iter(runs.values())))
    right.set(
        title=f"Balanced accuracy on clean test labels, {seeds} seeds",
        xlabel="round",
        ylabel="BACC (%)",
        ylim=(60, 100),
    )
    right.legend(loc="lower right")
    right.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
