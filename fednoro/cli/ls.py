"""`fednoro ls`: what can be chosen, read off the options' own dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fednoro.core.types import UserError

SECTIONS = {
    "methods": "method",
    "data": "data",
    "partitions": "partition",
    "noise": "noise",
    "models": "model",
}


HELP = """List what can be chosen, with every option, its default and its meaning.

WHAT is methods, data, partitions, noise, models, presets, split, train or general, or the name of \
one entry, such
as fedla; without it, names alone.

Example: fednoro ls methods
"""


def ls(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, data, partitions, noise, models, presets, split, train, general, or "
            "one name of these."
        ),
    ] = None,
) -> None:
    """Lists what can be chosen."""
    from fednoro.experiment.config.configuration import presets

    kinds = _kinds()
    console = Console(emoji=False)
    if what is None:
        table = Table("fednoro ls …", "what there is", box=None)
        for name, choices in {
            **{name: [*entries] for name, entries in kinds.items()},
            "presets": [*presets()],
        }.items():
            table.add_row(name, "its options" if name in choices else escape(", ".join(choices)))
        console.print(table)
    elif what == "presets":
        table = Table("preset", "what it is", box=None)
        for name, line in presets().items():
            table.add_row(name, escape(line))
        console.print(table)
    elif what in kinds:
        for name, kind in kinds[what].items():
            _show(console, name, kind)
    else:
        _show_named(console, what, kinds, presets())


def _kinds() -> dict[str, dict[str, type[Any]]]:
    from fednoro.core.training import Augment
    from fednoro.experiment.config.configuration import REGISTRIES, SECTIONS_WITHOUT_CHOICE, General

    kinds: dict[str, dict[str, type[Any]]] = {
        name: dict(REGISTRIES[section]) for name, section in SECTIONS.items()
    }
    kinds |= {name: {name: kind} for name, kind in SECTIONS_WITHOUT_CHOICE.items()} | {
        "general": {"general": General}
    }
    kinds["train"] |= {"train.augment": Augment}
    return kinds


def _show_named(
    console: Console, name: str, kinds: dict[str, dict[str, type[Any]]], presets: dict[str, str]
) -> None:
    """Every entry of that name: digits is a data source and a preset."""
    sections = [section for section, entries in kinds.items() if name in entries]
    if not sections and name not in presets:
        names = [
            *kinds,
            "presets",
            *presets,
            *(entry for entries in kinds.values() for entry in entries),
        ]
        close = difflib.get_close_matches(name, names, 1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise UserError(
            f"ls takes one of {', '.join([*kinds, 'presets'])}, "
            f"or a name of these; got {name!r}{hint}"
        )
    for section in sections:
        choice = f"{SECTIONS[section]}={name}" if section in SECTIONS else name
        _show(console, choice, kinds[section][name])
    if name in presets:
        console.print(f"[bold]fednoro run {name}[/]  {escape(presets[name])}", highlight=False)


def _show(console: Console, name: str, kind: type[Any]) -> None:
    from fednoro.core.options import summary

    console.print(f"[bold]{name}[/]  {escape(summary(kind))}", highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 3))
    for item in dataclasses.fields(kind):
        table.add_row(item.name, _default(item), escape(_meaning(item)))
    if table.rows:
        console.print(table)


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return escape(str(item.default))
    return "…" if item.default_factory is not dataclasses.MISSING else "[red]required[/]"


def _meaning(item: dataclasses.Field[Any]) -> str:
    from fednoro.core.options import range_text

    literal = re.search(r"Literal\[(.*?)\]", str(item.type))
    choices = re.sub("[\"']", "", literal[1]) if literal else ""
    return "; ".join(
        part for part in (item.metadata.get("help", ""), range_text(item), choices) if part
    )
