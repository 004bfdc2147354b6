"""Networks, factories, and the vector that carries a network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from fednoro.core.types import UserError, Weights
from fednoro.models import (
    MODELS,
    Cnn,
    Factory,
    Packed,
    ResNet,
    Resnet18,
    Resnet34,
    Resnet50,
    SmallCNN,
    initialise,
)


class Mixed(nn.Module):
    """All kinds of tensors at once: frozen and tied parameters, float and integer
    buffers, one of them not saved.
    """

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
    "no buffers": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 3)),
        (6, 2, 8, 8),
    ),
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
def test_packing_keeps_every_tensor_of_the_state_dict(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
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
def test_a_state_dict_can_be_saved_as_safetensors(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
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
    other = Weights(
        torch.arange(len(old.values), dtype=torch.float32), old.counters + 40, old.segments
    )
    saved = packed.state_dict(other)
    flat = torch.cat([saved[name].flatten() for name in packed.names])
    assert torch.equal(flat, other.values)
    assert saved["trunk.1.num_batches_tracked"] == 42
    assert torch.equal(packed.values, old.values)


def test_segments_are_the_sizes_of_the_named_tensors_parameters_first() -> None:
    net = Mixed()
    sizes = {
        name: tensor.numel() for name, tensor in [*net.named_parameters(), *net.named_buffers()]
    }
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
def test_gradients_are_those_of_a_plain_copy(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    plain = stirred(build, shape, 1)
    packed = Packed(copy.deepcopy(plain))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected, found = (
        torch.autograd.grad(net(x).square().sum(), [p for p in net.parameters() if p.requires_grad])
        for net in (plain, packed.net)
    )
    assert sum(g.numel() for g in found) == packed.trainable
    assert all(g.abs().max() > 0 for g in found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_parameters_without_gradient_travel_in_the_vector_but_are_not_trained() -> None:
    packed = Packed(Mixed())
    packed.net(torch.randn(6, 5)).sum().backward()
    assert packed.names.index("frozen.weight") >= len(
        [p for p in packed.net.parameters() if p.requires_grad]
    )
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
    saved = packed.state_dict(
        Weights(torch.ones_like(packed.values), packed.weights().counters, packed.segments)
    )
    assert torch.equal(saved["tied.weight"], torch.ones(5, 4))


# Kernels with their channels last.


@each_net
@pytest.mark.parametrize("seed", range(3))
def test_weights_go_into_a_channels_last_network_and_come_back_unchanged(
    build: Callable[[], nn.Module], shape: tuple[int, ...], seed: int
) -> None:
    ordinary, packed = Packed(stirred(build, shape, seed)), Packed(build(), channels_last=True)
    weights = ordinary.weights()
    weights.values.copy_(
        torch.randn(len(weights.values), generator=torch.Generator().manual_seed(seed)).abs()
    )
    ordinary.load(weights)
    for target in (packed, packed.twin()):
        target.load(weights)
        back = target.weights()
        assert torch.equal(back.values, weights.values) and torch.equal(
            back.counters, weights.counters
        )
        assert torch.equal(target.ordinary(), weights.values)
        assert back.segments == weights.segments
        x = torch.randn(shape)
        torch.testing.assert_close(
            target.net.eval()(x), ordinary.net.eval()(x), rtol=1e-4, atol=1e-4
        )
    saved, expected = packed.state_dict(back), ordinary.net.state_dict()
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert saved[name].is_contiguous()
        assert torch.equal(saved[name], value), name
        assert torch.equal(packed.net.state_dict()[name], value), name


def test_kernels_of_convolutions_lie_in_the_vector_with_their_channels_last() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    packed = Packed(net, channels_last=True)
    kernel = net[0].weight
    assert kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()
    assert torch.equal(packed.values[: kernel.numel()], kernel.permute(0, 2, 3, 1).flatten())
    assert not torch.equal(packed.values, packed.ordinary())
    before = packed.weights().values
    with torch.no_grad():
        kernel[1, 2, 0, 1] = 7.0
    after = packed.weights().values
    assert (before != after).nonzero().flatten().tolist() == [1 * 27 + 2 * 9 + 0 * 3 + 1]


# ResNets.


def torchvision_resnet(depth: int, classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes in torchvision's ResNets, written down from their published structure."""
    expected: dict[str, tuple[int, ...]] = {}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            expected[f"{name}.{part}"] = (width,)
        expected[f"{name}.num_batches_tracked"] = ()

    expected["conv1.weight"] = (64, 3, 7, 7)
    norm("bn1", 64)
    inputs = 64
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth]
    for layer, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True), start=1):
        outputs = 4 * width if depth == 50 else width
        convolutions = (
            [(width, inputs, 1), (width, width, 3), (outputs, width, 1)]
            if depth == 50
            else [(width, inputs, 3), (width, width, 3)]
        )
        for block in range(count):
            where = f"layer{layer}.{block}"
            for i, (to, of, side) in enumerate(convolutions, start=1):
                expected[f"{where}.conv{i}.weight"] = (
                    to,
                    outputs if block and i == 1 else of,
                    side,
                    side,
                )
                norm(f"{where}.bn{i}", to)
            if block == 0 and inputs != outputs:
                expected[f"{where}.downsample.0.weight"] = (outputs, inputs, 1, 1)
                norm(f"{where}.downsample.1", outputs)
        inputs = outputs
    expected["fc.weight"], expected["fc.bias"] = (classes, inputs), (classes,)
    return expected


