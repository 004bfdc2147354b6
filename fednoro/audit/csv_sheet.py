"""CSV files that spreadsheets open without running anything in them.

A cell that begins with one of = + - @, a tab or a line end may be taken for a formula; an
apostrophe before it makes it text. `noise: from_file` takes one such apostrophe off again, so a
cell that has some gets another.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def neutral(cell: str) -> str:
    """The cell as text for every spreadsheet."""
    return f"'{cell}" if FORMULA.match(cell) else cell


def sheet(header: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    """A CSV file in UTF-8."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(header)
    writer.writerows([neutral(cell) for cell in row] for row in rows)
    return out.getvalue().encode()
