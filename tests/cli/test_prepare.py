"""`fednoro prepare` as people use it: from what was downloaded to a
cache, and from there to a run.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from fednoro.core.types import FedNoRoWarning
from fednoro.data.cache.preparation import Preparable, verify
from fednoro.data.sources import SOURCES
from fednoro.experiment.config.configuration import presets

pytestmark = pytest.mark.usefixtures("one_thread")

COMMAND = (sys.executable, "-m", "fednoro")
TINY = (
    "model={name: cnn, width: 4}",
    "partition={name: iid, clients: 3}",
    "noise=none",
    "method=fedavg",
    "train.rounds=2",
    "train.epochs=1",
    "train.batch=16",
    "device=cpu",
)
ISIC = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
HAM = ("mel", "nv", "bcc", "akiec", "bkl", "df", "vasc")
ICH = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")


class Ended(NamedTuple):
    """What became of a command."""

    code: int
    out: str
    err: str


class Told(NamedTuple):
    """What a preparation says of itself."""

    counts: dict[str, int]
    folder: Path
    took: str
    left_out: int
    command: str

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text("utf-8"))
        return found


def told(ended: Ended) -> Told:
    assert ended.code == 0, ended
    found = re.search(
        r"^class +images *\n((?:.+\n)*?)([\d,]+) images, [\d.]+ MB in (.+) \((.+)\)\n",
        ended.out,
        re.M,
    )
    command = re.search(r"^use it with: (fednoro run .+)\n\Z", ended.out, re.M)
    assert found and command, ended.out
    rows = (line.split() for line in found[1].splitlines())
    counts = {" ".join(name): int(count.replace(",", "")) for *name, count in rows}
    assert sum(counts.values()) == int(found[2].replace(",", ""))
    left_out = re.search(
        r"^([\d,]+) left out; all are listed in .*manifest\.json:$", ended.out, re.M
    )
    return Told(counts, Path(found[3]), found[4], int(left_out[1]) if left_out else 0, command[1])


def environment(**more: str) -> dict[str, str]:
    plain = {
        key: value
        for key, value in os.environ.items()
        if key not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")
    }
    return {**plain, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **more}


def process(*args: str, command: tuple[str, ...] = COMMAND, cwd: Path | None = None) -> Ended:
    """Runs the command line as a process of its own."""
    done = subprocess.run(
        [*command, *args], capture_output=True, cwd=cwd, env=environment(), timeout=120, check=False
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


Call = Callable[..., Ended]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line's entry point in this process, which is quicker."""
    with warnings.catch_warnings():
        # typer uses what click is about to drop
        warnings.simplefilter("ignore", DeprecationWarning)
        from fednoro.cli import main

    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fednoro", *args])
        monkeypatch.setattr(sys, "path", [*sys.path])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Small archives in the official layouts


def picture(file: Path, number: int, size: tuple[int, int] = (20, 24)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(file)


def table(file: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header.split(","), *rows])


def class_folders(
    root: Path, per_class: int = 8, classes: Iterable[str] = ("benign", "malign")
) -> Path:
    for c, name in enumerate(classes):
        for i in range(per_class):
            picture(root / name / f"{i}.png", 100 * c + i)
    return root


def isic2019(root: Path) -> Path:
    """Four images of each class, one that has no label, and a label that has no image."""
    names = [f"ISIC_{i:07}" for i in range(33)]
    for i, name in enumerate(names):
        picture(root / "ISIC_2019_Training_Input" / f"{name}.jpg", i)
    rows = [
        [name, *(f"{float(c == i % 8)}" for c in range(8)), "0.0"]
        for i, name in enumerate([*names[:32], "ISIC_9"])
    ]
    table(root / "ISIC_2019_Training_GroundTruth.csv", f"image,{','.join(ISIC)},UNK", rows)
    return root


def ham10000(root: Path) -> Path:
    """The two zips of the Harvard archive, four images of each class."""
    root.mkdir(parents=True)
    rows = []
    for part in (1, 2):
        with zipfile.ZipFile(root / f"HAM10000_images_part_{part}.zip", "w") as archive:
            for i in range(14):
                name = f"ISIC_{100 * part + i:07}"
                picture(root.parent / "loose.jpg", 100 * part + i)
                archive.write(root.parent / "loose.jpg", f"{name}.jpg")
                rows.append(
                    [
                        f"HAM_{name}",
                        name,
                        HAM[i % 7],
                        "histo",
                        "45.0",
                        "male",
                        "back",
                        "vidir_modern",
                    ]
                )
    table(
        root / "HAM10000_metadata.csv",
        "lesion_id,image_id,dx,dx_type,age,sex,localization,dataset",
        rows,
    )
    return root


