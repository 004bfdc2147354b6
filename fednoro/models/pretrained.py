"""Weight files: torchvision's names, from .pth or .safetensors,
without ever running what is in them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednoro.core.types import FedNoRoWarning, UserError

CLASSIFIER = "fc."


def load_pretrained(net: nn.Module, path: Path) -> None:
    """Starts `net` from a weight file of any floating-point precision.

    The file must hold every tensor of the trunk. A classifier for other classes is left as
    initialised, and tensors that the network does not have are left out, each with a warning.
    """
    net_tensors = net.state_dict()
    file_tensors = _tensors(path, path.stat().st_mtime_ns if path.is_file() else 0)
    usable = {
        key: value
        for key, value in file_tensors.items()
        if key in net_tensors and _same_kind(value, net_tensors[key])
    }
    missing = [
        key for key in net_tensors if key not in usable and not key.endswith("num_batches_tracked")
    ]
    unknown = [key for key in file_tensors if key not in net_tensors]
    trunk = [key for key in missing if not key.startswith(CLASSIFIER)]
    if trunk:
        raise UserError(
            f"model.weights: {path} {_describe_mismatch(trunk, net_tensors, file_tensors, unknown)}"
        )
    if missing:
        usable = {key: value for key, value in usable.items() if not key.startswith(CLASSIFIER)}
        warnings.warn(
            f"{path.name} has no classifier for these classes: it starts fresh",
            FedNoRoWarning,
            stacklevel=2,
        )
    if unknown:
        warnings.warn(
            f"{path.name} has {len(unknown)} tensors that the network has not, left out: "
            f"{_first_names(unknown)}",
            FedNoRoWarning,
            stacklevel=2,
        )
    net.load_state_dict({**net_tensors, **usable})


@functools.lru_cache(maxsize=1)  # a federation's annotators start from the same file
def _tensors(path: Path, _modified_at: int) -> dict[str, Tensor]:
    """A file's tensors, all of them finite."""
    tensors = {
        str(key).removeprefix("module."): value
        for key, value in _read_file(path).items()
        if isinstance(value, Tensor)
    }
    for key, value in tensors.items():
        if not torch.isfinite(value).all():
            raise UserError(f"model.weights: {path} has values in {key} that are not finite")
    return tensors


def _read_file(path: Path) -> dict[Any, Any]:
    """The named tensors in a file, of a whole training checkpoint those of its model."""
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
    for key in ("state_dict", "model"):
        if isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    return dict(loaded)


def _same_kind(value: Tensor, expected: Tensor) -> bool:
    return (
        value.shape == expected.shape and value.is_floating_point() == expected.is_floating_point()
    )


def _describe_mismatch(
    trunk: list[str],
    net_tensors: Mapping[str, Tensor],
    file_tensors: Mapping[str, Tensor],
    unknown: Sequence[str],
) -> str:
    """What is wrong with the first tensor that does not fit, and how many more there are."""
    first = next((key for key in trunk if key in file_tensors), trunk[0])
    expected = f"{first} of shape {tuple(net_tensors[first].shape)}"
    if first in file_tensors:
        tensor = file_tensors[first]
        actual = f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
        return f"has {actual} for {expected} ({len(trunk)} do not fit)"
    return f"has no {expected} ({len(trunk)} missing)" + (
        f"; it has {_first_names(unknown)}" if unknown else ""
    )


def _first_names(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
