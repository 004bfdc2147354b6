"""A run on Flower as a person sees it:
started, followed by what the run folder says, ended with its true outcome.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fednoro.audit.audit_files import site_table
from fednoro.audit.estimates import Estimate, SiteFinding
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import Config, as_tree, resolve, with_absolute_paths
from fednoro.experiment.drive import load
from fednoro.experiment.simulation import free_folder
from fednoro.experiment.watch.terminal import Terminal
from fednoro.flower.ops.flwr_process import COMPLETED, DEFAULTS, Link, Status, UnreachableError
from fednoro.report.web.audit_shell import plain

Values = dict[str, str | int | float]
# Seconds between questions to Flower, each of which starts a process: at first, and later.
ASK_EVERY = (3.0, 15.0)


GIVE_UP_AFTER = 300.0  # seconds without a SuperLink; a service that restarts it takes less


class RunFailedError(Exception):
    """Flower says that the run did not complete."""


class RunLostError(Exception):
    """The SuperLink is away, so nobody can say what becomes of the run."""


def read_items(
    items: Sequence[str], options: Mapping[str, int | float | None]
) -> tuple[Config | None, Path | None, Values]:
    """A configuration, an app folder and the run-config,
    from a preset, a file or an app folder with overrides.

    An app that is not fednoro's own has no configuration of ours.
    """
    sources, overrides = [i for i in items if "=" not in i], [i for i in items if "=" in i]
    if len(sources) > 1:
        raise UserError(f"one preset, file or app folder at a time, got {' and '.join(sources)}")
    values: Values = {key: value for key, value in options.items() if value is not None}
    source: Any = (sources or ["digits"])[0]
    app = Path(source).expanduser()
    if not app.is_dir():
        return resolve(source, overrides), None, values
    table = _app_table(app)
    if not str(table["components"].get("serverapp", "")).startswith("fednoro."):
        if overrides:
            raise UserError(
                f"{app} is an app of its own: it takes no {overrides[0]}; use flwr run --run-config"
            )
        return None, app, values
    app_values = {key: value for key, value in table.get("config", {}).items() if key in DEFAULTS}
    text, source = app_values.pop("fednoro", ""), app_values.pop("fednoro-config", "")
    app_values.pop("resume", None)
    if not text and not source:
        raise UserError(
            f"{app / 'pyproject.toml'} names no configuration: set fednoro or fednoro-config"
        )
    return resolve(json.loads(text) if text else source, overrides), app, {**app_values, **values}


def _app_table(app: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"][
            "app"
        ]
        return {"components": {}, **table}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError) as error:
        raise UserError(
            f"{app} is not the folder of a Flower app: pyproject.toml: {error}"
        ) from error


def with_run_folder(config: Config) -> tuple[Config, Path]:
    """The configuration with a run folder of its own, by absolute paths:
    others will read it elsewhere.
    """
    config = with_absolute_paths(config)
    folder = free_folder(config).expanduser().absolute()
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another name=, or resume it")
    return dataclasses.replace(config, out=str(folder.parent), name=folder.name), folder


def as_json(config: Config) -> str:
    """The configuration as run-config carries it."""
    return json.dumps(as_tree(config))


class Follower:
    """Shows what a run folder's rounds.jsonl says, as it grows."""

    def __init__(self, console: Console, folder: Path, rounds: int, quiet: bool) -> None:
        self.console, self.folder, self.rounds, self.quiet = console, folder, rounds, quiet
        self._offset, self._best = 0, 0.0
        self._seconds: list[float] = []
        self._refusals: dict[str, str] = {}
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("waiting for sites", total=rounds, figures="")
            self._bar.start()

    def look(self) -> None:
        """Shows what is new."""
        self._show_refusals()
        log = self.folder / "rounds.jsonl"
        try:
            with log.open("rb") as file:
                file.seek(self._offset)
                new_bytes = file.read()
        except OSError:
            return
        *complete_lines, _ = new_bytes.split(b"\n")
        self._offset += sum(len(line) + 1 for line in complete_lines)
        for line in complete_lines:
            self._show(json.loads(line))

    def _show_refusals(self) -> None:
        try:
            text = (self.folder / "sites.json").read_text(encoding="utf-8")
            refusals = json.loads(text)["refused"]
        except (OSError, ValueError):
            return
        for site, reason in refusals.items():
            if self._refusals.get(site) != reason:
                self._warn(f"site {site} is refused: {reason}")
        self._refusals = refusals

    def _warn(self, message: str) -> None:
        self.console.print(
            f"[yellow]warning:[/] {escape(message)}", highlight=False, soft_wrap=True
        )

    def _show(self, record: Mapping[str, Any]) -> None:
        for message in record.get("warnings", ()):
            self._warn(message)
        if "bacc" not in record or self.quiet:
            return
        self._best = max(self._best, record["bacc"])
        self._seconds.append(record["seconds"])
        figures = f"BACC {record['bacc']:6.2%}  best {self._best:6.2%}"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=record["round"], description=record["stage"], figures=figures
            )
            return
        remaining_seconds = statistics.mean(self._seconds[-10:]) * (self.rounds - record["round"])
        line = (
            f"round {record['round']:>3}/{self.rounds}  "
            f"{record['stage']:<22}  {figures}  ETA {remaining_seconds:.0f} s"
        )
        self.console.print(line, highlight=False, soft_wrap=True)

    @property
    def done(self) -> bool:
        return (self.folder / "result.json").exists()

    @property
    def resume_command(self) -> str:
        """The command that goes on."""
        return f"fednoro resume {self.folder}"

    def tell(self) -> None:
        """Shows what came of it."""
        Terminal(self.console, self.quiet).finished(load(self.folder))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class AuditFollower(Follower):
    """Shows what clients.csv says of an audit's exchanges; `folder` is where they are kept."""

    def __init__(self, console: Console, folder: Path, rounds: int, quiet: bool) -> None:
        super().__init__(console, folder, rounds, quiet)
        self._last = ("", "")

    def look(self) -> None:
        super().look()
        try:
            *complete_lines, _ = (
                (self.folder / "clients.csv").read_text(encoding="utf-8").split("\n")
            )
        except OSError:
            return
        last = tuple(complete_lines[-1].split(",")[:2]) if len(complete_lines) > 1 else ("", "")
        if len(last) < 2 or last == self._last or self.quiet:
            return
        number, task = self._last = (last[0], last[1])
        if self._bar is not None:
            self._bar.update(self._task, completed=int(number), description=task)
        else:
            self.console.print(
                f"round {number:>3}/{self.rounds}  {task}", highlight=False, soft_wrap=True
            )

    @property
    def resume_command(self) -> str:
        return f"fednoro flower audit {self.folder.parents[1]}, with the same options"

    def tell(self) -> None:
        if self.quiet:
            return
        page = self.folder.parent
        audit = json.loads((page / "audit.json").read_text(encoding="utf-8"))
        key = json.loads((self.folder / "flower.json").read_text(encoding="utf-8"))["run"]
        sites = [
            SiteFinding(**{**row, "estimate": row["estimate"] and Estimate(**row["estimate"])})
            for row in audit["sites"]
        ]
        cautions = (audit[name] for name in ("otherwise", "unjudged", "doubt"))
        lines = [f"{audit['headline']}. {audit['lead']}", audit["how"], *filter(None, cautions)]
        if audit["without_answer"]:
            lines.append(f"without an answer: {', '.join(map(plain, audit['without_answer']))}")
        lines += [
            f"page: {page / 'index.html'}",
            f"letters: at each site, in audits/{key} of its memory folder",
        ]
        self.console.print(Group(site_table(sites), *map(Text, lines)), soft_wrap=True)


