"""Exported models: read back by their own programs, they give what the network gives."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fednoro
from fednoro.core.training import MEAN, Augment
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.engine.images import Images
from fednoro.experiment import trained_model
from fednoro.experiment.drive import Run
from fednoro.experiment.export import TOLERANCE, export
from fednoro.models import ResNet

TINY = (
    "digits",
    "noise=none",
    "partition.clients=3",
    "model.width=4",
    "train.epochs=1",
    "train.rounds=2",
    "method=fedavg",
    "device=cpu",
)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Run:
    return fednoro.run(*TINY, f"out={tmp_path_factory.mktemp('runs')}")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Run:
    """A ResNet on grey images, which it takes as three channels; its starting weights are gone."""
    home = tmp_path_factory.mktemp("resnet")
    torch.save(ResNet(18, 10).state_dict(), home / "start.pth")
    data = ("data=synthetic", "data.images=60", "data.classes=3", "data.size=16", "data.channels=1")
    made = fednoro.run(
        *TINY[:2],
        "partition.clients=2",
        "model=resnet18",
        f"model.weights={home / 'start.pth'}",
        *TINY[-4:],
        *data,
        f"out={home}",
        "train.rounds=1",
        "train.lr=1e-4",
    )
    (home / "start.pth").unlink()
    return made


def inputs(run: Run, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """All test images as the engine sees them in evaluation, and their labels."""
    dataset, test = run.config.data.load(run.config.seed), run.federation.test
    held = Images(dataset.images, channels, Augment(), torch.device("cpu"))
    return held.batch(torch.from_numpy(test)).contiguous().numpy(), dataset.labels[test]


def facts(text: str) -> dict:
    return json.loads(text)


def test_load_model_gives_the_networks_final_weights_ready_to_use(run: Run) -> None:
    net = fednoro.load_model(run)
    assert isinstance(net, nn.Module) and not net.training
    saved = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    x, labels = inputs(run, 1)
    with torch.no_grad():
        guessed = net(torch.from_numpy(x)).argmax(1).numpy()
    recalls = [np.mean(guessed[labels == c] == c) for c in range(10)]
    assert np.mean(recalls) == pytest.approx(run.final, abs=1e-9)
    assert torch.equal(fednoro.load_model(str(run.folder)).fc.weight, net.fc.weight)


@pytest.mark.parametrize(("which", "channels"), [("run", 1), ("resnet", 3)])
def test_onnx_gives_the_networks_outputs_for_any_batch(
    which: str, channels: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = request.getfixturevalue(which)
    done = export(run, tmp_path / "sub" / "model.onnx", "onnx")
    assert done.real and done.images == min(64, len(run.federation.test)) and done.agreement == 1
    session = onnxruntime.InferenceSession(
        tmp_path / "sub" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    x, _ = inputs(run, channels)
    net = fednoro.load_model(run)
    for size in (1, 3, len(x)):
        (found,) = session.run(["logits"], {"images": x[:size]})
        with torch.no_grad():
            wanted = net(torch.from_numpy(x[:size])).numpy()
        assert found.shape == wanted.shape
        assert np.all(np.abs(found - wanted) <= TOLERANCE * (1 + np.abs(wanted)))


def test_metadata_tells_classes_and_preprocessing(run: Run, resnet: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "a.onnx", "onnx")
    export(resnet, tmp_path / "b.safetensors", "safetensors")
    (entry,) = onnx.load(tmp_path / "a.onnx").metadata_props
    digits = facts(entry.value)
    assert entry.key == "fednoro" and digits["classes"] == [str(c) for c in range(10)]
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        grey = facts(file.metadata()["fednoro"])
    assert grey["preprocessing"]["mean"] == list(MEAN) and grey["preprocessing"]["inputs"] == 3
    assert grey["preprocessing"]["channels"] == 1 and grey["preprocessing"]["size"] == [16, 16]
    # Whoever follows the metadata gets what the engine gives.
    told = digits["preprocessing"]
    dataset = run.config.data.load(run.config.seed)
    raw = dataset.images[run.federation.test].transpose(0, 3, 1, 2).astype(np.float64)
    assert told["layout"] == "NCHW" and told["size"] == [8, 8] and told["colour"] == "grey"
    by_hand = (raw * told["scale"] - np.array(told["mean"])[:, None, None]) / np.array(told["std"])[
        :, None, None
    ]
    np.testing.assert_allclose(inputs(run, 1)[0], by_hand, rtol=1e-5, atol=1e-6)


def test_safetensors_holds_the_same_tensors(run: Run, tmp_path: Path) -> None:
    done = export(run.folder, tmp_path / "m.safetensors", "safetensors")
    assert done.difference == 0
    ours, theirs = load_file(run.folder / "model.safetensors"), load_file(done.path)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_equal_models_give_equal_files(run: Run, tmp_path: Path) -> None:
    for kind in ("onnx", "safetensors"):
        first, second = (
            export(run, tmp_path / f"{i}.{kind}", kind).path.read_bytes() for i in range(2)
        )
        assert first == second


class Fickle(nn.Module):
    """Branches on a value, which a traced graph cannot."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * (2.0 if bool(x.abs().sum() > 0) else 1.0)


def test_a_model_that_gives_other_outputs_is_not_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_model.open_trained_model(run)
    fickle = dataclasses.replace(model, net=Fickle(model.net).eval())
    monkeypatch.setattr("fednoro.experiment.export.open_trained_model", lambda _: fickle)
    with pytest.raises(UserError, match="nothing was written"):
        export(run, tmp_path / "m.onnx", "onnx")
    assert not list(tmp_path.iterdir())


def test_without_the_runs_data_made_up_images_are_compared(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "moved")
    (folder / "split.npz").unlink()
    with pytest.warns(FedNoRoWarning, match="made-up images"):
        done = export(folder, tmp_path / "m.onnx", "onnx")
    assert not done.real and done.path.exists()


def test_what_cannot_be_exported_is_said(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        export(tmp_path, tmp_path / "x.onnx", "onnx")
    with pytest.raises(UserError, match="onnx or safetensors"):
        export(run, tmp_path / "x.pt", "pt")
    folder = shutil.copytree(run.folder, tmp_path / "unfinished")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="fednoro resume"):
        fednoro.load_model(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged"):
        fednoro.load_model(folder)
    other = shutil.copytree(run.folder, tmp_path / "other")
    text = (other / "config.yaml").read_text().replace("width: 4", "width: 8")
    (other / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="does not fit the network"):
        fednoro.load_model(other)


def test_an_older_runs_folder_takes_the_shape_from_its_data(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "old")
    result = json.loads((folder / "result.json").read_text())
    assert result.pop("image") == [8, 8, 1]
    (folder / "result.json").write_text(json.dumps(result))
    assert torch.equal(fednoro.load_model(folder).fc.weight, fednoro.load_model(run).fc.weight)
