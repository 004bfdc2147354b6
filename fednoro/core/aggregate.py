"""From K local models to one: weights (by size, or DaAgg), the distances behind them, and the mix.

DaAgg (FedNoRo, IJCAI 2023) trusts a noisy client less the farther it is from the nearest clean one:

    d(k) = min over clean j of ‖w_k − w_j‖₂,   D(k) = d(k) / max_j d(j),   weight ∝ N_k·exp(−D(k))
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fednoro.core.types import FedNoRoWarning, UserError, Weights

Distance = Literal["paper", "reference"]
Models: TypeAlias = Tensor | NDArray[Any] | Sequence[Tensor] | Sequence[Mapping[str, Tensor]]

# Entries of one float64 block, over all models: 32 and 512 MiB.
_BLOCK = {"cpu": 2**22, "cuda": 2**26}
# A block's Gram entries carry a relative error of some 1e-15 (float64 sums, accumulated in
# blocks), so a d² below this share of ‖w_i‖² + ‖w_j‖² says no more than "equal"; at the share
# itself d is still good to about 1%.
_ROUNDING = 1e-13
_PRODUCT_COLUMNS = 2**13  # columns of one of the products that a GPU takes side by side
_LARGEST = 1e150  # the squares of larger entries leave float64


def pairwise_distances(models: Tensor | Sequence[Tensor]) -> Tensor:
    """L2 distances between K vectors, or the rows of a K×P matrix, on any device:
    K×K, float64, on the CPU.

    All come from one Gram matrix of the rows minus the first one, which keeps the common part
    of the models out of the subtraction. Distances below about 3e-7 of their distances to the
    first row are returned as 0.
    """
    vectors = [model.detach() for model in models]
    k = len(vectors)
    gram = torch.zeros(k, k, dtype=torch.float64)
    columns = _BLOCK.get(vectors[0].device.type, _BLOCK["cpu"]) // k if k else 1
    for blocks in zip(*(torch.split(vector, max(columns, 1)) for vector in vectors), strict=True):
        first = _float64(blocks[0])
        rows = first.new_empty((k, len(first)))
        for row, block in zip(rows, blocks, strict=True):
            torch.sub(block.to(first.device), first, out=row)  # converts as it goes
        gram = gram.to(rows.device) + _gram(rows)
    gram = (gram + gram.T).cpu() / 2
    norms = gram.diagonal()[:, None] + gram.diagonal()
    squares = norms - 2 * gram
    squares[squares <= _ROUNDING * norms] = 0.0
    return squares.sqrt()


def _gram(rows: Tensor) -> Tensor:
    """rows·rowsᵀ; on a GPU as many short products side by side,
    because a long one keeps few of its units busy.
    """
    count = rows.shape[1] // _PRODUCT_COLUMNS if rows.device.type == "cuda" else 0
    parts = (
        rows[:, : count * _PRODUCT_COLUMNS].view(len(rows), count, _PRODUCT_COLUMNS).transpose(0, 1)
    )
    rest = rows[:, count * _PRODUCT_COLUMNS :]
    return torch.bmm(parts, parts.mT).sum(0) + torch.mm(rest, rest.T)


def nearest_clean(
    models: Models,
    noisy: ArrayLike | Tensor,
    distance: Distance = "paper",
    segments: Sequence[int] | None = None,
) -> Tensor:
    """d(k), the distance of each client to its nearest clean one; exactly 0 for the clean clients.

    Args:
        models: K×P, K vectors, or K state dicts, of which the floating-point tensors count.
        noisy: one boolean per client; at least one must be clean.
        distance: "paper" is one norm over the whole vector, "reference"
            the sum of one norm per tensor.
        segments: sizes of the tensors within a vector, for "reference";
            state dicts bring their own.
    """
    vectors, sizes = _vectors(models, distance, segments)
    flagged = _flags(noisy, len(vectors))
    if flagged.all():
        raise UserError("nearest_clean needs at least one clean client, all are flagged")
    return _nearest(vectors, sizes, flagged)


def daagg_weights(
    models: Models,
    sizes: ArrayLike | Tensor,
    noisy: ArrayLike | Tensor,
    distance: Distance = "paper",
    segments: Sequence[int] | None = None,
) -> Tensor:
    """Aggregation weights ∝ N_k·exp(−d(k) / max d): K, float64, on the CPU, with sum 1.

    By size alone when nobody is flagged, when everybody is, or when no
    flagged client is at a distance.

    Args:
        models: see `nearest_clean`.
        sizes: samples N_k of each client.
        noisy: one boolean per client, not the numbers of the noisy ones.
        distance: see `nearest_clean`.
        segments: see `nearest_clean`.
    """
    vectors, parts = _vectors(models, distance, segments)
    by_size = size_weights(sizes)
    if len(by_size) != len(vectors):
        raise UserError(f"sizes must have one entry per model ({len(vectors)}), got {len(by_size)}")
    flagged = _flags(noisy, len(vectors))
    if flagged.all() or not flagged.any():  # spares the distances
        _check_finite(vectors)
        if flagged.all():
            warnings.warn(
                "every client is flagged as noisy: models are weighted by size",
                FedNoRoWarning,
                stacklevel=2,
            )
        return by_size
    return distance_weights(_nearest(vectors, parts, flagged), sizes)


def distance_weights(distances: Tensor, sizes: ArrayLike | Tensor) -> Tensor:
    """Weights ∝ N_k·exp(−d(k) / max d) from d(k) itself; by size alone where every d(k) is 0."""
    by_size = size_weights(sizes)
    if distances.shape != by_size.shape:
        raise UserError(
            f"distances must have one entry per client ({len(by_size)}), "
            f"got {tuple(distances.shape)}"
        )
    if not distances.any():
        return by_size
    weights = by_size * torch.exp(-distances / distances.max())
    return weights / weights.sum()


def size_weights(sizes: ArrayLike | Tensor) -> Tensor:
    """FedAvg's weights N_k / ΣN: K, float64, on the CPU."""
    n = torch.as_tensor(sizes, dtype=torch.float64, device="cpu")
    if n.ndim != 1 or not len(n):
        raise UserError(f"sizes must be one number per client, got shape {tuple(n.shape)}")
    for k, size in enumerate(n.tolist()):
        if not 0 < size < math.inf:
            raise UserError(f"sizes must be positive, got {size:g} for client {k}")
    return n / n.sum()


