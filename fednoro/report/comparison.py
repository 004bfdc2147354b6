"""Several runs side by side: groups of seeds, their means, and differences paired by seed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fednoro.core.metrics import best_last
from fednoro.core.types import FloatArray, UserError
from fednoro.experiment.config.configuration import RUNTIME_KEYS, flatten_tree
from fednoro.experiment.run_folder.recorded_run import Recorded, read

IGNORED_KEYS = {*RUNTIME_KEYS, "seed"}  # in which runs of one group may differ
MEASURES = ("best", "last", "final")
CONFIDENCE = 0.95
LONGEST_LABEL = 80  # characters of a label


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: dict[int, Recorded]  # by seed

    def values(self, measure: str) -> dict[int, float]:
        return {seed: scores(run)[measure] for seed, run in self.runs.items()}

    @property
    def exact(self) -> tuple[int, int] | None:
        """In how many runs exactly the noisy clients were flagged,
        of how many where that can be known.
        """
        exact_verdicts = [
            run.detection["exact"]
            for run in self.runs.values()
            if run.detection and "exact" in run.detection
        ]
        return (sum(map(bool, exact_verdicts)), len(exact_verdicts)) if exact_verdicts else None


@dataclass(frozen=True)
class Difference:
    """One group minus another, seed by seed, in the measure's own unit."""

    group: str
    against: str
    measure: str
    pairs: dict[int, float]  # by seed
    mean: float
    std: float  # NaN for a single pair
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """All of it."""

    groups: tuple[Group, ...]
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]  # what was left out or not paired, and why


def scores(run: Recorded) -> dict[str, float]:
    """Best, Last and final."""
    return dict(zip(MEASURES, best_last(run.bacc), strict=True))


def compare(folders: Sequence[str | Path], against: str | None = None) -> Comparison:
    """Groups the runs and takes the differences of every group to the first,
    or to the one labelled `against`.
    """
    remarks: list[str] = []
    runs = [run for run in map(read, folders) if _is_usable(run, remarks)]
    if not runs:
        raise UserError(f"none of these runs can be compared: {'; '.join(remarks)}")
    groups = _group_runs(runs)
    labels = [group.label for group in groups]
    if against is not None and against not in labels:
        raise UserError(f"--against must be one of {', '.join(labels)}; got {against!r}")
    base = groups[0 if against is None else labels.index(against)]
    differences = [
        difference
        for group in groups
        if group is not base
        for difference in paired_differences(group, base, remarks)
    ]
    return Comparison(tuple(groups), tuple(differences), tuple(remarks))


def _is_usable(run: Recorded, remarks: list[str]) -> bool:
    why = ""
    if not run.config or not isinstance(run.config.get("seed"), int):
        why = "its configuration cannot be read"
    elif not run.rounds:
        why = "it has no finished round"
    elif len(run.rounds) < run.planned_rounds:
        why = f"it has {len(run.rounds)} of {run.planned_rounds} rounds"
    if why:
        remarks.append(f"{run.path} is left out: {why}")
    return not why


def _group_runs(runs: Sequence[Recorded]) -> list[Group]:
    seeds_by_facts: dict[tuple[tuple[str, str], ...], dict[int, Recorded]] = {}
    for run in runs:
        facts = tuple(
            sorted(
                (key, str(value))
                for key, value in flatten_tree(run.config).items()
                if key not in IGNORED_KEYS
            )
        )
        seeds = seeds_by_facts.setdefault(facts, {})
        seed = run.config["seed"]
        if seed in seeds:
            raise UserError(
                f"{seeds[seed].path} and {run.path} are the same experiment with the same seed: "
                "give one of them"
            )
        seeds[seed] = run
    labels = _labels([dict(facts) for facts in seeds_by_facts])
    return [
        Group(label, dict(sorted(seeds.items())))
        for label, seeds in zip(labels, seeds_by_facts.values(), strict=True)
    ]


