"""FedProx: FedAvg whose clients stay near the model they received.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    client    CE(f(x), y) + (μ/2) ‖w − w_g‖²,  over the trainable parameters
    server    as FedAvg
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fednoro.core.losses import squared_distance
from fednoro.core.options import option
from fednoro.core.types import Step
from fednoro.methods.method import Method


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term that ties each client to the global model."""

    mu: float = option(0.01, "strength of the tie to the global model", ge=0)

    def loss(self, step: Step) -> Tensor:
        proximal = squared_distance(step.net.parameters(), step.anchor.parameters())
        return F.cross_entropy(step.net(step.x), step.y) + self.mu / 2 * proximal
