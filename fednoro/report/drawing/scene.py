"""A figure as a list of marks in pixels, drawn as inline SVG here and on paper by `image_export`.

Every mark has the name of a style, and may have a tip (what it says when pointed at) and a series
(what its legend entry switches off).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup, escape

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]
SIZE = 12.0  # of ordinary text
_WIDE = 0.56  # of a letter, of its size: an estimate on the safe side


@dataclass(slots=True)
class Mark:
    """One shape: its kind, where it is, and how it looks."""

    kind: Literal["rect", "circle", "line", "area", "triangle", "text"]
    points: tuple[Point, ...]  # corner and size; centre and radius; a path; where text stands
    style: str
    tip: str = ""
    series: str = ""
    alpha: float | None = None  # of the fill, for heat
    text: str = ""
    anchor: Anchor = "start"
    size: float = SIZE
    turn: float = 0.0  # degrees
    toggle: str = ""  # the series that this legend entry switches


@dataclass
class Scene:
    """Marks on a sheet of `width` by `height`, in the order in which they are drawn."""

    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, **more: object
    ) -> None:
        self._add("rect", ((x, y), (max(width, 0.0), max(height, 0.0))), style, more)

    def circle(self, x: float, y: float, radius: float, style: str, **more: object) -> None:
        self._add("circle", ((x, y), (radius, radius)), style, more)

    def triangle(self, x: float, y: float, radius: float, style: str, **more: object) -> None:
        self._add("triangle", ((x, y), (radius, radius)), style, more)

    def dot(self, x: float, y: float, radius: float, style: str, **more: object) -> None:
        """A mark whose shape says the same as its colour:
        noisy is a triangle, everything else a circle.
        """
        (self.triangle if style == "noisy" else self.circle)(x, y, radius, style, **more)

    def line(self, points: Iterable[Point], style: str, **more: object) -> None:
        self._add("line", tuple(points), style, more)

    def area(self, points: Iterable[Point], style: str, **more: object) -> None:
        self._add("area", tuple(points), style, more)

    def text(self, x: float, y: float, text: str, style: str = "tick", **more: object) -> None:
        self._add("text", ((x, y),), style, {"text": printable(text), **more})

    def _add(
        self, kind: str, points: tuple[Point, ...], style: str, more: dict[str, object]
    ) -> None:
        self.marks.append(Mark(kind, points, style, **more))  # type: ignore[arg-type]

    def legend(
        self, x: float, y: float, entries: Sequence[tuple[str, str, str]], round_marks: bool = False
    ) -> None:
        """Entries of style, words and series from left to right,
        on the next line where there is no room.
        """
        start = x
        for style, words, series in entries:
            if x > start and x + 22 + text_width(words) > self.width:
                x, y = start, y + 17
            more = {"toggle": series, "series": ""} if series else {}
            if style.startswith(
                ("series", "curve", "cleanmean", "noisymean", "unknownmean", "mark")
            ):
                self.line([(x, y - 4), (x + 16, y - 4)], style, **more)
            elif style in ("span", "cleanarea", "noisyarea", "gap", "frame"):
                self.rect(x + 1, y - 9, 13, 10, style, **more)
            else:
                (self.circle if round_marks else self.dot)(x + 8, y - 4, 4.5, style, **more)
            self.text(x + 21, y, words, "name", **more)
            x += 21 + text_width(words) + 16
        self.height = max(self.height, y + 6)

    def svg(self, label: str, kind: str = "wide") -> Markup:
        """The scene as an SVG element; `label` is what a screen reader says of it."""
        body = "".join(map(_element, self.marks))
        box = f"0 0 {_number(self.width)} {_number(self.height)}"
        size = f'width="{_number(self.width)}" height="{_number(self.height)}"'
        start = Markup('<svg class="{}" viewBox="{}" {} role="img" tabindex="0" aria-label="{}">')
        return (
            start.format(kind, box, Markup(size), printable(label))
            + Markup(body)
            + Markup("</svg>")
        )


def printable(text: str) -> str:
    """`text` without what steers a page or a terminal:
    line ends, control and direction characters.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " "
        if c.isspace()
        else "\ufffd"
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn")
        else c
        for c in text
    )


def shorten(text: str, letters: int) -> str:
    """`text` in at most so many letters, with its middle left out."""
    text = printable(text)
    if len(text) <= letters:
        return text
    head = math.ceil((letters - 1) / 2)
    return f"{text[:head]}…{text[len(text) - (letters - 1 - head) :]}"


def text_width(text: str, size: float = SIZE) -> float:
    """An estimate of how wide `text` is."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else _WIDE for c in text) * size


def _element(mark: Mark) -> str:
    """One SVG element; everything that is not a number goes through `escape`."""
    rest = f' data-s="{escape(printable(mark.series))}"' if mark.series else ""
    rest += f' data-toggle="{escape(printable(mark.toggle))}"' if mark.toggle else ""
    tip = f"<title>{escape(printable(mark.tip))}</title>" if mark.tip else ""
    if mark.kind == "text":
        return _text(mark, rest)
    rest += f' fill-opacity="{_number(mark.alpha, 3)}"' if mark.alpha is not None else ""
    first, second = mark.points[0], mark.points[-1]
    if mark.kind == "rect":
        (x, y), (width, height) = first, second
        shape = (
            f'rect x="{_number(x)}" y="{_number(y)}" '
            f'width="{_number(width)}" height="{_number(height)}"'
        )
    elif mark.kind == "circle":
        shape = f'circle cx="{_number(first[0])}" cy="{_number(first[1])}" r="{_number(second[0])}"'
    else:
        shape = f'path d="{_path(mark)}"'
    tag = shape.partition(" ")[0]
    return (
        f'<{shape} class="{mark.style}"{rest}>{tip}</{tag}>'
        if tip
        else f'<{shape} class="{mark.style}"{rest}/>'
    )


def _text(mark: Mark, rest: str) -> str:
    x, y = map(_number, mark.points[0])
    rest += f' text-anchor="{mark.anchor}"' if mark.anchor != "start" else ""
    rest += f' font-size="{_number(mark.size)}"' if mark.size != SIZE else ""
    rest += f' transform="rotate({_number(mark.turn)} {x} {y})"' if mark.turn else ""
    return f'<text x="{x}" y="{y}" class="{mark.style}"{rest}>{escape(mark.text)}</text>'


def corners(mark: Mark) -> tuple[Point, ...]:
    """The corners of a triangle mark, of about the area of the circle with its radius."""
    (x, y), (radius, _) = mark.points
    side = 1.25 * radius
    return (x, y - side), (x + 0.95 * side, y + 0.7 * side), (x - 0.95 * side, y + 0.7 * side)


def _path(mark: Mark) -> str:
    points = corners(mark) if mark.kind == "triangle" else mark.points
    path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
    return path if mark.kind == "line" else path + "Z"


def _number(value: float, digits: int = 1) -> str:
    text = f"{value:.{digits}f}"
    return text[: -digits - 1] if text.endswith((".0", ".000")) else text