def _labels(groups: Sequence[dict[str, str]]) -> list[str]:
    """The method's name and what else tells the groups apart;
    a part's own options only among its own kind.
    """
    labels: list[list[str]] = []
    for group in groups:
        distinctions = []
        for key in sorted(
            {key for other in groups for key in other},
            key=lambda key: (not key.endswith(".name"), key),
        ):
            kind = f"{key.partition('.')[0]}.name"
            comparable_groups = [
                other for other in groups if key == kind or other.get(kind) == group.get(kind)
            ]
            if key != "method.name" and len({other.get(key) for other in comparable_groups}) > 1:
                name = key.removesuffix(".name")
                distinctions.append(f"{name}={group[key]}" if key in group else f"no {name}")
        labels.append([group.get("method.name", "unknown"), *distinctions])
    short = [_shorten_label(parts) for parts in labels]
    return [
        ", ".join(parts) if short.count(label) > 1 else label
        for parts, label in zip(labels, short, strict=True)
    ]


def _shorten_label(parts: Sequence[str]) -> str:
    """The first of so many differences, by far the most telling ones."""
    leading_parts = [
        part
        for i, part in enumerate(parts)
        if i == 0 or len(", ".join(parts[: i + 1])) <= LONGEST_LABEL
    ]
    more = len(parts) - len(leading_parts)
    return ", ".join(
        [*leading_parts, f"{more} more {'difference' if more == 1 else 'differences'}"]
        if more
        else leading_parts
    )


def paired_differences(group: Group, base: Group, remarks: list[str]) -> list[Difference]:
    """Differences over the seeds that both groups have with the very same federation;
    a remark for those refused.
    """
    common_seeds = [seed for seed in group.runs if seed in base.runs]
    paired_seeds = [
        seed for seed in common_seeds if _same_federation(group.runs[seed], base.runs[seed])
    ]
    unpaired_seeds = [str(seed) for seed in common_seeds if seed not in paired_seeds]
    if unpaired_seeds:
        remarks.append(
            f"{group.label} and {base.label} are not paired for seed {', '.join(unpaired_seeds)}: "
            "their clients, labels or test images differ"
        )
    if not common_seeds:
        remarks.append(
            f"{group.label} and {base.label} have no seed in common, so there is nothing to pair"
        )
    if not paired_seeds:
        return []
    differences = []
    for measure in MEASURES:
        own_values, base_values = group.values(measure), base.values(measure)
        pairs = {seed: own_values[seed] - base_values[seed] for seed in paired_seeds}
        mean, std, low, high = interval(np.array(list(pairs.values())))
        differences.append(
            Difference(group.label, base.label, measure, pairs, mean, std, low, high)
        )
    return differences


def _same_federation(first: Recorded, second: Recorded) -> bool:
    readable = first.holdings is not None and second.holdings is not None
    return readable and first.holdings.digest == second.holdings.digest  # type: ignore[union-attr]


def interval(values: FloatArray) -> tuple[float, float, float, float]:
    """Mean, standard deviation, and Student's t interval for the mean;
    NaN where one value says nothing of spread.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return mean, math.nan, math.nan, math.nan
    from scipy.stats import t

    std = float(values.std(ddof=1))
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * std / math.sqrt(len(values))
    return mean, std, mean - half, mean + half


def as_csv(comparison: Comparison) -> str:
    """Long form: a line for each run, each group's mean and each difference, all in shares of 1."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        (
            "what",
            "group",
            "against",
            "measure",
            "seed",
            "n",
            "value",
            "std",
            "low",
            "high",
            "folder",
        )
    )
    for group in comparison.groups:
        for seed, run in group.runs.items():
            for measure, value in scores(run).items():
                table.writerow(
                    ("run", group.label, "", measure, seed, "", value, "", "", "", run.path)
                )
        for measure in MEASURES:
            mean, std, low, high = interval(np.array(list(group.values(measure).values())))
            row = [len(group.runs), mean, *("" if math.isnan(v) else v for v in (std, low, high))]
            table.writerow(("mean", group.label, "", measure, "", *row, ""))
    for item in comparison.differences:
        row = [
            len(item.pairs),
            item.mean,
            *("" if math.isnan(v) else v for v in (item.std, item.low, item.high)),
        ]
        table.writerow(("difference", item.group, item.against, item.measure, "", *row, ""))
    return text.getvalue()
