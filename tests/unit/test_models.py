"""Networks, weight files, factories, and the vector that carries a network."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from safetensors.torch import save_file
from torch import Tensor, nn

from fednoro.models import Cnn, Factory, Packed, ResNet18, Resnet18, SmallCNN, initialise, load_pretrained
from fednoro.types import FedNoRoWarning, UserError, Weights


class Mixed(nn.Module):
    """All kinds of tensors at once: frozen and tied parameters, float and integer buffers, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = nn.Parameter(torch.randn(5, 4))
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.last.weight
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("table", torch.arange(6, dtype=torch.int32).view(2, 3))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.first(x))) * self.mask * self.scale
        return self.last(x) + self.tied(x)  # type: ignore[no-any-return]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (lambda: SmallCNN(2, 3, 4), (6, 2, 8, 8)),
    "no buffers": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 3)), (6, 2, 8, 8)),
    "mixed": (Mixed, (6, 5)),
}
each_net = pytest.mark.parametrize(("build", "shape"), NETS.values(), ids=NETS.keys())


def stirred(build: Callable[[], nn.Module], shape: tuple[int, ...], seed: int) -> nn.Module:
    """A network whose running statistics and counters are no longer those of a new one."""
    torch.manual_seed(seed)
    net = build().train()
    for _ in range(seed + 1):
        net(torch.randn(shape))
    return net


# The vector.


