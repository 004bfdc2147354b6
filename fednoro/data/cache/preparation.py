"""Images decoded once:
a folder with one memory-mapped array and a manifest that says what is in it.

    <home>/<name>-<fingerprint>/images.npy     uint8 [N, H, W, C]
                                manifest.json  classes, labels, ids, what was skipped and why,
                                               checksums

A cache is written next to its final place and renamed when it is complete, so it is either whole or
absent. What a preparation that was stopped or killed has left (`….preparing`) is gone on with by
the next one of the same fingerprint; after a week any other one removes it. A lock that dies with
its process keeps two preparations of one cache apart.

A source whose images are prepared has a `plan()`, which its own `load` and `prepare` both go by.
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

from fednoro.core.files import take_lock
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.core.wording import megabytes
from fednoro.data.cache import manifest
from fednoro.data.cache.archive import Member, Tree
from fednoro.data.cache.rows import (
    IMAGES,
    JOURNAL,
    Decode,
    Progress,
    Workers,
    bytes_on_disk,
    write_rows,
)
from fednoro.data.dataset import Dataset

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WEEK = 7 * 24 * 3600.0
_OTHER_FOLDER_ADVICE = "choose another folder with data.cache or FEDNORO_CACHE"


@dataclass(frozen=True)
class Record:
    """One image that a source names; `path` is its name in the source's tree."""

    path: str
    label: str
    id: str
    site: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class Recipe:
    """All that decides what a cache holds; `settings` are those that change the pixels."""

    tree: Tree
    name: str
    records: tuple[Record, ...]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # H, W, C
    settings: Mapping[str, str | int | bool]
    processes: bool = False  # decode in processes, where that is Python's own work, as with DICOM
    # one packed file holds all: they are read in order, and one that cannot be spoils the rest
    stream: bool = False

    @property
    def bytes(self) -> int:
        return len(self.records) * math.prod(self.shape)


class Plan(NamedTuple):
    """What a source asks of the cache;
    `omissions` are names with the reason why they are no records.
    """

    recipe: Recipe
    decode: Decode
    omissions: Sequence[tuple[str, str]] = ()


@runtime_checkable
class Preparable(Protocol):
    """A source whose images are decoded once."""

    def plan(self, progress: Progress | None = None) -> Plan:
        """What is to be decoded, and how;
        `progress` hears of it where finding that out takes time.
        """


@dataclass(frozen=True)
class Prepared:
    """What `prepare` has done."""

    folder: Path
    counts: Mapping[str, int]  # per class
    skipped: Sequence[Mapping[str, str]]  # path and reason
    existed: bool  # it was there already
    bytes: int
    seconds: float
    # images per site, where the source knows sites
    sites: Mapping[str, int] = field(default_factory=dict)


def prepare(source: object, progress: Progress | None = None, home: str | None = None) -> Prepared:
    """Makes a source's cache, goes on with one that was begun, or finds it there."""
    if not isinstance(source, Preparable):
        raise UserError(
            f"{type(source).__name__} needs no preparation: its images are used as they are"
        )
    start = time.perf_counter()
    plan = source.plan(progress)
    folder, existed = _ensure(plan, home or getattr(source, "cache", None), progress)
    dataset, facts = manifest.read(folder)
    sites = dict(sorted(Counter(dataset.sites or ()).items()))
    seconds = time.perf_counter() - start
    return Prepared(
        folder, facts["counts"], facts["skipped"], existed, facts["bytes"], seconds, sites
    )


def load(
    recipe: Recipe,
    decode: Decode,
    home: str | None = None,
    progress: Progress | None = None,
    omissions: Sequence[tuple[str, str]] = (),
) -> Dataset:
    """The recipe's images from their cache, which is prepared first where there is none yet.

    `omissions` are names that a source has left out before, with the reason:
    the manifest lists them too.
    """
    folder, _ = _ensure(Plan(recipe, decode, omissions), home, progress)
    dataset, facts = manifest.read(folder)
    if facts["unreadable"]:
        first = facts["skipped"][len(omissions)]
        warnings.warn(
            f"{facts['unreadable']} of {len(recipe.records)} images could not be read; first: "
            f"{first['path']} ({first['reason']}); full list in {folder / manifest.MANIFEST}",
            FedNoRoWarning,
            stacklevel=2,
        )
    return dataset


