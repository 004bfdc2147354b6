"""Many ResNets of one shape as one network:
their weights are the rows of a matrix, and their maps lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fednoro.engine.cuda.graph_capture import UnsuitableError
from fednoro.engine.cuda.stacked.stacked_kernels import COLUMNS
from fednoro.engine.cuda.stacked.stacked_ops import Convolve, Kernel, Norm, Normalise, Place, pool
from fednoro.engine.streams import SideStream
from fednoro.models import Packed
from fednoro.models.networks import BasicBlock, Bottleneck, Convolution, ResNet

ALIGNED = 64  # entries: rows begin where the GPU reads fastest


def stackable(net: nn.Module, device: torch.device) -> bool:
    """Whether `StackedNet` can stand for this network:
    a ResNet, all of it trained, in the kernels' units on a GPU.
    """
    kind: Any = type(net)
    if not isinstance(net, ResNet) or (kind.forward, kind.features) != (
        ResNet.forward,
        ResNet.features,
    ):
        return False
    if (
        not all(p.requires_grad for p in net.parameters())
        or type(net.fc) is not nn.Linear
        or net.fc.bias is None
    ):
        return False
    pool: Any = net.maxpool
    if type(pool) is not nn.MaxPool2d or (
        pool.kernel_size,
        pool.stride,
        pool.padding,
        pool.ceil_mode,
    ) != (3, 2, 1, 0):
        return False
    layers = [net.layer1, net.layer2, net.layer3, net.layer4]
    blocks = [block for layer in layers for block in layer.children()]
    layer_types = type(net.bn1), type(net.conv1), *map(type, layers), *map(type, blocks)
    if not set(layer_types) <= {
        nn.BatchNorm2d,
        Convolution,
        nn.Conv2d,
        nn.Sequential,
        BasicBlock,
        Bottleneck,
    }:
        return False
    return all(_is_usual(module, device) for module in net.modules())


def _is_usual(module: nn.Module, device: torch.device) -> bool:
    """Whether a layer does no more than the stacked one;
    on a GPU its channels come in the kernels' units as well.
    """
    if isinstance(module, nn.BatchNorm2d):
        width = module.num_features
        fits = device.type != "cuda" or width == COLUMNS or width % (2 * COLUMNS) == 0
        return fits and module.affine and module.track_running_stats and module.momentum is not None
    if isinstance(module, nn.Conv2d):
        square = all(
            len(set(pair)) == 1 for pair in (module.kernel_size, module.stride, module.padding)
        )
        plain = (module.groups, module.dilation, module.padding_mode, module.bias) == (
            1,
            (1, 1),
            "zeros",
            None,
        )
        return square and plain and type(module) in (nn.Conv2d, Convolution)
    return True


class StackedNet:
    """`slots` networks like the one in `packed`, which compute in `dtype` with float32 weights."""

    def __init__(self, packed: Packed, slots: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.packed, self.net, self.slots = packed, packed.net, slots
        device, width = packed.values.device, -(-len(packed.values) // ALIGNED) * ALIGNED
        self.values = torch.zeros((slots, width), device=device)
        self.low = (
            self.values if dtype == torch.float32 else torch.zeros_like(self.values, dtype=dtype)
        )
        self.gradient = torch.zeros_like(self.low)  # as PyTorch's own layers of this type have them
        # Gradients of what a loss says of the weights themselves, in float32.
        self.direct: Tensor | None = None
        self.active = torch.zeros(slots, dtype=torch.int32, device=device)
        self.calls = 0
        tensors = zip(
            packed.tensors,
            *(self.views_of(m) for m in (self.values, self.low, self.gradient)),
            strict=True,
        )
        views = {id(tensor): parts for tensor, *parts in tensors}
        names = {id(tensor): name for name, tensor in packed.net.named_parameters()}
        # What a loss looks at, and what the layers use: gradients of either kind are added up.
        # By .data, because an update of running statistics, in the same memory, is none of these.
        self.leaves = {name: views[key][0].data.requires_grad_() for key, name in names.items()}
        self.handles = {name: views[key][1].data.requires_grad_() for key, name in names.items()}
        self.places = {name: Place(views[key][2]) for key, name in names.items()}
        self._side_stream = SideStream(device)
        self._kernels: dict[int, Kernel] = {}
        self._norms: dict[int, Norm] = {}
        for module in packed.net.modules():
            own_names = {kind: names[id(p)] for kind, p in module.named_parameters(recurse=False)}
            if isinstance(module, nn.Conv2d):
                name = own_names["weight"]
                stride, pad = int(module.stride[0]), int(module.padding[0])
                self._kernels[id(module)] = Kernel(
                    self.handles[name], self.places[name], stride, pad, self._side_stream
                )
            elif isinstance(module, nn.BatchNorm2d):
                gamma, beta = own_names["weight"], own_names["bias"]
                assert module.momentum is not None
                self._norms[id(module)] = Norm(
                    views[id(module.weight)][0],
                    views[id(module.bias)][0],
                    views[id(module.running_mean)][0],
                    views[id(module.running_var)][0],
                    (self.handles[gamma], self.handles[beta]),
                    (self.places[gamma], self.places[beta]),
                    module.eps,
                    module.momentum,
                )

    def views_of(self, matrix: Tensor) -> list[Tensor]:
        """Each tensor of the network in all rows of a matrix, S×…"""
        return self.packed.views_of(matrix[:, : len(self.packed.values)])

    def load(self, values: Tensor) -> None:
        """One model, in `packed`'s layout, for everybody."""
        self.values[:, : len(values)].copy_(values)
        if self.low is not self.values:
            self.low.copy_(self.values)

    # Forward, on maps of all networks

    def features(self, x: Tensor) -> Tensor:
        """S×B×C×H×W to S×B×d."""
        self.calls += 1
        net: Any = self.net
        with torch.autocast(x.device.type, enabled=False):
            y = self._norm(
                net.bn1,
                self._convolve(net.conv1, x.permute(0, 1, 3, 4, 2).contiguous()),
                None,
                True,
            )
            y = pool(y, self.active)
            for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
                for block in layer:
                    y = self._block(block, y)
            return y.mean((2, 3))

    def fc(self, features: Tensor) -> Tensor:
        """S×B×d to S×B×classes."""
        with torch.autocast(features.device.type, enabled=False):
            weight, bias = self.handles["fc.weight"], self.handles["fc.bias"]
            return torch.baddbmm(bias[:, None], features.to(weight.dtype), weight.transpose(1, 2))

    def logits(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))

    def _convolve(self, module: nn.Module, x: Tensor) -> Tensor:
        kernel = self._kernels[id(module)]
        return Convolve.apply(x, kernel.low, kernel, self.active)  # type: ignore[no-any-return,no-untyped-call]

    def _norm(self, module: nn.Module, y: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
        norm = self._norms[id(module)]
        return Normalise.apply(y, *norm.handles, shortcut, norm, relu, self.active)  # type: ignore[no-any-return,no-untyped-call]

    def _block(self, block: BasicBlock | Bottleneck, x: Tensor) -> Tensor:
        shortcut = x
        if block.downsample is not None:
            convolution, norm = block.downsample.children()
            shortcut = self._norm(norm, self._convolve(convolution, x), None, False)
        layers = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
        if isinstance(block, Bottleneck):
            layers.append((block.conv3, block.bn3))
        for convolution, norm in layers[:-1]:
            x = self._norm(norm, self._convolve(convolution, x), None, True)
        convolution, norm = layers[-1]
        return self._norm(norm, self._convolve(convolution, x), shortcut, True)

    # Backward

    def collect(self, loss: Tensor) -> Tensor | None:
        """Puts the gradients of `loss` into `gradient`,
        and what has to be added to them is returned.
        """
        for place in self.places.values():
            place.taken = False
        tensors = [*self.handles.values(), *self.leaves.values()]
        try:
            gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        finally:
            self._side_stream.join()
        layer_gradients, direct_gradients = (
            gradients[: len(self.places)],
            gradients[len(self.places) :],
        )
        for place, gradient in zip(self.places.values(), layer_gradients, strict=True):
            if gradient is None:
                place.tensor.zero_()
            elif gradient.data_ptr() != place.tensor.data_ptr():
                place.tensor.copy_(gradient)
        if all(gradient is None for gradient in direct_gradients):
            return None
        if self.direct is None:
            self.direct = torch.zeros_like(self.values)
        views = dict(zip(self.packed.names, self.views_of(self.direct), strict=True))
        for name, gradient in zip(self.leaves, direct_gradients, strict=True):
            views[name].zero_() if gradient is None else views[name].copy_(gradient)
        return self.direct


class Lift(Function):
    """Calls a function of S×B×… from inside a `vmap` over S, where a tensor looks like B×…"""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        raise RuntimeError("a stack's loss runs inside torch.vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, function: Any
    ) -> tuple[Tensor, int]:
        dim = in_dims[0]
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return function(x), 0


class OneOfMany(nn.Module):
    """The stack as a loss sees it inside `vmap`: one network;
    its outputs on a step's images may be known already.
    """

    def __init__(
        self,
        nets: StackedNet,
        parameters: Sequence[Tensor],
        outputs: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        leaves = dict(zip(nets.leaves, parameters, strict=True))
        vars(self).update(_nets=nets, _leaves=leaves, _outputs=outputs, _calls=0)

    def forward(self, x: Tensor) -> Any:
        outputs = vars(self)["_outputs"]
        if outputs is None:
            return Lift.apply(x, vars(self)["_nets"].logits)  # type: ignore[no-untyped-call]
        if x is not outputs[0]:
            raise UnsuitableError("the loss shows the network other images than the step's")
        vars(self)["_calls"] += 1
        return outputs[1] if torch.is_grad_enabled() else outputs[1].detach()

    def features(self, x: Tensor) -> Any:
        self._refuse_if_precomputed()
        return Lift.apply(x, vars(self)["_nets"].features)  # type: ignore[no-untyped-call]

    def fc(self, features: Tensor) -> Any:
        self._refuse_if_precomputed()
        return Lift.apply(features, vars(self)["_nets"].fc)  # type: ignore[no-untyped-call]

    def check_called_once(self) -> None:
        """Where the outputs were known before:
        that they were asked for once, as if they had been computed.
        """
        if vars(self)["_outputs"] is not None and vars(self)["_calls"] != 1:
            raise UnsuitableError(f"the loss asks the network {vars(self)['_calls']} times")

    def _refuse_if_precomputed(self) -> None:
        if vars(self)["_outputs"] is not None:
            raise UnsuitableError("the loss asks the network for its features")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from vars(self)["_leaves"].items()
