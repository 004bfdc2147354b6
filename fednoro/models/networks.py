"""Networks: each has `features` (the penultimate layer) and a linear classifier `fc` after it.

The ResNets have torchvision's parameter names, so weights saved by torchvision load into them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednoro.models.cpu_convolution import Spare, product


class SmallCNN(nn.Module):
    """Three 3×3 convolutions with BatchNorm: for small images and for machines without a GPU."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, *pool: nn.Module) -> list[nn.Module]:
            layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            # The same as pooling last, to the bit, with a quarter of the work.
            return [*layers, *pool, nn.ReLU()]

        pool = nn.MaxPool2d(2, ceil_mode=True)
        self.trunk = nn.Sequential(
            *block(channels, width, pool),
            *block(width, 2 * width, pool),
            *block(2 * width, 2 * width),
        )
        self.fc = nn.Linear(2 * width, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x).mean((2, 3))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))  # type: ignore[no-any-return]


class Convolution(nn.Conv2d):
    """A convolution that is trained on the CPU as a matrix product
    where its output has at most four pixels.

    There oneDNN spends most of its time on rearranging the weights and their gradient,
    which are larger than the maps. An image of one pixel meets a single weight of each
    kernel, and its border the others.
    """

    # memory for the weight's gradient, from whoever uses it before the next step
    spare: Spare | None = None

    def reset_parameters(self) -> None:
        """Leaves the weights to the network, which draws them all or has them from a file."""

    def forward(self, x: Tensor) -> Tensor:
        k, s, p = self.kernel_size[0], self.stride[0], int(self.padding[0])
        height, width = ((side + 2 * p - k) // s + 1 for side in x.shape[2:])
        if x.device.type != "cpu" or height * width > 4 or not torch.is_grad_enabled():
            return super().forward(x)
        if x.shape[2:] == (1, 1) and height == width == 1:
            patches, window = x.flatten(1), slice(p, p + 1)  # B × I
        else:  # B·H·W × I·k·k
            patches, window = (
                F.unfold(x, k, padding=p, stride=s).transpose(1, 2).flatten(0, 1),
                slice(0, k),
            )
        y = product(patches, self.weight, window, self.spare)
        return y.view(len(x), height, width, -1).permute(0, 3, 1, 2)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Convolution(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Convolution(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + shortcut).relu()  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut;
    the stride is in the 3×3, as torchvision has it.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = Convolution(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Convolution(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = Convolution(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + shortcut).relu()  # type: ignore[no-any-return]


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(
        Convolution(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )


class ResNet(nn.Module):
    """ResNet-18, -34 or -50 (He et al., 2016) for 3-channel images.

    Without `random` the convolutions hold nothing yet: for those whose weights come from a file.
    """

    blocks: ClassVar[dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]]] = {
        18: (BasicBlock, (2, 2, 2, 2)),
        34: (BasicBlock, (3, 4, 6, 3)),
        50: (Bottleneck, (3, 4, 6, 3)),
    }

    def __init__(self, depth: int, classes: int, random: bool = True) -> None:
        super().__init__()
        block, counts = self.blocks[depth]

        def layer(inputs: int, width: int, stride: int, count: int) -> nn.Sequential:
            outputs = width * block.expansion
            return nn.Sequential(
                block(inputs, width, stride), *(block(outputs, width, 1) for _ in range(count - 1))
            )

        self.conv1 = Convolution(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = layer(64, 64, 1, counts[0])
        self.layer2 = layer(64 * block.expansion, 128, 2, counts[1])
        self.layer3 = layer(128 * block.expansion, 256, 2, counts[2])
        self.layer4 = layer(256 * block.expansion, 512, 2, counts[3])
        self.fc = nn.Linear(512 * block.expansion, classes)
        for module in self.modules() if random else ():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))  # type: ignore[no-any-return]