def mix(models: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the rows of a K×P matrix,
    accumulated in float64, in the models' dtype and device.
    """
    if models.ndim != 2 or not len(models) or weights.shape != models.shape[:1]:
        raise UserError(
            "mix needs a K×P matrix and K weights, "
            f"got shapes {tuple(models.shape)} and {tuple(weights.shape)}"
        )
    first, *rest = weights.tolist()
    # Starting from the first row rather than from 0 keeps a single model's bits,
    # the sign of −0 included.
    total = _float64(models[0].detach(), copy=True).mul_(first)
    for row, weight in zip(models[1:].detach(), rest, strict=True):
        _accumulate(total, row, weight)
    return total.to(models.dtype).to(models.device)


def average(pairs: Iterable[tuple[Weights, float]]) -> Weights:
    """The weighted mean of a stream of models, of which one at a time is held.

    Counters are not averaged: they are those of the model with the
    largest weight, the first on ties.
    """
    total: Tensor | None = None
    mass = largest = 0.0
    model: Weights | None = None
    counters: Tensor | None = None
    for i, (model, weight) in enumerate(pairs):
        if not 0 <= weight < math.inf:
            raise UserError(f"weights must be finite and >= 0, got {weight} for model {i}")
        if total is None:
            total = _float64(model.values.detach(), copy=True).mul_(weight)
        elif model.values.shape == total.shape:
            _accumulate(total, model.values.detach(), weight)
        else:
            raise UserError(
                f"models must all have {len(total)} values, got {len(model.values)} for model {i}"
            )
        mass += weight
        if counters is None or weight > largest:
            largest, counters = weight, model.counters.clone()  # the engine may reuse its buffers
    if total is None or counters is None or model is None:
        raise UserError("average needs at least one model, got none")
    if mass <= 0:
        raise UserError(f"average needs a total weight above 0, got {mass:g}")
    return Weights(
        total.div_(mass).to(model.values.dtype).to(model.values.device), counters, model.segments
    )


def _accumulate(total: Tensor, values: Tensor, weight: float) -> None:
    """Adds weight·values in float64;
    on a CPU in pieces: a conversion that leaves the cache is slow.
    """
    if total.device.type == "cuda":
        total.add_(values.to(total.device), alpha=weight)  # converts as it goes
        return
    buffer = total.new_empty(min(2**18, len(total)))
    for part, piece in zip(torch.split(total, 2**18), torch.split(values, 2**18), strict=True):
        part.add_(buffer[: len(piece)].copy_(piece), alpha=weight)


def _float64(values: Tensor, copy: bool = False) -> Tensor:
    """Values as float64, by way of the CPU where the device (Apple's MPS) has none."""
    return (values.cpu() if values.device.type == "mps" else values).to(torch.float64, copy=copy)


def _vectors(
    models: Models, distance: Distance, segments: Sequence[int] | None
) -> tuple[list[Tensor], list[int]]:
    """Models as K vectors and the widths of the parts that have a norm of their own."""
    if distance not in get_args(Distance):
        raise UserError(
            f"distance must be one of {', '.join(get_args(Distance))}, got {distance!r}"
        )
    if isinstance(models, np.ndarray):
        models = torch.from_numpy(np.require(models, requirements=["C", "W"]))
    if isinstance(models, Tensor):
        if models.ndim != 2 or not models.numel() or not models.is_floating_point():
            raise UserError(
                "models must be a floating-point K×P matrix, "
                f"got {models.dtype} of shape {tuple(models.shape)}"
            )
        vectors = list(models.detach().unbind())
    elif models and all(isinstance(model, Tensor) for model in models):
        vectors = [model.detach() for model in models if isinstance(model, Tensor)]
        for k, vector in enumerate(vectors):
            if (
                vector.ndim != 1
                or vector.shape != vectors[0].shape
                or not vector.is_floating_point()
            ):
                raise UserError(
                    f"models must be floating-point vectors of one length, got {vector.dtype} "
                    f"of shape {tuple(vector.shape)} for client {k} and "
                    f"{tuple(vectors[0].shape)} for client 0"
                )
    else:
        matrix, segments = _stack(cast("Sequence[Mapping[str, Tensor]]", models))
        vectors = list(matrix.unbind())
    width = len(vectors[0])
    if distance == "paper":
        return vectors, [width]
    if segments is None:
        raise UserError('distance "reference" on vectors needs `segments`, the size of each tensor')
    if sum(segments) != width:
        raise UserError(
            f"segments must add up to the {width} columns of models, got {sum(segments)}"
        )
    return vectors, list(segments)


def _stack(models: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, list[int]]:
    """The floating-point tensors of K state dicts as the rows of one matrix, and their sizes."""
    if not models or not all(isinstance(model, Mapping) for model in models):
        raise UserError("models must be a K×P matrix or a non-empty sequence of state dicts")
    first = models[0]
    for k, model in enumerate(models[1:], start=1):
        if odd := sorted(first.keys() ^ model.keys()):
            raise UserError(
                f"models must have the same keys, {odd[0]!r} is not in both client 0 and client {k}"
            )
        for key, value in first.items():
            other = model[key]
            if value.shape != other.shape or value.is_floating_point() != other.is_floating_point():
                raise UserError(
                    f"models must have the same shapes, {key!r} is {value.dtype} "
                    f"{tuple(value.shape)} at client 0 and {other.dtype} "
                    f"{tuple(other.shape)} at client {k}"
                )
    keys = [key for key, value in first.items() if value.is_floating_point()]
    if not keys:
        raise UserError("models must have at least one floating-point tensor, got none")
    sizes = [first[key].numel() for key in keys]
    dtype = functools.reduce(torch.promote_types, (first[key].dtype for key in keys))
    matrix = torch.empty(len(models), sum(sizes), dtype=dtype, device=first[keys[0]].device)
    for row, model in zip(matrix, models, strict=True):
        row.copy_(torch.cat([model[key].detach().flatten() for key in keys]))
    return matrix, sizes


def _nearest(vectors: Sequence[Tensor], sizes: list[int], flagged: Tensor) -> Tensor:
    parts = zip(*(torch.split(vector, sizes) for vector in vectors), strict=True)
    distances = torch.stack([pairwise_distances(part) for part in parts]).sum(dim=0)
    if not distances.isfinite().all():
        _check_finite(vectors)
    return torch.where(flagged, distances[:, ~flagged].amin(dim=1), 0.0)


def _flags(noisy: ArrayLike | Tensor, k: int) -> Tensor:
    values = torch.as_tensor(noisy, device="cpu")
    if values.shape != (k,):
        raise UserError(
            f"noisy must have one entry per model ({k}), got shape {tuple(values.shape)}"
        )
    flagged = values.bool()
    if not torch.equal(flagged.to(values), values):
        raise UserError(
            f"noisy must say for each client whether it is, got {values.tolist()}: "
            f"with client numbers, [k in numbers for k in range({k})]"
        )
    return flagged


def _check_finite(vectors: Sequence[Tensor]) -> None:
    extremes = (
        torch.stack([torch.stack(torch.aminmax(vector)).abs().amax() for vector in vectors])
        .cpu()
        .double()
    )
    if bad := (~(extremes < _LARGEST)).nonzero().flatten().tolist():
        raise UserError(
            f"the model of client {bad[0]} has weights that are not finite: leave this client out"
        )
