"""One file per method; a new one is registered by one line here."""

from __future__ import annotations

from fednoro.methods.fedavg import Method
from fednoro.methods.fedcorr import FedCorr, FedCorrLA
from fednoro.methods.fedla import FedLA
from fednoro.methods.fedlsr import FedLSR
from fednoro.methods.fednoro import FedNoRo
from fednoro.methods.fednoro_plus import FedNoRoPlus
from fednoro.methods.fedprox import FedProx
from fednoro.methods.rhfl import RHFL
from fednoro.methods.rofl import RoFL

METHODS: dict[str, type[Method]] = {
    "fedavg": Method,
    "fedla": FedLA,
    "fednoro": FedNoRo,
    "fednoro-plus": FedNoRoPlus,
    "fedprox": FedProx,
    "rhfl": RHFL,
    "fedlsr": FedLSR,
    "rofl": RoFL,
    "fedcorr": FedCorr,
    "fedcorr-la": FedCorrLA,
}

__all__ = [
    "METHODS", "RHFL", "FedCorr", "FedCorrLA", "FedLA", "FedLSR", "FedNoRo", "FedNoRoPlus", "FedProx", "Method", "RoFL",
]  # fmt: skip
