"""Where images come from: one file per source, one line per source in `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from fednoro.data.dataset import Dataset
from fednoro.data.sources.digits import Digits
from fednoro.data.sources.folder import Folder
from fednoro.data.sources.ham10000 import Ham10000
from fednoro.data.sources.ich import Ich
from fednoro.data.sources.isic2019 import Isic2019
from fednoro.data.sources.medmnist import Medmnist
from fednoro.data.sources.prepared import PreparedFolder
from fednoro.data.sources.sites import AtSites
from fednoro.data.sources.synthetic import Synthetic


class Source(Protocol):
    """An options dataclass that knows how to load what it describes."""

    section: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images; `progress(what, done, total)` is called where that takes time."""


SOURCES: dict[str, type[Source]] = {
    "digits": Digits,
    "synthetic": Synthetic,
    "folder": Folder,
    "prepared": PreparedFolder,
    "sites": AtSites,
    "isic2019": Isic2019,
    "ham10000": Ham10000,
    "ich": Ich,
    "medmnist": Medmnist,
}
