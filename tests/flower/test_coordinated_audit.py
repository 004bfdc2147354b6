"""The audit across sites with data of their own: the same counts as in one process,
and letters that stay at home.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_grid import MemoryGrid, Tamper
from flower_sites import (
    AUDIT_ARRAYS,
    CLASSES,
    IMAGES,
    NAMES,
    assert_inventory,
    make_site,
    nodes,
    start,
)
from flwr.app import Context, Message, RecordDict
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fednoro.audit.audit_method import Audit
from fednoro.audit.estimates import findings
from fednoro.audit.simulated_audit import Outcome, Subject, examine, open_subject, verdicts_in
from fednoro.audit.site_letter import Holding, Judgement, write_letter
from fednoro.cli.flower import app as commands
from fednoro.core.types import UserError
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher
from fednoro.experiment.simulation import Lab, hardware_for
from fednoro.flower import server_app
from fednoro.flower.client_app import app
from fednoro.flower.ops.run_follower import AuditFollower
from fednoro.flower.server.coordinated_audit import audit_sites
from fednoro.flower.server.coordinator import coordinate
from fednoro.flower.server.message_exchange import SiteError
from fednoro.flower.server.run_config import AuditOrder
from fednoro.flower.site.site_memory import Memory
from fednoro.flower.site.station import load_data, read_site, station, two_parts
from fednoro.methods.fednoro_plus import SOFT

pytestmark = pytest.mark.usefixtures("one_thread")

SORTED = sorted(NAMES)
ROUNDS = 3


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, its sites beside it; one of them has wrong labels."""
    root = tmp_path_factory.mktemp("audited")
    places = {
        name: make_site(root / "sites" / name, seed, wrong=name == "west")
        for seed, name in enumerate(NAMES)
    }
    coordinate(MemoryGrid(app, nodes(places)), start(root, "fednoro", "train.rounds=3"))
    station.cache_clear()
    return root


@pytest.fixture
def run(ran: Path, tmp_path: Path) -> Path:
    """A copy of the run folder for a test of its own."""
    return Path(shutil.copytree(ran / "run", tmp_path / "run"))


@pytest.fixture
def places(ran: Path, tmp_path: Path) -> dict[str, Path]:
    """The sites, each with a memory folder of its own for this test."""
    return {name: changed(ran / "sites" / name, tmp_path / name) for name in NAMES}


@pytest.fixture(autouse=True)
def fresh_station() -> Iterator[None]:
    yield
    station.cache_clear()


def changed(site: Path, place: Path, **options: Any) -> Path:
    place.mkdir(exist_ok=True)
    text = (site / "site.yaml").read_text().replace(str(site / "memory"), str(place / "memory"))
    (place / "site.yaml").write_text(
        text + "".join(f"{key}: {json.dumps(v)}\n" for key, v in options.items())
    )
    return place / "site.yaml"


def ordered(run: Path, **options: Any) -> dict[str, Any]:
    order = AuditOrder(str(run), **{"rounds": ROUNDS, "min_cell": 0, **options})
    return {"audit": order.as_json(), "min-sites": 2, "round-timeout": 60.0, "wait-timeout": 30.0}


def letters(places: dict[str, Path], name: str) -> list[Path]:
    return sorted((places[name].parent / "memory" / "audits").rglob("*.*"))


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "audit" / "exchanges" / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def simulated(run: Path, places: dict[str, Path], audit: Audit) -> tuple[Outcome, list[Dataset]]:
    """The audit in one process, of all sites' images together."""
    config, parts = (
        resolve(run / "config.yaml"),
        [load_data(read_site(places[name])) for name in SORTED],
    )
    pooled = Dataset(
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.labels for part in parts]),
        CLASSES,
    )
    ends = np.cumsum([len(part) for part in parts])
    clients = [
        Client(k, name, np.arange(ends[k] - len(parts[k]), ends[k]), parts[k].labels)
        for k, name in enumerate(SORTED)
    ]
    lab = Lab(config, pooled, hardware_for(config), Watcher())
    return examine(Subject(run, config, None, lab, None), audit, clients), parts  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", ["early", "cross_fit"])