def follow(link: Link, run: int, follower: Follower | None) -> Status:
    """Waits for the end of a run;
    raises where it did not complete, or its SuperLink stays away. Ctrl-C stops it.
    """
    start = last_query = last_answer = time.monotonic()
    status = Status("")
    try:
        while not status.over:
            time.sleep(0.25)
            if follower is not None:
                follower.look()
            done = follower is not None and follower.done
            patience = 1.0 if done else min(ASK_EVERY[0] + (last_query - start) / 10, ASK_EVERY[1])
            if time.monotonic() - last_query > patience:
                try:
                    status = link.status(run)
                    last_answer = time.monotonic()
                except UnreachableError as error:
                    _check_patience(run, time.monotonic() - last_answer, error)
                last_query = time.monotonic()
    except KeyboardInterrupt:
        link.stop(run)
        raise
    finally:
        if follower is not None:
            follower.look()
            follower.close()
    if status.text != COMPLETED:
        raise RunFailedError(f"run {run} ended as {status.text}: {status.details}")
    if follower is not None and follower.done:
        follower.tell()
    return status


def _check_patience(run: int, elapsed: float, error: UnreachableError) -> None:
    if elapsed >= GIVE_UP_AFTER:
        raise RunLostError(
            f"the SuperLink could not be asked about run {run} for {elapsed:.0f} s: "
            f"{error} If it went down, the run has failed: start it again, then carry the run on"
        ) from error
