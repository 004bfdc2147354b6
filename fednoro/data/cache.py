"""Images decoded once: a folder with one memory-mapped array and a manifest that says what is in it.

    <home>/<name>-<fingerprint>/images.npy     uint8 [N, H, W, C]
                                manifest.json  classes, labels, ids, what was skipped and why, checksums

A cache is written next to its final place and renamed when it is complete and verified, so it is either
whole or absent. A lock that dies with its process keeps two preparations of the same images apart and
tells a dead one's remains, which are removed, from a living one's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fednoro.data.dataset import Dataset
from fednoro.files import take_lock
from fednoro.types import FedNoRoWarning, UserError

VERSION = 1
_IMAGES, _MANIFEST = "images.npy", "manifest.json"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ELSEWHERE = "choose another folder with data.cache or FEDNORO_CACHE"

Progress = Callable[[str, int, int], None]
Decode = Callable[[Path], NDArray[np.uint8]]
T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """One image that a source names; `path` is relative to the source's folder."""

    path: str
    label: str
    id: str
    site: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class Recipe:
    """All that decides what a cache holds; `settings` are those that change the pixels."""

    root: Path
    records: tuple[Record, ...]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # H, W, C
    settings: Mapping[str, str | int | bool]

    @property
    def bytes(self) -> int:
        return len(self.records) * math.prod(self.shape)


def load(recipe: Recipe, decode: Decode, home: str | None = None, progress: Progress | None = None) -> Dataset:
    """The recipe's images from their cache, which is prepared first where there is none yet."""
    where = Path(home or os.environ.get("FEDNORO_CACHE") or "~/.cache/fednoro").expanduser()
    stamps = [_stamp(recipe.root / record.path) for record in recipe.records]
    fingerprint = _fingerprint(recipe, stamps)
    name = re.sub(r"[^\w.-]+", "_", recipe.root.name)[:40] or "images"
    folder = where / f"{name}-{fingerprint[:16]}"
    if not folder.exists():
        with _explained(where, recipe.bytes):
            where.mkdir(parents=True, exist_ok=True)
            _sweep(where)
            with _lock(where / f"{folder.name}.lock", wait=True):
                if not folder.exists():  # another process may have prepared it while this one waited
                    _prepare(folder, recipe, stamps, fingerprint, decode, progress)
    dataset, skipped = _open(folder)
    if skipped:
        first = f"{skipped[0]['path']} ({skipped[0]['reason']})"
        warnings.warn(
            f"{len(skipped)} of {len(recipe.records)} images could not be read; first: {first}; "
            f"full list in {folder / _MANIFEST}",
            FedNoRoWarning,
            stacklevel=2,
        )
    return dataset


def verify(cache_dir: Path) -> None:
    """Reads a whole cache and compares it with its checksum; a `UserError` names one that is damaged."""
    _open(cache_dir)
    manifest = json.loads((cache_dir / _MANIFEST).read_text("utf-8"))
    if _sha256(cache_dir / _IMAGES) != manifest["sha256"]:
        raise _damaged(cache_dir, f"{_IMAGES} does not match its checksum")


