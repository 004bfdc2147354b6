"""Labels as people really gave them, from a CSV of id,label."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fednoro.core.options import Options, option
from fednoro.core.types import IntArray, UserError
from fednoro.data.noise.noise_model import Context, Noise, changed_share, read_content


def observed_from_file(
    path: str | Path, ids: Sequence[str] | None, classes: Sequence[str], labels: IntArray
) -> IntArray:
    """The labels with those listed in a CSV of `id,label` in their place.

    Labels are class names throughout or else class indices throughout. Without `ids` a
    sample's id is its position.
    """
    ids = [str(i) for i in range(len(labels))] if ids is None else ids
    if len(ids) != len(labels):
        raise UserError(f"ids must have one entry per label ({len(labels)}), got {len(ids)}")
    position = {sample: i for i, sample in enumerate(ids)}
    if len(position) != len(ids):
        raise UserError(
            f"{path}: the data's ids are not unique, so labels cannot be looked up by id"
        )

    rows = _read_observations(path)
    by_name, by_index = (
        {str(name): c for c, name in enumerate(kind)} for kind in (classes, range(len(classes)))
    )
    label_texts = {label for _, _, label in rows}
    lookup = (
        by_index
        if label_texts <= by_index.keys() and not label_texts <= by_name.keys()
        else by_name
    )

    observed = np.array(labels, dtype=np.int64)
    line_of: dict[str, int] = {}
    for line, sample, label in rows:
        if sample not in position:
            raise UserError(
                f"{path}, line {line}: "
                f"no sample has the id {sample!r} (the first is {next(iter(ids), None)!r})"
            )
        if sample in line_of:
            raise UserError(
                f"{path}, line {line}: "
                f"id {sample!r} was given on line {line_of[sample]} already; keep one"
            )
        if label not in lookup:
            names = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
            raise UserError(
                f"{path}, line {line}: {label!r} is not a class; "
                f"use names throughout ({names}) or indices throughout (0..{len(classes) - 1})"
            )
        line_of[sample] = line
        observed[position[sample]] = lookup[label]
    return observed


def _read_observations(path: str | Path) -> list[tuple[int, str, str]]:
    """Line number, id and label of each row."""
    content = read_content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    rows, last_line = [], 0
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in ("id", "label") if name not in header]:
            columns = ",".join(header)
            raise UserError(
                f"{path}, line 1: no column {' and '.join(missing)}; "
                f"make the header id,label, got {columns!r}"
            )
        last_line = reader.line_num
        for cells in reader:
            # Files for spreadsheets have an apostrophe before a cell
            # that would be taken for a formula.
            row = dict(
                zip(
                    header,
                    (re.sub(r"^'(?='*[=+\-@＝＋－＠])", "", cell.strip()) for cell in cells),
                    strict=False,
                )
            )
            if cells:
                rows.append((reader.line_num, row.get("id", ""), row.get("label", "")))
            last_line = reader.line_num
    except csv.Error as error:
        raise UserError(f"{path}, line {last_line + 1}: not a CSV file: {error}") from None
    if not rows:
        raise UserError(f"{path}, line 2: no rows after the header; list at least one id,label")
    return rows


@dataclass(frozen=True)
class FromFile(Options):
    """Labels as somebody really gave them, from a CSV of id,label."""

    section: ClassVar[str] = "noise"
    path: str = option(
        help="CSV with the header id,label; samples that are not listed keep their label",
        example="labels.csv",
    )

    def apply(self, labels: IntArray, parts: Sequence[IntArray], context: Context) -> Noise:
        """See `NoiseModel.apply`."""
        file_labels = observed_from_file(self.path, context.ids, context.classes, labels)
        observed = np.array(labels, dtype=np.int64)
        for part in parts:
            observed[part] = file_labels[part]
        return Noise(observed, None, changed_share(observed, labels, parts))
