"""MedMNIST files: the three parts become one data set, streamed into a cache; what
is not such a file is named.
"""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednoro
from fednoro.core.types import UserError
from fednoro.data.cache.preparation import prepare, verify
from fednoro.data.sources.medmnist import Medmnist

SIZES = {"train": 30, "val": 6, "test": 9}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def arrays(shape: tuple[int, ...] = (28, 28), classes: int = 3) -> dict[str, np.ndarray]:
    """A set in the published layout, its classes told apart by brightness."""
    rng = np.random.default_rng(0)
    content = {}
    for part, n in SIZES.items():
        labels = np.arange(n) % classes
        noise = rng.integers(0, 60, size=(n, *shape))
        content[f"{part}_images"] = (noise + 60 * labels.reshape(n, *[1] * len(shape))).astype(
            np.uint8
        )
        content[f"{part}_labels"] = labels.astype(np.uint8)[:, None]
    return content


def written(folder: Path, **content: np.ndarray) -> Path:
    np.savez_compressed(folder / "set.npz", **content)
    return folder / "set.npz"


def mistake(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        Medmnist(str(path), **options).load(0)
    return str(error.value)


@pytest.mark.parametrize(
    ("shape", "loaded"),
    [
        ((28, 28), (28, 28, 1)),
        ((28, 28, 1), (28, 28, 1)),
        ((28, 28, 3), (28, 28, 3)),
        ((64, 64, 3), (64, 64, 3)),
    ],
)
def test_parts_become_one_set_whose_ids_keep_the_official_split(
    tmp_path: Path, shape: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    content = arrays(shape)
    data = Medmnist(str(written(tmp_path, **content))).load(0)
    assert data.images.shape == (45, *loaded)
    assert data.classes == ("0", "1", "2")
    assert data.ids is not None
    assert (data.ids[0], data.ids[29], data.ids[30], data.ids[44]) == (
        "train-0",
        "train-29",
        "val-0",
        "test-8",
    )
    for number, name in enumerate(data.ids):
        part, position = name.split("-")
        assert (
            data.images[number].squeeze() == content[f"{part}_images"][int(position)].squeeze()
        ).all()
        assert data.labels[number] == content[f"{part}_labels"][int(position), 0]


def test_class_names_may_be_given(tmp_path: Path) -> None:
    file = written(tmp_path, **arrays())
    assert Medmnist(str(file), names=("a", "b", "c")).load(0).classes == ("a", "b", "c")
    assert (
        mistake(file, names=("a", "b"))
        == f"data.names has 2 names, but the labels in {file} go up to 2"
    )
    assert (
        mistake(file, names=("a", "b", "a"))
        == "data.names must differ from each other, got a, b, a"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_labels": np.zeros((30, 14), np.uint8)},
            "14 labels per image; only sets with one label per image",
        ),
        (
            {"train_images": np.zeros((30, 28, 28, 28), np.uint8)},
            "holds volumes (28, 28, 28); only 2-D MedMNIST",
        ),
        (
            {"val_images": np.zeros((6, 28, 28), np.float32)},
            "val_images must be uint8 [N, S, S] or [N, S, S, 3], got",
        ),
        (
            {"val_images": np.zeros((6, 28, 20), np.uint8)},
            "val_images must be uint8 [N, S, S] or [N, S, S, 3], got",
        ),
        (
            {"val_images": np.zeros((6, 32, 32), np.uint8)},
            "images differ in shape: (28, 28, 1), (32, 32, 1)",
        ),
        ({"test_images": np.zeros((8, 28, 28), np.uint8)}, "test has 8 images and 9 labels"),
        (
            {"test_labels": np.zeros((9, 1), np.float32)},
            "test_labels must be integers [N, 1], got float32 (9, 1)",
        ),
        ({"test_labels": np.full((9, 1), -1)}, "test_labels must not be negative, got -1"),
        (
            {"test_labels": np.array([[{}]] * 9, object)},
            "test_labels must be integers [N, 1], got object (9, 1)",
        ),
        (
            {"test_images": np.zeros((9, 0, 0), np.uint8)},
            "test_images must be uint8 [N, S, S] or [N, S, S, 3], got",
        ),
        (
            {"val_images": np.zeros((28, 28, 6), np.uint8).T},
            "val_images is not stored image by image; save np.ascon",
        ),
        (
            {"val_images": None},
            "has no val_images; a MedMNIST .npz has images and labels for train, val, test",
        ),
    ],
)
def test_other_contents_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    content = {name: array for name, array in {**arrays(), **change}.items() if array is not None}
    file = written(tmp_path, **content)
    assert message in mistake(file)
    assert str(file) in mistake(file)


def test_a_single_class_and_no_images_at_all_are_refused(tmp_path: Path) -> None:
    assert "has a single class; at least two are needed" in mistake(
        written(tmp_path, **arrays(classes=1))
    )
    empty = {name: array[:0] for name, array in arrays().items()}
    assert "holds no images" in mistake(written(tmp_path, **empty))


def test_files_that_are_no_npz_are_refused_by_name(tmp_path: Path) -> None:
    absent, text, cut, single = (
        tmp_path / name for name in ("absent.npz", "text.npz", "cut.npz", "single.npy")
    )
    text.write_text("no arrays")
    cut.write_bytes(written(tmp_path, **arrays()).read_bytes()[:-400])
    np.save(single, np.zeros(3))
    (tmp_path / "empty.npz").touch()
    assert mistake(absent) == f"data.path {absent} does not exist; name a .npz file"
    assert mistake(tmp_path) == f"data.path {tmp_path} is not a file; name a .npz file"
    for file in (text, cut, single, tmp_path / "empty.npz"):
        assert mistake(file) == f"{file} is not a .npz file, or was cut short; download it again"


