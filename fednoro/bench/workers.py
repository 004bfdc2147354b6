"""Jobs in order, in this process or in several:
what fails does not stop the rest, Ctrl-C stops all of it.
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

    def on_start(self, job: Job) -> None: ...
    def on_message(self, job: Job, message: str, details: Any) -> None: ...
    def on_end(self, job: Job, reason: str | None) -> None: ...


class Reporter(Watcher):
    """Passes on what a run says, in words that can be sent to another process;
    stops it when that is wanted.
    """

    def __init__(self, tell: Tell, should_stop: Callable[[], bool] = lambda: False) -> None:
        self.tell, self.should_stop = tell, should_stop

    def started(
        self, config: Config, folder: Path, federation: Federation, state: State, engine: str
    ) -> None:
        self.tell("round", (state.round, state.rounds, None))

    def progress(self, what: str, done: int, total: int) -> None:
        self.tell("progress", (what, done, total))
        self._check_stop()

    def warned(self, message: str) -> None:
        self.tell("warned", message)

    def turned(self, turn: Turn) -> None:
        if turn.evaluation is not None:
            self.tell("round", (turn.state.round, turn.state.rounds, turn.evaluation.bacc))
        self._check_stop()

    def finished(self, run: Run) -> None:
        self.tell("result", (run.best, run.last))

    def _check_stop(self) -> None:
        if self.should_stop():
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
    failures: dict[str, str] = {}
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            reason = _blocking_reason(job, failures)
            if reason is None:
                audience.on_start(job)
                reason = _perform(job, Reporter(partial(audience.on_message, job)), errors)
            _record_end(failures, job, reason, audience)
        return failures
    pool = _Pool(min(workers, len(jobs)), audience, errors)
    try:
        pool.perform(list(jobs), failures)
    except KeyboardInterrupt:
        pool.stop()
        raise
    finally:
        pool.close()
    return failures


def _perform(job: Job, watcher: Watcher, errors: Path) -> str | None:
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


def _blocking_reason(job: Job, failures: dict[str, str]) -> str | None:
    failed_need = next((need.name for need in job.needs if need.name in failures), None)
    return None if failed_need is None else f"needs {failed_need}, which failed"


def _record_end(failures: dict[str, str], job: Job, reason: str | None, audience: Audience) -> None:
    if reason is not None:
        failures[job.name] = reason
    audience.on_end(job, reason)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None


@dataclass
class _Pool:
    """Processes that live as long as there is work,
    so that imports and the GPU's context are paid once in each.
    """

    size: int
    audience: Audience
    errors: Path
    workers: list[_Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._stop = self._context.Event()

    def perform(self, open_jobs: list[Job], failures: dict[str, str]) -> None:
        while open_jobs or self._busy_workers():
            self._assign(open_jobs, failures)
            for worker in self._ready_workers():
                self._receive(worker, failures)

    def _assign(self, open_jobs: list[Job], failures: dict[str, str]) -> None:
        while blocked_job := next(
            (job for job in open_jobs if _blocking_reason(job, failures)), None
        ):
            # One blocked job may block the next.
            open_jobs.remove(blocked_job)
            _record_end(
                failures, blocked_job, _blocking_reason(blocked_job, failures), self.audience
            )
        pending_names = {job.name for job in open_jobs} | {
            w.job.name for w in self._busy_workers() if w.job is not None
        }
        for job in [
            job for job in open_jobs if not any(need.name in pending_names for need in job.needs)
        ]:
            worker = self._idle_worker()
            if worker is None:
                return
            open_jobs.remove(job)
            worker.job = job
            worker.pipe.send(job)
            self.audience.on_start(job)

    def _idle_worker(self) -> _Worker | None:
        idle_worker = next((worker for worker in self.workers if worker.job is None), None)
        if idle_worker is None and len(self.workers) < self.size:
            own_end, worker_end = self._context.Pipe()
            threads = max(1, torch.get_num_threads() // self.size)
            process = self._context.Process(
                target=_serve, args=(worker_end, self._stop, self.errors, threads), daemon=True
            )
            process.start()
            worker_end.close()
            idle_worker = _Worker(process, own_end)
            self.workers.append(idle_worker)
        return idle_worker

    def _busy_workers(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.job is not None]

    def _ready_workers(self) -> list[_Worker]:
        ready = wait([worker.pipe for worker in self._busy_workers()], timeout=1)
        return [worker for worker in self._busy_workers() if worker.pipe in ready]

    def _receive(self, worker: _Worker, failures: dict[str, str]) -> None:
        job = worker.job
        assert job is not None
        try:
            message, details = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            self.workers.remove(worker)
            code = worker.process.exitcode
            _record_end(
                failures,
                job,
                f"its process died with exit code {code} (-9: killed, perhaps for memory)",
                self.audience,
            )
            return
        if message == "ended":
            worker.job = None
            _record_end(failures, job, details, self.audience)
        elif message == "stopped":
            worker.job = None
        else:
            self.audience.on_message(job, message, details)

    def stop(self) -> None:
        """Lets every run save where it is; a second Ctrl-C does not wait for that."""
        self._stop.set()
        while self._busy_workers():
            for worker in self._ready_workers():
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
    signal.signal(signal.SIGINT, _interrupt)
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
            reason = _perform(job, Reporter(partial(_send, pipe), stop.is_set), errors)
            _working = False
            _send(pipe, "ended", reason)
        except KeyboardInterrupt:
            _working = False
            with suppress(OSError):
                pipe.send(("stopped", None))


def _send(pipe: Connection, message: str, details: Any) -> None:
    try:
        pipe.send((message, details))
    except OSError as error:  # the first process is gone: the run is saved as it is
        raise KeyboardInterrupt from error


def _interrupt(*_: Any) -> None:
    # The terminal sends Ctrl-C to all; an idle worker hears of it from the first process.
    global _working
    if _working:
        _working = False  # once: saving what was reached must not be interrupted
        raise KeyboardInterrupt
