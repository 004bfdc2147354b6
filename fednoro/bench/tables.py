"""Tables as data: which runs fill which cells, and the figures that come out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fednoro.bench import paper
from fednoro.bench.jobs import Job, Score, Train, share_warmups, train, warm_up
from fednoro.bench.paper import CLEAN, GRIDS, MILD, STRONG, Setting
from fednoro.bench.plan import Order
from fednoro.detection.indicators import INDICATORS
from fednoro.detection.mixture import detection_over_seeds, flagged_sets
from fednoro.experiment.drive import Run, load
from fednoro.methods import FedLA, FedNoRo, Method

METHODS = tuple(paper.TITLES)
# The rows of Table 4: what a row is called, whether noisy clients train, distil,
# and are weighed by distance.
STAGE_2: dict[str, tuple[str, tuple[bool, bool, bool], str, tuple[str, ...]]] = {
    "fedla": ("All clients (FedLA)", (True, False, False), "fedla", ()),
    "clean-only": (
        "Clean clients only",
        (False, False, False),
        "fednoro",
        ("method.noisy_clients=leave_out",),
    ),
    "daagg-only": ("DaAgg only", (True, False, True), "fednoro", ("method.noisy_clients=train",)),
    "kd-only": ("KD only", (True, True, False), "fednoro", ("method.aggregation=size",)),
    "fednoro": ("KD and DaAgg (FedNoRo)", (True, True, True), "fednoro", ()),
}
BEST_LAST = ("Best", "Last")
DETECTION_FIGURES = ("Re", "Pr", "MR")


@dataclass(frozen=True)
class Cell:
    """One figure in percent over the seeds, and the paper's."""

    values: tuple[float, ...] = ()
    expected: int = 1
    paper: float | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Of the sample; a single value has none."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Row:
    """One line: what it is, and a cell for each column."""

    heading: tuple[str, ...]
    cells: tuple[Cell, ...]
    group: str = ""  # lines are compared within a group: Best with Best


@dataclass(frozen=True)
class Table:
    """A table of the paper, filled."""

    name: str
    caption: str
    headings: tuple[str, ...]  # of the columns that say what a row is
    columns: tuple[tuple[str, ...], ...]  # each a heading in one or more lines
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # tidy: one for each run


@dataclass(frozen=True)
class Grid:
    """The cells of a table before they are filled."""

    order: Order
    settings: tuple[Setting, ...]
    rows: tuple[str, ...] = ()
    mixture_seeds: int = 10_000

    def jobs(self) -> list[Job]:
        """What the table needs at its end."""
        raise NotImplementedError

    def fill(self, failures: Mapping[str, str]) -> Table:
        """The table, from what is on disk."""
        raise NotImplementedError

    def draw(self, stem: Path) -> list[Path]:
        """Pictures, by names that begin with `stem`; a table has none."""
        return []


def methods_of(rows: Sequence[str], stage_2: bool) -> dict[str, tuple[str, tuple[str, ...]]]:
    """A row's method and the options that make it."""
    return {row: STAGE_2[row][2:] if stage_2 else (row, ()) for row in rows}


