"""The same methods across real sites, on Flower:
apps, a strategy, and the pieces for apps of your own.

`FedNoRo` is a strategy for an existing ServerApp; `site_loss`, `score` and `log_prior`
are for an existing ClientApp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednoro.flower.own_app.client_functions import log_prior, score, site_loss
    from fednoro.flower.own_app.strategy import FedNoRo

__all__ = ["FedNoRo", "log_prior", "score", "site_loss"]


def __getattr__(name: str) -> Any:
    # Late: `fednoro --help` waits neither for Flower nor for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "strategy" if name == "FedNoRo" else "client_functions"
    return getattr(importlib.import_module(f"fednoro.flower.own_app.{module}"), name)
