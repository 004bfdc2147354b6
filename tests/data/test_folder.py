"""The user's own images: found, decoded, kept in a cache that is whole or
absent, and every mistake named.
"""

from __future__ import annotations

import json
import struct
import sys
import unicodedata
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache import preparation
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


def save(
    file: Path, colour: tuple[int, ...], size: tuple[int, int] = (12, 10), mode: str = "RGB"
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)
    return file


def write_csv(root: Path, *lines: str) -> str:
    file = root / "labels.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def load(root: Path, **options: object) -> preparation.Dataset:
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


@pytest.mark.parametrize(
    ("stored", "expected"), [(0, 0), (257 * 100, 100), (257 * 100 + 200, 101), (65535, 255)]
)
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


def test_a_csv_may_have_semicolons(root: Path) -> None:
    lines = [
        f"{name.relative_to(root).as_posix()};c{i % 2}"
        for i, name in enumerate(sorted(root.rglob("*.png")))
    ]
    (root / "labels.csv").write_text("\n".join(["path;label", *lines]))
    dataset = load(root, csv="labels.csv")
    assert len(dataset) == len(lines) > 1 and dataset.classes == ("c0", "c1")
    (root / "labels.csv").write_text("\n".join(["path;label", f"{lines[0]};x"]))
    with pytest.raises(
        UserError, match="line 2: 3 cells under 2 columns; put quotes around cells with semicolons"
    ):
        load(root, csv="labels.csv")


def test_grey_keeps_one_channel(root: Path) -> None:
    assert (
        decoded(root, "x.png", Image.new("RGB", (9, 9), (255, 255, 255)), grey=True) == 255
    ).all()
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
    smooth = (
        Image.effect_noise((40, 30), 60).resize((800, 600), Image.Resampling.BICUBIC).convert("RGB")
    )
    pixels = decoded(root, "x.jpg", smooth, size=32)
    full = np.asarray(
        Image.open(root / "melanoma" / "x.jpg").resize((32, 32), Image.Resampling.BILINEAR)
    )
    assert np.abs(pixels.astype(int) - full).mean() < 2


# Unreadable images


def bomb(side: int = 20_000) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


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
    with pytest.warns(
        FedNoRoWarning, match=r"1 of 5 images could not be read; first: gone\.png \(no such file\)"
    ):
        data = load(root, csv=write_csv(root, "path,label", *rows))
    assert data.labels.tolist() == [1, 1, 1, 0]
    save(root / "gone.png", RED)  # and is taken up when it is there
    assert len(load(root, csv=str(root / "labels.csv"))) == 5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["path,class", "naevus/0.png,a"],
            r"labels\.csv must have the columns path, label; label is not among its path,",
        ),
        (
            ["path|label", "naevus/0.png|a"],
            r"must have the columns path, label; path is not among its path\|label",
        ),
        ([""], r"must have the columns path, label; path is not among its none"),
        (["path,label"], r"labels\.csv lists no images"),
        (
            ["path,label", "naevus/0.png,a", "naevus/1.png, "],
            r"labels\.csv, line 3: label is empty",
        ),
        (["path,label", "naevus/0.png"], r"line 2: label is empty"),
        (["path,label", ",a"], r"line 2: path is empty"),
        (["path,label,id", "naevus/0.png,a,"], r"line 2: id is empty"),
        (["path,label,site", "naevus/0.png,a,"], r"line 2: site is empty"),
        (["path,label", "naevus/0.png,a,b"], r"line 2: 3 cells under 2 columns; put quotes"),
        (
            ["path,label,id", "naevus/0.png,a,x", "", "naevus/1.png,b,x"],
            r"labels\.csv, line 4: 'x' is listed on line 2 already",
        ),
        (
            ["path,label", "naevus/0.png,a", "naevus/0.png,a"],
            r"line 3: 'naevus/0\.png' is listed on line 2 already",
        ),
        (
            ["path,label,id", "naevus/0.png,a,x", "./naevus/0.png,b,y"],
            r"line 3: naevus/0\.png is labelled 'b', but 'a' on line 2",
        ),
        (["path,label", "../secret.png,a"], r"line 2: \.\./secret\.png leaves data\.path"),
        (["path,label", "naevus/../../secret.png,a"], r"line 2: .* leaves data\.path"),
        (["path,label", "/etc/secret.png,a"], r"line 2: /etc/secret\.png leaves data\.path"),
        (
            ["path,label", "naevus/0.png,a", "naevus/1.png,a"],
            r"has a single class, 'a'; at least two are needed",
        ),
    ],
)
def test_mistakes_in_a_csv_are_named_with_their_line(
    root: Path, home: Path, lines: list[str], message: str
) -> None:
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
    with pytest.raises(UserError, match=r"data\.path .*0\.png is neither a folder nor a zip"):
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


