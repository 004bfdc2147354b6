"""The `fednoro` command."""

from __future__ import annotations

import dataclasses
import io
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fednoro.types import FedNoRoWarning, UserError

app = typer.Typer(
    name="fednoro",
    help="""Train one model across sites whose labels cannot all be trusted: find the noisy sites, train through them.

[bold]Examples[/]

  fednoro run                                   digits, in under a minute

  fednoro run digits method=fedavg seed=0..4    another method, five seeds

  fednoro resume runs/digits-fednoro-seed0      carry on a run that was stopped

  fednoro ls methods                            what can be chosen
""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN_HELP = """Run an experiment: a preset or a YAML file, then any number of key=value overrides.

[bold]Examples[/]

  fednoro run                                   digits, in under a minute

  fednoro run digits method=fedavg seed=0..4    five seeds, with mean ± std

  fednoro run digits noise.rate=0.2 method.warmup=5

  fednoro run digits noise=symmetric noise.low=0.5 noise.high=0.7

  fednoro run digits data=folder data.path=~/images model=resnet18

  fednoro run my.yaml name=first train.rounds=50 device=cuda:1

[bold]fednoro ls[/] shows what there is to choose, and every option.
"""


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"fednoro {version('fednoro')}")
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    pass


Items = Annotated[list[str] | None, typer.Argument(metavar="[PRESET|FILE] [KEY=VALUE]...", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and the table of several seeds.")]


def _sorted_out(items: list[str] | None) -> tuple[str, list[str]]:
    plain = [item for item in items or [] if "=" not in item]
    if len(plain) > 1:
        raise UserError(f"one preset or file at a time, got {' and '.join(plain)}; overrides look like key=value")
    return (plain or ["digits"])[0], [item for item in items or [] if "=" in item]


@app.command(help=RUN_HELP)
def run(items: Items = None, quiet: Quiet = False) -> None:
    from fednoro import experiment
    from fednoro.config import resolve, seeds
    from fednoro.display import Terminal, seeds_table

    source, overrides = _sorted_out(items)
    several, others = seeds(overrides)
    configs = [resolve(source, [*others, f"seed={seed}"]) for seed in several] or [resolve(source, others)]
    if len(configs) > 1:
        configs = [c if c.name is None else dataclasses.replace(c, name=f"{c.name}-seed{c.seed}") for c in configs]
    console, finished = Console(emoji=False), []
    for config in configs:
        terminal = Terminal(console, quiet)
        try:
            finished.append(experiment.run(config, watcher=terminal))
        finally:
            terminal.close()
    if len(finished) > 1:
        console.print(seeds_table(finished))


@app.command()
def resume(
    folder: Annotated[str, typer.Argument(help="A run folder, such as runs/digits-fednoro-seed0.")],
    quiet: Quiet = False,
) -> None:
    """Carry on a run that was stopped or killed; it ends with the same bits as if it had not been.

    Example: fednoro resume runs/digits-fednoro-seed0
    """
    from fednoro import experiment
    from fednoro.display import Terminal
    from fednoro.runs import RunFolder

    terminal = Terminal(Console(emoji=False), quiet)
    already = RunFolder(Path(folder).expanduser()).finished
    try:
        done = experiment.resume(folder, watcher=terminal)
    finally:
        terminal.close()
    if already:
        terminal.finished(done)


@app.command()
def config(items: Items = None) -> None:
    """Print the resolved configuration as YAML: every option with its value.

    Example: fednoro config ich method=fedla > my.yaml
    """
    from fednoro.config import dump, resolve

    source, overrides = _sorted_out(items)
    typer.echo(dump(resolve(source, overrides)), nl=False)


@app.command("ls")
def listing(
    what: Annotated[str, typer.Argument(help="methods, data, partitions, noise, models, presets, train or general.")],
) -> None:
    """List what can be chosen, with every option, its default and its meaning.

    WHAT is methods, data, partitions, noise, models, presets, train or general.

    Example: fednoro ls methods
    """
    from fednoro.config import REGISTRIES, General, presets
    from fednoro.training import Augment, Training

    kinds: dict[str, dict[str, type[Any]]] = {
        name: dict(REGISTRIES[section])
        for name, section in {
            "methods": "method",
            "data": "data",
            "partitions": "partition",
            "noise": "noise",
            "models": "model",
        }.items()
    }
    kinds |= {"train": {"train": Training, "train.augment": Augment}, "general": {"general": General}}
    console = Console(emoji=False)
    if what == "presets":
        table = Table("preset", "what it is", box=None)
        for name, line in presets().items():
            table.add_row(name, escape(line))
        console.print(table)
        return
    if what not in kinds:
        raise UserError(f"ls takes one of {', '.join([*kinds, 'presets'])}, got {what!r}")
    for name, kind in kinds[what].items():
        console.print(f"[bold]{name}[/]  {escape((kind.__doc__ or '').splitlines()[0])}", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 3))
        for item in dataclasses.fields(kind):
            table.add_row(item.name, _default(item), escape(_meaning(item)))
        if table.rows:
            console.print(table)


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return escape(str(item.default))
    return "…" if item.default_factory is not dataclasses.MISSING else "[red]required[/]"


def _meaning(item: dataclasses.Field[Any]) -> str:
    from fednoro.options import allowed

    choices = (
        str(item.type).removeprefix("Literal[").removesuffix("]").replace('"', "")
        if "Literal" in str(item.type)
        else ""
    )
    return "; ".join(part for part in (item.metadata.get("help", ""), allowed(item), choices) if part)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, Ctrl-C is 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a ✓ that a terminal cannot show must not end a run
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
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "fednoro"
        _complain("error:", "red", f"{error.format_message().rstrip('.')}. See: {command} --help")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(code)


def _complain(word: str, colour: str, message: object) -> None:
    line = Text.assemble((word, colour), " ", " ".join(str(message).splitlines()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
