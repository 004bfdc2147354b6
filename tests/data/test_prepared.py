"""A prepared folder is enough by itself, and is checked before it is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednoro.core.types import UserError
from fednoro.data.cache.preparation import prepare
from fednoro.data.sources import SOURCES
from fednoro.data.sources.folder import Folder
from fednoro.data.sources.prepared import PreparedFolder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for i in range(6):
        file = tmp_path / "images" / "ab"[i % 2] / f"ü{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (i, i, i)).save(file)
    return prepare(Folder(str(tmp_path / "images"), size=8), home=str(tmp_path / "cache")).folder


def test_the_original_may_be_gone_and_the_folder_elsewhere(made: Path, tmp_path: Path) -> None:
    expected = Folder(str(tmp_path / "images"), size=8, cache=str(tmp_path / "cache")).load(0)
    moved = made.rename(tmp_path / "given to a colleague")
    shutil.rmtree(tmp_path / "images")
    data = SOURCES["prepared"](path=str(moved)).load(0)  # type: ignore[call-arg]
    assert (data.ids, data.classes, data.labels.tolist()) == (
        expected.ids,
        expected.classes,
        expected.labels.tolist(),
    )
    assert isinstance(data.images, np.memmap)
    assert np.array_equal(data.images[:, 0, 0, 0], [0, 2, 4, 1, 3, 5])


def test_a_flipped_bit_is_noticed(made: Path) -> None:
    content = bytearray((made / "images.npy").read_bytes())
    content[-1] ^= 1
    (made / "images.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged \(images\.npy does not match its checksum\)"):
        PreparedFolder(str(made)).load(0)


def test_what_is_no_prepared_folder_is_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path .*nowhere does not exist"):
        PreparedFolder(str(tmp_path / "nowhere")).load(0)
    with pytest.raises(UserError, match=r"data\.path .*images\.npy is not a folder"):
        PreparedFolder(str(made / "images.npy")).load(0)
    with pytest.raises(
        UserError,
        match=r"data\.path .*images has no manifest\.json: give a folder that `fednoro prep",
    ):
        PreparedFolder(str(tmp_path / "images")).load(0)
    with pytest.raises(UserError, match="PreparedFolder needs no preparation"):
        prepare(PreparedFolder(str(made)))