@dataclass(frozen=True)
class Comparison(Grid):
    """Tables 1, 2 and 4: balanced accuracy of rows × settings."""

    name: str = "table1"

    def runs(self) -> dict[tuple[str, Setting, int], Train]:
        """The run of each row, setting and seed."""
        order, runs = self.order, {}
        rows = methods_of(self.rows, self.name == "table4")
        for setting in self.settings:
            for seed in order.seeds:
                for row, (method, options) in rows.items():
                    label = row if method == row else f"fednoro-{row}"
                    runs[row, setting, seed] = train(
                        order.config(label, setting, seed, method, options), order.out
                    )
        return runs

    def jobs(self) -> list[Job]:
        runs, order = list(self.runs().values()), self.order
        warmup = order.config("fednoro", self.settings[0], 0).method
        assert isinstance(warmup, FedNoRo)
        return [*share_warmups(runs, order.out, warmup.warmup)]

    def fill(self, failures: Mapping[str, str]) -> Table:
        runs = self.runs()
        finished_runs = {key: load(job.path) for key, job in runs.items() if job.done}
        rows = [
            Row(
                (*self.heading(row), kind),
                tuple(self.cell(row, setting, kind, finished_runs) for setting in self.settings),
                kind,
            )
            for row in self.rows
            for kind in BEST_LAST
        ]
        records = [
            self.record(*key, job, finished_runs.get(key), failures) for key, job in runs.items()
        ]
        columns = tuple(map(column, self.settings))
        return Table(
            self.name, self.caption(), self.headings(), columns, tuple(rows), (), tuple(records)
        )

    def cell(
        self,
        row: str,
        setting: Setting,
        kind: str,
        finished_runs: Mapping[tuple[str, Setting, int], Run],
    ) -> Cell:
        """Best or Last of the runs there are."""
        seeds, paper_result = self.order.seeds, self.paper_result(row, setting)
        values = [
            getattr(finished_runs[row, setting, s], kind.lower())
            for s in seeds
            if (row, setting, s) in finished_runs
        ]
        paper_value = None if paper_result is None else float(getattr(paper_result, kind.lower()))
        return Cell(tuple(100 * value for value in values), len(seeds), paper_value)

    def paper_result(self, row: str, setting: Setting) -> paper.BestLast | None:
        """The paper's figures, where it has this data set and setting."""
        data = self.order.data
        if self.name != "table4":
            return paper.BACC.get(data, {}).get((row, setting))
        same_setting = paper.TABLE_4_SETTINGS.get(data) == setting
        return paper.TABLE_4[data][row] if same_setting else None

    def heading(self, row: str) -> tuple[str, ...]:
        if self.name == "table4":
            title, pieces, _, _ = STAGE_2[row]
            return (title, *("✓" if piece else "✗" for piece in pieces))
        return (paper.TITLES.get(row, row),)

    def headings(self) -> tuple[str, ...]:
        return (
            ("Row", "Noisy clients", "KD", "DaAgg", "") if self.name == "table4" else ("Method", "")
        )

    def caption(self) -> str:
        what = (
            "second-stage ablation of FedNoRo"
            if self.name == "table4"
            else "comparison under different noise rates"
        )
        return f"BACC (%) on {self.order.data}: {what}."

    def record(
        self,
        row: str,
        setting: Setting,
        seed: int,
        job: Train,
        run: Run | None,
        failures: Mapping[str, str],
    ) -> dict[str, Any]:
        """One line of the CSV."""
        facts: dict[str, Any] = {
            "table": self.name,
            "data": self.order.data,
            "row": row,
            **setting._asdict(),
            "seed": seed,
            "rounds": job.config.train.rounds,
        }
        paper_result = self.paper_result(row, setting)
        detection = (run.detection or {}) if run is not None else {}
        for key in ("best", "last", "final", "best_by_validation", "seconds"):
            facts[key] = None if run is None else getattr(run, key)
        facts |= {
            f"detection_{key}": detection.get(key) for key in ("recall", "precision", "exact")
        }
        facts |= {
            f"paper_{key}": paper_result and getattr(paper_result, key) / 100
            for key in ("best", "last")
        }
        return facts | {"folder": f"runs/{job.path.name}", "failed": failures.get(job.name)}


