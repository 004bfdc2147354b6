"""The benchmarks: each runs to its end on next to nothing, and the plain
loop does the engines' work.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fednoro
from fednoro.core.training import Augment
from fednoro.data.dataset import Dataset
from fednoro.engine.choose import Hardware
from fednoro.experiment.simulation import Lab
from fednoro.methods import Method
from fednoro.models import Packed

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
STILL = Augment()


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def benchmark(name: str) -> Any:
    return import_module(f"benchmarks.{name}")


def lines(text: str) -> list[list[str]]:
    """The cells of a Markdown table, without its header."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [cells for cells in found[1:] if set("".join(cells)) != {"-"}]


def number(cell: str) -> float:
    """The first figure of a cell."""
    return float(cell.replace(",", "").split()[0])


# The plain loop


def test_stock_takes_every_kind_of_convolution_back_to_pytorchs() -> None:
    class Special(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise AssertionError("not the plain one")

    net = nn.Sequential(
        Special(1, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 1), Special(2, 2, 1)), nn.ReLU()
    )
    before = copy.deepcopy(net.state_dict())
    plain = benchmark("plain").stock(net)
    assert [type(m) for m in plain.modules() if isinstance(m, nn.Conv2d)] == [nn.Conv2d] * 3
    assert plain(torch.zeros(1, 1, 5, 5)).shape == (1, 2, 3, 3)
    assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())


def test_the_plain_transform_rotates_within_its_bounds_and_leaves_the_rest() -> None:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    random_affine = benchmark("plain").random_affine
    assert np.array_equal(random_affine(picture, STILL), picture)
    white = Image.new("L", (100, 100), 255)
    turned = np.asarray(random_affine(white, Augment(rotate=10, translate=0.02)))
    assert turned[25:75, 25:75].all() and 0 < (turned == 0).sum() < 2500


def test_a_plain_round_trains_as_an_engine_does() -> None:
    engine, plain = benchmark("engine"), benchmark("plain")
    # a batch each, so that the images' order does not matter
    work = engine.Workload.make("cnn", 12, 3, 30)
    work = replace(work, training=replace(work.training, augment=STILL))
    assert work.steps == 3
    net = plain.stock(work.network())
    before = Packed(copy.deepcopy(net)).weights()
    after = Packed(
        plain.play_round(net, work.dataset, work.clients, work.inputs, work.training, CPU)
    ).weights()
    assert torch.equal(Packed(net).weights().values, before.values)
    told = engine.play_round(work.engine(Hardware(CPU, "eager")), Method(), work.start(CPU))
    # Adam's first step is lr·sign(g): where a gradient is 0 but for
    # rounding, either sign may come out.
    differ = (after.values - told.model.values).abs() > 1e-5
    assert not torch.equal(after.values, before.values)
    assert differ.double().mean() < 0.01
    assert torch.equal(after.counters, told.model.counters)


def test_plain_averages_by_size() -> None:
    states = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([5.0, 6.0]), "n": torch.tensor(4)},
    ]
    mean = benchmark("plain").average(states, [1, 3])
    assert mean["w"].tolist() == [4.0, 5.0] and mean["n"] == 3
    assert states[0]["w"].tolist() == [1.0, 2.0]


# The workload


