"""Federated learning that finds the sites with wrong labels and trains through them.

import fednoro
run = fednoro.run("digits", "method=fednoro", "seed=0")
run.best, run.last, run.detection, run.folder
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednoro.core.options import option
    from fednoro.core.types import Reply, State, Step, Task, UserError
    from fednoro.data.dataset import Dataset
    from fednoro.experiment import Run, load, resume, run
    from fednoro.methods import Method
    from fednoro.trained import load_model

__all__ = [
    "Dataset",
    "Method",
    "Reply",
    "Run",
    "State",
    "Step",
    "Task",
    "UserError",
    "load",
    "load_model",
    "option",
    "resume",
    "run",
]
# Where each name lives. Nothing is loaded before it is used: `import fednoro` is quick, and the
# equations work without the dependencies of the configuration.
_HOMES = {
    "Dataset": "data.dataset",
    "Method": "methods",
    "Reply": "core.types",
    "Run": "experiment",
    "State": "core.types",
    "Step": "core.types",
    "Task": "core.types",
    "UserError": "core.types",
    "load": "experiment",
    "load_model": "trained",
    "option": "core.options",
    "resume": "experiment",
    "run": "experiment",
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


def __dir__() -> list[str]:
    return sorted([*__all__, *_PIECES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fednoro.{_HOMES[name]}"), name)
    if name in _PIECES:
        return importlib.import_module(f"fednoro.{_PIECES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
