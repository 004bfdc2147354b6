"""`flwr run` with true exit codes:
an app folder, a connection, the run's status, and no process left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednoro.core.types import UserError

COMPLETED = "finished:completed"
ANSWER_TIMEOUT = 120.0  # seconds in which Flower's command has to answer a question
DEFAULTS: dict[str, str | int | float] = {
    "fednoro": "",
    "fednoro-config": "",
    "resume": "",
    "min-sites": 2,
    "start-sites": 0,
    "round-timeout": 3600.0,
    "wait-timeout": 0.0,
    "simulation": 0,
}
# Nothing is downloaded, reported or checked for anywhere else:
# a site may have no way out but the one to the SuperLink.
QUIET_VARIABLES = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def app_toml(
    values: Mapping[str, str | int | float] | None = None, name: str = "fednoro-app"
) -> str:
    """The pyproject.toml that is a whole Flower app: its parts are in the installed fednoro."""
    config = {**DEFAULTS, **(values or {})}
    lines = [
        "[build-system]",
        'requires = ["setuptools"]',
        'build-backend = "setuptools.build_meta"',
        "",
        "[project]",
        f"name = {json.dumps(name)}",
        'version = "1.0.0"',
        'description = "FedNoRo on Flower"',
        'license = "Apache-2.0"',
        "dependencies = []",
        "",
        "[tool.flwr.app]",
        'publisher = "fednoro"',
        "",
        "[tool.flwr.app.components]",
        'serverapp = "fednoro.flower.server_app:app"',
        'clientapp = "fednoro.flower.client_app:app"',
        "",
        "[tool.flwr.app.config]",
        *(f"{key} = {toml_value(value)}" for key, value in config.items()),
    ]
    return "\n".join(lines) + "\n"


def toml_value(value: str | int | float | bool) -> str:
    """JSON's way to write strings and numbers is TOML's as well,
    but for what is outside of Unicode's first plane.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def environment(home: Path | None = None) -> dict[str, str]:
    """For Flower's processes: quiet, with this Python's commands first and,
    if given, a home of their own.
    """
    scripts = str(Path(sys.executable).parent)
    variables = {
        **os.environ,
        **QUIET_VARIABLES,
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return variables if home is None else {**variables, "FLWR_HOME": str(home)}


def command(name: str) -> str:
    """The path of one of Flower's commands."""
    sibling = Path(sys.executable).with_name(name)
    path = str(sibling) if sibling.exists() else shutil.which(name)
    if path is None:
        raise UserError(f"{name} is not installed: pip install 'fednoro[flower]'")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class UnreachableError(Exception):
    """The SuperLink did not say how a run is; it may well go on."""


@dataclass(frozen=True)
class Status:
    """What Flower says of a run; `text` is empty where it has no status yet."""

    text: str
    details: str = ""
    traffic: tuple[int, int] = (0, 0)  # bytes from the nodes and to them

    @property
    def over(self) -> bool:
        return self.text.startswith("finished")


@dataclass(frozen=True)
class Link:
    """A SuperLink to talk to:
    a connection's name in config.toml, and the environment that has it.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=environment)

    def run(
        self, app: Path, values: Mapping[str, str | int | float] | None = None, federation: str = ""
    ) -> int:
        """Starts a run of an app folder; the run's id."""
        arguments = ["run", str(app), self.name, "--format", "json"]
        with tempfile.TemporaryDirectory() as place:
            if values:
                file = Path(place) / "run.toml"
                lines = (f"{key} = {toml_value(value)}\n" for key, value in values.items())
                file.write_text("".join(lines), encoding="utf-8")
                arguments += ["--run-config", str(file)]
            if federation:
                arguments += ["--federation-config", federation]
            answer = self._ask(arguments)
        if not answer.get("success") or not answer.get("run-id"):
            raise UserError(f"Flower did not start the run: {answer.get('error-message', answer)}")
        return int(answer["run-id"])

    def status(self, run: int) -> Status:
        """How the run is; raises `UnreachableError` where the SuperLink does not say."""
        try:
            answer = self._ask(
                ["ls", self.name, "--run-id", str(run), "--format", "json"], ANSWER_TIMEOUT
            )
        except (UserError, subprocess.TimeoutExpired) as error:
            raise UnreachableError(str(error)) from error
        if not answer.get("success"):
            lines = str(answer.get("error-message", "no reason given")).strip().splitlines() or [""]
            raise UnreachableError(lines[-1].strip())
        (row,) = answer.get("runs", [{}])[:1] or [{}]
        traffic = row.get("network-traffic", {})
        byte_counts = (int(traffic.get("inbound-bytes", 0)), int(traffic.get("outbound-bytes", 0)))
        return Status(
            str(row.get("status", "")),
            str(row.get("details", row.get("status-details", ""))),
            byte_counts,
        )

    def stop(self, run: int) -> None:
        self._ask(["stop", str(run), self.name, "--format", "json"], ANSWER_TIMEOUT)

    def _ask(self, arguments: Sequence[str], timeout: float | None = None) -> dict[str, Any]:
        command_line = [command("flwr"), *arguments]
        process = subprocess.run(
            command_line,
            env=dict(self.env),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        try:
            answer: dict[str, Any] = json.loads(process.stdout[process.stdout.index("{") :])
        except ValueError:
            lines = [
                line
                for line in (process.stderr + process.stdout).splitlines()
                if line.strip(" │╭╮╰╯─")
            ]
            raise UserError(
                f"flwr {arguments[0]} failed: {' '.join(' '.join(lines[-4:]).split())}"
            ) from None
        return answer


@contextmanager
def simulation_link(home: Path) -> Iterator[Link]:
    """A SuperLink of our own for simulations,
    which ends with the block, and every process that it started.
    """
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    text = (
        '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = '
        f'"127.0.0.1:{port}"\ninsecure = true\n'
    )
    (home / "config.toml").write_text(text, encoding="utf-8")
    env = environment(home)
    arguments = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (
        (home / "superlink.log").open("wb") as log,
        owned_process(
            [command("flower-superlink"), *arguments, "--disable-runtime-dependency-installation"],
            env,
            log,
        ) as process,
    ):
        deadline = time.monotonic() + 60
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(
                    f"Flower's SuperLink did not start:\n{tail(home / 'superlink.log')}"
                )
            time.sleep(0.1)
        yield Link("here", env)


@contextmanager
def owned_process(
    arguments: Sequence[str], env: Mapping[str, str], log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block, nor do its children."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    # Ray's processes leave the group; what they inherit stays with them
    marked_env = {**env, "FEDNORO_OWNER": mark}
    with _orderly_sigterm():
        process = subprocess.Popen(
            arguments, env=marked_env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            _end(process, mark)


@contextmanager
def _orderly_sigterm() -> Iterator[None]:
    """Lets SIGTERM end this process the orderly way,
    so that nothing that it owns is left behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        _signal(process, mark, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (process.poll() is None or _marked_processes(mark)):
            time.sleep(0.05)


def _signal(process: subprocess.Popen[bytes], mark: str, number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
    for pid in _marked_processes(mark):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _marked_processes(mark: str) -> list[int]:
    """Processes that were started from an owned one;
    where there is no /proc, the group has to do.
    """
    variable, pids = f"FEDNORO_OWNER={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def healthy(port: int) -> bool:
    """Whether a SuperLink without TLS answers on this machine."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
