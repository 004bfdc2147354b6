"""How many CPU threads a network is worth.

Below some work per batch, threads cost more than they bring, and far more when the cores are
shared: a default run that takes half a minute on one thread took six with two threads on two busy
cores. The rule depends on the network and the batch alone, never on a clock, because the number
of threads shows in the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WORTH_THREADS = 2e8  # multiplications in one batch's forward pass: about 5 ms of one core


def forward_work(net: nn.Module, batch: tuple[int, ...]) -> int:
    """Multiplications of convolutions and linear layers
    in one forward pass over `batch`, B×C×H×W.
    """
    total = 0

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        total += output.numel() * weight[0].numel()

    layers = [module for module in net.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    training = net.training
    try:
        with torch.inference_mode():
            net.eval()(torch.zeros((1, *batch[1:]), device=next(net.parameters()).device))
    finally:
        net.train(training)
        for hook in hooks:
            hook.remove()
    return total * batch[0]


@contextmanager
def worthwhile_threads(net: nn.Module, batch: tuple[int, ...]) -> Iterator[None]:
    """One thread inside the block where the network is small, as many as torch chose otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if forward_work(net, batch) >= WORTH_THREADS else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
