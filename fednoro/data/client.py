"""A client: which samples it holds, the labels it was given,
and what it remembers between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednoro.core.types import IntArray


@dataclass
class Client:
    """One participant of a federation that is simulated on one machine."""

    id: int
    name: str
    index: IntArray  # its samples' positions in the data set
    observed: IntArray  # the labels it was given, possibly wrong
    memory: dict[str, Tensor] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        """The labels it trains on: corrected ones, where a method has stored them."""
        return self.memory.get("labels", torch.from_numpy(self.observed))