def verify(cache_dir: Path) -> Dataset:
    """Reads a whole cache and compares it with its checksum;
    a `UserError` names one that is damaged.
    """
    dataset, facts = manifest.read(cache_dir)
    if manifest.sha256(cache_dir / IMAGES) != facts["sha256"]:
        raise manifest.damage_error(cache_dir, f"{IMAGES} does not match its checksum")
    return dataset


def home_folder(home: str | None) -> Path:
    """Where caches are kept: as given, or $FEDNORO_CACHE, or ~/.cache/fednoro."""
    return Path(home or os.environ.get("FEDNORO_CACHE") or "~/.cache/fednoro").expanduser()


def _ensure(plan: Plan, home: str | None, progress: Progress | None) -> tuple[Path, bool]:
    """The folder of a complete cache, and whether it was there already."""
    root = home_folder(home)
    recipe = plan.recipe
    stamps = [recipe.tree.stamp(record.path) for record in recipe.records]
    fingerprint = _fingerprint(plan, stamps)
    name = re.sub(r"[^\w.-]+", "_", recipe.name)[:40] or "images"
    folder = root / f"{name}-{fingerprint[:16]}"
    if folder.exists():
        return folder, True
    with _explain_disk_errors(root, recipe.bytes):
        root.mkdir(parents=True, exist_ok=True)
        _remove_remains(root, own_name=folder.name)
        with _lock(root / f"{folder.name}.lock", wait=True):
            if folder.exists():  # another process has prepared it while this one waited
                return folder, True
            _prepare(folder, plan, stamps, fingerprint, progress)
    return folder, False


def _fingerprint(plan: Plan, stamps: list[tuple[int, int] | None]) -> str:
    recipe = plan.recipe
    records = zip(recipe.records, stamps, strict=True)
    files = [(r.path, r.label, r.id, r.site, r.group, stamp) for r, stamp in records]
    settings = sorted(recipe.settings.items())
    inputs = [
        manifest.VERSION,
        str(recipe.tree.path),
        recipe.name,
        recipe.classes,
        recipe.shape,
        settings,
    ]
    return hashlib.sha256(json.dumps([*inputs, files, list(plan.omissions)]).encode()).hexdigest()


def _prepare(
    folder: Path,
    plan: Plan,
    stamps: list[tuple[int, int] | None],
    fingerprint: str,
    progress: Progress | None,
) -> None:
    recipe, temporary = plan.recipe, folder.parent / f"{folder.name}.preparing"
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes + bytes_on_disk(temporary) < recipe.bytes:
        raise _no_room_error(folder.parent, recipe.bytes, free_bytes)
    temporary.mkdir(exist_ok=True)
    members = [
        _member(recipe.tree, record.path, stamp)
        for record, stamp in zip(recipe.records, stamps, strict=True)
    ]
    workers: Workers = "one" if recipe.stream else "processes" if recipe.processes else "threads"
    unreadable = write_rows(
        temporary, fingerprint, members, recipe.shape, plan.decode, workers, progress
    )
    try:
        _check_losses(recipe, unreadable)
    except UserError:
        # Mended files have other stamps: nobody goes on from here.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    manifest.write(temporary, _describe(temporary, plan, stamps, fingerprint, unreadable))
    manifest.read(temporary)
    temporary.rename(folder)
    (folder / JOURNAL).unlink()


