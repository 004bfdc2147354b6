"""`fednoro export` and `fednoro predict`: a finished run's model, put to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednoro.core.types import UserError
from fednoro.core.wording import megabytes, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from fednoro.experiment.predict import Predictions

ROWS_ON_SCREEN = 50  # rows of the table on a screen
Folder = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command(help=EXPORT_HELP)(export)
    app.command()(predict)


EXPORT_HELP = """Write a run's model as one file, after comparing its outputs with the network's \
on test images of the run.

The file's metadata holds the class names and the preprocessing. The ONNX model takes batches of \
any size.
ONNX needs the extra export.

Example: fednoro export runs/digits-fednoro-seed0 --onnx digits.onnx
"""


def export(
    run: Folder,
    onnx: Annotated[str | None, typer.Option(metavar="FILE", help="Write an ONNX model.")] = None,
    safetensors: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a safetensors file.")
    ] = None,
) -> None:
    """Exports a run's model."""
    from rich.console import Console
    from rich.markup import escape

    from fednoro.experiment.export import TOLERANCE
    from fednoro.experiment.export import export as export_model

    targets = {"onnx": onnx, "safetensors": safetensors}
    if not any(targets.values()):
        raise UserError("say what to write: --onnx FILE, --safetensors FILE or both")
    for kind, path in targets.items():
        if path:
            result = export_model(run, path, kind)
            what = "test" if result.real else "made-up"
            bound = f", allowed {TOLERANCE:g} · (1 + |logit|)" if kind == "onnx" else ""
            Console(emoji=False).print(
                f"wrote {escape(str(result.path))} ({megabytes(result.bytes)}); on "
                f"{result.images} {what} images its logits differ from the network's by at "
                f"most {result.difference:.1e}{bound}",
                highlight=False,
                soft_wrap=True,
            )


def predict(
    run: Folder,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...", help="Files, folders or quoted patterns.", show_default=False
        ),
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Write all probabilities as .csv or .json; repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Classes to show for each image.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No table; only what could not be read.")
    ] = False,
) -> None:
    """Classify images with a run's model: PNG, JPEG or DICOM, decoded as the run's own data was.

    Files that cannot be read are named, and the rest goes on.

    Example: fednoro predict runs/mine scans/ 'more/*.png' --top 3 --to predictions.csv
    """
    import warnings

    from rich.console import Console

    from fednoro.core.types import FedNoRoWarning
    from fednoro.experiment.predict import predict as predict_files
    from fednoro.experiment.predict import write

    predictions = predict_files(run, images, batch)
    for path in to or []:
        write(predictions, Path(path).expanduser())
    if not quiet and predictions.readable:
        Console(emoji=False).print(_table(predictions, top))
    for row in predictions.rows:
        if row.error:
            warnings.warn(f"{row.path}: {row.error}", FedNoRoWarning, stacklevel=1)
    if not predictions.readable:
        raise UserError(f"none of the {len(predictions.rows)} files could be read")


def _table(predictions: Predictions, top: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("image", "class", box=None)
    table.add_column("probability", justify="right")
    rows = [row for row in predictions.rows if not row.error]
    for row in rows[:ROWS_ON_SCREEN]:
        for i, (name, share) in enumerate(predictions.top(row, top)):
            table.add_row(
                Text(one_line("" if i else row.path)), Text(one_line(name)), f"{share:.1%}"
            )
    if len(rows) > ROWS_ON_SCREEN:
        table.add_row(f"… and {len(rows) - ROWS_ON_SCREEN} more: --to FILE has all of them")
    return table
