"""The user's own images: found, decoded, kept in a cache that is whole or absent, and every mistake named."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fednoro.data import cache
from fednoro.data.folder import Folder
from fednoro.types import FedNoRoWarning, UserError

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


def save(file: Path, colour: tuple[int, ...], size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)
    return file


def write_csv(root: Path, *lines: str) -> str:
    file = root / "labels.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def load(root: Path, **options: object) -> cache.Dataset:
    return Folder(str(root), **{"size": 8, **options}).load(0)  # type: ignore[arg-type]


def manifest(home: Path) -> dict[str, object]:
    (file,) = home.glob("*/manifest.json")
    return json.loads(file.read_text("utf-8"))  # type: ignore[no-any-return]


# Class folders


def test_class_folders_become_sorted_classes_and_ids(root: Path) -> None:
    data = load(root)
    assert data.classes == ("melanoma", "naevus")
    assert data.ids == tuple(f"{c}/{i}.png" for c in ("melanoma", "naevus") for i in range(4))
    assert data.labels.tolist() == [0] * 4 + [1] * 4
    assert data.images.shape == (8, 8, 8, 3)
    assert (data.images[0] == RED).all()
    assert (data.images[7] == GREEN).all()
    assert data.sites is None
    assert data.groups is None


def test_nested_folders_and_any_case_count_but_hidden_and_other_files_do_not(root: Path) -> None:
    save(root / "naevus" / "2019" / "deep.PNG", GREEN)
    save(root / "naevus" / "photo.JpEg", GREEN)
    save(root / "naevus" / "._photo.jpg", GREEN)
    save(root / "naevus" / ".thumbnails" / "photo.jpg", GREEN)
    save(root / ".trash" / "photo.jpg", GREEN)
    save(root / "loose.jpg", GREEN)
    (root / "naevus" / "notes.txt").write_text("no image")
    (root / "empty").mkdir()
    data = load(root)
    assert data.classes == ("melanoma", "naevus")
    assert [i for i in data.ids or () if i.startswith("n")] == [
        "naevus/0.png",
        "naevus/1.png",
        "naevus/2.png",
        "naevus/2019/deep.PNG",
        "naevus/3.png",
        "naevus/photo.JpEg",
    ]


def test_names_outside_ascii(tmp_path: Path, home: Path) -> None:
    root = tmp_path / "Ärzte 患者"
    save(root / "gutartig ü" / "bild ñ.png", GREEN)
    save(root / "悪性" / "写真.png", RED)
    data = load(root)
    assert data.classes == ("gutartig ü", "悪性")
    assert data.ids == ("gutartig ü/bild ñ.png", "悪性/写真.png")
    assert load(root).ids == data.ids  # and from the cache


def test_classes_may_be_fixed_so_that_sites_agree_on_their_numbers(root: Path) -> None:
    data = load(root, classes=("naevus", "angioma", "melanoma"))
    assert data.classes == ("naevus", "angioma", "melanoma")
    assert data.labels.tolist() == [2] * 4 + [0] * 4
    with pytest.raises(UserError, match=r"class 'melanoma' .* is not among data\.classes"):
        load(root, classes=("naevus", "angioma"))
    with pytest.raises(UserError, match="two or more different names"):
        load(root, classes=("naevus", "naevus"))


# Decoding


def decoded(root: Path, name: str, image: Image.Image, **options: object) -> np.ndarray:
    file = root / "melanoma" / name
    image.save(file)
    data = load(root, **options)
    assert data.ids is not None
    return np.asarray(data.images[data.ids.index(f"melanoma/{name}")])


def test_exif_orientation_is_applied(root: Path) -> None:
    image = Image.new("RGB", (32, 32), RED)
    image.paste(GREEN, (0, 0, 32, 16))  # green above; orientation 3 is upside down
    exif = image.getexif()
    exif[0x0112] = 3
    file = root / "melanoma" / "turned.jpg"
    image.save(file, exif=exif, quality=95)
    data = load(root)
    pixels = data.images[(data.ids or ()).index("melanoma/turned.jpg")].astype(int)
    assert np.abs(pixels[1, 4] - RED).max() < 30
    assert np.abs(pixels[6, 4] - GREEN).max() < 30


@pytest.mark.parametrize(("stored", "expected"), [(0, 0), (257 * 100, 100), (257 * 100 + 200, 101), (65535, 255)])
def test_sixteen_bits_are_scaled_to_eight(root: Path, stored: int, expected: int) -> None:
    image = Image.fromarray(np.full((8, 8), stored, np.uint16))
    assert (decoded(root, "x.png", image, grey=True) == expected).all()
    assert (decoded(root, "x.png", image) == expected).all()


def test_transparent_parts_are_black_whatever_colour_hides_there(root: Path) -> None:
    image = Image.new("RGBA", (8, 8), (*GREEN, 0))
    image.paste((*RED, 255), (0, 0, 8, 4))
    pixels = decoded(root, "x.png", image)
    assert (pixels[:3] == RED).all()
    assert (pixels[5:] == 0).all()


def test_palette_images_have_their_colours(root: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, *RED])
    assert (decoded(root, "x.png", image) == RED).all()
    image.info["transparency"] = bytes([255, 0])
    assert (decoded(root, "y.png", image) == 0).all()


def test_cmyk_jpeg_is_converted(root: Path) -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow: red
    pixels = decoded(root, "x.jpg", image).astype(int)
    assert np.abs(pixels - (255, 0, 0)).max() < 12


def test_grey_keeps_one_channel(root: Path) -> None:
    assert (decoded(root, "x.png", Image.new("RGB", (9, 9), (255, 255, 255)), grey=True) == 255).all()
    assert load(root, grey=True).images.shape[-1] == 1


def test_center_keeps_proportions_and_resize_keeps_everything(root: Path) -> None:
    wide = Image.new("RGB", (48, 16), RED)
    wide.paste(GREEN, (16, 0, 32, 16))
    middle = decoded(root, "wide.png", wide, crop="center")
    assert (middle[:, 1:-1] == GREEN).all()  # the outermost columns blend with what was cut off
    stretched = decoded(root, "wide.png", wide, crop="resize", size=12)
    assert (stretched[:, 0] == RED).all()
    assert (stretched[:, 6] == GREEN).all()
    assert (stretched[:, 11] == RED).all()


def test_a_large_jpeg_is_close_to_its_full_decoding(root: Path) -> None:
    smooth = Image.effect_noise((40, 30), 60).resize((800, 600), Image.Resampling.BICUBIC).convert("RGB")
    pixels = decoded(root, "x.jpg", smooth, size=32)
    full = np.asarray(Image.open(root / "melanoma" / "x.jpg").resize((32, 32), Image.Resampling.BILINEAR))
    assert np.abs(pixels.astype(int) - full).mean() < 2


# Unreadable images


def bomb(side: int = 20_000) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_unreadable_images_are_skipped_listed_and_warned_about_once(root: Path, home: Path) -> None:
    big = save(root / "melanoma" / "cut.jpg", RED, (200, 200))
    big.write_bytes(big.read_bytes()[:-300])
    (root / "melanoma" / "a.png").write_bytes(b"")
    (root / "naevus" / "2a.png").write_text("<html>not found</html>")
    (root / "naevus" / "bomb.png").write_bytes(bomb())
    with pytest.warns(FedNoRoWarning) as caught:
        data = load(root)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(
        "4 of 12 images could not be read; first: melanoma/a.png (the file is empty); full list in "
    )
    assert message.endswith("manifest.json")
    assert data.ids == tuple(f"{c}/{i}.png" for c in ("melanoma", "naevus") for i in range(4))
    assert (data.images[data.labels == 0] == RED).all()
    assert (data.images[data.labels == 1] == GREEN).all()
    skipped = {entry["path"]: entry["reason"] for entry in manifest(home)["skipped"]}  # type: ignore[attr-defined]
    assert skipped["naevus/2a.png"] == "not a JPEG or PNG image"
    assert "truncated" in skipped["melanoma/cut.jpg"]
    assert "decompression bomb" in skipped["naevus/bomb.png"]
    with pytest.warns(FedNoRoWarning, match="4 of 12"):  # a later run must not lose them silently
        load(root)


def test_a_class_without_any_readable_image_is_an_error(root: Path, home: Path) -> None:
    for i in range(4):
        (root / "naevus" / f"{i}.png").write_text("broken")
    with pytest.raises(UserError, match=r"no image of class 'naevus' .* first: naevus/0\.png"):
        load(root)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("broken", [5, 8])
def test_more_than_half_unreadable_is_an_error(root: Path, home: Path, broken: int) -> None:
    for file in sorted(root.rglob("*.png"), key=lambda f: f.name)[:broken]:
        file.write_text("broken")
    with pytest.raises(UserError, match=f"{broken} of 8 images in .* could not be read; first: "):
        load(root)
    assert list(home.iterdir()) == []


# CSV


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_gives_labels_ids_sites_and_groups(root: Path, encoding: str) -> None:
    (root / "labels.csv").write_text(
        "age,path,label,site,id,group\n"
        "41,naevus/0.png,gutartig ü,Graz,a,p1\n"
        '"42",./melanoma//0.png,"bös, artig",Wien,b,\n'
        "\n"
        "43,naevus/1.png,gutartig ü,Graz,c,p1\n",
        encoding=encoding,
    )
    data = load(root, csv="labels.csv")  # found in data.path
    assert data.classes == ("bös, artig", "gutartig ü")
    assert data.labels.tolist() == [1, 0, 1]
    assert data.ids == ("a", "b", "c")
    assert data.sites == ("Graz", "Wien", "Graz")
    assert data.groups == ("p1", "b", "p1")  # an image without a group is a group of its own
    assert (data.images[1] == RED).all()


def test_csv_without_optional_columns_uses_paths_as_ids(root: Path) -> None:
    data = load(root, csv=write_csv(root, "label,path", "b,naevus/0.png", "a,melanoma/0.png"))
    assert data.ids == ("naevus/0.png", "melanoma/0.png")
    assert data.sites is None
    assert data.groups is None


def test_a_missing_file_in_the_csv_is_skipped_and_listed(root: Path, home: Path) -> None:
    rows = [f"naevus/{i}.png,n" for i in range(3)] + ["gone.png,n", "melanoma/0.png,m"]
    with pytest.warns(FedNoRoWarning, match=r"1 of 5 images could not be read; first: gone\.png \(no such file\)"):
        data = load(root, csv=write_csv(root, "path,label", *rows))
    assert data.labels.tolist() == [1, 1, 1, 0]
    save(root / "gone.png", RED)  # and is taken up when it is there
    assert len(load(root, csv=str(root / "labels.csv"))) == 5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,class", "naevus/0.png,a"], r"labels\.csv must have the columns path and label, got path, class"),
        (["path;label", "naevus/0.png;a"], r"must have the columns path and label, got path;label"),
        ([""], r"must have the columns path and label, got nothing"),
        (["path,label"], r"labels\.csv lists no images"),
        (["path,label", "naevus/0.png,a", "naevus/1.png, "], r"labels\.csv, line 3: label is empty"),
        (["path,label", "naevus/0.png"], r"line 2: label is empty"),
        (["path,label", ",a"], r"line 2: path is empty"),
        (["path,label,id", "naevus/0.png,a,"], r"line 2: id is empty"),
        (["path,label,site", "naevus/0.png,a,"], r"line 2: site is empty"),
        (["path,label", "naevus/0.png,a,b"], r"line 2: 3 cells under 2 columns; put quotes"),
        (
            ["path,label,id", "naevus/0.png,a,x", "", "naevus/1.png,b,x"],
            r"labels\.csv, line 4: 'x' is listed on line 2 already",
        ),
        (["path,label", "naevus/0.png,a", "naevus/0.png,a"], r"line 3: 'naevus/0\.png' is listed on line 2 already"),
        (
            ["path,label,id", "naevus/0.png,a,x", "./naevus/0.png,b,y"],
            r"line 3: naevus/0\.png is labelled 'b', but 'a' on line 2",
        ),
        (["path,label", "../secret.png,a"], r"line 2: \.\./secret\.png leaves data\.path"),
        (["path,label", "naevus/../../secret.png,a"], r"line 2: .* leaves data\.path"),
        (["path,label", "/etc/secret.png,a"], r"line 2: /etc/secret\.png leaves data\.path"),
        (["path,label", "naevus/0.png,a", "naevus/1.png,a"], r"has a single class, 'a'; at least two are needed"),
    ],
)
def test_mistakes_in_a_csv_are_named_with_their_line(root: Path, home: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(root, csv=write_csv(root, *lines))
    assert "\n" not in str(caught.value)
    assert not home.exists()


def test_a_csv_that_is_not_there_or_not_utf8_is_an_error(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.csv nowhere\.csv does not exist"):
        load(root, csv="nowhere.csv")
    (root / "labels.csv").write_bytes("path,label\nä.png,a\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"labels\.csv is not UTF-8 .* save it as UTF-8"):
        load(root, csv="labels.csv")
    (root / "labels.csv").write_bytes(b"path,label\n" + b"x" * 200_000 + b",a\n")
    with pytest.raises(UserError, match=r"labels\.csv, line 2: field larger"):
        load(root, csv="labels.csv")


# Paths and options


def test_paths_that_hold_no_classes_are_errors(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path .*nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"data\.path .*0\.png is not a folder"):
        load(root / "naevus" / "0.png")
    with pytest.raises(UserError, match=r"no images in .*naevus; expected CLASS/IMAGE"):
        load(root / "naevus")  # images, but in no class folder
    save(tmp_path / "single" / "only" / "0.png", RED)
    with pytest.raises(UserError, match="has a single class, 'only'"):
        load(tmp_path / "single")


def test_options_out_of_range_are_named(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.size must be in \[8, 2048\], got 4"):
        load(root, size=4)
    with pytest.raises(UserError, match=r"data\.crop must be resize or center, got 'middle'"):
        load(root, crop="middle")


# The cache


def test_the_second_load_decodes_nothing(root: Path, home: Path) -> None:
    first = load(root)
    for file in root.rglob("*.png"):  # same size and time, other content: only decoding would notice
        stat = file.stat()
        file.write_bytes(b"x" * stat.st_size)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = load(root)
    assert isinstance(second.images, np.memmap)
    assert not second.images.flags.writeable
    assert np.array_equal(first.images, second.images)
    assert (first.ids, first.classes, first.labels.tolist()) == (second.ids, second.classes, second.labels.tolist())
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
    assert found["settings"] == {"size": 8, "crop": "resize", "grey": False}
    assert found["skipped"] == []
    assert len(found["files"]) == 9  # type: ignore[arg-type]


def test_progress_counts_every_image_in_order(root: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    Folder(str(root), size=8).load(0, lambda *step: steps.append(step))
    assert steps == [("preparing images", i + 1, 8) for i in range(8)]
    steps.clear()
    Folder(str(root), size=8).load(0, lambda *step: steps.append(step))
    assert steps == []


def test_more_images_than_are_decoded_ahead_stay_in_order(tmp_path: Path, home: Path) -> None:
    for i in range(250):
        file = tmp_path / "images" / "ab"[i % 2] / f"{i:03}.png"
        save(file, (i, i, i), (200, 200) if i % 10 == 0 else (8, 8))
        if i % 25 == 1:
            file.write_text("broken")
    with pytest.warns(FedNoRoWarning, match="10 of 250"):
        data = load(tmp_path / "images")
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
        lambda folder: (folder / "images.npy").write_bytes(b"x" * (folder / "images.npy").stat().st_size),
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
def test_a_damaged_cache_is_named_with_the_way_out(root: Path, home: Path, damage: Callable[[Path], None]) -> None:
    load(root)
    (folder,) = home.iterdir()
    damage(folder)
    with pytest.raises(UserError, match=f"the image cache {folder} is damaged .*; delete it to prepare again"):
        load(root)


def test_verify_finds_a_single_flipped_bit(root: Path, home: Path) -> None:
    load(root)
    (folder,) = home.iterdir()
    cache.verify(folder)
    content = bytearray((folder / "images.npy").read_bytes())
    content[-5] ^= 1
    (folder / "images.npy").write_bytes(content)
    load(root)  # the quick check on opening does not read everything
    with pytest.raises(UserError, match=r"damaged \(images.npy does not match its checksum\)"):
        cache.verify(folder)


def test_an_unwritable_cache_is_an_error_with_the_way_out(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot write the image cache in .*; choose another folder with data\.cache or"
    ):
        load(root, cache=str(tmp_path / "file" / "cache"))


def test_too_little_room_is_said_before_anything_is_decoded(
    root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000))
    steps: list[int] = []
    with pytest.raises(UserError, match=r"needs 2\.4 MB in .*cache, 0\.5 MB are free; choose another folder"):
        Folder(str(root), size=316).load(0, lambda _, done, __: steps.append(done))
    assert steps == []
    assert list(home.iterdir()) == []


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of the process are POSIX")
def test_running_out_of_room_half_way_is_an_error_and_leaves_nothing(root: Path, home: Path) -> None:
    child = python(
        "import resource, sys; from fednoro.data.folder import Folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: Folder(sys.argv[1], size=224).load(0)\n"
        "except ValueError as error: print(type(error).__name__, error)",
        root,
    )
    out, err = child.communicate(timeout=60)
    assert out.startswith("UserError the image cache needs 1.2 MB in "), err
    assert list(home.iterdir()) == []


SLOW_LOAD = (
    "import sys, time; from fednoro.data.folder import Folder\n"
    "def slowly(what, done, total): print(done, flush=True); time.sleep(float(sys.argv[2]))\n"
    "data = Folder(sys.argv[1], size=8).load(0, slowly)\n"
    "print('images', len(data), data.images.sum())"
)


def test_a_killed_preparation_leaves_no_cache_and_no_obstacle(root: Path, home: Path) -> None:
    child = python(SLOW_LOAD, root, 60)
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    assert [path.suffix for path in sorted(home.iterdir())] == [".lock", ".preparing"]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    save(root / "naevus" / "new.png", GREEN)  # even another fingerprint clears the remains away
    assert len(load(root)) == 9
    (folder,) = home.iterdir()
    assert (folder / "images.npy").exists()
    cache.verify(folder)


def test_two_processes_at_once_share_one_preparation(root: Path, home: Path) -> None:
    first = python(SLOW_LOAD, root, 0.15)
    assert first.stdout is not None
    assert first.stdout.readline() == "1\n"
    data = load(root)  # waits for the other one
    out, err = first.communicate(timeout=60)
    assert out.splitlines()[-1] == f"images 8 {data.images.sum()}", err
    (folder,) = home.iterdir()
    cache.verify(folder)


def test_a_living_preparation_of_other_images_is_left_alone(root: Path, home: Path, tmp_path: Path) -> None:
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


def test_nothing_but_its_own_remains_is_swept(root: Path, home: Path) -> None:
    keep = [home / "work.preparing", home / "images-0123456789abcdef"]
    for folder in keep:
        folder.mkdir(parents=True)
    load(root)
    assert all(folder.is_dir() for folder in keep)


def test_a_failing_progress_bar_leaves_nothing_behind(root: Path, home: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Folder(str(root), size=8).load(0, stop)
    assert list(home.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(root)) == 8
