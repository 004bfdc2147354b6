"""`fednoro flower …`: light at import, as the help must be quick."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fednoro.cli.audit import Folds, MinCell, Rounds, Scores
from fednoro.cli.flower_setup import CERTS_HELP, INIT_HELP, certs, init, site
from fednoro.core.types import UserError

if TYPE_CHECKING:
    from fednoro.flower.ops.run_follower import Follower

LOST_EXIT_CODE = 3  # where the SuperLink is away and the run's outcome is not known

app = typer.Typer(
    name="flower",
    help="The same methods across real sites, on Flower: apps, certificates, simulation, runs.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("init", help=INIT_HELP)(init)
app.command("certs", help=CERTS_HELP)(certs)
app.add_typer(site, name="site")

Items = Annotated[
    list[str] | None, typer.Argument(metavar="[APP|PRESET|FILE] [KEY=VALUE]...", show_default=False)
]
Superlink = Annotated[
    str | None,
    typer.Option(help="A connection in Flower's config.toml; default: the one it names."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")]
MinSites = Annotated[
    int | None, typer.Option(help="Wait for so many sites in every exchange.", show_default=False)
]
Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds after which a round goes on without the rest.", show_default=False),
]
Resume = Annotated[
    Path | None, typer.Option(metavar="RUN", help="A run folder to carry on.", show_default=False)
]


SIMULATE_HELP = """Run on this machine through Flower's own simulation: every message is Flower's, \
the weights are `fednoro run`'s.

It takes Ray, some 20 seconds to start and more memory. For research, `fednoro run` is faster.

Example: fednoro flower simulate digits --sites 20 method=fedavg train.rounds=10
"""


@app.command(help=SIMULATE_HELP)
def simulate(
    items: Items = None,
    sites: Annotated[
        int | None, typer.Option(help="How many sites; default: partition.clients.")
    ] = None,
    cpus: Annotated[int, typer.Option(help="CPUs that all sites share.")] = 2,
    round_timeout: Timeout = None,
    resume: Resume = None,
    quiet: Quiet = False,
) -> None:
    """Runs through Flower's own simulation."""
    check_installed()
    from fednoro.flower.ops.flwr_process import simulation_link
    from fednoro.flower.ops.run_follower import as_json, read_items, with_run_folder

    if resume is not None:
        config, folder = _reopen(resume)
        values: dict[str, Any] = {"resume": str(folder)}
        clients = len(json.loads((folder / "sites.json").read_text(encoding="utf-8"))["sites"])
    else:
        arguments = [*(items or []), *([] if sites is None else [f"partition.clients={sites}"])]
        app_config, _, values = read_items(arguments, {"round-timeout": round_timeout})
        if app_config is None:
            raise UserError("this app is not fednoro's: simulate it with flwr run")
        clients = getattr(app_config.partition, "clients", None) or _count_sites(app_config)
        config, folder = with_run_folder(app_config)
        values |= {"fednoro": as_json(config)}
    with _temporary_app({**values, "simulation": 1}) as app_folder:
        federation, home = (
            f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus={cpus}",
            app_folder.parent,
        )
        with simulation_link(home / "home") as link:
            log = home / "home" / "superlink.log"
            _run_and_follow(
                link,
                app_folder,
                _follower_factory(folder, config, quiet),
                quiet,
                federation=federation,
                log=log,
            )


RUN_HELP = """Run on a SuperLink and its sites; ends with 0 only if the run completed, with 3 if \
the SuperLink is away.

Rounds are shown where the run folder can be read from here, that is on the SuperLink's own \
machine.

Examples: fednoro flower run federation --superlink hospital --min-sites 3

fednoro flower run digits data=sites partition=by_column noise=none --superlink hospital

fednoro flower run --resume runs/digits-fednoro-seed0 --superlink hospital
"""


@app.command(help=RUN_HELP)
def run(
    items: Items = None,
    superlink: Superlink = None,
    min_sites: MinSites = None,
    start_sites: Annotated[
        int | None, typer.Option(help="Sites to wait for before round 1.", show_default=False)
    ] = None,
    round_timeout: Timeout = None,
    resume: Resume = None,
    quiet: Quiet = False,
) -> None:
    """Runs on a SuperLink and its sites."""
    check_installed()
    from fednoro.flower.ops.flwr_process import Link
    from fednoro.flower.ops.run_follower import as_json, read_items, with_run_folder

    deployment = {
        "min-sites": min_sites,
        "start-sites": start_sites,
        "round-timeout": round_timeout,
    }
    link = Link(_connection(superlink))
    if resume is not None:
        config, folder = _reopen(resume)
        values: dict[str, Any] = {"resume": str(folder)}
        own_app = None
    else:
        app_config, own_app, values = read_items(items or [], deployment)
        if app_config is None:
            assert own_app is not None
            _run_and_follow(link, own_app, None, quiet, values)
            return
        config, folder = with_run_folder(app_config)
        values |= {"fednoro": as_json(config)}
    with _temporary_app(values) as app_folder:
        _run_and_follow(link, app_folder, _follower_factory(folder, config, quiet), quiet)


AUDIT_HELP = """Estimate how many labels are wrong at each site of a run; each site gets a letter \
with the images to look at.

The coordinator's page is RUN/audit/index.html. Letters are written at the sites, and nothing in \
them is sent.

The same command again goes on with an audit that was stopped.

Example: fednoro flower audit runs/first --superlink hospital --min-sites 3
"""


