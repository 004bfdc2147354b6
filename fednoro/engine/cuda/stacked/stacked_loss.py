"""A method's loss, which is written for one client, for all clients of a stack at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fednoro.core.types import Precision, Step
from fednoro.engine.cuda.cached_anchor import Anchor
from fednoro.engine.cuda.graph_capture import Program, autocast
from fednoro.engine.cuda.stacked.stacked_net import Lift, OneOfMany, StackedNet


def losses(
    program: Program,
    nets: StackedNet,
    anchor: Any,
    common: Mapping[str, Any],
    mine: Callable[[Tensor], Tensor],
    active: Tensor,
    precision: Precision,
) -> Tensor:
    """One kind of loss for every slot, S.

    Args:
        program: the loss, and where its inputs are.
        nets: the networks that are trained.
        anchor: the network that all of them have started from.
        common: what every loss reads: x, y, index and parameters, S×…; logits
            where they are known already.
        mine: a step's rows of what has been prepared, S×B×…
        active: S, those for whom a change of `aux` stays.
        precision: of the computation.
    """
    updated = program.aux.keys() if program.updated is None else program.updated
    aux = {name: place.clone() if name in updated else place for name, place in program.aux.items()}
    given = {
        **common, "aux": aux, "u": mine(program.u),
        "rows": {name: mine(place) for name, place in program.rows.items()},
        "known": {} if program.anchored is None else {"anchored": mine(program.anchored)},
    }  # fmt: skip
    said: list[Tensor] = []

    def teacher(x: Tensor) -> Tensor:
        outputs: Tensor = anchor(x.flatten(0, 1))
        said.append(outputs.view(*x.shape[:2], *outputs.shape[1:]))
        return said[-1]

    def one(given: Mapping[str, Any]) -> Tensor:
        x = given["x"]
        net = OneOfMany(
            nets, given["parameters"], (x, given["logits"]) if "logits" in given else None
        )
        received = Anchor(_Teacher(anchor, teacher), x, given["known"].get("anchored"))
        value = program.loss(
            Step(
                net,
                received,
                x,
                given["y"],
                given["index"],
                given["aux"],
                given["u"],
                given["rows"],
            )
        )
        net.check_asked()
        return value

    with autocast(active.device, precision):
        values: Tensor = torch.vmap(one)(given)
    if said and program.anchored is None:
        program.anchored = said[0].new_zeros((len(program.u), *said[0].shape[2:]))  # from now on
    program.updated = frozenset(name for name in updated if aux[name]._version)
    for name in program.updated:
        place = program.aux[name]
        place.copy_(torch.where(active.view(-1, *[1] * (place.ndim - 1)), aux[name], place))
    return values


def only(given: Mapping[str, Any], theirs: Tensor, active: Tensor) -> dict[str, Any]:
    """What one of several kinds of loss reads: for clients whose it is not,
    nothing that could do any harm.

    It is computed for them all the same. Their outputs are 0 to it, and their labels and positions,
    which may be beyond what a client with this loss has, 0 as well; and no gradient comes back, be
    it NaN, to their outputs or weights.
    """
    index, y = (torch.where((active & theirs)[:, None], given[name], 0) for name in ("index", "y"))
    logits = torch.where(theirs[:, None, None], given["logits"], 0)
    parameters = [_Only.apply(p, theirs) for p in given["parameters"]]  # type: ignore[no-untyped-call]
    return {**given, "index": index, "y": y, "logits": logits, "parameters": parameters}


class _Only(Function):
    """S×… as it is; gradients for those that are `theirs`, S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, theirs: Tensor) -> Tensor:
        ctx.save_for_backward(theirs)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (theirs,) = ctx.saved_tensors
        return torch.where(theirs.view(-1, *[1] * (gradient.ndim - 1)), gradient, 0), None


class _Teacher(nn.Module):
    """The anchor's network inside `vmap`: it is the same for everybody, so all
    images go through it together.
    """

    def __init__(self, net: Any, together: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self).update(_net=net, _together=together)

    def forward(self, x: Tensor) -> Any:
        return Lift.apply(x, vars(self)["_together"])  # type: ignore[no-untyped-call]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from vars(self)["_net"].named_parameters(*args, **kwargs)
