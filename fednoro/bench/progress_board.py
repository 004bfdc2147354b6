"""How a bench gets on:
runs done, what is running with its round, and when all of it will be done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fednoro.bench.jobs import Job

PLAIN_EVERY = 30.0  # seconds between lines about what is running, where there is no terminal


class Board:
    """A live display in a terminal;
    elsewhere a line for each job that ends, and one now and then between.
    """

    def __init__(
        self, console: Console, jobs: Sequence[Job], done: int, quiet: bool = False
    ) -> None:
        self.console, self.quiet = console, quiet
        self.total, self.done = len(jobs) + done, done
        self._weights = {job.name: float(max(job.rounds, 1)) for job in jobs}
        self._rounds_done = dict.fromkeys(self._weights, 0.0)
        self._first_rounds: dict[str, int] = {}  # the round a job went on from
        self._status: dict[str, str] = {}
        self._results: dict[str, str] = {}
        self._last_line_time = time.monotonic()
        self._start_time: float | None = None  # when the first round began
        self._shown_warnings: set[str] = set()
        self._tasks: dict[str, TaskID] = {}
        self._bar: Progress | None = None
        if console.is_terminal and not quiet and jobs:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()
            self._total_task = self._bar.add_task(
                "[bold]all[/]", total=sum(self._weights.values()), figures=""
            )
            self._show()

    @property
    def eta(self) -> float | None:
        """Seconds left, if every round takes as long as those so far on average;
        None before the first.
        """
        rounds_played = sum(self._rounds_done[name] for name in self._first_rounds)
        if self._start_time is None or not rounds_played:
            return None
        rounds_left = sum(self._weights.values()) - sum(self._rounds_done.values())
        return (time.monotonic() - self._start_time) / rounds_played * rounds_left

    def on_start(self, job: Job) -> None:
        self._status[job.name] = "starting"
        if self._bar is not None:
            self._tasks[job.name] = self._bar.add_task(
                f"  {escape(job.name)}", total=None, figures="starting"
            )

    def on_message(self, job: Job, message: str, details: Any) -> None:
        if message == "warned":
            # The same trouble in many runs is said once; each run's rounds.jsonl has its own.
            if details not in self._shown_warnings and not self.quiet:
                self._shown_warnings.add(details)
                self._say(f"[yellow]warning:[/] {escape(job.name)}: {escape(details)}")
            return
        if message == "result":
            best, last = details
            self._results[job.name] = f"Best {best:.2%}, Last {last:.2%}"
        elif message == "progress":
            text, done, total = details
            self._update(job, text, done, total, f"{text} {f'{done}/{total}' if total else done}")
        else:
            done, total, bacc = details
            self._start_time = self._start_time or time.monotonic()
            first = self._first_rounds.setdefault(job.name, done)
            self._weights[job.name], self._rounds_done[job.name] = (
                float(total - first),
                float(done - first),
            )
            figures = f"round {done}/{total}" + ("" if bacc is None else f"  BACC {bacc:6.2%}")
            self._update(job, "round", done, total, figures)

    def on_end(self, job: Job, reason: str | None) -> None:
        self.done += 1
        self._status.pop(job.name, None)
        self._rounds_done[job.name] = self._weights[job.name]
        if self._bar is not None and job.name in self._tasks:
            self._bar.remove_task(self._tasks.pop(job.name))
        if not self.quiet or reason is not None:
            outcome = (
                f"[red]failed:[/] {escape(reason)}"
                if reason
                else self._results.pop(job.name, "done")
            )
            self._say(
                f"{self.done:>{len(str(self.total))}}/{self.total}  "
                f"{escape(job.name)}  {outcome}{self._eta_text()}"
            )
        self._show()

    def close(self) -> None:
        """Takes the live display off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _eta_text(self) -> str:
        if self._bar is not None or self.eta is None or self.done == self.total:
            return ""
        return f"  ETA {_span(self.eta)}"

    def _update(self, job: Job, activity: str, done: int, total: int, figures: str) -> None:
        self._status[job.name] = figures
        if self._bar is not None and job.name in self._tasks:
            self._bar.update(
                self._tasks[job.name], completed=done, total=total or None, figures=figures
            )
            self._show()
        elif not self.quiet and time.monotonic() - self._last_line_time > PLAIN_EVERY:
            running = "; ".join(f"{name}: {status}" for name, status in self._status.items())
            self._say(escape(f"running {running}") + self._eta_text())

    def _show(self) -> None:
        if self._bar is not None:
            figures = f"{self.done}/{self.total} jobs" + (
                "" if self.eta is None else f"  ETA {_span(self.eta)}"
            )
            rounds_done, rounds_total = sum(self._rounds_done.values()), sum(self._weights.values())
            self._bar.update(
                self._total_task, completed=rounds_done, total=rounds_total, figures=figures
            )

    def _say(self, text: str) -> None:
        self._last_line_time = time.monotonic()
        self.console.print(text, highlight=False, soft_wrap=True)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
