"""HAM10000 in its layouts: folders, zips, one zip with a CSV; seven or
eight classes; lesions and sites.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fednoro
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache.archive import open_tree
from fednoro.data.dataset import Dataset
from fednoro.data.sources.dermoscopy import Zips
from fednoro.data.sources.ham10000 import PUBLISHED_COUNTS, Ham10000
from fednoro.experiment.config.configuration import resolve

SEVEN = ("mel", "nv", "bcc", "akiec", "bkl", "df", "vasc")
EIGHT = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
PARTS = ("HAM10000_images_part_1", "HAM10000_images_part_2")
DX_OF = {f"ISIC_{24306 + i:07d}": SEVEN[i % 7] for i in range(28)}
LESION_OF = {name: "" if i == 5 else f"HAM_{i // 7 // 2}_{i % 7}" for i, name in enumerate(DX_OF)}
REAL = Path(os.environ.get("FEDNORO_DATA", Path(__file__).parents[3] / "shared" / "data"))


def colour(label: str) -> tuple[int, int, int]:
    c = SEVEN.index(label)
    return 255 * (c & 1), 255 * (c >> 1 & 1), 255 * (c >> 2 & 1)


def write_metadata(file: Path, delimiter: str = ",", dataset: bool = True, **changes: str) -> None:
    """As the archive has it; newer versions with the column `dataset`."""
    header = ["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization"]
    rows = [
        [LESION_OF[name], name, changes.get(name, dx), "histo", "80.0", "male", "scalp"]
        for name, dx in DX_OF.items()
    ]
    if dataset:
        header, rows = (
            [*header, "dataset"],
            [[*row, f"vidir_{i % 2}"] for i, row in enumerate(rows)],
        )
    file.write_text(
        "\n".join(delimiter.join(row) for row in [header, *rows]) + "\n", encoding="utf-8"
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """28 images in two parts with the metadata beside them."""
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "ham"
    for i, (name, dx) in enumerate(DX_OF.items()):
        folder = root / PARTS[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 45), colour(dx)).save(folder / f"{name}.jpg")
    write_metadata(root / "HAM10000_metadata.csv")
    return root


def load(root: Path, **options: Any) -> Dataset:
    return Ham10000(str(root), **{"size": 8, **options}).load(0)


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


def check(data: Dataset) -> None:
    assert data.classes == SEVEN
    assert data.ids == tuple(DX_OF)
    assert [SEVEN[y] for y in data.labels] == list(DX_OF.values())
    assert data.images.shape == (28, 8, 8, 3)
    for pixels, y in zip(data.images, data.labels, strict=True):
        assert np.abs(pixels.astype(int) - colour(SEVEN[y])).max() < 10
    assert data.groups == tuple(lesion or name for name, lesion in LESION_OF.items())
    assert data.sites == tuple(f"vidir_{i % 2}" for i in range(28))


def zipped(folder: Path) -> None:
    """A zip of a folder's content, as the archive's parts are: without the folder."""
    shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)


def test_published_counts_add_up() -> None:
    assert tuple(PUBLISHED_COUNTS[7]) == SEVEN and tuple(PUBLISHED_COUNTS[8]) == EIGHT
    assert sum(PUBLISHED_COUNTS[7].values()) == sum(PUBLISHED_COUNTS[8].values()) == 10015
    assert PUBLISHED_COUNTS[7]["akiec"] == PUBLISHED_COUNTS[8]["AK"] + PUBLISHED_COUNTS[8]["SCC"]


def test_the_archive_with_its_parts_unpacked(root: Path) -> None:
    data, messages = loaded(root)
    check(data)
    assert len(messages) == 1
    assert "HAM10000_metadata.csv has 28 images; the published one has 10,015" in messages[0]
    assert "mel 4 (1,113)" in messages[0]


def test_the_archive_with_its_parts_as_zips(root: Path) -> None:
    for part in PARTS:
        zipped(root / part)
    check(load(root))
    (first, second) = (root / f"{part}.zip" for part in PARTS)
    second.rename(root / "ham10000_images_part2.zip")  # the authors write it both ways
    check(load(root))
    first.unlink()
    data, messages = loaded(root)
    assert len(data) == 14
    assert [
        message
        for message in messages
        if "14 of 28 labelled images are not there and 0 images" in message
    ]


def test_zips_of_a_folder_are_one_tree(root: Path) -> None:
    for part in PARTS:
        zipped(root / part)
    tree = Zips(root, {f"{part}.zip": open_tree(root / f"{part}.zip") for part in PARTS})
    name = f"{PARTS[1]}.zip/{list(DX_OF)[1]}.jpg"
    assert len(tree.names) == 28 and name in tree.names and list(tree.names) == sorted(tree.names)
    assert tree.read(name)[:3] == b"\xff\xd8\xff"
    assert (
        tree.stamp(name) is not None and tree.stamp(f"{PARTS[0]}.zip/{list(DX_OF)[1]}.jpg") is None
    )
    with pytest.raises(UserError, match="no such file"):
        tree.member("elsewhere.jpg")


def test_one_zip_of_everything_and_a_folder_one_level_down(root: Path) -> None:
    check(load(root.parent))
    shutil.make_archive(str(root), "zip", root)
    check(load(root.with_suffix(".zip")))


def test_copies_of_an_image_count_once(root: Path) -> None:
    shutil.copytree(root / PARTS[0], root / "copies")
    data, messages = loaded(root)
    check(data)
    assert len(messages) == 1


@pytest.mark.parametrize("name", ["HAM10000_metadata", "HAM10000_metadata.tab"])
def test_the_metadata_goes_by_several_names_and_may_have_tabs(root: Path, name: str) -> None:
    (root / "HAM10000_metadata.csv").unlink()
    write_metadata(root / name, delimiter="\t")
    check(load(root))


def test_labels_may_be_named_relative_to_path_or_to_here(root: Path) -> None:
    shutil.move(root / "HAM10000_metadata.csv", root / "mine.csv")
    assert "no HAM10000_metadata.csv in" in mistake(root)
    check(load(root, labels="mine.csv"))
    check(load(root, labels=str(root / "mine.csv")))
    assert mistake(root, labels="other.csv").startswith(
        "data.labels other.csv does not exist, neither here nor in"
    )


def test_without_their_columns_there_are_no_sites_and_no_groups(root: Path) -> None:
    write_metadata(root / "HAM10000_metadata.csv", dataset=False)
    assert load(root).sites is None
    (root / "HAM10000_metadata.csv").write_text(
        "image_id,dx\n" + "".join(f"{i},{dx}\n" for i, dx in DX_OF.items())
    )
    assert load(root).groups is None


def test_center_crop_is_the_default(root: Path) -> None:
    wide = Image.new("RGB", (64, 16), "black")
    wide.paste("white", (0, 0, 16, 16))
    wide.save(root / PARTS[0] / f"{next(iter(DX_OF))}.jpg")
    assert load(root).images[0].max() < 60
    assert load(root, crop="resize").images[0, :, 0].min() > 200


# Eight classes


def write_eight(file: Path, **changes: str) -> dict[str, str]:
    class_of = {}
    for i, (name, dx) in enumerate(DX_OF.items()):
        class_of[name] = changes.get(
            name, ("AK", "SCC")[i // 7 % 2] if dx == "akiec" else dx.upper()
        )
    rows = [
        f"{name},{LESION_OF[name]},{DX_OF[name]},histo,rosendahl,{label}"
        for name, label in class_of.items()
    ]
    file.write_text("\n".join(["image_id,lesion_id,dx,dx_type,site,isic2019_class", *rows]) + "\n")
    return class_of


def test_eight_classes_split_the_carcinomas_off(root: Path) -> None:
    class_of = write_eight(root / "eight.csv")
    data, messages = loaded(root, labels="eight.csv", classes=8)
    assert data.classes == EIGHT
    assert [EIGHT[y] for y in data.labels] == list(class_of.values())
    assert set(data.sites or ()) == {"rosendahl"}
    assert "AK 2 (130)" in messages[0] and "SCC 2 (197)" in messages[0]


def test_eight_classes_need_their_column(root: Path) -> None:
    message = mistake(root, classes=8)
    assert (
        "has no column isic2019_class, which tells actinic keratoses (AK) from carcinomas (SCC)"
        in message
    )
    assert message.endswith("add it or set data.classes=7")
    write_eight(root / "eight.csv", ISIC_0024307="")
    assert "eight.csv, line 3: isic2019_class must be one of MEL, NV" in mistake(
        root, labels="eight.csv", classes=8
    )


# Mistakes


def test_options_out_of_range_are_named(root: Path) -> None:
    assert mistake(root, classes=9) == "data.classes must be 7 or 8, got 9"
    assert mistake(root, crop="left") == "data.crop must be resize or center, got 'left'"
    assert mistake(root / "nowhere") == f"data.path {root / 'nowhere'} does not exist"


def test_bad_rows_are_named_by_line(root: Path) -> None:
    file = root / "HAM10000_metadata.csv"
    write_metadata(file, ISIC_0024308="scc")
    assert "line 4: dx must be one of mel, nv, bcc, akiec, bkl, df, vasc, got 'scc'" in mistake(
        root
    )
    write_metadata(file)
    again = file.read_text().splitlines()[1]
    file.write_text(f"{file.read_text()}{again}\n")
    assert "line 30: 'ISIC_0024306' is listed on line 2 already" in mistake(root)
    file.write_text("image_id,diagnosis\nISIC_0024306,nv\n")
    assert "must have the columns image_id, dx; dx is not among its image_id, diagnosis" in mistake(
        root
    )
    file.write_text("image_id,dx\n")
    assert "none of the 0 labelled images" in mistake(root)


def test_no_images_at_all(root: Path) -> None:
    for part in PARTS:
        shutil.rmtree(root / part)
    assert mistake(root).startswith(
        f"no images in {root}; expected HAM10000_images_part_1/ISIC_*.jpg"
    )


# Training


def test_the_preset_reads_the_archive() -> None:
    assert resolve("ham10000", ["data.path=here"]).data == Ham10000("here", size=64)


def config(path: Path, out: Path, **data: Any) -> dict[str, Any]:
    return {
        "data": {"name": "ham10000", "path": str(path), "size": 16, **data},
        "partition": {"name": "iid", "clients": 3},
        "noise": "none",
        "model": {"name": "cnn", "width": 4},
        "method": "fedavg",
        "train": {"rounds": 2, "epochs": 1, "batch": 8},
        "out": str(out),
        "device": "cpu",
    }


def test_a_run_from_the_archive_keeps_lesions_together(root: Path) -> None:
    run = fednoro.run(config(root, root.parent / "runs"))
    assert len(run.bacc) == 2 and run.federation.classes == SEVEN
    lesions = [lesion or name for name, lesion in LESION_OF.items()]
    tested = {lesions[i] for i in run.federation.test}
    trained = {lesions[i] for client in run.federation.clients() for i in client.index}
    assert tested and trained and not tested & trained


@pytest.mark.skipif(
    not (REAL / "ham10000_112.zip").exists(),
    reason=f"no ham10000_112.zip in {REAL}; set FEDNORO_DATA",
)
def test_a_sample_of_the_real_images(tmp_path: Path) -> None:
    with (REAL / "ham10000_labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    sample = [
        row for c in EIGHT for row in [row for row in rows if row["isic2019_class"] == c][:25]
    ]
    with (tmp_path / "sample.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(sample)
    options = {
        "labels": str(tmp_path / "sample.csv"),
        "classes": 8,
        "size": 32,
        "cache": str(tmp_path / "cache"),
    }
    data, messages = loaded(REAL / "ham10000_112.zip", **options)
    assert Counter(EIGHT[y] for y in data.labels) == dict.fromkeys(EIGHT, 25)
    assert data.groups == tuple(row["lesion_id"] for row in sample)
    assert data.sites == tuple(row["site"] for row in sample)
    assert 100 < data.images.mean() < 200 and data.images.std() > 20  # skin, not noise
    expected = "0 of 200 labelled images are not there and 9,815 images there have no label"
    assert [message for message in messages if expected in message]
    (file_,) = (tmp_path / "cache").glob("*/manifest.json")
    assert len(json.loads(file_.read_text())["skipped"]) == 9815
    run = fednoro.run(config(REAL / "ham10000_112.zip", tmp_path / "runs", **options))
    assert len(run.bacc) == 2
    with zipfile.ZipFile(REAL / "ham10000_112.zip") as archive:
        assert len(archive.namelist()) == 10015  # untouched
