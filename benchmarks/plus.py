"""FedNoRo+ beside FedLA and FedNoRo: who is found, and what it is worth, over shares of noisy clients and noise rates.

python -m benchmarks.plus [--preset digits] [--only detection|accuracy] [--rates 0 0.4 0.6 1] [--ranges 0.5-0.7]
                          [--first 0] [--seeds 3] [--detectors …] [--methods …] [--jobs 2] [--out DIR] [key=value …]

Detection plays the warm-up and one round more, as FedNoRo with each detector: the same training, to the bit. Accuracy
plays whole runs; without a noisy client FedLA is the bound for every other share. Finished run folders under --out are
not played again, so that a longer list goes on from a shorter one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import fednoro
from fednoro.config import resolve
from fednoro.types import FedNoRoWarning


@dataclass(frozen=True)
class Job:
    """One run."""

    preset: str
    overrides: tuple[str, ...]
    what: str  # the detector or the method
    rate: float
    range: tuple[float, float]
    seed: int
    out: str
    detection: bool

    @property
    def settings(self) -> list[str]:
        low, high = self.range
        noise = [f"noise.rate={self.rate:g}", f"noise.low={low:g}", f"noise.high={high:g}"]
        given = [*self.overrides, *noise, f"seed={self.seed}"]
        if not self.detection:
            return [f"method={self.what}", *given]
        judged = ["method=fednoro", f"method.detector={self.what}", *given]
        warmup: int = resolve(self.preset, judged).method.warmup  # type: ignore[attr-defined]
        return [*judged, f"train.rounds={warmup + 1}"]

    @property
    def folder(self) -> Path:
        parts = [self.preset, self.what, f"{self.rate:g}", *(f"{v:g}" for v in self.range), str(self.seed)]
        if self.overrides:
            parts.append(f"{zlib.crc32(repr(self.overrides).encode()):08x}")
        return Path(self.out) / ("detection" if self.detection else "accuracy") / "-".join(parts)


def play(job: Job) -> fednoro.Run:
    """The run of a job, which may have been played before."""
    torch.set_num_threads(1)
    if (job.folder / "result.json").exists():
        return fednoro.load(job.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        return fednoro.run(job.preset, *job.settings, f"out={job.folder.parent}", f"name={job.folder.name}")


def played(jobs: Sequence[Job], workers: int) -> dict[Job, fednoro.Run]:
    """All runs, several at a time."""
    console = Console(stderr=True)
    if workers == 1:
        return {job: play(job) for job in track(jobs, "running", console=console)}
    with ProcessPoolExecutor(workers) as pool:
        return dict(zip(jobs, track(pool.map(play, jobs), "running", len(jobs), console=console), strict=True))


def detection_table(runs: dict[Job, fednoro.Run]) -> Iterator[str]:
    """Per share, range and detector: how often exactly the noisy clients were flagged, recall and precision."""
    yield "| noisy clients | η | detector | exact | recall | precision | flagged (of noisy) per seed |"
    yield "|---|---|---|---|---|---|---|"
    totals: dict[str, list[bool]] = {}
    for (rate, span, what), mine in _grouped(runs).items():
        found = [_detection(run) for run in mine]
        exact = [bool(row["exact"]) for row in found]
        totals.setdefault(what, []).extend(exact)
        means = (_mean([row[key] for row in found]) for key in ("recall", "precision"))
        counts = ", ".join(f"{len(row['flagged'])} ({len(row['noisy'])})" for row in found)
        yield f"| {rate:g} | {_span(span)} | {what} | {sum(exact)} of {len(exact)} | {' | '.join(means)} | {counts} |"
    for what, exact in totals.items():
        yield f"| all | | {what} | {sum(exact)} of {len(exact)} ({sum(exact) / len(exact):.0%}) | | | |"


def accuracy_table(runs: dict[Job, fednoro.Run]) -> Iterator[str]:
    """Per share, range and method: Best and Last, and the paired difference to the first method."""
    groups = _grouped(runs)
    first = next(iter(groups))[2]
    yield f"| noisy clients | η | method | Best | Last | Best − {first} | Last − {first} | exact | s per run |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (rate, span, what), mine in groups.items():
        base = groups[rate, span, first]
        best, last = ([getattr(run, name) for run in mine] for name in ("best", "last"))
        against = [[getattr(run, name) for run in base] for name in ("best", "last")]
        paired = [
            _spread([a - b for a, b in zip(*pair, strict=True)]) for pair in ((best, against[0]), (last, against[1]))
        ]
        judged = [run.detection["exact"] for run in mine if run.detection and "exact" in run.detection]
        exact = f"{sum(judged)} of {len(judged)}" if judged else "–"
        seconds = statistics.mean(run.seconds for run in mine)
        cells = [_spread(best), _spread(last), *(["–", "–"] if what == first else paired), exact, f"{seconds:.1f}"]
        yield f"| {rate:g} | {_span(span)} | {what} | {' | '.join(cells)} |"


def _grouped(runs: dict[Job, fednoro.Run]) -> dict[tuple[float, tuple[float, float], str], list[fednoro.Run]]:
    groups: dict[tuple[float, tuple[float, float], str], list[fednoro.Run]] = {}
    for job, run in runs.items():
        groups.setdefault((job.rate, job.range, job.what), []).append(run)
    return groups


def _detection(run: fednoro.Run) -> dict[str, Any]:
    assert run.detection is not None, "every detector judges"
    return run.detection


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if value == value]  # no noisy client: recall is not defined
    return f"{statistics.mean(known):.2f}" if known else "–"


def _spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.2f} ± {100 * deviation:.2f}"


def _span(span: tuple[float, float]) -> str:
    return f"({span[0]:g}, {span[1]:g})"


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    return float(low), float(high)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--only", choices=["detection", "accuracy"])
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 0.4, 0.6, 1])
    parser.add_argument("--ranges", type=_range, nargs="+", default=[(0.5, 0.7)], help="of η, such as 0.3-0.5 0.5-0.7")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--detectors", nargs="+", default=["paper", "reference", "calibrated"])
    parser.add_argument("--methods", nargs="+", default=["fedla", "fednoro", "fednoro-plus"])
    parser.add_argument(
        "--jobs", type=int, default=1 if torch.cuda.is_available() else os.cpu_count(), help="at a time"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    out = str(options.out or tempfile.mkdtemp(prefix="fednoro-"))
    seeds = range(options.first, options.first + options.seeds)
    settings = [(rate, span) for rate in options.rates for span in (options.ranges if rate else options.ranges[:1])]
    print(f"{options.preset} {' '.join(options.overrides)}, seeds {seeds[0]} to {seeds[-1]}, BACC in %, mean ± std\n")
    for kind, things, table in (
        ("detection", options.detectors, detection_table),
        ("accuracy", options.methods, accuracy_table),
    ):
        if options.only not in (None, kind):
            continue
        jobs = [
            Job(options.preset, tuple(options.overrides), what, *setting, seed, out, kind == "detection")
            for setting in settings
            for what in things
            for seed in seeds
        ]
        print("\n".join(table(played(jobs, options.jobs))), end="\n\n", flush=True)
    print(f"run folders: {out}")


if __name__ == "__main__":
    main()