@pytest.fixture(scope="module")
def imagenet() -> ResNet:
    return ResNet(18, 1000)


@pytest.mark.parametrize(
    ("depth", "parameters", "tensors"),
    [(18, 11_689_512, 122), (34, 21_797_672, 218), (50, 25_557_032, 320)],
)
def test_resnets_have_torchvisions_names_shapes_and_order(
    depth: int, parameters: int, tensors: int
) -> None:
    net = ResNet(depth, 1000)
    state = net.state_dict()
    assert len(state) == tensors
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert {name: tuple(value.shape) for name, value in state.items()} == torchvision_resnet(
        depth, 1000
    )
    assert list(state) == list(torchvision_resnet(depth, 1000))
    for name in (
        "layer2.0.downsample.1.running_var",
        "layer4.1.bn2.num_batches_tracked",
        "conv1.weight",
        "fc.bias",
    ):
        assert name in state


@pytest.mark.parametrize(
    ("options", "width"), [(Resnet18(), 512), (Resnet34(), 512), (Resnet50(), 2048)]
)
def test_resnets_are_chosen_by_name_and_give_their_penultimate_layer(
    options: Resnet18, width: int
) -> None:
    assert MODELS[f"resnet{options.depth}"] is type(options)
    net = options.build(3, 5).eval()
    assert isinstance(net, ResNet)
    x = torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        features = net.features(x)
        assert features.shape == (2, width)
        torch.testing.assert_close(net(x), net.fc(features))


def test_a_bottleneck_strides_in_its_3x3_convolution_and_adds_its_shortcut_before_relu() -> None:
    net = ResNet(50, 2).eval()
    first, second = net.layer2[0], net.layer2[1]
    strides = [module.stride for module in first.modules() if isinstance(module, nn.Conv2d)]
    assert strides == [(1, 1), (2, 2), (1, 1), (2, 2)]
    x = torch.randn(2, 512, 4, 4)
    with torch.no_grad():
        for parameter in second.get_submodule("bn3").parameters():
            parameter.zero_()
        assert torch.equal(second(x), x.clamp(min=0))
        assert first(torch.randn(2, 256, 8, 6)).shape == (2, 512, 4, 3)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (32, 32), (64, 64), (24, 72), (1, 1)])
def test_resnet18_takes_images_of_any_size(imagenet: ResNet, height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width)
    with torch.no_grad():
        features, logits = imagenet.eval().features(x), imagenet(x)
    assert features.shape == (2, 512)
    assert logits.shape == (2, 1000)
    torch.testing.assert_close(
        logits, features @ imagenet.fc.weight.T + imagenet.fc.bias, rtol=1e-4, atol=1e-4
    )


