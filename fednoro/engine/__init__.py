"""How local steps are executed: the same method and numbers, at different speeds."""

from __future__ import annotations

import torch

from fednoro.engine.eager import EagerEngine
from fednoro.engine.threads import worthwhile_threads
from fednoro.types import UserError

__all__ = ["EagerEngine", "choose_device", "worthwhile_threads"]


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one; anything else is a torch device name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a device may be listed and yet run nothing
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
