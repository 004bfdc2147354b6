"""CSV files as people keep them:
their rows with line numbers, and one clear line where they cannot be read.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fednoro.core.types import UserError

DELIMITER_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs"}
Row = tuple[int, dict[str, str]]  # the line that the row ends on, and its stripped cells by column


def read_table(file: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a CSV file that has at least these columns."""
    return parse_table(read_bytes(file), str(file), columns)


def read_bytes(file: Path) -> bytes:
    """A file's content, or a `UserError` that names it."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def parse_table(data: bytes, name: str, columns: Sequence[str]) -> list[Row]:
    """As `read_table`, from bytes that were read already; `name` is for messages."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    first_line = text.partition("\n")[0]
    # Dataverse hands tables out with tabs,
    # and Excel with semicolons where a comma is the decimal point.
    delimiter = next((mark for mark in "\t;" if mark in first_line and "," not in first_line), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = []
    try:
        header = [cell.strip() for cell in next(reader, [])]
        missing = [column for column in columns if column not in header]
        if missing:
            raise UserError(
                f"{name} must have the columns {', '.join(columns)}; "
                f"{missing[0]} is not among its {', '.join(header) or 'none'}"
            )
        for cells in reader:
            if len(cells) > len(header):
                raise UserError(
                    f"{name}, line {reader.line_num}: {len(cells)} cells under {len(header)} "
                    f"columns; put quotes around cells with {DELIMITER_NAMES[delimiter]}"
                )
            if any(cells):
                padded = [cell.strip() for cell in cells] + [""] * (len(header) - len(cells))
                rows.append((reader.line_num, dict(zip(header, padded, strict=True))))
    except csv.Error as error:
        raise UserError(f"{name}, line {reader.line_num}: {error}") from error
    return rows
