"""Runs in one process: again and again, whatever else of the package has been imported meanwhile.

Importing a package `fednoro.run` would replace the function `fednoro.run`. All happens in a process
of its own, because it imports every module that there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FUNCTIONS = ("run", "resume", "load", "load_model", "export", "predict", "compare", "write_report")
PUBLIC = {  # by where they are
    "fednoro": (*FUNCTIONS, "Run"),
    "fednoro.cli": ("main",),
    "fednoro.flower": ("FedNoRo", "log_prior", "score", "site_loss"),
}
OPTIONAL = {  # what only an extra or a GPU brings
    "triton", "flwr", "matplotlib", "pydicom", "tensorboard", "mlflow", "sqlalchemy", "alembic",
    "onnx", "onnxruntime",
}  # fmt: skip
PROGRAM = """
import importlib, json, pkgutil, sys, traceback
import fednoro

def run(name):
    return str(fednoro.run(
        "digits", "train.rounds=2", "method.warmup=1", "partition.clients=4", "noise.epochs=1",
        "device=cpu", "out=runs", f"name={name}",
    ).folder)

def kinds(names):
    return {
        f"{place}.{name}": type(getattr(importlib.import_module(place), name)).__name__
        for place, inside in names.items() for name in inside
    }

public = json.loads(sys.argv[1])
facts = {
    "folders": [run("first"), run("second")],
    "before": kinds(public),
    "exported": {name: callable(getattr(fednoro, name)) for name in fednoro.__all__},
    "modules": [module.name for module in pkgutil.iter_modules(fednoro.__path__)],
    "walked": [],
    "missing": {},
    "trouble": "",
}
for name in dir(fednoro):
    getattr(fednoro, name)
for module in pkgutil.walk_packages(fednoro.__path__, "fednoro.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        facts["walked"].append(module.name)
    except ImportError as error:
        facts["missing"][module.name] = error.name or str(error)
facts["after"] = kinds(public)
try:
    facts["folders"].append(run("third"))
    first, second, third = facts["folders"]
    facts["bacc"] = [fednoro.load(first).bacc, fednoro.resume(second).bacc]
    facts["tensors"] = len(fednoro.load_model(third).state_dict())
except Exception:
    facts["trouble"] = traceback.format_exc()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in a process that ran twice, imported everything, and ran once more."""
    pytest.importorskip("flwr")
    folder = tmp_path_factory.mktemp("process")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(PUBLIC)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    facts["folders"] = [folder / name for name in facts["folders"]]
    return facts


def test_runs_are_bit_identical_before_and_after_every_import(process: dict[str, Any]) -> None:
    assert not process["trouble"], process["trouble"]
    first, *others = (path / "model.safetensors" for path in process["folders"])
    assert len(others) == 2
    assert all(other.read_bytes() == first.read_bytes() for other in others)


def test_finished_runs_are_loaded_and_resumed_after_every_import(process: dict[str, Any]) -> None:
    assert not process["trouble"], process["trouble"]
    loaded, resumed = process["bacc"]
    assert len(loaded) == 2 and loaded == resumed
    assert process["tensors"]


def test_every_module_can_be_imported(process: dict[str, Any]) -> None:
    missing = process["missing"]
    top = {f"fednoro.{name}" for name in process["modules"]} - {"fednoro.__main__"}
    assert top <= {*process["walked"], *missing}
    for module, name in missing.items():
        assert name.partition(".")[0] in OPTIONAL, f"{module} cannot be imported: {name}"


def test_functions_are_not_replaced_by_modules(process: dict[str, Any]) -> None:
    after = process["after"]
    assert after == process["before"]
    assert {after[f"fednoro.{name}"] for name in FUNCTIONS} == {"function"}
    assert "module" not in after.values()


def test_no_exported_function_has_the_name_of_a_module(process: dict[str, Any]) -> None:
    functions = {name for name, is_callable in process["exported"].items() if is_callable}
    assert functions >= set(FUNCTIONS)
    assert not functions & set(process["modules"])