@each_net
def test_packing_keeps_every_tensor_of_the_state_dict(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    plain = stirred(build, shape, 1)
    expected = copy.deepcopy(plain.state_dict())
    packed = Packed(plain)
    saved = packed.state_dict(packed.weights())
    assert list(saved) == list(expected)
    for name, value in expected.items():
        assert saved[name].dtype == value.dtype
        assert saved[name].shape == value.shape
        assert torch.equal(saved[name], value), name
        assert torch.equal(packed.net.state_dict()[name], value), name


@each_net
def test_a_state_dict_loads_into_a_plain_copy_which_then_computes_the_same(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    packed, plain, x = Packed(stirred(build, shape, 2)), build(), torch.randn(shape)
    before = plain.eval()(x)
    plain.load_state_dict(packed.state_dict(packed.weights()))
    assert not torch.equal(plain(x), before)
    assert torch.equal(plain(x), packed.net.eval()(x))


@each_net
def test_loading_weights_makes_the_network_the_one_they_came_from(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    source, target = Packed(stirred(build, shape, 3)), Packed(stirred(build, shape, 1))
    x, values = torch.randn(shape), target.values
    target.load(source.weights())
    assert torch.equal(target.net.eval()(x), source.net.eval()(x))
    assert target.values is values  # in place: views and optimizer state stay valid
    for name, value in source.net.state_dict().items():
        assert torch.equal(target.net.state_dict()[name], value), name


@each_net
def test_a_state_dict_can_be_saved_as_safetensors(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    packed = Packed(stirred(build, shape, 1))
    saved = load_safetensors(save_safetensors(packed.state_dict(packed.weights())))
    for name, value in packed.net.state_dict().items():
        assert torch.equal(saved[name], value), name


def test_weights_are_a_copy_that_further_training_does_not_touch() -> None:
    packed = Packed(SmallCNN(1, 3, 4))
    weights = packed.weights()
    values, counters = weights.values.clone(), weights.counters.clone()
    packed.net.train()(torch.randn(4, 1, 8, 8))
    packed.values.add_(1)
    assert torch.equal(weights.values, values)
    assert torch.equal(weights.counters, counters)


def test_a_state_dict_is_that_of_the_given_weights_and_not_of_the_network() -> None:
    packed = Packed(stirred(lambda: SmallCNN(1, 3, 4), (4, 1, 8, 8), 1))
    old = packed.weights()
    other = Weights(torch.arange(len(old.values), dtype=torch.float32), old.counters + 40, old.segments)
    saved = packed.state_dict(other)
    flat = torch.cat([saved[name].flatten() for name in packed.names])
    assert torch.equal(flat, other.values)
    assert saved["trunk.1.num_batches_tracked"] == 42
    assert torch.equal(packed.values, old.values)


def test_segments_are_the_sizes_of_the_named_tensors_parameters_first() -> None:
    net = Mixed()
    sizes = {name: tensor.numel() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    packed = Packed(net)
    assert packed.weights().segments == tuple(sizes[name] for name in packed.names)
    assert sum(packed.segments) == len(packed.values)
    trainable = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert list(packed.names[: len(trainable)]) == trainable
    assert packed.trainable == sum(sizes[name] for name in trainable)
    assert set(packed.names) == set(sizes) - {"mask", "table", "norm.num_batches_tracked"}


def test_running_statistics_live_in_the_vector_and_training_updates_them_there() -> None:
    packed = Packed(SmallCNN(1, 3, 4))
    reference = copy.deepcopy(packed.net)
    x = 3 + 2 * torch.randn(4, 1, 8, 8)
    before = packed.weights()
    packed.net.train()(x)
    reference.train()(x)
    after = packed.weights()
    assert not torch.equal(before.values[packed.trainable :], after.values[packed.trainable :])
    assert torch.equal(before.values[: packed.trainable], after.values[: packed.trainable])
    assert after.counters.tolist() == [1, 1, 1]
    saved = packed.state_dict(after)
    for name, value in reference.state_dict().items():
        assert torch.equal(saved[name], value), name


@each_net
def test_gradients_accumulate_in_one_vector_as_they_would_in_a_plain_copy(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    plain = stirred(build, shape, 1)
    packed = Packed(copy.deepcopy(plain))
    for seed in (0, 1):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for net in (plain, packed.net):
            net(x).square().sum().backward()
    expected = [p.grad.flatten() for p in plain.parameters() if p.requires_grad and p.grad is not None]
    assert len(packed.gradient) == packed.trainable
    assert packed.gradient.abs().max() > 0
    torch.testing.assert_close(packed.gradient, torch.cat(expected), rtol=1e-6, atol=1e-6)


def test_parameters_without_gradient_travel_in_the_vector_but_are_not_trained() -> None:
    packed = Packed(Mixed())
    packed.net(torch.randn(6, 5)).sum().backward()
    assert packed.names.index("frozen.weight") >= len([p for p in packed.net.parameters() if p.requires_grad])
    assert packed.net.frozen.weight.grad is None  # type: ignore[union-attr]
    with torch.no_grad():
        packed.values[: packed.trainable] = 0
    assert packed.net.frozen.weight.abs().sum() > 0  # type: ignore[union-attr]


def test_tied_parameters_are_stored_once_and_stay_tied() -> None:
    packed = Packed(Mixed())
    assert "tied.weight" not in packed.names
    packed.values.zero_()
    assert not packed.net.last.weight.any()  # type: ignore[operator,union-attr]
    assert packed.net.tied.weight is packed.net.last.weight  # type: ignore[union-attr]
    saved = packed.state_dict(Weights(torch.ones_like(packed.values), packed.weights().counters, packed.segments))
    assert torch.equal(saved["tied.weight"], torch.ones(5, 4))


# ResNet-18.


def torchvision_resnet18(classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes in torchvision's resnet18, written down from its published structure."""
    expected: dict[str, tuple[int, ...]] = {}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            expected[f"{name}.{part}"] = (width,)
        expected[f"{name}.num_batches_tracked"] = ()

    expected["conv1.weight"] = (64, 3, 7, 7)
    norm("bn1", 64)
    inputs = 64
    for layer, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            where = f"layer{layer}.{block}"
            expected[f"{where}.conv1.weight"] = (width, inputs, 3, 3)
            norm(f"{where}.bn1", width)
            expected[f"{where}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{where}.bn2", width)
            if inputs != width:
                expected[f"{where}.downsample.0.weight"] = (width, inputs, 1, 1)
                norm(f"{where}.downsample.1", width)
            inputs = width
    expected["fc.weight"], expected["fc.bias"] = (classes, 512), (classes,)
    return expected


@pytest.fixture(scope="module")
def imagenet() -> ResNet18:
    return ResNet18(1000)


def test_resnet18_has_torchvisions_names_shapes_and_order(imagenet: ResNet18) -> None:
    state = imagenet.state_dict()
    assert len(state) == 122
    assert sum(p.numel() for p in imagenet.parameters()) == 11_689_512
    assert {name: tuple(value.shape) for name, value in state.items()} == torchvision_resnet18(1000)
    assert list(state) == list(torchvision_resnet18(1000))
    for name in ("layer2.0.downsample.1.running_var", "layer4.1.bn2.num_batches_tracked", "conv1.weight", "fc.bias"):
        assert name in state


@pytest.mark.parametrize(("height", "width"), [(8, 8), (32, 32), (64, 64), (24, 72), (1, 1)])
def test_resnet18_takes_images_of_any_size(imagenet: ResNet18, height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width)
    with torch.no_grad():
        features, logits = imagenet.eval().features(x), imagenet(x)
    assert features.shape == (2, 512)
    assert logits.shape == (2, 1000)
    torch.testing.assert_close(logits, features @ imagenet.fc.weight.T + imagenet.fc.bias, rtol=1e-4, atol=1e-4)


def test_resnet18_reduces_the_image_as_the_paper_has_it(imagenet: ResNet18) -> None:
    sizes: dict[str, tuple[int, ...]] = {}
    hooks = [
        getattr(imagenet, name).register_forward_hook(
            lambda _m, _i, output, name=name: sizes.__setitem__(name, tuple(output.shape[1:]))
        )
        for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4")
    ]
    with torch.no_grad():
        imagenet.eval()(torch.zeros(1, 3, 64, 96))
    for hook in hooks:
        hook.remove()
    assert sizes == {
        "conv1": (64, 32, 48),
        "maxpool": (64, 16, 24),
        "layer1": (64, 16, 24),
        "layer2": (128, 8, 12),
        "layer3": (256, 4, 6),
        "layer4": (512, 2, 3),
    }


def test_a_residual_block_adds_its_shortcut_before_the_last_relu(imagenet: ResNet18) -> None:
    block = copy.deepcopy(imagenet.layer1[0]).eval()
    x = torch.randn(2, 64, 4, 4)
    with torch.no_grad():
        for parameter in block.get_submodule("bn2").parameters():
            parameter.zero_()
        assert torch.equal(block(x), x.clamp(min=0))


@pytest.mark.parametrize("channels", [2, 4])
def test_resnet18_refuses_images_that_are_neither_grey_nor_rgb(channels: int) -> None:
    with pytest.raises(UserError, match=f"resnet18 takes images with 1 or 3 channels, the data has {channels}"):
        Resnet18().inputs(channels)


def test_how_many_channels_each_network_takes() -> None:
    assert (Resnet18().inputs(1), Resnet18().inputs(3)) == (3, 3)
    assert (Cnn().inputs(1), Cnn().inputs(2)) == (1, 2)
    assert Factory("m:f").inputs(5) == 5


@pytest.mark.parametrize(("height", "width"), [(1, 1), (8, 8), (7, 13), (32, 32)])
def test_the_small_network_takes_images_of_any_size(height: int, width: int) -> None:
    net = Cnn(width=4).build(channels=2, classes=5).eval()
    x = torch.randn(3, 2, height, width)
    assert isinstance(net, SmallCNN)
    assert net.features(x).shape == (3, 8)
    assert torch.equal(net(x), net.fc(net.features(x)))
    assert net(x).shape == (3, 5)


# Weight files.


@pytest.fixture(scope="module")
def pretrained() -> dict[str, Tensor]:
    return initialise(Resnet18(), 3, 7, seed=11).state_dict()


def save(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


def test_a_weight_file_gives_all_of_its_tensors(pretrained: dict[str, Tensor], tmp_path: Path) -> None:
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
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")  # as in torchvision's first files
    }
    path = save(half, tmp_path / "half.pth")
    with pytest.warns(FedNoRoWarning, match=r"half\.pth has no classifier"):
        net = initialise(Resnet18(weights=str(path)), 3, 4, seed=5)
    fresh = initialise(Resnet18(), 3, 4, seed=5).state_dict()
    for name, value in net.state_dict().items():
        trunk = f"module.{name}" in half
        assert value.dtype == fresh[name].dtype
        assert torch.equal(value, half[f"module.{name}"].float() if trunk else fresh[name]), name


def test_a_classifier_for_other_classes_starts_fresh(pretrained: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file(pretrained, path)
    with pytest.warns(FedNoRoWarning, match="no classifier for these classes"):
        net = initialise(Resnet18(weights=str(path)), 3, 4, seed=5)
    fresh = initialise(Resnet18(), 3, 4, seed=5)
    assert torch.equal(net.state_dict()["fc.weight"], fresh.state_dict()["fc.weight"])
    assert torch.equal(net.state_dict()["conv1.weight"], pretrained["conv1.weight"])


def test_safetensors_give_all_of_their_tensors(pretrained: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file(pretrained, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Resnet18(weights=str(path)).build(3, 7)
    assert all(torch.equal(value, pretrained[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("change", ["absent", "of another shape", "not a tensor"])
def test_a_missing_trunk_tensor_is_named(pretrained: dict[str, Tensor], tmp_path: Path, change: str) -> None:
    state: dict[str, object] = dict(pretrained)
    name = "layer2.0.downsample.1.running_var"
    if change == "absent":
        del state[name]
    else:
        state[name] = torch.ones(3) if change == "of another shape" else "nothing"
    path = save(state, tmp_path / "net.pth")
    with pytest.raises(UserError) as caught:
        Resnet18(weights=str(path)).build(3, 7)
    assert f"{path} has no {name} of shape (128,) (1 missing)" in str(caught.value)


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


@pytest.mark.parametrize("content", [b"", b"not weights", b"\x80\x02", b"PK\x03\x04 torn archive"], ids=range(4))
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


# Factories.


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text(
        "from torch import nn\n"
        "def net(channels, classes, hidden=2):\n"
        "    return nn.Sequential(nn.Conv2d(channels, hidden, 1), nn.Flatten(), nn.LazyLinear(classes))\n"
        "def mlp(channels, classes, hidden=2):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels, hidden), nn.Linear(hidden, classes))\n"
        "def text(channels, classes):\n"
        "    return 'a network'\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("factories")
def test_a_factory_is_called_with_channels_classes_and_its_options() -> None:
    net = Factory("my_factories:mlp", {"hidden": 6}).build(channels=4, classes=3)
    assert [tuple(p.shape) for p in net.parameters()] == [(6, 4), (6,), (3, 6), (3,)]
    same = [initialise(Factory("my_factories:mlp"), 4, 3, seed=1).state_dict() for _ in range(2)]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    "name",
    [
        "no_such_module:f",
        "my_factories:missing",
        "my_factories",
        "my_factories:",
        ":mlp",
        "",
        "..up:f",
        "my factories:f",
    ],
)
def test_a_factory_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(UserError) as caught:
        Factory(name).build(channels=1, classes=2)
    assert str(caught.value).startswith(f"model.factory {name!r} cannot be imported: ")


@pytest.mark.usefixtures("factories")
def test_a_factory_must_return_a_network() -> None:
    with pytest.raises(UserError, match=r"model\.factory 'my_factories:text' returned str, not a torch\.nn\.Module"):
        Factory("my_factories:text").build(channels=1, classes=2)


# Initial weights.


def test_the_same_seed_gives_the_same_weights_in_any_order_of_construction() -> None:
    def build(seed: int, purpose: str = "model", *keys: int) -> Tensor:
        return Packed(initialise(Cnn(width=2), 1, 3, seed, purpose, *keys)).values

    asked = [(0, "model"), (1, "model"), (0, "annotator", 0), (0, "annotator", 1)]
    forward = {key: build(*key) for key in asked}  # type: ignore[arg-type]
    torch.manual_seed(99)
    torch.randn(5)
    backward = {key: build(*key) for key in reversed(asked)}  # type: ignore[arg-type]
    for i, key in enumerate(asked):
        assert torch.equal(forward[key], backward[key]), key
        for other in asked[:i]:
            assert not torch.equal(forward[key], forward[other]), (key, other)


def test_a_factory_must_be_a_function() -> None:
    with pytest.raises(UserError, match=r"model\.factory 'math:pi' is a float, not a function"):
        Factory(factory="math:pi").build(1, 2)
