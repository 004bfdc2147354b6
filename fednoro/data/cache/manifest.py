"""The file beside a cache's images that says what they are:
for people above, a line per column below.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fednoro.core.types import UserError
from fednoro.data.cache.rows import IMAGES, to_disk
from fednoro.data.dataset import Dataset

VERSION = 2
MANIFEST = "manifest.json"


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes it, and does not return before it is on the disk."""
    lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in manifest.items())
    with (folder / MANIFEST).open("wb") as file:
        # Names of files may be any bytes.
        file.write(f"{{\n{lines}\n}}\n".encode("utf-8", "surrogatepass"))
        to_disk(file)


def read(folder: Path) -> tuple[Dataset, dict[str, Any]]:
    """The images as a memory map, and the manifest;
    a `UserError` names a cache whose parts do not agree.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes().decode("utf-8", "surrogatepass"))
        if manifest["version"] != VERSION:
            raise ValueError(f"version {manifest['version']}, not {VERSION}")
        size = (folder / IMAGES).stat().st_size
        if size != manifest["bytes"]:
            raise ValueError(f"{IMAGES} has {size} bytes, not {manifest['bytes']}")
        images = np.load(folder / IMAGES, mmap_mode="r")
        if list(images.shape) != manifest["shape"]:
            raise ValueError(f"{IMAGES} has shape {list(images.shape)}, not {manifest['shape']}")
        dataset = Dataset(
            images=images,
            labels=np.array(manifest["labels"], np.int64),
            classes=tuple(manifest["classes"]),
            ids=tuple(manifest["ids"]),
            groups=_tuple(manifest["groups"]),
            sites=_tuple(manifest["sites"]),
        )
        for key in ("sha256", "counts", "skipped", "unreadable"):
            manifest[key]
        return dataset, manifest
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        reason = f"{MANIFEST} lacks {error}" if isinstance(error, KeyError) else str(error)
        raise damage_error(folder, reason) from error


def damage_error(folder: Path, reason: str) -> UserError:
    """The error for a cache that cannot be used."""
    return UserError(f"the image cache {folder} is damaged ({reason}); delete it to prepare again")


def sha256(file: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _lines(value: Any) -> str:
    """Tables (lists of mappings) with a line per row, all else on one line."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value)
        text = f"[\n  {rows}\n ]"
    return text


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)
