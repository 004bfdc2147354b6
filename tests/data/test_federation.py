"""A federation from split to file: what is held out, what is saved, and what a run makes of it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import fednoro
from fednoro.core.types import FedNoRoWarning, FloatArray, IntArray, UserError
from fednoro.data.dataset import Dataset
from fednoro.data.federation import Federation, assemble
from fednoro.data.noise import NOISES
from fednoro.data.partition import PARTITIONS
from fednoro.data.split import Split
from fednoro.experiment.watch.terminal import Terminal


def dataset(n: int = 60) -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 1), dtype=np.uint8)
    return Dataset(images, np.arange(n) % 3, ("a", "b", "c"), tuple(f"id {i}" for i in range(n)))


def nobody(k: int, index: IntArray) -> FloatArray:
    raise AssertionError("this noise needs no annotators")


def federation(split: Split, data: Dataset | None = None) -> Federation:
    partition, noise = PARTITIONS["iid"](clients=3), NOISES["symmetric"](rate=0.5)
    return assemble(data or dataset(), split, partition, noise, seed=4, annotate=nobody)


def alike(a: Federation, b: Federation) -> bool:
    arrays = ("train", "validation", "test", "clean", "observed", "noisy", "rates")
    return (
        all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and all(np.array_equal(x, y) for x, y in zip(a.parts, b.parts, strict=True))
        and (a.names, a.classes, a.fingerprint, a.leakage)
        == (b.names, b.classes, b.fingerprint, b.leakage)
    )


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_a_saved_federation_is_loaded_as_it_was(validation: float, tmp_path: Path) -> None:
    made = federation(Split(validation=validation))
    made.save(tmp_path / "split.npz")
    found = Federation.load(tmp_path / "split.npz")
    assert alike(found, made)
    assert found.validation.dtype == np.int64 and len(found.validation) == 60 * validation


def test_clients_hold_the_training_part_and_nothing_else() -> None:
    made = federation(Split(validation=0.2))
    held = np.sort(np.concatenate([client.index for client in made.clients()]))
    assert np.array_equal(held, made.train)
    assert not set(held) & (set(made.validation) | set(made.test))
    assert np.array_equal(made.observed[made.validation], made.clean[made.validation]), (
        "what measures is not noisy"
    )


def test_a_federation_saved_before_there_was_validation_is_loaded(tmp_path: Path) -> None:
    made = federation(Split())
    made.save(tmp_path / "split.npz")
    with np.load(tmp_path / "split.npz") as file:
        old = {name: file[name] for name in file if name not in ("validation", "leakage")}
    np.savez(tmp_path / "old.npz", **old)
    found = Federation.load(tmp_path / "old.npz")
    assert not len(found.validation) and found.leakage == {}
    assert np.array_equal(found.test, made.test)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    federation(Split()).save(tmp_path / "split.npz")
    content = (tmp_path / "split.npz").read_bytes()
    for damage in (b"", content[:100], content[: len(content) // 2]):
        (tmp_path / "split.npz").write_bytes(damage)
        with pytest.raises(UserError, match=r"split\.npz is damaged .*: start the run anew"):
            Federation.load(tmp_path / "split.npz")


def test_what_leaks_is_warned_of_and_kept(tmp_path: Path) -> None:
    data = dataset()
    made = federation(Split(), data)
    assert made.leakage == {"test": {"samples": 0, "identical_images": 0}}
    data.images[made.test[0]] = data.images[made.train[0]]
    with pytest.warns(
        FedNoRoWarning, match="1 images of the test part are pixel-identical to training images"
    ):
        made = federation(Split(), data)
    made.save(tmp_path / "split.npz")
    assert Federation.load(tmp_path / "split.npz").leakage["test"]["identical_images"] == 1


# Runs


def digits(out: Path, *more: str, watcher: Terminal | None = None) -> fednoro.Run:
    base = [
        "train.rounds=3",
        "train.epochs=1",
        "partition.clients=3",
        "noise=symmetric",
        "method=fedavg",
    ]
    return fednoro.run("digits", *base, "device=cpu", f"out={out}", *more, watcher=watcher)


def result(run: fednoro.Run) -> dict[str, object]:
    return dict(json.loads((run.folder / "result.json").read_text()))


def table(run: fednoro.Run) -> list[tuple[str, str]]:
    with (run.folder / "split.csv").open(newline="") as file:
        return [(row["id"], row["part"]) for row in csv.DictReader(file)]


def test_a_run_with_a_validation_part_says_what_the_best_round_on_it_is_worth(
    tmp_path: Path,
) -> None:
    text = io.StringIO()
    run = digits(
        tmp_path,
        "split.validation=0.2",
        "split.test=0.2",
        watcher=Terminal(Console(file=text, width=200)),
    )
    records = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    scores = [record["validation_bacc"] for record in records]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)
    assert run.best_by_validation == run.bacc[int(np.argmax(scores))]
    assert result(run)["best_round_by_validation"] == 1 + int(np.argmax(scores))
    shown, made = text.getvalue(), run.federation
    assert (
        f"{len(made.train)} training, {len(made.validation)} validation "
        f"and {len(made.test)} test images" in shown
    )
    assert f"the round that is best on the validation part: {run.best_by_validation:.2%}" in shown
    assert fednoro.load(run.folder).best_by_validation == run.best_by_validation


def test_a_run_without_one_is_as_it_was(tmp_path: Path) -> None:
    text = io.StringIO()
    run = digits(tmp_path, watcher=Terminal(Console(file=text, width=200)))
    assert run.best_by_validation is None and "validation" not in text.getvalue()
    assert not {"best_by_validation", "best_round_by_validation"} & result(run).keys()
    assert "validation" not in (run.folder / "rounds.jsonl").read_text()
    assert result(run)["leakage"] == {"test": {"samples": 0, "identical_images": 0}}


def test_a_runs_split_can_be_given_again(tmp_path: Path) -> None:
    first = digits(tmp_path, "split.validation=0.2", "name=first")
    made = first.federation
    parts = {
        name: [i for i, (_, part) in enumerate(table(first)) if part == name]
        for name in ("train", "test")
    }
    assert parts == {"train": made.train.tolist(), "test": made.test.tolist()}
    again = digits(tmp_path, f"split.file={first.folder / 'split.csv'}", "name=again")
    assert table(again) == table(first)
    assert again.bacc == first.bacc and again.best_by_validation == first.best_by_validation
    other = digits(
        tmp_path,
        f"split.file={first.folder / 'split.csv'}",
        "train.rounds=1",
        "partition.clients=5",
    )
    assert table(other) == table(first) and len(other.federation.parts) == 5


def test_a_split_of_other_data_leaves_no_run_behind(tmp_path: Path) -> None:
    first = digits(tmp_path, "train.rounds=1", "name=first")
    with pytest.raises(
        UserError, match=r"split\.file .*split\.csv, line \d+: no image has the id '\d+'"
    ):
        digits(
            tmp_path, f"split.file={first.folder / 'split.csv'}", "data.imbalance=10", "name=second"
        )
    assert not (tmp_path / "second").exists()
