"""Networks to choose from: one options class each, one line each in `MODELS`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from fednoro.core.options import Options, import_named, option
from fednoro.core.seeds import torch_seed
from fednoro.core.types import UserError
from fednoro.models.networks import ResNet, SmallCNN
from fednoro.models.packed import Packed
from fednoro.models.pretrained import load_pretrained

__all__ = [
    "MODELS",
    "Cnn",
    "Factory",
    "Model",
    "Packed",
    "ResNet",
    "Resnet18",
    "Resnet34",
    "Resnet50",
    "SmallCNN",
    "initialise",
    "load_pretrained",
]

_RECALIBRATE = (
    "before round 1, re-estimate BatchNorm's statistics on the clients' images: "
    "for weights from other data"
)


@dataclass(frozen=True)
class Cnn(Options):
    """A small convolutional network, for small images and CPUs."""

    section: ClassVar[str] = "model"
    recalibrate: ClassVar[bool] = False  # it starts from nothing that would need it

    width: int = option(
        32, "channels of the first layer; the others have twice as many", ge=1, le=4096
    )

    def inputs(self, channels: int) -> int:
        """How many channels the network takes for data with `channels`."""
        return channels

    def build(self, channels: int, classes: int) -> nn.Module:
        return SmallCNN(channels, classes, self.width)


@dataclass(frozen=True)
class Resnet18(Options):
    """ResNet-18 with torchvision's parameter names; grey images are repeated to three channels."""

    section: ClassVar[str] = "model"
    depth: ClassVar[int] = 18

    weights: str | None = option(
        None, "none, or a .pth or .safetensors file in torchvision's names to start from"
    )
    recalibrate: bool = option(False, _RECALIBRATE)

    def inputs(self, channels: int) -> int:
        if channels not in (1, 3):
            raise UserError(
                f"model resnet{self.depth} takes images with 1 or 3 channels, "
                f"the data has {channels}"
            )
        return 3

    def build(self, channels: int, classes: int) -> nn.Module:
        if self.weights in (None, "none"):
            return ResNet(self.depth, classes)
        net = ResNet(self.depth, classes, random=False)
        load_pretrained(net, Path(str(self.weights)).expanduser())
        return net


@dataclass(frozen=True)
class Resnet34(Resnet18):
    """ResNet-34, likewise."""

    depth: ClassVar[int] = 34


@dataclass(frozen=True)
class Resnet50(Resnet18):
    """ResNet-50, likewise."""

    depth: ClassVar[int] = 50


@dataclass(frozen=True)
class Factory(Options):
    """Your own network: `module:factory` is called with channels=,
    classes= and the given options.
    """

    section: ClassVar[str] = "model"

    factory: str = option("", "module:function that returns a torch.nn.Module")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "keyword arguments for the function"}
    )
    recalibrate: bool = option(False, _RECALIBRATE)

    def inputs(self, channels: int) -> int:
        return channels

    def build(self, channels: int, classes: int) -> nn.Module:
        factory = import_named(self.factory, "model.factory")
        if not callable(factory):
            raise UserError(
                f"model.factory {self.factory!r} is a {type(factory).__name__}, not a function"
            )
        try:
            net = factory(channels=channels, classes=classes, **self.options)
        except TypeError as error:
            raise UserError(f"model.factory {self.factory!r} cannot be called: {error}") from error
        if not isinstance(net, nn.Module):
            raise UserError(
                f"model.factory {self.factory!r} returned {type(net).__name__}, "
                "not a torch.nn.Module"
            )
        return net


Model = Cnn | Resnet18 | Factory
MODELS: dict[str, type[Cnn] | type[Resnet18] | type[Factory]] = {
    "cnn": Cnn,
    "resnet18": Resnet18,
    "resnet34": Resnet34,
    "resnet50": Resnet50,
    "factory": Factory,
}


def initialise(
    model: Model, channels: int, classes: int, seed: int, purpose: str = "model", *keys: int
) -> nn.Module:
    """Builds the network with weights that depend on the seed, the purpose and the keys alone."""
    with torch_seed(seed, purpose, *keys):
        return model.build(channels, classes)
