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


def slot_losses(
    program: Program,
    nets: StackedNet,
    anchor: Any,
    common: Mapping[str, Any],
    gather: Callable[[Tensor], Tensor],
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
        gather: a step's rows of what has been prepared, S×B×…
        active: S, those for whom a change of `aux` stays.
        precision: of the computation.
    """
    aux_names = program.aux.keys() if program.updated_aux is None else program.updated_aux
    aux = {
        name: place.clone() if name in aux_names else place for name, place in program.aux.items()
    }
    cached_outputs = program.anchor_outputs
    inputs = {
        **common, "aux": aux, "u": gather(program.u),
        "rows": {name: gather(place) for name, place in program.rows.items()},
        "anchor": {} if cached_outputs is None else {"outputs": gather(cached_outputs)},
    }  # fmt: skip
    new_outputs: list[Tensor] = []  # of the anchor

    def teach(x: Tensor) -> Tensor:
        outputs: Tensor = anchor(x.flatten(0, 1))
        new_outputs.append(outputs.view(*x.shape[:2], *outputs.shape[1:]))
        return new_outputs[-1]

    teacher = _Teacher(anchor, teach)
    with autocast(active.device, precision):
        values: Tensor = torch.vmap(lambda slot: _slot_loss(program, nets, teacher, slot))(inputs)
    if new_outputs and program.anchor_outputs is None:
        shape = new_outputs[0].shape[2:]
        program.anchor_outputs = new_outputs[0].new_zeros((len(program.u), *shape))  # from now on
    program.updated_aux = frozenset(name for name in aux_names if aux[name]._version)
    for name in program.updated_aux:
        place = program.aux[name]
        place.copy_(torch.where(active.view(-1, *[1] * (place.ndim - 1)), aux[name], place))
    return values


def _slot_loss(
    program: Program, nets: StackedNet, teacher: _Teacher, inputs: Mapping[str, Any]
) -> Tensor:
    """The loss of one slot; runs inside `vmap`, where its inputs look like one client's."""
    x, aux, u, rows = inputs["x"], inputs["aux"], inputs["u"], inputs["rows"]
    outputs = (x, inputs["logits"]) if "logits" in inputs else None
    net = OneOfMany(nets, inputs["parameters"], outputs)
    anchor = Anchor(teacher, x, inputs["anchor"].get("outputs"))
    value = program.loss(Step(net, anchor, x, inputs["y"], inputs["index"], aux, u, rows))
    net.check_called_once()
    return value


def restrict_to_members(
    inputs: Mapping[str, Any], members: Tensor, active: Tensor
) -> dict[str, Any]:
    """What one of several kinds of loss reads:
    for clients whose it is not, nothing that could do any harm.

    It is computed for them all the same. Their outputs are 0 to it, and their labels and positions,
    which may be beyond what a client with this loss has, 0 as well; and no gradient comes back, be
    it NaN, to their outputs or weights.
    """
    index, y = (
        torch.where((active & members)[:, None], inputs[name], 0) for name in ("index", "y")
    )
    logits = torch.where(members[:, None, None], inputs["logits"], 0)
    parameters = [_RestrictGradients.apply(p, members) for p in inputs["parameters"]]  # type: ignore[no-untyped-call]
    return {**inputs, "index": index, "y": y, "logits": logits, "parameters": parameters}


class _RestrictGradients(Function):
    """S×… as it is; gradients for those that are `members`, S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Tensor) -> Tensor:
        ctx.save_for_backward(members)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (members,) = ctx.saved_tensors
        return torch.where(members.view(-1, *[1] * (gradient.ndim - 1)), gradient, 0), None


class _Teacher(nn.Module):
    """The anchor's network inside `vmap`:
    it is the same for everybody, so all images go through it together.
    """

    def __init__(self, net: Any, together: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self).update(_net=net, _together=together)

    def forward(self, x: Tensor) -> Any:
        return Lift.apply(x, vars(self)["_together"])  # type: ignore[no-untyped-call]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from vars(self)["_net"].named_parameters(*args, **kwargs)
