"""One file per method, and `relabel` beside FedCorr; one line here registers a new method."""

from __future__ import annotations

from typing import Any

from fednoro.core.options import import_named
from fednoro.core.types import UserError
from fednoro.methods.fedcorr import FedCorr, FedCorrLA
from fednoro.methods.fedla import FedLA
from fednoro.methods.fedlsr import FedLSR
from fednoro.methods.fednoro import FedNoRo
from fednoro.methods.fednoro_plus import FedNoRoPlus
from fednoro.methods.fedprox import FedProx
from fednoro.methods.method import Method
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
    "METHODS",
    "RHFL",
    "FedCorr",
    "FedCorrLA",
    "FedLA",
    "FedLSR",
    "FedNoRo",
    "FedNoRoPlus",
    "FedProx",
    "Method",
    "RoFL",
    "find_method",
    "name_of",
]


def find_method(name: str) -> type[Method]:
    """The class that a name stands for: a registered one, or one's own as `module:Class`."""
    if name in METHODS:
        return METHODS[name]
    kind = import_named(name, "method")
    if not (isinstance(kind, type) and issubclass(kind, Method) and _is_frozen(kind)):
        raise UserError(
            f"method {name!r} is no method: "
            "it must be a frozen dataclass that extends fednoro's Method"
        )
    return kind


def name_of(kind: type[Method]) -> str:
    """What `find_method` finds it by; in another process too, if it can be imported there."""
    registered = next((name for name, other in METHODS.items() if other is kind), None)
    own = f"{kind.__module__}:{kind.__qualname__}"
    if (
        kind.__module__.startswith("fednoro.")
        or kind.__module__ == "__main__"
        or not _finds(own, kind)
    ):
        if registered is None:
            raise UserError(
                f"{own} can be found by nobody: put it into a module, or register it in METHODS"
            )
        return registered
    return own


def _finds(name: str, kind: type[Method]) -> bool:
    try:
        return find_method(name) is kind
    except UserError:
        return False


def _is_frozen(kind: type[Method]) -> bool:
    dataclass_parameters: Any = vars(kind).get("__dataclass_params__")
    return bool(dataclass_parameters and dataclass_parameters.frozen)
