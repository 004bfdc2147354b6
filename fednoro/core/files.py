"""Files that are written completely or not at all, and disk errors in one clear line."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fednoro.core.types import UserError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full, read-only or otherwise failing disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"no space left while writing {path}: free some, then run or resume again"
            ) from error
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes that place after the block,
    or goes where the block fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            yield temporary
            to_disk(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file completely or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def to_disk(path: Path) -> None:
    """Waits until what was written to a file would survive a power cut."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, completely or not at all."""
    write_whole(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def take_lock(file: IO[Any]) -> bool:
    """Takes the file's lock, which goes with the process however that ends;
    False if another holds it.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True
