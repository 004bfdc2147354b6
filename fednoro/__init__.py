"""Federated learning that finds the sites with wrong labels and trains through them.

import fednoro
run = fednoro.run("digits", "method=fednoro", "seed=0")
run.best, run.last, run.detection, run.folder
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednoro.experiment import Run, load, resume, run
    from fednoro.trained import load_model

__all__ = ["Run", "load", "load_model", "resume", "run"]
_PIECES = (
    "aggregate", "data", "detect", "indicators", "losses", "methods", "metrics", "mixture", "models", "noise",
    "partition",
)  # fmt: skip


def __dir__() -> list[str]:
    return sorted([*__all__, *_PIECES])


def __getattr__(name: str) -> Any:
    # The pieces (losses, detect, aggregate, …) import without the configuration's dependencies.
    if name == "load_model":
        return importlib.import_module("fednoro.trained").load_model
    if name in __all__:
        from fednoro import experiment

        return getattr(experiment, name)
    if name in _PIECES:
        return importlib.import_module(f"fednoro.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
