"""Convolutions as products: the same numbers as PyTorch's, and
gradients that are the caller's own.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednoro.core.training import Training
from fednoro.engine.lane import Lane
from fednoro.models.cpu_convolution import Spare
from fednoro.models.networks import Convolution
from fednoro.models.packed import LARGE, Copies

# kernel, stride, padding, side
LAYERS = [
    (3, 1, 1, 1),
    (3, 1, 1, 2),
    (3, 2, 1, 2),
    (3, 2, 1, 1),
    (5, 1, 2, 1),
    (1, 1, 0, 1),
    (1, 2, 0, 4),
    (2, 1, 1, 1),
]


def layer(kernel: int, stride: int, padding: int, spare: bool = True) -> Convolution:
    torch.manual_seed(kernel)
    made = Convolution(4, 6, kernel, stride, padding=padding, bias=False).double()
    nn.init.normal_(made.weight)
    made.spare = Spare() if spare else None
    return made


def images(side: int, count: int = 5) -> Tensor:
    torch.manual_seed(side)
    return torch.randn(count, 4, side, side, dtype=torch.float64, requires_grad=True)


def ordinary(made: Convolution) -> Callable[[Tensor], Tensor]:
    return lambda x: F.conv2d(x, made.weight, stride=made.stride, padding=made.padding)


def gradients(
    made: Convolution, forward: Callable[[Tensor], Tensor], *views: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        sum((forward(x).sin().sum() for x in views), torch.zeros(())), [*views, made.weight]
    )


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize(("kernel", "stride", "padding", "side"), LAYERS)
def test_outputs_and_gradients_are_those_of_pytorch(
    kernel: int, stride: int, padding: int, side: int, spare: bool
) -> None:
    made, x = layer(kernel, stride, padding, spare), images(side)
    torch.testing.assert_close(made(x), ordinary(made)(x))
    torch.testing.assert_close(gradients(made, made, x), gradients(made, ordinary(made), x))


@pytest.mark.parametrize(("kernel", "stride", "padding", "side"), LAYERS)
def test_kept_memory_gives_the_same_gradients_step_after_step(
    kernel: int, stride: int, padding: int, side: int
) -> None:
    made = layer(kernel, stride, padding)
    assert made.spare is not None
    places = set()
    for count in (5, 3, 5):
        x = images(side, count)
        expected = gradients(made, ordinary(made), x)
        with made.spare.offer():
            found = gradients(made, made, x)
        torch.testing.assert_close(found, expected)
        places.add(found[-1].data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("side", [1, 2])
def test_one_step_may_show_the_layer_several_views(side: int) -> None:
    made = layer(3, 1, 1)
    assert made.spare is not None
    views = images(side), images(side, 7), images(3 - side)
    expected = gradients(made, ordinary(made), *views)
    for _ in range(3):
        with made.spare.offer():
            found = gradients(made, made, *views)
        torch.testing.assert_close(found, expected)


def test_images_of_another_size_leave_nothing_behind() -> None:
    made = layer(3, 1, 1)
    assert made.spare is not None
    for side in (2, 1, 2, 1):
        x = images(side)
        expected = gradients(made, ordinary(made), x)
        with made.spare.offer():
            torch.testing.assert_close(gradients(made, made, x), expected)


def test_gradients_outside_an_offer_are_not_overwritten() -> None:
    made = layer(3, 1, 1)
    assert made.spare is not None
    x = images(1)
    mine = gradients(made, made, x)
    before = mine[-1].clone()
    for seed in range(3):
        other = images(1, 9 + seed)
        with made.spare.offer():
            gradients(made, made, other)
        gradients(made, made, other)
    assert torch.equal(mine[-1], before)


@pytest.mark.parametrize("side", [1, 2])
def test_gradients_have_gradients(side: int) -> None:
    made, x = layer(3, 1, 1), images(side)
    assert made.spare is not None

    def penalty(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(forward(x).sin().sum(), [x, made.weight], create_graph=True)
        return torch.autograd.grad(
            sum((g.pow(2).sum() for g in found), torch.zeros(())), [x, made.weight]
        )

    expected = penalty(ordinary(made))
    torch.testing.assert_close(penalty(made), expected)
    with made.spare.offer():
        torch.testing.assert_close(penalty(made), expected)


@pytest.mark.parametrize("side", [1, 2])
def test_function_transforms_and_autocast(side: int) -> None:
    made, x = layer(3, 1, 1), images(side).detach()

    def of_weight(forward: Callable[[Tensor, Tensor], Tensor]) -> Any:
        return torch.func.vmap(
            torch.func.grad(lambda w, one: forward(w, one[None]).sin().sum()), (None, 0)
        )

    expected = of_weight(lambda w, one: F.conv2d(one, w, padding=1))(made.weight.detach(), x)
    called = of_weight(lambda w, one: torch.func.functional_call(made, {"weight": w}, (one,)))
    torch.testing.assert_close(called(made.weight.detach(), x), expected)

    single = made.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = single(x.float())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert single.weight.grad is not None


def test_copies_of_a_network_share_no_memory() -> None:
    made, x = layer(3, 1, 1), images(1)
    assert made.spare is not None
    with made.spare.offer():
        mine = gradients(made, made, x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.spare is not made.spare
        with other.spare.offer():
            theirs = gradients(other, other, x)
        assert theirs[-1].data_ptr() != mine[-1].data_ptr()
        torch.testing.assert_close(theirs, mine)


class Net(nn.Module):
    """Two convolutions whose second sees one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            Convolution(3, 8, 3, 2, padding=1, bias=False),
            layer(3, 1, 1, spare=False).float(),
        )
        nn.init.normal_(self.first.weight)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x)[:, :4]).flatten(1))  # type: ignore[no-any-return]