def _describe(
    folder: Path,
    plan: Plan,
    stamps: Sequence[tuple[int, int] | None],
    fingerprint: str,
    unreadable: Mapping[int, str],
) -> dict[str, Any]:
    """What the manifest says of the images in `folder`."""
    recipe = plan.recipe
    readable_records = [record for i, record in enumerate(recipe.records) if i not in unreadable]
    names = [record.path for record in recipe.records]
    number_of = {name: c for c, name in enumerate(recipe.classes)}
    count = Counter(record.label for record in readable_records)
    return {
        "name": recipe.name,
        "version": manifest.VERSION,
        "fednoro": _version(),
        "source": str(recipe.tree.path),
        "settings": dict(recipe.settings),
        "shape": [len(readable_records), *recipe.shape],
        "counts": {name: count[name] for name in recipe.classes},
        "bytes": (folder / IMAGES).stat().st_size,
        "sha256": manifest.sha256(folder / IMAGES),
        "fingerprint": fingerprint,
        "files": {
            "count": sum(stamp is not None for stamp in stamps),
            "bytes": sum(stamp[0] for stamp in stamps if stamp),
            "stamps_sha256": hashlib.sha256(json.dumps([names, stamps]).encode()).hexdigest(),
        },
        "unreadable": len(unreadable),
        "skipped": [
            {"path": name, "reason": reason}
            for name, reason in (
                *plan.omissions,
                *((names[i], reason) for i, reason in unreadable.items()),
            )
        ],
        "classes": list(recipe.classes),
        "labels": [number_of[record.label] for record in readable_records],
        "ids": [record.id for record in readable_records],
        "sites": _column([record.site for record in readable_records]),
        "groups": _column([record.group for record in readable_records]),
    }


def _version() -> str | None:
    try:
        return version("fednoro")
    except PackageNotFoundError:  # run from its source
        return None


def _column(values: list[str | None]) -> list[str | None] | None:
    return None if None in values else values


def _member(tree: Tree, name: str, stamp: tuple[int, int] | None) -> Member | str:
    if stamp is None:
        return "no such file"
    return tree.member(name) if stamp[0] else "the file is empty"


def _check_losses(recipe: Recipe, unreadable: Mapping[int, str]) -> None:
    if not unreadable:
        return
    i, reason = next(iter(unreadable.items()))
    source, first = recipe.tree.path, f"first: {recipe.records[i].path} ({reason})"
    if recipe.stream or 2 * len(unreadable) > len(recipe.records):
        raise UserError(
            f"{len(unreadable)} of {len(recipe.records)} images "
            f"in {source} could not be read; {first}"
        )
    readable_labels = {
        record.label for i, record in enumerate(recipe.records) if i not in unreadable
    }
    lost_labels = sorted({record.label for record in recipe.records} - readable_labels)
    if lost_labels:
        raise UserError(f"no image of class {lost_labels[0]!r} in {source} could be read; {first}")


def _remove_remains(home: Path, own_name: str) -> None:
    """Removes what preparations left behind that nobody has gone on with for a week."""
    for remains in home.glob(f"*-{'[0-9a-f]' * 16}.preparing"):
        if remains.stem == own_name or time.time() - _last_touched(remains) < _WEEK:
            continue
        with (
            suppress(PermissionError),
            _lock(home / f"{remains.stem}.lock", wait=False) as acquired,
        ):
            if acquired:
                shutil.rmtree(remains, ignore_errors=True)


def _last_touched(folder: Path) -> float:
    return max(
        (
            path.stat().st_mtime
            for path in (folder, folder / IMAGES, folder / JOURNAL)
            if path.exists()
        ),
        default=0.0,
    )


@contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Holds the lock file and removes it afterwards;
    without `wait`, yields False where another process has it.
    """
    while True:
        with path.open("a") as handle:
            if take_lock(handle) and _is_current(path, handle):
                try:
                    yield True
                finally:
                    with suppress(OSError):
                        # Windows does not remove open files: the lock file stays.
                        path.unlink()
                return
        if not wait:
            yield False
            return
        time.sleep(0.1)


def _is_current(path: Path, handle: IO[str]) -> bool:
    """Whether the lock that was taken is the one that others would find,
    not one removed in between.
    """
    try:
        return path.stat().st_ino == os.fstat(handle.fileno()).st_ino
    except FileNotFoundError:
        return False


@contextmanager
def _explain_disk_errors(home: Path, needed_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise _no_room_error(home, needed_bytes, shutil.disk_usage(home).free) from error
        raise UserError(
            f"cannot write the image cache in {home} ({error.strerror or error}); "
            f"{_OTHER_FOLDER_ADVICE}"
        ) from error


def _no_room_error(home: Path, needed_bytes: int, free_bytes: int) -> UserError:
    return UserError(
        f"the image cache needs {megabytes(needed_bytes)} in {home}, "
        f"{megabytes(free_bytes)} are free; free some and run again to go on, "
        f"or {_OTHER_FOLDER_ADVICE}"
    )
