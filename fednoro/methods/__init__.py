"""One file per method; a new one is registered by one line here."""

from __future__ import annotations

from fednoro.methods.fedavg import Method
from fednoro.methods.fedla import FedLA
from fednoro.methods.fednoro import FedNoRo

METHODS: dict[str, type[Method]] = {
    "fedavg": Method,
    "fedla": FedLA,
    "fednoro": FedNoRo,
}

__all__ = ["METHODS", "FedLA", "FedNoRo", "Method"]