def test_a_lane_trains_as_pytorchs_adam_does() -> None:
    torch.manual_seed(1)
    lane = Lane(Net(), torch.device("cpu"))
    other = copy.deepcopy(lane.net.net)
    assert lane.net.net.second.spare is lane.net.net.first.spare is not None
    for module in other.modules():
        if isinstance(module, Convolution):
            module.spare = None
    adam = torch.optim.Adam(other.parameters(), lr=1e-3, weight_decay=5e-4)
    for step in range(5):
        x = torch.randn(4 + step, 3, 2, 2)
        lane.descend(lane.net.net(x).pow(2).sum(), Training(lr=1e-3))
        adam.zero_grad()
        other(x).pow(2).sum().backward()
        adam.step()
    for mine, theirs in zip(lane.net.net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_memory_of_copies_is_used_again_when_nobody_holds_it() -> None:
    copies, values = Copies(), torch.arange(LARGE // 4 + 1, dtype=torch.float32)
    first = copies.of(values)
    where = first.data_ptr()
    second = copies.of(values + 1)
    assert (
        second.data_ptr() != where
        and torch.equal(first, values)
        and torch.equal(second, values + 1)
    )
    part, array = first[5:9], second.numpy()
    del first, second
    third = copies.of(values + 2)
    # a view and an array hold theirs
    assert third.data_ptr() not in (where, array.__array_interface__["data"][0])
    assert torch.equal(part, values[5:9]) and array[0] == 1
    del part
    again = copies.of(values + 3)
    assert again.data_ptr() == where and torch.equal(again, values + 3)
    shorter = copies.of(values[:-1])
    assert shorter.data_ptr() != where and torch.equal(shorter, values[:-1])
    assert torch.equal(copies.of(values.double()), values.double())


def test_small_copies_are_made_anew() -> None:
    copies, values = Copies(), torch.ones(3)
    assert copies.of(values).data_ptr() != values.data_ptr()
    assert not copies._storages
    copies.of(torch.ones(LARGE))
    assert len(copies._storages) == 1 and not copy.deepcopy(copies)._storages
