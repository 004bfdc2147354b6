"""Federated learning that finds the sites with wrong labels and trains through them.

import fednoro
run = fednoro.run("digits", "method=fednoro", "seed=0")
run.best, run.last, run.detection, run.folder
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fednoro.core.options import option
    from fednoro.core.types import Reply, State, Step, Task, UserError
    from fednoro.data.dataset import Dataset
    from fednoro.experiment.config.configuration import Config
    from fednoro.experiment.drive import Run, Watcher, load
    from fednoro.experiment.export import export
    from fednoro.experiment.predict import predict
    from fednoro.experiment.trained_model import load_model
    from fednoro.methods import Method
    from fednoro.report.comparison import compare
    from fednoro.report.page import write_report

__all__ = [
    "Dataset",
    "Method",
    "Reply",
    "Run",
    "State",
    "Step",
    "Task",
    "UserError",
    "compare",
    "export",
    "load",
    "load_model",
    "option",
    "predict",
    "resume",
    "run",
    "write_report",
]
# Where each name lives. Nothing is loaded before it is used:
# `import fednoro` is quick, and the equations work without the dependencies of the configuration.
_HOMES = {
    "Dataset": "data.dataset",
    "Method": "methods",
    "Reply": "core.types",
    "Run": "experiment.drive",
    "State": "core.types",
    "Step": "core.types",
    "Task": "core.types",
    "UserError": "core.types",
    "compare": "report.comparison",
    "export": "experiment.export",
    "load": "experiment.drive",
    "load_model": "experiment.trained_model",
    "option": "core.options",
    "predict": "experiment.predict",
    "write_report": "report.page",
}
_PIECES = {
    "aggregate": "core.aggregate",
    "data": "data",
    "detect": "detection.mixture_detector",
    "detection": "detection",
    "indicators": "detection.indicators",
    "losses": "core.losses",
    "methods": "methods",
    "metrics": "core.metrics",
    "mixture": "detection.mixture",
    "models": "models",
    "noise": "data.noise",
    "partition": "data.partition",
}


def run(
    config: Config | str | Path | Mapping[str, Any] = "digits",
    *overrides: str,
    watcher: Watcher | None = None,
) -> Run:
    """Runs one experiment from the start: `fednoro.run("digits", "method=fedla", "seed=3")`.

    Args:
        config: a preset, a YAML file, a mapping or a finished configuration.
        overrides: `key=value`, as on the command line; not with a finished configuration.
        watcher: is told what happens meanwhile.
    """
    from fednoro.experiment import simulation
    from fednoro.report import write_or_warn

    return simulation.run(config, *overrides, watcher=watcher, write_page=write_or_warn)


def resume(path: str | Path, watcher: Watcher | None = None) -> Run:
    """Carries a stopped run on; its results are bit-identical to those of a run that never stopped.

    Args:
        path: the run folder.
        watcher: is told what happens meanwhile.
    """
    from fednoro.experiment import simulation
    from fednoro.report import write_or_warn

    return simulation.resume(path, watcher, write_or_warn)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PIECES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fednoro.{_HOMES[name]}"), name)
    if name in _PIECES:
        return importlib.import_module(f"fednoro.{_PIECES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
