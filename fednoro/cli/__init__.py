"""The `fednoro` command: its parts, and what becomes of errors."""

from __future__ import annotations

import dataclasses
import io
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fednoro.cli import audit, bench, flower, ls, model, prepare, report, run
from fednoro.core.types import FedNoRoWarning, UserError

app = typer.Typer(
    name="fednoro",
    help="""Train one model across sites whose labels cannot all be trusted: find the noisy sites, \
train through them.

[bold]Examples[/]

  fednoro run                                   digits, in under a minute

  fednoro run digits method=fedavg seed=0..4    another method, five seeds

  fednoro resume runs/digits-fednoro-seed0      carry on a run that was stopped

  fednoro audit runs/digits-fednoro-seed0       which labels look wrong, site by site

  fednoro bench table1 --quick                  the paper's comparison, small

  fednoro ls methods                            what can be chosen
""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"fednoro {version('fednoro')}")
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


# In the order in which `fednoro --help` shows them.
app.command(help=run.RUN_HELP)(run.run)
app.command()(run.resume)
app.command(help=prepare.HELP)(prepare.prepare)
app.command()(run.config)
app.command(help=ls.HELP)(ls.ls)
report.register(app)
app.command(help=audit.HELP)(audit.audit)
model.register(app)
app.add_typer(bench.bench, name="bench")
app.add_typer(flower.app, name="flower")

# Newer versions of typer have a copy of click.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, Ctrl-C is 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A ✓ that a terminal cannot show must not end a run.
            stream.reconfigure(errors="replace")
    sys.path.append(str(Path.cwd()))  # where the module of `model=module:factory` is

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, FedNoRoWarning):
            _complain("warning:", "yellow", message)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        code = app(prog_name="fednoro", standalone_mode=False)  # 130 where typer met Ctrl-C first
    except UserError as error:
        _complain("error:", "red", error)
        sys.exit(2)
    except _ClickException as error:
        text = error.format_message().rstrip(".")
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "fednoro"
            text = _override_hint(error) or text
            _complain(
                "error:", "red", f"{text}{'' if text.endswith('?') else '.'} See: {command} --help"
            )
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code)


def _override_hint(error: Any) -> str:
    """What to say where somebody has written `--seed 3` for `seed=3`."""
    context, flag = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if (
        context is None
        or flag is None
        or "items" not in {parameter.name for parameter in context.command.params}
    ):
        return ""
    from fednoro.experiment.config.configuration import Config

    key = flag.lstrip("-").replace("-", "_")
    if key.partition(".")[0] not in {item.name for item in dataclasses.fields(Config)}:
        return ""
    arguments = sys.argv[1:]
    position = next(
        (i for i, text in enumerate(arguments) if text.partition("=")[0] == flag), len(arguments)
    )
    _, equals, value = (
        arguments[position].partition("=") if position < len(arguments) else ("", "", "")
    )
    value = value if equals else next(iter(arguments[position + 1 :]), "")
    return f"no such option: {flag}; did you mean {key}={shlex.quote(value) if value else '…'}?"


def _complain(word: str, colour: str, message: object) -> None:
    line = Text.assemble((word, colour), " ", " ".join(str(message).splitlines()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
