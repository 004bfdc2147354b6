"""Commands around a federation: certificates, the app folder, a site's settings and its check.

Light at import: what the commands need is loaded when one of them runs.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from fednoro.core.types import UserError

if TYPE_CHECKING:
    from fednoro.flower.ops.check_result import Check

site = typer.Typer(
    help="A site's own side: its settings, and whether it is ready.", no_args_is_help=True
)

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


CERTS_HELP = """Make a CA, the SuperLink's certificate and a key pair for each site; later calls \
add sites.

What is there stays there. --force makes the SuperLink's certificate (with --host) and the named \
sites' keys anew,
never the CA.

Examples: fednoro flower certs certs --host link.example.org --host 10.0.0.7 --sites north,south

fednoro flower certs certs --sites west          a site more

fednoro flower certs certs --host link.example.org --force          a new year
"""


def certs(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where certificates and keys go.", show_default=False),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A DNS name or IP address of the SuperLink; once for each.", show_default=False
        ),
    ] = None,
    sites: Annotated[
        str, typer.Option(help="Sites to make keys for, with commas between.", show_default=False)
    ] = "",
    days: Annotated[int, typer.Option(help="How long the SuperLink's certificate is valid.")] = 365,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the SuperLink's certificate and these keys.")
    ] = False,
) -> None:
    """Makes certificates and keys."""
    from fednoro.flower.ops.certificates import make, public_key_of

    names = [name.strip() for name in sites.split(",") if name.strip()]
    certificates = make(folder, host or (), names, days, force)
    console = Console(emoji=False, highlight=False)
    for path in certificates.new_files:
        console.print(f"made {path}", soft_wrap=True, markup=False)
    if not certificates.new_files:
        console.print("nothing to do: everything was there", markup=False)
    days_left = (certificates.expires - datetime.now(UTC)).days
    console.print(
        f"the SuperLink's certificate expires on {certificates.expires:%Y-%m-%d}, "
        f"in {days_left} days",
        markup=False,
    )
    console.print(f"the CA expires on {certificates.ca_expires:%Y-%m-%d}", markup=False)
    for name in names:
        private, public = certificates.sites[name], public_key_of(certificates.sites[name])
        console.print(
            f"{name}: register {public}; the site gets {private} and {certificates.ca}",
            soft_wrap=True,
            markup=False,
        )


Items = Annotated[
    list[str] | None, typer.Argument(metavar="[PRESET|FILE] [KEY=VALUE]...", show_default=False)
]


INIT_HELP = """Write an app folder that `flwr run` takes: pyproject.toml, README.md and the run's \
configuration.

Example: fednoro flower init federation digits train.rounds=50 method=fednoro
"""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The app folder to make.", show_default=False)
    ],
    items: Items = None,
) -> None:
    """Writes an app folder."""
    from fednoro.experiment.config.configuration import resolve, section_name
    from fednoro.flower.ops.starter_files import write_app

    plain = [item for item in items or [] if "=" not in item]
    if len(plain) > 1:
        raise UserError(
            f"one preset or file at a time, got {' and '.join(plain)}; "
            "overrides look like key=value"
        )
    files = write_app(
        folder, (plain or ["digits"])[0], [item for item in items or [] if "=" in item]
    )
    console = Console(emoji=False, highlight=False)
    for path in files:
        console.print(f"made {path}", soft_wrap=True, markup=False)
    deploy = f"fednoro flower run {folder}"
    if section_name(resolve(files[0]), "data") == "sites":  # who are elsewhere
        console.print(f"next: {deploy}", soft_wrap=True, markup=False)
    else:
        console.print(f"next: fednoro flower simulate {folder}", soft_wrap=True, markup=False)
        console.print(
            f"or, with a SuperLink and its sites up: {deploy}", soft_wrap=True, markup=False
        )


@site.command("init")
def site_init(
    file: Annotated[
        Path, typer.Argument(metavar="SITE.yaml", help="The file to write.", show_default=False)
    ],
) -> None:
    """Write a commented site.yaml to fill in.

    Example: fednoro flower site init /etc/fednoro/site.yaml
    """
    from fednoro.flower.ops.starter_files import write_site

    write_site(file)
    typer.echo(f"made {file}; fill it in, then: fednoro flower site check {file}")


SiteFile = Annotated[
    Path, typer.Argument(metavar="SITE.yaml", help="The site's settings.", show_default=False)
]
Superlink = Annotated[
    str | None, typer.Option(help="HOST:PORT of the SuperLink.", show_default=False)
]
RootCertificates = Annotated[
    Path | None, typer.Option(help="The federation's ca.crt.", show_default=False)
]
Key = Annotated[Path | None, typer.Option(help="The site's private key.", show_default=False)]
Classes = Annotated[
    str | None,
    typer.Option(help="The federation's class names in order, with commas.", show_default=False),
]
RunConfig = Annotated[
    str | None,
    typer.Option(help="The run's configuration: its model, batch and classes.", show_default=False),
]
Full = Annotated[bool, typer.Option("--full", help="Decode all images now, into the cache.")]


SITE_CHECK_HELP = """Check data, labels, disk, memory, device, packages, certificate, key and \
connection before anything is sent.

Ends with 0 if nothing failed, with 1 otherwise. Warnings do not count.

Example: fednoro flower site check site.yaml --superlink link.example.org:8000 --root-certificates \
ca.crt --key key
"""


@site.command("check", help=SITE_CHECK_HELP)
def site_check(
    file: SiteFile,
    superlink: Superlink = None,
    root_certificates: RootCertificates = None,
    key: Key = None,
    classes: Classes = None,
    run_config: RunConfig = None,
    full: Full = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks a site."""
    from fednoro.flower.ops.check_result import passed
    from fednoro.flower.ops.site_check import check_site

    checks = []
    console = Console(emoji=False, highlight=False)
    for check in check_site(
        file,
        superlink=superlink,
        root_certificates=root_certificates,
        key=key,
        classes=None if classes is None else [name.strip() for name in classes.split(",")],
        run_config=run_config,
        full=full,
    ):
        checks.append(check)
        if not as_json:
            _show_check(console, check)
    ready = passed(checks)
    if as_json:
        typer.echo(
            json.dumps({"ok": ready, "checks": [check.to_dict() for check in checks]}, indent=1)
        )
    else:
        count = sum(check.status == "failed" for check in checks)
        console.print(
            "ready" if ready else f"{count} to mend before this site can take part", soft_wrap=True
        )
    if not ready:
        raise typer.Exit(1)


def _show_check(console: Console, check: Check) -> None:
    line = Text.assemble(
        (f"{check.status:<8}", COLOURS[check.status]), f"{check.name}: {check.message}"
    )
    console.print(line.append(f" → {check.remedy}") if check.remedy else line, soft_wrap=True)