def test_resnet18_reduces_the_image_as_the_paper_has_it(imagenet: ResNet) -> None:
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


def test_a_residual_block_adds_its_shortcut_before_the_last_relu(imagenet: ResNet) -> None:
    block = copy.deepcopy(imagenet.layer1[0]).eval()
    x = torch.randn(2, 64, 4, 4)
    with torch.no_grad():
        for parameter in block.get_submodule("bn2").parameters():
            parameter.zero_()
        assert torch.equal(block(x), x.clamp(min=0))


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("options", [Resnet18(), Resnet50()])
def test_resnets_refuse_images_that_are_neither_grey_nor_rgb(
    options: Resnet18, channels: int
) -> None:
    line = f"resnet{options.depth} takes images with 1 or 3 channels, the data has {channels}"
    with pytest.raises(UserError, match=line):
        options.inputs(channels)


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


# Factories.


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text(
        "from torch import nn\n"
        "def net(channels, classes, hidden=2):\n"
        "    return nn.Sequential(nn.Conv2d(channels, hidden, 1), nn.Flatten(), "
        "nn.LazyLinear(classes))\n"
        "def mlp(channels, classes, hidden=2):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels, hidden), nn.Linear(hidden, "
        "classes))\n"
        "def text(channels, classes):\n"
        "    return 'a network'\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken_factories.py").write_text("def f(channels, classes)\n    return None\n")
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
        "my_broken_factories:f",
    ],
)
def test_a_factory_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(UserError) as caught:
        Factory(name).build(channels=1, classes=2)
    assert str(caught.value).startswith(f"model.factory {name!r} cannot be imported (")


@pytest.mark.usefixtures("factories")
def test_a_factory_must_return_a_network() -> None:
    with pytest.raises(
        UserError, match=r"model\.factory 'my_factories:text' returned str, not a torch\.nn\.Module"
    ):
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


def test_a_factory_that_does_not_take_its_options_is_named() -> None:
    with pytest.raises(
        UserError, match=r"model\.factory 'builtins:dict' returned dict|cannot be called"
    ):
        Factory(factory="builtins:len", options={"depth": 3}).build(1, 2)


@pytest.mark.parametrize("size", [7, 8, 28])
def test_pooling_before_the_relu_gives_the_bits_of_pooling_after_it(size: int) -> None:
    torch.manual_seed(0)
    net = SmallCNN(1, 3, 4)
    after = copy.deepcopy(net)
    for place in [k for k, layer in enumerate(after.trunk) if isinstance(layer, nn.MaxPool2d)]:
        after.trunk[place], after.trunk[place + 1] = after.trunk[place + 1], after.trunk[place]
    assert [type(layer).__name__ for layer in after.trunk[2:4]] == ["ReLU", "MaxPool2d"]
    x = torch.rand(5, 1, size, size).round(decimals=1)  # with ties
    y = torch.tensor([0, 1, 2, 0, 1])
    for one in (net, after):
        nn.functional.cross_entropy(one(x), y).backward()
    for one, other in zip(net.parameters(), after.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert torch.equal(net.eval()(x), after.eval()(x))


@each_net
def test_a_twin_has_a_vector_of_its_own_and_a_shared_network_the_same_one(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    packed = Packed(stirred(build, shape, 0))
    next(packed.net.parameters()).requires_grad_(False)
    before = packed.weights()
    twin, shared = packed.twin(), packed.alias()
    twin.load(before)
    assert torch.equal(twin.ordinary(), before.values)
    for copied, own in ((twin, False), (shared, True)):
        assert (copied.values.data_ptr() == packed.values.data_ptr()) == own
        for (name, p), (other, q) in zip(
            packed.net.named_parameters(), copied.net.named_parameters(), strict=True
        ):
            assert name == other and p.requires_grad == q.requires_grad and (p is q) == own
    twin.values.zero_()
    assert all(not p.any() for p in twin.net.parameters()) and torch.equal(
        packed.ordinary(), before.values
    )
    shared.values.zero_()
    assert all(not p.any() for p in packed.net.parameters())
