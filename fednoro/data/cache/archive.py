"""A folder or a .zip seen the same way: names, stamps and bytes. Nothing is ever unpacked to disk.

A `Member` is where one file's bytes are. It is small and knows nothing of the rest, so it can be
handed to another thread or process, and it never reads more than `LIMIT` bytes however large a zip
claims, or fails to claim, to be.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fednoro.core.types import FedNoRoWarning, UserError

LIMIT = 256 * 2**20  # bytes of one file; a CT slice has half a mebibyte, a large photograph twenty
# A black slice packs as well as a bomb does, but it is small.
MAX_RATIO, RATIO_MIN_SIZE = 1000, 16 * 2**20


class Member(Protocol):
    """One file of a tree."""

    def read(self) -> bytes:
        """All of it; a `UserError` or `OSError` says in a few words why not."""


class Tree(Protocol):
    """The files of a folder or a zip; `names` are relative, with forward slashes, and sorted."""

    @property
    def path(self) -> Path:
        """The folder or the zip."""

    @property
    def names(self) -> tuple[str, ...]:
        """All regular files but hidden ones."""

    def stamp(self, name: str) -> tuple[int, int] | None:
        """Two numbers of which one changes with the content:
        size and time or checksum; None where there is none.
        """

    def member(self, name: str) -> Member:
        """Where the bytes are."""

    def read(self, name: str) -> bytes:
        """The bytes."""


def open_tree(path: Path) -> Tree:
    """Lists a folder or a zip;
    a `UserError` names a zip that is damaged, encrypted or reaches outside itself.
    """
    path = path.expanduser().resolve()
    if path.is_dir():
        return _list_folder(path)
    if not path.exists():
        raise UserError(f"data.path {path} does not exist")
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"data.path {path} is neither a folder nor a zip, "
            "or one that was cut off: download it again"
        )
    return _list_zip(path)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


# Folders


@dataclass(frozen=True)
class _LooseFile:
    path: str

    def read(self) -> bytes:
        with open(self.path, "rb") as file:  # noqa: PTH123 - half the time of Path.open, and there are many
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise UserError(f"has more than {_mebibytes(LIMIT)}")
        return data


@dataclass(frozen=True)
class Folder:
    """A folder as a tree."""

    path: Path
    names: tuple[str, ...]
    _name_set: frozenset[str]

    def stamp(self, name: str) -> tuple[int, int] | None:
        if name not in self._name_set:
            return None
        try:
            status = os.stat(f"{self.path}/{name}")  # noqa: PTH116 - as above
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    def member(self, name: str) -> Member:
        if name not in self._name_set:
            raise UserError("no such file")
        return _LooseFile(f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        return self.member(name).read()


def _list_folder(root: Path) -> Folder:
    names: list[str] = []
    links: list[str] = []
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    name = folder + entry.name
                    if _is_hidden(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                    elif entry.is_file(follow_symlinks=False) or (
                        entry.is_symlink() and _is_file_inside(root, name)
                    ):
                        names.append(name)
                    elif entry.is_symlink():
                        links.append(name)
        except OSError as error:
            raise UserError(f"cannot list {root / folder}: {error.strerror or error}") from error
    if links:
        # A link to a folder inside would show the same images twice, or for ever.
        warnings.warn(
            f"{len(links)} links in {root} are not followed, as they lead outside it, to a folder "
            f"or nowhere; first: {min(links)}",
            FedNoRoWarning,
            stacklevel=3,
        )
    return Folder(root, tuple(sorted(names)), frozenset(names))


def _is_file_inside(root: Path, name: str) -> bool:
    """Whether a link leads to a file that is inside `root` too."""
    try:
        target = (root / name).resolve(strict=True)
    except (OSError, RuntimeError):  # nowhere, or in circles
        return False
    return target.is_file() and target.is_relative_to(root)


# Zips


@dataclass(frozen=True)
class _PackedFile:
    path: str
    offset: int
    packed_size: int
    size: int
    crc: int
    method: int

    def read(self) -> bytes:
        if self.size > LIMIT or (
            self.size > RATIO_MIN_SIZE and self.size > MAX_RATIO * self.packed_size
        ):
            raise UserError(
                f"unpacks to {_mebibytes(self.size)} from {_mebibytes(self.packed_size)}"
            )
        if self.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(
                f"packed by a method that is not supported ({self.method}); pack it with deflate"
            )
        with open(self.path, "rb") as file:  # noqa: PTH123
            file.seek(self.offset)
            header = file.read(30)
            if header[:4] != b"PK\3\4" or len(header) < 30:
                raise UserError("the zip is damaged here")
            name_length, extra_length = struct.unpack("<HH", header[26:])
            file.seek(name_length + extra_length, os.SEEK_CUR)
            data = file.read(self.packed_size)
        if self.method == zipfile.ZIP_DEFLATED:
            try:
                # A bomb may lie about its size.
                data = zlib.decompressobj(-15).decompress(data, self.size + 1)
            except zlib.error:
                raise UserError("the zip is damaged here") from None
        if len(data) != self.size or zlib.crc32(data) != self.crc:
            raise UserError("the zip is damaged here")
        return data


@dataclass(frozen=True)
class Zip:
    """A zip as a tree."""

    path: Path
    names: tuple[str, ...]
    _members: Mapping[str, _PackedFile]

    def stamp(self, name: str) -> tuple[int, int] | None:
        member = self._members.get(name)
        return None if member is None else (member.size, member.crc)

    def member(self, name: str) -> Member:
        if name not in self._members:
            raise UserError("no such file")
        return self._members[name]

    def read(self, name: str) -> bytes:
        return self.member(name).read()


def _list_zip(path: Path) -> Zip:
    members: dict[str, _PackedFile] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.replace("\\", "/")
                _refuse_tricks(path, info, name)
                if not info.is_dir() and not any(_is_hidden(part) for part in name.split("/")):
                    members[name] = _PackedFile(
                        str(path),
                        info.header_offset,
                        info.compress_size,
                        info.file_size,
                        info.CRC,
                        info.compress_type,
                    )
    except (zipfile.BadZipFile, OSError, NotImplementedError, struct.error) as error:
        raise UserError(f"{path} cannot be read ({error}): is the download complete?") from error
    return Zip(path, tuple(sorted(members)), members)


def _refuse_tricks(path: Path, info: zipfile.ZipInfo, name: str) -> None:
    if name.startswith("/") or re.match("[A-Za-z]:", name) or ".." in name.split("/"):
        raise UserError(
            f"{path} holds {info.filename!r}, which leads outside it: such a zip is not read"
        )
    if stat.S_ISLNK(info.external_attr >> 16):
        raise UserError(f"{path} holds the link {info.filename!r}: pack the files themselves")
    if info.flag_bits & 1:
        raise UserError(f"{path} is encrypted ({info.filename!r}): unpack it and give the folder")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
