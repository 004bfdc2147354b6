"""The paper's figures as data:
how the samples are spread, and how detection depends on the warm-up's length.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednoro.bench import plots
from fednoro.bench.jobs import Federate, Job, Score, federate, warm_up
from fednoro.bench.paper import Setting
from fednoro.bench.tables import DETECTION_FIGURES, Cell, Grid, Row, Table, column, load_features
from fednoro.core.types import IntArray
from fednoro.data.federation import Federation
from fednoro.detection.mixture import DetectionOverSeeds, detection_over_seeds, flagged_sets
from fednoro.methods import FedLA, FedNoRo


@dataclass(frozen=True)
class Partition(Grid):
    """Who holds how many images of each class, by the true labels and by those that were given."""

    name: str = "figure-partition"

    def federations(self) -> dict[tuple[Setting, int], Federate]:
        """The federation of each setting and seed."""
        order = self.order
        return {
            (setting, seed): federate(order.config("fedavg", setting, seed), order.out)
            for setting in self.settings
            for seed in order.seeds
        }

    def jobs(self) -> list[Job]:
        return list(self.federations().values())

    def fill(self, failures: Mapping[str, str]) -> Table:
        records: list[Mapping[str, Any]] = []
        for (setting, seed), job in self.federations().items():
            if not job.done:
                continue
            federation = Federation.load(job.path / "split.npz")
            clean = counts(federation, federation.clean)
            observed = counts(federation, federation.observed)
            records += [
                {
                    "figure": self.name,
                    "data": self.order.data,
                    **setting._asdict(),
                    "seed": seed,
                    "client": k,
                    "client_name": federation.names[k],
                    "noisy": federation.noisy is not None and bool(federation.noisy[k]),
                    "wrong": float(federation.rates[k]),
                    "class": label,
                    "true": int(clean[k, c]),
                    "observed": int(observed[k, c]),
                }
                for k in range(len(federation.parts))
                for c, label in enumerate(federation.classes)
            ]
        return Table(
            self.name, f"Data distribution of {self.order.data}.", (), (), (), (), tuple(records)
        )

    def draw(self, stem: Path) -> list[Path]:
        """A figure for each setting and seed; the first has the plain name."""
        paths: list[Path] = []
        for (setting, seed), job in self.federations().items():
            if job.done:
                federation = Federation.load(job.path / "split.npz")
                suffix = f"-{setting.slug}-seed{seed}" if len(self.federations()) > 1 else ""
                picture = plots.partition(
                    federation,
                    counts(federation, federation.clean),
                    counts(federation, federation.observed),
                )
                paths += plots.write(picture, stem.with_name(f"{stem.name}{suffix}"))
        return paths


def counts(federation: Federation, labels: IntArray) -> IntArray:
    """Images of each client and class, K×C."""
    classes = len(federation.classes)
    return np.stack(
        [np.bincount(labels[part], minlength=classes) for part in federation.parts]
    ).astype(np.int64)


@functools.cache
def _curve(path: Path, rounds: tuple[int, ...], mixture_seeds: int) -> list[DetectionOverSeeds]:
    tables = [load_features(path, "per_class_norm", number) for number in rounds]
    return [
        detection_over_seeds(flagged_sets(features, mixture_seeds), truth)
        for features, truth in tables
    ]


@dataclass(frozen=True)
class WarmUp(Grid):
    """Recall, precision and exact match after each round of one long warm-up."""

    name: str = "figure-t1"
    longest: int | None = None  # rounds; three times T1 if not given

    def scores(self) -> dict[tuple[Setting, int], Score]:
        """The scored warm-up of each setting and seed."""
        order, scores = self.order, {}
        for setting in self.settings:
            for seed in order.seeds:
                config = order.config("fednoro", setting, seed)
                longest = self.longest or min(3 * self.t1, config.train.rounds)
                warmup = warm_up(config, order.out, longest, FedLA(), keep=True)
                name, rounds = warmup.path.name, tuple(range(1, longest + 1))
                scores[setting, seed] = Score(
                    f"scores/{name}",
                    warmup.config,
                    order.out / "scores" / f"{name}.npz",
                    (warmup,),
                    rounds,
                    ("per_class_norm",),
                )
        return scores

    @property
    def t1(self) -> int:
        """The warm-up's length in FedNoRo."""
        method = self.order.config("fednoro", self.settings[0], 0).method
        assert isinstance(method, FedNoRo)
        return method.warmup

    def jobs(self) -> list[Job]:
        return list(self.scores().values())

    def curves(self) -> dict[tuple[Setting, int], list[DetectionOverSeeds]]:
        """What the mixture finds after each round."""
        finished_jobs = {key: job for key, job in self.scores().items() if job.done}
        return {
            key: _curve(job.path, job.after_rounds, self.mixture_seeds)
            for key, job in finished_jobs.items()
        }

    def fill(self, failures: Mapping[str, str]) -> Table:
        curves = self.curves()
        records = tuple(
            {
                "figure": self.name,
                "data": self.order.data,
                **setting._asdict(),
                "seed": seed,
                "warmup": t,
                "mixture_seeds": self.mixture_seeds,
                **detection._asdict(),
            }
            for (setting, seed), curve in curves.items()
            for t, detection in enumerate(curve, 1)
        )
        longest = max((len(curve) for curve in curves.values()), default=0)
        rows = []
        for t in range(1, longest + 1):
            cells = []
            for setting in self.settings:
                detections = [
                    curve[t - 1] for (other, _), curve in curves.items() if other == setting
                ]
                cells += [
                    Cell(
                        tuple(100 * detection[i] for detection in detections), len(self.order.seeds)
                    )
                    for i in range(len(DETECTION_FIGURES))
                ]
            rows.append(Row((str(t),), tuple(cells)))
        columns = tuple(
            (*column(setting), figure) for setting in self.settings for figure in DETECTION_FIGURES
        )
        caption = f"Noisy-client detection (%) on {self.order.data} after T1 rounds of warm-up."
        return Table(self.name, caption, ("T1",), columns, tuple(rows), (), records)

    def draw(self, stem: Path) -> list[Path]:
        """One figure with a panel for each setting."""
        panels = {
            column(setting): np.array(
                [curve for (other, _), curve in self.curves().items() if other == setting]
            )
            for setting in self.settings
        }
        return plots.write(plots.detection(panels, self.t1), stem) if self.curves() else []
