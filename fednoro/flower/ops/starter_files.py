"""Folders and files to start from: the app that `flwr run` takes, and a site's settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from fednoro.core.files import disk_errors, write_whole
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import dump, resolve, with_absolute_paths
from fednoro.flower.ops.flwr_process import app_toml

_APP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,38}")  # Flower's rule for apps and their folders

README = """\
# {name}

A federation that trains with [fednoro](https://pypi.org/project/fednoro) on Flower. This folder \
has no code: the app is
in the installed package, and `pyproject.toml` points there.

- `config.yaml`: what is trained and how. Every option is there; change what you like.
- `pyproject.toml`: for Flower. `min-sites`, `round-timeout` and the like are under \
`[tool.flwr.app.config]`.

## Try it on this machine

With images of its own in `config.yaml` (anything but `data: sites`):

    fednoro flower simulate .

## Run it

With a SuperLink and its sites up, and the SuperLink's address in `$FLWR_HOME/config.toml`:

    fednoro flower run .

`flwr run . --stream` works too, but ends with 0 even when the run has failed.

The SuperLink's own machine reads `config.yaml` where it lies, at
`{config}`, and writes the run folder under `{out}`. Its user must be able to do both.
If you move this folder, change `fednoro-config` in `pyproject.toml`.
"""

SITE = """\
# A site's settings. Check them with: fednoro flower site check {file}

# Where the images are: any source of `fednoro ls data`. Decoded once into a cache, they never \
leave this machine.
data:
  name: folder
  path: /data/images            # one folder per class, or a zip of that
  # csv: /data/labels.csv       # instead: columns path,label and optionally id,site,group
  size: 224                     # as agreed in the federation
  # classes: [a, b, c]          # all class names of the federation, in its order; needed if a \
class is missing here
  # cache: /var/lib/fednoro/cache

# modules: [mine]               # whose methods and models a coordinator may name as module:Class; \
default: none

device: auto                    # auto, cpu, cuda, cuda:1
# threads: 4                    # CPU threads; default: as many as are worthwhile

# What methods remember between rounds (corrected labels), one folder for each run. Never sent.
memory: /var/lib/fednoro

# Share of the images that is kept to evaluate on, used only where the coordinator has no test set \
of its own.
held_out: 0.2

# What is held back when class losses are asked for (docs/deployment.md, "Privacy of scoring").
min_count: 0                    # losses of classes with fewer images are not sent
# score_epsilon: 3              # noise on the losses that are sent: ε of one scoring

# Whether to take part in audits of labels. What they send is not protected, so a site that sets \
one of the two above
# takes no part unless it says true here. The letter about this site's images stays here, in \
audits/ of `memory`.
# audit: true
"""


def write_app(folder: Path, source: str, overrides: Sequence[str] = ()) -> list[Path]:
    """An app folder for `flwr run`: the files that were made."""
    folder = folder.expanduser().absolute()
    if not _APP_NAME.fullmatch(folder.name):
        raise UserError(
            "Flower wants an app folder's name to be letters, digits and hyphens, a letter first, "
            f"39 at most: got {folder.name!r}"
        )
    config = with_absolute_paths(resolve(source, overrides))
    config = dataclasses.replace(config, out=str(Path(config.out).expanduser().absolute()))
    with disk_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there and not empty: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "config.yaml"
    content = {
        settings: dump(config),
        folder / "pyproject.toml": app_toml({"fednoro-config": str(settings)}, folder.name.lower()),
        folder / "README.md": README.format(name=folder.name, config=settings, out=config.out),
    }
    for path, text in content.items():
        write_whole(path, text.encode())
    return list(content)


def write_site(file: Path) -> None:
    """A commented site.yaml; an existing one is kept."""
    file = file.expanduser()
    if file.exists():
        raise UserError(f"{file} is there already: choose another name")
    if not file.absolute().parent.is_dir():
        raise UserError(f"the folder {file.parent} does not exist: make it first")
    write_whole(file, SITE.format(file=file).encode())
