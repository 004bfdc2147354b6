"""FedNoRo's two stages: who is asked what, what noisy clients learn from, how models
are weighed, what goes wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fednoro.core.losses import distill, log_prior
from fednoro.core.training import Augment, Training
from fednoro.core.types import (
    Clients,
    Failure,
    FedNoRoWarning,
    FloatArray,
    Replies,
    Reply,
    State,
    Step,
    Task,
    UserError,
    Weights,
)
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.detection.verdicts import verdicts
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.rounds import Evaluation, Turn, play
from fednoro.methods import FedLA, FedNoRo, Method
from fednoro.models import Cnn, Packed, initialise

NAN = math.nan
NOTHING = Evaluation(np.eye(3, dtype=np.int64), 0.0)
BEHAVIOURS = ("paper", "reference")
SMALL = FedNoRo(warmup=2)
both_behaviours = pytest.mark.parametrize("behaviour", BEHAVIOURS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads are slow on networks of this size, and on busy machines very slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Clients made of numbers: no network, no images

SEGMENTS = (4, 2)
QUIET, LOUD = [0.3, 0.2, 0.4], [2.0, 1.6, 1.9]  # per-class losses of a clean and of a noisy client


def model(*values: float) -> Weights:
    padded = [*values, *[0.0] * (6 - len(values))]
    return Weights(torch.tensor(padded), torch.tensor([len(values)]), SEGMENTS)


def state(
    round: int = 2, rounds: int = 6, memo: Mapping[str, Any] | None = None, seed: int = 0
) -> State:
    return State(model(), round, rounds, 3, seed, memo=memo or {})


def told(noisy: Mapping[int, bool]) -> dict[str, Any]:
    """A memo that says who is noisy, as detection writes it."""
    rows = {
        str(k): {"noisy": flag, "posterior": float(flag), "round": 2} for k, flag in noisy.items()
    }
    return {
        "asked_in": 2,
        "detector": {"mixture": None},
        "detection": {"reason": "told", "clients": rows},
    }


def scores(k: int, losses: Sequence[float], counts: Sequence[float] | None = None) -> Reply:
    held = [0.0 if math.isnan(v) else 5.0 for v in losses] if counts is None else counts
    return Reply(k, 5 * len(losses), arrays={"losses": np.array(losses), "counts": np.array(held)})


def losses_of(k: int) -> list[float]:
    """Clients 3 and up are noisy; everyone is a little different."""
    return [v + 0.01 * k + 0.003 * c * k for c, v in enumerate(LOUD if k >= 3 else QUIET)]


Send = Callable[[int, Task], Reply | Failure]


def ordinary(k: int, task: Task) -> Reply:
    return (
        scores(k, losses_of(k))
        if task.name == "score"
        else Reply(k, k + 1, model(1.0 * k, task.round), {"loss": 1.0})
    )


def turns(
    method: Method,
    begin: State,
    send: Send = ordinary,
    clients: Sequence[int] = range(5),
    **options: Any,
) -> tuple[list[Turn], list[tuple[str, int, dict[int, float | None]]]]:
    """All turns, and for each exchange the task, the round and the λ
    of each client that was asked.
    """
    asked: list[tuple[str, int, dict[int, float | None]]] = []

    def exchange(_: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        if tasks:
            first = next(iter(tasks.values()))
            lams = {
                k: float(t.settings["lam"]) if "lam" in t.settings else None
                for k, t in tasks.items()
            }
            asked.append((first.name, first.round, lams))
        for k in sorted(tasks):
            yield send(k, tasks[k])

    return list(play(method, begin, exchange, clients, lambda _: NOTHING, **options)), asked


def fold(method: Method, begin: State, replies: Sequence[Reply]) -> State:
    return method.fold(begin, Replies("train", tuple(r.client for r in replies), iter(replies)))


def judge(replies: Sequence[Reply], begin: State | None = None, method: Method = SMALL) -> State:
    return method.fold(
        begin or state(), Replies("score", tuple(r.client for r in replies), iter(replies))
    )


# The state machine


def test_warm_up_then_one_scoring_then_stage_two() -> None:
    played, asked = turns(SMALL, state(0))
    assert [(name, t) for name, t, _ in asked] == [
        ("train", 0),
        ("train", 1),
        ("score", 2),
        ("train", 2),
        ("train", 3),
        ("train", 4),
        ("train", 5),
    ]
    stages = [turn.state.stage for turn in played]
    assert stages == ["warm-up", "warm-up", "detection", *["noise-robust training"] * 4]
    assert all(set(lams) == {0, 1, 2, 3, 4} for _, _, lams in asked)
    assert verdicts(played[-1].state) == {0: False, 1: False, 2: False, 3: True, 4: True}


def test_lam_goes_to_noisy_clients_only_and_not_before_stage_two() -> None:
    _, asked = turns(SMALL, state(0))
    for name, t, lams in asked:
        for k, lam in lams.items():
            assert (lam is not None) == (name == "train" and t >= 2 and k >= 3)


def test_scoring_asks_everyone_present_though_half_are_drawn() -> None:
    _, asked = turns(SMALL, state(0), participation=0.5)
    sizes = [(name, len(lams)) for name, _, lams in asked]
    assert sizes == [("train", 2), ("train", 2), ("score", 5), *[("train", 2)] * 4]


def test_scoring_leaves_model_and_round_alone() -> None:
    begin = state()
    after = judge([ordinary(k, Task("score", 2, model())) for k in range(5)], begin)  # type: ignore[misc]
    assert after.model is begin.model and after.round == begin.round and after.stage == "detection"
    rows = after.memo["detection"]["clients"]
    assert (
        rows["4"]["losses"] == losses_of(4)
        and rows["4"]["counts"] == [5, 5, 5]
        and rows["4"]["round"] == 2
    )
    assert rows["4"]["posterior"] > 0.5 > rows["0"]["posterior"]


@pytest.mark.parametrize(
    ("rounds", "warmup", "begin", "end"), [(100, 10, 10, 49), (300, 20, 20, 141), (30, 4, 4, 15)]
)
@both_behaviours
def test_lam_of_each_round_follows_the_ramp(
    behaviour: Any, rounds: int, warmup: int, begin: int, end: int
) -> None:
    method = FedNoRo(warmup=warmup, behaviour=behaviour)
    memo = told({0: False, 1: True})
    for t in range(warmup, rounds):
        planned = method.plan(state(t, rounds, memo), Clients((0, 1), (0, 1)))
        u = min((t - begin) / (end - begin), 1.0)
        expected = 0.8 * math.exp(-5 * (1 - u) ** 2)
        if t == warmup:
            expected = 0.0 if behaviour == "paper" else 0.8 * math.exp(-5)
        assert planned[1].settings["lam"] == pytest.approx(expected, abs=1e-15)
        assert planned[0].settings == {}


def test_reference_ramp_begins_at_0_0054_on_ich() -> None:
    method = FedNoRo(warmup=10, behaviour="reference")
    assert round(method.lam(state(10, 100)), 4) == 0.0054
    assert method.lam(state(49, 100)) == 0.8 > method.lam(state(48, 100))


def test_ramp_end_and_lam_max_are_the_users() -> None:
    method = FedNoRo(warmup=4, ramp_end=8, lam_max=0.5)
    expected = [0.0, *(0.5 * math.exp(-5 * (1 - i / 4) ** 2) for i in (1, 2, 3)), 0.5, 0.5]
    assert [method.lam(state(t, 10)) for t in range(4, 10)] == pytest.approx(expected, abs=1e-15)


def test_ramp_of_a_run_too_short_for_one_is_at_its_peak() -> None:
    assert FedNoRo(warmup=5).lam(state(5, 6)) == 0.8


@pytest.mark.parametrize(("warmup", "rounds"), [(5, 5), (6, 5), (10, 1)])
def test_warm_up_that_leaves_no_stage_two_is_refused(warmup: int, rounds: int) -> None:
    with pytest.raises(
        UserError, match=rf"method\.warmup must be below train\.rounds \({rounds}\), got {warmup}"
    ):
        FedNoRo(warmup=warmup).check(rounds)
    FedNoRo(warmup=warmup).check(warmup + 1)


def test_ramp_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"method\.ramp_end must be at least method\.warmup \(4\), got 3"
    ):
        FedNoRo(warmup=4, ramp_end=3).check(10)
    FedNoRo(warmup=4, ramp_end=4).check(10)


# Detection that meets something odd


def judged_warnings(replies: Sequence[Reply]) -> tuple[State, list[str]]:
    with pytest.warns(FedNoRoWarning) as caught:
        after = judge(replies)
    json.dumps(after.memo, allow_nan=False)
    return after, [str(w.message) for w in caught]


def test_equal_clients_leave_nobody_flagged() -> None:
    after, messages = judged_warnings([scores(k, QUIET) for k in range(5)])
    assert not any(verdicts(after).values()) and "nobody flagged" in messages[0]
    assert "nobody flagged" in after.memo["detection"]["reason"]


def test_class_with_equal_losses_is_told_and_the_others_decide() -> None:
    after, messages = judged_warnings([scores(k, [*losses_of(k)[:2], 0.7]) for k in range(5)])
    assert [k for k, noisy in verdicts(after).items() if noisy] == [3, 4]
    assert any("same loss at every client" in m and "2" in m for m in messages)


def test_class_that_nobody_holds_is_told_and_the_others_decide() -> None:
    after, messages = judged_warnings([scores(k, [*losses_of(k)[:2], NAN]) for k in range(5)])
    assert [k for k, noisy in verdicts(after).items() if noisy] == [3, 4]
    assert any("held by nobody" in m for m in messages)
    assert after.memo["detection"]["clients"]["0"]["losses"][2] is None


def test_missing_classes_do_not_decide() -> None:
    missing = {1: {1, 2}, 4: {0}}
    losses = [
        [NAN if c in missing.get(k, ()) else v for c, v in enumerate(losses_of(k))]
        for k in range(5)
    ]
    replies = [scores(k, row) for k, row in enumerate(losses)]
    assert [k for k, noisy in verdicts(judge(replies)).items() if noisy] == [3, 4]


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_client_with_broken_losses_is_not_trusted_and_asked_again_when_drawn(bad: float) -> None:
    replies = [scores(k, losses_of(k) if k != 1 else [0.3, bad, 0.4], [5, 5, 5]) for k in range(5)]
    after, messages = judged_warnings(replies)
    assert verdicts(after) == {0: False, 1: True, 2: False, 3: True, 4: True}
    assert any("without usable scores" in m for m in messages)
    now = SMALL.plan(after, Clients(tuple(range(5)), (0, 1)))
    assert {k: (t.name, "lam" in t.settings) for k, t in now.items()} == {
        0: ("train", False),
        1: ("train", True),
    }
    later = replace(after, round=3)
    assert {k: t.name for k, t in SMALL.plan(later, Clients(tuple(range(5)), (0, 1))).items()} == {
        1: "score"
    }
    assert {t.name for t in SMALL.plan(later, Clients(tuple(range(5)), (0, 2))).values()} == {
        "train"
    }


def test_one_client_is_not_flagged() -> None:
    after, messages = judged_warnings([scores(0, QUIET)])
    assert verdicts(after) == {0: False} and any("too few clients" in m for m in messages)


def test_nobody_answers_the_scoring() -> None:
    with pytest.warns(FedNoRoWarning, match="no client could be scored"):
        after = judge([])
    assert after.memo == {"asked_in": 2} and verdicts(after) == {}
    planned = SMALL.plan(after, Clients((0, 1, 2), (1,)))
    assert {k: (t.name, "lam" in t.settings) for k, t in planned.items()} == {1: ("train", True)}
    again = SMALL.plan(replace(after, round=3), Clients((0, 1, 2), (1,)))
    assert {k: t.name for k, t in again.items()} == {0: "score", 1: "score", 2: "score"}


def test_federation_in_which_nobody_ever_answers_the_scoring_still_trains() -> None:
    def send(k: int, task: Task) -> Reply | Failure:
        return Failure(k, "timed out") if task.name == "score" else ordinary(k, task)

    played, asked = turns(SMALL, state(0), send)
    assert played[-1].state.round == 6
    assert [name for name, _, _ in asked] == ["train", "train", *["score", "train"] * 4]
    trained = [turn for turn in played if turn.task == "train"][2:]
    assert all(any("no clean client" in m for m in turn.warnings) for turn in trained)
    assert all(
        any("no client could be scored" in m for m in turn.warnings)
        for turn in played
        if turn.task == "score"
    )


def test_clients_absent_from_the_scoring_are_noisy_until_they_are_drawn_and_judged() -> None:
    """Clients 2 (clean) and 5 (noisy) miss the scoring; later they are scored
    by the mixture of the others.
    """
    late = {2, 5}

    def send(k: int, task: Task) -> Reply | Failure:
        if task.name == "score" and k in late and task.round == 2:
            return Failure(k, "away")
        return ordinary(k, task)

    played, asked = turns(SMALL, state(0), send, range(6))
    assert [(name, t, sorted(lams)) for name, t, lams in asked][2:6] == [
        ("score", 2, [0, 1, 2, 3, 4, 5]),
        ("train", 2, [0, 1, 2, 3, 4, 5]),
        ("score", 3, [2, 5]),
        ("train", 3, [0, 1, 2, 3, 4, 5]),
    ]
    noisy_in = [{k for k, lam in lams.items() if lam is not None} for _, _, lams in asked]
    assert noisy_in[3] == {2, 3, 4, 5} and noisy_in[5] == {3, 4, 5}
    first, second = played[2].state.memo, played[4].state.memo
    assert first["detector"] == second["detector"], "late clients do not move the mixture"
    assert {k: row["round"] for k, row in second["detection"]["clients"].items()} == {
        "0": 2, "1": 2, "3": 2, "4": 2, "2": 3, "5": 3
    }  # fmt: skip
    assert all(name == "train" for name, _, _ in asked[5:])


def test_late_clients_are_scored_only_when_they_are_drawn() -> None:
    first = judge([scores(k, losses_of(k)) for k in (0, 1, 3, 4)])
    later = replace(first, round=3)
    assert {k: t.name for k, t in SMALL.plan(later, Clients(tuple(range(6)), (0, 5))).items()} == {
        5: "score"
    }
    assert {t.name for t in SMALL.plan(later, Clients(tuple(range(6)), (0, 1))).values()} == {
        "train"
    }


def test_late_clients_complete_a_detection_that_had_too_few_for_a_mixture() -> None:
    with pytest.warns(FedNoRoWarning, match="too few clients"):
        alone = judge([scores(3, losses_of(3))])
    assert verdicts(alone) == {3: False}
    later = judge([scores(k, losses_of(k)) for k in (0, 1, 2, 4)], replace(alone, round=3))
    assert verdicts(later) == {0: False, 1: False, 2: False, 3: True, 4: True}
    assert later.memo["detection"]["clients"]["3"]["round"] == 2


# Aggregation


def daagg_by_hand(
    models: FloatArray, sizes: Sequence[int], noisy: Sequence[bool], behaviour: str
) -> FloatArray:
    """The paper's DaAgg, and the authors' sum of one norm per tensor, in float64 and in loops."""
    count = len(sizes)
    d = []
    for k in range(count):
        to_clean = []
        for j in range(count):
            if not noisy[j]:
                difference = models[k] - models[j]
                if behaviour == "paper":
                    to_clean.append(math.sqrt(sum(v * v for v in difference)))
                else:
                    parts = np.split(difference, np.cumsum(SEGMENTS)[:-1])
                    to_clean.append(sum(math.sqrt(sum(v * v for v in part)) for part in parts))
        d.append(min(to_clean))
    raw = [n * math.exp(-dk / max(d)) for n, dk in zip(sizes, d, strict=True)]
    return np.array([w / sum(raw) for w in raw])


@both_behaviours
def test_daagg_weighs_models_as_re_derived(behaviour: Any) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(5, 6)).astype(np.float32)
    sizes, noisy = [3, 8, 5, 9, 2], [False, True, False, True, True]
    replies = [
        Reply(k, sizes[k], Weights(torch.from_numpy(values[k]), torch.tensor([k]), SEGMENTS))
        for k in range(5)
    ]
    method = FedNoRo(warmup=2, behaviour=behaviour)
    begin = state(3, memo=told(dict(enumerate(noisy))))
    after = fold(method, begin, replies)
    shares = daagg_by_hand(values.astype(np.float64), sizes, noisy, behaviour)
    other = daagg_by_hand(values.astype(np.float64), sizes, noisy, BEHAVIOURS[behaviour == "paper"])
    assert np.abs(shares - other).max() > 1e-3, "the two behaviours must differ here"
    np.testing.assert_allclose([after.notes[k]["weight"] for k in range(5)], shares, rtol=1e-9)
    np.testing.assert_allclose(
        after.model.values.numpy(), shares @ values.astype(np.float64), rtol=1e-6, atol=1e-7
    )
    assert after.model.counters.tolist() == [int(np.argmax(shares))]
    assert {k for k in range(5) if "lam" in after.notes[k]} == {1, 3, 4}
    assert [after.notes[k]["distance"] == 0 for k in range(5)] == [not flag for flag in noisy]
    assert after.round == 4


def test_only_the_replies_that_came_count_in_daagg() -> None:
    replies = [Reply(0, 4, model(0.0)), Reply(2, 4, model(1.0)), Reply(3, 4, model(2.0))]
    begin = state(3, memo=told({0: False, 1: False, 2: True, 3: True}))
    notes = fold(SMALL, begin, replies).notes
    raw = [1.0, math.exp(-0.5), math.exp(-1)]
    assert [notes[k]["weight"] for k in (0, 2, 3)] == pytest.approx(
        [w / sum(raw) for w in raw], rel=1e-12
    )


@pytest.mark.parametrize("noisy", [{0: True, 1: True}, {0: True, 1: True, 2: False}, {}])
def test_round_without_a_clean_client_weighs_by_size(noisy: dict[int, bool]) -> None:
    """Everyone flagged; the clean ones absent; nobody known."""
    with pytest.warns(
        FedNoRoWarning, match="no clean client took part: models are weighted by size"
    ):
        after = fold(
            SMALL, state(3, memo=told(noisy)), [Reply(0, 1, model(4.0)), Reply(1, 3, model(8.0))]
        )
    assert after.model.values[0] == 7.0 and after.round == 4
    assert {k: note["weight"] for k, note in after.notes.items()} == {0: 0.25, 1: 0.75}


@both_behaviours
def test_equal_models_are_weighed_by_size(behaviour: Any) -> None:
    replies = [Reply(k, k + 1, model(1.5, -2.0)) for k in range(3)]
    method = FedNoRo(warmup=2, behaviour=behaviour)
    after = fold(method, state(3, memo=told({0: False, 1: True, 2: True})), replies)
    assert torch.equal(after.model.values, model(1.5, -2.0).values)
    assert [after.notes[k]["weight"] for k in range(3)] == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_stage_two_round_without_replies_keeps_the_model() -> None:
    begin = state(3, memo=told({0: False, 1: True}))
    with pytest.warns(FedNoRoWarning, match="round 4: no client answered"):
        after = SMALL.fold(begin, Replies("train", (0, 1), iter(())))
    assert torch.equal(after.model.values, begin.model.values) and after.round == 4


def test_client_that_sends_nan_weights_in_stage_two_is_left_out() -> None:
    def send(k: int, task: Task) -> Reply:
        return Reply(k, 1, model(NAN if k == 1 else 1.0 * k))

    played, _ = turns(SMALL, state(3, 4, told({0: False, 1: False, 2: True})), send, range(3))
    assert [a.status for a in played[0].answers] == ["ok", "failed", "ok"]
    assert any("client 1" in m and "not finite" in m for m in played[0].warnings)
    shares = daagg_by_hand(np.array([[0.0] * 6, [2.0] + [0.0] * 5]), [1, 1], [False, True], "paper")
    assert played[0].state.model.values[0].item() == pytest.approx(2 * shares[1])


# On real networks and images

# What each client says its images are, and what they are: clients 2 and 3 are
# wrong more often than not.
TRUE = [[0, 1, 2] * 4, [0, 1, 1, 0, 1, 0, 0], [0, 1, 2] * 3, [2, 1, 0, 0], [2] * 3]
GIVEN = [TRUE[0], TRUE[1], [1, 2, 0] * 3, [1, 0, 2, 0], [2] * 3]


def network() -> nn.Module:
    return initialise(Cnn(width=2), 1, 3, seed=0)


class Lab(EagerEngine):
    """The eager engine over the clients above; what it yields is kept."""

    def __init__(self, augment: Augment | None = None) -> None:
        true, given = (np.concatenate(lists).astype(np.int64) for lists in (TRUE, GIVEN))
        images = np.random.default_rng(3).integers(0, 90, (len(true), 5, 5, 1)).astype(np.uint8)
        images[np.arange(len(true)), true] += 150
        ends = np.cumsum([len(part) for part in TRUE])
        parts = [np.arange(end - len(part), end) for part, end in zip(TRUE, ends, strict=True)]
        clients = [Client(k, f"site {k}", index, given[index]) for k, index in enumerate(parts)]
        training = Training(batch=4, lr=0.01, augment=augment or Augment())
        super().__init__(
            network,
            Dataset(images, true, tuple("abc")),
            1,
            training,
            0,
            torch.device("cpu"),
            clients,
        )
        self.replies: list[list[Reply]] = []

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        self.replies.append([])
        for item in super().exchange(method, tasks):
            assert isinstance(item, Reply)
            self.replies[-1].append(item)
            yield item

    def play(self, method: Method, begin: State | None = None, **options: Any) -> list[Turn]:
        begin = begin or self.start()
        return list(
            play(method, begin, self.exchange, sorted(self.clients), lambda _: NOTHING, **options)
        )

    def start(self, round: int = 0, memo: Mapping[str, Any] | None = None) -> State:
        return State(Packed(network()).weights(), round, 6, 3, 0, memo=memo or {})


def models(played: Sequence[Turn]) -> list[Weights]:
    return [turn.state.model for turn in played if turn.task == "train"]


def equal(a: Weights, b: Weights) -> bool:
    return torch.equal(a.values, b.values) and torch.equal(a.counters, b.counters)


def test_warm_up_is_fedla_bit_for_bit() -> None:
    ours, theirs = (
        models(Lab().play(method, participation=0.6)) for method in (FedNoRo(warmup=4), FedLA())
    )
    assert [equal(a, b) for a, b in zip(ours, theirs, strict=True)][:4] == [True] * 4
    assert not equal(ours[5], theirs[5]), "stage 2 must differ, or this shows nothing"


def test_stage_two_is_fedla_bit_for_bit_when_nobody_is_flagged() -> None:
    begin = Lab().start(2, told(dict.fromkeys(range(5), False)))
    ours, theirs = (models(Lab().play(method, begin)) for method in (SMALL, FedLA()))
    assert len(ours) == 4 and all(map(equal, ours, theirs))
    flagged = Lab().start(2, told({**dict.fromkeys(range(5), False), 2: True}))
    assert not equal(models(Lab().play(SMALL, flagged))[0], theirs[0]), (
        "a flag must make a difference"
    )


def test_all_flagged_still_trains_to_finite_weights() -> None:
    played = Lab().play(SMALL, Lab().start(2, told(dict.fromkeys(range(5), True))))
    assert played[-1].state.round == 6 and played[-1].state.model.values.isfinite().all()
    assert not equal(played[0].state.model, played[-1].state.model)
    assert all(any("no clean client" in m for m in turn.warnings) for turn in played)


@both_behaviours
def test_daagg_of_trained_models_is_as_re_derived(behaviour: Any) -> None:
    lab = Lab()
    noisy = [False, False, True, True, True]
    method = FedNoRo(warmup=2, behaviour=behaviour, ramp_end=3)
    played = lab.play(method, lab.start(2, told(dict(enumerate(noisy)))))
    assert len(played) == 4
    segments = np.cumsum(Packed(network()).segments)[:-1]
    for turn, replies in zip(played, lab.replies, strict=True):
        values = np.stack(
            [r.weights.values.numpy().astype(np.float64) for r in replies if r.weights is not None]
        )
        d = np.zeros(5)
        for k in range(5):
            parts = [np.split(values[k] - values[j], segments) for j in range(5) if not noisy[j]]
            if behaviour == "paper":
                d[k] = min(np.sqrt(sum((p**2).sum() for p in difference)) for difference in parts)
            else:
                d[k] = min(sum(np.sqrt((p**2).sum()) for p in difference) for difference in parts)
        raw = np.array([len(part) for part in GIVEN]) * np.exp(-d / d.max())
        shares = raw / raw.sum()
        np.testing.assert_allclose(
            [turn.state.notes[k]["weight"] for k in range(5)], shares, rtol=1e-8
        )
        np.testing.assert_allclose(
            turn.state.model.values.numpy(), shares @ values, rtol=1e-5, atol=1e-7
        )


def some_step(aux: Mapping[str, torch.Tensor]) -> Step:
    net, anchor = (initialise(Cnn(width=2), 1, 3, seed).double().eval() for seed in (1, 2))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 1, 5, 5)))
    return Step(
        net, anchor, x, torch.tensor([0, 1, 0, 1, 1, 0]), torch.arange(6), aux, torch.empty(6, 0)
    )


@pytest.mark.parametrize("adjust", ["student", "none", "both"])
@pytest.mark.parametrize("counts", [[5, 3, 4], [5, 3, 0]], ids=["all classes", "a class missing"])
def test_noisy_clients_learn_from_the_received_model(counts: list[int], adjust: Any) -> None:
    log_pi = log_prior(torch.tensor(counts, dtype=torch.float64))
    step = some_step({"log_pi": log_pi, "lam": torch.tensor(0.3, dtype=torch.float64)})
    value = FedNoRo(temperature=0.7, adjust=adjust).loss(step)
    student, teacher = step.net(step.x), step.anchor(step.x)
    assert torch.equal(
        value, distill(student, step.y, teacher, step.aux["lam"], 0.7, log_pi, adjust=adjust)
    )

    prior, held = np.array(counts) / sum(counts), [c for c in range(3) if counts[c]]
    total = 0.0
    for f, g, y in zip(
        student.detach().numpy(), teacher.detach().numpy(), step.y.tolist(), strict=True
    ):
        y_p = prior * np.exp(f) / (prior * np.exp(f)).sum()
        p = np.exp(f) / np.exp(f).sum() if adjust == "none" else y_p
        target = np.exp(g / 0.7) * (prior if adjust == "both" else 1)
        target = target / target.sum()
        kl = 0.0
        for c in range(3):
            if target[c] > 0:
                kl += target[c] * (
                    math.log(target[c]) - (math.log(p[c]) if c in held or adjust == "none" else 0.0)
                )
        total += 0.3 * kl - 0.7 * math.log(y_p[y])
    assert value.item() == pytest.approx(total / 6, rel=1e-10)

    value.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in step.net.parameters())
    assert all(p.grad is None for p in step.anchor.parameters())


def test_clean_clients_do_not_look_at_the_received_model() -> None:
    step = some_step({"log_pi": log_prior(torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64))})
    value = SMALL.loss(step)
    assert torch.equal(value, FedLA().loss(step))
    elsewhere = replace(step, anchor=nn.Identity())
    assert torch.equal(SMALL.loss(elsewhere), value)


# The pieces of stage 2, as the ablation takes them away

FLAGGED = {0: False, 1: False, 2: True, 3: True, 4: True}


def asked_in_stage_two(method: Method, **options: Any) -> dict[int, float | None]:
    _, asked = turns(method, state(5, memo=told(FLAGGED)), **options)
    assert [name for name, _, _ in asked] == ["train"]
    return asked[0][2]


def test_flagged_clients_distil_train_as_the_others_or_are_left_out() -> None:
    lam = SMALL.lam(state(5))
    assert lam > 0
    assert asked_in_stage_two(SMALL) == {k: lam if noisy else None for k, noisy in FLAGGED.items()}
    assert asked_in_stage_two(FedNoRo(warmup=2, noisy_clients="train")) == dict.fromkeys(range(5))
    assert asked_in_stage_two(FedNoRo(warmup=2, noisy_clients="leave_out")) == {0: None, 1: None}


def test_where_only_flagged_clients_can_be_asked_they_are_not_left_out() -> None:
    method = FedNoRo(warmup=2, noisy_clients="leave_out")
    everyone = state(5, memo=told(dict.fromkeys(range(3), True)))
    played, asked = turns(method, everyone, clients=range(3))
    assert asked[0][2] == dict.fromkeys(range(3)), "and they train as the clean ones would"
    assert any("no clean client took part" in message for message in played[0].warnings)


@pytest.mark.parametrize("noisy_clients", ["distil", "train", "leave_out"])
@pytest.mark.parametrize("aggregation", ["distance", "size"])
def test_pieces_of_stage_two_as_re_derived(noisy_clients: Any, aggregation: Any) -> None:
    rng = np.random.default_rng(2)
    values, sizes = rng.normal(size=(5, 6)).astype(np.float32), [3, 8, 5, 9, 2]
    kept = [k for k, noisy in FLAGGED.items() if not (noisy and noisy_clients == "leave_out")]
    replies = [
        Reply(k, sizes[k], Weights(torch.from_numpy(values[k]), torch.tensor([k]), SEGMENTS))
        for k in kept
    ]
    method = FedNoRo(warmup=2, noisy_clients=noisy_clients, aggregation=aggregation)
    after = fold(method, state(3, memo=told(FLAGGED)), replies)
    table, mass = (
        values[kept].astype(np.float64),
        np.array([sizes[k] for k in kept], dtype=np.float64),
    )
    shares = mass / mass.sum()
    if aggregation == "distance" and noisy_clients != "leave_out":
        shares = daagg_by_hand(table, sizes, list(FLAGGED.values()), "paper")
    np.testing.assert_allclose([after.notes[k]["weight"] for k in kept], shares, rtol=1e-9)
    np.testing.assert_allclose(after.model.values.numpy(), shares @ table, rtol=1e-6, atol=1e-7)
    assert {k for k in kept if "lam" in after.notes[k]} == (
        {2, 3, 4} if noisy_clients == "distil" else set()
    )
    assert after.stage == "noise-robust training" and after.round == 4


def test_without_distillation_and_distances_stage_two_is_fedla_bit_for_bit() -> None:
    begin = Lab().start(2, told(FLAGGED))
    theirs = models(Lab().play(FedLA(), begin))
    plain = FedNoRo(warmup=2, noisy_clients="train", aggregation="size")
    ours = models(Lab().play(plain, begin))
    assert len(ours) == 4 and all(map(equal, ours, theirs))
    for pieces in (
        {"noisy_clients": "train"},
        {"aggregation": "size"},
        {"noisy_clients": "leave_out"},
        {},
    ):
        other = models(Lab().play(FedNoRo(warmup=2, ramp_end=3, **pieces), begin))  # type: ignore[arg-type]
        assert not equal(other[-1], theirs[-1]), pieces


def test_clean_clients_alone_are_fedla_on_them_bit_for_bit() -> None:
    begin = Lab().start(2, told(FLAGGED))
    ours = models(Lab().play(FedNoRo(warmup=2, noisy_clients="leave_out"), begin))
    lab = Lab()
    theirs = models(list(play(FedLA(), begin, lab.exchange, [0, 1], lambda _: NOTHING)))
    assert len(ours) == 4 and all(map(equal, ours, theirs))


def test_both_kinds_of_step_occur_in_an_ordinary_run() -> None:
    played = Lab().play(SMALL)
    flagged = verdicts(played[-1].state)
    assert 0 < sum(flagged.values()) < 5 and len(flagged) == 5
    lams = [
        {k for k, note in turn.state.notes.items() if "lam" in note}
        for turn in played
        if turn.task == "train"
    ]
    assert lams == [set(), set(), *[{k for k, noisy in flagged.items() if noisy}] * 4]


@both_behaviours
def test_paper_scores_plain_images_and_the_reference_augmented_ones(behaviour: Any) -> None:
    lab = Lab(Augment(rotate=40, translate=0.2, flip=True))
    task = Task("score", 2, models(lab.play(FedLA()))[-1])
    for k, client in lab.clients.items():
        site = lab.site(client)
        reply = FedNoRo(behaviour=behaviour).work(task, site)
        plain, augmented = (
            site.logits(task, task.weights, augment=flag).double().numpy() for flag in (False, True)
        )
        assert not np.allclose(plain, augmented)
        logits = plain if behaviour == "paper" else augmented
        for c in range(3):
            own = [i for i, label in enumerate(GIVEN[k]) if label == c]
            assert reply.arrays["counts"][c] == len(own)
            if own:
                ce = [math.log(np.exp(logits[i]).sum()) - logits[i, c] for i in own]
                assert reply.arrays["losses"][c] == pytest.approx(np.mean(ce), rel=1e-9)
            else:
                assert math.isnan(reply.arrays["losses"][c])
        assert reply.weights is None and reply.size == len(GIVEN[k])


def test_prior_is_of_the_labels_the_client_was_given() -> None:
    lab = Lab()
    task = Task("train", 3, lab.start().model, {"lam": 0.25})
    aux = SMALL.aux(task, lab.site(lab.clients[3]))
    assert aux["log_pi"].exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert (
        aux["lam"].item() == 0.25
        and aux["lam"].shape == ()
        and aux["lam"].dtype == aux["log_pi"].dtype
    )
    single = SMALL.aux(replace(task, settings={}), lab.site(lab.clients[4]))
    assert single.keys() == {"log_pi"} and single["log_pi"].tolist() == [-math.inf, -math.inf, 0.0]
