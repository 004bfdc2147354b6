"""Predictions on files: the same pixels and the same numbers as in the run."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid
from typer.testing import CliRunner

import fednoro
from fednoro.core.types import UserError
from fednoro.experiment.drive import Run
from fednoro.experiment.predict import list_files, predict, write
from fednoro.experiment.trained_model import open_trained_model

pytestmark = pytest.mark.usefixtures("one_thread")


def write_dicom(path: Path, pixels: np.ndarray) -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    scan = Dataset()
    scan.file_meta = meta
    scan.SOPClassUID, scan.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    scan.Rows, scan.Columns = pixels.shape
    scan.SamplesPerPixel, scan.PhotometricInterpretation, scan.PixelRepresentation = (
        1,
        "MONOCHROME2",
        0,
    )
    scan.BitsAllocated, scan.BitsStored, scan.HighBit = 16, 16, 15
    scan.WindowCenter, scan.WindowWidth, scan.RescaleSlope, scan.RescaleIntercept = 500, 1000, 1, 0
    scan.PixelData = pixels.astype(np.uint16).tobytes()
    scan.save_as(path, enforce_file_format=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Run, Path]:
    """A run on a folder of PNG, JPEG and DICOM files, oblong ones too."""
    home = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(0)
    for c, name in enumerate(("benign", "malignant", "unclear")):
        (home / "images" / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 120, (20, 24 + i)) + 60 * c
            path = home / "images" / name / f"{i:02d}"
            if i % 3 == 2:
                write_dicom(path, pixels * 4)  # without an ending
            else:
                colour = np.repeat(pixels[:, :, None], 3, axis=2).astype(np.uint8)
                Image.fromarray(colour).save(path.with_suffix((".png", ".jpg")[i % 3]))
    run = fednoro.run(
        "digits",
        "data=folder",
        f"data.path={home / 'images'}",
        "data.size=16",
        "data.crop=center",
        f"data.cache={home / 'cache'}",
        "noise=none",
        "partition=iid",
        "partition.clients=2",
        "model.width=4",
        "train.rounds=2",
        "train.epochs=2",
        "train.batch=8",
        "method=fedavg",
        "device=cpu",
        f"out={home / 'runs'}",
    )
    return run, home / "images"


def test_files_give_what_the_runs_own_images_give(made: tuple[Run, Path]) -> None:
    run, folder = made
    dataset = run.config.data.load(0)
    assert dataset.ids is not None and len(dataset) == 36
    model = open_trained_model(run)
    for i, name in enumerate(dataset.ids):
        np.testing.assert_array_equal(model.decode((folder / name).read_bytes()), dataset.images[i])
    found = predict(run, [folder], batch=7)
    assert [row.path for row in found.rows] == [str(folder / name) for name in dataset.ids]
    wanted = model.logits(np.asarray(dataset.images)).double().softmax(1).numpy()
    np.testing.assert_allclose([row.probabilities for row in found.rows], wanted, atol=1e-6)
    guessed = {row.path: found.top(row, 1)[0][0] for row in found.rows}
    test = run.federation.test
    right = [
        guessed[str(folder / dataset.ids[i])] == dataset.classes[dataset.labels[i]] for i in test
    ]
    recalls = [np.mean(np.array(right)[dataset.labels[test] == c]) for c in range(3)]
    assert np.mean(recalls) == pytest.approx(run.final, abs=1e-9)


def test_the_runs_data_is_not_needed(made: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = made
    shutil.copy(folder / "benign" / "00.png", tmp_path / "one.png")
    moved = shutil.copytree(run.folder, tmp_path / "run")
    config = (moved / "config.yaml").read_text().replace(str(folder), "/nowhere")
    (moved / "config.yaml").write_text(config)
    (row,) = predict(moved, [tmp_path / "one.png"]).rows
    (same,) = predict(run, [folder / "benign" / "00.png"]).rows
    assert row.probabilities is not None and np.array_equal(row.probabilities, same.probabilities)


def test_unreadable_files_are_named_and_do_not_stop_the_rest(
    made: tuple[Run, Path], tmp_path: Path
) -> None:
    run, folder = made
    whole = (folder / "benign" / "00.png").read_bytes()
    bad = {
        "empty.png": b"",
        "text.png": b"no image",
        "cut.png": whole[: len(whole) // 2],
        "cut.dcm": b"\0" * 128,
    }
    bad["cut.dcm"] += b"DICM\2\0\0\0"
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.png").write_bytes(whole)
    (tmp_path / "notes.txt").write_text("left alone")
    (tmp_path / ".hidden.png").write_bytes(whole)
    found = predict(run, [tmp_path, tmp_path / "nothing.png"], batch=2)
    reasons = {Path(row.path).name: row.error for row in found.rows}
    assert set(reasons) == {*bad, "good.png", "nothing.png"}
    assert reasons.pop("good.png") == "" and all(reasons.values()) and found.readable == 1
    assert reasons["nothing.png"] == "no such file" and reasons["empty.png"] == "the file is empty"


def test_patterns_and_folders_name_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "a/b/2.JPG", "a/b/scan", "a/x.txt", "c[1].png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)
    found = dict(list_files(["a", "a/*.png", "a/**/*.JPG", "c[1].png", "void", "*.gif"]))
    assert [name for name, reason in found.items() if not reason] == [
        "a/1.png",
        "a/b/2.JPG",
        "a/b/scan",
        "c[1].png",
    ]
    assert found["*.gif"] == "no such file" and "no JPEG, PNG or DICOM" in found["void"]


def test_tables_hold_every_probability(made: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = made
    found = predict(run, [folder / "benign" / "00.png", "gone.png"])
    for name in ("p.csv", "p.json"):
        write(found, tmp_path / "out" / name)
    with (tmp_path / "out" / "p.csv").open(newline="") as file:
        good, bad = csv.DictReader(file)
    shares = {name: float(good[f"p({name})"]) for name in found.classes}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    assert good["predicted"] == max(shares, key=lambda name: shares[name]) and good["error"] == ""
    assert bad["path"] == "gone.png" and bad["error"] == "no such file" and bad["predicted"] == ""
    read = json.loads((tmp_path / "out" / "p.json").read_text())
    assert read["classes"] == ["benign", "malignant", "unclear"]
    assert read["images"][0]["probabilities"] == pytest.approx(shares, abs=1e-5)
    assert read["images"][1] == {"path": "gone.png", "error": "no such file"}
    with pytest.raises(UserError, match=r"ends in \.csv or \.json"):
        write(found, tmp_path / "p.txt")


def test_commands_export_and_predict(made: tuple[Run, Path], tmp_path: Path) -> None:
    from fednoro.cli import app

    run, folder = made
    runner = CliRunner()
    target = tmp_path / "m.onnx"
    ended = runner.invoke(
        app, ["export", str(run.folder), "--onnx", str(target)], catch_exceptions=False
    )
    assert target.exists() and "test images" in ended.output and "allowed 0.0001" in ended.output
    with pytest.raises(UserError, match="--onnx FILE"):
        runner.invoke(app, ["export", str(run.folder)], catch_exceptions=False)
    shutil.copy(folder / "benign" / "00.png", tmp_path / "[b]\nx.png")
    arguments = [
        "predict",
        str(run.folder),
        str(tmp_path / "[b]\nx.png"),
        "--top",
        "3",
        "--to",
        f"{tmp_path}/p.csv",
    ]
    ended = runner.invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert ended.exit_code == 0
    assert all(name in ended.output for name in ("benign", "malignant", "unclear", "[b]�x.png"))
    assert (tmp_path / "p.csv").exists()
    with pytest.raises(UserError, match="none of the 1 files"):
        runner.invoke(app, ["predict", str(run.folder), "gone.png"], catch_exceptions=False)


def test_prepared_folders_decode_as_they_were_prepared(
    made: tuple[Run, Path], tmp_path: Path
) -> None:
    run, folder = made
    (cache,) = (folder.parent / "cache").iterdir()
    moved = shutil.copytree(run.folder, tmp_path / "run")
    config = yaml.safe_load((moved / "config.yaml").read_text())
    config["data"] = {"name": "prepared", "path": str(cache)}
    (moved / "config.yaml").write_text(yaml.safe_dump(config))
    model = open_trained_model(moved)
    assert model.preprocessing["crop"] == "center"
    data = (folder / "malignant" / "01.jpg").read_bytes()
    np.testing.assert_array_equal(model.decode(data), open_trained_model(run).decode(data))
