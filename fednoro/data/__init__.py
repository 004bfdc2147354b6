"""Examples, and who holds them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fednoro.data.dataset import Dataset

if TYPE_CHECKING:
    from fednoro.data.sources import SOURCES

__all__ = ["SOURCES", "Dataset"]


def __getattr__(name: str) -> Any:
    # Late: whoever brings arrays needs none of the sources.
    if name[:1].isupper():
        sources = importlib.import_module("fednoro.data.sources")
        if hasattr(sources, name):
            return getattr(sources, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