def test_arrays_that_are_not_what_they_say_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, **arrays())
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, change in (
        ("train_images.npy", lambda data: data[:-1]),
        # one row more than it says
        ("test_images.npy", lambda data: data.replace(b"(9, 28,", b"(8, 28,")),
        ("val_labels.npy", lambda data: data[:-1]),
        ("val_images.npy", lambda data: b"PK" + data),
        ("val_images.npy", lambda data: data[:6] + b"\x09" + data[7:]),  # a version nobody knows
    ):
        with zipfile.ZipFile(file, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, change(data) if member == name else data)
        if name == "test_images.npy":
            assert mistake(file) == f"{file}: test has 8 images and 9 labels"
        else:
            assert mistake(file).startswith(f"{file} is not a MedMNIST .npz or is damaged: ")


# The cache


def test_the_images_are_unpacked_once_and_mapped_from_then_on(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, **arrays())
    done = prepare(Medmnist(str(file)))
    assert (done.existed, done.counts, done.skipped) == (False, {"0": 15, "1": 15, "2": 15}, [])
    assert done.folder.parent == home and done.folder.name.startswith("set-")
    verify(done.folder)
    monkeypatch.chdir(tmp_path)
    assert prepare(Medmnist("set.npz")).existed
    calls: list[int] = []
    data = Medmnist(str(file)).load(0, lambda what, done, total: calls.append(done))
    assert isinstance(data.images, np.memmap) and calls == []
    elsewhere = Medmnist(str(file), cache=str(tmp_path / "other")).load(0)
    assert elsewhere.images.filename.is_relative_to(tmp_path / "other")  # type: ignore[attr-defined]


@pytest.mark.parametrize("after", [1, 12, 29, 30, 33, 44])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_preparation_that_was_stopped_is_gone_on_with_to_the_same_bytes(
    tmp_path: Path, home: Path, after: int, save: Any
) -> None:
    content = arrays()
    save(tmp_path / "set.npz", **content)
    source = Medmnist(str(tmp_path / "set.npz"))

    def stop(what: str, done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.load(0, stop)
    calls: list[tuple[int, int]] = []
    data = source.load(0, lambda what, done, total: calls.append((done, total)))
    assert calls == [(done, 45) for done in range(after + 1, 46)]
    assert (
        data.images[..., 0] == np.concatenate([content[f"{part}_images"] for part in SIZES])
    ).all()
    assert [path.suffix for path in home.iterdir()] == [""]  # nothing but the cache


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_part_spoils_the_file_and_leaves_nothing_behind(
    tmp_path: Path, home: Path, save: Any
) -> None:
    file = tmp_path / "set.npz"
    save(file, **arrays())
    sound = file.read_bytes()
    # one bit of one pixel of some image
    file.write_bytes(sound[:5000] + bytes([sound[5000] ^ 1]) + sound[5001:])
    message = mistake(file)
    assert f"of 45 images in {file} could not be read; first: train-" in message
    assert "the file is damaged, download it again: " in message
    assert list(home.iterdir()) == []
    file.write_bytes(sound)
    assert len(Medmnist(str(file)).load(0)) == 45


def test_what_was_taken_from_a_damaged_file_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "set.npz"
    np.savez(file, **arrays())  # not packed, so that the damage is in one image
    sound = file.read_bytes()
    file.write_bytes(sound[:5000] + bytes([sound[5000] ^ 1]) + sound[5001:])

    def stop(what: str, done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Medmnist(str(file)).load(0, stop)
    file.write_bytes(sound)
    os.utime(file, ns=(0, 0))
    assert (Medmnist(str(file)).load(0).images[:30, ..., 0] == arrays()["train_images"]).all()


def test_rows_are_right_in_any_order_and_from_several_threads(tmp_path: Path) -> None:
    content = arrays()
    tree = Medmnist(str(written(tmp_path, **content))).plan().recipe.tree
    names = [f"{part}-{i}" for part, n in SIZES.items() for i in range(n)]
    assert tree.names == tuple(sorted(names)) and tree.stamp("train-30") is None
    with pytest.raises(UserError, match="no such file"):
        tree.read("train-30")
    order = np.random.default_rng(0).permutation(names).tolist()
    with ThreadPoolExecutor(8) as pool:
        for name, data in zip(order, pool.map(tree.read, order), strict=True):
            part, position = name.split("-")
            assert data == content[f"{part}_images"][int(position)].tobytes()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    shape, n = (64, 64, 3), 3000
    content = arrays(shape)
    content["train_images"] = np.zeros((n, *shape), np.uint8)  # 37 MB
    content["train_labels"] = np.arange(n)[:, None] % 3
    source = Medmnist(str(written(tmp_path, **content)))
    tracemalloc.start()
    try:
        data = source.load(0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data) == n + 15
    assert peak < 5e6, f"{peak / 1e6:.1f} MB"


def test_a_run_from_the_file(tmp_path: Path) -> None:
    run = fednoro.run(
        {
            "data": {"name": "medmnist", "path": str(written(tmp_path, **arrays()))},
            "partition": {"name": "iid", "clients": 3},
            "noise": "none",
            "model": {"name": "cnn", "width": 4},
            "method": "fedavg",
            "train": {"rounds": 2, "epochs": 1, "batch": 8},
            "out": str(tmp_path / "runs"),
            "device": "cpu",
        }
    )
    assert len(run.bacc) == 2 and run.federation.classes == ("0", "1", "2")
