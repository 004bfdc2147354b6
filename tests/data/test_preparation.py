"""Decoded once: a cache is whole or absent, goes on after a kill to the same
bytes, and names every mishap.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache import preparation
from fednoro.data.cache.archive import open_tree
from fednoro.data.cache.image_file import decode_image
from fednoro.data.cache.preparation import Recipe, Record
from fednoro.data.sources.digits import Digits
from fednoro.data.sources.folder import Folder

RED, GREEN = (220, 20, 20), (20, 200, 20)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path, home: Path) -> Path:
    """Two classes of four plain PNG images each."""
    for name, colour in (("naevus", GREEN), ("melanoma", RED)):
        for i in range(4):
            save(tmp_path / "images" / name / f"{i}.png", colour)
    return tmp_path / "images"


def save(file: Path, colour: tuple[int, ...], size: tuple[int, int] = (12, 10)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)
    return file


def greys(root: Path, count: int, broken: int = 25) -> Path:
    """Image i is grey value i; now and then one is broken."""
    for i in range(count):
        file = save(
            root / "ab"[i % 2] / f"{i:03}.png", (i, i, i), (200, 200) if i % 10 == 0 else (8, 8)
        )
        if i % broken == 1:
            file.write_text("broken")
    return root


def write_csv(root: Path, *lines: str) -> str:
    file = root / "labels.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def load(root: Path, **options: object) -> preparation.Dataset:
    return Folder(str(root), **{"size": 8, **options}).load(0)  # type: ignore[arg-type]


def manifest(home: Path) -> dict[str, object]:
    (file,) = home.glob("*/manifest.json")
    return json.loads(file.read_text("utf-8"))  # type: ignore[no-any-return]


def content(home: Path) -> dict[str, bytes]:
    """All files below, by name."""
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file()
    }


def test_the_second_load_decodes_nothing(root: Path, home: Path) -> None:
    first = load(root)
    for file in root.rglob("*.png"):
        # same size and time, other content: only decoding would notice
        stat = file.stat()
        file.write_bytes(b"x" * stat.st_size)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = load(root)
    assert isinstance(second.images, np.memmap)
    assert not second.images.flags.writeable
    assert np.array_equal(first.images, second.images)
    assert (first.ids, first.classes, first.labels.tolist()) == (
        second.ids,
        second.classes,
        second.labels.tolist(),
    )
    assert len(list(home.iterdir())) == 1


def test_whatever_changes_the_data_makes_another_cache(root: Path, home: Path) -> None:
    def count() -> int:
        return len(list(home.iterdir()))

    load(root)
    for number, options in enumerate(
        [{"size": 9}, {"crop": "center"}, {"grey": True}, {"classes": ("naevus", "melanoma")}]
    ):
        load(root, **options)
        assert count() == number + 2
    os.utime(root / "naevus" / "0.png", ns=(1, 1))
    load(root)
    assert count() == 6
    save(root / "naevus" / "0.png", RED, (30, 30))
    assert (load(root).images[4] == RED).all()
    csv = write_csv(root, "path,label", "naevus/0.png,a", "naevus/1.png,b")
    assert load(root, csv=csv).labels.tolist() == [0, 1]
    write_csv(root, "path,label", "naevus/0.png,b", "naevus/1.png,a")
    assert load(root, csv=csv).labels.tolist() == [1, 0]


def test_the_cache_option_wins_over_the_environment(root: Path, home: Path, tmp_path: Path) -> None:
    load(root, cache=str(tmp_path / "mine"))
    assert not home.exists()
    (folder,) = (tmp_path / "mine").iterdir()
    assert folder.name.startswith("images-")


def test_the_manifest_says_what_is_inside(root: Path, home: Path) -> None:
    save(root / "naevus" / "5.png", GREEN)
    load(root)
    found = manifest(home)
    assert found["counts"] == {"melanoma": 4, "naevus": 5}
    assert found["shape"] == [9, 8, 8, 3]
    assert found["settings"] == {"size": 8, "crop": "resize", "grey": False, "window": "file"}
    assert found["skipped"] == []
    assert found["name"] == "images"
    assert found["source"] == str(root)
    assert found["bytes"] == 128 + 9 * 8 * 8 * 3
    assert found["files"]["count"] == 9  # type: ignore[index]
    assert found["files"]["bytes"] == sum(f.stat().st_size for f in root.rglob("*.png"))  # type: ignore[index]
    text = next(home.glob("*/manifest.json")).read_text("utf-8")
    assert ' "counts": {"melanoma": 4, "naevus": 5},\n' in text  # a line each, for people


def test_progress_counts_every_image_in_order(root: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    Folder(str(root), size=8).load(0, lambda *step: steps.append(step))
    assert steps == [("preparing images", i + 1, 8) for i in range(8)]
    steps.clear()
    Folder(str(root), size=8).load(0, lambda *step: steps.append(step))
    assert steps == []


def test_more_images_than_are_decoded_ahead_stay_in_order(tmp_path: Path, home: Path) -> None:
    with pytest.warns(FedNoRoWarning, match="10 of 250"):
        data = load(greys(tmp_path / "images", 250))
    assert len(data) == 240
    for name, image in zip(data.ids or (), data.images, strict=True):
        assert (image == int(name[2:5])).all()


def truncate(folder: Path) -> None:
    os.truncate(folder / "images.npy", (folder / "images.npy").stat().st_size - 1)


def edit(key: str, value: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text("utf-8"))
        content[key] = value
        (folder / "manifest.json").write_text(json.dumps(content), "utf-8")

    return damage


def other_array(folder: Path) -> None:
    size = (folder / "images.npy").stat().st_size
    np.save(folder / "images.npy", np.zeros((size - 128) // 2, np.int16))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        other_array,
        lambda folder: (folder / "images.npy").unlink(),
        lambda folder: (folder / "images.npy").write_bytes(b""),
        lambda folder: (folder / "images.npy").write_bytes(
            b"x" * (folder / "images.npy").stat().st_size
        ),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text('{"version": 1, "cla'),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text("{}"),
        edit("version", 0),
        edit("shape", [9, 8, 8, 3]),
        edit("labels", [0, 1]),
        edit("ids", ["a"]),
        edit("labels", None),
    ],
)
def test_a_damaged_cache_is_named_with_the_way_out(
    root: Path, home: Path, damage: Callable[[Path], None]
) -> None:
    load(root)
    (folder,) = home.iterdir()
    damage(folder)
    with pytest.raises(
        UserError, match=f"the image cache {folder} is damaged .*; delete it to prepare again"
    ):
        load(root)


def test_verify_finds_a_single_flipped_bit(root: Path, home: Path) -> None:
    load(root)
    (folder,) = home.iterdir()
    preparation.verify(folder)
    content = bytearray((folder / "images.npy").read_bytes())
    content[-5] ^= 1
    (folder / "images.npy").write_bytes(content)
    load(root)  # the quick check on opening does not read everything
    with pytest.raises(UserError, match=r"damaged \(images.npy does not match its checksum\)"):
        preparation.verify(folder)


def test_an_unwritable_cache_is_an_error_with_the_way_out(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError,
        match=r"cannot write the image cache in .*; choose another folder with data\.cache or",
    ):
        load(root, cache=str(tmp_path / "file" / "cache"))


def test_too_little_room_is_said_before_anything_is_decoded(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000))
    steps: list[int] = []
    with pytest.raises(
        UserError, match=r"needs 2\.4 MB in .*cache, 0\.5 MB are free; free some and run again"
    ):
        Folder(str(root), size=316).load(0, lambda _, done, __: steps.append(done))
    assert steps == []
    assert list(home.iterdir()) == []


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


SLOW_LOAD = (
    "import sys, time; from fednoro.data.sources.folder import Folder\n"
    "def slowly(what, done, total): print(done, flush=True); time.sleep(float(sys.argv[2]))\n"
    "data = Folder(sys.argv[1], size=8).load(0, slowly)\n"
    "print('images', len(data), data.images.sum())"
)


# Stopped and gone on with


def stopped(root: Path, home: Path, after: int, **options: object) -> Path:
    """What a preparation leaves that ends after so many images."""

    def stop(what: str, done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Folder(str(root), **{"size": 8, **options}).load(0, stop)  # type: ignore[arg-type]
    (remains,) = home.glob("*.preparing")
    return remains


def test_a_preparation_killed_again_and_again_ends_in_the_same_bytes(
    tmp_path: Path, home: Path
) -> None:
    root = greys(tmp_path / "images", 120)
    load(root, cache=str(tmp_path / "whole"))
    begun = []
    for stop_at in (20, 55, 90):
        child = python(
            SLOW_LOAD.replace("time.sleep(", f"time.sleep((done >= {stop_at}) * "), root, 60
        )
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        begun.append(int(next(lines)))
        next(line for line in lines if int(line) == stop_at)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert [path.suffix for path in sorted(home.iterdir())] == [".lock", ".preparing"]
    assert begun == [1, 21, 56]
    steps: list[int] = []
    Folder(str(root), size=8).load(0, lambda _, done, __: steps.append(done))
    assert steps == list(range(91, 121))
    assert content(home) == content(tmp_path / "whole")


def cut(name: str, by: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def zeros_at_the_end(folder: Path) -> None:  # as some file systems leave them when the power goes
    with (folder / "images.npy").open("r+b") as file:
        file.seek(-300, os.SEEK_END)
        file.write(bytes(300))


def append(name: str, what: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(what)

    return damage


def swap(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "journal").write_bytes(
        (folder / "journal").read_bytes().replace(old, new)
    )


@pytest.mark.parametrize(
    ("damage", "first"),
    [
        (lambda folder: None, 31),
        (cut("images.npy", 1), 30),  # a row half written
        (cut("images.npy", 192 * 5), 26),
        (zeros_at_the_end, 29),
        (append("images.npy", b"x" * 192), 31),  # a row whose line was not written
        (append("images.npy", b"x"), 31),
        (cut("journal", 1), 30),  # a line half written
        (append("journal", b"12345"), 31),
        (append("journal", b"\xff\xfe\n"), 31),
        (append("journal", b"12345\n"), 31),
        (lambda folder: (folder / "journal").unlink(), 1),
        (lambda folder: (folder / "journal").write_bytes(b""), 1),
        (lambda folder: (folder / "images.npy").unlink(), 1),
        (lambda folder: (folder / "images.npy").write_bytes(b""), 1),
        (lambda folder: shutil.rmtree(folder), 1),
        (swap(b'"', b'"0'), 1),  # another fingerprint
    ],
)
def test_whatever_state_it_was_left_in_it_goes_on_from_what_holds(
    tmp_path: Path, home: Path, damage: Callable[[Path], None], first: int
) -> None:
    root = greys(tmp_path / "images", 60)
    load(root, cache=str(tmp_path / "whole"))
    damage(stopped(root, home, after=30))
    steps: list[int] = []
    Folder(str(root), size=8).load(0, lambda _, done, __: steps.append(done))
    assert steps == list(range(first, 61))
    assert content(home) == content(tmp_path / "whole")


def test_a_preparation_stopped_just_before_its_end_is_only_finished(
    root: Path, home: Path, tmp_path: Path
) -> None:
    load(root, cache=str(tmp_path / "whole"))
    stopped(root, home, after=8)
    steps: list[int] = []
    Folder(str(root), size=8).load(0, lambda _, done, __: steps.append(done))
    assert steps == []
    assert content(home) == content(tmp_path / "whole")


def test_remains_are_kept_for_a_week_and_only_as_long(root: Path, home: Path) -> None:
    young = stopped(root, home, after=3)
    for folder in [home / "work.preparing", home / "images-0123456789abcdef"]:  # nobody's remains
        folder.mkdir()
        os.utime(folder, (0, 0))
    load(root, size=9)
    assert young.is_dir()
    for path in (young, *young.iterdir()):
        os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    load(root, size=10)
    assert not young.exists()
    assert (home / "work.preparing").is_dir()
    assert (home / "images-0123456789abcdef").is_dir()


def test_remains_a_month_old_of_the_same_images_are_still_gone_on_with(
    root: Path, home: Path
) -> None:
    remains = stopped(root, home, after=3)
    for path in (remains, *remains.iterdir()):
        os.utime(path, (1, 1))
    steps: list[int] = []
    Folder(str(root), size=8).load(0, lambda _, done, __: steps.append(done))
    assert steps[0] == 4


def test_two_processes_at_once_share_one_preparation(root: Path, home: Path) -> None:
    first = python(SLOW_LOAD, root, 0.15)
    assert first.stdout is not None
    assert first.stdout.readline() == "1\n"
    data = load(root)  # waits for the other one
    out, err = first.communicate(timeout=60)
    assert out.splitlines()[-1] == f"images 8 {data.images.sum()}", err
    (folder,) = home.iterdir()
    preparation.verify(folder)


def test_a_living_preparation_of_other_images_is_left_alone(
    root: Path, home: Path, tmp_path: Path
) -> None:
    save(tmp_path / "other" / "a" / "0.png", RED)
    save(tmp_path / "other" / "b" / "0.png", RED)
    child = python(SLOW_LOAD, root, 60)
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    assert len(load(tmp_path / "other")) == 2  # without waiting for it
    assert child.poll() is None
    (preparing,) = home.glob("*.preparing")
    assert (preparing / "images.npy").exists()
    child.kill()
    child.communicate()


# Several processes


def recipe(root: Path, processes: bool) -> Recipe:
    tree = open_tree(root)
    records = tuple(Record(name, name[0], name) for name in tree.names)
    return Recipe(tree, "greys", records, ("a", "b"), (8, 8, 3), {}, processes)


PROCESSES = (
    "import sys, time; from functools import partial; from fednoro.data.cache import preparation; "
    "from pathlib import Path\n"
    "from fednoro.data.cache.archive import open_tree; from fednoro.data.cache.image_file import "
    "decode_image\n"
    "from fednoro.data.cache import rows\n"
    "if __name__ == '__main__':\n"
    "    rows._MIN_FOR_PROCESSES = rows._MAX_CORES_FOR_THREADS = 0\n"
    "    tree = open_tree(Path(sys.argv[1]))\n"
    "    records = tuple(preparation.Record(name, name[0], name) for name in tree.names)\n"
    "    recipe = preparation.Recipe(tree, 'greys', records, ('a', 'b'), (8, 8, 3), {}, "
    "processes=True)\n"
    "    say = lambda what, done, total: [print(done, flush=True), time.sleep(60 * (done % 10 == "
    "0))]\n"
    "    preparation.load(recipe, partial(decode_image, size=8), progress=say)\n"
)


def of_session(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_processes_go_with_their_parent_and_threads_go_on_to_the_same_bytes(
    tmp_path: Path, home: Path
) -> None:
    root = greys(tmp_path / "images", 250)
    with pytest.warns(FedNoRoWarning, match="10 of 250"):
        preparation.load(
            recipe(root, False), partial(decode_image, size=8), str(tmp_path / "whole")
        )
    (tmp_path / "script.py").write_text(PROCESSES)
    for number, kill in enumerate(
        (lambda pid: os.kill(pid, signal.SIGKILL), lambda pid: os.killpg(pid, signal.SIGINT))
    ):
        child = subprocess.Popen(
            [sys.executable, tmp_path / "script.py", root],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert child.stdout is not None
        seen = [child.stdout.readline() for _ in range(10)]
        # the second goes on
        assert [int(line) for line in seen] == list(range(10 * number + 1, 10 * number + 11))
        assert len(of_session(child.pid)) > 1
        kill(child.pid)
        _, err = child.communicate(timeout=60)
        assert err.count("Traceback") == number  # the parent's alone
        patience = time.monotonic() + 20
        while of_session(child.pid) and time.monotonic() < patience:
            time.sleep(0.05)
        assert of_session(child.pid) == []
        assert len(list(home.glob("*.preparing"))) == 1
    with pytest.warns(FedNoRoWarning, match="10 of 250"):
        preparation.load(recipe(root, False), partial(decode_image, size=8))
    assert {
        name: data for name, data in content(home).items() if not name.endswith(".lock")
    } == content(tmp_path / "whole")


def test_a_decoder_of_the_wrong_shape_is_a_defect_not_a_skipped_image(
    root: Path, home: Path
) -> None:
    with pytest.raises(TypeError, match=r"decoded to uint8 \(9, 9, 3\), not to uint8 \(8, 8, 3\)"):
        preparation.load(recipe(root, False), partial(decode_image, size=9))


# Disks


def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", "2m")


def test_a_disk_that_fills_up_half_way_is_named_and_gone_on_with_when_there_is_room(
    root: Path, disk: Path, tmp_path: Path
) -> None:
    load(root, size=64, cache=str(tmp_path / "whole"))
    filler, steps = disk / "filler", []

    def fill(what: str, done: int, total: int) -> None:
        steps.append(done)
        if done == 4:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    with pytest.raises(
        UserError,
        match=r"needs 0\.1 MB in .*disk, 0\.0 MB are free; free some and run again to go on",
    ):
        Folder(str(root), size=64, cache=str(disk)).load(0, fill)
    assert 4 <= steps[-1] < 8
    filler.unlink()
    before = steps[-1]
    steps.clear()
    Folder(str(root), size=64, cache=str(disk)).load(0, lambda _, done, __: steps.append(done))
    assert steps[0] == before + 1
    assert content(disk) == content(tmp_path / "whole")


def test_a_disk_that_is_too_small_is_named_before_anything_is_decoded(
    root: Path, disk: Path
) -> None:
    with pytest.raises(UserError, match=r"needs 6\.3 MB in .*disk, 2\.\d MB are free"):
        load(root, size=512, cache=str(disk))
    assert list(disk.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits of the process are POSIX")
def test_a_file_larger_than_the_system_allows_is_an_error(root: Path, home: Path) -> None:
    child = python(
        "import resource, sys; from fednoro.data.sources.folder import Folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: Folder(sys.argv[1], size=224).load(0)\n"
        "except ValueError as error: print(type(error).__name__, error)",
        root,
    )
    out, err = child.communicate(timeout=60)
    assert out.startswith("UserError the image cache needs 1.2 MB in "), err
    assert not list(home.glob("*/manifest.json"))


def test_nothing_outside_the_cache_is_written(root: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    load(root, cache=str(tmp_path / "mine"))
    after = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "mine" not in path.parts
    }
    assert after == before


# prepare


def test_prepare_says_what_it_made_and_a_second_time_that_it_was_there(
    root: Path, home: Path
) -> None:
    (root / "naevus" / "broken.png").write_text("broken")
    steps: list[int] = []
    source = Folder(str(root), size=8)
    made = preparation.prepare(source, lambda _, done, __: steps.append(done))
    assert (made.existed, made.counts, steps[-1]) == (False, {"melanoma": 4, "naevus": 4}, 9)
    assert made.skipped == [{"path": "naevus/broken.png", "reason": "not a JPEG or PNG image"}]
    assert made.folder.parent == home
    assert made.bytes == (made.folder / "images.npy").stat().st_size
    assert made.seconds > 0
    before = content(home)
    again = preparation.prepare(source, lambda *_: pytest.fail("nothing is to be done"))
    assert (again.existed, again.folder, again.counts) == (True, made.folder, made.counts)
    assert content(home) == before


def test_prepare_writes_where_it_is_told(root: Path, home: Path, tmp_path: Path) -> None:
    made = preparation.prepare(
        Folder(str(root), size=8, cache=str(tmp_path / "one")), home=str(tmp_path / "other")
    )
    assert made.folder.parent == tmp_path / "other"
    assert (
        preparation.prepare(Folder(str(root), size=8, cache=str(tmp_path / "one"))).folder.parent
        == tmp_path / "one"
    )
    assert not home.exists()


def test_what_needs_no_preparation_says_so() -> None:
    with pytest.raises(UserError, match="Digits needs no preparation"):
        preparation.prepare(Digits())


def test_what_a_source_left_out_is_listed_before_what_could_not_be_read(
    root: Path, home: Path
) -> None:
    (root / "naevus" / "broken.png").write_text("broken")
    with pytest.warns(
        FedNoRoWarning, match=r"1 of 9 images could not be read; first: naevus/broken\.png"
    ):
        preparation.load(
            Recipe(
                open_tree(root), "x", tuple(Record(n, n[0], n) for n in open_tree(root).names),
                ("m", "n"), (8, 8, 3), {},
            ),
            partial(decode_image, size=8),
            omissions=[("ISIC_1", "no image")],
        )  # fmt: skip
    assert manifest(home)["skipped"] == [
        {"path": "ISIC_1", "reason": "no image"},
        {"path": "naevus/broken.png", "reason": "not a JPEG or PNG image"},
    ]
