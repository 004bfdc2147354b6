"""The round loop: who is asked, what becomes of failures, and what each turn tells."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.core.metrics import balanced_accuracy, confusion, per_class_recall
from fednoro.core.types import (
    Clients,
    Failure,
    FedNoRoWarning,
    Replies,
    Reply,
    State,
    Task,
    UserError,
    Weights,
)
from fednoro.experiment.rounds import Evaluation, Exchange, Turn, draw, play
from fednoro.methods import Method
from fednoro.methods.method import advance

NOTHING = Evaluation(np.eye(2, dtype=np.int64), 0.5)
VALUES = 6


def weights(value: float = 0.0) -> Weights:
    return Weights(torch.full((VALUES,), float(value)), torch.tensor([3]), (VALUES,))


def start(rounds: int = 3, seed: int = 0, round: int = 0) -> State:
    return State(weights(), round, rounds, 2, seed)


def answering(
    send: Callable[[int, Task], Reply | Failure] = lambda k, task: Reply(
        k, k + 1, weights(k), {"loss": 0.25 * k}
    ),
) -> Exchange:
    """An exchange in which client k answers with `send(k, task)`."""

    def exchange(method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        for k in sorted(tasks):
            yield send(k, tasks[k])

    return exchange


def turns(
    exchange: Exchange,
    clients: Sequence[int] = range(4),
    method: Method | None = None,
    **options: Any,
) -> Any:
    state = options.pop("state", start())
    return list(play(method or Method(), state, exchange, clients, lambda _: NOTHING, **options))


# Who is drawn


@settings(deadline=None, max_examples=100)
@given(
    ids=st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True),
    participation=st.floats(0.001, 1),
    seed=st.integers(0, 2**32),
    round=st.integers(0, 1000),
)
def test_drawn_clients_are_a_sorted_share_of_those_present(
    ids: list[int], participation: float, seed: int, round: int
) -> None:
    clients = sorted(ids)
    drawn = draw(clients, participation, start(2000, seed, round))
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(clients)
    assert len(drawn) >= 1
    assert abs(len(drawn) - participation * len(clients)) <= 0.5 or len(drawn) == 1
    assert drawn == draw(clients, participation, start(2000, seed, round))
    assert all(type(k) is int for k in drawn)


def test_full_participation_draws_everyone() -> None:
    assert draw((2, 5, 9), 1.0, start()) == (2, 5, 9)


def test_draw_depends_on_seed_and_round_alone() -> None:
    by_round = {draw(range(20), 0.3, start(50, 0, r)) for r in range(20)}
    by_seed = {draw(range(20), 0.3, start(50, s)) for s in range(20)}
    assert len(by_round) > 15 and len(by_seed) > 15
    elsewhere = replace(start(), model=weights(9.0), rounds=77, stage="other", memo={"a": 1})
    assert draw(range(20), 0.3, start()) == draw(range(20), 0.3, elsewhere)


def test_every_client_is_drawn_sooner_or_later() -> None:
    assert {k for r in range(60) for k in draw(range(20), 0.1, start(60, 0, r))} == set(range(20))


# Failures


def test_simulated_failures_are_not_asked_and_happen_about_as_often_as_told() -> None:
    asked: list[int] = []

    def send(k: int, task: Task) -> Reply:
        asked.append(k)
        return Reply(k, 1, weights(1.0))

    played = turns(answering(send), range(20), failures=0.3, state=start(30))
    statuses = [answer.status for turn in played for answer in turn.answers]
    dropped = statuses.count("dropped")
    assert len(statuses) == 600 and statuses.count("ok") == len(asked) == 600 - dropped
    assert abs(dropped - 180) < 4 * math.sqrt(600 * 0.3 * 0.7)
    patterns = {tuple(a.status for a in turn.answers) for turn in played}
    assert len(patterns) > 20, "who fails changes from round to round"


def test_simulated_failures_are_the_same_for_the_same_seed() -> None:
    def who(seed: int) -> list[list[str]]:
        played = turns(answering(), range(10), failures=0.5, state=start(6, seed))
        return [[answer.status for answer in turn.answers] for turn in played]

    assert who(3) == who(3) != who(4)


def test_round_in_which_everyone_drops_out_keeps_the_model() -> None:
    played = turns(answering(), range(2), failures=0.9, state=start(10))
    previous = start().model.values
    silent = 0
    for turn in played:
        if all(answer.status == "dropped" for answer in turn.answers):
            silent += 1
            assert torch.equal(turn.state.model.values, previous)
            assert any("no client answered" in message for message in turn.warnings)
        previous = turn.state.model.values
    assert 0 < silent < 10 and played[-1].state.round == 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reply_that_is_not_finite_is_left_out(bad: float) -> None:
    def send(k: int, task: Task) -> Reply:
        sent = weights(float(k))
        if k == 2:
            sent.values[-1] = bad
        return Reply(k, 1, sent)

    turn = turns(answering(send), range(4), state=start(1))[0]
    assert [answer.status for answer in turn.answers] == ["ok", "ok", "failed", "ok"]
    assert "not finite" in turn.answers[2].reason
    assert any("client 2" in message for message in turn.warnings)
    assert torch.equal(turn.state.model.values, torch.full((VALUES,), 4 / 3))


def test_infinities_that_cancel_are_still_noticed() -> None:
    def send(k: int, task: Task) -> Reply:
        sent = weights(1.0)
        if k == 0:
            sent.values[:2] = torch.tensor([math.inf, -math.inf])
        return Reply(k, 1, sent)

    assert turns(answering(send), range(2), state=start(1))[0].answers[0].status == "failed"


def test_large_but_finite_weights_are_kept() -> None:
    largest = torch.finfo(torch.float32).max
    turn = turns(
        answering(lambda k, task: Reply(k, 1, weights(largest))), range(3), state=start(1)
    )[0]
    assert {answer.status for answer in turn.answers} == {"ok"}
    assert turn.state.model.values.isfinite().all()


MALFORMED = {
    "a shorter model": (
        Reply(1, 1, Weights(torch.ones(VALUES - 1), torch.tensor([3]))),
        "a model of 5 values",
    ),
    "a model in double precision": (
        Reply(1, 1, Weights(torch.ones(VALUES).double(), torch.tensor([3]))),
        "float64",
    ),
    "a model of several rows": (
        Reply(1, 1, Weights(torch.ones(VALUES, 2), torch.tensor([3]))),
        "a model of 6 values",
    ),
    "other counters": (
        Reply(1, 1, Weights(torch.ones(VALUES), torch.tensor([3, 4]))),
        "other counters",
    ),
    "negative counters": (
        Reply(1, 1, Weights(torch.ones(VALUES), torch.tensor([-1]))),
        "other counters",
    ),
    "no images": (Reply(1, 0, weights(1.0)), "says that it has 0 images"),
    "fewer images than none": (Reply(1, -5, weights(1.0)), "says that it has -5 images"),
    "a stale round": (
        Reply(1, 1, weights(1.0), answers=("train", 7)),
        "train of round 8, asked was train of round 1",
    ),
    "another task": (
        Reply(1, 1, weights(1.0), answers=("score", 0)),
        "score of round 1, asked was train of round 1",
    ),
    "arrays of other classes": (
        Reply(1, 1, weights(1.0), arrays={"means": np.zeros(3)}),
        "means of shape (3,)",
    ),
    "a number for an array": (
        Reply(1, 1, weights(1.0), arrays={"means": np.array(0.0)}),
        "means of shape ()",
    ),
    "wider arrays": (
        Reply(1, 1, weights(1.0), arrays={"means": np.zeros((2, 5))}),
        "expected was (2, 4)",
    ),
    "sums that nobody asked for": (
        Reply(1, 1, weights(1.0), arrays={"products": np.zeros((5, 5))}),
        "products of shape (5, 5)",
    ),
    "a name that nobody has": (Reply(99, 1, weights(1.0)), "without having been asked"),
}


@pytest.mark.parametrize(("sent", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_reply_is_left_out_and_says_why(sent: Reply, reason: str) -> None:
    def send(k: int, task: Task) -> Reply:
        means = (
            np.zeros((2, 4))
            if "means" in sent.arrays and reason.endswith("(2, 4)")
            else np.zeros(2)
        )
        return (
            sent
            if k == 1
            else Reply(k, 1, weights(float(k)), arrays={"means": means}, answers=("train", 0))
        )

    turn = turns(answering(send), range(3), state=start(1))[0]
    (left_out,) = [answer for answer in turn.answers if answer.status == "failed"]
    assert left_out.client == sent.client and reason in left_out.reason
    assert turn.warnings == (f"client {sent.client} is left out: {left_out.reason}",)
    assert torch.equal(turn.state.model.values, torch.ones(VALUES)), "the mean of clients 0 and 2"


def test_second_answer_of_a_client_does_not_count() -> None:
    def exchange(method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        yield Reply(0, 1, weights(1.0))
        yield Reply(0, 1, weights(5.0))

    turn = turns(exchange, [0], state=start(1))[0]
    assert [answer.reason for answer in turn.answers] == ["", "answered twice"]
    assert torch.equal(turn.state.model.values, torch.ones(VALUES))


def test_clients_may_join_between_exchanges() -> None:
    known = [0, 1]

    def send(k: int, task: Task) -> Reply:
        if task.round == 1 and 2 not in known:
            known.append(2)
        return Reply(k, 1, weights(float(k)))

    played = list(play(Method(), start(3), answering(send), lambda: list(known), lambda _: NOTHING))
    assert [[a.client for a in turn.answers] for turn in played] == [[0, 1], [0, 1], [0, 1, 2]]


def test_one_raising_client_is_left_out_with_its_reason() -> None:
    def send(k: int, task: Task) -> Reply | Failure:
        return (
            Failure(k, "OSError: no disk", OSError("no disk"))
            if k == 1
            else Reply(k, 1, weights(float(k)))
        )

    played = turns(answering(send), range(3))
    assert [turn.state.round for turn in played] == [1, 2, 3]
    for turn in played:
        assert [(a.client, a.status, a.reason) for a in turn.answers][1] == (
            1,
            "failed",
            "OSError: no disk",
        )
        assert turn.warnings == ("client 1 is left out: OSError: no disk",)
        assert torch.equal(turn.state.model.values, torch.ones(VALUES))


class BrokenError(Exception):
    """What a defect in a method would raise at every client."""


def broken(k: int, task: Task) -> Failure:
    return Failure(k, "BrokenError: no such layer", BrokenError("no such layer"))


def test_error_at_all_clients_is_raised() -> None:
    with pytest.raises(BrokenError, match="no such layer"):
        turns(answering(broken))


def test_error_at_the_only_client_is_raised() -> None:
    with pytest.raises(BrokenError):
        turns(answering(broken), [7])


def test_users_mistake_that_all_clients_meet_stays_a_users_mistake() -> None:
    with pytest.raises(UserError, match="too small"):
        turns(answering(lambda k, task: Failure(k, "", UserError("the images are too small"))))


@pytest.mark.parametrize(
    "options", [{"failures": 0.4}, {"participation": 0.25}, {"failures": 0.3, "participation": 0.5}]
)
def test_error_at_all_clients_is_raised_though_not_all_are_asked_at_once(
    options: dict[str, float],
) -> None:
    with pytest.raises(BrokenError):
        turns(answering(broken), range(4), state=start(60), **options)


def test_broken_client_that_is_drawn_alone_does_not_end_the_run() -> None:
    def send(k: int, task: Task) -> Reply | Failure:
        return broken(k, task) if k in (1, 2) else Reply(k, 1, weights(1.0))

    played = turns(answering(send), range(4), participation=0.25, state=start(30))
    alone = [turn for turn in played if {a.status for a in turn.answers} == {"failed"}]
    assert played[-1].state.round == 30 and {turn.answers[0].client for turn in alone} == {1, 2}


def test_clients_that_never_answer_without_an_error_do_not_end_the_run() -> None:
    played = turns(answering(lambda k, task: Failure(k, "timed out")))
    assert played[-1].state.round == 3
    assert torch.equal(played[-1].state.model.values, weights().values)


# Streaming


@pytest.mark.parametrize("count", [5, 25])
def test_fedavg_holds_a_few_models_however_many_clients_there_are(count: int) -> None:
    alive: list[int] = []
    sent: list[weakref.ref[torch.Tensor]] = []

    def send(k: int, task: Task) -> Reply:
        alive.append(sum(ref() is not None for ref in sent))
        model = weights(float(k))
        sent.append(weakref.ref(model.values))
        return Reply(k, 1, model)

    turns(answering(send), range(count), state=start(1))
    assert len(alive) == count
    assert max(alive) <= 2, "the first and the one just folded, at most"


def test_replies_are_folded_while_they_are_produced() -> None:
    events: list[str] = []

    @dataclass(frozen=True)
    class Logging(Method):
        """Says when a reply arrives."""

        def fold(self, state: State, replies: Replies) -> State:
            events.extend(f"fold {reply.client}" for reply in replies)
            return advance(state, state.model, {})

    def send(k: int, task: Task) -> Reply:
        events.append(f"work {k}")
        return Reply(k, 1, weights())

    turns(answering(send), range(3), Logging(), state=start(1))
    assert events == ["work 0", "fold 0", "work 1", "fold 1", "work 2", "fold 2"]


def test_fold_that_stops_early_still_lets_every_client_work() -> None:
    @dataclass(frozen=True)
    class FirstOnly(Method):
        """Takes the first reply and looks at no other."""

        def fold(self, state: State, replies: Replies) -> State:
            first = next(iter(replies))
            assert first.weights is not None
            return advance(state, first.weights, {})

    worked: list[int] = []

    def send(k: int, task: Task) -> Reply | Failure:
        worked.append(k)
        return Failure(k, "late") if k == 3 else Reply(k, 1, weights(k + 1.0))

    turn = turns(answering(send), range(4), FirstOnly(), state=start(1))[0]
    assert worked == [0, 1, 2, 3]
    assert [answer.status for answer in turn.answers] == ["ok", "ok", "ok", "failed"]
    assert torch.equal(turn.state.model.values, torch.ones(VALUES))


# What a turn tells


@dataclass(frozen=True)
class AsksTwice(Method):
    """Every round has a question to all who are present before the training of those drawn."""

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        if state.memo.get("asked_in") == state.round:
            return super().plan(state, clients)
        return {k: Task("question", state.round, state.model) for k in clients.present}

    def fold(self, state: State, replies: Replies) -> State:
        if replies.task == "train":
            return super().fold(state, replies)
        warnings.warn(f"{len(list(replies))} replies", FedNoRoWarning, stacklevel=2)
        return replace(state, memo={"asked_in": state.round})


def test_turn_tells_the_task_the_answers_and_whether_a_round_was_completed() -> None:
    played = turns(answering(), range(4), AsksTwice(), participation=0.5, state=start(2))
    assert [(turn.task, turn.state.round, turn.evaluation) for turn in played] == [
        ("question", 0, None),
        ("train", 1, NOTHING),
        ("question", 1, None),
        ("train", 2, NOTHING),
    ]
    assert [a.client for a in played[0].answers] == [0, 1, 2, 3]
    assert tuple(a.client for a in played[1].answers) == draw(range(4), 0.5, start())
    for turn in played:
        assert all(a.status == "ok" and a.size == a.client + 1 for a in turn.answers)
        assert all(a.metrics == {"loss": 0.25 * a.client} for a in turn.answers)
        assert turn.seconds >= 0
    assert played[0].warnings == ("4 replies",) and played[1].warnings == ()


def test_metrics_may_be_tensors_and_are_told_as_floats() -> None:
    exchange = answering(lambda k, task: Reply(k, 1, weights(), {"loss": torch.tensor(1.5)}))
    loss = turns(exchange, [0], state=start(1))[0].answers[0].metrics["loss"]
    assert type(loss) is float and loss == 1.5


def test_answers_come_in_client_order_with_the_dropped_among_them() -> None:
    played = turns(answering(), range(12), failures=0.5, state=start(4))
    for turn in played:
        assert [answer.client for answer in turn.answers] == list(range(12))
    assert {a.status for turn in played for a in turn.answers} == {"ok", "dropped"}


def test_model_is_evaluated_once_per_round_as_it_was_folded() -> None:
    seen: list[float] = []

    def evaluate(model: Weights) -> Evaluation:
        seen.append(float(model.values[0]))
        return NOTHING

    exchange = answering(lambda k, task: Reply(k, 1, weights(task.round + 1.0)))
    played = list(play(AsksTwice(), start(3), exchange, range(2), evaluate))
    assert seen == [1.0, 2.0, 3.0] and len(played) == 6


def test_play_goes_on_from_a_later_round_and_does_nothing_after_the_last() -> None:
    assert [turn.state.round for turn in turns(answering(), state=start(5, round=3))] == [4, 5]
    assert turns(answering(), state=start(5, round=5)) == []


def test_turns_are_played_one_at_a_time() -> None:
    asked: list[int] = []

    def send(k: int, task: Task) -> Reply:
        asked.append(task.round)
        return Reply(k, 1, weights())

    played = play(Method(), start(3), answering(send), [0], lambda _: NOTHING)
    assert asked == []
    assert isinstance(next(played), Turn) and asked == [0]


def test_method_that_asks_nobody_is_an_error_that_names_it() -> None:
    @dataclass(frozen=True)
    class Mute(Method):
        """Asks nobody."""

        def plan(self, state: State, clients: Clients) -> dict[int, Task]:
            return {}

    with pytest.raises(RuntimeError, match=r"Mute\.plan asked nobody in round 1"):
        turns(answering(), method=Mute())


def test_other_warnings_are_passed_on_rather_than_swallowed() -> None:
    def send(k: int, task: Task) -> Reply:
        warnings.warn("from the network's own code", RuntimeWarning, stacklevel=1)
        return Reply(k, 1, weights())

    with pytest.warns(RuntimeWarning, match="the network's own code"):
        turn = turns(answering(send), [0], state=start(1))[0]
    assert turn.warnings == ()


# Evaluation


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40),
)
def test_bacc_is_balanced_accuracy_of_the_same_predictions(labels: list[tuple[int, int]]) -> None:
    true, predicted = (np.array(column) for column in zip(*labels, strict=True))
    evaluation = Evaluation(confusion(true, predicted, 5), 0.0)
    assert evaluation.bacc == balanced_accuracy(true, predicted, 5)
    by_hand = [np.mean(predicted[true == c] == c) for c in range(5) if (true == c).any()]
    assert evaluation.bacc == pytest.approx(np.mean(by_hand), abs=1e-12)
    np.testing.assert_array_equal(evaluation.recall, per_class_recall(evaluation.confusion))
