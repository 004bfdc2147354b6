"""A folder that `fednoro prepare` has made, without the images it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fednoro.core.options import Options, option
from fednoro.core.types import UserError
from fednoro.data.cache import preparation
from fednoro.data.dataset import Dataset


@dataclass(frozen=True)
class PreparedFolder(Options):
    """A folder made by `fednoro prepare`, read and checked without the original images."""

    section: ClassVar[str] = "data"

    path: str = option(
        help="the folder, which holds images.npy and manifest.json",
        example="~/.cache/fednoro/images-0123456789abcdef",
    )

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images, after their checksum:
        they may have come from another machine. `seed` changes nothing.
        """
        folder = Path(self.path).expanduser().resolve()
        if not folder.is_dir():
            raise UserError(
                f"data.path {folder} {'is not a folder' if folder.exists() else 'does not exist'}"
            )
        if not (folder / "manifest.json").is_file():
            raise UserError(
                f"data.path {folder} has no manifest.json: "
                "give a folder that `fednoro prepare` made"
            )
        return preparation.verify(folder)