@dataclass(frozen=True)
class Indicators(Grid):
    """Table 3: which indicator finds the noisy clients,
    with and without logit adjustment in the warm-up.
    """

    name: str = "table3"

    def scores(self) -> dict[tuple[Setting, int, bool], Score]:
        """The scored warm-up of each setting and seed, with and without LA."""
        order, scores = self.order, {}
        for setting in self.settings:
            for seed in order.seeds:
                config = order.config("fednoro", setting, seed)
                assert isinstance(config.method, FedNoRo)
                rounds = config.method.warmup
                for adjusted, method in ((False, Method()), (True, FedLA())):
                    warmup = warm_up(config, order.out, rounds, method)
                    path = order.out / "scores" / f"{warmup.path.name}.npz"
                    scores[setting, seed, adjusted] = Score(
                        f"scores/{warmup.path.name}",
                        warmup.config,
                        path,
                        (warmup,),
                        after_rounds=(rounds,),
                    )
        return scores

    def jobs(self) -> list[Job]:
        return list(self.scores().values())

    def fill(self, failures: Mapping[str, str]) -> Table:
        records, percents = [], {}
        for (setting, seed, adjusted), job in self.scores().items():
            for name in INDICATORS:
                figures = None
                if job.done:
                    features, truth = load_features(job.path, name, job.after_rounds[-1])
                    figures = detection_over_seeds(
                        flagged_sets(features, self.mixture_seeds), truth
                    )
                    percents[setting, seed, adjusted, name] = tuple(
                        100 * value for value in figures
                    )
                facts = {
                    "table": self.name,
                    "data": self.order.data,
                    "indicator": name,
                    "la": adjusted,
                }
                facts |= {
                    **setting._asdict(),
                    "seed": seed,
                    "warmup": job.after_rounds[-1],
                    "mixture_seeds": self.mixture_seeds,
                }
                for i, key in enumerate(("recall", "precision", "match")):
                    facts[key] = None if figures is None else figures[i]
                    paper_result = self.paper_result(setting, name, adjusted)
                    facts[f"paper_{key}"] = None if paper_result is None else paper_result[i] / 100
                records.append(
                    facts
                    | {"folder": f"warmups/{job.warmup.name}", "failed": failures.get(job.name)}
                )
        rows = [
            self.row(name, adjusted, percents) for name in INDICATORS for adjusted in (False, True)
        ]
        columns = [
            (*column(setting), figure) for setting in self.settings for figure in DETECTION_FIGURES
        ]
        caption = (
            f"Noisy-client detection (%) on {self.order.data}: first-stage ablation of FedNoRo."
        )
        headings = ("Indicator", "LA", "Per class", "Norm.")
        return Table(self.name, caption, headings, tuple(columns), tuple(rows), (), tuple(records))

    def paper_result(
        self, setting: Setting, name: str, adjusted: bool
    ) -> tuple[float, float, float] | None:
        if self.order.data != "ich":
            return None
        return paper.TABLE_3.get(setting, {}).get((name, adjusted))

    def row(
        self,
        name: str,
        adjusted: bool,
        percents: Mapping[tuple[Setting, int, bool, str], tuple[float, ...]],
    ) -> Row:
        seeds, cells = self.order.seeds, []
        for setting in self.settings:
            seed_figures = [
                percents[setting, seed, adjusted, name]
                for seed in seeds
                if (setting, seed, adjusted, name) in percents
            ]
            paper_result = self.paper_result(setting, name, adjusted)
            cells += [
                Cell(
                    tuple(values[i] for values in seed_figures),
                    len(seeds),
                    None if paper_result is None else paper_result[i],
                )
                for i in range(len(DETECTION_FIGURES))
            ]
        title = INDICATORS[name].title.partition(",")[0]
        marks = (adjusted, name.startswith("per_class"), name == "per_class_norm")
        return Row((title, *("✓" if mark else "✗" for mark in marks)), tuple(cells))


def load_features(path: Path, name: str, number: int) -> tuple[Any, Any]:
    """An indicator's features, K×D, after a round, and who is noisy."""
    with np.load(path) as file:
        return INDICATORS[name].features(file[f"{name}/{number}"]), file["noisy"]


def column(setting: Setting) -> tuple[str, ...]:
    eta = f"η ∈ ({setting.low:g}, {setting.high:g})" if setting.rate else "no noise"
    return (f"ρ = {setting.rate:g}", eta)


def settings_of(
    rates: Sequence[float], ranges: Sequence[tuple[float, float]]
) -> tuple[Setting, ...]:
    """ρ × η, with one setting for ρ = 0."""
    return tuple(
        dict.fromkeys(Setting(rate, *eta) if rate else CLEAN for rate in rates for eta in ranges)
    )


def paper_grid(name: str, data: str) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """The rates and ranges that the paper has for a table;
    those of ISIC 2019 for data that it does not have.
    """
    if name == "table1":
        settings: Sequence[Setting] = GRIDS["ich"]
    elif name == "table2":
        settings = GRIDS["isic2019"]
    elif name == "table3":
        settings = tuple(paper.TABLE_3)
    elif name == "table4":
        settings = (paper.TABLE_4_SETTINGS.get(data, paper.TABLE_4_SETTINGS["isic2019"]),)
    else:
        settings = (Setting(0.4, *(MILD if data == "ich" else STRONG)),)
    rates = tuple(dict.fromkeys(setting.rate for setting in settings))
    return rates, tuple(dict.fromkeys((s.low, s.high) for s in settings if s.rate))
