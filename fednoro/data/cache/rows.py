"""Images decoded in parallel and appended in order to one array,
so that a preparation can be killed and gone on with.

    images.npy   the array: a header, then one row of bytes per image that could be read
    journal      the fingerprint, then a line per record: its row's CRC-32, or why it has none

A row is written before its line, so the journal tells how far the work has come. What follows the
last complete line is cut off and done again, and so is all from the first row that does not match
its line. The array comes out the same.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import IO, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fednoro.core.types import UserError
from fednoro.data.cache.archive import Member

IMAGES, JOURNAL = "images.npy", "journal"
# Threads take turns for the part of decoding that is Python, a quarter of it for a DICOM
# slice: up to four cores they are no slower than processes, which take as long to start as
# some hundred images to decode.
_MIN_FOR_PROCESSES = 500
_MAX_CORES_FOR_THREADS = 4
_MAX_AHEAD = 256 * 2**20  # bytes of decoded images that may wait for an earlier one

Progress = Callable[[str, int, int], None]
Decode = Callable[[bytes], NDArray[np.uint8]]
Workers = Literal["threads", "processes", "one"]  # one: a thread that reads in order
Item = TypeVar("Item")
Result = TypeVar("Result")


def write_rows(
    folder: Path,
    fingerprint: str,
    members: list[Member | str],  # or why there is none
    shape: tuple[int, ...],
    decode: Decode,
    workers: Workers,
    progress: Progress | None,
) -> dict[int, str]:
    """Decodes what `folder` does not hold yet;
    the positions that could not be read, with the reason.
    """
    total, row_size = len(members), math.prod(shape)
    for name in (IMAGES, JOURNAL):
        (folder / name).touch()
    # Plain writes, not a memory map: on a full disk they raise where a map would kill the process.
    with (folder / IMAGES).open("r+b") as images, (folder / JOURNAL).open("r+b") as journal:
        entries = _recover(images, journal, fingerprint, len(_header(0, shape)), row_size)[:total]
        if not entries:
            _restart_file(images, _header(total, shape))
            _restart_file(journal, json.dumps(fingerprint).encode() + b"\n")
        attempt = partial(_attempt, decode, shape)
        for outcome in _decode(attempt, members[len(entries) :], workers, _MAX_AHEAD // row_size):
            if isinstance(outcome, bytes):
                images.write(outcome)
                images.flush()
            entry = zlib.crc32(outcome) if isinstance(outcome, bytes) else outcome
            journal.write(json.dumps(entry).encode() + b"\n")
            journal.flush()
            entries.append(entry)
            if progress:
                progress("preparing images", len(entries), total)
        unreadable = {i: entry for i, entry in enumerate(entries) if isinstance(entry, str)}
        images.seek(0)
        images.write(_header(total - len(unreadable), shape))
        to_disk(images)
    return unreadable


def bytes_on_disk(folder: Path) -> int:
    """How much of the array an earlier preparation has left."""
    try:
        return (folder / IMAGES).stat().st_size
    except OSError:
        return 0


def to_disk(file: IO[bytes]) -> None:
    """Not only out of this process but out of the machine's memory."""
    file.flush()
    os.fsync(file.fileno())


def _header(count: int, shape: tuple[int, ...]) -> bytes:
    # The format leaves room for the first axis to change,
    # so that the header has the same length whatever `count`.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (count, *shape)}
    )
    return header.getvalue()


def _restart_file(file: IO[bytes], content: bytes) -> None:
    file.seek(0)
    file.truncate()
    file.write(content)
    file.flush()


def _recover(
    images: IO[bytes], journal: IO[bytes], fingerprint: str, header_size: int, row_size: int
) -> list[int | str]:
    """The journal's entries that hold; both files are cut and placed to go on behind them."""
    first, *lines = journal.read().split(b"\n")[:-1] or [b""]
    if first != json.dumps(fingerprint).encode():
        return []
    entries: list[int | str] = []
    row_count, journal_size = 0, len(first) + 1
    images.seek(header_size)
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if isinstance(entry, int):
            content = images.read(row_size)
            if len(content) != row_size or zlib.crc32(content) != entry:
                break
            row_count += 1
        entries.append(entry)
        journal_size += len(line) + 1
    for file, end in ((images, header_size + row_count * row_size), (journal, journal_size)):
        file.seek(end)
        file.truncate()
    return entries


def _attempt(decode: Decode, shape: tuple[int, ...], member: Member | str) -> bytes | str:
    """The image's bytes, or why there are none."""
    if isinstance(member, str):
        return member
    try:
        image = decode(member.read())
    except MemoryError:
        raise
    except Exception as error:  # damaged files make decoders raise anything
        return " ".join(str(error).split()) or type(error).__name__
    if image.shape != shape or image.dtype != np.uint8:
        raise TypeError(f"decoded to {image.dtype} {image.shape}, not to uint8 {shape}")
    return image.tobytes()


def _decode(
    attempt: Callable[[Item], Result], items: list[Item], workers: Workers, ahead: int
) -> Iterator[Result]:
    count = 1 if workers == "one" else min(_cores(), 16)
    processes = (
        workers == "processes"
        and len(items) > _MIN_FOR_PROCESSES
        and count > _MAX_CORES_FOR_THREADS
    )
    with warnings.catch_warnings(), _pool(count, processes) as pool:
        warnings.simplefilter("ignore")  # odd metadata of readable images
        yield from _map_in_order(pool, attempt, items, min(4 * count, ahead))


def _map_in_order(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`pool.map` with at most `ahead` results waiting, so that memory stays bounded."""
    window: deque[Future[Result]] = deque()
    for item in items:
        with _block_interrupts():
            window.append(pool.submit(function, item))
        if len(window) > ahead:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()


@contextmanager
def _pool(workers: int, processes: bool) -> Iterator[Executor]:
    """Threads where decoding releases the interpreter's lock,
    processes where it is Python itself.
    """
    pool: Executor
    if processes:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_become_worker)
    else:
        pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a process that decodes images died: where a script calls fednoro, put "
            "the call under `if __name__ == '__main__':`; or is memory short? The "
            "next preparation goes on from here"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Processes begun here never hear of Ctrl-C, which reaches all at once:
    the parent alone answers it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _become_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where there is no mask to inherit
    warnings.simplefilter("ignore")
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
