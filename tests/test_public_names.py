"""The public names: what users import, type, and read from a run folder. Moving code keeps them.

Everything here is reached from outside: through `import fednoro`, the command line or its files.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open

import fednoro

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
KEYS_FILE = Path(__file__).with_name("public_names") / "option_keys.json"
OPTION_KEYS = json.loads(KEYS_FILE.read_text(encoding="utf-8"))

# What `import fednoro` offers

EXPORTED = (
    "run", "resume", "load", "load_model", "export", "predict", "compare", "write_report", "Run",
    "Dataset", "Method", "Task", "Reply", "State", "Step", "option", "UserError",
    "aggregate", "data", "detect", "detection", "indicators", "losses", "methods", "metrics",
    "mixture", "models", "noise", "partition",
)  # fmt: skip
FUNCTIONS = (
    "run", "resume", "load", "load_model", "export", "predict", "compare", "write_report", "option",
)  # fmt: skip
PIECES = {  # each with the names that README, docs, notebooks and examples use
    "aggregate": ("average", "daagg_weights", "distance_weights", "size_weights"),
    "data": ("SOURCES", "Dataset", "Synthetic"),
    "detect": ("NoisyClientDetector",),
    "indicators": ("INDICATORS", "confidence", "lid", "mean_lid", "mean_loss"),
    "losses": ("distill", "log_prior", "logit_adjusted_ce", "per_class_losses", "symmetric_ce"),
    "methods": ("METHODS", "Method", "FedLA", "FedNoRo", "FedNoRoPlus", "FedProx"),
    "metrics": ("balanced_accuracy", "best_last", "confusion", "per_class_recall"),
    "mixture": ("detection_over_seeds", "fit_mixtures", "starting_points"),
    "models": ("MODELS", "Cnn", "Resnet18", "Resnet34", "Resnet50"),
    "noise": ("NOISES", "flip_labels", "pair_flip", "symmetric", "transition"),
    "partition": ("PARTITIONS", "bernoulli_dirichlet", "by_column", "dirichlet", "iid"),
}
RUN_ATTRIBUTES = ("bacc", "best", "config", "detection", "federation", "folder", "last")
FEDERATION_ATTRIBUTES = ("names", "noisy", "rates")
FLOWER = ("FedNoRo", "log_prior", "score", "site_loss")
FLOWER_APPS = {
    "serverapp": "fednoro.flower.server_app:app",
    "clientapp": "fednoro.flower.client_app:app",
}


def test_the_package_exports_its_functions_and_pieces() -> None:
    assert set(EXPORTED) == set(dir(fednoro))
    assert all(callable(getattr(fednoro, name)) for name in FUNCTIONS)
    assert isinstance(fednoro.Run, type)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_name_is_reached_as_an_attribute(name: str) -> None:
    assert getattr(fednoro, name) is not None


@pytest.mark.parametrize(
    ("piece", "name"),
    [(piece, name) for piece, names in PIECES.items() for name in names],
)
def test_a_piece_has_the_names_that_the_documentation_uses(piece: str, name: str) -> None:
    assert hasattr(getattr(fednoro, piece), name), f"fednoro.{piece}.{name} is gone"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nowhere"):
        _ = fednoro.nowhere


# The words of the command line

QUIET = ("--quiet", "-q")
BENCH = ("--data", "--jobs", "--out", "--quick", "--ranges", "--rates", "--seeds", "-j", *QUIET)
COMMANDS: dict[str, tuple[str, ...]] = {
    "": ("--version",),
    "run": QUIET,
    "resume": QUIET,
    "prepare": ("--from", "--size", "--to", *QUIET),
    "config": (),
    "ls": (),
    "report": ("--watch",),
    "compare": ("--against", "--to"),
    "figures": ("--column", "--format", "--only", "--to"),
    "audit": (
        "--device", "--folds", "--force", "--min-cell", "--out", "--rounds", "--scores", "--top",
        *QUIET,
    ),
    "export": ("--onnx", "--safetensors"),
    "predict": ("--batch", "--to", "--top", *QUIET),
    "bench": (),
    "bench all": (*BENCH, "--mixture-seeds", "--rounds"),
    "bench figure-partition": BENCH,
    "bench figure-t1": (*BENCH, "--mixture-seeds", "--rounds"),
    "bench table1": (*BENCH, "--methods", "--rounds"),
    "bench table2": (*BENCH, "--methods", "--rounds"),
    "bench table3": (*BENCH, "--mixture-seeds", "--rounds"),
    "bench table4": (*BENCH, "--rounds"),
    "flower": (),
    "flower audit": (
        "--folds", "--min-cell", "--min-sites", "--round-timeout", "--rounds", "--scores",
        "--superlink", *QUIET,
    ),
    "flower certs": ("--days", "--force", "--host", "--sites"),
    "flower init": (),
    "flower run": (
        "--min-sites", "--resume", "--round-timeout", "--start-sites", "--superlink", *QUIET,
    ),
    "flower simulate": ("--cpus", "--resume", "--round-timeout", "--sites", *QUIET),
    "flower site": (),
    "flower site check": (
        "--classes", "--full", "--json", "--key", "--root-certificates", "--run-config",
        "--superlink",
    ),
    "flower site init": (),
}  # fmt: skip


Main = Callable[[], None]


@pytest.fixture(scope="module")
def entry() -> EntryPoint:
    """The console script, as pip would install it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return EntryPoint("fednoro", project["scripts"]["fednoro"], "console_scripts")