# What archives and people bring along


def zipped(root: Path, target: Path, top: str = "") -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            archive.write(file, top + file.relative_to(root).as_posix())
    return target


@pytest.mark.parametrize("top", ["", "Klinik 患者/"])
def test_a_zip_is_read_like_the_folder_it_was_made_of(
    root: Path, home: Path, tmp_path: Path, top: str
) -> None:
    expected = load(root)
    data = load(zipped(root, tmp_path / "images.zip", top))
    assert (data.ids, data.classes, data.labels.tolist()) == (
        expected.ids,
        expected.classes,
        expected.labels.tolist(),
    )
    assert np.array_equal(data.images, expected.images)
    csv = write_csv(root, "path,label", "naevus/0.png,a", "melanoma/0.png,b")
    for where in (csv, "labels.csv"):  # beside the zip, and in it
        assert load(zipped(root, tmp_path / "images.zip", top), csv=where).labels.tolist() == [0, 1]
    # nothing unpacked
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "images", "images.zip"]


def test_the_content_decides_not_the_extension(root: Path) -> None:
    save(root / "melanoma" / "0.png", RED).rename(root / "melanoma" / "really a png.jpg")
    save(root / "melanoma" / "x.jpg", RED, (64, 64)).rename(root / "melanoma" / "0.png")
    data = load(root)
    assert len(data) == 9
    assert np.abs(data.images[data.labels == 0].astype(int) - RED).max() < 5


def test_long_names_and_both_spellings_of_an_umlaut(root: Path) -> None:
    long = "n" * 251 + ".png"
    save(root / "naevus" / long, GREEN)
    save(root / "melanoma" / unicodedata.normalize("NFD", "für.png"), RED)
    rows = [
        f"naevus/{long},a",
        f"melanoma/{unicodedata.normalize('NFC', 'für.png')},b",
        "naevus/0.png,a",
    ]
    data = load(root, csv=write_csv(root, "path,label", *rows))
    assert data.labels.tolist() == [0, 1, 0]
    assert (data.images[1] == RED).all()
    assert len(load(root)) == 10
    with pytest.warns(
        FedNoRoWarning,
        match=r"1 of 4 images could not be read; first: x{4000}\.png \(no such file\)",
    ):
        load(root, csv=write_csv(root, "path,label", *rows, "x" * 4000 + ".png,a"))


def test_images_that_the_csv_does_not_name_are_not_used(root: Path, home: Path) -> None:
    load(root, csv=write_csv(root, "path,label", "naevus/0.png,a", "melanoma/0.png,b"))
    assert manifest(home)["counts"] == {"a": 1, "b": 1}
    skipped = manifest(home)["skipped"]
    assert len(skipped) == 6 and {entry["reason"] for entry in skipped} == {
        "the CSV does not list it"
    }


def test_other_files_among_the_images_are_listed(root: Path, home: Path) -> None:
    (root / "naevus" / "notes.txt").write_text("not an image", encoding="utf-8")
    load(root)
    assert manifest(home)["skipped"] == [
        {"path": "naevus/notes.txt", "reason": "not a JPEG, PNG or DICOM file"}
    ]


