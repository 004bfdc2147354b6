"""The ServerApp and ClientApp over a Grid in memory, with real serialisation: the
same bits as in one process.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from flower_grid import MemoryGrid
from flwr.app import Message

import fednoro
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Run
from fednoro.experiment.run_folder.recorded_run import read
from fednoro.flower.client_app import app
from fednoro.flower.ops.run_follower import as_json
from fednoro.flower.server.coordinator import coordinate
from fednoro.methods import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")

K = 4
TINY = (
    "digits",
    "data=synthetic",
    "data.images=120",
    "data.classes=3",
    "data.size=8",
    "data.channels=1",
    f"partition.clients={K}",
    "noise.epochs=2",
    "model.width=2",
    "train.epochs=1",
    "train.batch=16",
    "train.rounds=5",
    "device=cpu",
    "checkpoint_every=2",
)
CORRECTING = ("method.iterations=2", "method.confidence=0.2", "method.clean_level=0.01")
SMALL = {"fedcorr": CORRECTING, "fedcorr-la": CORRECTING}


def settings(method: str, *more: str) -> tuple[str, ...]:
    staged = ("method.warmup=2",) if "warmup" in METHODS[method].__dataclass_fields__ else ()
    return (*TINY, f"method={method}", *staged, *SMALL.get(method, ()), *more)


def nodes(count: int = K) -> dict[int, dict[str, Any]]:
    """Node ids that are in no order, as Flower's are."""
    return {
        (7919 * (k + 3)) % 1009: {"partition-id": k, "num-partitions": count}
        for k in reversed(range(count))
    }


def on_flower(grid: MemoryGrid, *overrides: str, **run_config: Any) -> Run:
    source, *rest = overrides
    return coordinate(
        grid, {"fednoro": as_json(resolve(source, rest)), "round-timeout": 60.0, **run_config}
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "rounds.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "seconds"} for line in text
    ]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_the_same_bits_as_in_one_process(
    method: str, tmp_path: Path
) -> None:
    here = fednoro.run(*settings(method, f"out={tmp_path}", "name=here"))
    there = on_flower(MemoryGrid(app, nodes()), *settings(method, f"out={tmp_path}", "name=there"))
    assert (there.folder / "model.safetensors").read_bytes() == (
        here.folder / "model.safetensors"
    ).read_bytes()
    assert (there.folder / "clients.csv").read_bytes() == (here.folder / "clients.csv").read_bytes()
    assert lines(there.folder) == lines(here.folder)
    assert there.detection == here.detection


@pytest.mark.parametrize(
    ("method", "rule", "side"),
    [
        ("fednoro-plus", (), 5),
        ("fednoro", ("method.detector=calibrated",), 5),
        ("fednoro-plus", ("method.detector=sketched", "model.width=40"), 65),
    ],
)
def test_verdicts_by_the_others_heads_are_those_of_a_run_in_one_process(
    method: str, rule: tuple[str, ...], side: int, tmp_path: Path
) -> None:
    """More clients than explained shares decide about alone."""
    asked = (*settings(method, "partition.clients=6", "data.images=240"), *rule, f"out={tmp_path}")
    here = fednoro.run(*asked, "name=here")
    grid = MemoryGrid(app, nodes(6))
    there = on_flower(grid, *asked, "name=there")
    records = [
        record for message in grid.received for record in message.content.array_records.values()
    ]
    assert [record["products"].numpy().shape for record in records if "products" in record] == [
        (side, side)
    ] * 6
    assert there.detection == here.detection and here.detection is not None
    assert all("areas" in row for row in here.detection["clients"].values())
    assert (there.folder / "model.safetensors").read_bytes() == (
        here.folder / "model.safetensors"
    ).read_bytes()
    assert (there.folder / "clients.csv").read_bytes() == (here.folder / "clients.csv").read_bytes()
    assert [row["task"] for row in rows(there.folder)].count("moments") == 6


def test_a_second_verdict_is_that_of_a_run_in_one_process(tmp_path: Path) -> None:
    stages = ("method=fednoro-plus", "method.warmup=5", "method.purge=4", "train.rounds=10")
    asked = (
        "digits",
        "partition.clients=6",
        "model.width=4",
        "noise.rate=0.34",
        "device=cpu",
        *stages,
    )
    here = fednoro.run(*asked, f"out={tmp_path}", "name=here")
    there = on_flower(MemoryGrid(app, nodes(6)), *asked, f"out={tmp_path}", "name=there")
    assert there.detection == here.detection and here.detection is not None
    assert here.detection["reason"].endswith("(judged again)"), "otherwise this shows nothing"
    assert (there.folder / "model.safetensors").read_bytes() == (
        here.folder / "model.safetensors"
    ).read_bytes()
    assert (there.folder / "clients.csv").read_bytes() == (here.folder / "clients.csv").read_bytes()
    tasks = [row["task"] for row in rows(there.folder)]
    assert tasks.count("moments") == tasks.count("score") == 12


def test_fedcorr_keeps_its_labels_at_the_clients(tmp_path: Path) -> None:
    grid = MemoryGrid(app, nodes())
    run = on_flower(grid, *settings("fedcorr", f"out={tmp_path}", "name=run"))
    assert any(answer["relabelled"] not in ("", "0") for answer in rows(run.folder)), (
        "otherwise this shows nothing"
    )
    assert {path.parent.name for path in (run.folder / "memory").rglob("*.safetensors")} == {
        "0",
        "1",
        "2",
        "3",
    }


