"""The `fednoro` command."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fednoro import deliver
from fednoro.audit import command as audit
from fednoro.bench.command import bench
from fednoro.flower import command as flower
from fednoro.report import command as report
from fednoro.types import FedNoRoWarning, UserError

app = typer.Typer(
    name="fednoro",
    help="""Train one model across sites whose labels cannot all be trusted: find the noisy sites, train through them.

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


# Newer versions of typer have a copy of click.
_ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

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

    already = RunFolder(Path(folder).expanduser()).finished
    if not already and (Path(folder).expanduser() / "flower.json").exists():
        flower.carry_on(Path(folder), quiet)
        return
    console = Console(emoji=False)
    terminal = Terminal(console, quiet)
    try:
        done = experiment.resume(folder, watcher=terminal)
    finally:
        terminal.close()
    if already:
        if not quiet:
            console.print(f"{folder} had finished: there is nothing to carry on", highlight=False, markup=False)
        terminal.finished(done)


PREPARE_HELP = """Decode a data set once into a memory-mapped cache, with a manifest of what it holds.

NAME is folder, isic2019, ham10000, ich or medmnist. Files that cannot be read are left out and listed. It goes on
where a stopped preparation was, and does nothing twice.

[bold]Examples[/]

  fednoro prepare folder --from ~/images --size 64               one folder per class

  fednoro prepare folder --from ~/images csv=labels.csv          a CSV of path,label[,id][,site][,group]

  fednoro prepare isic2019 --from ~/ISIC2019                     the official archives

  fednoro prepare ich --from ~/rsna window=triple

  fednoro prepare ham10000 --from ~/HAM10000 --size 64 classes=8

[bold]fednoro ls data[/] shows every source with its options.
"""


@app.command(help=PREPARE_HELP)
def prepare(
    name: Annotated[str, typer.Argument(help="The data source.", show_default=False)],
    source: Annotated[str, typer.Option("--from", help="The folder, archive or file as it was downloaded.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
    size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    to: Annotated[str | None, typer.Option(help="Where caches are kept; $FEDNORO_CACHE or ~/.cache/fednoro.")] = None,
    quiet: Quiet = False,
) -> None:
    from fednoro.config import presets, resolve
    from fednoro.data import SOURCES
    from fednoro.data.cache import Preparable
    from fednoro.data.cache import prepare as make
    from fednoro.display import Terminal, prepared_table

    if name not in SOURCES:
        takes = ", ".join(known for known, kind in SOURCES.items() if issubclass(kind, Preparable))
        raise UserError(f"prepare takes one of {takes}, got {name!r}")
    if not issubclass(SOURCES[name], Preparable):
        raise UserError(f"{name} needs no preparation: its images are used as they are")
    if wrong := [item for item in options or [] if "=" not in item]:
        raise UserError(f"options look like key=value, got {wrong[0]!r}")
    given = list(options or [])
    given += [] if size is None else [f"size={size}"]
    given += [] if to is None else [f"cache={_quoted(to)}"]
    # A preset of that name sets the options, so that a later `fednoro run NAME data.path=…` finds this cache.
    preset = name if name in presets() else "digits"
    overrides = [f"data={name}", *(f"data.{item}" for item in [f"path={_quoted(source)}", *given])]
    console = Console(emoji=False)
    terminal = Terminal(console, quiet)
    try:
        done = make(resolve(preset, overrides).data, terminal.progress)
    except KeyboardInterrupt:
        terminal.close()
        console.print("stopped; the same command goes on from here", highlight=False)
        raise
    finally:
        terminal.close()
    if not quiet:
        console.print(prepared_table(done), soft_wrap=True)
        # The paper's presets add noise to clean labels; a user's own labels are what they are.
        chosen = overrides[1:] if preset == name else [*overrides, "noise=none"]
        again = " ".join(shlex.quote(item) for item in chosen)
        console.print(f"use it with: fednoro run {preset} {again}", soft_wrap=True, highlight=False, markup=False)


def _quoted(text: str) -> str:
    # Overrides are read as YAML, where a path such as `a: b` would be a mapping.
    return json.dumps(text, ensure_ascii=False)


@app.command()
def config(items: Items = None) -> None:
    """Print the resolved configuration as YAML: every option with its value.

    Example: fednoro config ich data.path=~/rsna method=fedla > my.yaml
    """
    from fednoro.config import dump, resolve

    source, overrides = _sorted_out(items)
    typer.echo(dump(resolve(source, overrides)), nl=False)


@app.command("ls")
def listing(
    what: Annotated[
        str | None, typer.Argument(help="methods, data, partitions, noise, models, presets, split, train or general.")
    ] = None,
) -> None:
    """List what can be chosen, with every option, its default and its meaning.

    WHAT is methods, data, partitions, noise, models, presets, split, train or general; without it, names alone.

    Example: fednoro ls methods
    """
    from fednoro.config import REGISTRIES, SINGLE, General, presets
    from fednoro.training import Augment

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
    kinds |= {name: {name: kind} for name, kind in SINGLE.items()} | {"general": {"general": General}}
    kinds["train"] |= {"train.augment": Augment}
    console = Console(emoji=False)
    if what is None:
        table = Table("fednoro ls …", "what there is", box=None)
        for name, choices in {**{name: [*known] for name, known in kinds.items()}, "presets": [*presets()]}.items():
            table.add_row(name, "its options" if name in choices else escape(", ".join(choices)))
        console.print(table)
        return
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

    listed = re.search(r"Literal\[(.*?)\]", str(item.type))
    choices = re.sub("[\"']", "", listed[1]) if listed else ""
    return "; ".join(part for part in (item.metadata.get("help", ""), allowed(item), choices) if part)


# In the order in which `fednoro --help` shows them.
report.register(app)
app.command(help=audit.HELP)(audit.audit)
deliver.register(app)
app.add_typer(bench, name="bench")
app.add_typer(flower.app, name="flower")


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
    except _ClickException as error:
        told = error.format_message().rstrip(".")
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "fednoro"
            _complain("error:", "red", f"{told}{'' if told.endswith('?') else '.'} See: {command} --help")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code)


def _complain(word: str, colour: str, message: object) -> None:
    line = Text.assemble((word, colour), " ", " ".join(str(message).splitlines()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
