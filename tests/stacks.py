"""A small ResNet that clients train together on a CPU, for tests of stacks."""

from __future__ import annotations

from typing import Any

import torch
from exchanges import Lab, Tolerance
from federations import CLASSES
from torch import nn

from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.models.networks import BasicBlock, Bottleneck, Convolution, ResNet


class Thin(ResNet):
    """A ResNet of few channels, with both kinds of block and both kinds of shortcut."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.conv1 = Convolution(3, 8, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.layer3 = nn.Sequential(Bottleneck(16, 4, 1))
        self.layer4 = nn.Sequential(Bottleneck(16, 8, 1))
        self.fc = nn.Linear(32, CLASSES)


def thin() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(9)  # one of few that no last bit pushes over a ReLU's edge
        net = Thin()
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return net


THIN = Lab(thin, 16)
# A deep network carries the last bits further than the small one that the other
# engines are compared with: where a gradient is zero but for them, Adam takes a whole
# step, one way or the other.
CLOSE = Tolerance(1e-3, 1e-2, 4, 1e-3, 1e-3)


def engine(lab: Lab = THIN, stacked: bool | None = True, **options: Any) -> CudaEngine:
    # float32 on a CPU
    return CudaEngine(*lab.given(), precision="tf32", stacked=stacked, **options)
