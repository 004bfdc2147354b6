"""Comparisons: groups, means, and differences that are paired only where they may be."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_folders import make_run

from fednoro.core.types import UserError
from fednoro.experiment.run_folder.recorded_run import read
from fednoro.report.comparison import as_csv, compare, interval, scores
from fednoro.report.comparison_page import difference_table, render, summary


def several(
    tmp_path: Path, methods: tuple[str, ...] = ("fednoro", "fedavg"), seeds: int = 3
) -> list[Path]:
    return [
        make_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, lift=0.1 * i)
        for i, method in enumerate(methods)
        for seed in range(seeds)
    ]


def reconfigured(path: Path, section: str, **options: object) -> Path:
    config = yaml.safe_load((path / "config.yaml").read_text())
    config[section] = {**config.get(section, {}), **options}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def test_the_interval_is_students_t() -> None:
    # Two-sided 95% quantiles of Student's t with 2 and 9 degrees of freedom, from a printed table.
    for n, quantile in ((3, 4.30265), (10, 2.26216)):
        values = np.random.default_rng(n).normal(2, 3, n)
        mean = sum(values) / n
        std = (sum((v - mean) ** 2 for v in values) / (n - 1)) ** 0.5
        half = quantile * std / n**0.5
        np.testing.assert_allclose(
            interval(values), (mean, std, mean - half, mean + half), rtol=1e-5
        )


def test_a_single_pair_has_no_interval(tmp_path: Path) -> None:
    found = compare(several(tmp_path, seeds=1))
    assert all(np.isnan([item.std, item.low, item.high]).all() for item in found.differences)
    assert "one pair has no spread" in str(difference_table(found).rows)


def test_runs_are_grouped_by_everything_but_the_seed(tmp_path: Path) -> None:
    runs = several(tmp_path)
    for seed in range(3):
        other = make_run(tmp_path / f"other-{seed}", seed=seed)
        runs.append(reconfigured(other, "method", warmup=9))
    for i, run in enumerate(runs):
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(
            yaml.safe_dump({**config, "name": f"n{i}", "out": f"o{i}", "device": "cpu"})
        )
    found = compare(runs)
    assert [group.label for group in found.groups] == [
        "fednoro, method.warmup=2",
        "fedavg",
        "fednoro, method.warmup=9",
    ]
    assert [list(group.runs) for group in found.groups] == [[0, 1, 2]] * 3


def test_labels_of_runs_that_differ_in_much_stay_short(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=0) for name in ("a", "b", "c")]
    for i, run in enumerate(runs[1:], 1):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"] = {
            "name": "folder",
            **{f"option_{j}": f"a long value {i * j}" for j in range(20)},
            "z": i,
        }
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    first, second, third = (group.label for group in compare(runs).groups)
    assert first == "fednoro, data=digits", "its kind alone tells it apart"
    assert (
        all(label.startswith("fednoro, data=folder, ") for label in (second, third))
        and second != third
    )
    assert all(len(label) < 120 and label.endswith("more differences") for label in (second, third))


def test_the_kind_of_noise_is_named_without_the_options_that_only_it_has(tmp_path: Path) -> None:
    h_idn = {"name": "h_idn", "rate": 0.4, "low": 0.5, "high": 0.7, "epochs": 20}
    noises = {
        "a": h_idn,
        "b": {"name": "symmetric", "rate": 0.2, "low": 0.3},
        "c": {**h_idn, "high": 0.9},
    }
    runs = [
        reconfigured(make_run(tmp_path / name), "noise", **noise) for name, noise in noises.items()
    ]
    assert [group.label for group in compare(runs[:2]).groups] == [
        "fednoro, noise=h_idn",
        "fednoro, noise=symmetric",
    ]
    assert [group.label for group in compare(runs).groups] == [
        "fednoro, noise=h_idn, noise.high=0.7",
        "fednoro, noise=symmetric",
        "fednoro, noise=h_idn, noise.high=0.9",
    ]


def test_means_and_differences_are_those_of_the_runs(tmp_path: Path) -> None:
    runs = several(tmp_path)
    found = compare(runs)
    last = np.array([scores(read(run))["last"] for run in runs])
    cells = {row[0]: row[3] for row in summary(found).rows}
    assert cells["fednoro"] == f"{100 * last[:3].mean():.2f} ± {100 * last[:3].std(ddof=1):.2f}"
    item = next(item for item in found.differences if item.measure == "last")
    assert (item.group, item.against) == ("fedavg", "fednoro")
    np.testing.assert_allclose(list(item.pairs.values()), last[3:] - last[:3])
    turned = compare(runs, against="fedavg").differences
    assert next(other for other in turned if other.measure == "last").mean == pytest.approx(
        -item.mean
    )


def test_different_federations_are_not_paired(tmp_path: Path) -> None:
    runs = several(tmp_path, seeds=2)
    make_run(tmp_path / "other", seed=1, clients=7)
    (tmp_path / "other" / "split.npz").replace(runs[-1] / "split.npz")
    found = compare(runs)
    assert all(list(item.pairs) == [0] for item in found.differences)
    assert any("not paired for seed 1" in line for line in found.remarks)
    assert "not paired for seed 1" in render(found)


def test_a_changed_label_makes_another_federation(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name) for name in ("a", "b"))
    with np.load(second / "split.npz") as file:
        parts = {name: file[name] for name in file}
    parts["observed"][parts["members"][0]] = (parts["observed"][parts["members"][0]] + 1) % 3
    np.savez(second / "split.npz", **parts)
    digests = [
        run.holdings.digest for run in map(read, (first, second)) if run.holdings is not None
    ]
    assert len(set(digests)) == 2


def test_without_a_common_seed_there_is_nothing_to_pair(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", seed=0), make_run(tmp_path / "b", seed=1, method="fedavg")]
    found = compare(runs)
    assert not found.differences and any("no seed in common" in line for line in found.remarks)


def test_unfinished_and_unreadable_runs_are_left_out_with_the_reason(tmp_path: Path) -> None:
    runs = several(tmp_path)
    lines = (runs[0] / "rounds.jsonl").read_text().splitlines(keepends=True)
    (runs[0] / "rounds.jsonl").write_text("".join(lines[:3]))
    (runs[1] / "config.yaml").unlink()
    found = compare(runs)
    assert found.remarks[:2] == (
        f"{runs[0]} is left out: it has 3 of 5 rounds",
        f"{runs[1]} is left out: its configuration cannot be read",
    )


def test_the_same_experiment_twice_is_refused(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(UserError, match="the same experiment with the same seed"):
        compare(runs)


def test_an_unknown_group_to_compare_with_is_a_clear_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--against must be one of fednoro, fedavg; got 'fedprox'"):
        compare(several(tmp_path, seeds=1), against="fedprox")


def test_the_csv_has_runs_means_and_differences(tmp_path: Path) -> None:
    found = compare(several(tmp_path))
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert {row["what"] for row in rows} == {"run", "mean", "difference"}
    assert len(rows) == 6 * 3 + 2 * 3 + 3
    item = next(item for item in found.differences if item.measure == "best")
    row = next(row for row in rows if row["what"] == "difference" and row["measure"] == "best")
    assert float(row["value"]) == item.mean and float(row["low"]) == item.low and row["n"] == "3"


def test_the_headline_claims_a_difference_only_where_the_interval_excludes_none(
    tmp_path: Path,
) -> None:
    near = compare(
        [
            make_run(tmp_path / f"a{m}{s}", method=m, seed=s)
            for m in ("fednoro", "fedavg")
            for s in range(3)
        ]
    )
    assert "No difference over the last rounds is clear of chance" in render(near)
    far = [
        make_run(tmp_path / f"b{m}{s}", method=m, seed=s, classes=9, lift=-0.3 * (m == "fedavg"))
        for m in ("fednoro", "fedavg")
        for s in range(4)
    ]
    assert "points below fednoro" in render(compare(far))


def test_hostile_labels_are_escaped(tmp_path: Path) -> None:
    run = reconfigured(make_run(tmp_path / "run"), "method", name="<script>alert(1)</script>")
    assert "<script>alert" not in render(compare([run]))
