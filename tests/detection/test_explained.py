"""Verdicts by explained shares: where the cut lies, who is flagged, and what clients
without anything to tell say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import (
    CLASSES,
    GAPPED,
    ONE_IMAGE,
    ORDINARY,
    SINGLE_CLASS,
    TRAINING,
    federation,
    network,
    start,
)
from hypothesis import given
from hypothesis import strategies as st

from fednoro.core.losses import log_prior
from fednoro.core.types import Task
from fednoro.detection.explained import (
    EVIDENCE,
    SENT,
    WATCH,
    find_cut,
    judge,
    left_over,
    score,
    watch,
    watching,
)
from fednoro.engine.eager import EagerEngine

pytestmark = pytest.mark.usefixtures("one_thread")

SHARES = st.lists(st.floats(-0.5, 0.99), min_size=1, max_size=30)


CLEAN, NOISY = (0.46, 0.48, 0.5, 0.52, 0.53, 0.55, 0.57, 0.6), (0.08, 0.12, 0.15, 0.19, 0.22, 0.24)


def rows(shares: Sequence[float]) -> list[list[float]]:
    """Evidence of clients that explain so much of their labels."""
    return [[1 - e, 1 - e] for e in shares]


# The cut


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
    assert found.steepness > 0
    for e, noisy, p in zip(found.explained, found.noisy, found.posterior, strict=True):
        assert noisy == (e < found.cut) and 0 <= p <= 1
        assert p >= 0.5 if noisy else p <= 0.5
    assert found.everybody == all(found.noisy)
    ordered = found.posterior[np.argsort(found.explained)]
    assert (np.diff(ordered) <= 1e-12).all(), "who explains more is not more likely to be noisy"


@given(SHARES)
def test_a_cut_lies_between_two_clients_or_beyond_all(shares: list[float]) -> None:
    values = np.array(shares)
    cut, _, parted = find_cut(values)
    assert parted == (values.min() < cut < values.max())
    assert np.abs(values - cut).min() > 0 or len(set(shares)) < len(shares)


@given(SHARES, st.floats(-0.2, 1), st.floats(0.1, 100))
def test_a_cut_that_is_given_is_used(shares: list[float], cut: float, steepness: float) -> None:
    found = judge(rows(shares), (cut, steepness))
    assert (found.cut, found.steepness) == (cut, steepness)
    assert list(found.noisy) == [e < cut for e in found.explained]
    expected = [1 / (1 + math.exp(steepness * (e - cut))) for e in found.explained]
    assert found.posterior.tolist() == pytest.approx(expected, rel=1e-9)


# in two groups, though little is explained yet
FAR = (0.02, 0.03, 0.03, 0.04, 0.14, 0.15, 0.16, 0.17)


@pytest.mark.parametrize(
    ("shares", "flagged", "said"),
    [
        (CLEAN, 0, "nobody flagged: explained shares 0.46 to 0.60, cut at 0.38"),
        (NOISY, 6, "everybody flagged: explained shares 0.08 to 0.24, cut at 0.42"),
        (
            (*NOISY, *CLEAN),
            6,
            "6 of 14 clients flagged: explained shares 0.08 to 0.60, cut at 0.35",
        ),
        (
            (NOISY[0], *CLEAN),
            1,
            "1 of 9 clients flagged: explained shares 0.08 to 0.60, cut at 0.27",
        ),
        (
            (*NOISY, *CLEAN[:2]),
            6,
            "6 of 8 clients flagged: explained shares 0.08 to 0.48, cut at 0.35",
        ),
        (FAR, 4, "4 of 8 clients flagged: explained shares 0.02 to 0.17, cut at 0.09"),
        ((0.9,), 0, "nobody flagged: explained shares 0.90, cut at 0.65"),
        ((0.1,), 1, "everybody flagged: explained shares 0.10, cut at 0.42"),
        ((0.2, 0.8), 1, "1 of 2 clients flagged: explained shares 0.20 to 0.80, cut at 0.50"),
    ],
)
def test_the_answer_may_be_nobody_some_or_everybody(
    shares: tuple[float, ...], flagged: int, said: str
) -> None:
    found = judge(rows(shares))
    assert [k for k, noisy in enumerate(found.noisy) if noisy] == list(range(flagged))
    assert found.reason == said + " (or the warm-up was too short to tell)" * found.everybody


@given(st.integers(0, 2**31), st.integers(2, 40), st.floats(0.53, 0.8))
def test_clients_of_one_kind_are_not_parted(seed: int, clients: int, level: float) -> None:
    """Shares that scatter by a twelfth of their mean, as those of clean clients do."""
    shares = level * (1 + 0.085 * np.random.default_rng(seed).standard_normal(clients).clip(-2, 2))
    assert not any(judge(rows(shares.tolist())).noisy)


@pytest.mark.parametrize(
    "shares",
    [(0.9, 0.62), (0.9, 0.85, 0.6), (0.95, 0.9, 0.88, 0.62), (0.03, 0.0), (0.0, 0.04, 0.02)],
)
def test_few_clients_are_parted_only_if_they_differ_much(shares: tuple[float, ...]) -> None:
    assert len(set(judge(rows(shares)).noisy)) == 1


@pytest.mark.parametrize("left", [7.0, 1e9, 1e300])
def test_one_client_far_out_hides_no_other(left: float) -> None:
    found = judge([*rows([*NOISY, *CLEAN]), [left, left]])
    assert found.noisy == (True,) * len(NOISY) + (False,) * len(CLEAN) + (True,)
    assert found.explained[-1] == 0 and np.isfinite(found.posterior).all()


@given(st.integers(0, 2**31), st.integers(2, 20), st.integers(2, 20), st.floats(0.45, 0.9))
def test_noisy_clients_that_explain_half_are_found(
    seed: int, noisy: int, clean: int, level: float
) -> None:
    rng = np.random.default_rng(seed)
    upper = level * (1 + 0.06 * rng.standard_normal(clean).clip(-2, 2))
    lower = 0.45 * level * (1 + 0.06 * rng.standard_normal(noisy).clip(-2, 2))
    assert judge(rows([*lower, *upper])).noisy == (True,) * noisy + (False,) * clean


def test_who_tells_nothing_is_not_flagged_and_that_is_said_by_the_posterior() -> None:
    found = judge([[0.0, 0.0], [0.95, 0.85], [0.9, 0.8]])
    assert found.noisy == (False, True, True) and found.posterior[0] == 0.5 and found.everybody
    assert found.explained.tolist() == pytest.approx([1.0, 0.1, 0.15])
    assert "everybody flagged" in found.reason
    silent = judge([[0.0, 0.0]])
    assert silent.noisy == (False,) and not silent.everybody and silent.posterior.tolist() == [0.5]


@given(SHARES)
def test_clients_that_are_known_to_be_alike_are_all_noisy_or_all_clean(shares: list[float]) -> None:
    found = judge(rows(shares), alike=True)
    assert found.everybody == (np.median(found.explained) < 0.42) and not found.parted
    assert set(found.noisy) == {found.everybody}


# What a client measures


def site(labels: list[int], seed: int = 0) -> Any:
    data, clients = federation([labels])
    engine = EagerEngine(network, data, 1, TRAINING, seed, torch.device("cpu"), clients)
    return engine.site(clients[0])


def task(name: str = "train", round: int = 3) -> Task:
    return Task(name, round, start().model, {WATCH: True})


@pytest.mark.parametrize("labels", [ORDINARY, GAPPED])
def test_a_model_that_knows_the_frequencies_alone_leaves_everything(labels: list[int]) -> None:
    here = site(labels)
    b = left_over(torch.zeros(here.size, CLASSES), here.labels, log_prior(here.counts))
    assert b.item() == pytest.approx(1, rel=1e-6) and b.dtype == torch.float64
    sure = 40.0 * torch.nn.functional.one_hot(here.labels, CLASSES)
    assert left_over(sure, here.labels, log_prior(here.counts)) < 1e-12


@pytest.mark.parametrize("labels", [SINGLE_CLASS, ONE_IMAGE])
def test_labels_without_entropy_leave_nothing(labels: list[int]) -> None:
    reply = score(task("score"), site(labels))
    assert list(reply.metrics.values()) == [0.0, 0.0]
    assert judge([list(reply.metrics.values())]).noisy == (False,)


def test_the_smallest_of_each_measure_is_kept_and_no_number_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = site(ORDINARY)
    measured = iter([[0.8, 0.9], [0.5, 1.0], [math.nan] * 2, [0.7, 0.6]])
    monkeypatch.setattr(
        "fednoro.detection.explained.measure",
        lambda *_: torch.tensor(next(measured), dtype=torch.float64),
    )
    kept = []
    for _ in range(4):
        watch(task(), here, start().model)
        kept.append(here.memory[EVIDENCE].tolist())
    assert kept == [[0.8, 0.9], [0.5, 0.9], [0.5, 0.9], [0.5, 0.6]]


def test_a_client_says_what_it_has_watched_and_measures_only_if_it_has_not() -> None:
    here = site(ORDINARY)
    here.memory[EVIDENCE] = torch.tensor([0.25, 0.75], dtype=torch.float64)
    reply = score(task("score"), here)
    assert reply.metrics == dict(zip(SENT, [0.25, 0.75], strict=True))
    assert reply.weights is None and not reply.arrays
    here.memory[EVIDENCE] = torch.tensor([9.0, 0.75], dtype=torch.float64)
    received = left_over(
        here.logits(task("score"), start().model), here.labels, log_prior(here.counts)
    )
    assert score(task("score"), here).metrics == dict(
        zip(SENT, [received.item(), 0.75], strict=True)
    )
    here.memory.clear()
    fresh = score(task("score"), here).metrics
    assert all(0 < value < 5 for value in fresh.values()) and EVIDENCE in here.memory
    broken = site(ORDINARY)
    broken.memory[EVIDENCE] = torch.full((2,), math.inf, dtype=torch.float64)
    assert score(task("score"), broken).metrics == fresh


def test_watching_is_the_last_rounds_of_the_warm_up() -> None:
    asked = [t for t in range(10) if watching(replace(start(seed=7), round=t), 10, 3)]
    assert asked == [7, 8, 9] and watching(start(seed=7), 2, 5) == {WATCH: True}
