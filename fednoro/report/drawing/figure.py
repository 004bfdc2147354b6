"""What every figure is:
a drawing at any width, a caption in words, and the same numbers as a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fednoro.report.drawing.scene import Scene, shorten

WIDE, NARROW = 932.0, 344.0  # what a desk and a phone have room for

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """A figure's numbers: the text alternative."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    id: str
    title: str
    caption: str
    label: str  # what a screen reader says in place of the drawing
    draw: Callable[[float], Scene]
    table: Table
    columns: int = 0  # of a grid of clients; where they are many, a phone scrolls the wide drawing


def number(value: float) -> str:
    """A table's number; a dash where there is none."""
    return "–" if not math.isfinite(value) else f"{value:.3f}"


def quote(name: str) -> str:
    """A class as it is named within a sentence, where a bare 7 would be read as a number."""
    return f"“{shorten(name, 40)}”"
