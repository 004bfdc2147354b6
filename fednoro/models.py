"""Networks, and the vector that carries one.

ResNet-18 has torchvision's parameter names, so weights saved by torchvision load into it. Every network
here has `features` (the penultimate layer) and a linear classifier after it. `Packed` lays a network's
tensors into one vector: loading, sending and averaging a model are then single operations.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fednoro.options import Options, option
from fednoro.seeds import torch_seed
from fednoro.types import FedNoRoWarning, UserError, Weights


class SmallCNN(nn.Module):
    """Three 3×3 convolutions with BatchNorm: for small images and for machines without a GPU."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

        pool = nn.MaxPool2d(2, ceil_mode=True)
        self.trunk = nn.Sequential(
            *block(channels, width), pool, *block(width, 2 * width), pool, *block(2 * width, 2 * width)
        )
        self.fc = nn.Linear(2 * width, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x).mean((2, 3))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))  # type: ignore[no-any-return]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + shortcut).relu()  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2016) for 3-channel images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cnn(Options):
    """A small convolutional network, for small images and CPUs."""

    section: ClassVar[str] = "model"

    width: int = option(32, "channels of the first layer; the others have twice as many", ge=1, le=4096)

    def inputs(self, channels: int) -> int:
        """How many channels the network takes for data with `channels`."""
        return channels

    def build(self, channels: int, classes: int) -> nn.Module:
        return SmallCNN(channels, classes, self.width)


@dataclass(frozen=True)
class Resnet18(Options):
    """ResNet-18 with torchvision's parameter names; grey images are repeated to three channels."""

    section: ClassVar[str] = "model"

    weights: str | None = option(None, "a .pth or .safetensors file to start from, in torchvision's names")

    def inputs(self, channels: int) -> int:
        if channels not in (1, 3):
            raise UserError(f"model resnet18 takes images with 1 or 3 channels, the data has {channels}")
        return 3

    def build(self, channels: int, classes: int) -> nn.Module:
        net = ResNet18(classes)
        if self.weights is not None:
            load_pretrained(net, Path(self.weights).expanduser())
        return net


@dataclass(frozen=True)
class Factory(Options):
    """Your own network: `module:factory` is called with channels=, classes= and the given options."""

    section: ClassVar[str] = "model"

    factory: str = option("", "module:function that returns a torch.nn.Module")
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "keyword arguments for the function"})

    def inputs(self, channels: int) -> int:
        return channels

    def build(self, channels: int, classes: int) -> nn.Module:
        module, _, name = self.factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError, TypeError) as error:  # TypeError: a relative name
            raise UserError(f"model.factory {self.factory!r} cannot be imported: {error}") from error
        if not callable(factory):
            raise UserError(f"model.factory {self.factory!r} is a {type(factory).__name__}, not a function")
        net = factory(channels=channels, classes=classes, **self.options)
        if not isinstance(net, nn.Module):
            raise UserError(f"model.factory {self.factory!r} returned {type(net).__name__}, not a torch.nn.Module")
        return net


Model = Cnn | Resnet18 | Factory
MODELS: dict[str, type[Cnn] | type[Resnet18] | type[Factory]] = {"cnn": Cnn, "resnet18": Resnet18, "factory": Factory}


def load_pretrained(net: nn.Module, path: Path) -> None:
    """Starts `net` from a weight file; a classifier for other classes is left as initialised, with a warning."""
    if not path.is_file():
        raise UserError(f"model.weights: no such file: {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(loaded, Mapping):
            raise TypeError(f"it holds a {type(loaded).__name__}, not named tensors")
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"model.weights: {path} is not a readable weight file: {reason}") from error
    own = net.state_dict()
    given = {str(key).removeprefix("module."): value for key, value in loaded.items() if isinstance(value, Tensor)}
    fits = {key: value for key, value in given.items() if key in own and value.shape == own[key].shape}
    missing = [key for key in own if key not in fits and not key.endswith("num_batches_tracked")]
    trunk = [key for key in missing if not key.startswith("fc.")]
    if trunk:
        raise UserError(
            f"model.weights: {path} has no {trunk[0]} of shape {tuple(own[trunk[0]].shape)} ({len(trunk)} missing)"
        )
    if missing:
        warnings.warn(f"{path.name} has no classifier for these classes: it starts fresh", FedNoRoWarning, stacklevel=2)
    net.load_state_dict({**own, **fits})


def initialise(model: Model, channels: int, classes: int, seed: int, purpose: str = "model", *keys: int) -> nn.Module:
    """Builds the network with weights that depend on the seed, the purpose and the keys alone."""
    with torch_seed(seed, purpose, *keys):
        return model.build(channels, classes)


class Packed:
    """A network whose floating-point tensors are views into one vector: parameters first, then buffers."""

    def __init__(self, net: nn.Module, device: torch.device | str = "cpu") -> None:
        self.net = net.to(device)
        named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        rest = [(name, p) for name, p in self.net.named_parameters() if not p.requires_grad]
        buffers = list(self.net.named_buffers())
        floats = [(n, b) for n, b in buffers if b.is_floating_point()]
        self._counters = [(n, b) for n, b in buffers if not b.is_floating_point()]
        tensors = [*named, *rest, *floats]
        first = {id(tensor): name for name, tensor in [*tensors, *self._counters]}
        every = [*self.net.named_parameters(remove_duplicate=False), *self.net.named_buffers(remove_duplicate=False)]
        self._stored_as = {name: first[id(tensor)] for name, tensor in every}  # tied tensors have several names
        self.names = tuple(name for name, _ in tensors)
        self.shapes = tuple(tensor.shape for _, tensor in tensors)
        self.segments = tuple(tensor.numel() for _, tensor in tensors)
        self.trainable = sum(p.numel() for _, p in named)
        self.values = torch.cat([tensor.detach().flatten() for _, tensor in tensors])
        for (_, tensor), view in zip(tensors, self._views(self.values), strict=True):
            tensor.data = view
        self.gradient = torch.zeros_like(self.values[: self.trainable])
        for (_, parameter), view in zip(named, self._views(self.gradient), strict=False):
            parameter.grad = view
        self.norms = [m for m in self.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def _views(self, vector: Tensor) -> list[Tensor]:
        views, start = [], 0
        for shape, size in zip(self.shapes, self.segments, strict=True):
            if start + size > vector.numel():
                break
            views.append(vector[start : start + size].view(shape))
            start += size
        return views

    def load(self, weights: Weights) -> None:
        """Takes over `weights`, in place."""
        self.values.copy_(weights.values)
        start = 0
        for _, counter in self._counters:
            counter.copy_(weights.counters[start : start + counter.numel()].view(counter.shape))
            start += counter.numel()

    def weights(self) -> Weights:
        """A copy of the present weights."""
        counters = [counter.flatten().to(torch.int64) for _, counter in self._counters]
        together = torch.cat(counters) if counters else torch.empty(0, dtype=torch.int64)
        return Weights(self.values.clone(), together, self.segments)

    def state_dict(self, weights: Weights) -> dict[str, Tensor]:
        """`weights` under the network's own tensor names, ready for `load_state_dict` anywhere."""
        tensors = dict(zip(self.names, self._views(weights.values.detach().cpu()), strict=True))
        start = 0
        for name, counter in self._counters:
            part = weights.counters[start : start + counter.numel()]
            tensors[name] = part.view(counter.shape).to("cpu", counter.dtype)
            start += counter.numel()
        own = (name for name in self.net.state_dict() if name in self._stored_as)
        return {name: tensors[self._stored_as[name]].clone() for name in own}
