"""Small counts are not shown, nor can they be worked out from what is.

A line of a table has cells x_1 … x_m ≥ 0 and a published total Σ x. A cell below n is *small* and
is shown as "<n". Whoever knows the total, the cells that are shown, that small cells lie in 0..n−1
and that the other hidden ones are at least n, can bound a small cell x by

    max(0, r − R)  ≤  x  ≤  min(n−1, r − n·h)

with r the sum of the hidden cells, h how many of them are not small, and R the most that
the hidden cells beside x can
hold: (s − 1)(n − 1) with s small ones and h = 0, any amount otherwise. A line is safe where
these bounds are 0 and n−1, that is, where the total tells nothing that "<n" does not. Further
cells are hidden until it is; where even all of them are too few, and where the total is below n
itself, the total is hidden as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fednoro.core.types import UserError

Mark = Literal["shown", "small", "withheld"]


@dataclass(frozen=True)
class Line:
    """One line of a table as it may be shown."""

    values: tuple[int | None, ...]  # None where a cell is hidden
    marks: tuple[Mark, ...]
    total: int | None  # None where it is hidden too
    least: int  # n

    def text(self, i: int) -> str:
        """Cell i for people."""
        value = self.values[i]
        return (
            f"{value:,}"
            if value is not None
            else f"<{self.least}"
            if self.marks[i] == "small"
            else "withheld"
        )


def suppress(cells: Sequence[int], least: int, hide_first: Sequence[int] = ()) -> Line:
    """The line with small cells hidden, and others as far as the total would reveal those.

    Args:
        cells: whole numbers from 0 on.
        least: n, the smallest count that may be shown; up to 1 everything is.
        hide_first: which cells to give up first; then the largest.
    """
    if any(cell < 0 for cell in cells):
        raise UserError(f"counts must be at least 0, got {min(cells)}")
    marks: list[Mark] = ["small" if cell < least and least > 1 else "shown" for cell in cells]
    rest = sorted(
        (i for i in range(len(cells)) if i not in hide_first), key=lambda i: (-cells[i], i)
    )
    candidates = [i for i in (*hide_first, *rest) if marks[i] == "shown"]
    while not _safe(cells, marks, least) and candidates:
        marks[candidates.pop(0)] = "withheld"
    total = (
        sum(cells) if _safe(cells, marks, least) and (least <= 1 or sum(cells) >= least) else None
    )
    values = tuple(
        cell if mark == "shown" else None for cell, mark in zip(cells, marks, strict=True)
    )
    return Line(values, tuple(marks), total, least)


def _safe(cells: Sequence[int], marks: Sequence[Mark], least: int) -> bool:
    small = sum(mark == "small" for mark in marks)
    if not small:
        return True
    hidden = sum(cell for cell, mark in zip(cells, marks, strict=True) if mark != "shown")
    large = sum(mark == "withheld" for mark in marks)
    # From above: one small cell must be able to be n−1.
    # From below: able to be 0, the others holding the rest.
    return hidden - least * large >= least - 1 and (
        large > 0 or hidden <= (small - 1) * (least - 1)
    )