@pytest.mark.parametrize(("clients", "images"), [(20, 400), (20, 4000), (50, 1000), (30, 60)])
def test_clients_are_unequal_and_end_on_more_than_one_image(clients: int, images: int) -> None:
    work = benchmark("engine").Workload.make("cnn", 8, clients, images)
    sizes = [len(client.index) for client in work.clients]
    assert len(sizes) == clients and images - clients <= sum(sizes) <= images + clients
    assert min(sizes) >= min(17, images // clients) and not any(size % 16 == 1 for size in sizes)
    assert np.array_equal(
        np.sort(np.concatenate([c.index for c in work.clients])), np.arange(len(work.dataset))
    )
    assert len(set(sizes)) > 1 or images <= 20 * clients
    assert work.steps == sum(-(-size // 16) for size in sizes)


def test_the_slow_ones_get_whole_clients_with_enough_steps() -> None:
    work = benchmark("engine").Workload.make("cnn", 8, 10, 500)
    few = work.first(7)
    assert few.steps >= 7 > few.steps - (-(-len(few.clients[-1].index) // 16))
    assert work.first(0).clients == work.first(10**6).clients == work.clients


def test_the_limit_is_all_data_in_one_clients_large_batches() -> None:
    pooled = benchmark("engine").Workload.make("cnn", 8, 5, 300).pooled()
    (client,) = pooled.clients
    assert pooled.training.batch == 5 * 16 and len(client.index) == len(pooled.dataset)
    assert np.array_equal(client.observed, pooled.dataset.labels[client.index])


# The tables


def test_engine_prints_every_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--network cnn --sizes 8 12 --clients 4 --images 150 --repeat 2 "
        "--slow-steps 5 --kd --device cpu"
    )
    threads = torch.get_num_threads()
    benchmark("engine").main(arguments.split())
    out = capsys.readouterr().out
    table = lines(out)
    assert [row[:2] for row in table] == [["cnn, 8 px", "fp32"], ["cnn, 12 px", "fp32"]]
    for row in table:
        figures = [number(cell) for cell in row[2:]]
        # 4 alternatives, 4 ratios
        assert len(figures) == 8 and all(figure > 0 for figure in figures)
        assert all(re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", cell) for cell in row[6:])
    assert "4 clients with" in out and "Machine: " in out and f"torch {torch.__version__}" in out
    assert torch.get_num_threads() == threads


def test_scale_prints_a_row_per_method_and_number_of_clients() -> None:
    arguments = (
        "--network cnn --size 8 --clients 3 9 --images 180 --method fednoro --repeat 1 --device cpu"
    )
    command = [sys.executable, "-m", "benchmarks.scale", *arguments.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    few, many = lines(done.stdout)
    assert [few[:2], many[:2]] == [["fednoro", "3"], ["fednoro", "9"]]
    assert number(few[6]) == number(few[7]) == 1 and number(many[2]) > number(few[2])
    assert 50 < number(few[8]) < 2500 and number(few[9]) < number(few[8])


def test_scale_measures_aggregation_by_distance() -> None:
    engine = benchmark("engine")
    work = engine.Workload.make("cnn", 8, 6, 120)
    after = engine.play_round(
        work.engine(Hardware(CPU)), benchmark("scale").METHODS["fednoro"], work.judged(CPU)
    )
    assert after.stage == "noise-robust training"
    flagged = [k for k, note in after.notes.items() if note["distance"] > 0 and "lam" in note]
    assert flagged == [1, 3, 5]


def test_stages_add_up_to_the_wall_time(capsys: pytest.CaptureFixture[str]) -> None:
    stages = benchmark("stages")
    stages.main(
        ["train.rounds=3", "method.warmup=1", "noise.epochs=1", "train.epochs=1", "device=cpu"]
    )
    out = capsys.readouterr().out
    *parts, total = lines(out)
    assert [row[0] for row in parts] == list(stages.PARTS) and total[0] == "sum"
    spent = {row[0]: number(row[2]) for row in parts}
    wall = float(re.search(r": ([\d.]+) s\n", out)[1])  # type: ignore[index]
    assert sum(spent.values()) == pytest.approx(wall, rel=0.02, abs=0.06)
    assert all(
        spent[part] > 0
        for part in ("annotators", "warm-up", "scoring", "stage 2", "evaluation", "files")
    )


def test_a_part_inside_another_stops_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = benchmark("stages")
    now = [0.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])
    watch = stages.Stopwatch()

    def lasting(seconds: float) -> None:
        now[0] += seconds

    def replies() -> Any:
        for seconds in (3, 4):
            lasting(seconds)
            yield seconds

    def fold() -> None:
        for _ in watch.between(lambda: "warm-up", replies)():
            lasting(0.5)

    watch.inside("aggregation", fold)()
    lasting(2)
    watch.stop()
    assert {part: spent for part, spent in watch.seconds.items() if spent} == {
        "warm-up": 7,
        "aggregation": 1,
        "other": 2,
    }


def test_the_speed_benchmarks_need_nothing_but_the_training_path_and_pillow() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("pydantic", "typer", "safetensors", "torchvision")))
import benchmarks.engine, benchmarks.machine, benchmarks.plain, benchmarks.scale
assert "fednoro.experiment.config.configuration" not in sys.modules and \
"fednoro.experiment.simulation" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_detection_prints_what_each_detector_found_and_judges_again_what_it_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["train.epochs=1", "noise.epochs=1", "partition.clients=4", "device=cpu"]
    asked = [
        "--rates",
        "0",
        "0.5",
        "1",
        "--ranges",
        "0.3-0.5",
        "0.5-0.7",
        "--seeds",
        "3",
        "--warmups",
        "1",
        "2",
    ]
    kept = tmp_path / "evidence.jsonl"
    threads = torch.get_num_threads()
    benchmark("detection").main([*asked, "--evidence", str(kept), *short])
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    spans = [("0", "(0.3, 0.5)")]  # without noise there is one range
    spans += [(rate, span) for rate in ("0.5", "1") for span in ("(0.3, 0.5)", "(0.5, 0.7)")]
    detectors = ("paper", "reference", "shares", "sketched", "calibrated")
    expected = [(*span, str(t), kind) for span in spans for t in (1, 2) for kind in detectors]
    found = lines(out)
    assert [tuple(row[:4]) for row in found[: len(expected)]] == expected
    assert [row[3] for row in found[len(expected) :]] == [*detectors] * 2 and found[-1][4].endswith(
        "%)"
    )
    measured = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(measured) == 5 and all(row["explained"].keys() == {"0", "1"} for row in measured)
    benchmark("detection").main([*asked, "--evidence", str(kept), *short])
    assert capsys.readouterr().out == out and len(kept.read_text().splitlines()) == 5
    for scored in measured[0]["losses"].values():
        # as in a file from before there was that rule: this setting is measured again
        del scored["areas"]
    kept.write_text("".join(json.dumps(row) + "\n" for row in measured))
    benchmark("detection").main([*asked, "--evidence", str(kept), *short])
    torch.set_num_threads(threads)
    assert capsys.readouterr().out == out and len(kept.read_text().splitlines()) == 6


def test_detection_says_what_a_run_says(tmp_path: Path) -> None:
    """The benchmark's verdicts are those of a run with that detector:
    the same training, to the bit.
    """
    short = [
        "train.epochs=1",
        "noise.epochs=1",
        "partition.clients=6",
        "device=cpu",
        "model.width=40",
    ]
    detection = benchmark("detection")
    setting = detection.Setting("digits", tuple(short), 3, 0.5, (0.5, 0.7))
    (found,) = detection.evidence([setting], [2], False, None)
    # there are 80 features
    assert found["losses"]["2"]["sketched"] != found["losses"]["2"]["areas"]
    for detector in detection.DETECTORS:
        options = [
            "method=fednoro",
            f"method.detector={detector}",
            "method.warmup=2",
            "train.rounds=3",
        ]
        run = fednoro.run("digits", *setting.settings, *options, f"out={tmp_path}")
        assert run.detection is not None
        flagged = [k for k, noisy in enumerate(detection.verdict(detector, found, 2, 3)) if noisy]
        assert flagged == run.detection["flagged"], detector


def test_detection_judges_again_as_a_run_of_fednoro_plus_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["partition.clients=6", "model.width=4", "train.rounds=14", "device=cpu"]
    short += ["methods.fednoro.warmup=5", "methods.fednoro-plus.warmup=5"]
    kept, threads = tmp_path / "evidence.jsonl", torch.get_num_threads()
    asked = ["--rates", "0.34", "--seeds", "0", "--evidence", str(kept)]
    benchmark("detection").main([*asked, *short])
    # what was not asked before is measured now
    benchmark("detection").main([*asked, "--again", *short])
    torch.set_num_threads(threads)
    told, _, sure = capsys.readouterr().out.rpartition("by how sure")
    assert [row[3] for row in lines(told)[-6:]] == [*benchmark("detection").DETECTORS, "again"]
    assert sum(int(row[1]) for row in lines(sure)) == 6 and all(
        row[3].endswith("%") for row in lines(sure)
    )
    without, measured = [json.loads(line) for line in kept.read_text().splitlines()]
    settings = ["noise.rate=0.34", "noise.low=0.5", "noise.high=0.7", "seed=0", *short]
    run = fednoro.run("digits", "method=fednoro-plus", *settings, f"out={tmp_path}")
    assert run.detection is not None and run.detection["reason"].endswith("(judged again)")
    assert {row["round"] for row in run.detection["clients"].values()} == {7}
    said = [row["areas"] for _, row in sorted(run.detection["clients"].items())]
    assert said == measured["again"]["5"]["areas"] != measured["losses"]["5"]["areas"]
    flagged = benchmark("detection").verdict("again", measured, 5, 0)
    assert [k for k, noisy in enumerate(flagged) if noisy] == run.detection[
        "flagged"
    ] and "again" not in without


def test_paired_differences_are_those_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["row", "rate", "low", "high", "seed", "best", "last", "detection_exact"]
    cells = [
        ("fedla", 0, "", "", 0, 0.7, 0.60, ""),
        ("fedla", 0, "", "", 1, 0.8, 0.70, ""),
        ("fedla", 0.4, 0.5, 0.7, 0, 0.5, 0.40, ""),
        ("fedla", 0.4, 0.5, 0.7, 1, 0.6, 0.50, ""),
        ("fednoro-plus", 0.4, 0.5, 0.7, 0, 0.6, 0.55, "True"),
        ("fednoro-plus", 0.4, 0.5, 0.7, 1, 0.6, 0.57, "False"),
        ("fednoro-plus", 0.4, 0.5, 0.7, 2, 0.9, 0.99, "True"),
        ("fednoro", 0.4, 0.5, 0.7, 3, 0.9, "", ""),
    ]
    path = tmp_path / "table1.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in (columns, *cells)))
    benchmark("paired").main([str(path), "--against", "fedla"])
    table = lines(capsys.readouterr().out)
    assert [row[:2] for row in table] == [
        ["0", "fedla"],
        ["0.4, (0.5, 0.7)", "fedla"],
        ["0.4, (0.5, 0.7)", "fednoro-plus"],
    ]
    plus = table[-1]
    assert plus[2:6] == ["60.00 ± 0.00", "56.00 ± 1.41", "+5.00 ± 7.07", "+11.00 ± 5.66"]
    assert plus[6:] == ["-9.00 ± 5.66 (87%)", "1 of 2", "2"]


def test_misjudged_prints_every_mistake_against_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, federate = list[Path](), Lab.federate
    monkeypatch.setattr(
        Lab, "federate", lambda lab, folder: made.append(folder) or federate(lab, folder)
    )
    short = [
        "train.epochs=1",
        "noise.epochs=1",
        "partition.clients=5",
        "method.warmup=1",
        "train.rounds=3",
        "device=cpu",
    ]
    threads = torch.get_num_threads()
    benchmark("misjudged").main(["--rates", "0.6", "--seeds", "1", *short])
    torch.set_num_threads(threads)
    table = lines(capsys.readouterr().out)
    assert [row[:2] for row in table] == [["0.6", name] for name in benchmark("misjudged").MISTAKES]
    assert table[0][3] == "+0.00" and all(0 < number(row[2]) < 100 for row in table)
    assert len({row[2] for row in table}) > 1
    assert len(made) == 1, "one federation for all mistakes"
    settings = [*short, "method=fednoro-plus", "noise.rate=0.6", "seed=1", f"out={tmp_path}"]
    truth = fednoro.run("digits", *settings, "method.noisy=[]").federation.noisy
    assert truth is not None
    right = fednoro.run("digits", *settings, f"method.noisy={np.flatnonzero(truth).tolist()}")
    assert table[0][2] == f"{100 * right.last:.2f}", "as a run that makes its federation itself"


def test_conditions_are_played_from_one_warm_up_to_the_results_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["train.epochs=1", "partition.clients=4", "train.rounds=4", "device=cpu"]
    warmup = ["methods.fednoro.warmup=2", "methods.fednoro-plus.warmup=2"]
    asked = ["--conditions", "one-class", "T1-20", "--seeds", "3", "--rate", "0.5"]
    kept, threads = tmp_path / "results.jsonl", torch.get_num_threads()
    conditions = benchmark("conditions")
    three = ("methods.fednoro.warmup=3", "methods.fednoro-plus.warmup=3")
    monkeypatch.setitem(conditions.CONDITIONS, "T1-20", three)
    conditions.main([*asked, "--results", str(kept), *short, *warmup])
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert [row[:2] for row in lines(out)] == [["one-class", "3"], ["T1-20", "3"]]
    measured = [json.loads(line) for line in kept.read_text().splitlines()]
    conditions.main([*asked, "--results", str(kept), *short, *warmup])
    assert capsys.readouterr().out == out and len(kept.read_text().splitlines()) == 2

    settings = [*short, "seed=3", "noise.rate=0.5", f"out={tmp_path}"]
    for name in ("fedla", "fednoro", "fednoro-plus"):
        options = [] if name == "fedla" else ["method.warmup=3"]
        run = fednoro.run("digits", *settings, f"method={name}", *options)
        found = measured[1][name]
        assert (found["best"], found["last"]) == (run.best, run.last), name
        if run.detection is not None:
            assert (found["flagged"], found["exact"]) == (
                run.detection["flagged"],
                run.detection["exact"],
            )
            assert measured[1]["noisy"] == run.detection["noisy"]


def test_noise_in_one_class_leaves_the_others_alone() -> None:
    pixels, labels = np.zeros((10, 4, 4, 1), np.uint8), np.array([0, 1, 1, 1, 1, 2, 2, 2, 0, 1])
    (override,) = benchmark("conditions").one_class_alone(Dataset(pixels, labels, ("a", "b", "c")))
    rows = np.array(json.loads(override.removeprefix("noise.matrix=")))
    assert rows[0].tolist() == [1, 0, 0] and rows[2].tolist() == [0, 0, 1]
    assert rows[1].tolist() == pytest.approx([0.3, 0.4, 0.3])