@app.command(help=AUDIT_HELP)
def audit(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run on Flower.", show_default=False),
    ],
    superlink: Superlink = None,
    scores: Annotated[
        Scores,
        typer.Option(
            help="early: a model after few rounds; cross_fit: unseen labels; corrected: by "
            "fednoro-plus."
        ),
    ] = Scores.early,
    min_cell: MinCell = 5,
    rounds: Rounds = None,
    folds: Folds = 5,
    min_sites: MinSites = None,
    round_timeout: Timeout = None,
    quiet: Quiet = False,
) -> None:
    """Audits a run at its sites."""
    check_installed()
    from fednoro.audit.simulated_audit import warmup_of
    from fednoro.flower.ops.flwr_process import Link
    from fednoro.flower.ops.run_follower import AuditFollower
    from fednoro.flower.server.run_config import AuditOrder

    config, folder = _reopen(run, "audited")
    settings = json.loads((folder / "flower.json").read_text(encoding="utf-8"))
    if settings.pop("simulation"):
        raise UserError(
            f"the sites of {folder} were simulated: audit it with `fednoro audit {folder}`"
        )
    del settings["run"]
    overrides = {"min_sites": min_sites, "round_timeout": round_timeout}
    settings |= {key: value for key, value in overrides.items() if value is not None}
    order = AuditOrder(str(folder), scores.value, rounds or warmup_of(config), folds, min_cell)
    values = {key.replace("_", "-"): value for key, value in settings.items()} | {
        "audit": order.as_json()
    }
    link, total = Link(_connection(superlink)), order.method().rounds
    with _temporary_app(values) as app_folder:
        _run_and_follow(
            link,
            app_folder,
            lambda: AuditFollower(Console(emoji=False), order.exchanges, total, quiet),
            quiet,
        )


def carry_on(folder: Path, quiet: bool) -> None:
    """`fednoro resume` of a run on Flower:
    as it was begun, in a simulation or on the default connection.
    """
    settings = json.loads((folder / "flower.json").read_text(encoding="utf-8"))
    if settings.get("simulation"):
        simulate(resume=folder, quiet=quiet)
    else:
        run(resume=folder, quiet=quiet)


def check_installed() -> None:
    """Flower is an extra; without it the commands say so."""
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise UserError("this command needs Flower: pip install 'fednoro[flower]'")


def _reopen(resume: Path, purpose: str = "carried on") -> tuple[Any, Path]:
    from fednoro.experiment.config.configuration import resolve

    folder = resume.expanduser().absolute()
    for name in ("config.yaml", "flower.json", "sites.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} cannot be {purpose} on Flower: it has no {name}")
    return resolve(folder / "config.yaml"), folder


def _count_sites(config: Any) -> int:
    """How many clients a partition makes that does not say so itself."""
    dataset = config.data.load(config.seed)
    if not dataset.sites:
        raise UserError("how many sites? The partition does not say: give --sites")
    return len(set(dataset.sites))


def _connection(superlink: str | None) -> str:
    if superlink is not None:
        return superlink
    import os
    import tomllib

    home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
    try:
        return str(
            tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))["superlink"][
                "default"
            ]
        )
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{home / 'config.toml'} names no default SuperLink: "
            f"give --superlink, or add it there ({error})"
        ) from error


@contextmanager
def _temporary_app(values: Mapping[str, Any]) -> Iterator[Path]:
    """An app folder with this run-config."""
    from fednoro.flower.ops.flwr_process import app_toml

    with tempfile.TemporaryDirectory(prefix="fednoro-") as place:
        app_folder = Path(place) / "app"
        app_folder.mkdir()
        (app_folder / "pyproject.toml").write_text(app_toml(values), encoding="utf-8")
        yield app_folder


def _follower_factory(folder: Path, config: Any, quiet: bool) -> Callable[[], Follower]:
    from fednoro.flower.ops.run_follower import Follower

    return lambda: Follower(Console(emoji=False), folder, config.train.rounds, quiet)


def _run_and_follow(
    link: Any,
    app_folder: Path,
    make_follower: Callable[[], Follower] | None,
    quiet: bool,
    values: Mapping[str, Any] | None = None,
    federation: str = "",
    log: Path | None = None,
) -> None:
    from fednoro.flower.ops.flwr_process import tail
    from fednoro.flower.ops.run_follower import RunFailedError, RunLostError, follow

    number = link.run(app_folder, values, federation)
    follower = None if make_follower is None else make_follower()
    if not quiet:
        where = "" if follower is None else f" in {follower.folder}"
        _say(f"Flower's run {number}{where}")
    try:
        follow(link, number, follower)
    except (RunFailedError, RunLostError) as error:
        log_tail = "" if log is None else f"\n{tail(log, 40)}"
        _say(f"error: {error}{log_tail}", stderr=True)
        raise typer.Exit(LOST_EXIT_CODE if isinstance(error, RunLostError) else 1) from error
    except KeyboardInterrupt:
        if follower is not None:
            _say(f"stopped; carry on with: {follower.resume_command}")
        raise


def _say(line: str, stderr: bool = False) -> None:
    Console(stderr=stderr, emoji=False).print(line, highlight=False, soft_wrap=True, markup=False)
