"""Weight files: what loads, what is left fresh, what is refused by name; and BatchNorm
statistics of one's own data.
"""

from __future__ import annotations

import csv
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import cross_val_score
from torch import Tensor, nn

import fednoro
from fednoro.core.aggregate import average
from fednoro.core.training import Training
from fednoro.core.types import FedNoRoWarning, UserError, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.checkpoint import load_checkpoint
from fednoro.experiment.drive import Watcher
from fednoro.models import Cnn, ResNet, Resnet18, Resnet34, Resnet50, initialise, load_pretrained

CPU = torch.device("cpu")


# Weight files.


@pytest.fixture(scope="module")
def pretrained() -> dict[str, Tensor]:
    return initialise(Resnet18(), 3, 7, seed=11).state_dict()


def save(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_a_weight_file_gives_all_of_its_tensors(
    pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save({**pretrained, "bn1.num_batches_tracked": torch.tensor(9)}, tmp_path / "net.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Resnet18(weights=str(path)).build(3, 7)
    expected = {**pretrained, "bn1.num_batches_tracked": torch.tensor(9)}
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_half_precision_wrapped_headless_weights_load_and_the_classifier_starts_fresh(
    pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    half = {
        f"module.{name}": value.half() if value.is_floating_point() else value
        for name, value in pretrained.items()
        # as in torchvision's first files
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }
    path = save(half, tmp_path / "half.pth")
    with pytest.warns(FedNoRoWarning, match=r"half\.pth has no classifier"):
        net = initialise(Resnet18(weights=str(path)), 3, 4, seed=5)
    fresh = initialise(Resnet18(), 3, 4, seed=5).state_dict()
    for name, value in net.state_dict().items():
        trunk = f"module.{name}" in half
        assert value.dtype == fresh[name].dtype
        assert torch.equal(value, half[f"module.{name}"].float() if trunk else fresh[name]), name


def test_a_classifier_for_other_classes_starts_fresh(
    pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    save_file(pretrained, path)
    with pytest.warns(FedNoRoWarning, match="no classifier for these classes"):
        net = initialise(Resnet18(weights=str(path)), 3, 4, seed=5)
    fresh = initialise(Resnet18(), 3, 4, seed=5)
    assert torch.equal(net.state_dict()["fc.weight"], fresh.state_dict()["fc.weight"])
    assert torch.equal(net.state_dict()["conv1.weight"], pretrained["conv1.weight"])


def test_safetensors_give_all_of_their_tensors(
    pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    save_file(pretrained, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Resnet18(weights=str(path)).build(3, 7)
    assert all(torch.equal(value, pretrained[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, "has no {name} of shape (128,) (1 missing)"),
        ("nothing", "has no {name} of shape (128,) (1 missing)"),
        (torch.ones(3), "has (3,), float32 for {name} of shape (128,) (1 do not fit)"),
        (
            torch.ones(128, dtype=torch.int32),
            "has (128,), int32 for {name} of shape (128,) (1 do not fit)",
        ),
    ],
    ids=["absent", "not a tensor", "of another shape", "of whole numbers"],
)
def test_a_trunk_tensor_that_does_not_fit_is_named(
    pretrained: dict[str, Tensor], tmp_path: Path, value: object, line: str
) -> None:
    name = "layer2.0.downsample.1.running_var"
    state = {key: tensor for key, tensor in pretrained.items() if key != name}
    path = save(state if value is None else {**state, name: value}, tmp_path / "net.pth")
    with pytest.raises(UserError) as caught:
        Resnet18(weights=str(path)).build(3, 7)
    assert str(caught.value) == f"model.weights: {path} {line.format(name=name)}"


@pytest.mark.parametrize("keys", [("state_dict",), ("model",), ("state_dict", "model")])
def test_the_model_is_found_in_a_training_checkpoint(
    pretrained: dict[str, Tensor], tmp_path: Path, keys: tuple[str, ...]
) -> None:
    content: dict[str, object] = {f"module.{name}": value for name, value in pretrained.items()}
    for key in reversed(keys):
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Resnet18(weights=str(save(content, tmp_path / "checkpoint.pth"))).build(3, 7)
    assert all(torch.equal(value, pretrained[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_any_floating_point_precision_is_accepted(
    pretrained: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype, suffix: str
) -> None:
    path = tmp_path / f"net{suffix}"
    given = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in pretrained.items()
    }
    save_file(given, path) if suffix == ".safetensors" else save(given, path)
    net = Resnet18(weights=str(path)).build(3, 7)
    for name, value in net.state_dict().items():
        assert value.dtype == pretrained[name].dtype
        assert torch.equal(value, given[name].to(value.dtype)), name


@pytest.mark.parametrize("extra", [1, 5])
def test_tensors_that_the_network_has_not_are_named_in_a_warning(
    pretrained: dict[str, Tensor], tmp_path: Path, extra: int
) -> None:
    path = save(
        {**pretrained, **{f"head.{i}": torch.ones(1) for i in range(extra)}}, tmp_path / "net.pth"
    )
    names = "head.0" if extra == 1 else "head.0, head.1, head.2, …"
    with pytest.warns(FedNoRoWarning) as caught:
        Resnet18(weights=str(path)).build(3, 7)
    assert [str(w.message) for w in caught] == [
        f"net.pth has {extra} tensors that the network has not, left out: {names}"
    ]


def test_what_is_there_under_other_names_is_shown(
    pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save(
        {f"encoder.{name}": value for name, value in pretrained.items()}, tmp_path / "net.pth"
    )
    with pytest.raises(
        UserError, match=r"has no conv1\.weight .*; it has encoder\.conv1\.weight, .*, …$"
    ):
        Resnet18(weights=str(path)).build(3, 7)


def test_half_a_classifier_is_none(pretrained: dict[str, Tensor], tmp_path: Path) -> None:
    state = {name: value for name, value in pretrained.items() if name != "fc.bias"}
    path = save(state, tmp_path / "net.pth")
    with pytest.warns(FedNoRoWarning, match=r"net\.pth has no classifier"):
        net = initialise(Resnet18(weights=str(path)), 3, 7, seed=5)
    fresh = initialise(Resnet18(), 3, 7, seed=5)
    assert torch.equal(net.state_dict()["fc.weight"], fresh.state_dict()["fc.weight"])


def test_weights_that_are_not_finite_are_refused(
    pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save({**pretrained, "bn1.weight": torch.full((64,), float("inf"))}, tmp_path / "net.pth")
    with pytest.raises(UserError, match=r"net\.pth has values in bn1\.weight that are not finite"):
        Resnet18(weights=str(path)).build(3, 7)


def test_weights_of_another_depth_are_refused_by_the_tensor_that_tells(tmp_path: Path) -> None:
    path = save(ResNet(50, 7).state_dict(), tmp_path / "net.pth")
    with pytest.raises(
        UserError, match=r"has \(64, 64, 1, 1\), float32 for layer1\.0\.conv1\.weight of shape"
    ):
        Resnet34(weights=str(path)).build(3, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Resnet50(weights=str(path)).build(3, 7)
    assert torch.equal(
        net.state_dict()["fc.weight"], torch.load(path, weights_only=True)["fc.weight"]
    )


def test_no_weights_may_be_written_as_none() -> None:
    plain, word = (
        initialise(Resnet18(weights=weights), 3, 7, seed=5).state_dict()
        for weights in (None, "none")
    )
    assert all(torch.equal(plain[name], word[name]) for name in plain)


CONTENTS: dict[str, object] = {
    "a tensor": torch.ones(3),
    "a list": [torch.ones(3)],
    "numbered tensors": {0: torch.ones(3)},
    "nothing": {},
    "somebody else's network": {"stem.weight": torch.ones(3)},
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_file_of_something_else_is_refused_by_name(content: object, tmp_path: Path) -> None:
    path = save(content, tmp_path / "net.pth")
    with pytest.raises(UserError, match=r"model\.weights: .*net\.pth"):
        Resnet18(weights=str(path)).build(3, 7)


@pytest.mark.parametrize(
    "content", [b"", b"not weights", b"\x80\x02", b"PK\x03\x04 torn archive"], ids=range(4)
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_damaged_file_is_refused_in_one_line(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"net{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_pretrained(nn.Linear(1, 1), path)
    assert str(caught.value).startswith(f"model.weights: {path} is not a readable weight file: ")
    assert "\n" not in str(caught.value)


class Malicious:
    """Touches a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("archive", [True, False])
def test_a_weight_file_never_executes_code(archive: bool, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "net.pth"
    if archive:
        torch.save({"conv1.weight": Malicious(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"conv1.weight": Malicious(trace)}))
    with pytest.raises(UserError, match="is not a readable weight file"):
        load_pretrained(nn.Linear(1, 1), path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Malicious(trace)))
    assert trace.exists()  # the attack itself works


def test_a_missing_weight_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.pth", tmp_path):
        with pytest.raises(UserError, match=rf"model\.weights: no such file: {path}"):
            Resnet18(weights=str(path)).build(3, 7)


def test_the_home_folder_may_be_written_as_a_tilde(
    pretrained: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(pretrained, tmp_path / "net.pth")
    net = Resnet18(weights="~/net.pth").build(3, 7)
    assert torch.equal(net.state_dict()["fc.weight"], pretrained["fc.weight"])


# BatchNorm statistics.


def engine(model: Cnn | Resnet18, data: Dataset, *clients: Client) -> EagerEngine:
    build = partial(initialise, model, model.inputs(data.images.shape[3]), len(data.classes), 3)
    return EagerEngine(build, data, model.inputs(data.images.shape[3]), Training(), 3, CPU, clients)


def random_data(n: int, side: int, channels: int) -> Dataset:
    images = np.random.default_rng(0).integers(0, 200, (n, side, side, channels), dtype=np.uint8)
    return Dataset(images, np.arange(n) % 3, ("a", "b", "c"))


def holding(*index: int) -> Client:
    return Client(0, "site", np.array(index), np.zeros(len(index), np.int64))


def test_recalibrated_statistics_are_those_of_the_clients_images_by_a_float64_rederivation() -> (
    None
):
    data, client = random_data(9, 6, 1), holding(1, 4, 5, 8)
    lab = engine(Cnn(width=4), data, client)
    start = lab.net.weights()
    after = lab.net.state_dict(lab.recalibrate(start, client))

    x = torch.from_numpy((data.images[client.index] / 255.0 - 0.449) / 0.226).permute(0, 3, 1, 2)
    maps = nn.functional.conv2d(x, after["trunk.0.weight"].double(), padding=1)
    torch.testing.assert_close(
        after["trunk.1.running_mean"].double(), maps.mean((0, 2, 3)), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        after["trunk.1.running_var"].double(), maps.var((0, 2, 3)), rtol=1e-5, atol=0
    )

    lab.net.load(lab.recalibrate(start, client))
    with torch.no_grad():
        normed = lab.net.net.eval().get_submodule("trunk")[:2](
            lab.images.batch(torch.from_numpy(client.index))
        )  # type: ignore[index]
    torch.testing.assert_close(normed.mean((0, 2, 3)), torch.zeros(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(normed.std((0, 2, 3)), torch.ones(4), rtol=1e-3, atol=0)


def test_recalibrating_changes_nothing_but_the_statistics_and_leaves_the_engine_as_it_was() -> None:
    data, client = random_data(8, 6, 1), holding(*range(8))
    lab = engine(Cnn(width=4), data, client)
    start = Weights(lab.net.weights().values, torch.tensor([5, 6, 7]), lab.net.segments)
    kept = start.values.clone()
    after = lab.recalibrate(start, client)
    assert torch.equal(start.values, kept)
    assert torch.equal(after.values[: lab.net.trainable], start.values[: lab.net.trainable])
    assert not torch.isclose(
        after.values[lab.net.trainable :], start.values[lab.net.trainable :]
    ).any()
    assert after.counters.tolist() == [5, 6, 7]
    assert [norm.momentum for norm in lab.net.norms] == [0.1, 0.1, 0.1]
    assert torch.equal(lab.recalibrate(start, client).values, after.values)


def test_every_image_counts_the_same_however_they_are_batched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, client = random_data(7, 6, 1), holding(*range(7))
    lab = engine(Cnn(width=4), data, client)
    whole = lab.net.state_dict(lab.recalibrate(lab.net.weights(), client))["trunk.1.running_mean"]
    # three batches, none of a single image
    monkeypatch.setattr("fednoro.engine.eager.EVALUATION_BATCH", 3)
    parts = lab.net.state_dict(lab.recalibrate(lab.net.weights(), client))["trunk.1.running_mean"]
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def small(*more: str) -> list[str]:
    return [
        "train.rounds=2",
        "train.epochs=1",
        "partition.clients=3",
        "noise=none",
        "method=fedavg",
        "device=cpu",
        "checkpoint_every=1",
        *more,
    ]


@pytest.fixture
def own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "from fednoro.models import SmallCNN\n"
        "def small(channels, classes):\n"
        "    return SmallCNN(channels, classes, 4)\n"
        "def plain(channels, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_networks"


def test_a_run_starts_from_the_clients_statistics_averaged_by_size_and_resumes_to_the_same_bits(
    own_network: str, tmp_path: Path
) -> None:
    options = [f"model={own_network}:small", "model.recalibrate=true", f"out={tmp_path}"]
    run = fednoro.run("digits", *small(*options, "name=whole"))
    plain = fednoro.run("digits", *small(options[0], options[2], "name=plain"))
    assert run.bacc != plain.bacc

    data = run.config.data.load(run.config.seed)
    clients = run.federation.clients()
    lab = EagerEngine(
        lambda: initialise(run.config.model, 1, 10, run.config.seed),
        data,
        1,
        run.config.train,
        0,
        CPU,
        clients,
    )
    start = lab.net.weights()
    expected = average((lab.recalibrate(start, client), len(client.index)) for client in clients)
    assert torch.equal(expected.values[: lab.net.trainable], start.values[: lab.net.trainable])

    class Stopped(Watcher):
        def started(self, config, folder, federation, state, engine):  # type: ignore[no-untyped-def]
            assert torch.equal(state.model.values, expected.values)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fednoro.run("digits", *small(*options, "name=stopped"), watcher=Stopped())
    resumed = fednoro.resume(tmp_path / "stopped")
    assert resumed.bacc == run.bacc
    first, second = (
        load_checkpoint(path / "checkpoints" / "round-00002.safetensors")
        for path in (run.folder, resumed.folder)
    )
    assert torch.equal(first.state.model.values, second.state.model.values)


def test_recalibrating_a_network_without_batchnorm_says_so(
    own_network: str, tmp_path: Path
) -> None:
    with pytest.warns(
        FedNoRoWarning, match=r"model\.recalibrate changes nothing: the network has no BatchNorm"
    ):
        fednoro.run(
            "digits",
            *small(f"model={own_network}:plain", "model.recalibrate=true", f"out={tmp_path}"),
        )


# Real weights and images.


def shared_file(name: str) -> Path:
    home = os.environ.get("FEDNORO_DATA") or Path(fednoro.__file__).parents[2] / "shared" / "data"
    path = Path(home) / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: set FEDNORO_DATA to the folder that has it")
    return path


def dermoscopy(per_class: int, side: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    table = shared_file("ham10000_labels.csv").read_text().splitlines()
    ids: dict[str, list[str]] = {}
    for row in csv.DictReader(table):
        ids.setdefault(row["dx"], []).append(row["image_id"])
    with zipfile.ZipFile(shared_file("ham10000_112.zip")) as archive:
        names = {Path(name).stem: name for name in archive.namelist()}
        images = [
            np.asarray(
                Image.open(io.BytesIO(archive.read(names[i]))).convert("RGB").resize((side, side))
            )
            for members in ids.values()
            for i in members[:per_class]
        ]
    return np.stack(images), np.repeat(np.arange(len(ids)), per_class)


def test_real_weights_load_and_recalibrating_does_not_hurt_what_their_features_tell() -> None:
    path = shared_file("resnet18_backbone_fp16.pth")
    images, labels = dermoscopy(per_class=30, side=64)
    data = Dataset(images, labels, tuple("abcdefg"))
    client = holding(*range(len(labels)))
    with pytest.warns(FedNoRoWarning, match="no classifier for these classes"):
        lab = engine(Resnet18(weights=str(path)), data, client)
    start = lab.net.weights()

    def score(weights: Weights) -> float:
        lab.net.load(weights)
        with torch.inference_mode():
            net = lab.net.net.eval()
            assert isinstance(net, ResNet)
            features = torch.cat(
                [net.features(lab.images.batch(i)) for i in torch.arange(len(labels)).split(70)]
            )
        probe = RidgeClassifier(alpha=1000.0)
        scaled = (features - features.mean(0)) / (features.std(0) + 1e-6)
        return float(cross_val_score(probe, scaled.numpy(), labels, cv=5).mean())

    before, after = score(start), score(lab.recalibrate(start, client))
    assert before > 2 / 7, "the weights themselves are worth something"
    assert after > before - 0.02
