"""deploy/ and docs/deployment.md: systemd and Flower take what is written there, flag by flag."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from configparser import RawConfigParser
from functools import cache
from pathlib import Path

import click
import pytest
import typer

pytest.importorskip("flwr")

from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fednoro.cli import app as fednoro_app
from fednoro.cli.flower import app as flower_app

ROOT = Path(__file__).parents[2]
DEPLOY, GUIDE = ROOT / "deploy", ROOT / "docs" / "deployment.md"
UNITS = {"fednoro-superlink": "superlink.env.example", "fednoro-supernode": "supernode.env.example"}
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "flower-superlink": _parse_args_run_superlink,
    "flower-supernode": _parse_args_run_supernode,
}
COMMANDS = ("fednoro", "flwr")
every_unit = pytest.mark.parametrize("unit", UNITS)


class _Unit(RawConfigParser):
    """A unit file: keys may come twice, and their values then add up."""

    def __init__(self, file: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
        text = re.sub(r"\\\n\s*", " ", file.read_text(encoding="utf-8"))
        seen: dict[str, int] = {}
        lines = []
        for line in text.splitlines():
            key = line.partition("=")[0]
            if key == "Environment":
                seen[key] = seen.get(key, 0) + 1
                line = line.replace("Environment=", f"Environment{seen[key]}=", 1)
            lines.append(line)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string("\n".join(lines))

    @property
    def environment(self) -> dict[str, str]:
        words = [
            word
            for key, text in self["Service"].items()
            if key.startswith("Environment")
            for word in text.split()
        ]
        return dict(word.split("=", 1) for word in words if "=" in word)


def settings(unit: str) -> dict[str, str]:
    lines = (DEPLOY / UNITS[unit]).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def arguments(unit: str) -> list[str]:
    """What systemd would start, with the example's settings put in."""
    line = _Unit(DEPLOY / f"{unit}.service")["Service"]["ExecStart"]
    words = shlex.split(line)
    return [re.sub(r"\$\{(\w+)\}", lambda found: settings(unit)[found[1]], word) for word in words]