def test_counts_page_and_letters_are_those_of_the_audit_in_one_process(
    scores: Any, run: Path, places: dict[str, Path], tmp_path: Path
) -> None:
    audit = Audit(scores=scores, warmup=ROUNDS, folds=2)
    there = audit_sites(MemoryGrid(app, nodes(places)), ordered(run, scores=scores, folds=2))
    here, parts = simulated(run, places, audit)
    assert there == run / "audit" and (there / "index.html").is_file()
    found = findings(
        here.counts, here.joints, SORTED, CLASSES, 0, verdicts_in(run / "detection.json")
    )
    said = json.loads((there / "audit.json").read_text())
    assert [site["name"] for site in said["sites"]] == SORTED and said["images"] == len(
        NAMES
    ) * IMAGES
    assert [site["suspected"] for site in said["sites"]] == [site.suspected for site in found.sites]
    table = [list(row["looks_like"].values()) for row in said["labelled_looks_like"]]
    np.testing.assert_array_equal(table, np.sum(list(here.joints.values()), axis=0))
    assert np.trace(table) > 0 and len({site["verdict"] for site in said["sites"]} - {None}) > 0
    for k, name in enumerate(SORTED):
        images = next(path for path in letters(places, name) if path.name == "images.csv")
        site = Holding(name, parts[k].images, parts[k].labels, parts[k].ids or (), CLASSES)
        write_letter(
            tmp_path / "here" / name,
            site,
            Judgement(here.probabilities[k], here.thresholds, audit.explain()),
        )
        for file in ("images.csv", "accepted.csv", "letter.html"):
            assert (
                images.with_name(file).read_bytes()
                == (tmp_path / "here" / name / file).read_bytes()
            )


def test_corrected_labels_of_a_run_are_judged_at_the_sites_that_have_them(tmp_path: Path) -> None:
    places = {
        name: make_site(tmp_path / name, seed, wrong=name == "west")
        for seed, name in enumerate(NAMES)
    }
    west = SORTED.index("west")
    grid = MemoryGrid(app, nodes(places))
    coordinate(
        grid,
        start(
            tmp_path, "fednoro-plus", "train.rounds=5", "method.warmup=2", f"method.noisy=[{west}]"
        ),
    )
    station.cache_clear()
    run = tmp_path / "run"
    grid = MemoryGrid(app, nodes(places))
    audit_sites(grid, ordered(run, scores="corrected"))
    asked = {
        str(m.content["config"]["task"])
        for m in grid.received
        if "task" in m.content.config_records["config"]
    }
    assert asked == {"predict", "sums", "joint"}, "nothing is trained"
    assert_inventory(grid, {"query", "train"}, AUDIT_ARRAYS)
    key = json.loads((run / "flower.json").read_text())["run"]
    memory = places["west"].parent / "memory"
    q = Memory(memory, key, west).newest()[SOFT].numpy()
    site = read_site(places["west"])
    dataset = load_data(site)
    trained, _ = two_parts(dataset, site.held_out, 0)
    labels = dataset.labels[trained]
    assert len(labels) < len(dataset), "some images were held out, and are not in the letter"
    with next(memory.glob("audits/*/images.csv")).open(newline="") as file:
        listed = sorted(float(row["p_given"]) for row in csv.DictReader(file))
    assert listed == pytest.approx(sorted(q[np.arange(len(q)), labels].tolist()), abs=1e-3)
    assert "corrected them to" in (run / "audit" / "index.html").read_text()
    for name in NAMES:
        number = SORTED.index(name)
        assert (SOFT in Memory(places[name].parent / "memory", key, number).newest()) == (
            name == "west"
        )


def test_a_run_without_corrected_labels_is_refused_before_anybody_is_asked(
    run: Path, places: dict[str, Path]
) -> None:
    grid = MemoryGrid(app, nodes(places))
    with pytest.raises(UserError, match="has no corrected labels: fednoro-plus leaves them"):
        audit_sites(grid, ordered(run, scores="corrected"))
    assert not any("task" in message.content.config_records["config"] for message in grid.received)


