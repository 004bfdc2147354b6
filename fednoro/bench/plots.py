"""Figures fit for a paper:
matplotlib, colours that colour-blind readers tell apart, and shapes beside them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fednoro.core.files import write_whole
from fednoro.core.types import BoolArray, FloatArray, IntArray, UserError
from fednoro.data.federation import Federation

# Okabe and Ito's palette.
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#5A5A5A"
STYLE = {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8.5, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "axes.linewidth": 0.6, "xtick.major.width": 0.6,
    "ytick.major.width": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "fednoro",
    "savefig.dpi": 300, "figure.dpi": 100,
}  # fmt: skip
ENDINGS = {"png": None, "pdf": {"CreationDate": None, "ModDate": None}, "svg": {"Date": None}}


def matplotlib() -> Any:
    """The library; without it an error that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("figures need matplotlib: pip install 'fednoro[report]'") from error
    return matplotlib


def write(figure: Any, stem: Path) -> list[Path]:
    """PNG, PDF and SVG."""
    paths = []
    with matplotlib().rc_context(STYLE):
        for ending, metadata in ENDINGS.items():
            content = io.BytesIO()
            figure.savefig(
                content, format=ending, metadata=metadata, bbox_inches="tight", pad_inches=0.03
            )
            path = stem.with_name(f"{stem.name}.{ending}")
            write_whole(path, content.getvalue())
            paths.append(path)
    return paths


def partition(federation: Federation, clean: IntArray, observed: IntArray) -> Any:
    """Dots sized by sample count per client and class:
    true labels on the left, given ones on the right.
    """
    clients, classes = clean.shape
    noisy: BoolArray = (
        np.zeros(clients, dtype=np.bool_) if federation.noisy is None else federation.noisy
    )
    # Inches between clients, and between classes at least as much.
    pitch = max(0.13, min(0.22, 3.2 / clients))
    width, height = pitch * (clients + 1), max(pitch, 0.17) * (classes + 1)
    largest = max(int(clean.max()), int(observed.max()), 1)
    area = (72 * pitch * 1.05) ** 2  # points², of the largest dot
    with matplotlib().rc_context(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2 * width + 1.6, height + 1.0), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, table, title in zip(
            panels, (clean, observed), ("True labels", "Observed labels"), strict=True
        ):
            for column in np.flatnonzero(noisy).tolist():
                axes.axvspan(column - 0.5, column + 0.5, color=VERMILION, alpha=0.10, linewidth=0)
            for flagged, colour in ((False, BLUE), (True, VERMILION)):
                k, c = np.nonzero((table > 0) & (noisy == flagged)[:, None])
                axes.scatter(
                    k, c, s=area * table[k, c] / largest, color=colour, alpha=0.85, linewidths=0
                )
            axes.set(
                title=title, xlabel="Client", xlim=(-0.6, clients - 0.4), ylim=(classes - 0.4, -0.6)
            )
            axes.set_xticks(range(0, clients, 1 if clients <= 10 else 5 if clients <= 40 else 10))
            axes.set_yticks(range(classes), federation.classes)
            axes.tick_params(length=2)
            axes.set_axisbelow(True)
            axes.grid(color="0.93", linewidth=0.5)
        panels[0].set_ylabel("Class")
        _partition_legend(figure, area, largest, bool(noisy.any()))
    return figure


def _partition_legend(figure: Any, area: float, largest: int, noisy: bool) -> None:
    from matplotlib.lines import Line2D

    sizes = sorted({max(1, _round_down(largest * share)) for share in (0.1, 0.4, 1.0)})
    marks = [
        ("clean client", BLUE, 0.35 * area),
        *([("noisy client", VERMILION, 0.35 * area)] if noisy else []),
    ]
    marks += [
        (f"{size:,} image{'s' if size > 1 else ''}", GREY, area * size / largest) for size in sizes
    ]
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker="o",
            color=colour,
            markeredgewidth=0,
            markersize=size**0.5,
            label=label,
        )
        for label, colour, size in marks
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        handletextpad=0.4,
    )


def _round_down(value: float) -> int:
    """To one or two leading digits, as people would."""
    digits = 10 ** max(len(str(int(value))) - 1, 0)
    return int(value // digits * digits) if value >= 10 else int(value)


def detection(panels: Mapping[tuple[str, ...], FloatArray], t1: int) -> Any:
    """Recall, precision and exact match (seeds × rounds × 3, from 0 to 1)
    against the warm-up's length.
    """
    lines = (
        ("Recall", BLUE, "o", "-"),
        ("Precision", VERMILION, "s", "--"),
        ("Exact match", GREEN, "^", "-."),
    )
    with matplotlib().rc_context(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.4 * len(panels), 2.3), layout="constrained")
        for axes, (title, curves) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            rounds = np.arange(1, curves.shape[1] + 1)
            axes.axvline(t1, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
            axes.annotate(
                "$T_1$", (t1, 104), color=GREY, ha="center", va="bottom", annotation_clip=False
            )
            for i, (label, colour, marker, dashes) in enumerate(lines):
                values = 100 * curves[:, :, i]
                if len(values) > 1:
                    axes.fill_between(
                        rounds, values.min(0), values.max(0), color=colour, alpha=0.13, linewidth=0
                    )
                # Marks take turns, so that equal curves do not hide each other's.
                spacing = max(3, len(rounds) // 8)
                axes.plot(
                    rounds,
                    values.mean(0),
                    color=colour,
                    label=label,
                    linestyle=dashes,
                    linewidth=1.3,
                    marker=marker,
                    markersize=3.5,
                    markevery=(i * spacing // 3, spacing),
                )
            axes.set(
                xlabel="Rounds of warm-up",
                ylabel="%",
                ylim=(-3, 104),
                xlim=(0.5, len(rounds) + 0.5),
            )
            axes.set_title(", ".join(title), pad=12)
            axes.grid(color="0.93", linewidth=0.5)
        axes.legend(frameon=False, loc="lower right")
    return figure