@every_unit
def test_systemd_accepts_the_units(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    program = Path(shutil.which("true") or "/bin/true")
    text = (DEPLOY / f"{unit}.service").read_text(encoding="utf-8")
    # it wants the program to exist
    written = re.sub(r"ExecStart=\S+", f"ExecStart={program}", text)
    (tmp_path / f"{unit}.service").write_text(written, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / f"{unit}.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{unit}.service" not in done.stderr, done.stderr
    (tmp_path / f"{unit}.service").write_text(
        written.replace("Restart=always", "Restart=perhaps"), encoding="utf-8"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "perhaps" in done.stderr, "systemd-analyze does not look at what it is given"


@every_unit
def test_flowers_own_parser_takes_what_a_unit_starts(unit: str) -> None:
    program, *flags = arguments(unit)
    parsed = PARSERS[Path(program).name]().parse_args(flags)
    if unit == "fednoro-superlink":
        assert parsed.enable_supernode_auth and not parsed.insecure and parsed.database
        assert parsed.ssl_certfile and parsed.ssl_keyfile and parsed.ssl_ca_certfile
        assert not parsed.runtime_dependency_install and parsed.port == 8000
    else:
        from flwr.common.config import parse_config_args

        assert (
            parsed.root_certificates and parsed.auth_supernode_private_key and not parsed.insecure
        )
        assert parsed.host == "127.0.0.1" and not parsed.runtime_dependency_install
        found = parse_config_args([parsed.node_config])
        assert found == {"site": "north", "config": "/etc/fednoro/site.yaml"}


@every_unit
def test_units_restart_as_flower_needs_and_keep_quiet(unit: str) -> None:
    service, environment = (
        _Unit(DEPLOY / f"{unit}.service")["Service"],
        _Unit(DEPLOY / f"{unit}.service").environment,
    )
    assert service["Restart"] == "always"
    assert int(service["RestartSec"]) == (60 if unit == "fednoro-supernode" else 10)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["FLWR_HOME"].startswith("/var/lib/fednoro")


@every_unit
def test_units_are_locked_down_and_write_to_their_own_folder_alone(unit: str) -> None:
    service = _Unit(DEPLOY / f"{unit}.service")["Service"]
    assert service["User"] == "fednoro" and service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict" and service["StateDirectory"] == "fednoro"
    assert service["UMask"] == "0077" and service["CapabilityBoundingSet"] == ""
    assert ("PrivateDevices" in service) == (unit == "fednoro-superlink")  # a site may have a GPU


@every_unit
def test_examples_set_every_variable_and_no_other(unit: str) -> None:
    text = (DEPLOY / f"{unit}.service").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{(\w+)\}", text)) == set(settings(unit))


# The guide


def commands() -> Iterator[list[str]]:
    """Every command in the guide, as words: those of its shell blocks, and those in
    its sentences that are whole.
    """
    prose = re.sub(r"```.*?```", "", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from (
        shlex.split(text) for text in re.findall(r"`((?:fednoro|flwr) [a-z][^`…]*)`", prose)
    )
    for block in re.findall(r"```sh\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        joined = re.sub(r"\\\n\s*", " ", block)
        for line in joined.splitlines():
            words = shlex.split(line, comments=True)
            while words and (words[0] in ("sudo", "exec") or re.fullmatch(r"\w+=.*", words[0])):
                words = words[3:] if words[:2] == ["sudo", "-u"] else words[1:]
            if words:
                yield [word for word in words if word != "&"]


OURS = [words for words in commands() if Path(words[0]).name in {*PARSERS, *COMMANDS}]


@cache
def click_command(program: str) -> click.Command:
    if program == "fednoro":
        return typer.main.get_command(fednoro_app)
    with warnings.catch_warnings():  # of Flower's own making
        warnings.simplefilter("ignore", DeprecationWarning)
        from flwr.cli.app import app

        return typer.main.get_command(app)


def test_the_guide_has_the_commands_that_it_is_about() -> None:
    found = {tuple(word for word in words[:3] if not word.startswith("-")) for words in OURS}
    for wanted in [
        ("fednoro", "flower", "certs"),
        ("fednoro", "flower", "init"),
        ("fednoro", "flower", "run"),
        ("fednoro", "flower", "site"),
        ("flwr", "supernode", "register"),
    ]:
        assert wanted in found
    assert {Path(words[0]).name for words in OURS} == {*PARSERS, *COMMANDS}


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_command_in_the_guide_is_understood_by_its_program(words: list[str]) -> None:
    program, rest = Path(words[0]).name, words[1:]
    if program in PARSERS:
        PARSERS[program]().parse_args(rest)
        return
    command: click.Command = click_command(program)
    context = click.Context(command, info_name=program)
    while isinstance(command, click.Group):
        assert rest and rest[0] in command.commands, (
            f"{context.command_path} has no command {rest[:1]}"
        )
        command, rest = command.commands[rest[0]], rest[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    command.make_parser(context).parse_args(list(rest))  # an unknown option or a lost value raises
    needed = [p for p in command.params if isinstance(p, click.Argument) and p.required]
    given, _, _ = command.make_parser(context).parse_args(list(rest))
    assert all(given.get(str(p.name)) is not None for p in needed), (
        f"{context.command_path} lacks {needed}"
    )


def test_flower_commands_are_mounted() -> None:
    mounted = typer.main.get_command(flower_app)
    assert isinstance(mounted, click.Group) and {"certs", "init", "site", "run", "simulate"} <= set(
        mounted.commands
    )


def test_files_that_the_guide_names_are_there() -> None:
    named = set(re.findall(r"\(\.\./(deploy/[\w.-]+)\)", GUIDE.read_text(encoding="utf-8")))
    assert named == {f"deploy/{path.name}" for path in DEPLOY.iterdir()}


def test_what_the_guide_says_of_privacy_is_what_the_code_does() -> None:
    from fednoro.detection.score_privacy import loss_bound

    text = GUIDE.read_text(encoding="utf-8")
    assert "B = ln C" in text and loss_bound(8) == pytest.approx(2.0794415)