def test_letter_is_at_the_site_and_nothing_of_it_at_the_coordinator(
    run: Path, places: dict[str, Path]
) -> None:
    audit_sites(MemoryGrid(app, nodes(places)), ordered(run))
    for seed, name in enumerate(NAMES):
        files = letters(places, name)
        assert [path.name for path in files] == ["accepted.csv", "images.csv", "letter.html"]
        assert (files[0].parents[1].stat().st_mode & 0o777) == 0o700, (
            "images: for the node's user alone"
        )
        page, table = files[2].read_text(), files[1].read_text()
        assert f"patient-{seed}-0.png" in page and "data:image/" in page
        assert table.count(f"patient-{seed}-") == IMAGES
    kept = [path for path in (run / "audit").rglob("*") if path.is_file()]
    assert {path.name for path in kept} == {
        "index.html",
        "audit.json",
        "clients.csv",
        "flower.json",
        "sites.json",
        "result.json",
        ".lock",
    }
    for path in kept:
        content = path.read_bytes()
        assert (
            b"patient-" not in content and b"data:image" not in content and b".png" not in content
        )


@pytest.mark.parametrize("scores", ["early", "cross_fit"])
def test_nothing_but_weights_sums_and_counts_leaves_a_site(
    scores: str, run: Path, places: dict[str, Path]
) -> None:
    grid = MemoryGrid(app, nodes(places))
    audit_sites(grid, ordered(run, scores=scores, folds=2))
    assert_inventory(grid, {"query", "train"}, AUDIT_ARRAYS)
    sent = {
        str(m.content["config"]["task"]): set(m.content["small"]) | set(m.content) & {"arrays"}
        for m in grid.received
        if "task" in m.content.config_records["config"]
    }
    assert sent == {
        "train": {"arrays"},
        "predict": {"counts"},
        "sums": {"sums", "counts"},
        "joint": {"joint"},
    }


def test_messages_do_not_grow_with_the_number_of_images(run: Path, tmp_path: Path) -> None:
    sizes = []
    for count in (1, 3):
        more = {
            name: make_site(tmp_path / str(count) / name, seed) for seed, name in enumerate(NAMES)
        }
        for place in more.values():
            for image in sorted((place.parent / "images").rglob("*.png")):
                for copy in range(1, count):
                    pixels = (np.array(Image.open(image)) + copy).astype(np.uint8)
                    Image.fromarray(pixels).save(image.with_stem(f"{image.stem}-{copy}"))
        grid = MemoryGrid(app, nodes(more))
        audit_sites(grid, ordered(run, scores="cross_fit", folds=2, rounds=1))
        sizes.append((len(grid.received), grid.bytes["received"]))
    (few, first), (many, second) = sizes
    assert few == many and abs(first - second) < 0.001 * first, (
        "a number may have a digit more, nothing else"
    )


@pytest.mark.parametrize(
    ("options", "takes_part"),
    [
        ({}, True),
        ({"min_count": 3}, False),
        ({"score_epsilon": 3}, False),
        ({"min_count": 3, "score_epsilon": 3, "audit": True}, True),
        ({"audit": False}, False),
    ],
)
def test_protected_site_takes_no_part_unless_it_says_so(
    options: dict[str, Any], takes_part: bool, ran: Path, run: Path, places: dict[str, Path]
) -> None:
    changed(ran / "sites" / "east", places["east"].parent, **options)
    grid = MemoryGrid(app, nodes(places))
    audit_sites(grid, ordered(run, rounds=1))
    said = json.loads((run / "audit" / "audit.json").read_text())
    assert said["without_answer"] == ([] if takes_part else ["east"])
    assert bool(letters(places, "east")) == takes_part and letters(places, "west")
    answers = [row for row in rows(run) if row["client"] == str(SORTED.index("east"))]
    assert {row["status"] for row in answers} == {"ok" if takes_part else "failed"}
    if not takes_part:
        assert {row["reason"] for row in answers} == {
            "RefusedError: this site takes no part in audits (audit in its site.yaml)"
        }
        mine = [m for m in grid.received if "error" in m.content.config_records["config"]]
        assert mine and all(set(m.content) == {"config"} for m in mine), "not even weights"


def test_audit_that_every_site_refuses_ends_with_their_reason(
    ran: Path, run: Path, places: dict[str, Path]
) -> None:
    for name in NAMES:
        changed(ran / "sites" / name, places[name].parent, audit=False)
    with pytest.raises(SiteError, match="takes no part in audits"):
        audit_sites(MemoryGrid(app, nodes(places)), ordered(run))
    assert not (run / "audit" / "audit.json").exists()


