"""MedMNIST (Yang et al., Scientific Data 2023):
any of its 2-D sets with one label per image, by its .npz file.

An .npz is a zip of arrays. Packed arrays can neither be mapped nor entered in the
middle, and at 224 pixels they are larger than most memories: their rows are streamed
into a cache (see `data/cache`).
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednoro.core.options import Options, option
from fednoro.core.types import IntArray, UserError
from fednoro.data.cache import preparation
from fednoro.data.cache.archive import Member
from fednoro.data.cache.preparation import Plan, Recipe, Record
from fednoro.data.cache.rows import Progress
from fednoro.data.dataset import Dataset

_PARTS = ("train", "val", "test")
_DAMAGE_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Medmnist(Options):
    """A 2-D MedMNIST .npz with one label per image, such as pathmnist.npz or dermamnist_64.npz.

    The three parts become one data set; an id such as `train-17` keeps the official
    part and the position in it.
    """

    section: ClassVar[str] = "data"

    path: str = option(help="the .npz file", example="~/breastmnist.npz")
    names: tuple[str, ...] | None = option(
        None, 'class names in the order of their numbers; default: "0", "1", …'
    )
    cache: str | None = option(
        None, "where unpacked images are kept; default $FEDNORO_CACHE or ~/.cache/fednoro"
    )

    def load(self, seed: int, progress: Callable[[str, int, int], None] | None = None) -> Dataset:
        """The images, unpacked on the first call and taken from the cache later;
        `seed` changes nothing.
        """
        recipe, decode, _ = self.plan()
        return preparation.load(recipe, decode, self.cache, progress)

    def plan(self, progress: Progress | None = None) -> Plan:
        """What is to be unpacked; the pixels stay as they are."""
        file = Path(self.path).expanduser().resolve()
        parts = _read_parts(file)
        labels = np.concatenate([labels for _, labels in parts.values()])
        if len(labels) == 0:
            raise UserError(f"{file} holds no images")
        images = {
            f"{part}-{i}": _Image(rows, i)
            for part, (rows, part_labels) in parts.items()
            for i in range(len(part_labels))
        }  # in the order of the labels
        classes = self._classes(labels, file)
        recipe = Recipe(
            tree=_Npz(file, file.stat().st_mtime_ns, images),
            name=file.stem,
            records=tuple(
                Record(id, classes[label], id) for id, label in zip(images, labels, strict=True)
            ),
            classes=classes,
            shape=parts["train"][0].shape,
            settings={},
            stream=True,
        )
        return Plan(recipe, partial(_reshape, shape=recipe.shape))

    def _classes(self, labels: IntArray, file: Path) -> tuple[str, ...]:
        names = self.names or tuple(str(c) for c in range(labels.max() + 1))
        if len(set(names)) != len(names):
            raise UserError(f"data.names must differ from each other, got {', '.join(names)}")
        if len(names) < 2:
            raise UserError(f"{file} has a single class; at least two are needed")
        if labels.max() >= len(names):
            raise UserError(
                f"data.names has {len(names)} names, "
                f"but the labels in {file} go up to {labels.max()}"
            )
        return names


def _reshape(data: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(shape)


# The file as a tree of images


class _Rows:
    """The images of one part, one after the other: to read one, all before it are read."""

    def __init__(self, file: Path, member: str, begin: int, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self._file, self._member, self._begin = file, member, begin
        self._lock = Lock()
        self._stream: Iterator[bytes] | None = None
        self._next = 0

    def read(self, index: int) -> bytes:
        with self._lock:
            if self._stream is None or index < self._next:
                self._stream, self._next = self._unpack(), 0
            for row in self._stream:
                self._next += 1
                if self._next > index:
                    return row
            raise UserError("the file is damaged before this image")

    def _unpack(self) -> Iterator[bytes]:
        try:
            with zipfile.ZipFile(self._file) as archive, archive.open(self._member) as stream:
                stream.read(self._begin)
                # Read, never skipped over:
                # the last row comes only if the checksum of all of them holds.
                while row := stream.read(math.prod(self.shape)):
                    yield row
        except _DAMAGE_ERRORS as error:
            raise UserError(f"the file is damaged, download it again: {error}") from error


class _Image(NamedTuple):
    rows: _Rows
    number: int

    def read(self) -> bytes:
        return self.rows.read(self.number)


@dataclass(frozen=True)
class _Npz:
    path: Path
    time: int
    images: Mapping[str, _Image]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.images))

    def stamp(self, name: str) -> tuple[int, int] | None:
        # The time, since a file with a damaged part and a sound one have the same sizes
        # and checksums in their lists.
        return (math.prod(self.images[name].rows.shape), self.time) if name in self.images else None

    def member(self, name: str) -> Member:
        if name not in self.images:
            raise UserError("no such file")
        return self.images[name]

    def read(self, name: str) -> bytes:
        return self.member(name).read()


# What the file says of itself


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    begin: int  # of the values


def _read_parts(file: Path) -> dict[str, tuple[_Rows, IntArray]]:
    """Images, not read yet, and labels [n] of the three parts."""
    if not file.is_file():
        raise UserError(
            f"data.path {file} {'is not a file' if file.exists() else 'does not exist'}; "
            "name a .npz file"
        )
    if not zipfile.is_zipfile(file):
        raise UserError(f"{file} is not a .npz file, or was cut short; download it again")
    try:
        with zipfile.ZipFile(file) as archive:
            parts = {part: _part(archive, part, file) for part in _PARTS}
    except UserError:
        raise
    except _DAMAGE_ERRORS as error:
        raise UserError(f"{file} is not a MedMNIST .npz or is damaged: {error}") from error
    shapes = {rows.shape for rows, _ in parts.values()}
    if len(shapes) > 1:
        raise UserError(
            f"{file}: the parts' images differ in shape: {', '.join(map(str, sorted(shapes)))}"
        )
    return parts


def _part(archive: zipfile.ZipFile, part: str, file: Path) -> tuple[_Rows, IntArray]:
    images, labels = (
        _header(archive, f"{part}_images", file),
        _header(archive, f"{part}_labels", file),
    )
    shape = images.shape
    if len(shape) == 5 or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise UserError(f"{file} holds volumes {shape[1:]}; only 2-D MedMNIST is supported")
    if (
        len(shape) not in (3, 4)
        or images.dtype != np.uint8
        or shape[1] != shape[2]
        or 0 in shape[1:]
    ):
        raise UserError(
            f"{file}: {part}_images must be uint8 [N, S, S] or [N, S, S, 3], "
            f"got {images.dtype} {shape}"
        )
    if images.fortran:
        raise UserError(
            f"{file}: {part}_images is not stored image by image; save np.ascontiguousarray of it"
        )
    if len(labels.shape) == 2 and labels.shape[1] > 1:
        raise UserError(
            f"{file} has {labels.shape[1]} labels per image; only sets "
            "with one label per image will do"
        )
    if len(labels.shape) not in (1, 2) or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{file}: {part}_labels must be integers [N, 1], got {labels.dtype} {labels.shape}"
        )
    if shape[0] != math.prod(labels.shape):
        raise UserError(
            f"{file}: {part} has {shape[0]} images and {math.prod(labels.shape)} labels"
        )
    for name, array in ((f"{part}_images", images), (f"{part}_labels", labels)):
        size = array.begin + math.prod(array.shape) * array.dtype.itemsize
        if archive.getinfo(f"{name}.npy").file_size != size:
            raise ValueError(f"{name} is shorter or longer than it says")
    rows = _Rows(
        file,
        f"{part}_images.npy",
        images.begin,
        (shape[1], shape[2], 3 if shape[3:] == (3,) else 1),
    )
    return rows, _labels(archive, part, file)


def _header(archive: zipfile.ZipFile, name: str, file: Path) -> _Header:
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        message = (
            f"{file} has no {name}; a MedMNIST .npz has images and labels for {', '.join(_PARTS)}"
        )
        raise UserError(message) from None
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"{name} has version {version} of the format; 1 and 2 are supported")
        return _Header(*readers[version](stream), stream.tell())


def _labels(archive: zipfile.ZipFile, part: str, file: Path) -> IntArray:
    with archive.open(f"{part}_labels.npy") as stream:
        labels = np.lib.format.read_array(stream, allow_pickle=False).reshape(-1).astype(np.int64)
    if len(labels) and labels.min() < 0:
        raise UserError(f"{file}: {part}_labels must not be negative, got {labels.min()}")
    return labels