def ich(root: Path) -> Path:
    """Four slices of each type, and one of none."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

    rows = []
    for i in range(21):
        meta = pydicom.dataset.FileMetaDataset()
        meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = (
            ExplicitVRLittleEndian,
            CTImageStorage,
        )
        meta.MediaStorageSOPInstanceUID = f"1.2.3.{i}"
        ct = pydicom.Dataset()
        ct.file_meta, ct.SOPClassUID, ct.SOPInstanceUID = meta, CTImageStorage, f"1.2.3.{i}"
        ct.Rows = ct.Columns = 20
        ct.BitsAllocated, ct.BitsStored, ct.HighBit, ct.PixelRepresentation, ct.SamplesPerPixel = (
            16,
            16,
            15,
            1,
            1,
        )
        ct.PhotometricInterpretation, ct.WindowCenter, ct.WindowWidth = "MONOCHROME2", "40", "80"
        ct.RescaleSlope, ct.RescaleIntercept = "1", "0"
        ct.PixelData = np.random.default_rng(i).integers(-20, 90, (20, 20)).astype("<i2").tobytes()
        file = root / "stage_2_train" / f"ID_{i:09x}.dcm"
        file.parent.mkdir(parents=True, exist_ok=True)
        ct.save_as(file, enforce_file_format=True)
        kinds = [float(t == i % 5) if i < 20 else 0.0 for t in range(5)]
        named = zip((*ICH, "any"), (*kinds, max(kinds)), strict=True)
        rows += [[f"{file.stem}_{kind}", int(there)] for kind, there in named]
    table(root / "stage_2_train.csv", "ID,Label", rows)
    return root


def medmnist(root: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 20), ("val", 4), ("test", 8)):
        arrays[f"{part}_images"] = rng.integers(0, 255, (n, 28, 28), np.uint8)
        arrays[f"{part}_labels"] = np.arange(n, dtype=np.uint8)[:, None] % 2
    root.mkdir(parents=True)
    np.savez_compressed(root / "breastmnist.npz", **arrays)
    return root / "breastmnist.npz"


MAKE: dict[str, Callable[[Path], Path]] = {
    "folder": class_folders,
    "isic2019": isic2019,
    "ham10000": ham10000,
    "ich": ich,
    "medmnist": medmnist,
}
EXPECTED = {
    "folder": {"benign": 8, "malign": 8},
    "isic2019": dict.fromkeys(ISIC, 4),
    "ham10000": dict.fromkeys(HAM, 4),
    "ich": dict.fromkeys(ICH, 4),
    "medmnist": {"0": 16, "1": 16},
}


def test_there_is_an_archive_here_for_every_source_that_is_prepared() -> None:
    assert set(MAKE) == {name for name, kind in SOURCES.items() if issubclass(kind, Preparable)}


# From the archive to a run


def everything_in(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", MAKE)
def test_each_source_is_prepared_and_the_printed_command_runs_from_its_cache(
    name: str, call: Call, tmp_path: Path, home: Path
) -> None:
    source = MAKE[name](tmp_path / "the download: ünpacked")
    size = ["--size", "16"] if name == "folder" else []  # the others as people call them first
    first = told(call("prepare", name, "--from", str(source), *size))
    assert (first.counts, first.folder.parent) == (EXPECTED[name], home)
    assert first.left_out == (2 if name == "isic2019" else 0)
    assert re.fullmatch(r"[\d.]+ s, [\d,]+ images/s", first.took)
    verify(first.folder)
    again = told(call("prepare", name, "--from", str(source), *size))
    assert again == first._replace(took="was there already")
    before = everything_in(home)
    ended = call(*shlex.split(first.command)[1:], *TINY, f"out={tmp_path / 'runs'}")
    assert ended.code == 0, ended
    assert "preparing" not in ended.out and "round   2/2" in ended.out
    assert everything_in(home) == before


@pytest.mark.parametrize("name", sorted(presets().keys() & MAKE.keys()))
def test_a_preset_of_the_same_name_uses_what_prepare_has_made(
    name: str, call: Call, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MAKE[name](tmp_path / "archive")
    monkeypatch.chdir(source)
    done = told(call("prepare", name, "--from", "."))
    assert done.command == f"fednoro run {name} data.path=."
    assert call("run", name, f"data.path={source}", *TINY, f"out={tmp_path / 'runs'}").code == 0
    assert [path for path in home.iterdir() if path.is_dir()] == [done.folder]


def test_the_printed_command_is_one_for_the_shell(tmp_path: Path) -> None:
    root = tmp_path / "my 'own' images: £5 \"a\" $HOME & ü"
    class_folders(root)
    table(
        root / "labels.csv",
        "path,label,site",
        [[f"benign/{i}.png", f"c{i % 2}", f"s{i % 2}"] for i in range(8)],
    )
    args = (
        "--from",
        str(root),
        "--to",
        str(tmp_path / "a cache: ü"),
        "--size",
        "16",
        "csv=labels.csv",
        "crop=center",
    )
    ended = process("prepare", "folder", *args)
    done = told(ended)
    assert ended.err == ""
    assert done.counts == {"c0": 4, "c1": 4} and done.folder.parent == tmp_path / "a cache: ü"
    before = everything_in(done.folder.parent)
    line = " ".join([done.command, *map(shlex.quote, (*TINY, f"out={tmp_path / 'runs'}"))])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        line, shell=True, capture_output=True, env=environment(PATH=path), timeout=120, check=False
    )
    assert run.returncode == 0, run
    assert b"preparing" not in run.stdout
    assert everything_in(done.folder.parent) == before


def test_options_reach_the_source(call: Call, tmp_path: Path) -> None:
    derma = ham10000(tmp_path / "ham")
    done = told(call("prepare", "ham10000", "crop=resize", "--from", str(derma), "--size", "32"))
    assert done.manifest()["settings"] == {"size": 32, "crop": "resize"}
    assert done.manifest()["shape"] == [28, 32, 32, 3]
    assert done.command == f"fednoro run ham10000 data.path={derma} data.crop=resize data.size=32"
    scans = ich(tmp_path / "rsna")
    done = told(call("prepare", "ich", "--from", str(scans), "window=triple", "size=16"))
    assert done.manifest()["shape"] == [20, 16, 16, 3]
    done = told(
        call(
            "prepare",
            "medmnist",
            "--from",
            str(medmnist(tmp_path / "med")),
            "names=[benign, malign]",
        )
    )
    assert done.counts == {"benign": 16, "malign": 16}
    assert done.command.endswith(" 'data.names=[benign, malign]' noise=none")


def test_sites_are_counted_and_kept_in_the_printed_command(call: Call, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images")
    rows = [
        [f"{name}/{i}.png", name, "north" if i < 3 else "s[b]üd"]
        for name in ("benign", "malign")
        for i in range(8)
    ]
    table(root / "labels.csv", "path,label,site", rows)
    ended = call("prepare", "folder", "--from", str(root), "csv=labels.csv", "--size", "16")
    assert re.search(r"^site +images *\nnorth +6 *\ns\[b\]üd +10 *\n", ended.out, re.M)
    done = told(ended)
    end = "data.csv=labels.csv data.size=16 noise=none partition=by_column"
    assert done.command == f"fednoro run digits data=folder data.path={root} {end}"
    tiny = [override for override in TINY if not override.startswith("partition")]
    ran = call(*shlex.split(done.command)[1:], *tiny, f"out={tmp_path / 'runs'}")
    assert ran.code == 0 and "2 clients of" in ran.out and "partition by_column" in ran.out


def test_the_printed_command_has_quotes_only_where_something_would_misread_it(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, shown in {
        "images": "images",
        "007": "'data.path=\"007\"'",
        "a: b": "'data.path=\"a: b\"'",
    }.items():
        class_folders(tmp_path / name)
        done = told(call("prepare", "folder", "--from", name, "--size", "16"))
        path = f"data.path={shown}" if shown == name else shown
        assert done.command == f"fednoro run digits data=folder {path} data.size=16 noise=none"


def test_what_is_left_out_is_shown_with_the_reason_on_one_line(call: Call, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", per_class=12)
    for i in range(7):
        (root / "malign" / f"broken{i}\x1b[31m\n.png").write_bytes(b"nothing")
    ended = call("prepare", "folder", "--from", str(root), "--size", "16")
    assert told(ended).left_out == 7 == told(ended).manifest()["unreadable"]
    shown = [line for line in ended.out.splitlines() if line.startswith("  ")]
    names = ", ".join(f"malign/broken{i}�[31m�.png" for i in range(3))
    assert shown == [f"  not a JPEG or PNG image: {names}, … 7 in all"]


def test_an_archive_that_is_not_the_published_one_is_warned_about_on_stderr(
    call: Call, tmp_path: Path
) -> None:
    source = isic2019(tmp_path / "isic")
    with warnings.catch_warnings():
        warnings.simplefilter("always", FedNoRoWarning)
        ended = call("prepare", "isic2019", "--from", str(source), "--size", "16")
    counts, missing = ended.err.splitlines()
    assert re.match(
        r"warning: .*GroundTruth\.csv has 33 images; the published one has 25,331 and other counts",
        counts,
    )
    assert re.match(
        r"warning: .*isic: 1 of 33 labelled images are not there and 1 images there have no label",
        missing,
    )
    assert told(ended).left_out == 2


def test_quiet_says_nothing(call: Call, tmp_path: Path, home: Path) -> None:
    root = class_folders(tmp_path / "images")
    assert call("prepare", "folder", "--from", str(root), "--size", "16", "-q") == (0, "", "")
    assert len([path for path in home.iterdir() if path.is_dir()]) == 1


# Stopped, and gone on with


def test_ctrl_c_is_130_and_the_same_command_goes_on(call: Call, tmp_path: Path, home: Path) -> None:
    root = class_folders(tmp_path / "images", per_class=1)
    picture(root / "large.png", 0, (900, 900))
    for name in ("benign", "malign"):
        for i in range(100):
            os.link(root / "large.png", root / name / f"{i:03}x.png")
    args = ("prepare", "folder", "--from", str(root), "--size", "64")
    stopped = subprocess.Popen(
        [*COMMAND, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    began = time.monotonic()
    while not (
        journals := [
            file for file in home.glob("*.preparing/journal") if file.read_bytes().count(b"\n") > 10
        ]
    ):
        assert stopped.poll() is None and time.monotonic() - began < 60, stopped.communicate()
        time.sleep(0.01)
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, err) == (130, "")
    assert out.splitlines()[-1] == "stopped; the same command goes on from here"
    assert 10 < journals[0].read_bytes().count(b"\n") < 202
    # done already: whoever decoded it again would find nothing there
    first = root / "benign" / "0.png"
    stat = first.stat()
    first.write_bytes(bytes(stat.st_size))
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    done = told(call(*args))
    assert (done.counts, done.left_out) == ({"benign": 101, "malign": 101}, 0)
    verify(done.folder)
    assert [path.name for path in home.iterdir()] == [done.folder.name]


# Mistakes


def assert_one_line(ended: Ended, about: str) -> None:
    """A user's mistake: exit code 2, and one line that says what is wrong."""
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1 and ended.err.startswith("error: "), ended.err
    assert about in ended.err, ended.err
    assert ended.out == "" and "\x1b" not in ended.err


