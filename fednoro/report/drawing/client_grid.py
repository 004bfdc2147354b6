"""The grid that several figures share: a column for each client, a row for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fednoro.report.drawing.axes import names_below, room_below, room_left, short_names
from fednoro.report.drawing.scene import Scene

NARROWEST_COLUMN = 3.6  # pixels of a column; below that a figure grows wider and is scrolled
GROUP_GAP = 7.0  # between groups of columns


@dataclass(frozen=True)
class Grid:
    """Panels of columns (clients) and rows (classes),
    side by side where there is room, else below each other.
    """

    width: float
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    panels: int
    groups: tuple[int, ...] = ()  # columns after which there is a gap
    above: float = 24.0  # for each panel's title
    legend: float = 30.0

    @cached_property
    def names(self) -> list[str]:
        return short_names(self.columns)

    @cached_property
    def row_names(self) -> list[str]:
        return short_names(self.rows)

    @cached_property
    def margin(self) -> float:
        return room_left(self.row_names)

    @cached_property
    def beside(self) -> bool:
        return self.panels > 1 and self.width > 600 and len(self.columns) <= 26

    @cached_property
    def step(self) -> float:
        """Width of a column."""
        panel = self.width / 2 - 10 if self.beside else self.width
        room = panel - self.margin - GROUP_GAP * len(self.groups) - 2
        return min(max(room / max(len(self.columns), 1), NARROWEST_COLUMN), 72.0)

    @cached_property
    def row(self) -> float:
        """Height of a row."""
        return 20.0 if len(self.rows) <= 12 else 16.0

    @cached_property
    def panel(self) -> tuple[float, float]:
        """Width and height of one panel with its names."""
        width = self.margin + self.step * len(self.columns) + GROUP_GAP * len(self.groups) + 2
        return width, self.above + self.row * len(self.rows) + room_below(self.names, self.step) + (
            6 if self.beside else 22
        )

    @cached_property
    def extent(self) -> tuple[float, float]:
        """Width and height of the whole figure."""
        width, height = self.panel
        if self.beside:
            return max(self.width, 2 * width + 20), height + self.legend
        return max(self.width, width), self.panels * height + self.legend

    def scene(self) -> Scene:
        return Scene(*self.extent)

    def corner(self, panel: int) -> tuple[float, float]:
        """Where a panel's cells begin."""
        _, height = self.panel
        if self.beside:
            return self.margin + panel * (self.width / 2 + 10), self.above
        return self.margin, panel * height + self.above

    @cached_property
    def _starts(self) -> list[float]:
        return [self.corner(panel)[0] for panel in range(self.panels)]

    def x(self, panel: int, column: int) -> float:
        """The middle of a column."""
        return (
            self._starts[panel]
            + (column + 0.5) * self.step
            + GROUP_GAP * sum(column >= after for after in self.groups)
        )

    def y(self, panel: int, row: int) -> float:
        """The middle of a row."""
        return self.corner(panel)[1] + (row + 0.5) * self.row

    def frame(
        self, scene: Scene, panel: int, title: str, styles: Sequence[str] | None = None
    ) -> None:
        """The panel's title and names."""
        start, top = self.corner(panel)
        scene.text(start, top - 10, title, "strong")
        for at, name in enumerate(self.row_names):
            scene.text(start - 7, self.y(panel, at) + 4, name, size=11, anchor="end")
        places = [self.x(panel, k) for k in range(len(self.columns))]
        names_below(scene, places, self.names, top + self.row * len(self.rows) + 3, styles)

    @property
    def start(self) -> float:
        """Where the legend begins: under the cells, or at the edge where room is scarce."""
        return self.margin if self.width > 600 else 2.0

    @cached_property
    def foot(self) -> float:
        """The baseline of the legend."""
        return self.extent[1] - 6
