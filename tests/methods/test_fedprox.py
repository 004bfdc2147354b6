"""FedProx: clients that are tied to the model they received."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, TRAINING, distance, federation, network, same, start

import fednoro
from fednoro.core.types import Task, UserError, Weights
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.rounds import Evaluation, play
from fednoro.methods import FedProx, Method
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")


def played(method: Method) -> Weights:
    data, clients = federation(MIXED)
    lab = EagerEngine(network, data, 1, TRAINING, 0, torch.device("cpu"), clients)
    nothing = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    *_, last = play(method, start(), lab.exchange, sorted(lab.clients), lambda _: nothing)
    return last.state.model


def test_without_mu_it_is_fedavg_bit_for_bit() -> None:
    assert same(played(FedProx(mu=0)), played(Method()))
    assert not same(played(FedProx(mu=1)), played(Method()))


def test_a_stronger_tie_keeps_clients_nearer() -> None:
    data, clients = federation(MIXED)
    lab = EagerEngine(
        network, data, 1, replace(TRAINING, epochs=5), 0, torch.device("cpu"), clients
    )
    task = Task("train", 0, start().model)
    packed = Packed(network())

    def moved(mu: float) -> float:
        weights, _ = lab.site(lab.clients[0]).train(task, FedProx(mu=mu).loss, {})
        trained, given = (
            replace(w, values=w.values[: packed.trainable]) for w in (weights, task.weights)
        )
        return distance(trained, given)

    far, near, nearest = (moved(mu) for mu in (0, 1, 100))
    assert nearest < near < far


def test_mu_is_not_negative() -> None:
    with pytest.raises(UserError, match=r"method\.mu must be >= 0, got -1"):
        FedProx(mu=-1)


@pytest.mark.parametrize(("preset", "mu"), [("ich", 0.01), ("isic2019", 0.1), ("ham10000", 0.1)])
def test_presets_have_the_papers_mu(preset: str, mu: float) -> None:
    assert resolve(preset, ["method=fedprox", "data.path=anywhere"]).method == FedProx(mu=mu)


def test_it_runs_on_digits(tmp_path: Path) -> None:
    small: tuple[Any, ...] = (
        "train.rounds=2",
        "train.epochs=1",
        "noise=none",
        "model.width=4",
        f"out={tmp_path}",
    )
    run = fednoro.run("digits", "method=fedprox", *small)
    assert len(run.bacc) == 2
    assert np.isfinite(run.bacc).all()
