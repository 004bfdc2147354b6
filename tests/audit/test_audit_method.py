"""The audit's exchanges: what is trained, what is sent, and what a
broken site does to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, TRAINING, federation, network, same, start
from hypothesis import given
from hypothesis import strategies as st

from fednoro.audit.audit_method import LEVELS, OUTPUTS, PROBABILITIES, Audit, folds_of
from fednoro.audit.confident_learning import confident_joint, site_counts, site_joint, thresholds
from fednoro.core.types import Failure, Reply, State, Step, Task
from fednoro.data.client import Client
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.rounds import Evaluation, play
from fednoro.methods import FedNoRo, Method

WARMUP = 3


def unmeasured(_: Any) -> Evaluation:
    return Evaluation(np.eye(2, dtype=np.int64), 0.0)


class Wire:
    """An engine whose replies are read on their way, and changed if a test says how."""

    def __init__(self, change: Mapping[str, Any] | None = None) -> None:
        dataset, self.clients = federation()
        self.engine = EagerEngine(
            network, dataset, 1, TRAINING, 0, torch.device("cpu"), self.clients
        )
        self.change, self.seen = change or {}, list[tuple[str, Reply]]()

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        for item in self.engine.exchange(method, tasks):
            name = tasks[item.client].name
            if isinstance(item, Reply):
                if item.client == 1 and name in self.change:
                    item = replace(item, arrays=self.change[name])
                self.seen.append((name, item))
            yield item


def audited(audit: Audit, wire: Wire) -> State:
    state = replace(start(), rounds=audit.rounds)
    ids = [client.id for client in wire.clients]
    turns = list(play(audit, state, wire.exchange, ids, unmeasured))
    assert turns[-1].state.round == audit.rounds
    return turns[-1].state


@pytest.mark.parametrize("scores", ["early", "cross_fit"])
def test_joint_is_that_of_all_probabilities_together(scores: Any, one_thread: None) -> None:
    wire = Wire()
    memo = audited(Audit(scores=scores, warmup=2, folds=3), wire).memo
    p = np.concatenate([client.memory[PROBABILITIES].numpy() for client in wire.clients])
    y = np.concatenate([client.observed for client in wire.clients])
    sums, counts = site_counts(p, y)
    level = thresholds([sums], [counts])
    np.testing.assert_allclose(memo["thresholds"], level, atol=1e-12)
    together = confident_joint(list(memo["joints"].values()))
    np.testing.assert_array_equal(together, confident_joint([site_joint(p, y, level)]))
    for client in wire.clients:
        np.testing.assert_array_equal(client.memory[LEVELS].numpy(), memo["thresholds"])


def test_outputs_are_weighed_by_the_frequency_of_the_classes_over_all_sites(
    one_thread: None,
) -> None:
    wire = Wire()
    memo = audited(Audit(warmup=1), wire).memo
    counts = np.bincount(
        np.concatenate([client.observed for client in wire.clients]), minlength=CLASSES
    )
    np.testing.assert_allclose(memo["prior"], counts / counts.sum(), atol=1e-15)
    for client in wire.clients:
        outputs, p = client.memory[OUTPUTS].numpy(), client.memory[PROBABILITIES].numpy()
        np.testing.assert_allclose(outputs.sum(axis=1), 1)
        odds = outputs * counts
        np.testing.assert_allclose(p, odds / odds.sum(axis=1, keepdims=True), atol=1e-12)


@pytest.mark.parametrize(
    "counts", [np.full(CLASSES, -1.0), np.full(CLASSES, 1e300), np.zeros(CLASSES)]
)
def test_counts_that_are_none_leave_a_site_out_of_the_frequencies_alone(
    counts: Any, one_thread: None
) -> None:
    wire, audit = Wire({"predict": {"counts": counts}}), Audit(warmup=1)
    state = replace(start(), rounds=audit.rounds)
    turns = list(play(audit, state, wire.exchange, [c.id for c in wire.clients], unmeasured))
    others = np.concatenate([client.observed for client in wire.clients if client.id != 1])
    np.testing.assert_allclose(
        turns[-1].state.memo["prior"], np.bincount(others, minlength=CLASSES) / len(others)
    )
    assert any(
        "client 1: its counts do not add up to its images" in w for t in turns for w in t.warnings
    )
    assert len(turns[-1].state.memo["joints"]) == len(MIXED), "it is not left out of the audit"


def test_sites_send_sums_counts_one_joint_and_nothing_else(one_thread: None) -> None:
    wire = Wire()
    audited(Audit(scores="cross_fit", warmup=1, folds=2), wire)
    shapes = {
        "train": {},
        "predict": {"counts": (CLASSES,)},
        "sums": {"sums": (CLASSES,), "counts": (CLASSES,)},
    }
    shapes["joint"] = {"joint": (CLASSES, CLASSES)}
    for task, reply in wire.seen:
        assert {name: array.shape for name, array in reply.arrays.items()} == shapes[task]
        assert set(reply.metrics) <= ({"loss"} if task == "train" else set())
        assert (reply.weights is not None) == (task == "train")
    order = list(dict.fromkeys(task for task, _ in wire.seen))
    assert order == ["train", "predict", "sums", "joint"]
    assert (
        sum(task == "joint" for task, _ in wire.seen)
        == sum(task == "sums" for task, _ in wire.seen)
        == len(MIXED)
    )


def test_early_model_is_the_one_that_fednoro_has_after_its_warm_up(one_thread: None) -> None:
    wire = Wire()
    ids = [client.id for client in wire.clients]
    method = FedNoRo(warmup=WARMUP)
    run = play(method, start(), wire.exchange, ids, unmeasured)
    warm = next(turn.state for turn in run if turn.state.round == WARMUP)
    again = Wire()
    assert same(audited(Audit(scores="early", warmup=WARMUP), again).model, warm.model)


def test_every_fold_begins_from_the_start(one_thread: None) -> None:
    audit, wire = Audit(scores="cross_fit", warmup=2, folds=3), Wire()
    begin, began = replace(start(), rounds=audit.rounds), []

    class Noting(Audit):
        def work(self, task: Task, site: Any) -> Reply:
            began.append(
                (task.name, task.round, task.settings.get("fold"), same(task.weights, begin.model))
            )
            return super().work(task, site)

    list(play(Noting(scores="cross_fit", warmup=2, folds=3), begin, wire.exchange, [0], unmeasured))
    trained = [entry[1:] for entry in began if entry[0] == "train"]
    assert trained == [(r, r // 2, r % 2 == 0) for r in range(6)]
    assert [entry[2] for entry in began if entry[0] == "predict"] == [0, 1, 2]


def test_a_model_never_sees_the_labels_that_it_judges() -> None:
    """What an image's label says has no part in the loss of its own fold's model."""
    torch.manual_seed(0)
    net, x = network().eval(), torch.randn(6, 1, 4, 4)
    kept = torch.tensor([1.0, 1, 0, 1, 0, 1])
    audit, y = Audit(scores="cross_fit"), torch.tensor([0, 1, 2, 3, 0, 1])

    def loss(labels: torch.Tensor) -> float:
        aux = {"log_pi": torch.zeros(CLASSES)}
        step = Step(net, net, x, labels, torch.arange(6), aux, torch.zeros(6, 0), {"kept": kept})
        return float(audit.loss(step).detach())

    others = y.clone()
    others[kept == 0] = 3
    assert loss(y) == loss(others)
    others[0] = 3
    assert loss(y) != loss(others)
    only = torch.nn.functional.cross_entropy(net(x[kept == 1]), y[kept == 1])
    assert loss(y) == pytest.approx(float(only.detach()), rel=1e-5)


def test_an_image_is_judged_by_the_model_of_its_own_fold(one_thread: None) -> None:
    """Probabilities are put together from the folds; every image has exactly one."""
    wire = Wire()
    audited(Audit(scores="cross_fit", warmup=1, folds=3), wire)
    for client in wire.clients:
        p = client.memory[PROBABILITIES]
        assert p.shape == (len(client.index), CLASSES) and torch.isfinite(p).all()
        torch.testing.assert_close(p.sum(1), torch.ones(len(p), dtype=torch.float64))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(2, 7), st.integers(0, 99))
def test_folds_spread_every_class(labels: list[int], folds: int, seed: int) -> None:
    y = np.array(labels)
    fold = folds_of(y, folds, np.random.default_rng(seed))
    for part in [fold, *(fold[y == c] for c in np.unique(y))]:
        sizes = np.bincount(part, minlength=folds)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (
            {"sums": {"sums": np.full(CLASSES, np.nan), "counts": np.ones(CLASSES)}},
            "sums are not between",
        ),
        (
            {"sums": {"sums": np.full(CLASSES, 9.0), "counts": np.ones(CLASSES)}},
            "sums are not between",
        ),
        (
            {"sums": {"sums": np.zeros(CLASSES), "counts": np.full(CLASSES, 0.5)}},
            "not one number per class",
        ),
        ({"joint": {"joint": np.full((CLASSES, CLASSES), 99.0)}}, "does not fit its counts"),
        ({"joint": {"joint": np.full((CLASSES, CLASSES), -1.0)}}, "does not fit its counts"),
    ],
)
def test_a_site_that_sends_nonsense_is_left_out(
    change: dict[str, Any], left: str, one_thread: None
) -> None:
    wire, audit = Wire(change), Audit(scores="early", warmup=1)
    state = replace(start(), rounds=audit.rounds)
    turns = list(play(audit, state, wire.exchange, [c.id for c in wire.clients], unmeasured))
    assert sorted(turns[-1].state.memo["joints"]) == ["0", "2", "3", "4"]
    assert any(
        "client 1 is left out of the audit: " in w and left in w for t in turns for w in t.warnings
    )


def test_a_site_that_missed_a_fold_cannot_answer(one_thread: None) -> None:
    client = Client(0, "late", np.arange(3), np.array([0, 1, 2]))
    client.memory[OUTPUTS] = torch.full((3, CLASSES), torch.nan)
    wire = Wire()
    wire.engine.serve([client])
    prior = np.full(CLASSES, 1 / CLASSES)
    (answer,) = wire.engine.exchange(
        Audit(), {0: Task("sums", 5, start().model, arrays={"prior": prior})}
    )
    assert isinstance(answer, Failure) and "were all images scored?" in answer.reason
