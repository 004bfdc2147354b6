"""RHFL: how far clients are trusted, from round to round and on plateaus."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, TRAINING, federation, network, start
from hypothesis import given, settings
from hypothesis import strategies as st

import fednoro
from fednoro.core.types import FedNoRoWarning, Replies, Reply, State, Task, UserError, Weights
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.rounds import Evaluation, Turn, play
from fednoro.methods import RHFL
from fednoro.methods.rhfl import confidences, progress

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {0: 10, 1: 30, 2: 60}


def model(*values: float) -> Weights:
    return Weights(torch.tensor(values), torch.tensor([1]), (len(values),))


def folded(
    method: RHFL,
    losses: Mapping[int, float],
    before: Mapping[int, float] | None = None,
    round: int = 3,
) -> State:
    """One round in which each client ended with this loss, and sent its own number as its model."""
    memo = {} if before is None else {"sce": {str(k): loss for k, loss in before.items()}}
    state = State(model(0.0), round, 9, CLASSES, 0, memo=memo)
    replies = [
        Reply(k, SIZES[k], model(float(k)), {"sce": torch.tensor(loss)})
        for k, loss in losses.items()
    ]
    return method.fold(state, Replies("train", tuple(losses), iter(replies)))


def shares(state: State) -> list[float]:
    return [note["weight"] for note in state.notes.values()]


# Confidence


def test_first_round_is_uniform_and_so_by_size() -> None:
    state = folded(RHFL(), {0: 5.0, 1: 1.0, 2: 3.0}, round=0)
    assert [note["confidence"] for note in state.notes.values()] == [1 / 3] * 3
    assert shares(state) == pytest.approx([0.1, 0.3, 0.6])
    assert state.model.values.item() == pytest.approx(0.3 + 2 * 0.6)
    assert state.round == 1
    alone = folded(RHFL(weighting="confidence"), {0: 5.0, 1: 1.0, 2: 3.0}, round=0)
    assert shares(alone) == pytest.approx([1 / 3] * 3)


def test_clients_whose_loss_falls_faster_weigh_more() -> None:
    before = dict.fromkeys(range(3), 4.0)
    state = folded(RHFL(weighting="confidence"), {0: 1.0, 1: 2.0, 2: 3.9}, before)
    first, second, third = shares(state)
    assert first > second > third
    sized = folded(RHFL(), {0: 1.0, 1: 2.0, 2: 3.9}, before)
    raw = np.array([first, second, third]) * list(SIZES.values())
    assert shares(sized) == pytest.approx(raw / raw.sum())


def test_losses_are_remembered_for_the_next_round() -> None:
    state = folded(RHFL(), {0: 1.0, 2: 2.0}, {0: 4.0, 1: 5.0})
    assert state.memo["sce"] == {"0": 1.0, "1": 5.0, "2": 2.0}, "who was absent keeps its last loss"


def test_a_client_back_from_absence_is_compared_with_its_own_last_loss() -> None:
    method = RHFL(weighting="confidence")
    first = folded(method, {0: 4.0, 1: 4.0, 2: 4.0}, round=0)
    second = folded(
        method, {0: 3.0, 1: 3.0}, {int(k): v for k, v in first.memo["sce"].items()}, round=1
    )
    third = folded(
        method,
        {0: 3.0, 1: 3.0, 2: 2.0},
        {int(k): v for k, v in second.memo["sce"].items()},
        round=2,
    )
    assert (
        third.notes[0]["confidence"] == third.notes[1]["confidence"] < third.notes[2]["confidence"]
    )
    assert third.notes[2]["confidence"] == pytest.approx(confidences([0.0, 0.0, 1.0])[2])


def test_a_client_that_never_trained_is_in_the_middle() -> None:
    state = folded(RHFL(weighting="confidence"), {0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 2: 2.0})
    falling, new, rising = shares(state)
    assert falling > new > rising


@pytest.mark.parametrize("behaviour", ["guarded", "paper"])
def test_one_client_has_all_the_weight(behaviour: Any) -> None:
    for before in (None, {1: 5.0}, {1: 1.0}, {1: 2.0}):
        assert shares(folded(RHFL(behaviour=behaviour), {1: 2.0}, before)) == [1.0]


def test_a_loss_that_is_not_finite_makes_no_confidence_and_no_memory() -> None:
    state = folded(
        RHFL(weighting="confidence"), {0: math.nan, 1: math.inf, 2: 1.0}, {0: 2.0, 1: 2.0, 2: 1.0}
    )
    assert shares(state) == pytest.approx([1 / 3] * 3)
    assert state.memo["sce"] == {"0": 2.0, "1": 2.0, "2": 1.0}


def test_a_round_without_answers_changes_nothing() -> None:
    with pytest.warns(FedNoRoWarning, match="no client answered"):
        state = RHFL().fold(
            State(model(1.0), 3, 9, 4, 0, memo={"sce": {"0": 2.0}}),
            Replies("train", (0,), iter([])),
        )
    assert state.round == 4 and state.model.values.item() == 1.0 and state.memo["sce"] == {"0": 2.0}


def test_progress_is_relative_to_what_is_left() -> None:
    assert progress(3.0, 2.0) == 0.5
    assert progress(2.0, 4.0) == -0.5
    assert (
        progress(None, 2.0)
        == progress(1.0, 0.0)
        == progress(math.inf, 1.0)
        == progress(1.0, math.nan)
        == 0.0
    )


# The plateau, where ΣF crosses 0


def test_plain_sum_gives_one_client_everything_on_a_plateau_and_the_guarded_one_does_not() -> None:
    before = dict.fromkeys(range(3), 1.0)
    plateau = {0: 1 / 1.02, 1: 1 / 0.99, 2: 1 / 0.9901}  # F = .02, −.01, −.0099: ΣF = .0001
    plain = folded(RHFL(behaviour="paper", weighting="confidence"), plateau, before)
    assert max(shares(plain)) > 0.999
    guarded = folded(RHFL(weighting="confidence"), plateau, before)
    assert min(shares(guarded)) > 0.25 and max(shares(guarded)) < 0.5


def test_below_zero_the_plain_sum_prefers_those_whose_loss_rises() -> None:
    falls = [0.02, -0.01, -0.02]
    plain, guarded = (confidences(falls, behaviour=b) for b in ("paper", "guarded"))
    assert plain.argmax() == 2, "as the paper's formula says"
    assert guarded.argmax() == 0


@pytest.mark.parametrize("falls", [[0.5, -0.5], [1e-320, -5e-324, 0.3, -0.3]])
def test_a_sum_of_nothing_is_uniform_with_a_warning(falls: list[float]) -> None:
    with pytest.warns(FedNoRoWarning, match="adds up to 0"):
        w = confidences(falls, behaviour="paper")
    np.testing.assert_allclose(w, 1 / len(falls))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert confidences(falls).argmax() in (0, 2)


@given(
    st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8),
    st.sampled_from(["guarded", "paper"]),
)
@settings(deadline=None, max_examples=200)
def test_confidence_is_a_distribution_and_the_guard_bounds_it(
    falls: list[float], behaviour: Literal["guarded", "paper"]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        w = confidences(falls, 0.5, behaviour)
    assert w.shape == (len(falls),) and (w >= 0).all()
    assert w.sum() == pytest.approx(1)
    if behaviour == "guarded":
        assert w.max() <= math.e * w.min() * (1 + 1e-9)


def test_wrong_options_are_named() -> None:
    with pytest.raises(UserError, match=r"method\.eta must be >= 0, got -0\.5"):
        RHFL(eta=-0.5)


# With real clients


def played(**options: Any) -> list[Turn]:
    data, clients = federation(MIXED)
    lab = EagerEngine(network, data, 1, TRAINING, 0, torch.device("cpu"), clients)
    nothing = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    return list(
        play(RHFL(), start(), lab.exchange, sorted(lab.clients), lambda _: nothing, **options)
    )


def test_confidence_follows_what_the_clients_report_under_partial_participation() -> None:
    last: dict[int, float] = {}
    absent = 0
    for number, turn in enumerate(played(participation=0.6, failures=0.2)):
        now = {a.client: a.metrics["sce"] for a in turn.answers if a.status == "ok"}
        falls = [(last[k] - loss) / loss if k in last else 0.0 for k, loss in now.items()]
        if now:
            found = [turn.state.notes[k]["confidence"] for k in now]
            np.testing.assert_allclose(found, confidences(falls), rtol=1e-12)
        absent += number > 0 and any(k in last and k not in now for k in range(5))
        last |= now
        assert turn.state.memo.get("sce", {}) == {str(k): loss for k, loss in last.items()}
    assert absent, "somebody must have been away for a while"


def test_the_reported_loss_is_that_of_the_trained_model_on_plain_images() -> None:
    data, clients = federation(MIXED)
    lab = EagerEngine(network, data, 1, TRAINING, 0, torch.device("cpu"), clients)
    task = Task("train", 0, start().model)
    for client in clients:
        reply = RHFL(alpha=0.3, beta=0.7).work(task, lab.site(client))
        assert reply.weights is not None
        p = torch.softmax(lab.logits(reply.weights, client.index).double(), 1)
        total = 0.0
        for row, y in zip(p.tolist(), client.labels.tolist(), strict=True):
            total += -0.3 * math.log(row[y]) - 0.7 * math.log(1e-4) * sum(
                v for c, v in enumerate(row) if c != y
            )
        assert float(reply.metrics["sce"]) == pytest.approx(total / len(p), rel=1e-6)


def test_it_runs_on_digits(tmp_path: Path) -> None:
    small = ("train.rounds=3", "train.epochs=1", "noise=none", "model.width=4", f"out={tmp_path}")
    run = fednoro.run("digits", "method=rhfl", *small)
    assert len(run.bacc) == 3
    assert np.isfinite(run.bacc).all()
