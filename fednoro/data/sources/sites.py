"""Images that stay where they are, at the sites of a federation on Flower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fednoro.core.options import Options
from fednoro.core.types import UserError
from fednoro.data.dataset import Dataset


@dataclass(frozen=True)
class AtSites(Options):
    """What the sites of a federation on Flower hold,
    for a coordinator that has no images of its own.
    """

    section: ClassVar[str] = "data"

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """There is nothing to load here."""
        raise UserError(
            "data=sites is for `fednoro flower run`: here there are no images; "
            "choose another data source"
        )
