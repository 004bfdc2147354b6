"""RSNA 2019 as Kaggle ships it, in small: DICOM files and label rows, prepared,
trained on, every mistake named.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_dicom import BONE, BRAIN, SUBDURAL, close, dataset, rle, slowly, to_bytes

import fednoro
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache.preparation import prepare
from fednoro.data.dataset import Dataset
from fednoro.data.sources.ich import CLASSES, PUBLISHED_COUNTS, Ich, read_labels

TYPES = (*CLASSES, "any")
BROKEN = "ID_6431af929"


def hounsfield(number: int) -> np.ndarray:
    """A made-up slice: a bright disc whose place is its class's, in a skull."""
    row, col = np.mgrid[:20, :20]
    values = np.random.default_rng(number).integers(-20, 60, (20, 20))
    values[(row - 10) ** 2 + (col - 10) ** 2 > 81] = 1200
    place = 4 + 3 * (number % 5)
    values[(row - place) ** 2 + (col - 10) ** 2 < 6] = 75
    return values.astype(np.int16)


KINDS: tuple[Callable[[np.ndarray], bytes], ...] = (
    lambda hu: to_bytes(
        dataset(hu, WindowCenter="40", WindowWidth="80", RescaleSlope="1", RescaleIntercept="0")
    ),
    lambda hu: to_bytes(
        dataset(
            (hu + 1024).astype(np.uint16),
            12,
            WindowCenter=["40", "600"],
            WindowWidth=["80", "2800"],
            RescaleSlope="1",
            RescaleIntercept="-1024",
        )
    ),
    lambda hu: to_bytes(
        dataset(
            (hu + 1024).astype(np.uint16) * 2,
            16,
            WindowCenter="40",
            WindowWidth="80",
            RescaleSlope="0.5",
            RescaleIntercept="-1024",
        )
    ),
    lambda hu: to_bytes(
        dataset(-hu, WindowCenter="-40", WindowWidth="80", PhotometricInterpretation="MONOCHROME1")
    ),
    lambda hu: to_bytes(rle(dataset(hu, WindowCenter="40", WindowWidth="80"))),
)


def name(number: int) -> str:
    return f"ID_{number:09x}"


def rows(id: str, *types: str) -> list[str]:
    return [
        f"{id}_{kind},{int(kind in types or (kind == 'any' and bool(types)))}" for kind in TYPES
    ]


def write_labels(root: Path, lines: list[str]) -> Path:
    file = root / "stage_2_train.csv"
    file.write_text("\n".join(["ID,Label", *lines]) + "\n")
    return file


