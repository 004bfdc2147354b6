"""A method of one's own, by its module and class: run, resumed and used from the command line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import fednoro
from fednoro.bench.jobs import share_warmups, train
from fednoro.bench.paper import Setting
from fednoro.bench.plan import Order
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import dump, resolve
from fednoro.methods import METHODS, Method, find_method, name_of

SOURCE = '''
from dataclasses import dataclass

from fednoro.methods import METHODS, FedNoRo, Method
from fednoro.core.options import option


@dataclass(frozen=True)
class Scaled(Method):
    """FedAvg with a loss that is scaled."""

    by: float = option(2.0, "what the loss is multiplied by", gt=0)

    def loss(self, step):
        return self.by * super().loss(step)


METHODS["scaled"] = Scaled


class Outer:
    @dataclass(frozen=True)
    class Inner(Method):
        """In another class."""


def made():
    @dataclass(frozen=True)
    class Hidden(Method):
        """In a function, where nobody finds it."""

    return Hidden


@dataclass(frozen=True)
class Sub(FedNoRo):
    """FedNoRo with a loss of its own."""

    def loss(self, step):
        return 2 * super().loss(step)


class Loose(Method):
    """No dataclass: its options would not be seen."""

    by: float = 2.0


class Plain:
    """No method."""
'''
TINY = (
    "digits",
    "data={name: synthetic, images: 80, classes: 3, size: 8, channels: 1}",
    "device=cpu",
    "partition={name: iid, clients: 2}",
    "noise=none",
    "model={name: cnn, width: 4}",
    "train.rounds=2",
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"own_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}_broken.py").write_text("raise ValueError('mutable default')\n")
    (tmp_path / f"{name}_needy.py").write_text("import no_such_dependency\n")
    (tmp_path / f"{name}_torn.py").write_text("def f(:\n")
    yield name
    METHODS.pop("scaled", None)
    sys.modules.pop(name, None)


def fednoro_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fednoro", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_configuration_names_it_so_that_another_process_finds_it(module: str) -> None:
    config = resolve(TINY[0], [*TINY[1:], f"method={module}:Scaled", "method.by=3"])
    assert type(config.method).__name__ == "Scaled" and vars(config.method)["by"] == 3
    assert METHODS["scaled"] is type(config.method), "the module registers it by a name of its own"
    assert yaml.safe_load(dump(config))["method"] == {"name": f"{module}:Scaled", "by": 3.0}
    assert resolve(yaml.safe_load(dump(config))) == config
    assert resolve(TINY[0], [*TINY[1:], "method=scaled"]).method == type(config.method)()
    table = {
        "preset": "digits",
        "methods": {f"{module}:Scaled": {"by": 5}},
        "method": f"{module}:Scaled",
    }
    assert vars(resolve(table).method)["by"] == 5


def test_options_of_a_method_in_a_package_are_set_by_overrides(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_package").mkdir()
    (tmp_path / f"{module}_package" / "mine.py").write_text(SOURCE)
    name = f"{module}_package.mine:Scaled"
    config = resolve(TINY[0], [*TINY[1:], f"methods.{name}.by=7", f"method={name}"])
    assert vars(config.method)["by"] == 7


def test_a_class_that_cannot_be_found_by_its_own_name_goes_by_the_registered_one(
    module: str, tmp_path: Path
) -> None:
    own = importlib.import_module(module)
    assert name_of(own.Outer.Inner) == f"{module}:Outer.Inner" and find_method(
        f"{module}:Outer.Inner"
    )
    hidden = own.made()
    with pytest.raises(
        UserError, match="can be found by nobody: put it into a module, or register it in METHODS"
    ):
        name_of(hidden)
    METHODS["scaled"] = hidden  # which the fixture takes out again
    run = fednoro.run(*TINY, "method=scaled", f"out={tmp_path}")
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["method"]["name"] == "scaled"


def test_in_a_table_it_is_played_from_its_own_first_round_and_scaled_like_what_it_extends(
    module: str, tmp_path: Path
) -> None:
    order = Order("digits", (), (0,), tmp_path, rounds=20)
    setting = Setting(0.4, 0.5, 0.7)
    own, paper = (
        train(order.config(row, setting, 0), tmp_path) for row in (f"{module}:Sub", "fednoro")
    )
    assert ":" not in str(own.config.name) and vars(own.config.method)["warmup"] < 20
    alone, *_ = share_warmups(
        [own, paper, train(order.config("fedla", setting, 0), tmp_path)], tmp_path, 3
    )
    assert alone.earlier_run is None, "its loss is not FedLA's"


def test_registered_methods_keep_their_names() -> None:
    for name, kind in METHODS.items():
        assert name_of(kind) == name and find_method(name) is kind


def test_a_class_of_the_main_program_goes_by_its_registered_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type("Mine", (Method,), {"__module__": "__main__"})
    monkeypatch.setitem(METHODS, "mine", kind)
    assert name_of(kind) == "mine"


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("{}:Gone", "cannot be imported (AttributeError: module '{}' has no attribute 'Gone')"),
        ("{}_broken:X", "cannot be imported (ValueError: mutable default"),
        ("{}_needy:X", "cannot be imported (No module named 'no_such_dependency')"),
        ("{}_torn:X", "cannot be imported (SyntaxError: "),
        (
            "nowhere:Scaled",
            "cannot be imported (No module named 'nowhere'): is "
            "nowhere in the folder that you are in",
        ),
        (".x:Scaled", "cannot be imported"),
        (":Scaled", "cannot be imported"),
        ("{}:Loose", "is no method: it must be a frozen dataclass that extends fednoro's Method"),
        ("{}:Plain", "is no method"),
        ("os:path", "is no method"),
    ],
)
def test_what_is_no_method_is_refused(module: str, name: str, about: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(TINY[0], [*TINY[1:], f"method={name.format(module)}"])
    assert about.format(module) in str(caught.value)
    assert ("the folder that you are in" in str(caught.value)) == (name == "nowhere:Scaled")


def test_from_the_command_line_to_predictions(module: str, tmp_path: Path) -> None:
    ended = fednoro_command("run", *TINY, f"method={module}:Scaled", "method.by=3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "runs" / "synthetic-scaled-seed0"
    (folder / "result.json").unlink()
    ended = fednoro_command("resume", str(folder), cwd=tmp_path)
    assert ended.returncode == 0 and (folder / "result.json").exists(), ended.stderr
    ended = fednoro_command("resume", str(folder), cwd=tmp_path)
    assert f"{folder} had finished: there is nothing to carry on" in ended.stdout.replace("\n", "")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ended = fednoro_command("resume", str(folder), cwd=elsewhere)
    assert (
        ended.returncode == 2 and "in the folder that you are in, or on PYTHONPATH?" in ended.stderr
    )
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(elsewhere / "a.png")
    ended = fednoro_command("predict", str(folder), "a.png", cwd=elsewhere)
    assert ended.returncode == 0 and "a.png" in ended.stdout, "the network is all that it takes"
    ended = fednoro_command("report", str(folder), cwd=elsewhere)
    assert ended.returncode == 0, ended.stderr


def test_in_a_program(module: str, tmp_path: Path) -> None:
    run = fednoro.run(*TINY, f"method={module}:Scaled", f"out={tmp_path}")
    assert (
        run.folder.name == "synthetic-scaled-seed0" and fednoro.resume(run.folder).best == run.best
    )
