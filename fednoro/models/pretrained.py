"""Weight files: torchvision's names, from .pth or .safetensors, without
ever running what is in them.
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
    own = net.state_dict()
    given = _tensors(path, path.stat().st_mtime_ns if path.is_file() else 0)
    fits = {key: value for key, value in given.items() if key in own and _alike(value, own[key])}
    missing = [key for key in own if key not in fits and not key.endswith("num_batches_tracked")]
    unknown = [key for key in given if key not in own]
    trunk = [key for key in missing if not key.startswith(CLASSIFIER)]
    if trunk:
        raise UserError(f"model.weights: {path} {_mismatch(trunk, own, given, unknown)}")
    if missing:
        fits = {key: value for key, value in fits.items() if not key.startswith(CLASSIFIER)}
        warnings.warn(
            f"{path.name} has no classifier for these classes: it starts fresh",
            FedNoRoWarning,
            stacklevel=2,
        )
    if unknown:
        warnings.warn(
            f"{path.name} has {len(unknown)} tensors that the network has "
            f"not, left out: {_some(unknown)}",
            FedNoRoWarning,
            stacklevel=2,
        )
    net.load_state_dict({**own, **fits})


@functools.lru_cache(maxsize=1)  # a federation's annotators start from the same file
def _tensors(path: Path, _changed: int) -> dict[str, Tensor]:
    """A file's tensors, all of them finite."""
    given = {
        str(key).removeprefix("module."): value
        for key, value in _read(path).items()
        if isinstance(value, Tensor)
    }
    for key, value in given.items():
        if not torch.isfinite(value).all():
            raise UserError(f"model.weights: {path} has values in {key} that are not finite")
    return given


def _read(path: Path) -> dict[Any, Any]:
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


def _alike(value: Tensor, own: Tensor) -> bool:
    return value.shape == own.shape and value.is_floating_point() == own.is_floating_point()


def _mismatch(
    trunk: list[str], own: Mapping[str, Tensor], given: Mapping[str, Tensor], unknown: Sequence[str]
) -> str:
    """What is wrong with the first tensor that does not fit, and how many more there are."""
    first = next((key for key in trunk if key in given), trunk[0])
    wanted = f"{first} of shape {tuple(own[first].shape)}"
    if first in given:
        found = f"{tuple(given[first].shape)}, {str(given[first].dtype).removeprefix('torch.')}"
        return f"has {found} for {wanted} ({len(trunk)} do not fit)"
    return f"has no {wanted} ({len(trunk)} missing)" + (
        f"; it has {_some(unknown)}" if unknown else ""
    )


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
