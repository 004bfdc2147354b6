"""`fednoro run`, `resume` and `config`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fednoro.cli import flower
from fednoro.core.types import UserError

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

Items = Annotated[
    list[str] | None, typer.Argument(metavar="[PRESET|FILE] [KEY=VALUE]...", show_default=False)
]
SeedsQuiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Only warnings, errors and the table of several seeds."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")]


def _source_and_overrides(items: list[str] | None) -> tuple[str, list[str]]:
    _refuse_split_items(items or [])
    sources = [item for item in items or [] if "=" not in item]
    if len(sources) > 1:
        raise UserError(
            f"one preset or file at a time, got {' and '.join(sources)}; "
            "overrides look like key=value"
        )
    return (sources or ["digits"])[0], [item for item in items or [] if "=" in item]


def _refuse_split_items(items: list[str]) -> None:
    """An unquoted `method.noisy=[0, 3]` arrives in two parts."""

    def is_open(text: str) -> bool:
        value = text.partition("=")[2]
        return value[:1] in ("[", "{") and any(
            value.count(a) > value.count(b) for a, b in ("[]", "{}")
        )

    for i, item in enumerate(items):
        if is_open(item):
            candidates = [" ".join(items[i:end]) for end in range(i + 2, len(items) + 1)]
            if whole := next((text for text in candidates if not is_open(text)), None):
                raise UserError(
                    f"the shell has split {whole} at its spaces: "
                    f"quote it, as in {shlex.quote(whole)}"
                )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, a scheduler's warning, stops a run as Ctrl-C does;
    further ones are ignored while it is saved.
    """
    signals, owner = [], os.getpid()

    def stop(number: int, _: object) -> None:
        if os.getpid() != owner:  # forked from here, with this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)
        signals.append(number)
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if signals:
            raise typer.Exit(128 + signals[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def run(items: Items = None, quiet: SeedsQuiet = False) -> None:
    from fednoro.experiment import simulation
    from fednoro.experiment.config.configuration import resolve, seeds
    from fednoro.experiment.watch.terminal import Terminal, seeds_table
    from fednoro.report import write_or_warn

    source, overrides = _source_and_overrides(items)
    seed_values, other_overrides = seeds(overrides)
    configs = [resolve(source, [*other_overrides, f"seed={seed}"]) for seed in seed_values] or [
        resolve(source, other_overrides)
    ]
    if len(configs) > 1:
        configs = [
            c if c.name is None else dataclasses.replace(c, name=f"{c.name}-seed{c.seed}")
            for c in configs
        ]
    console, finished_runs = Console(emoji=False), []
    for config in configs:
        terminal = Terminal(console, quiet)
        try:
            with _sigterm_as_interrupt():
                finished_runs.append(
                    simulation.run(config, watcher=terminal, write_page=write_or_warn)
                )
        finally:
            terminal.close()
    if len(finished_runs) > 1:
        console.print(seeds_table(finished_runs))


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

    was_finished = RunFolder(Path(folder).expanduser()).finished
    if not was_finished and (Path(folder).expanduser() / "flower.json").exists():
        flower.carry_on(Path(folder), quiet)
        return
    console = Console(emoji=False)
    terminal = Terminal(console, quiet)
    try:
        with _sigterm_as_interrupt():
            result = simulation.resume(folder, terminal, write_or_warn)
    finally:
        terminal.close()
    if was_finished:
        if not quiet:
            console.print(
                f"{folder} had finished: there is nothing to carry on",
                highlight=False,
                markup=False,
            )
        terminal.finished(result)


def config(items: Items = None) -> None:
    """Print the resolved configuration as YAML: every option with its value.

    Example: fednoro config ich data.path=~/rsna method=fedla > my.yaml
    """
    from fednoro.experiment.config.configuration import dump, resolve

    source, overrides = _source_and_overrides(items)
    typer.echo(dump(resolve(source, overrides)), nl=False)
