"""What a method remembers at a site, on the site's own disk,
through rounds, restarts and a resumed run.

A run's folder has one file for each exchange that changed the memory, named by the exchange's
*clock*: how far the coordinator's log was when it asked. A coordinator that goes on from a
checkpoint sends an earlier clock again; the site then goes on from what it knew at that moment.
Files that no checkpoint can ask for any more are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fednoro.core.files import disk_errors, write_whole
from fednoro.core.types import UserError

RUN_KEY = re.compile(r"[0-9a-f]{8,64}")  # it becomes a folder's name, and comes from elsewhere


class Memory:
    """One client's memory in one run."""

    def __init__(self, root: Path, run: str, client: int) -> None:
        if not RUN_KEY.fullmatch(run):
            raise UserError(f"the coordinator's key for this run is not one: {run!r}")
        self.folder = root / run / str(client)

    def recall(self, clock: int) -> dict[str, Tensor]:
        """What was known when an exchange with this clock began;
        what came after it is forgotten.
        """
        for number in self._numbers():
            if number >= clock:
                self._file(number).unlink(missing_ok=True)
        return self.newest()

    def newest(self) -> dict[str, Tensor]:
        """The last that is known."""
        numbers = self._numbers()
        if not numbers:
            return {}
        file = self._file(numbers[-1])
        try:
            return load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{file} cannot be read ({error}): this site cannot go on with the run"
            ) from error

    def keep(self, clock: int, memory: Mapping[str, Tensor], oldest: int) -> None:
        """Writes what is known after an exchange;
        drops what a run resumed at `oldest` or later does not need.
        """
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            name: tensor.detach().cpu().clone().contiguous() for name, tensor in memory.items()
        }
        write_whole(self._file(clock), save(content))
        old_numbers = [number for number in self._numbers() if number < oldest]
        for number in old_numbers[:-1]:
            self._file(number).unlink(missing_ok=True)

    def _file(self, clock: int) -> Path:
        return self.folder / f"{clock:015d}.safetensors"

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.safetensors"))