@pytest.fixture
def main(entry: EntryPoint) -> Main:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer uses what click will drop
        function: Main = entry.load()
    return function


def options_of(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Every command below this one, with the names of its options."""
    options = [option for option in command.params if option.param_type_name == "option"]
    yield (
        " ".join(words),
        {name for option in options for name in (*option.opts, *option.secondary_opts)},
    )
    for word, below in getattr(command, "commands", {}).items():
        yield from options_of(below, (*words, word))


def test_every_command_has_its_words_and_options(entry: EntryPoint, main: Main) -> None:
    import typer

    assert entry.value == "fednoro.cli:main" and callable(main)
    app = importlib.import_module(entry.module).app
    assert isinstance(app, typer.Typer)
    commands = dict(options_of(typer.main.get_command(app)))
    assert commands == {words: set(options) for words, options in COMMANDS.items()}


def test_what_a_command_is_for_is_one_line(entry: EntryPoint) -> None:
    """A list of commands shows line ends as they are, in the middle of a sentence."""
    import typer

    def check(command: Any, words: str) -> None:
        first, *_ = (command.help or "").strip().split("\n\n")
        assert first and "\n" not in first, f"fednoro{words}: put the text into a constant"
        for word, below in getattr(command, "commands", {}).items():
            check(below, f"{words} {word}")

    check(typer.main.get_command(importlib.import_module(entry.module).app), "")


# The keys of a configuration

LISTED = {  # the words of `fednoro ls`, each with its section of a configuration
    "methods": "method",
    "data": "data",
    "partitions": "partition",
    "noise": "noise",
    "models": "model",
    "split": "split",
    "train": "train",
    "general": "general",
}
Call = Callable[..., str]


@pytest.fixture
def call(
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """Runs a command in this process and returns what it prints."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fednoro", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setenv("COLUMNS", "1000")  # no line is wrapped
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert not end.value.code, printed.err
        return printed.out

    return run


def listed_options(text: str) -> dict[str, dict[str, str]]:
    """Every choice in the output of `fednoro ls`, with its options and their defaults."""
    tables: dict[str, list[str]] = {}
    for line in filter(str.strip, text.splitlines()):
        if line.startswith(" "):
            tables[list(tables)[-1]].append(line)
        else:
            tables[line.split("  ")[0]] = []
    return {choice: dict(columns(lines)) for choice, lines in tables.items()}


def columns(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The first two columns of a table, which begin where the longest cell before them ends."""
    keys = [line.split()[0] for line in lines]
    start = len("   ") + max(map(len, keys), default=0) + len("    ")
    yield from zip(keys, (line[start:].split(" ")[0] for line in lines), strict=True)


@pytest.mark.parametrize("word", LISTED)
def test_every_option_keeps_its_key_and_default(word: str, call: Call) -> None:
    assert listed_options(call("ls", word)) == OPTION_KEYS[LISTED[word]]


def test_every_listed_word_and_preset_stays(call: Call) -> None:
    listed = [line.split() for line in call("ls").splitlines()[1:]]
    assert {words[0] for words in listed} == {*LISTED, "presets"}
    presets = [line.split()[0] for line in call("ls", "presets").splitlines()[1:]]
    assert presets == OPTION_KEYS["presets"]


@pytest.mark.parametrize(
    ("section", "choice"),
    [
        (section, choice)
        for section in ("data", "partition", "noise", "model", "method")
        for choice in OPTION_KEYS[section]
        if choice != "factory"  # its name is the function's own
    ],
)
def test_a_configuration_holds_every_option(section: str, choice: str, call: Call) -> None:
    options = OPTION_KEYS[section][choice]
    needed = [f"{section}.{key}=x" for key, value in options.items() if value == "required"]
    tree = yaml.safe_load(call("config", "digits", f"{section}={choice}", *needed))
    assert list(tree[section]) == ["name", *options]
    assert tree[section]["name"] == choice


def test_a_configuration_has_all_sections(call: Call) -> None:
    tree = yaml.safe_load(call("config"))
    sections = set(LISTED.values()) - {"general"}
    assert set(tree) == {*sections, *OPTION_KEYS["general"]["general"]}
    assert set(tree["split"]) == set(OPTION_KEYS["split"]["split"])
    assert set(tree["train"]) == set(OPTION_KEYS["train"]["train"])
    assert set(tree["train"]["augment"]) == set(OPTION_KEYS["train"]["train.augment"])


# The files of a run folder

FILES = (
    "checkpoints/config.yaml", "checkpoints/round-NNNNN.safetensors", "clients.csv", "config.yaml",
    "detection.json", "environment.json", "model.safetensors", "report.html", "result.json",
    "rounds.jsonl", "split.csv", "split.npz",
)  # fmt: skip
CLIENTS_CSV = (
    "round", "task", "client", "status", "size", "loss", "weight", "distance", "lam", "sce",
    "confidence", "lid", "mu", "relabelled", "left_received", "left_own", "reason",
)  # fmt: skip
RESULT_JSON = (
    "best", "last", "final", "best_round", "best_by_validation", "best_round_by_validation",
    "rounds", "seconds", "bacc", "detection", "leakage", "image",
)  # fmt: skip
ROUNDS_JSONL = (
    "round", "stage", "seconds", "bacc", "loss", "recall", "confusion", "train_loss", "clients",
    "validation_bacc",
)  # fmt: skip
DETECTION_JSON = ("reason", "clients", "flagged", "noisy", "recall", "precision", "exact")
DETECTION_OF_A_CLIENT = ("losses", "counts", "round", "noisy", "posterior")
ENVIRONMENT_JSON = (
    "fednoro", "python", "platform", "processors", "threads", "device", "packages", "command",
)  # fmt: skip
SPLIT_NPZ = (
    "train", "validation", "test", "members", "sizes", "names", "classes", "clean", "observed",
    "flipped", "noisy", "rates", "fingerprint", "leakage",
)  # fmt: skip
MODEL_TENSORS = (
    "fc.bias", "fc.weight", "trunk.0.weight", "trunk.4.weight", "trunk.8.weight",
    *(
        f"trunk.{layer}.{name}"
        for layer in (1, 5, 9)
        for name in ("bias", "num_batches_tracked", "running_mean", "running_var", "weight")
    ),
)  # fmt: skip
ROUNDS, CLIENTS = 3, 5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run with a validation part that has judged its clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fednoro.run(
            "digits", f"train.rounds={ROUNDS}", "method.warmup=1", f"partition.clients={CLIENTS}",
            "noise.epochs=1", "split.validation=0.1", "device=cpu",
            f"out={tmp_path_factory.mktemp('runs')}",
        )  # fmt: skip


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_folder_has_its_files(finished: Any) -> None:
    names = {path.relative_to(finished.folder) for path in finished.folder.rglob("*")}
    shown = [name.as_posix() for name in names if not name.name.startswith(".")]
    patterns = {re.sub(r"round-\d{5}\.", "round-NNNNN.", name) for name in shown}
    assert sorted(patterns - {"checkpoints"}) == sorted(FILES)
    assert (finished.folder / "checkpoints" / f"round-{ROUNDS:05d}.safetensors").is_file()


def test_a_run_has_the_attributes_that_the_documentation_uses(finished: Any) -> None:
    again = fednoro.load(finished.folder)
    for run in (finished, again):
        assert all(getattr(run, name) is not None for name in RUN_ATTRIBUTES)
        assert all(len(getattr(run.federation, name)) == CLIENTS for name in FEDERATION_ATTRIBUTES)
    assert again.bacc == finished.bacc and len(again.bacc) == ROUNDS


def test_clients_csv_keeps_its_columns(finished: Any) -> None:
    with (finished.folder / "clients.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == CLIENTS_CSV
    assert {row["task"] for row in table} == {"train", "score"}
    assert {row["status"] for row in table} == {"ok"}


def test_rounds_jsonl_keeps_its_keys(finished: Any) -> None:
    lines = (finished.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["round"] for record in records] == list(range(1, ROUNDS + 1))
    assert all(set(record) == set(ROUNDS_JSONL) for record in records)


def test_result_and_detection_keep_their_keys(finished: Any) -> None:
    result = read_json(finished.folder / "result.json")
    assert set(result) == set(RESULT_JSON)
    detection = read_json(finished.folder / "detection.json")
    assert set(detection) == set(result["detection"]) == set(DETECTION_JSON)
    assert set(detection["clients"]) == {str(k) for k in range(CLIENTS)}
    for row in detection["clients"].values():
        assert set(row) == set(DETECTION_OF_A_CLIENT)


def test_environment_keeps_its_keys(finished: Any) -> None:
    environment = read_json(finished.folder / "environment.json")
    assert set(environment) == set(ENVIRONMENT_JSON)
    assert {"torch", "numpy", "scikit-learn", "safetensors"} <= set(environment["packages"])


def test_the_split_keeps_its_arrays_and_columns(finished: Any) -> None:
    with np.load(finished.folder / "split.npz", allow_pickle=False) as split:
        assert set(split) == set(SPLIT_NPZ)
        assert len(split["sizes"]) == CLIENTS and split["sizes"].sum() == len(split["members"])
    lines = (finished.folder / "split.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "id,part"
    assert {line.rpartition(",")[2] for line in lines[1:]} == {"train", "validation", "test"}


def test_the_model_keeps_its_tensors_and_metadata(finished: Any) -> None:
    with safe_open(finished.folder / "model.safetensors", framework="np") as file:
        assert set(file.keys()) == set(MODEL_TENSORS)
        metadata: Mapping[str, str] = file.metadata()
    assert set(metadata) == {"fednoro"}
    assert json.loads(metadata["fednoro"]) == {"model": "cnn", "classes": list("0123456789")}
    assert set(fednoro.load_model(finished.folder).state_dict()) == set(MODEL_TENSORS)


# Flower


@pytest.mark.parametrize(("part", "kind"), [("serverapp", "ServerApp"), ("clientapp", "ClientApp")])
def test_flowers_app_strings_lead_to_apps(part: str, kind: str) -> None:
    flwr = pytest.importorskip(f"flwr.{part}")
    app = EntryPoint(part, FLOWER_APPS[part], "flower").load()
    assert isinstance(app, getattr(flwr, kind))


def test_the_example_app_names_flowers_app_strings() -> None:
    path = ROOT / "examples" / "flower" / "app" / "pyproject.toml"
    app = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    assert app["components"] == FLOWER_APPS


@pytest.mark.parametrize("name", FLOWER)
def test_the_flower_package_has_the_names_that_the_documentation_uses(name: str) -> None:
    pytest.importorskip("flwr")
    assert callable(getattr(importlib.import_module("fednoro.flower"), name))