def test_recalibrated_statistics_are_those_of_a_run_in_one_process(tmp_path: Path) -> None:
    model = (
        "model=flower_grid:network",
        "model.recalibrate=true",
        "train.rounds=2",
        "method=fedavg",
    )
    bare = tuple(item for item in TINY if item != "model.width=2")
    here = fednoro.run(*bare, *model, f"out={tmp_path}", "name=here")
    there = on_flower(MemoryGrid(app, nodes()), *bare, *model, f"out={tmp_path}", "name=there")
    assert (there.folder / "model.safetensors").read_bytes() == (
        here.folder / "model.safetensors"
    ).read_bytes()
    plain = on_flower(
        MemoryGrid(app, nodes()), *bare, model[0], *model[2:], f"out={tmp_path}", "name=plain"
    )
    assert (plain.folder / "model.safetensors").read_bytes() != (
        here.folder / "model.safetensors"
    ).read_bytes()


class KilledError(BaseException):
    """What SIGKILL looks like from inside."""


@pytest.mark.parametrize("method", ["fednoro", "fedcorr"])
def test_coordinator_that_is_killed_goes_on_to_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = on_flower(MemoryGrid(app, nodes()), *settings(method, f"out={tmp_path}", "name=whole"))
    asked, limits = 0, iter((7, 12, 10**6))
    limit = next(limits)

    def tamper(task: Message, reply: Message) -> Message:
        nonlocal asked
        asked += task.metadata.message_type == "train"
        if asked >= limit:
            raise KilledError
        return reply

    folder = tmp_path / "run"
    with pytest.raises(KilledError):
        on_flower(
            MemoryGrid(app, nodes(), tamper), *settings(method, f"out={tmp_path}", "name=run")
        )
    while limit < 10**6:
        asked, limit = 0, next(limits)
        grid = MemoryGrid(app, nodes(), tamper)
        if limit < 10**6:
            with pytest.raises(KilledError):
                coordinate(grid, {"resume": str(folder)})
        else:
            coordinate(grid, {"resume": str(folder)})
    assert (folder / "model.safetensors").read_bytes() == (
        whole.folder / "model.safetensors"
    ).read_bytes()
    assert (folder / "clients.csv").read_bytes() == (whole.folder / "clients.csv").read_bytes()
    assert lines(folder) == lines(whole.folder)


def test_the_report_of_a_simulation_knows_the_truth(tmp_path: Path) -> None:
    asked = settings("fednoro", f"out={tmp_path}", "noise.rate=0.5")
    here = fednoro.run(*asked, "name=here")
    there = on_flower(MemoryGrid(app, nodes()), *asked, "name=there")
    found, expected = read(there.folder), read(here.folder)
    assert found.missing == [] and found.holdings is not None and expected.holdings is not None
    assert (
        found.holdings.noisy is not None
        and found.holdings.noisy.tolist() == expected.holdings.noisy.tolist()
    )
    page = (there.folder / "report.html").read_text(encoding="utf-8")
    assert "the truth is not known" not in page and 'id="partition"' in page


def test_finished_run_is_not_played_again(tmp_path: Path) -> None:
    run = on_flower(
        MemoryGrid(app, nodes()),
        *settings("fedavg", f"out={tmp_path}", "name=run", "train.rounds=1"),
    )
    grid = MemoryGrid(app, nodes())
    assert coordinate(grid, {"resume": str(run.folder)}).bacc == run.bacc
    assert not grid.sent


@pytest.mark.parametrize(
    ("run_config", "message"),
    [
        ({}, "neither fednoro"),
        ({"fednoro": "{"}, "not valid JSON"),
        ({"fednoro": "[]"}, "must be a JSON object"),
        ({"fednoro": '{"preset": "digits", "methud": "fedavg"}'}, "did you mean method"),
        ({"fednoro-config": "no-such-file"}, "neither a preset"),
        ({"fednoro-config": "digits", "min-sites": "two"}, "min-sites must be a number"),
        ({"fednoro-config": "digits", "min-sites": 0}, "flower.min_sites must be >= 1"),
        ({"resume": "/no/such/run"}, "no flower.json"),
    ],
)
def test_mistake_in_the_run_config_is_one_clear_line(
    run_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        coordinate(MemoryGrid(app, nodes()), run_config)


def test_number_of_nodes_must_be_that_of_the_clients(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="the federation has 4 clients, the nodes were started for 3"
    ):
        on_flower(MemoryGrid(app, nodes(3)), *settings("fedavg", f"out={tmp_path}", "name=run"))
    assert (tmp_path / "run").exists() is False


def test_run_on_flower_is_not_resumed_in_one_process(tmp_path: Path) -> None:
    run = on_flower(
        MemoryGrid(app, nodes()),
        *settings("fedavg", f"out={tmp_path}", "name=run", "train.rounds=1"),
    )
    (run.folder / "result.json").unlink()
    with pytest.raises(UserError, match=r"was run on Flower: .*fednoro flower run --resume"):
        fednoro.resume(run.folder)
