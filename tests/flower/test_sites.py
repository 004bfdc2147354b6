"""Sites with data of their own: who may take part, what goes wrong and is
survived, and what leaves a site.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flower_grid import MemoryGrid, Tamper
from flower_sites import CLASSES, IMAGES, NAMES, assert_inventory, make_site, nodes, start
from flwr.app import Array, Message, RecordDict
from PIL import Image

from fednoro.core.types import Reply, Site, Task, UserError
from fednoro.experiment.drive import Run
from fednoro.flower.client_app import app
from fednoro.flower.server.coordinator import coordinate
from fednoro.flower.site.site_memory import Memory
from fednoro.flower.site.station import RefusedError, SiteOptions, read_site, station
from fednoro.methods import METHODS, Method

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each site's site.yaml, beside its folder of images; one has wrong labels."""
    root = tmp_path_factory.mktemp("sites")
    return {
        name: make_site(root / name, seed, wrong=name == "west") for seed, name in enumerate(NAMES)
    }


def play(
    grid: MemoryGrid, out: Path, method: str = "fednoro", *overrides: str, **run_config: Any
) -> Run:
    return coordinate(grid, start(out, method, *overrides, **run_config))


def rows(run: Run) -> list[dict[str, str]]:
    with (run.folder / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def kept(run: Run) -> dict[str, Any]:
    return dict(json.loads((run.folder / "sites.json").read_text()))


# A run


def test_sites_train_and_evaluate_on_what_they_hold(
    places: dict[str, Path], tmp_path: Path
) -> None:
    run = play(MemoryGrid(app, nodes(places)), tmp_path)
    assert kept(run) == {
        "sites": ["east", "north", "south", "west"],
        "classes": list(CLASSES),
        "shape": [8, 8, 1],
        "refused": {},
    }
    assert {(row["client"], row["size"]) for row in rows(run) if row["task"] == "train"} == {
        (str(k), "18") for k in range(4)
    }
    for line in map(json.loads, (run.folder / "rounds.jsonl").read_text().splitlines()):
        assert np.sum(line["confusion"]) == 4 * 6 and 0 <= line["bacc"] <= 1
    assert run.detection is not None and set(run.detection["clients"]) == {"0", "1", "2", "3"}
    assert {path.name for path in run.folder.iterdir()} >= {
        "config.yaml",
        "environment.json",
        "rounds.jsonl",
        "clients.csv",
        "checkpoints",
        "detection.json",
        "model.safetensors",
        "result.json",
        "report.html",
        "sites.json",
        "flower.json",
    }
    assert json.loads((run.folder / "result.json").read_text())["image"] == [8, 8, 1]
    assert "north" in (run.folder / "report.html").read_text()


def test_coordinator_with_a_test_set_evaluates_itself_and_sites_train_on_all(
    places: dict[str, Path], tmp_path: Path
) -> None:
    data = yaml.safe_load(places["north"].read_text())["data"]
    grid = MemoryGrid(app, nodes(places))
    overrides = (f"data={json.dumps(data)}", "method=fedavg")
    run = play(grid, tmp_path, "fedavg", *overrides)
    assert "evaluate" not in {message.metadata.message_type for message in grid.sent}
    assert {row["size"] for row in rows(run)} == {str(IMAGES)}
    (line, *_) = map(json.loads, (run.folder / "rounds.jsonl").read_text().splitlines())
    assert np.sum(line["confusion"]) == IMAGES


# Who may take part


def test_site_with_other_classes_images_or_version_is_refused_with_a_clear_line(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {
        "order": make_site(tmp_path / "order", 7, classes=("c", "b", "d")),
        "large": make_site(tmp_path / "large", 8, size=9),
        "old": make_site(tmp_path / "old", 9),
    }
    everybody = nodes(places) | {
        k: {"site": n, "config": str(p)} for k, (n, p) in enumerate(odd.items())
    }

    def tamper(_: Message, reply: Message) -> Message:
        config = reply.content.config_records.get("config", {})
        if config.get("site") == "old":
            config["version"] = "0.0.1"
        return reply

    with caplog.at_level(logging.INFO, logger="flwr"):
        run = play(MemoryGrid(app, everybody, tamper), tmp_path, "fedavg", **{"start-sites": 6})
    assert kept(run)["sites"] == ["east", "north", "south", "west"]
    refused = kept(run)["refused"]
    assert (
        refused["order"]
        == "its classes are b, c, d; the run has a, b, c, in this order (data.classes)"
    )
    assert (
        refused["large"]
        == "its images are 9 × 9 × 1, the run's 8 × 8 × 1 (height × width × channels)"
    )
    assert refused["old"].startswith("it runs fednoro 0.0.1, the coordinator ")
    assert all(
        f"site {name} is refused: {reason}" in caplog.text for name, reason in refused.items()
    )


def test_run_that_waits_in_vain_says_for_what(places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 sites are here, waiting for more: gave up"):
        play(MemoryGrid(app, nodes(places, "north")), tmp_path, "fedavg", **{"wait-timeout": 0.05})
    assert not (tmp_path / "run").exists()


def test_node_that_is_neither_site_nor_partition_is_refused(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        play(
            MemoryGrid(app, nodes(places) | {5: {}, 6: {"site": "north-2"}}),
            tmp_path,
            "fedavg",
            "train.rounds=1",
        )
    assert "site node 5 is refused: it did not say who it is (UserError" in caplog.text
    assert "site node 6 is refused" in caplog.text


# What goes wrong


@dataclass(frozen=True)
class Raising(Method):
    """Not registered: the second client cannot do the third round's work."""

    def work(self, task: Task, site: Site) -> Reply:
        if (task.round, site.client) == (2, 1):
            raise OSError("/data/images/patient-17.png is unreadable")
        return super().work(task, site)


def test_site_that_raises_is_left_out_and_its_words_stay_with_it(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "raising", Raising)
    agreed = {name: tmp_path / f"{name}.yaml" for name in places}
    for name, file in agreed.items():
        file.write_text(f"{places[name].read_text()}\nmodules: [{__name__}]\n")
    grid = MemoryGrid(app, nodes(agreed))
    run = play(grid, tmp_path, "raising")
    (row,) = [row for row in rows(run) if row["status"] != "ok"]
    assert (row["round"], row["client"], row["reason"]) == (
        "3",
        "1",
        "OSError (see the site's log)",
    )
    assert len(run.bacc) == 5
    assert (
        "patient" not in str(grid.received)
        and "patient" not in (run.folder / "rounds.jsonl").read_text()
    )


def with_model(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], None]:
    def tamper(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        record["values"] = Array(change(record["values"].numpy().copy()))

    return tamper


def with_config(**changes: Any) -> Callable[[RecordDict], None]:
    return lambda content: content.config_records["config"].update(changes)


def without_metrics(content: RecordDict) -> None:
    del content["metrics"]


FAULTS: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "NaN": (with_model(lambda v: v * np.nan), "sent weights that are not finite"),
    "a shorter model": (with_model(lambda v: v[:-1]), "expected were"),
    "a matrix": (with_model(lambda v: v[None]), "cannot be read"),
    "float64": (with_model(lambda v: v.astype(np.float64)), "cannot be read"),
    "a stale round": (
        with_config(**{"server-round": 0}),
        "answered train of round 1, asked was train of round 3",
    ),
    "another task": (with_config(task="score"), "answered score of round 3"),
    "another client": (with_config(client=3), "answered as client 3"),
    "words for a number": (with_config(client="two"), "cannot be read"),
    "no metrics": (without_metrics, "cannot be read"),
    "no images": (
        lambda content: content["metrics"].update({"num-examples": 0}),
        "says that it has 0 images",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_answer_costs_the_site_that_round_and_nobody_else(
    fault: str, places: dict[str, Path], tmp_path: Path
) -> None:
    spoil, reason = FAULTS[fault]

    def tamper(asked: Message, reply: Message) -> Message:
        config = asked.content.config_records.get("config", {})
        if (config.get("task"), config.get("server-round"), config.get("client")) == (
            "train",
            2,
            2,
        ):
            spoil(reply.content)
        return reply

    run = play(MemoryGrid(app, nodes(places), tamper), tmp_path, "fedavg", "train.rounds=4")
    (row,) = [row for row in rows(run) if row["status"] != "ok"]
    assert (row["round"], row["client"], row["status"]) == ("3", "2", "failed") and reason in row[
        "reason"
    ]
    assert len(run.bacc) == 4


def test_site_that_hangs_past_the_round_timeout_is_left_out(
    places: dict[str, Path], tmp_path: Path
) -> None:
    def tamper(asked: Message, reply: Message) -> Message | None:
        config = asked.content.config_records.get("config", {})
        return (
            None
            if (config.get("task"), config.get("server-round"), config.get("client"))
            == ("train", 1, 0)
            else reply
        )

    run = play(
        MemoryGrid(app, nodes(places), tamper),
        tmp_path,
        "fedavg",
        "train.rounds=3",
        **{"round-timeout": 2.0},
    )
    (row,) = [row for row in rows(run) if row["status"] != "ok"]
    assert (row["round"], row["client"], row["reason"]) == ("2", "0", "no answer within 2 s")


def at_round(grid: MemoryGrid, number: int, change: Callable[[], None]) -> Tamper:
    """Calls `change` once, when the first answer of that round's training has been given."""
    done: list[bool] = []

    def tamper(asked: Message, reply: Message) -> Message:
        config = asked.content.config_records.get("config", {})
        if not done and (config.get("task"), config.get("server-round")) == ("train", number):
            done.append(True)
            change()
        return reply

    grid.tamper = tamper
    return tamper


def test_site_that_dies_and_comes_back_under_another_id_keeps_its_number(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = MemoryGrid(app, nodes(places))
    node = next(k for k, config in grid.nodes.items() if config["site"] == "north")
    config = grid.nodes[node]

    def dies() -> None:
        del grid.nodes[node]
        at_round(grid, 3, lambda: grid.nodes.update({77: config}))

    at_round(grid, 1, dies)
    with caplog.at_level(logging.INFO, logger="flwr"):
        run = play(grid, tmp_path, "fedavg", "train.rounds=6")
    statuses = {
        row["round"]: (row["status"], row["reason"]) for row in rows(run) if row["client"] == "1"
    }
    assert [statuses[str(r)][0] for r in range(1, 7)] == [
        "ok",
        "failed",
        "failed",
        "failed",
        "ok",
        "ok",
    ]
    assert statuses["2"][1] == "no answer: node unavailable" and statuses["3"][1] == "not connected"
    assert kept(run)["sites"] == ["east", "north", "south", "west"]
    assert (
        "site north is no longer connected" in caplog.text
        and "site north is connected again, now as node 77" in caplog.text
    )


def test_late_site_gets_the_next_number_and_is_scored_with_the_model_of_the_fit(
    places: dict[str, Path], tmp_path: Path
) -> None:
    late = make_site(tmp_path / "aaa", 11)  # first by name, and yet last by number
    grid = MemoryGrid(app, nodes(places))
    at_round(grid, 3, lambda: grid.nodes.update({5: {"site": "aaa", "config": str(late)}}))
    run = play(grid, tmp_path, "fednoro", "train.rounds=7")
    assert kept(run)["sites"] == ["east", "north", "south", "west", "aaa"]
    assert run.detection is not None and set(run.detection["clients"]) == {"0", "1", "2", "3", "4"}
    scored = [
        m for m in grid.sent if m.content.config_records.get("config", {}).get("task") == "score"
    ]
    assert [m.content["config"]["client"] for m in scored] == [0, 1, 2, 3, 4]
    models = [m.content["arrays"]["values"].numpy() for m in scored]
    assert all(np.array_equal(models[0], model) for model in models)
    assert int(scored[-1].content["config"]["server-round"]) > int(
        scored[0].content["config"]["server-round"]
    )
    assert [r["round"] for r in rows(run) if r["client"] == "4" and r["task"] == "train"][-1] == "7"


def test_late_site_is_judged_by_heads_that_are_learnt_without_it(
    places: dict[str, Path], tmp_path: Path
) -> None:
    more = {name: make_site(tmp_path / name, 20 + k) for k, name in enumerate(("aaa", "bbb"))}
    grid = MemoryGrid(app, nodes({**places, **more}, *NAMES, "bbb"))
    at_round(grid, 3, lambda: grid.nodes.update({5: {"site": "aaa", "config": str(more["aaa"])}}))
    run = play(
        grid, tmp_path, "fednoro-plus", "train.rounds=7", "method.revise=0", **{"start-sites": 5}
    )
    assert run.detection is not None and set(run.detection["clients"]) == {
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
    }
    asked = {
        name: [m.content for m in grid.sent if task_of(m) == name] for name in ("moments", "score")
    }
    assert [content["config"]["client"] for content in asked["moments"]] == [0, 1, 2, 3, 4]
    counted = {
        content["config"]["client"]: content["settings"]["counted"] for content in asked["score"]
    }
    assert counted == {**dict.fromkeys(range(5), True), 5: False}
    totals = [content["small"]["products"].numpy() for content in asked["score"]]
    assert all(np.array_equal(totals[0], other) for other in totals)
    sent = [
        m.content["small"]["products"].numpy() for m in grid.received if task_of(m) == "moments"
    ]
    np.testing.assert_allclose(totals[0], sum(sent), rtol=1e-12)
    assert_inventory(grid, {"query", "train", "evaluate"})


def task_of(message: Message) -> Any:
    return message.content.config_records.get("config", {}).get("task")


def test_site_that_withholds_sends_no_sums(tmp_path: Path) -> None:
    names = (*NAMES, "aaa")
    own = {
        name: make_site(tmp_path / name, k, min_count=7 if name == "east" else 0)
        for k, name in enumerate(names)
    }
    grid = MemoryGrid(app, nodes(own, *names))
    run = play(grid, tmp_path, "fednoro-plus", **{"start-sites": 5})
    sent = {
        m.content["config"]["client"]
        for m in grid.received
        if "products" in m.content.array_records.get("small", {})
    }
    assert sent == {0, 2, 3, 4}, "east is 1"
    assert run.detection is not None and "1" not in run.detection["clients"]


def test_rounds_without_any_clean_site_go_on(places: dict[str, Path], tmp_path: Path) -> None:
    grid = MemoryGrid(app, nodes(places))
    seen: list[dict[str, Any]] = []

    def tamper(asked: Message, reply: Message) -> Message | None:
        config = asked.content.config_records.get("config", {})
        if config.get("task") == "score":
            # west is noisy, and so that all are, all others too but one
            losses = [2.0, 2.0, 2.0] if config["client"] else [0.1, 0.1, 0.1]
            losses[0] += 0.01 * int(config["client"])
            reply.content.array_records["small"]["losses"] = Array(np.array(losses))
        if (
            config.get("task") == "train"
            and int(config["server-round"]) >= 3
            and config["client"] == 0
        ):
            seen.append(dict(config))
            return None
        return reply

    grid.tamper = tamper
    run = play(grid, tmp_path, "fednoro", **{"round-timeout": 1.0})
    assert len(seen) == 2 and len(run.bacc) == 5
    assert (
        "no clean client took part: models are weighted by size"
        in (run.folder / "rounds.jsonl").read_text()
    )


def test_exchange_waits_for_enough_sites(places: dict[str, Path], tmp_path: Path) -> None:
    grid = MemoryGrid(app, nodes(places))
    gone = {k: config for k, config in grid.nodes.items() if config["site"] != "north"}
    at_round(grid, 1, lambda: [grid.nodes.pop(k) for k in gone] and None)  # type: ignore[func-returns-value]
    asked = grid.get_node_ids

    def get_node_ids() -> list[int]:
        found = list(asked())
        if len(found) == 1:
            grid.nodes.update(gone)  # they come back only after somebody has waited for them
        return found

    grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    run = play(grid, tmp_path, "fedavg", "train.rounds=4", **{"min-sites": 4})
    assert [row["status"] for row in rows(run) if row["round"] in ("3", "4")] == ["ok"] * 8


# What leaves a site


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_weights_counts_class_means_and_metrics_leaves_a_site(
    method: str, places: dict[str, Path], tmp_path: Path
) -> None:
    grid = MemoryGrid(app, nodes(places))
    play(grid, tmp_path, method)
    assert_inventory(grid, {"query", "train", "evaluate"})


def test_messages_do_not_grow_with_the_number_of_images(
    places: dict[str, Path], tmp_path: Path
) -> None:
    sizes = []
    for count, name in ((1, "once"), (3, "thrice")):
        root = tmp_path / name
        more = {site: make_site(root / site, seed) for seed, site in enumerate(NAMES)}
        for place in more.values():
            for image in sorted((place.parent / "images").rglob("*.png")):
                for copy in range(1, count):
                    pixels = (np.array(Image.open(image)) + copy).astype(np.uint8)
                    Image.fromarray(pixels).save(image.with_stem(f"{image.stem}-{copy}"))
        grid = MemoryGrid(app, nodes(more))
        play(grid, root, "rofl", "train.rounds=2")
        sizes.append((len(grid.received), grid.bytes["received"]))
    (few, first), (many, second) = sizes
    assert few == many and abs(first - second) < 0.001 * first, (
        "a number may have a digit more, nothing else"
    )


def test_site_that_withholds_small_classes_sends_none_of_their_losses(tmp_path: Path) -> None:
    own = {
        name: make_site(tmp_path / name, k, min_count=7 if name == "east" else 0)
        for k, name in enumerate(NAMES)
    }
    grid = MemoryGrid(app, nodes(own))
    play(grid, tmp_path, "fednoro")
    sent = {
        m.content["config"]["client"]: m.content["small"]["losses"].numpy()
        for m in grid.received
        if m.content.config_records.get("config", {}).get("task") == "score"
    }
    assert np.isnan(sent[0]).all() and not any(np.isnan(sent[k]).any() for k in (1, 2, 3))


# A site's own disk


def test_memory_goes_back_to_where_the_coordinator_goes_back_to(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "0123456789abcdef", 3)
    assert memory.recall(1) == {}
    for clock in (1, 50, 90):
        memory.recall(clock)
        memory.keep(clock, {"labels": torch.tensor([clock])}, oldest=1)
    assert memory.recall(91)["labels"].tolist() == [90]
    assert memory.recall(90)["labels"].tolist() == [50]
    assert memory.recall(91)["labels"].tolist() == [50], (
        "what came after the moment it went back to is forgotten"
    )
    memory.keep(91, {"labels": torch.tensor([91])}, oldest=60)
    assert [int(p.stem) for p in sorted((tmp_path / "0123456789abcdef" / "3").iterdir())] == [
        50,
        91,
    ]


def test_memory_that_is_damaged_is_not_taken_for_none(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "0123456789abcdef", 0)
    memory.keep(5, {"labels": torch.arange(9)}, oldest=1)
    (file,) = memory.folder.iterdir()
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match="cannot be read"):
        memory.recall(6)


@pytest.mark.parametrize(
    "key", ["../../etc", "", "0123456789abcdef/..", "ABCDEF0123456789", "a" * 65]
)
def test_run_key_that_would_leave_the_memory_folder_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="key for this run"):
        Memory(tmp_path, key, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", "cannot be read"),
        ("device: cpu", "with a section data"),
        ("data: {name: foldr, path: x}", "did you mean folder"),
        ("data: digits\nmemry: /x", "memry"),
        ("data: digits\nheld_out: 1.5", "held_out must be in"),
        ("data: digits\nmin_count: many", "min_count"),
    ],
)
def test_mistake_in_site_yaml_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_site(tmp_path / "site.yaml")


@pytest.fixture(autouse=True)
def fresh_station() -> Iterator[None]:
    """Each test's sites are their own, as they would be in processes of their own."""
    yield
    station.cache_clear()


def test_site_that_was_put_right_is_asked_again_and_takes_part(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednoro.flower.server.roster.ASK_AGAIN_AFTER", 0.0)
    late = make_site(tmp_path / "late", 11)
    text = late.read_text()
    late.write_text("data: [")
    grid = MemoryGrid(app, nodes(places) | {5: {"site": "late", "config": str(late)}})
    at_round(grid, 1, lambda: late.write_text(text) and None)  # type: ignore[func-returns-value]
    run = play(grid, tmp_path, "fedavg", "train.rounds=4")
    assert kept(run)["sites"] == ["east", "north", "south", "west", "late"]
    assert [row["status"] for row in rows(run) if row["client"] == "4" and row["round"] == "4"] == [
        "ok"
    ]


OWN_METHOD = """
import pathlib
from dataclasses import dataclass
from fednoro.methods import Method

pathlib.Path(__file__).with_suffix(".ran").touch()


@dataclass(frozen=True)
class Own(Method):
    pass
"""


def test_site_imports_what_it_has_agreed_to_and_nothing_else(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agreed_upon.py").write_text(OWN_METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    site, ran = read_site(places["north"]), tmp_path / "agreed_upon.ran"

    def ask(site: SiteOptions, **named: str) -> None:
        sections = {"method": "fedavg", "model": "cnn", **named}
        config = {
            "seed": 0,
            "train": {},
            **{section: {"name": name} for section, name in sections.items()},
        }
        station(json.dumps({"config": config, "classes": [], "held_out": False}), site, "north", 0)

    for section in ("method", "model"):
        with pytest.raises(RefusedError, match=f"does not import the run's own {section}"):
            ask(site, **{section: "agreed_upon:Own"})
    assert not ran.exists()
    with pytest.raises(UserError, match="the classes of this site are not those of the run"):
        # further on
        ask(replace(site, modules=("agreed_upon",)), method="agreed_upon:Own")
    assert ran.exists()


def test_node_that_is_refused_ends_a_simulation(places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="site node 5 is refused: it did not say who it is"):
        play(MemoryGrid(app, nodes(places) | {5: {}}), tmp_path, "fedavg", simulation=1)