def _stamp(file: Path) -> tuple[int, int] | None:
    """Size and time of a file: a change of either makes another cache; None where there is no such file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _fingerprint(recipe: Recipe, stamps: list[tuple[int, int] | None]) -> str:
    files = [(*astuple(record), stamp) for record, stamp in zip(recipe.records, stamps, strict=True)]
    inputs = [VERSION, str(recipe.root), recipe.classes, recipe.shape, sorted(recipe.settings.items()), files]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _prepare(
    folder: Path,
    recipe: Recipe,
    stamps: list[tuple[int, int] | None],
    fingerprint: str,
    decode: Decode,
    progress: Progress | None,
) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < recipe.bytes:
        raise _no_room(folder.parent, recipe.bytes, free)
    temporary = folder.parent / f"{folder.name}.preparing"
    shutil.rmtree(temporary, ignore_errors=True)  # the lock is ours, so whoever left it is dead
    temporary.mkdir()
    try:
        with (temporary / _IMAGES).open("wb") as file:
            skipped = _write_images(file, recipe, stamps, decode, progress)
        kept = [record for i, record in enumerate(recipe.records) if i not in skipped]
        _check_losses(recipe, kept, skipped)
        number = {name: c for c, name in enumerate(recipe.classes)}
        count = Counter(record.label for record in kept)
        manifest = {
            "version": VERSION,
            "fingerprint": fingerprint,
            "folder": str(recipe.root),
            "settings": dict(recipe.settings),
            "shape": [len(kept), *recipe.shape],
            "bytes": (temporary / _IMAGES).stat().st_size,
            "sha256": _sha256(temporary / _IMAGES),
            "classes": recipe.classes,
            "counts": {name: count[name] for name in recipe.classes},
            "skipped": [{"path": recipe.records[i].path, "reason": reason} for i, reason in skipped.items()],
            "labels": [number[record.label] for record in kept],
            "ids": [record.id for record in kept],
            "sites": _column([record.site for record in kept]),
            "groups": _column([record.group for record in kept]),
            "files": [[r.path, *(stamp or ())] for r, stamp in zip(recipe.records, stamps, strict=True)],
        }
        with (temporary / _MANIFEST).open("w", encoding="utf-8") as text:
            json.dump(manifest, text)
            _to_disk(text)
        verify(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_images(
    file: IO[bytes],
    recipe: Recipe,
    stamps: list[tuple[int, int] | None],
    decode: Decode,
    progress: Progress | None,
) -> dict[int, str]:
    """Appends every image that can be read; the positions of the others, with the reason."""

    def attempt(i: int) -> NDArray[np.uint8] | str:
        stamp = stamps[i]
        if stamp is None or not stamp[0]:
            return "no such file" if stamp is None else "the file is empty"
        try:
            return decode(recipe.root / recipe.records[i].path)
        except Exception as error:  # damaged files make decoders raise anything
            return str(error).strip() or type(error).__name__

    total = len(recipe.records)
    skipped: dict[int, str] = {}
    # Plain writes, not a memory map: on a full disk they raise where a map would kill the process. Threads
    # suffice because decoding releases the interpreter's lock.
    _write_header(file, (total, *recipe.shape))
    workers = min(os.cpu_count() or 1, 16)
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # odd metadata of readable images
        for i, image in enumerate(_in_order(pool, attempt, range(total), ahead=4 * workers)):
            if isinstance(image, str):
                skipped[i] = image
            else:
                file.write(image.tobytes())
            if progress:
                progress("preparing images", i + 1, total)
    file.seek(0)
    _write_header(file, (total - len(skipped), *recipe.shape))
    _to_disk(file)
    return skipped


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> None:
    # The format leaves room for the first axis to change, so that the header has the same length both times.
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _in_order(pool: ThreadPoolExecutor, function: Callable[[int], T], items: Iterable[int], ahead: int) -> Iterator[T]:
    """`pool.map` with at most `ahead` results waiting, so that memory stays bounded."""
    window: deque[Future[T]] = deque()
    for item in items:
        window.append(pool.submit(function, item))
        if len(window) > ahead:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()


def _check_losses(recipe: Recipe, kept: list[Record], skipped: dict[int, str]) -> None:
    if not skipped:
        return
    i, reason = next(iter(skipped.items()))
    first = f"first: {recipe.records[i].path} ({reason})"
    lost = len(skipped)
    if 2 * lost > len(recipe.records):
        raise UserError(f"{lost} of {len(recipe.records)} images in {recipe.root} could not be read; {first}")
    gone = sorted({record.label for record in recipe.records} - {record.label for record in kept})
    if gone:
        raise UserError(f"no image of class {gone[0]!r} in {recipe.root} could be read; {first}")


def _column(values: list[str | None]) -> list[str | None] | None:
    return None if None in values else values


def _open(folder: Path) -> tuple[Dataset, list[dict[str, str]]]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        if manifest["version"] != VERSION:
            raise ValueError(f"version {manifest['version']}, not {VERSION}")
        size = (folder / _IMAGES).stat().st_size
        if size != manifest["bytes"]:
            raise ValueError(f"{_IMAGES} has {size} bytes, not {manifest['bytes']}")
        images = np.load(folder / _IMAGES, mmap_mode="r")
        if list(images.shape) != manifest["shape"]:
            raise ValueError(f"{_IMAGES} has shape {list(images.shape)}, not {manifest['shape']}")
        dataset = Dataset(
            images=images,
            labels=np.array(manifest["labels"], np.int64),
            classes=tuple(manifest["classes"]),
            ids=tuple(manifest["ids"]),
            groups=_tuple(manifest["groups"]),
            sites=_tuple(manifest["sites"]),
        )
        return dataset, manifest["skipped"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        why = f"{_MANIFEST} lacks {error}" if isinstance(error, KeyError) else str(error)
        raise _damaged(folder, why) from error


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sweep(home: Path) -> None:
    """Removes what killed preparations left behind: the lock of a living one cannot be had."""
    for remains in home.glob(f"*-{'[0-9a-f]' * 16}.preparing"):
        with suppress(PermissionError), _lock(home / f"{remains.stem}.lock", wait=False) as dead:
            if dead:
                shutil.rmtree(remains, ignore_errors=True)


@contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Holds the lock file and removes it afterwards; without `wait`, yields False where another process has it."""
    while True:
        with path.open("a") as handle:
            if take_lock(handle) and _is_still(path, handle):
                try:
                    yield True
                finally:
                    with suppress(OSError):  # Windows does not remove open files: the lock file stays
                        path.unlink()
                return
        if not wait:
            yield False
            return
        time.sleep(0.1)


def _is_still(path: Path, handle: IO[str]) -> bool:
    """Whether the lock that was taken is the one that others would find, not one removed in between."""
    try:
        return path.stat().st_ino == os.fstat(handle.fileno()).st_ino
    except FileNotFoundError:
        return False


@contextmanager
def _explained(home: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room(home, needed, shutil.disk_usage(home).free) from error
        raise UserError(f"cannot write the image cache in {home} ({error.strerror or error}); {_ELSEWHERE}") from error


def _no_room(home: Path, needed: int, free: int) -> UserError:
    return UserError(f"the image cache needs {_megabytes(needed)} in {home}, {_megabytes(free)} are free; {_ELSEWHERE}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _damaged(folder: Path, why: str) -> UserError:
    return UserError(f"the image cache {folder} is damaged ({why}); delete it to prepare again")
