"""`fednoro prepare`: images are decoded once, and the command that runs on them is printed."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fednoro.core.types import UserError
from fednoro.core.wording import one_line

if TYPE_CHECKING:
    from fednoro.data.cache.preparation import Prepared

HELP = """Decode a data set once into a memory-mapped cache, with a manifest of what it holds.

NAME is folder, isic2019, ham10000, ich or medmnist. Files that cannot be read are left out and \
listed. It goes on
where a stopped preparation was, and does nothing twice.

[bold]Examples[/]

  fednoro prepare folder --from ~/images --size 64               one folder per class

  fednoro prepare folder --from ~/images csv=labels.csv          a CSV of \
path,label[,id][,site][,group]

  fednoro prepare isic2019 --from ~/ISIC2019                     the official archives

  fednoro prepare ich --from ~/rsna window=triple

  fednoro prepare ham10000 --from ~/HAM10000 --size 64 classes=8

[bold]fednoro ls data[/] shows every source with its options.
"""


def prepare(
    name: Annotated[str, typer.Argument(help="The data source.", show_default=False)],
    source: Annotated[
        str, typer.Option("--from", help="The folder, archive or file as it was downloaded.")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)
    ] = None,
    size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    to: Annotated[
        str | None, typer.Option(help="Where caches are kept; $FEDNORO_CACHE or ~/.cache/fednoro.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    from fednoro.data.cache.preparation import prepare as make
    from fednoro.experiment.config.configuration import presets, resolve
    from fednoro.experiment.watch.terminal import Terminal, prepared_table

    _check_preparable(name)
    if wrong := [item for item in options or [] if "=" not in item]:
        raise UserError(f"options look like key=value, got {wrong[0]!r}")
    settings = [f"path={_as_yaml(source)}", *(options or [])]
    settings += [] if size is None else [f"size={size}"]
    settings += [] if to is None else [f"cache={_as_yaml(to)}"]
    # A preset of that name sets the options,
    # so that a later `fednoro run NAME data.path=…` finds this cache.
    preset = name if name in presets() else "digits"
    overrides = [f"data.{item}" for item in settings]
    if preset != name:
        # The paper's presets add noise to clean labels; a user's own labels are what they are.
        overrides = [f"data={name}", *overrides, "noise=none"]
    console = Console(emoji=False)
    terminal = Terminal(console, quiet)
    try:
        preparation = make(resolve(preset, overrides).data, terminal.progress)
    except KeyboardInterrupt:
        terminal.close()
        console.print("stopped; the same command goes on from here", highlight=False)
        raise
    finally:
        terminal.close()
    if quiet:
        return
    console.print(prepared_table(preparation), soft_wrap=True)
    if preparation.sites:
        console.print(_sites_table(preparation), soft_wrap=True)
    if preset != name and len(preparation.sites) > 1:
        overrides.append("partition=by_column")
    arguments = " ".join(map(shlex.quote, overrides))
    console.print(
        f"use it with: fednoro run {preset} {arguments}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _check_preparable(name: str) -> None:
    from fednoro.data.cache.preparation import Preparable
    from fednoro.data.sources import SOURCES

    if name not in SOURCES:
        choices = ", ".join(
            source_name for source_name, kind in SOURCES.items() if issubclass(kind, Preparable)
        )
        raise UserError(f"prepare takes one of {choices}, got {name!r}")
    if not issubclass(SOURCES[name], Preparable):
        raise UserError(f"{name} needs no preparation: its images are used as they are")


def _sites_table(preparation: Prepared) -> Table:
    table = Table("site", box=None, padding=(0, 2, 0, 0))
    table.add_column("images", justify="right")
    for name, count in preparation.sites.items():
        table.add_row(Text(one_line(name)), f"{count:,}")
    return table


def _as_yaml(text: str) -> str:
    """`text` as it is, or in quotes where YAML, which overrides are read as,
    would take it for something else.
    """
    import yaml

    try:
        same = yaml.safe_load(text) == text
    except yaml.YAMLError:
        same = False
    return text if same else json.dumps(text, ensure_ascii=False)
