"""Figures for a paper: the report's drawings as PNG, PDF and SVG files, by matplotlib."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednoro.core.files import disk_errors, write_whole
from fednoro.core.types import UserError
from fednoro.experiment.run_folder.recorded_run import read
from fednoro.report.drawing.figure import NARROW, WIDE
from fednoro.report.drawing.scene import Mark, Scene, corners
from fednoro.report.figures import figures
from fednoro.report.recorded_verdict import read_verdict
from fednoro.report.web.palette import HEAT_STEPS, LIGHT, STYLES, Style, on_heat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")
PIXELS_PER_INCH = 96
POINTS_PER_PIXEL = 72 / PIXELS_PER_INCH
ON_PAPER = {
    **LIGHT,
    "paper": "#ffffff",
    **{f"h{step}": on_heat(step / HEAT_STEPS, LIGHT) for step in range(HEAT_STEPS + 1)},
}


def save_all(
    run: str | Path,
    to: Path,
    formats: tuple[str, ...] = FORMATS,
    only: tuple[str, ...] = (),
    column: bool = False,
) -> list[Path]:
    """Writes every figure of a run, or those named in `only`;
    `column` makes them as wide as one of two columns.
    """
    recorded = read(run)
    figures_by_id = {figure.id: figure for _, figure in figures(recorded, read_verdict(recorded))}
    if unknown := sorted(set(only) - set(figures_by_id)):
        raise UserError(
            f"this run has no figure {unknown[0]!r}: it has {', '.join(figures_by_id) or 'none'}"
        )
    with disk_errors(to):
        to.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in only or figures_by_id:
        scene = figures_by_id[name].draw(NARROW if column else WIDE)
        for kind in formats:
            paths.append(to / f"{name}.{kind}")
            write_whole(paths[-1], export(scene, kind))
    return paths


def export(scene: Scene, kind: str, dpi: int = 300) -> bytes:
    """The scene as the content of a file of this kind; equal scenes give equal bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib: pip install 'fednoro[report]'") from error
    settings: dict[Any, Any] = {
        "pdf.fonttype": 42,
        "svg.fonttype": "path",
        "svg.hashsalt": "fednoro",
        "font.family": "DejaVu Sans",
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A name may be in letters that the font does not have.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure((scene.width / PIXELS_PER_INCH, scene.height / PIXELS_PER_INCH))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
        axes.set_axis_off()
        for order, mark in enumerate(scene.marks):
            _draw(axes, mark, order)
        content = io.BytesIO()
        metadata = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
        figure.savefig(content, format=kind, dpi=dpi, metadata=metadata)
    return content.getvalue()


def _draw(axes: Axes, mark: Mark, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Polygon, Rectangle

    style = _style(mark)
    if mark.kind == "text":
        _write(axes, mark, style, order)
        return
    if mark.kind == "line":
        colour = ON_PAPER[style.stroke or "ink"]
        xs, ys = zip(*mark.points, strict=True)
        line = Line2D(
            xs,
            ys,
            color=colour,
            alpha=style.opacity,
            zorder=order,
            linewidth=style.width * POINTS_PER_PIXEL,
        )
        line.set(linestyle=_dashes(style), solid_capstyle="butt", dash_capstyle="butt")
        axes.add_line(line)
        return
    patch: Any
    (x, y), (width, height) = mark.points[0], mark.points[-1]
    if mark.kind == "rect":
        patch = Rectangle((x, y), width, height)
    elif mark.kind == "circle":
        patch = Circle((x, y), width)
    else:
        patch = Polygon(corners(mark) if mark.kind == "triangle" else mark.points, closed=True)
    patch.set(**_look(style, mark.alpha), zorder=order)
    axes.add_patch(patch)


def _style(mark: Mark) -> Style:
    if mark.style in STYLES:
        return STYLES[mark.style]
    return Style(fill=mark.style)  # text on a heat cell


def _look(style: Style, alpha: float | None) -> dict[str, Any]:
    from matplotlib.colors import to_rgba

    opacity = style.opacity * (style.fill_opacity if alpha is None else alpha)
    return {
        "facecolor": to_rgba(ON_PAPER[style.fill], opacity) if style.fill else "none",
        "edgecolor": to_rgba(ON_PAPER[style.stroke], style.opacity) if style.stroke else "none",
        "linewidth": style.width * POINTS_PER_PIXEL if style.stroke else 0,
        "linestyle": _dashes(style),
    }


def _dashes(style: Style) -> Any:
    if not style.dash:
        return "-"
    # matplotlib measures dashes in line widths, SVG in pixels.
    return (0, tuple(float(part) / max(style.width, 0.1) for part in style.dash.split()))


def _write(axes: Axes, mark: Mark, style: Style, order: int) -> None:
    align = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
    axes.text(
        *mark.points[0],
        mark.text,
        color=ON_PAPER[style.fill or "ink"],
        fontsize=mark.size * POINTS_PER_PIXEL * 0.93,
        ha=align,
        va="baseline",
        rotation=-mark.turn,
        rotation_mode="anchor",
        zorder=order,
        parse_math=False,
        fontweight="bold" if style.bold else "normal",
    )
