"""Verdicts by explained shares: where the cut lies, who is flagged, and what clients without anything to tell say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, GAPPED, ONE_IMAGE, ORDINARY, SINGLE_CLASS, TRAINING, federation, network, start
from hypothesis import given
from hypothesis import strategies as st

from fednoro.engine import EagerEngine
from fednoro.explained import (
    BAND,
    EVIDENCE,
    SENT,
    WATCH,
    judge,
    left_over,
    record,
    score,
    suspects,
    watch,
    watching,
    widest_gap,
)
from fednoro.losses import log_prior
from fednoro.types import FedNoRoWarning, Reply, Task
from fednoro.verdicts import verdicts

pytestmark = pytest.mark.usefixtures("one_thread")

SHARES = st.lists(st.floats(-0.5, 1.0), min_size=1, max_size=30)


def rows(shares: list[float]) -> list[list[float]]:
    """Evidence of clients that explain so much of their labels."""
    return [[0.8 * (1 - e), 0.01, 0.8] for e in shares]


# The cut


@given(SHARES)
def test_the_cut_lies_inside_the_band_and_as_far_from_everybody_as_it_can(shares: list[float]) -> None:
    values, (low, high) = np.array(shares), BAND
    cut = widest_gap(values, low, high)
    assert low < cut < high or np.isclose([low, high], cut).any()
    room = min(cut - low, high - cut, np.abs(values - cut).min())
    for other in np.linspace(low, high, 301):
        assert min(other - low, high - other, np.abs(values - other).min()) <= room + 1e-12


@given(SHARES, st.randoms())
def test_the_order_of_the_clients_does_not_matter(shares: list[float], random: Any) -> None:
    order = list(range(len(shares)))
    random.shuffle(order)
    once, again = judge(rows(shares)), judge(rows([shares[i] for i in order]))
    assert once.cut == again.cut and once.reason == again.reason
    assert [once.noisy[i] for i in order] == list(again.noisy)
    assert once.posterior[order].tolist() == again.posterior.tolist()


@given(SHARES)
def test_clients_below_the_cut_are_flagged_and_the_posterior_agrees(shares: list[float]) -> None:
    found = judge(rows(shares))
    for e, noisy, p in zip(found.explained, found.noisy, found.posterior, strict=True):
        assert noisy == (e < found.cut) and 0 <= p <= 1
        assert p >= 0.5 if noisy else p <= 0.5
        assert noisy or e > BAND[0]
        assert not noisy or e < BAND[1]


@given(SHARES, st.floats(*BAND))
def test_a_cut_that_is_given_is_used(shares: list[float], cut: float) -> None:
    found = judge(rows(shares), cut)
    assert found.cut == cut and list(found.noisy) == [e < cut for e in found.explained]


@pytest.mark.parametrize(
    ("shares", "flagged", "said"),
    [
        ([0.6, 0.7, 0.9], [], "nobody flagged: explained shares 0.60 to 0.90, cut at 0.42"),
        ([0.1, 0.2, -0.1], [0, 1, 2], "everybody flagged: explained shares -0.10 to 0.20, cut at 0.42"),
        ([0.1, 0.7, 0.3], [0, 2], "2 of 3 clients flagged: explained shares 0.10 to 0.70, cut at 0.42"),
        ([0.9], [], "nobody flagged: explained shares 0.90, cut at 0.42"),
        ([0.37, 0.39, 0.48], [0, 1], "2 of 3 clients flagged: explained shares 0.37 to 0.48, cut at 0.43"),
    ],
)
def test_the_answer_may_be_nobody_some_or_everybody(shares: list[float], flagged: list[int], said: str) -> None:
    found = judge(rows(shares))
    assert [k for k, noisy in enumerate(found.noisy) if noisy] == flagged and found.reason == said


def test_the_posterior_is_the_normal_tail_beyond_the_cut() -> None:
    found = judge([[0.5, 0.05, 1.0]], cut=0.45)
    assert found.posterior[0] == pytest.approx(0.5 * math.erfc(1 / math.sqrt(2)), rel=1e-12)  # one standard error above
    exact = judge([[0.5, 0.0, 1.0], [0.6, 0.0, 1.0]], cut=0.45)
    assert exact.posterior.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("nothing", [0.0, 1e-9])
def test_who_tells_nothing_is_not_flagged_and_that_is_said_by_the_posterior(nothing: float) -> None:
    found = judge([[0.0, 0.0, nothing], [nothing, 0.0, nothing], [0.9, 0.0, 0.9]])
    assert found.noisy == (False, False, True) and found.posterior.tolist() == [0.5, 0.5, 1.0]
    assert found.explained.tolist() == [1.0, 1.0, 0.0]


# What a client measures


def site(labels: list[int], seed: int = 0) -> Any:
    data, clients = federation([labels])
    engine = EagerEngine(network, data, 1, TRAINING, seed, torch.device("cpu"), clients)
    return engine.site(clients[0])


def task(name: str = "train", round: int = 3) -> Task:
    return Task(name, round, start().model, {WATCH: 0})


@pytest.mark.parametrize("labels", [ORDINARY, GAPPED])
def test_a_model_that_knows_the_frequencies_alone_leaves_everything(labels: list[int]) -> None:
    here = site(labels)
    b, error = left_over(torch.zeros(here.size, CLASSES), here.labels, log_prior(here.counts))
    assert b.item() == pytest.approx(1, rel=1e-6) and b.dtype == torch.float64 and 0 <= error < 1
    sure = 40.0 * torch.nn.functional.one_hot(here.labels, CLASSES)
    assert left_over(sure, here.labels, log_prior(here.counts))[0] < 1e-12


@pytest.mark.parametrize("labels", [SINGLE_CLASS, ONE_IMAGE])
def test_labels_without_entropy_leave_nothing(labels: list[int]) -> None:
    reply = score(task("score"), site(labels))
    assert list(reply.metrics.values()) == [0.0, 0.0, 0.0]
    assert judge([list(reply.metrics.values())]).noisy == (False,)


def test_the_smallest_of_each_measure_is_kept_and_no_number_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = site(ORDINARY)
    measured = iter([[0.8, 0.1, 0.9], [0.5, 0.2, 1.0], [math.nan] * 3, [0.7, 0.3, 0.6]])
    monkeypatch.setattr("fednoro.explained.measure", lambda *_: torch.tensor(next(measured), dtype=torch.float64))
    kept = []
    for _ in range(4):
        watch(task(), here, start().model)
        kept.append(here.memory[EVIDENCE].tolist())
    assert kept == [[0.8, 0.1, 0.9], [0.5, 0.2, 0.9], [0.5, 0.2, 0.9], [0.5, 0.2, 0.6]]


def test_a_client_says_what_it_has_watched_and_measures_only_if_it_has_not() -> None:
    here = site(ORDINARY)
    here.memory[EVIDENCE] = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    reply = score(task("score"), here)
    assert reply.metrics == dict(zip(SENT, [0.25, 0.5, 0.75], strict=True))
    assert reply.weights is None and not reply.arrays
    here.memory.clear()
    fresh = score(task("score"), here).metrics
    assert all(0 < value < 5 for value in fresh.values()) and EVIDENCE in here.memory
    broken = site(ORDINARY)
    broken.memory[EVIDENCE] = torch.full((3,), math.inf, dtype=torch.float64)
    assert score(task("score"), broken).metrics == fresh


def test_watching_is_the_last_rounds_of_the_warm_up() -> None:
    asked = [t for t in range(10) if watching(replace(start(seed=7), round=t), 10, 3)]
    assert asked == [7, 8, 9] and watching(start(seed=7), 2, 5) == {WATCH: 7}


# What the server makes of it


def reply(k: int, e: float, **changed: float) -> Reply:
    return Reply(k, 9, metrics={**dict(zip(SENT, rows([e])[0], strict=True)), **changed})


def test_a_late_client_is_judged_by_the_first_cut_and_moves_nobody() -> None:
    first = record(start(), [reply(0, 0.8), reply(1, 0.4), reply(2, 0.1)])
    cut = first.memo["detection"]["cut"]
    assert cut == pytest.approx(0.45) and verdicts(first) == {0: False, 1: True, 2: True}
    later = record(replace(first, round=3), [reply(3, 0.44), reply(4, 0.46)])
    assert verdicts(later) == {**verdicts(first), 3: True, 4: False}
    assert later.memo["detection"]["cut"] == cut
    assert later.memo["detection"]["reason"] == first.memo["detection"]["reason"]
    assert later.memo["detector"] == first.memo["detector"]
    known = first.memo["detection"]["clients"]
    assert {k: row for k, row in later.memo["detection"]["clients"].items() if k in known} == known
    assert later.memo["detection"]["clients"]["4"]["round"] == 3
    assert json.loads(json.dumps(later.memo, allow_nan=False)) == later.memo


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("name", SENT)
def test_numbers_that_cannot_be_are_no_answer(name: str, bad: float) -> None:
    after = record(start(), [reply(0, 0.8), reply(1, 0.7, **{name: bad})])
    assert verdicts(after) == {0: False} and suspects(after, (0, 1)) == {1}


def test_an_answer_without_the_numbers_is_none() -> None:
    with pytest.warns(FedNoRoWarning, match="no client could be scored"):
        after = record(start(), [Reply(0, 5), Reply(1, 5, metrics={"left": 0.2})])
    assert verdicts(after) == {} and suspects(after, (0, 1)) == set() and after.memo == {"asked_in": 0}


@given(SHARES)
def test_those_below_the_cut_are_suspected_unless_everybody_is(shares: list[float]) -> None:
    after = record(start(), [reply(k, e) for k, e in enumerate(shares)])
    flags, doubted = verdicts(after), suspects(after, range(len(shares)))
    assert doubted == (set() if all(flags.values()) else {k for k, noisy in flags.items() if noisy})


def test_trust_does_not_change_when_others_come_later() -> None:
    first = record(start(), [reply(k, e) for k, e in enumerate([0.1, 0.2, 0.9])])
    assert suspects(first, range(3)) == {0, 1}
    later = record(first, [reply(3, 0.8), reply(4, 0.0)])
    assert suspects(later, range(6)) == {0, 1, 4, 5}, "the last one has not been judged"
