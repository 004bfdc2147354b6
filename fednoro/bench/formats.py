"""A filled table as Markdown, LaTeX, CSV and on the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence

import rich.table
from rich.text import Text

from fednoro.bench.tables import Cell, Row, Table

NOTHING = "–"
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "ρ": r"$\rho$", "η": r"$\eta$", "∈": r"$\in$",
    "±": r"$\pm$", "✓": r"\checkmark", "✗": r"$\times$", "–": r"\textendash{}", "×": r"$\times$",
    "…": r"\ldots{}", "τ": r"$\tau$",
}  # fmt: skip


def figure(cell: Cell) -> str:
    """Mean ± deviation; how many seeds there are where some are missing."""
    if cell.mean is None:
        return NOTHING
    text = f"{cell.mean:.2f}" + ("" if cell.deviation is None else f" ± {cell.deviation:.2f}")
    return (
        text
        if len(cell.values) == cell.expected
        else f"{text} [{len(cell.values)} of {cell.expected}]"
    )


def paper_figure(cell: Cell) -> str:
    """The paper's figure, in parentheses."""
    return "" if cell.paper is None else f" ({cell.paper:.2f})"


def best(rows: Sequence[Row]) -> set[tuple[int, int]]:
    """Where the largest mean of each column and group is, as rows and columns;
    all of them on ties of two digits.
    """
    positions: set[tuple[int, int]] = set()
    for group in {row.group for row in rows}:
        lines = [i for i, row in enumerate(rows) if row.group == group]
        for j in range(len(rows[0].cells)):
            means = {
                i: round(mean, 2) for i in lines if (mean := rows[i].cells[j].mean) is not None
            }
            if len(means) > 1:
                positions |= {(i, j) for i, mean in means.items() if mean == max(means.values())}
    return positions


def markdown(table: Table) -> str:
    """With the caption above and the notes below."""
    head = [*table.headings, *(", ".join(column) for column in table.columns)]
    lines = [
        table.caption,
        "",
        _line(head),
        _line(["---"] * len(table.headings) + ["---:"] * len(table.columns)),
    ]
    bold = best(table.rows)
    for i, row in enumerate(table.rows):
        cells = [
            (f"**{figure(cell)}**" if (i, j) in bold else figure(cell)) + paper_figure(cell)
            for j, cell in enumerate(row.cells)
        ]
        lines.append(_line([*(_plain(text) for text in row.heading), *cells]))
    return "\n".join([*lines, "", *(f"{_plain(note)}  " for note in table.notes)]).rstrip() + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def latex(table: Table) -> str:
    """A `table` environment for booktabs."""
    bold, count = best(table.rows), len(table.headings)
    lines = [
        r"% needs \usepackage{booktabs} and \usepackage{amssymb}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape(table.caption)}}}",
        rf"  \label{{tab:{table.name}}}",
        rf"  \begin{{tabular}}{{{'l' * count}{'c' * len(table.columns)}}}",
        r"    \toprule",
    ]
    depth = max((len(column) for column in table.columns), default=1)
    for level in range(depth):
        names = [escape(text) if level == depth - 1 else "" for text in table.headings]
        lines.append(_latex_line([*names, *_spanned_headings(table.columns, level)]))
    lines.append(r"    \midrule")
    for i, row in enumerate(table.rows):
        if i and row.heading[0] != table.rows[i - 1].heading[0]:
            lines.append(r"    \addlinespace")
        repeats_heading = (
            i > 0 and row.heading[:-1] == table.rows[i - 1].heading[:-1] and bool(row.group)
        )
        names = [
            "" if repeats_heading and j < len(row.heading) - 1 else escape(text)
            for j, text in enumerate(row.heading)
        ]
        cells = []
        for j, cell in enumerate(row.cells):
            text = escape(figure(cell))
            paper_text = (
                rf" {{\footnotesize{escape(paper_figure(cell))}}}" if cell.paper is not None else ""
            )
            cells.append((rf"\textbf{{{text}}}" if (i, j) in bold else text) + paper_text)
        lines.append(_latex_line([*names, *cells]))
    lines += [r"    \bottomrule", r"  \end{tabular}"]
    lines += [rf"  \par\smallskip\footnotesize {escape(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}", ""])


def _latex_line(cells: Sequence[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"


def _spanned_headings(columns: Sequence[Sequence[str]], level: int) -> list[str]:
    """One line of the head; equal headings beside each other, under the same ones, become one."""
    cells: list[str] = []
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and tuple(columns[end][: level + 1]) == tuple(
            columns[start][: level + 1]
        ):
            end += 1
        text = escape(columns[start][level]) if level < len(columns[start]) else ""
        cells.append(text if end - start == 1 else rf"\multicolumn{{{end - start}}}{{c}}{{{text}}}")
        start = end
    return cells


def escape(text: str) -> str:
    """Text that LaTeX prints as it is."""
    safe = "".join(_LATEX.get(char, char) for char in text)
    safe = re.sub(r"-(?=-)", "-{}", safe)  # two hyphens would become a dash
    return re.sub(r"[^\x20-\x7e\u00a1-\u017f]", "?", safe)


def tidy(table: Table) -> str:
    """One line for each run, as CSV."""
    text = io.StringIO()
    keys = list(dict.fromkeys(key for record in table.records for key in record))
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.records)
    return text.getvalue()


def terminal(table: Table) -> rich.table.Table:
    """For the console."""
    console_table = rich.table.Table(title=Text(table.caption), title_justify="left")
    for heading in table.headings:
        console_table.add_column(heading)
    for column in table.columns:
        console_table.add_column("\n".join(column), justify="right", no_wrap=True)
    bold = best(table.rows)
    for i, row in enumerate(table.rows):
        if i and row.group and row.heading[0] != table.rows[i - 1].heading[0]:
            console_table.add_section()
        cells = [
            Text.assemble(
                (figure(cell), "bold" if (i, j) in bold else ""), (paper_figure(cell), "dim")
            )
            for j, cell in enumerate(row.cells)
        ]
        repeats_heading = (
            i > 0 and bool(row.group) and row.heading[:-1] == table.rows[i - 1].heading[:-1]
        )
        names = [
            "" if repeats_heading and j < len(row.heading) - 1 else text
            for j, text in enumerate(row.heading)
        ]
        console_table.add_row(*map(Text, names), *cells)
    return console_table


WRITERS: dict[str, Callable[[Table], str]] = {"md": markdown, "tex": latex, "csv": tidy}
