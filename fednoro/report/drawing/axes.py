"""Axes: from values to pixels, with ticks at round numbers and names that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fednoro.report.drawing.scene import Scene, shorten, text_width

LONGEST_NAME = 12  # letters of a name on an axis; tips and tables have the whole name


@dataclass(frozen=True)
class Scale:
    """A straight line from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)


@dataclass(frozen=True)
class Box:
    """The rectangle that values are drawn in."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def scales(self, x: tuple[float, float], y: tuple[float, float]) -> tuple[Scale, Scale]:
        return Scale(*x, self.left, self.right), Scale(*y, self.bottom, self.top)


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: int, high: int, about: int = 6) -> list[int]:
    """Ticks for rounds: the first and the last,
    and round numbers between that keep away from them.
    """
    between = [int(t) for t in round_ticks(low, high, about) if float(t).is_integer()]
    room = (high - low) / (2 * about)
    return sorted({low, high} | {t for t in between if low + room < t < high - room})


def draw_y(
    scene: Scene,
    box: Box,
    scale: Scale,
    ticks: Sequence[float],
    tick_text: Callable[[float], str],
    title: str = "",
) -> None:
    """Horizontal grid lines with their values on the left; the title stands above them."""
    for tick in ticks:
        scene.line([(box.left, scale(tick)), (box.right, scale(tick))], "grid")
        scene.text(box.left - 7, scale(tick) + 4, tick_text(tick), anchor="end")
    if title:
        scene.text(box.left - 7 if box.left > 60 else 2, box.top - 12, title, anchor="start")


def draw_x(
    scene: Scene,
    box: Box,
    scale: Scale,
    ticks: Sequence[float],
    tick_text: Callable[[float], str],
    title: str = "",
) -> None:
    """A line at the bottom with values below it and the title below those."""
    scene.line([(box.left, box.bottom), (box.right, box.bottom)], "axis")
    for tick in ticks:
        scene.line([(scale(tick), box.bottom), (scale(tick), box.bottom + 4)], "axis")
        scene.text(scale(tick), box.bottom + 17, tick_text(tick), anchor="middle")
    if title:
        scene.text((box.left + box.right) / 2, box.bottom + 34, title, anchor="middle")


def short_names(names: Sequence[str], longest: int = LONGEST_NAME) -> list[str]:
    """Names for an axis: without a beginning that all share up to a space, and shortened."""
    first, last = min(names, default=""), max(names, default="")  # what these two share, all share
    common_letters = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0
    )
    cut = first.rfind(" ", 0, common_letters) + 1
    return [shorten(name[cut:] if name[cut:].strip() else name, longest) for name in names]


def names_below(
    scene: Scene,
    places: Sequence[float],
    names: Sequence[str],
    top: float,
    styles: Sequence[str] | None = None,
) -> None:
    """Names under columns: upright where they fit, turned where they do not,
    every n-th where they are many.
    """
    step = places[1] - places[0] if len(places) > 1 else 100.0
    widest = max((text_width(name, 11) for name in names), default=0)
    turned = widest > step - 4.5
    each = max(1, math.ceil(13 / step)) if turned else 1
    for i, (x, name) in enumerate(zip(places, names, strict=True)):
        if i % each:
            continue
        style = styles[i] if styles else "tick"
        if turned:
            scene.text(x + 4, top + 3, name, style, size=11, anchor="end", turn=-90)
        else:
            scene.text(x, top + 12, name, style, size=11, anchor="middle")


def room_below(names: Sequence[str], step: float) -> float:
    """The height that `names_below` needs."""
    widest = max((text_width(name, 11) for name in names), default=0)
    return widest + 8 if widest > step - 4.5 else 18


def room_left(names: Sequence[str], size: float = 11) -> float:
    """The width that names to the left of rows need."""
    return max((text_width(name, size) for name in names), default=0) + 10


def stands_free(
    place: tuple[float, float], name: str, others: Iterable[tuple[float, float]]
) -> bool:
    """Whether a name in small print hides none of the dots and names at `others`."""
    return all(
        abs(place[0] - x) > text_width(name, 10) + 2 or abs(place[1] - y) > 9 for x, y in others
    )
