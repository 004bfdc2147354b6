"""Jobs in one process and in several: order, failures, a worker that
dies, and what people see of it.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fednoro.bench.jobs import Job
from fednoro.bench.progress_board import Board, _span
from fednoro.bench.workers import perform_all
from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher

CONFIG = resolve("digits")


@dataclass(frozen=True)
class Writes(Job):
    """Writes which files were there when it was performed."""

    def perform(self, watcher: Watcher) -> None:
        watcher.progress("writing", 1, 2)
        watcher.warned("the same trouble")
        self.path.write_text(
            f"{os.getpid()} " + " ".join(sorted(path.name for path in self.path.parent.iterdir()))
        )


@dataclass(frozen=True)
class Fails(Job):
    def perform(self, watcher: Watcher) -> None:
        raise (
            UserError("a mistake\nin two lines")
            if "user" in self.name
            else ZeroDivisionError("a defect")
        )


@dataclass(frozen=True)
class Dies(Job):
    def perform(self, watcher: Watcher) -> None:
        os._exit(7)


@dataclass
class Heard:
    """Keeps what it is told."""

    events: list[tuple[str, str, Any]] = field(default_factory=list)

    def on_start(self, job: Job) -> None:
        self.events.append(("begun", job.name, None))

    def on_message(self, job: Job, message: str, details: Any) -> None:
        self.events.append((message, job.name, details))

    def on_end(self, job: Job, reason: str | None) -> None:
        self.events.append(("ended", job.name, reason))


def some_jobs(out: Path, last: type[Job]) -> list[Job]:
    first, wrong, broken = (
        Writes("a", CONFIG, out / "a"),
        Fails("user", CONFIG, out / "u"),
        Fails("bug", CONFIG, out / "b"),
    )
    after = Writes("c", CONFIG, out / "c", (first,))
    never = Writes("d", CONFIG, out / "d", (wrong,))
    return [
        first,
        wrong,
        broken,
        after,
        never,
        Writes("e", CONFIG, out / "e", (never,)),
        last("z", CONFIG, out / "z"),
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_does_not_stop_the_rest(tmp_path: Path, workers: int) -> None:
    jobs, heard = some_jobs(tmp_path, Dies if workers > 1 else Writes), Heard()
    failed = perform_all(jobs, workers, heard, tmp_path / "errors")
    assert failed["user"] == "a mistake in two lines"
    assert failed["bug"].startswith("ZeroDivisionError: a defect (see ")
    assert "a defect" in (tmp_path / "errors" / "bug.txt").read_text()
    assert failed["d"] == "needs user, which failed" and failed["e"] == "needs d, which failed"
    assert (tmp_path / "a").exists() and not (tmp_path / "d").exists()
    process, *there = (tmp_path / "c").read_text().split()
    assert "a" in there, "a job comes after what it needs"
    assert (int(process) == os.getpid()) == (workers == 1)
    assert ("progress", "a", ("writing", 1, 2)) in heard.events and (
        "warned",
        "a",
        "the same trouble",
    ) in heard.events
    ended = {name: reason for what, name, reason in heard.events if what == "ended"}
    assert ended == {job.name: failed.get(job.name) for job in jobs}
    if workers > 1:
        assert failed["z"].startswith("its process died with exit code 7")


def board(jobs: list[Job], **options: Any) -> tuple[Board, io.StringIO]:
    text = io.StringIO()
    return Board(Console(file=text, width=200, **options), jobs, 3), text


def test_without_a_terminal_every_job_that_ends_is_a_line_and_a_warning_is_said_once(
    tmp_path: Path,
) -> None:
    jobs: list[Job] = [Writes(name, CONFIG, tmp_path / name) for name in "abc"]
    shown, text = board(jobs)
    for job in jobs:
        shown.on_start(job)
        shown.on_message(job, "round", (0, 4, None))
        shown.on_message(job, "warned", "trouble [x]")
        shown.on_message(job, "round", (2, 4, 0.5))
        shown.on_message(job, "result", (0.91234, 0.9))
        shown.on_end(job, "it [broke]" if job.name == "b" else None)
    shown.close()
    lines = text.getvalue().splitlines()
    assert lines[0] == "warning: a: trouble [x]" and sum("trouble" in line for line in lines) == 1
    assert lines[1].startswith("4/6  a  Best 91.23%, Last 90.00%  ETA ")
    assert (
        lines[2].startswith("5/6  b  failed: it [broke]")
        and lines[3] == "6/6  c  Best 91.23%, Last 90.00%"
    )


def test_the_time_left_counts_the_rounds_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    jobs: list[Job] = [Writes(name, CONFIG, tmp_path / name) for name in "ab"]
    shown, _ = board(jobs)
    assert shown.eta is None
    shown.on_start(jobs[0])
    clock[0] += 50  # preparations do not say how long a round is
    # it goes on after round 4: six are left, and one for the other job
    shown.on_message(jobs[0], "round", (4, 10, None))
    assert shown.eta is None
    clock[0] += 6
    shown.on_message(jobs[0], "round", (7, 10, 0.4))
    assert shown.eta == pytest.approx(6 / 3 * (3 + 1))
    assert [_span(value) for value in (9.4, 61, 3600 * 2 + 300)] == [
        "9 s",
        "1 min 01 s",
        "2 h 05 min",
    ]


def test_in_a_terminal_the_rounds_of_running_jobs_are_shown_with_the_time_left(
    tmp_path: Path,
) -> None:
    jobs: list[Job] = [Writes(name, CONFIG, tmp_path / name) for name in ("runs/a", "runs/b")]
    shown, text = board(jobs, force_terminal=True)
    for job in jobs:
        shown.on_start(job)
        shown.on_message(job, "round", (0, 4, None))
        shown.on_message(job, "round", (3, 4, 0.5))
    shown._bar.refresh()  # type: ignore[union-attr]
    shown.on_end(jobs[0], None)
    shown.close()
    assert "runs/b" in text.getvalue() and "round 3/4  BACC 50.00%" in text.getvalue()
    assert "3/5 jobs  ETA " in text.getvalue() and "4/5" in text.getvalue()
