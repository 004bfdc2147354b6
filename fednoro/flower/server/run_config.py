"""How a run on Flower deals with its sites: the keys of the app's run-config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fednoro.core.options import Options, option
from fednoro.core.types import UserError

if TYPE_CHECKING:  # so that the help does not wait for torch
    from fednoro.audit.audit_method import Audit


@dataclass(frozen=True)
class Deployment(Options):
    """When to wait for sites, and how long."""

    section: ClassVar[str] = "flower"

    min_sites: int = option(2, "wait before every exchange until so many sites are connected", ge=1)
    start_sites: int = option(
        0, "wait for so many before round 1, in a simulation for all; 0: min_sites", ge=0
    )
    round_timeout: float = option(
        3600.0, "seconds after which an exchange goes on without the rest", gt=0
    )
    wait_timeout: float = option(
        0.0, "seconds to wait for sites before giving up; 0: for ever", ge=0
    )

    def starting(self, partitions: int) -> int:
        """How many sites a run begins with."""
        return partitions or max(self.start_sites, self.min_sites)

    @classmethod
    def read(cls, run_config: Mapping[str, Any]) -> Deployment:
        """From Flower's run-config, whose keys have hyphens."""
        settings: dict[str, Any] = {}
        for item in fields(cls):
            key = item.name.replace("_", "-")
            if key not in run_config:
                continue
            value = run_config[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"run-config {key} must be a number, got {value!r}")
            settings[item.name] = value if isinstance(item.default, float) else int(value)
        return cls(**settings)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class AuditOrder(Options):
    """An audit as the run-config carries it: one JSON string under `audit`."""

    section: ClassVar[str] = "audit"

    run: str = option("", "the folder of the run to audit")
    scores: Literal["early", "cross_fit", "corrected"] = option(
        "early", "why the model has not memorised the labels it judges"
    )
    rounds: int = option(10, "rounds before a model judges", ge=1)
    folds: int = option(5, "parts of each site's images in cross_fit", ge=2)
    min_cell: int = option(5, "counts below this are not shown", ge=0)

    @classmethod
    def read(cls, text: str) -> AuditOrder:
        """From the run-config."""
        try:
            order = cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise UserError(f"run-config audit is not an order: {error}") from error
        for name in ("config.yaml", "flower.json", "sites.json"):
            if not (order.folder / name).is_file():
                raise UserError(f"{order.folder} cannot be audited on Flower: it has no {name}")
        return order

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def folder(self) -> Path:
        return Path(self.run).expanduser()

    @property
    def exchanges(self) -> Path:
        """Where the audit keeps who was asked what."""
        return self.folder / "audit" / "exchanges"

    def method(self) -> Audit:
        from fednoro.audit.audit_method import Audit

        corrected = self.scores == "corrected"
        run = (
            str(json.loads((self.folder / "flower.json").read_text(encoding="utf-8"))["run"])
            if corrected
            else ""
        )
        return Audit(scores=self.scores, warmup=self.rounds, folds=self.folds, run=run)
