"""Jobs in order, in this process or in several: what fails does not stop the
rest, Ctrl-C stops all of it.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from fednoro.bench.jobs import Job
from fednoro.core.files import write_whole
from fednoro.core.types import State, UserError
from fednoro.data.federation import Federation
from fednoro.engine.streams import release_memory
from fednoro.experiment.config.configuration import Config
from fednoro.experiment.drive import Run, Watcher
from fednoro.experiment.rounds import Turn

Tell = Callable[[str, Any], None]  # (what happened, details)


class Audience(Protocol):
    """Who is told how the jobs get on."""

    def begun(self, job: Job) -> None: ...
    def heard(self, job: Job, what: str, details: Any) -> None: ...
    def ended(self, job: Job, reason: str | None) -> None: ...


class Reporter(Watcher):
    """Passes on what a run says, in words that can be sent to another process;
    stops it when that is wanted.
    """

    def __init__(self, tell: Tell, unwanted: Callable[[], bool] = lambda: False) -> None:
        self.tell, self.unwanted = tell, unwanted

    def started(
        self, config: Config, folder: Path, federation: Federation, state: State, engine: str
    ) -> None:
        self.tell("round", (state.round, state.rounds, None))

    def progress(self, what: str, done: int, total: int) -> None:
        self.tell("progress", (what, done, total))
        self._go_on()

    def warned(self, message: str) -> None:
        self.tell("warned", message)

    def turned(self, turn: Turn) -> None:
        if turn.evaluation is not None:
            self.tell("round", (turn.state.round, turn.state.rounds, turn.evaluation.bacc))
        self._go_on()

    def finished(self, run: Run) -> None:
        self.tell("result", (run.best, run.last))

    def _go_on(self) -> None:
        if self.unwanted():
            raise KeyboardInterrupt


def perform_all(
    jobs: Sequence[Job], workers: int, audience: Audience, errors: Path
) -> dict[str, str]:
    """Performs `jobs`, each after those it needs; returns what went wrong, by the job's name.

    Args:
        jobs: in an order that respects what they need.
        workers: processes; with one, everything happens in this process.
        audience: is told about everything.
        errors: a folder for the tracebacks of defects.
    """
    failed: dict[str, str] = {}
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            reason = _hindrance(job, failed)
            if reason is None:
                audience.begun(job)
                reason = _performed(job, Reporter(partial(audience.heard, job)), errors)
            _note(failed, job, reason, audience)
        return failed
    pool = _Pool(min(workers, len(jobs)), audience, errors)
    try:
        pool.perform(list(jobs), failed)
    except KeyboardInterrupt:
        pool.stop()
        raise
    finally:
        pool.close()
    return failed


def _performed(job: Job, watcher: Watcher, errors: Path) -> str | None:
    """None, or why it failed."""
    try:
        job.perform(watcher)
    except UserError as error:
        return " ".join(str(error).splitlines())
    except Exception as error:
        path = errors / f"{job.name.replace('/', '-')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, traceback.format_exc().encode())
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]} (see {path})"
    finally:
        release_memory()
    return None


def _hindrance(job: Job, failed: dict[str, str]) -> str | None:
    missing = next((need.name for need in job.needs if need.name in failed), None)
    return None if missing is None else f"needs {missing}, which failed"


def _note(failed: dict[str, str], job: Job, reason: str | None, audience: Audience) -> None:
    if reason is not None:
        failed[job.name] = reason
    audience.ended(job, reason)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None


@dataclass
class _Pool:
    """Processes that live as long as there is work, so that imports and the GPU's
    context are paid once in each.
    """

    size: int
    audience: Audience
    errors: Path
    workers: list[_Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._stop = self._context.Event()

    def perform(self, left: list[Job], failed: dict[str, str]) -> None:
        while left or self._busy():
            self._assign(left, failed)
            for worker in self._heard():
                self._receive(worker, failed)

    def _assign(self, left: list[Job], failed: dict[str, str]) -> None:
        while hindered := next((job for job in left if _hindrance(job, failed)), None):
            # one may hinder the next
            left.remove(hindered)
            _note(failed, hindered, _hindrance(hindered, failed), self.audience)
        waited_for = {job.name for job in left} | {
            w.job.name for w in self._busy() if w.job is not None
        }
        for job in [job for job in left if not any(need.name in waited_for for need in job.needs)]:
            worker = self._idle()
            if worker is None:
                return
            left.remove(job)
            worker.job = job
            worker.pipe.send(job)
            self.audience.begun(job)

    def _idle(self) -> _Worker | None:
        free = next((worker for worker in self.workers if worker.job is None), None)
        if free is None and len(self.workers) < self.size:
            ours, theirs = self._context.Pipe()
            threads = max(1, torch.get_num_threads() // self.size)
            process = self._context.Process(
                target=_serve, args=(theirs, self._stop, self.errors, threads), daemon=True
            )
            process.start()
            theirs.close()
            free = _Worker(process, ours)
            self.workers.append(free)
        return free

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.job is not None]

    def _heard(self) -> list[_Worker]:
        ready = wait([worker.pipe for worker in self._busy()], timeout=1)
        return [worker for worker in self._busy() if worker.pipe in ready]

    def _receive(self, worker: _Worker, failed: dict[str, str]) -> None:
        job = worker.job
        assert job is not None
        try:
            what, details = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            self.workers.remove(worker)
            code = worker.process.exitcode
            _note(
                failed,
                job,
                f"its process died with exit code {code} (-9: killed, perhaps for memory)",
                self.audience,
            )
            return
        if what == "ended":
            worker.job = None
            _note(failed, job, details, self.audience)
        elif what == "stopped":
            worker.job = None
        else:
            self.audience.heard(job, what, details)

    def stop(self) -> None:
        """Lets every run save where it is; a second Ctrl-C does not wait for that."""
        self._stop.set()
        while self._busy():
            for worker in self._heard():
                self._receive(worker, {})

    def close(self) -> None:
        for worker in self.workers:
            if worker.job is not None:
                worker.process.terminate()
            worker.pipe.close()  # which ends an idle one
        for worker in self.workers:
            worker.process.join()


_working = False


def _serve(pipe: Connection, stop: Any, errors: Path, threads: int) -> None:
    """One worker: takes jobs until the other end is closed."""
    signal.signal(signal.SIGINT, _interrupted)
    warnings.simplefilter("ignore")  # a run's own are told to its watcher
    torch.set_num_threads(threads)
    global _working
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            _working = True
            reason = _performed(job, Reporter(partial(_told, pipe), stop.is_set), errors)
            _working = False
            _told(pipe, "ended", reason)
        except KeyboardInterrupt:
            _working = False
            with suppress(OSError):
                pipe.send(("stopped", None))


def _told(pipe: Connection, what: str, details: Any) -> None:
    try:
        pipe.send((what, details))
    except OSError as error:  # the first process is gone: the run is saved as it is
        raise KeyboardInterrupt from error


def _interrupted(*_: Any) -> None:
    # The terminal sends Ctrl-C to all; an idle worker hears of it from the first process.
    global _working
    if _working:
        _working = False  # once: saving what was reached must not be interrupted
        raise KeyboardInterrupt