def test_images_without_an_ending_are_read_by_what_they_hold(root: Path) -> None:
    before = len(load(root))
    (root / "naevus" / "0.png").rename(root / "naevus" / "IM0001")
    assert len(load(root)) == before


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_in_circles_and_to_the_outside_are_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "naevus" / "again").symlink_to(root)
    (root / "naevus" / "self.png").symlink_to("self.png")
    (root / "melanoma" / "secret.png").symlink_to(save(tmp_path / "outside.png", RED))
    (root / "melanoma" / "copy.png").symlink_to("0.png")  # inside: a file like any other
    with pytest.warns(
        FedNoRoWarning, match=r"3 links in .*images are not followed.*first: melanoma/secret\.png"
    ):
        data = load(root)
    assert len(data) == 9
    assert "melanoma/copy.png" in (data.ids or ())


def test_a_bomb_in_a_zip_is_skipped_and_listed_and_a_way_out_of_it_is_refused(
    root: Path, home: Path, tmp_path: Path
) -> None:
    path = zipped(root, tmp_path / "images.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("naevus/bomb.png", bytes(20 * 2**20))
    with pytest.warns(
        FedNoRoWarning,
        match=r"1 of 9 images .* first: naevus/bomb\.png \(unpacks to 20\.0 MiB from",
    ):
        assert len(load(path)) == 8
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../outside.png", b"x")
    with pytest.raises(
        UserError, match=r"images\.zip holds '\.\./outside\.png', which leads outside it"
    ):
        load(path)
    assert not (tmp_path.parent / "outside.png").exists()


# DICOM


def dicom(file: Path, value: int) -> Path:
    """A CT slice of one value, shown by its own window from 0 to 200."""
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed (extra: dicom)")
    header = pydicom.Dataset()
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    header.SOPClassUID, header.SOPInstanceUID = (
        pydicom.uid.CTImageStorage,
        pydicom.uid.generate_uid(),
    )
    header.Rows = header.Columns = 16
    header.BitsAllocated, header.BitsStored, header.HighBit, header.PixelRepresentation = (
        16,
        16,
        15,
        1,
    )
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    header.WindowCenter, header.WindowWidth = 100, 200
    header.PixelData = np.full((16, 16), value, np.int16).tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    header.save_as(file, enforce_file_format=True)
    return file


def test_a_folder_of_dicom_files_among_others(root: Path) -> None:
    dicom(root / "melanoma" / "a.dcm", 200)
    dicom(root / "naevus" / "b.DICOM", 0)
    data = load(root)
    assert data.images.shape == (10, 8, 8, 3)
    by_id = dict(zip(data.ids or (), data.images, strict=True))
    assert (by_id["melanoma/a.dcm"] == 255).all()
    assert (by_id["naevus/b.DICOM"] == 0).all()
    assert load(root, grey=True).images.shape == (10, 8, 8, 1)


def test_windows_of_dicom_and_files_without_an_extension(tmp_path: Path, home: Path) -> None:
    for name in ("IM0001", "IM0002"):
        dicom(tmp_path / "images" / name, 80)
    csv = write_csv(tmp_path / "images", "path,label", "IM0001,a", "IM0002,b")
    assert (load(tmp_path / "images", csv=csv).images == 102).all()
    assert (load(tmp_path / "images", csv=csv, window="brain").images == 255).all()
    brain, subdural, bone = load(tmp_path / "images", csv=csv, window="triple").images[0, 0, 0]
    assert brain > subdural > bone
    with pytest.raises(UserError, match=r"data\.window triple has three channels"):
        load(tmp_path / "images", csv=csv, window="triple", grey=True)
    with pytest.raises(UserError, match=r"data\.window must be file, brain or triple, got 'lung'"):
        load(tmp_path / "images", csv=csv, window="lung")
