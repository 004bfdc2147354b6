"""The `fednoro` command."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fednoro import deliver, listing, prepare
from fednoro.audit import command as audit
from fednoro.bench.command import bench
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.flower import command as flower
from fednoro.report import command as report

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
SeedsQuiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only warnings, errors and the table of several seeds.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")]


def _sorted_out(items: list[str] | None) -> tuple[str, list[str]]:
    _refuse_torn(items or [])
    plain = [item for item in items or [] if "=" not in item]
    if len(plain) > 1:
        raise UserError(f"one preset or file at a time, got {' and '.join(plain)}; overrides look like key=value")
    return (plain or ["digits"])[0], [item for item in items or [] if "=" in item]


def _refuse_torn(items: list[str]) -> None:
    """An unquoted `method.noisy=[0, 3]` arrives in two parts."""

    def is_open(text: str) -> bool:
        value = text.partition("=")[2]
        return value[:1] in ("[", "{") and any(value.count(a) > value.count(b) for a, b in ("[]", "{}"))

    for i, item in enumerate(items):
        if is_open(item):
            joined = [" ".join(items[i:end]) for end in range(i + 2, len(items) + 1)]
            if whole := next((text for text in joined if not is_open(text)), None):
                raise UserError(f"the shell has split {whole} at its spaces: quote it, as in {shlex.quote(whole)}")


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, a scheduler's warning, stops a run as Ctrl-C does; further ones are ignored while it is saved."""
    received, owner = [], os.getpid()

    def stop(number: int, _: object) -> None:
        if os.getpid() != owner:  # forked from here, with this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise typer.Exit(128 + received[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command(help=RUN_HELP)
def run(items: Items = None, quiet: SeedsQuiet = False) -> None:
    from fednoro.experiment import simulation
    from fednoro.experiment.config.configuration import resolve, seeds
    from fednoro.experiment.watch.terminal import Terminal, seeds_table
    from fednoro.report import write_or_warn

    source, overrides = _sorted_out(items)
    several, others = seeds(overrides)
    configs = [resolve(source, [*others, f"seed={seed}"]) for seed in several] or [resolve(source, others)]
    if len(configs) > 1:
        configs = [c if c.name is None else dataclasses.replace(c, name=f"{c.name}-seed{c.seed}") for c in configs]
    console, finished = Console(emoji=False), []
    for config in configs:
        terminal = Terminal(console, quiet)
        try:
            with _stopped_by_sigterm():
                finished.append(simulation.run(config, watcher=terminal, write_page=write_or_warn))
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
    from fednoro.experiment import simulation
    from fednoro.experiment.run_folder.run_files import RunFolder
    from fednoro.experiment.watch.terminal import Terminal
    from fednoro.report import write_or_warn

    already = RunFolder(Path(folder).expanduser()).finished
    if not already and (Path(folder).expanduser() / "flower.json").exists():
        flower.carry_on(Path(folder), quiet)
        return
    console = Console(emoji=False)
    terminal = Terminal(console, quiet)
    try:
        with _stopped_by_sigterm():
            done = simulation.resume(folder, terminal, write_or_warn)
    finally:
        terminal.close()
    if already:
        if not quiet:
            console.print(f"{folder} had finished: there is nothing to carry on", highlight=False, markup=False)
        terminal.finished(done)


app.command(help=prepare.HELP)(prepare.prepare)


@app.command()
def config(items: Items = None) -> None:
    """Print the resolved configuration as YAML: every option with its value.

    Example: fednoro config ich data.path=~/rsna method=fedla > my.yaml
    """
    from fednoro.experiment.config.configuration import dump, resolve

    source, overrides = _sorted_out(items)
    typer.echo(dump(resolve(source, overrides)), nl=False)


app.command()(listing.ls)
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
            told = _as_override(error) or told
            _complain("error:", "red", f"{told}{'' if told.endswith('?') else '.'} See: {command} --help")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code)


def _as_override(error: Any) -> str:
    """What to say where somebody has written `--seed 3` for `seed=3`."""
    context, flag = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is None or flag is None or "items" not in {parameter.name for parameter in context.command.params}:
        return ""
    from fednoro.experiment.config.configuration import Config

    key = flag.lstrip("-").replace("-", "_")
    if key.partition(".")[0] not in {item.name for item in dataclasses.fields(Config)}:
        return ""
    typed = sys.argv[1:]
    place = next((i for i, text in enumerate(typed) if text.partition("=")[0] == flag), len(typed))
    _, equals, value = typed[place].partition("=") if place < len(typed) else ("", "", "")
    value = value if equals else next(iter(typed[place + 1 :]), "")
    return f"no such option: {flag}; did you mean {key}={shlex.quote(value) if value else '…'}?"


def _complain(word: str, colour: str, message: object) -> None:
    line = Text.assemble((word, colour), " ", " ".join(str(message).splitlines()))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)
