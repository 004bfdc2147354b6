"""ISIC 2019 from its official archive: folder or zip, lesions, centres, partial
copies, and every mistake named.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import fednoro
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.dataset import Dataset
from fednoro.data.sources.isic2019 import PUBLISHED_COUNTS, Isic2019
from fednoro.experiment.config.configuration import resolve

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
COLUMNS = (*CLASSES, "UNK")
INPUT, LABELS, METADATA = (
    f"ISIC_2019_Training_{name}" for name in ("Input", "GroundTruth.csv", "Metadata.csv")
)
REAL = Path(os.environ.get("FEDNORO_DATA", Path(__file__).parents[3] / "shared" / "data"))


def image(file: Path, label: str = "NV", number: int = 0, size: tuple[int, int] = (24, 16)) -> None:
    """A JPEG whose colour tells its class."""
    file.parent.mkdir(parents=True, exist_ok=True)
    c = COLUMNS.index(label)
    Image.new(
        "RGB", size, (255 * (c & 1), 255 * (c >> 1 & 1), 200 * (c >> 2 & 1) + number % 50)
    ).save(file)


def write_labels(root: Path, labels: dict[str, str]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    one_hot = {
        label: ",".join("1.0" if column == label else "0.0" for column in COLUMNS)
        for label in COLUMNS
    }
    rows = [f"{name},{one_hot[label]}" for name, label in labels.items()]
    (root / LABELS).write_text(
        "\n".join([f"image,{','.join(COLUMNS)}", *rows]) + "\n", encoding="utf-8"
    )


def write_metadata(root: Path, lesions: dict[str, str]) -> None:
    rows = [f"{name},55.0,anterior torso,{lesion},female" for name, lesion in lesions.items()]
    (root / METADATA).write_text(
        "\n".join(["image,age_approx,anatom_site_general,lesion_id,sex", *rows]) + "\n"
    )


LABEL_OF = {
    f"ISIC_{i:07d}{'_downsampled' if i % 5 == 0 else ''}": label
    for i, label in enumerate(sorted(CLASSES) * 4)
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """32 images in the official layout, some of them reduced; two per lesion,
    every fourth lesion unknown.
    """
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "isic"
    for number, (name, label) in enumerate(LABEL_OF.items()):
        image(root / INPUT / f"{name}.jpg", label, number)
    (root / INPUT / "LICENSE.txt").write_text("CC BY-NC")
    (root / INPUT / "ATTRIBUTION.txt").write_text("…")
    write_labels(root, LABEL_OF)
    write_metadata(
        root, {name: "" if i % 8 == 7 else f"BCN_{i // 2}" for i, name in enumerate(LABEL_OF)}
    )
    return root


def load(root: Path, **options: Any) -> Dataset:
    return Isic2019(str(root), **{"size": 8, **options}).load(0)


def loaded(root: Path, **options: Any) -> tuple[Dataset, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = load(root, **options)
    assert all(issubclass(warning.category, FedNoRoWarning) for warning in caught)
    return data, [str(warning.message) for warning in caught]


def mistake(root: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        load(root, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def manifest(root: Path) -> dict[str, Any]:
    (file,) = (root.parent / "cache").glob("*/manifest.json")
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def zipped(folder: Path) -> None:
    shutil.make_archive(str(folder), "zip", folder.parent, folder.name)
    shutil.rmtree(folder)


def test_classes_have_the_official_order_and_the_published_counts() -> None:
    assert tuple(PUBLISHED_COUNTS) == CLASSES
    assert sum(PUBLISHED_COUNTS.values()) == 25331


def check(data: Dataset) -> None:
    assert data.classes == CLASSES
    assert data.ids == tuple(LABEL_OF)
    assert [CLASSES[y] for y in data.labels] == list(LABEL_OF.values())
    assert data.images.shape == (32, 8, 8, 3)
    for pixels, y in zip(data.images, data.labels, strict=True):
        red, green, blue = pixels.astype(int).mean(axis=(0, 1)) > 127
        assert red + 2 * green + 4 * blue == y
    assert data.groups == tuple(
        name if i % 8 == 7 else f"BCN_{i // 2}" for i, name in enumerate(LABEL_OF)
    )
    assert data.sites is None


def test_the_official_layout_as_folders(root: Path) -> None:
    data, messages = loaded(root)
    check(data)
    assert len(messages) == 1  # the counts: nothing was left out
    assert manifest(root)["skipped"] == []


def test_images_may_stay_in_their_zip(root: Path) -> None:
    zipped(root / INPUT)
    check(load(root))


def test_everything_may_be_in_one_zip_or_one_level_down(root: Path) -> None:
    check(load(root.parent / "isic" / ".."))
    zipped(root)
    check(load(root.with_suffix(".zip")))


def test_path_may_be_the_zip_or_folder_of_images_with_the_tables_beside_it(root: Path) -> None:
    check(load(root / INPUT))
    zipped(root / INPUT)
    check(load(root / f"{INPUT}.zip"))


def test_a_zip_in_a_zip_is_named(root: Path) -> None:
    zipped(root / INPUT)
    zipped(root)
    assert "a zip in a zip: unpack the outer one" in mistake(root.with_suffix(".zip"))


def test_a_reduced_image_is_found_whichever_name_it_goes_by(root: Path) -> None:
    for file in list((root / INPUT).glob("*_downsampled.jpg")):
        file.rename(file.with_name(file.name.replace("_downsampled", "")))
    check(load(root))
    write_metadata(root, {name.removesuffix("_downsampled"): "same" for name in LABEL_OF})
    assert set(load(root).groups or ()) == {"same"}


def test_without_metadata_there_are_no_groups(root: Path) -> None:
    (root / METADATA).unlink()
    assert load(root).groups is None


def test_test_images_of_the_challenge_are_not_taken_for_training_images(root: Path) -> None:
    image(root / "ISIC_2019_Test_Input" / "ISIC_0099999.jpg")
    data, messages = loaded(root)
    check(data)
    assert len(messages) == 1


@pytest.mark.parametrize("column", ["image", "image_id"])
def test_centres_make_sites_and_blanks_are_unknown(root: Path, column: str) -> None:
    sites = root / "centres.csv"
    centre = {name: str(i % 3) if i % 3 else "" for i, name in enumerate(LABEL_OF) if i < 30}
    sites.write_text(
        "\n".join(
            [f"{column},fold,flamby_center", *(f"{name},train,{c}" for name, c in centre.items())]
        )
    )
    data = load(root, sites=str(sites))
    assert data.sites == tuple(centre.get(name) or "unknown" for name in LABEL_OF)


def test_a_table_of_centres_without_its_columns_is_named(root: Path) -> None:
    sites = root / "centres.csv"
    assert f"cannot read {sites}" in mistake(root, sites=str(sites))
    sites.write_text("image,center\nISIC_0000001,2\n")
    assert "flamby_center is not among its image, center" in mistake(root, sites=str(sites))
    sites.write_text("name,flamby_center\nISIC_0000001,2\n")
    assert "must have the columns image and flamby_center" in mistake(root, sites=str(sites))


def test_crop_keeps_proportions_and_resize_does_not(root: Path) -> None:
    name = next(iter(LABEL_OF))
    wide = Image.new("RGB", (64, 16), "black")
    wide.paste("white", (0, 0, 16, 16))
    wide.save(root / INPUT / f"{name}.jpg")
    assert load(root).images[0, :, 0].min() > 200
    assert load(root, crop="center").images[0].max() < 60
    assert mistake(root, crop="left") == "data.crop must be resize or center, got 'left'"


# What does not fit together


def test_counts_other_than_the_published_are_reported_in_one_line(root: Path) -> None:
    _, (message,) = loaded(root)
    assert f"{LABELS} has 32 images; the published one has 25,331" in message
    assert "MEL 4 (4,522), NV 4 (12,875)" in message and "SCC 4 (628)" in message


def test_rows_labelled_unk_are_left_out_and_listed(root: Path) -> None:
    first = next(iter(LABEL_OF))
    write_labels(root, {**LABEL_OF, first: "UNK"})
    data, _ = loaded(root)
    assert data.ids == tuple(LABEL_OF)[1:] and data.classes == CLASSES
    reason = "labelled UNK, which is none of the eight classes"
    assert manifest(root)["skipped"] == [{"path": f"{first}.jpg", "reason": reason}]


def test_labels_without_image_and_images_without_label_are_left_out_and_counted(root: Path) -> None:
    absent = list(LABEL_OF)[:20]
    for name in absent:
        (root / INPUT / f"{name}.jpg").unlink()
    image(root / INPUT / "ISIC_0088888.jpg")
    data, messages = loaded(root)
    assert data.ids == tuple(LABEL_OF)[20:]
    expected = (
        "20 of 32 labelled images are not there and 1 images there have no label; both are left out"
    )
    assert [message for message in messages if expected in message]
    skipped = {entry["path"]: entry["reason"] for entry in manifest(root)["skipped"]}
    assert skipped == {
        **{f"{name}.jpg": "labelled, but not there" for name in absent},
        f"{INPUT}/ISIC_0088888.jpg": "has no label",
    }


def test_absent_images_do_not_count_as_unreadable_ones(root: Path) -> None:
    for name in list(LABEL_OF)[:16]:
        (root / INPUT / f"{name}.jpg").unlink()
    for name in list(LABEL_OF)[16:24]:  # half of those that are there, a quarter of all
        (root / INPUT / f"{name}.jpg").write_bytes(b"")
    data, messages = loaded(root)
    assert data.ids == tuple(LABEL_OF)[24:]
    assert [
        message for message in messages if message.startswith("8 of 16 images could not be read")
    ]
    (root / INPUT / f"{list(LABEL_OF)[24]}.jpg").write_bytes(b"")
    assert mistake(root).startswith(f"9 of 16 images in {root} could not be read")


def test_a_class_that_vanishes_and_an_archive_without_images_are_refused(root: Path) -> None:
    for name, label in LABEL_OF.items():
        if label == "DF":
            (root / INPUT / f"{name}.jpg").unlink()
    assert "no image of class DF is in" in mistake(root)
    write_labels(root, {"ISIC_7777777": "NV"})
    assert mistake(root) == f"none of the 1 labelled images is in {root}; first: ISIC_7777777.jpg"
    shutil.rmtree(root / INPUT)
    assert mistake(root) == f"no images in {root}; expected {INPUT}/ISIC_*.jpg or {INPUT}.zip"
    (root / LABELS).unlink()
    assert mistake(root).startswith(f"no {LABELS} in {root} or beside it")
    assert mistake(root / "nowhere") == f"data.path {root / 'nowhere'} does not exist"


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        ("0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0", "a 1 for one class"),
        ("1.0,1.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0", "a 1 for one class"),
        ("1.0,0.5,0.0,0.0,0.0,0.0,0.0,0.0,0.0", "a 1 for one class"),
        ("1.0,nan,0.0,0.0,0.0,0.0,0.0,0.0,0.0", "a 1 for one class"),
        ("yes,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0", "a 1 for one class"),
        ("1.0", "a 1 for one class"),
        ("1.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0", "11 cells under 10 columns"),
    ],
)
def test_rows_that_are_not_one_hot_are_named_by_line(root: Path, cells: str, what: str) -> None:
    with (root / LABELS).open("a") as file:
        file.write(f"ISIC_0000099,{cells}\n")
    message = mistake(root)
    assert f"{root / LABELS}, line 34: " in message and what in message


def test_duplicate_ids_missing_columns_and_other_encodings_are_named(root: Path) -> None:
    text = (root / LABELS).read_text()
    again = text.splitlines()[3]
    (root / LABELS).write_text(f"{text}{again}\n")
    assert "line 34: 'ISIC_0000002' is listed on line 4 already" in mistake(root)
    (root / LABELS).write_text(text.replace("VASC", "VAS"))
    assert "VASC is not among its image, MEL" in mistake(root)
    (root / LABELS).write_text(text + ",1.0\n")
    assert "line 34: image is empty" in mistake(root)
    (root / LABELS).write_text(text, encoding="utf-16")
    assert "is not UTF-8" in mistake(root)
    (root / LABELS).write_text("\ufeff" + text.replace("\n", "\r\n"), encoding="utf-8")
    check(load(root))


# Training


def test_the_preset_reads_the_archive() -> None:
    assert resolve("isic2019", ["data.path=here"]).data == Isic2019("here", size=224)


def test_a_run_from_the_archive(root: Path) -> None:
    run = fednoro.run(
        {
            "data": {"name": "isic2019", "path": str(root), "size": 16},
            "partition": {"name": "iid", "clients": 3},
            "noise": "none",
            "model": {"name": "cnn", "width": 4},
            "method": "fedavg",
            "train": {"rounds": 2, "epochs": 1, "batch": 8},
            "out": str(root.parent / "runs"),
            "device": "cpu",
        }
    )
    assert len(run.bacc) == 2 and run.federation.classes == CLASSES


@pytest.mark.skipif(
    not (REAL / "isic2019_labels.csv").exists(),
    reason=f"no isic2019_labels.csv in {REAL}; set FEDNORO_DATA",
)
def test_the_real_labels_with_images_for_a_sample_of_them(tmp_path: Path) -> None:
    with (REAL / "isic2019_labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    label_of = {row["image_id"]: row["class"] for row in rows}
    write_labels(tmp_path / "isic", label_of)
    chosen = [
        name for c in CLASSES for name in [n for n, label in label_of.items() if label == c][:8]
    ]
    with zipfile.ZipFile(tmp_path / "isic" / f"{INPUT}.zip", "w") as archive:
        for name in chosen:
            image(tmp_path / "one.jpg", label_of[name])
            archive.write(tmp_path / "one.jpg", f"{INPUT}/{name}.jpg")
    options = {"sites": str(REAL / "isic2019_labels.csv"), "cache": str(tmp_path / "cache")}
    data, messages = loaded(tmp_path / "isic", **options)
    assert len(data) == 64 and set(data.ids or ()) == set(chosen)
    assert [CLASSES[y] for y in data.labels] == [label_of[name] for name in data.ids or ()]
    assert "unknown" in set(data.sites or ()) <= {*"012345", "unknown"}
    # the real counts are the published ones
    assert not [message for message in messages if "published" in message]
    assert [
        message
        for message in messages
        if "25,267 of 25,331 labelled images are not there" in message
    ]
    assert len(manifest(tmp_path / "isic")["skipped"]) == 25267
