"""FedAvg, and the shape that every method has.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017.

    client    w_k ← local epochs on CE(f(x), y), from w_g
    server    w_g ← Σ_k N_k w_k / Σ_j N_j

A method is a frozen dataclass of its hyper-parameters and a few functions. `plan` and `fold` run
on the server, `aux`, `rows`, `loss` and `work` on the client. `loss` is a pure tensor function
of its `Step`: no `.item()`, no branch on a tensor's value, no numpy, so that an engine may
capture it once and replay it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fednoro.core.aggregate import average
from fednoro.core.options import Options
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    Replies,
    Reply,
    Site,
    State,
    Step,
    Task,
    Weights,
)


@dataclass(frozen=True)
class Method(Options):
    """FedAvg: cross-entropy on every client, models averaged by their sizes."""

    section: ClassVar[str] = "method"
    draws: ClassVar[int] = 0  # uniforms per image that `loss` wants in `step.u`

    def check(self, rounds: int) -> None:
        """Raises a `UserError` where the options do not fit a run of `rounds`."""

    def check_clients(self, clients: int) -> None:
        """Raises a `UserError`
        where the options do not fit a simulated federation of so many clients.
        """

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        """Server: what to ask of whom."""
        return {k: Task("train", state.round, state.model) for k in clients.drawn}

    def aux(self, task: Task, site: Site) -> dict[str, Tensor]:
        """Client: the small tensors that `loss` needs for this task."""
        return {}

    def rows(self, task: Task, site: Site) -> dict[str, Tensor]:
        """Client: what `loss` needs per image (N_k×…); a step has its batch's rows of it."""
        return {}

    def loss(self, step: Step) -> Tensor:
        """Client: one batch's objective."""
        return F.cross_entropy(step.net(step.x), step.y)

    def work(self, task: Task, site: Site) -> Reply:
        """Client: local epochs with `loss`."""
        aux, rows = self.aux(task, site), self.rows(task, site)
        weights, loss = site.train(task, self.loss, aux, self.draws, rows=rows)
        return Reply(site.client, site.size, weights, {"loss": loss})

    def fold(self, state: State, replies: Replies) -> State:
        """Server: the next state, by default the average of the models weighted by size."""
        sizes: dict[int, int] = {}

        def sized_models() -> Iterator[tuple[Weights, float]]:
            for reply in replies:
                if reply.weights is not None:
                    sizes[reply.client] = reply.size
                    yield reply.weights, reply.size

        models = sized_models()
        first = next(models, None)
        if first is None:
            return nobody_answered(state)

        def all_models() -> Iterator[tuple[Weights, float]]:
            yield first
            yield from models

        model = average(all_models())
        total = sum(sizes.values())
        return advance(state, model, {k: {"weight": n / total} for k, n in sizes.items()})


def advance(state: State, model: Weights, notes: Mapping[int, Mapping[str, float]]) -> State:
    """The state one round on."""
    return replace(state, model=model, round=state.round + 1, notes=notes)


def nobody_answered(state: State) -> State:
    """A round without a single usable reply: the model stays as it is."""
    warnings.warn(
        f"round {state.round + 1}: no client answered, the model stays as it is",
        FedNoRoWarning,
        stacklevel=2,
    )
    return advance(state, state.model, {})