def test_a_mistake_is_one_line_on_stderr_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    ended = process("prepare", "folder", "--from", "no where: ü", cwd=tmp_path)
    assert_one_line(ended, f"data.path {tmp_path / 'no where: ü'} does not exist")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "about"),
    [
        (
            ["nonsense", "--from", "."],
            "prepare takes one of folder, isic2019, ham10000, ich, medmnist, got 'nonsense'",
        ),
        (["digits", "--from", "."], "digits needs no preparation: its images are used as they are"),
        (["synthetic", "--from", ".", "--size", "8"], "synthetic needs no preparation"),
        (["prepared", "--from", "."], "prepared needs no preparation"),
        (["folder"], "Missing option '--from'. See: fednoro prepare --help"),
        (["folder", "--from", ".", "64"], "options look like key=value, got '64'"),
        (["folder", "--from", ".", "sizes=64"], "unknown key data.sizes: did you mean size?"),
        (["folder", "--from", ".", "--size", "4"], "data.size must be in [8, 2048], got 4"),
        (["folder", "--from", ".", "--size", "big"], "Invalid value for '--size'"),
        (
            ["folder", "--from", ".", "crop=middle"],
            "data.crop should be 'resize' or 'center', got 'middle'",
        ),
        (["folder", "--from", "."], "no images in"),
        (
            ["folder", "--from", ".", "csv=absent.csv"],
            "data.csv absent.csv does not exist, neither here nor in",
        ),
        (["isic2019", "--from", "."], "no ISIC_2019_Training_GroundTruth.csv in"),
        (["ham10000", "--from", "."], "no HAM10000_metadata.csv in"),
        (["ich", "--from", "."], "has no stage_2_train.csv at its top"),
        (["medmnist", "--from", "."], "is not a file; name a .npz file"),
        (["medmnist", "--from", "set.npz"], "set.npz does not exist; name a .npz file"),
        (
            ["medmnist", "--from", "set.npz", "--size", "28"],
            "unknown key data.size: data medmnist has no size; it",
        ),
        (["isic2019", "--from", "no where"], "no where does not exist"),
    ],
)
def test_each_mistake_is_named(
    args: list[str],
    about: str,
    call: Call,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert_one_line(call("prepare", *args), about)
    assert not home.exists() and not list((tmp_path / "empty").iterdir())


def test_a_cache_that_cannot_be_written_is_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "cache"
    ended = call(
        "prepare", "folder", "--from", str(class_folders(tmp_path / "images")), "--to", str(target)
    )
    assert_one_line(
        ended,
        f"cannot write the image cache in {target} (Not a directory); choose another folder with",
    )
