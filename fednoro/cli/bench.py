"""`fednoro bench`: the paper's tables and figures from one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fednoro.core.types import UserError

bench = typer.Typer(
    help="""The paper's tables and figures, on data of your choice.

Every cell and seed is an ordinary run folder under OUT/runs; partitions, annotators and warm-ups \
that runs share are \
made once. What is there already is not made again, and a bench that was stopped goes on where it \
was.

[bold]Examples[/]

  fednoro bench table1 --quick                  digits, minutes on two cores

  fednoro bench table2 data.path=~/ISIC2019 model.weights=resnet18.pth

  fednoro bench table1 --data my.yaml --rates 0,0.4 --methods fedla,fednoro

  fednoro bench table4 --data my.yaml --seeds 0..4 --jobs 4 precision=bf16

  fednoro bench all --quick                     every table and figure
""",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Items = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)]
Data = Annotated[
    str | None,
    typer.Option(metavar="PRESET|FILE", help="Preset or YAML file; default: as in the paper."),
]
Seeds = Annotated[
    str | None, typer.Option(help="As in 0..2 or 0,1,5; default: 0..2.", show_default=False)
]
Rounds = Annotated[
    int | None,
    typer.Option(
        min=2, help="Rounds of each run; options that count rounds keep their proportion."
    ),
]
LongestWarmup = Annotated[
    int | None,
    typer.Option("--rounds", min=2, help="The longest warm-up; default: three times T1."),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for runs and results; default: bench/DATA.", show_default=False),
]
Jobs = Annotated[
    int, typer.Option("--jobs", "-j", min=1, help="Worker processes; 1 is this process alone.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A small version on digits: within 5 minutes on two cores.")
]
Rates = Annotated[str | None, typer.Option(help="ρ, as in 0,0.4,0.6; default: the paper's.")]
Ranges = Annotated[str | None, typer.Option(help="η, as in 0.3-0.5,0.5-0.7; default: the paper's.")]
Methods = Annotated[
    str | None, typer.Option(help="As in fedavg,fednoro; default: the paper's nine.")
]
Mixtures = Annotated[
    int | None,
    typer.Option(
        "--mixture-seeds", min=1, help="Seeds of the mixture; default: 10,000.", show_default=False
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only failures and the result.")]


TABLE1_HELP = """Nine methods × the noise settings of the ICH grid: Best and Last BACC.

Example: fednoro bench table1 --data ham10000 --rates 0,0.4,0.6 --ranges 0.5-0.7 \
data.path=~/HAM10000
"""


@bench.command(help=TABLE1_HELP)
def table1(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    methods: Methods = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Table 1, by methods on ICH."""
    _run(["table1"], items, data, seeds, rounds, out, jobs, quick, quiet, rates, ranges, methods)


@bench.command()
def table2(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    methods: Methods = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Nine methods × the noise settings of the ISIC 2019 grid: Best and Last BACC.

    Example: fednoro bench table2 --seeds 0..2 data.path=~/ISIC2019 model.weights=resnet18.pth
    """
    _run(["table2"], items, data, seeds, rounds, out, jobs, quick, quiet, rates, ranges, methods)


TABLE3_HELP = """Indicators of a noisy client, with and without LA: recall, precision and exact \
match over mixture seeds.

Example: fednoro bench table3 --data ham10000 --rates 0.4 --ranges 0.5-0.7 data.path=~/HAM10000
"""


@bench.command(help=TABLE3_HELP)
def table3(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    mixtures: Mixtures = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Table 3, by indicators of a noisy client."""
    _run(
        ["table3"],
        items,
        data,
        seeds,
        rounds,
        out,
        jobs,
        quick,
        quiet,
        rates,
        ranges,
        None,
        mixtures,
    )


@bench.command()
def table4(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """FedNoRo's second stage in pieces: all clients, clean ones only, DaAgg only, KD only, both.

    Example: fednoro bench table4 --data isic2019 data.path=~/ISIC2019
    """
    _run(["table4"], items, data, seeds, rounds, out, jobs, quick, quiet, rates, ranges)


@bench.command("figure-partition")
def figure_partition(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """How the samples are spread: dots by client and class, true and observed labels side by side.

    Example: fednoro bench figure-partition --data isic2019 --seeds 0 data.path=~/ISIC2019
    """
    _run(
        ["figure-partition"],
        items,
        data,
        seeds or "0",
        None,
        out,
        jobs,
        quick,
        quiet,
        rates,
        ranges,
    )


FIGURE_T1_HELP = """Detection of noisy clients against the warm-up's length: one long warm-up, \
judged after each round.

Example: fednoro bench figure-t1 --rounds 30 data.path=~/rsna
"""


@bench.command("figure-t1", help=FIGURE_T1_HELP)
def figure_t1(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    rounds: LongestWarmup = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    mixtures: Mixtures = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """The figure of detection against the warm-up's length."""
    _run(
        ["figure-t1"],
        items,
        data,
        seeds,
        None,
        out,
        jobs,
        quick,
        quiet,
        rates,
        ranges,
        None,
        mixtures,
        rounds,
    )


@bench.command("all")
def everything(
    items: Items = None,
    data: Data = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    out: Out = None,
    jobs: Jobs = 1,
    rates: Rates = None,
    ranges: Ranges = None,
    mixtures: Mixtures = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Every table and figure, with what they share made once.

    Example: fednoro bench all --quick
    """
    data = data if data or quick else "ich"
    _run(
        list(TARGETS),
        items,
        data,
        seeds,
        rounds,
        out,
        jobs,
        quick,
        quiet,
        rates,
        ranges,
        None,
        mixtures,
    )


TARGETS = ("table1", "table2", "table3", "table4", "figure-partition", "figure-t1")


def _run(
    names: list[str],
    items: list[str] | None,
    data: str | None,
    seeds: str | None,
    rounds: int | None,
    out: Path | None,
    jobs: int,
    quick: bool,
    quiet: bool,
    rates: str | None = None,
    ranges: str | None = None,
    methods: str | None = None,
    mixtures: int | None = None,
    longest: int | None = None,
) -> None:
    from fednoro.bench.tables_and_figures import Wish, make

    if wrong := [item for item in items or [] if "=" not in item]:
        raise UserError(
            f"overrides look like key=value, got {wrong[0]!r}; data sets go with --data"
        )
    wish = Wish(
        data, tuple(items or ()), seeds, rounds, out, _numbers(rates), _ranges(ranges),
        tuple(methods.split(",")) if methods else None, mixtures, quick, longest,
    )  # fmt: skip
    console = Console(emoji=False)
    try:
        failed = make(names, wish, jobs, console, quiet)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", highlight=False)
        raise
    if failed:
        raise typer.Exit(1)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--rates must be numbers, as in 0,0.4,0.6; got {text!r}") from error


def _ranges(text: str | None) -> tuple[tuple[float, float], ...] | None:
    try:
        pairs: list[Any] = (
            [] if text is None else [tuple(map(float, part.split("-"))) for part in text.split(",")]
        )
        return tuple((low, high) for low, high in pairs) or None
    except ValueError as error:
        raise UserError(f"--ranges must be pairs, as in 0.3-0.5,0.5-0.7; got {text!r}") from error
