"""What a run shows: an HTML report, figures for a paper, and comparisons of several runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write_or_warn(folder: Path, warn: Callable[[str], None]) -> None:
    """Writes report.html at the end of a run; the run stands, whatever happens here."""
    try:
        from fednoro.report.page import write_report

        write_report(folder)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        warn(
            f"the report could not be written ({type(error).__name__}: {why}): "
            f"try fednoro report {folder}"
        )