def add(root: Path, id: str, data: bytes | None = None, number: int = 0) -> None:
    folder = root / "stage_2_train"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{id}.dcm").write_bytes(KINDS[0](hounsfield(number)) if data is None else data)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twenty slices of one type, four of each and of every kind of file;
    one with none, one with two.
    """
    root = tmp_path / "rsna"
    lines = []
    for number in range(20):
        add(root, name(number), KINDS[number // 4](hounsfield(number)))
        lines += rows(name(number), CLASSES[number % 5])
    for number, types in ((20, ()), (21, ("epidural", "subdural"))):
        add(root, name(number))
        lines += rows(name(number), *types)
    write_labels(root, lines)
    return root


def load(root: Path, **options: object) -> Dataset:
    return Ich(str(root), **{"size": 16, **options}).load(0)  # type: ignore[arg-type]


def skipped(home: Path) -> dict[str, str]:
    (file,) = home.glob("ich-*/manifest.json")
    return {
        Path(entry["path"]).stem: entry["reason"]
        for entry in json.loads(file.read_text())["skipped"]
    }


def lines_of(root: Path) -> list[str]:
    return (root / "stage_2_train.csv").read_text().split()[1:]


# What comes out


def test_slices_with_exactly_one_type_are_kept_in_the_order_of_their_ids(
    root: Path, home: Path
) -> None:
    data = load(root)
    assert data.classes == CLASSES
    assert data.ids == tuple(name(number) for number in range(20))
    assert data.labels.tolist() == [number % 5 for number in range(20)]
    assert data.images.shape == (20, 16, 16, 1)
    assert data.groups is None
    assert skipped(home) == {}


def test_pixels_of_every_kind_of_file_are_those_of_the_same_hounsfield_units(root: Path) -> None:
    data, triple = load(root), load(root, window="triple")
    assert triple.images.shape == (20, 16, 16, 3)
    for number in range(20):
        hu = hounsfield(number)
        if number // 4 == 3:  # MONOCHROME1, which holds the negative
            assert close(data.images[number, ..., 0], slowly(-hu, 16, (-40, 80), invert=True)), (
                number
            )
            continue
        assert close(data.images[number, ..., 0], slowly(hu, 16, BRAIN)), number
        for channel, window in enumerate((BRAIN, SUBDURAL, BONE)):
            assert close(triple.images[number, ..., channel], slowly(hu, 16, window)), number


def test_archive_may_be_a_folder_down_of_stage_1_or_a_zip(root: Path, tmp_path: Path) -> None:
    images = load(root).images
    down = tmp_path / "kaggle" / "rsna-intracranial-hemorrhage-detection"
    shutil.copytree(root, down)
    assert np.array_equal(load(down.parent).images, images)
    with zipfile.ZipFile(tmp_path / "kaggle.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(down.rglob("*.*")):
            packed.write(file, file.relative_to(down.parent))
    assert np.array_equal(load(tmp_path / "kaggle.zip").images, images)
    for before, after in (
        ("stage_2_train.csv", "stage_1_train.csv"),
        ("stage_2_train", "stage_1_train"),
    ):
        (down / before).rename(down / after)
    assert np.array_equal(load(down).images, images)


def test_rows_in_any_order_repeated_rows_and_windows_line_ends_change_nothing(root: Path) -> None:
    lines = lines_of(root)
    before = load(root)
    shuffled = [*np.random.default_rng(0).permutation(lines), *lines[:12], ""]
    (root / "stage_2_train.csv").write_bytes(
        b"\xef\xbb\xbf" + "\r\n".join(["ID,Label", *shuffled]).encode()
    )
    again = load(root)
    assert again.ids == before.ids
    assert np.array_equal(again.labels, before.labels)


def test_patients_are_read_from_the_headers_once(root: Path, home: Path) -> None:
    for number in range(20):
        ds = dataset(hounsfield(number), PatientID=f"patient {number // 2}" if number < 18 else "")
        if number == 19:
            ds.StudyInstanceUID = "1.2.19"
        add(root, name(number), to_bytes(ds))
    seen: list[str] = []
    source = Ich(str(root), size=16, groups=True)
    data = source.load(0, lambda what, done, total: seen.append(what))
    assert data.groups == (*(f"patient {n // 2}" for n in range(18)), name(18), "1.2.19")
    assert seen.count("reading headers") == 20
    seen.clear()
    assert source.load(0, lambda what, done, total: seen.append(what)).groups == data.groups
    assert not seen
    with zipfile.ZipFile(root.parent / "packed.zip", "w") as packed:
        for file in sorted(root.rglob("*.*")):
            packed.write(file, file.relative_to(root))
    assert load(root.parent / "packed.zip", groups=True).groups == data.groups


def test_authors_files_choose_the_slices_and_their_labels(root: Path, tmp_path: Path) -> None:
    (root / "stage_2_train.csv").unlink()
    lists = tmp_path / "lists"
    lists.mkdir()
    order = ("subdural", "Epidural", "INTRAVENTRICULAR", "subarachnoid", "intraparenchymal")
    for file, numbers, suffix in (("train.csv", (3, 1, 2), ".png"), ("test.csv", (7, 3), "")):
        table = [",".join(("ID", *order))]
        table += [
            ",".join(
                [name(n) + suffix, *(str(int(kind.lower() == CLASSES[n % 5])) for kind in order)]
            )
            for n in numbers
        ]
        (lists / file).write_text("\n".join(table) + "\n")
    both = load(root, ids=str(lists))
    assert both.ids == (name(1), name(2), name(3), name(7))
    assert both.labels.tolist() == [1, 2, 3, 2]
    assert load(root, ids=str(lists / "test.csv")).ids == (name(3), name(7))


def test_small_archive_is_prepared_and_trained_on(root: Path, tmp_path: Path) -> None:
    lines = lines_of(root)
    for number in range(40, 80):
        add(root, name(number), KINDS[number % 5](hounsfield(number)))
        lines += rows(name(number), CLASSES[number % 5])
    write_labels(root, lines)
    made = prepare(Ich(str(root), size=16))
    assert made.counts == dict.fromkeys(CLASSES, 12)
    assert not made.existed
    run = fednoro.run(
        {
            "data": {"name": "ich", "path": str(root), "size": 16},
            "partition": {"name": "iid", "clients": 3},
            "noise": "none",
            "model": {"name": "cnn", "width": 4},
            "train": {"rounds": 2, "lr": 1e-3},
            "method": "fedavg",
            "out": str(tmp_path / "runs"),
        }
    )
    assert len(run.bacc) == 2
    assert run.federation.classes == CLASSES
    assert prepare(Ich(str(root), size=16)).existed


# Published counts


def test_published_counts_pass_and_others_are_reported(root: Path) -> None:
    with pytest.warns(
        FedNoRoWarning, match=r"stage_2_train\.csv is not the published .* 20 slices .* not 67,969"
    ) as caught:
        load(root)
    (message,) = [str(w.message) for w in caught if "published" in str(w.message)]
    assert "epidural 4, not 1,497" in message
    assert "\n" not in message
    assert sum(PUBLISHED_COUNTS) == 67_969

    numbers = np.cumsum((20, *PUBLISHED_COUNTS))
    lines = lines_of(root)[: 6 * 20]
    for kind, (first, end) in zip(CLASSES, pairwise(numbers), strict=True):
        for number in range(first, end - 4):
            lines += rows(name(number), kind)
    write_labels(root, lines)
    with warnings.catch_warnings(record=True) as caught_now:
        warnings.simplefilter("always")
        Ich(str(root)).plan()
    assert not caught_now


# What is left out


def test_broken_missing_unlabelled_and_contradictory_ones_are_listed(
    root: Path, home: Path
) -> None:
    lines = lines_of(root)
    add(root, BROKEN, KINDS[0](hounsfield(0))[:-100])
    add(root, "ID_00000ffff")  # no row
    lines += rows(BROKEN, "epidural")
    lines += rows("ID_0000aaaa1", "subdural")  # no image
    lines += [f"{name(4)}_subdural,0"]  # it was 1
    lines += rows("ID_0000bbbb2", "subdural")[1:]  # cut off
    write_labels(root, lines)
    with pytest.warns(FedNoRoWarning, match="1 of 20 images could not be read"):
        data = load(root)
    assert data.ids == tuple(name(number) for number in range(20) if number != 4)
    found = skipped(home)
    assert found.pop(BROKEN).startswith("The number of bytes of pixel data is less than expected")
    assert found.pop("ID_00000ffff").startswith("no row in ")
    assert found.pop("ID_0000aaaa1").endswith("but there is no such image")
    assert found.pop(name(4)) == "labelled both 0 and 1 as subdural"
    assert found.pop("ID_0000bbbb2") == "no row for epidural"
    assert not found


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "ID_00000001f_epidural",
            "line 134: expected a row such as ID_000012eaf_epidural,0, got 'ID_00000001f_epidural'",
        ),
        ("00000001f_epidural,0", "line 134: expected a row such as"),
        ("ID_../../x_any,0", "line 134: expected a row such as"),
        ("ID_00000001f_epidurall,0", "line 134: unknown type 'epidurall'; known are epidural, "),
        ("ID_00000001f_epidural,2", "line 134: Label must be 0 or 1, got '2'"),
        ("ID_00000001f_epidural,", "line 134: Label must be 0 or 1, got ''"),
        ("ID_00000001f_epidural,0.5", "line 134: Label must be 0 or 1, got '0.5'"),
        ("\xff\xfe", "line 134: expected a row such as"),
    ],
)
def test_wrong_rows_are_named_by_line(root: Path, line: str, message: str) -> None:
    write_labels(root, [*lines_of(root), line])
    with pytest.raises(UserError) as caught:
        load(root)
    assert message in str(caught.value)


def test_label_file_must_be_one(root: Path) -> None:
    for content, message in (
        (b"", "must begin with the line ID,Label, got ''"),
        (b"id,label\n\n", "has no rows"),
    ):
        with pytest.raises(UserError, match=message):
            read_labels(content, "labels.csv")
    (root / "copy").mkdir()
    shutil.copy(root / "stage_2_train.csv", root / "copy")
    with pytest.raises(
        UserError,
        match=r"has copy/stage_2_train\.csv and stage_2_train\.csv: give the folder of one",
    ):
        load(root)


def test_missing_pieces_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no stage_2_train\.csv at its top or one folder down"):
        load(root / "stage_2_train")
    shutil.rmtree(root / "stage_2_train")
    with pytest.raises(UserError, match=r"has no images stage_2_train/ID_\*\.dcm"):
        load(root)
    add(root, name(20))
    with pytest.raises(UserError, match=r"none of the 1 images in .* has exactly one type"):
        load(root)
    with pytest.raises(UserError, match=r"data\.window must be file, brain or triple, got 'lung'"):
        load(root, window="lung")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,epidural\nID_1,1\n", "intraparenchymal is not among its id, epidural"),
        ("name,{five}\nID_1,1,0,0,0,0\n", "must have a column id or image or "),
        (
            "id,{five}\nslice 1,1,0,0,0,0\n",
            "line 2: expected an id such as ID_000012eaf, got 'slice 1'",
        ),
        (
            "id,{five}\nID_1,1,0,0,0,0\nID_2,1,0,0,1,0\n",
            "line 3: one of the five types must be 1, the others 0",
        ),
        ("id,{five}\nID_1,0,0,0,0,0\n", "line 2: one of the five types must be 1"),
        ("id,{five}\nID_1,1,0,0,,0\n", "got 1, 0, 0, nothing, 0"),
        ("id,{five}\n", "lists no ids"),
    ],
)
def test_wrong_lists_of_ids_are_named_by_line(
    root: Path, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "ids.csv"
    file.write_text(content.format(five=",".join(CLASSES)))
    with pytest.raises(UserError) as caught:
        load(root, ids=str(file))
    assert message in str(caught.value)


def test_ids_that_are_not_there_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is neither a CSV file nor a folder with train\.csv or test\.csv"
    ):
        load(root, ids=str(tmp_path / "nowhere"))
