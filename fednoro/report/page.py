"""The report: one self-contained HTML file from a run folder."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fednoro.core.files import write_whole
from fednoro.core.wording import quantity
from fednoro.experiment.run_folder.recorded_run import Recorded, read
from fednoro.report.drawing.figure import NARROW, WIDE, Cell, Figure
from fednoro.report.drawing.scene import printable
from fednoro.report.figures import figures
from fednoro.report.figures.training import duration
from fednoro.report.findings import findings
from fednoro.report.recorded_verdict import read_verdict
from fednoro.report.web import palette

MANY_CLIENTS = 130  # clients side by side, more than a phone has room for even when scrolled
REFRESH_SECONDS = 5  # seconds between reloads of the page of a run that goes on
MOST_COLUMNS = 66  # of a table on the page
_NUMBER = re.compile(r"–|[-+]?[\d.,]+(e-?\d+)?%?( (±|to|of) [-+]?[\d.]+)?")


@cache
def environment() -> Environment:
    jinja = Environment(
        loader=PackageLoader("fednoro.report.web", "templates/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(clean=printable, cell=_cell, numeric=_numeric_columns)
    return jinja


def render(path: str | Path, watching: bool = False) -> str:
    """The report as HTML; with `watching`, a page of an unfinished run reloads itself."""
    run = read(path)
    verdict = None
    try:
        verdict = read_verdict(run)
    except Exception as error:
        # Damage of a kind not thought of: the rest of the report must still come.
        run.missing.append(("detection.json", f"cannot be used: {type(error).__name__}"))
    sections: dict[str, list[dict[str, Any]]] = {}
    for section, figure in figures(run, verdict):
        sections.setdefault(section, []).append(drawing(figure))
    return page(
        "report.html",
        title=run.name,
        run=run,
        findings=findings(run, verdict),
        sections=sections,
        subtitle=_subtitle(run),
        environment=_environment(run),
        refresh=REFRESH_SECONDS if watching and run.status != "finished" else None,
    )


def write_report(path: str | Path, watching: bool = False) -> Path:
    """Writes report.html into the run folder, completely or not at all."""
    target = Path(path).expanduser() / "report.html"
    write_whole(target, render(path, watching).encode("utf-8", "replace"))
    return target


def page(template: str, **values: Any) -> str:
    """A template with the shared style and script;
    a policy in it lets no other script run and nothing be fetched.
    """
    script = _text("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"img-src data:; script-src 'sha256-{digest}'"
    )
    style = f"{palette.css()}\n{_text('style.css')}"
    common_values = {
        "style": Markup(style),
        "script": Markup(script),
        "policy": policy,
        "refresh": None,
    }
    return environment().get_template(template).render(**{**common_values, **values})


def drawing(figure: Figure) -> dict[str, Any]:
    """A figure as the templates want it: drawn for a desk and for a phone."""
    scrolled = figure.columns > MANY_CLIENTS
    wide = figure.draw(WIDE)
    svgs = [wide.svg(figure.label, "both over" if scrolled else "wide")]
    if not scrolled:
        narrow = figure.draw(NARROW)
        svgs.append(narrow.svg(figure.label, "narrow over" if narrow.width > NARROW else "narrow"))
    table = figure.table
    columns = len(table.head)
    head, rows = table.head[:MOST_COLUMNS], [row[:MOST_COLUMNS] for row in table.rows]
    note = table.note + (
        f" The first {MOST_COLUMNS} of {columns} columns." if columns > MOST_COLUMNS else ""
    )
    return {"figure": figure, "svg": svgs, "head": head, "rows": rows, "note": note.strip()}


def _text(name: str) -> str:
    return (files("fednoro.report.web") / "templates" / "report" / name).read_text(encoding="utf-8")


def _subtitle(run: Recorded) -> list[str]:
    facts = [
        f"{run.choice('method')} on {run.choice('data')}" if run.config else "configuration unknown"
    ]
    if run.holdings is not None:
        facts.append(quantity(len(run.holdings.names), "client"))
        facts.append(quantity(len(run.holdings.classes), "class", "classes"))
    facts.append(f"noise {run.choice('noise')}" if run.config else "")
    facts.append(f"seed {run.config['seed']}" if "seed" in run.config else "")
    seconds = sum(record["seconds"] for record in run.rounds)
    facts.append(
        f"{quantity(len(run.rounds), 'round')} in {duration(seconds)}" if run.rounds else ""
    )
    facts.append(
        {"finished": "", "running": "running now", "unfinished": "stopped before its end"}[
            run.status
        ]
    )
    return [fact for fact in facts if fact]


def _environment(run: Recorded) -> list[tuple[str, str]]:
    rows = []
    for key, value in run.environment.items():
        if isinstance(value, dict):
            rows += [(str(name), str(version)) for name, version in value.items()]
        elif isinstance(value, list):
            rows.append((str(key), " ".join(map(str, value))))
        else:
            rows.append((str(key), value if isinstance(value, str) else json.dumps(value)))
    return rows


def _cell(value: Cell) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def _numeric_columns(rows: Sequence[Sequence[Cell]]) -> set[int]:
    """Which columns hold numbers alone, and are set to the right."""
    columns = zip(*rows, strict=True)
    return {
        at
        for at, column in enumerate(columns)
        if at and all(_NUMBER.fullmatch(_cell(value)) for value in column)
    }