class KilledError(BaseException):
    """What SIGKILL looks like from inside."""


def killing(task: str, number: int) -> Tamper:
    def tamper(asked: Message, reply: Message) -> Message:
        config = asked.content.config_records.get("config", {})
        if (config.get("task"), config.get("server-round"), config.get("client")) == (
            task,
            number,
            2,
        ):
            raise KilledError
        return reply

    return tamper


@pytest.mark.parametrize(("task", "number"), [("train", 1), ("predict", ROUNDS), ("joint", ROUNDS)])
def test_audit_that_was_killed_goes_on_to_the_same_counts(
    task: str, number: int, run: Path, places: dict[str, Path]
) -> None:
    with pytest.raises(KilledError):
        audit_sites(MemoryGrid(app, nodes(places), killing(task, number)), ordered(run))
    grid = MemoryGrid(app, nodes(places))
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=ordered(run)
    )
    server_app.app(grid, context)
    first = next(m for m in grid.sent if "config" in m.content.config_records)
    assert (first.content["config"]["task"], first.content["config"]["server-round"]) == (
        task,
        number,
    )
    here, _ = simulated(run, places, Audit(warmup=ROUNDS))
    said = json.loads((run / "audit" / "audit.json").read_text())
    table = [list(row["looks_like"].values()) for row in said["labelled_looks_like"]]
    np.testing.assert_array_equal(table, np.sum(list(here.joints.values()), axis=0))
    assert [row["round"] for row in rows(run) if row["client"] == "0"] == [
        "1",
        "2",
        "3",
        "4",
        "4",
        "4",
    ]


def test_finished_audit_is_made_anew_and_another_order_does_not_go_on(
    run: Path, places: dict[str, Path]
) -> None:
    audit_sites(MemoryGrid(app, nodes(places)), ordered(run, rounds=1))
    audit_sites(MemoryGrid(app, nodes(places)), ordered(run, rounds=1))
    with pytest.raises(KilledError):
        audit_sites(MemoryGrid(app, nodes(places), killing("predict", 1)), ordered(run, rounds=1))
    audit_sites(MemoryGrid(app, nodes(places)), ordered(run, rounds=2))
    assert [row["task"] for row in rows(run) if row["client"] == "0"] == [
        "train",
        "train",
        "predict",
        "sums",
        "joint",
    ]
    assert len({path.parent for path in letters(places, "north") if path.is_file()}) == 3


def test_site_that_was_away_when_labels_were_judged_is_named(
    run: Path, places: dict[str, Path]
) -> None:
    grid = MemoryGrid(app, nodes(places))
    node = next(k for k, config in grid.nodes.items() if config["site"] == "north")
    config = grid.nodes.pop(node)

    def tamper(asked: Message, reply: Message) -> Message:
        if asked.content.config_records.get("config", {}).get("task") == "predict":
            grid.nodes[node] = config
        return reply

    grid.tamper = tamper
    audit_sites(grid, ordered(run, rounds=1))
    assert json.loads((run / "audit" / "audit.json").read_text())["without_answer"] == ["north"]
    console = Console(record=True, width=200, force_terminal=False)
    follower = AuditFollower(console, run / "audit" / "exchanges", 2, quiet=False)
    follower.look()
    assert follower.done
    follower.tell()
    said = console.export_text()
    assert "round   2/2  joint" in said and "without an answer: north" in said and "west" in said
    assert f"page: {run / 'audit' / 'index.html'}" in said.replace("\n", "")


def test_run_is_audited_where_its_images_are(run: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(
            UserError, match=r"are at its sites: audit it there, with `fednoro flower audit"
        ),
        open_subject(run, Watcher()),
    ):
        pass
    kept = json.loads((run / "flower.json").read_text())
    (run / "flower.json").write_text(json.dumps({**kept, "simulation": True}))
    done = CliRunner().invoke(commands, ["audit", str(run)])
    assert isinstance(
        done.exception, UserError
    ) and "were simulated: audit it with `fednoro audit" in str(done.exception)
    with pytest.raises(UserError, match=r"cannot be audited on Flower: it has no config\.yaml"):
        AuditOrder.read(AuditOrder(str(tmp_path)).as_json())
    with pytest.raises(UserError, match="run-config audit is not an order"):
        AuditOrder.read('{"run": ".", "rounds": 0}')
