"""FedLA: FedAvg with logit adjustment on every client.

Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021, in each client's local training:

    client    CE(f(x) + τ log π_k, y),  π_k the class frequencies of client k's labels
    server    as FedAvg; at test time the logits are plain
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fednoro.core.losses import log_prior, logit_adjusted_ce
from fednoro.core.options import option
from fednoro.core.types import Site, Step, Task
from fednoro.methods.method import Method


@dataclass(frozen=True)
class FedLA(Method):
    """FedAvg with logit adjustment by each client's own class frequencies."""

    tau: float = option(1.0, "strength of the adjustment", ge=0)

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        return {"log_pi": self.tau * log_prior(site.counts)}

    def loss(self, step: Step) -> Tensor:
        return logit_adjusted_ce(step.net(step.x), step.y, step.aux["log_pi"])
