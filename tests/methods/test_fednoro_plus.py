"""FedNoRo+: who is asked what in which stage, what happens to labels, and what a
wrong or missing verdict does.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, federation, network, same, start
from rich.console import Console

import fednoro
from fednoro.core.training import FURTHER, Augment, Training
from fednoro.core.types import Clients, Failure, Reply, State, Task, UserError, Weights
from fednoro.detection.calibrated import WIDTHS
from fednoro.detection.explained import EVIDENCE
from fednoro.detection.score_privacy import Protection, protect
from fednoro.detection.verdicts import SCORING_MODEL, verdicts
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.checkpoint import restore, save_checkpoint
from fednoro.experiment.rounds import Evaluation, Turn, play
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.experiment.watch.terminal import Terminal
from fednoro.methods import FedLA, FedNoRo, FedNoRoPlus, Method
from fednoro.methods.fednoro_plus import CORRECTED, SOFT, TEACHER

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDS, CLIENTS, IMAGES = 9, 5, 24
METHOD = FedNoRoPlus(warmup=5, watch=3, purge=2)
NOTHING = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)


class Lab(EagerEngine):
    """Clients with plain images; those who are `noisy` were given their labels in random order."""

    def __init__(self, noisy: Sequence[int] = ()) -> None:
        rng = np.random.default_rng(1)
        data, clients = federation(
            [rng.permutation(np.arange(IMAGES) % CLASSES).tolist() for _ in range(CLIENTS)]
        )
        self.truth = {client.id: client.observed.copy() for client in clients}
        for client in clients:
            if client.id in noisy:
                client.observed = rng.permutation(client.observed)
        training = Training(rounds=ROUNDS, epochs=3, batch=12, lr=0.02)
        super().__init__(network, data, 1, training, 0, torch.device("cpu"), clients)
        # task, round, who, with soft labels
        self.asked: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = []
        self.away: Any = lambda k, task: False

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        soft = tuple(k for k, task in tasks.items() if SOFT in task.settings)
        first = next(iter(tasks.values()))
        self.asked.append((first.name, first.round, tuple(tasks), soft))
        there = {k: task for k, task in tasks.items() if not self.away(k, task)}
        return super().exchange(method, there)

    def play(
        self, method: Method = METHOD, begin: State | None = None, **options: Any
    ) -> list[Turn]:
        begin = begin or start(ROUNDS)
        return list(
            play(method, begin, self.exchange, sorted(self.clients), lambda _: NOTHING, **options)
        )

    def right(self, k: int) -> float:
        """The share of a client's soft labels that are true."""
        return float((self.clients[k].memory[SOFT].argmax(dim=1).numpy() == self.truth[k]).mean())


@functools.cache
def usual(noisy: tuple[int, ...] = (3, 4), method: Method = METHOD) -> tuple[Lab, list[Turn]]:
    """An undisturbed run, for those who only look."""
    lab = Lab(noisy)
    return lab, lab.play(method)


def models(played: Sequence[Turn]) -> list[Weights]:
    return [turn.state.model for turn in played if turn.task == "train"]


def told(shares: Mapping[int, float], trust: float = 0.42) -> dict[str, Any]:
    """A memo that says what each client explains, as detection writes it."""
    rows = {
        str(k): {"noisy": e < 0.42, "posterior": float(e < 0.42), "explained": e}
        for k, e in shares.items()
    }
    return {
        "asked_in": 5,
        "detector": {"trust": trust},
        "detection": {"reason": "told", "cut": 0.42, "clients": rows},
    }


def at(round: int, memo: Mapping[str, Any]) -> State:
    return replace(start(ROUNDS), round=round, memo=memo)


EVERYONE = Clients(tuple(range(CLIENTS)), tuple(range(CLIENTS)))
TWO_NOISY = {0: 0.8, 1: 0.7, 2: 0.9, 3: 0.1, 4: 0.0}


# The stages


def test_some_noisy_are_left_out_corrected_once_and_taken_back() -> None:
    lab, played = usual()
    everyone, clean, noisy = (0, 1, 2, 3, 4), (0, 1, 2), (3, 4)
    assert verdicts(played[-1].state) == {0: False, 1: False, 2: False, 3: True, 4: True}
    assert lab.asked == [
        *[("train", t, everyone, ()) for t in range(5)],
        ("moments", 5, everyone, ()),
        ("score", 5, everyone, ()),
        ("train", 5, clean, ()),
        ("train", 6, clean, ()),
        ("correct", 7, noisy, ()),
        ("train", 7, everyone, noisy),
        ("train", 8, everyone, noisy),
    ]
    assert [turn.state.stage for turn in played] == [
        *["warm-up"] * 5,
        *["detection"] * 2,
        *["purge"] * 2,
        "correction",
        *["training on corrected labels"] * 2,
    ]
    assert not any(turn.warnings for turn in played)


def test_correction_brings_most_labels_back_and_says_how_many() -> None:
    lab, played = usual()
    correction = next(turn for turn in played if turn.task == "correct")
    for answer in correction.answers:
        client = lab.clients[answer.client]
        before = float((client.observed == lab.truth[answer.client]).mean())
        assert lab.right(answer.client) > 0.9 > 0.5 > before
        moved = client.memory[SOFT].argmax(dim=1).numpy() != client.observed
        assert answer.metrics["relabelled"] == moved.sum() > 0
    assert SOFT not in lab.clients[0].memory
    assert torch.equal(lab.clients[3].labels, torch.from_numpy(lab.clients[3].observed)), (
        "what was observed stays"
    )


# Choices taken back


def test_clients_that_are_known_to_be_noisy_are_not_looked_for() -> None:
    lab = Lab(noisy=(3, 4))
    played = lab.play(replace(METHOD, noisy=(2, 4, 77)))
    (said,) = [message for turn in played for message in turn.warnings]
    assert said == "method.noisy names clients that are not there: 77 (counted from 0)"
    asked = [entry[:3] for entry in lab.asked if entry[0] != "train" or entry[1] >= 5]
    everyone = tuple(range(CLIENTS))
    purge = [("train", t, (0, 1, 3)) for t in (5, 6)]
    assert asked == [*purge, ("correct", 7, (2, 4)), ("train", 7, everyone), ("train", 8, everyone)]
    assert "detection" not in played[-1].state.memo and not any(
        EVIDENCE in c.memory for c in lab.clients.values()
    )
    assert [turn.state.stage for turn in played[-3:]] == [
        "correction",
        *["training on corrected labels"] * 2,
    ]


def test_nobody_known_to_be_noisy_is_fedla_to_the_bit() -> None:
    ours = Lab((3, 4)).play(replace(METHOD, noisy=()))
    assert all(map(same, models(ours), models(usual((3, 4), FedLA())[1])))


def test_labels_are_corrected_anew_as_often_as_asked_with_the_teacher_of_then() -> None:
    lab = Lab(noisy=(3, 4))
    teachers: list[Weights] = []

    def exchange(method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        if (task := next(iter(tasks.values()))).name == "correct":
            teachers.append(task.weights)
        return lab.exchange(method, tasks)

    method = replace(METHOD, correct_every=2, purge=1)
    turns = list(play(method, start(ROUNDS), exchange, range(CLIENTS), lambda _: NOTHING))
    assert [t for name, t, *_ in lab.asked if name == "correct"] == [6, 8]
    assert turns[-1].state.memo[CORRECTED] == {"3": 8, "4": 8}
    assert not same(*teachers) and not same(teachers[1], turns[-1].state.model)


def test_hard_targets_are_the_most_probable_labels() -> None:
    soft, hard = usual()[0], Lab((3, 4))
    hard.play(replace(METHOD, targets="hard"))
    for k in (3, 4):
        q = hard.clients[k].memory[SOFT]
        assert torch.equal(
            q,
            torch.nn.functional.one_hot(
                soft.clients[k].memory[SOFT].argmax(dim=1), CLASSES
            ).float(),
        )


def test_distillation_takes_the_place_of_correction_on_noisy_clients() -> None:
    lab = Lab((3, 4))
    method = replace(METHOD, targets="distil")
    played = lab.play(method)
    assert (
        not [name for name, *_ in lab.asked if name == "correct"]
        and SOFT not in lab.clients[3].memory
    )
    assert played[-1].state.stage == "distillation"
    last = next(turn.state for turn in reversed(played[:-1]) if turn.task == "train")
    tasks = method.plan(last, EVERYONE)
    assert {k for k, task in tasks.items() if task.settings} == {3, 4}
    site = lab.site(lab.clients[3])
    other = FedNoRo(adjust="both")
    expected = other.work(replace(tasks[3], settings={"lam": 0.8}), site).weights
    found = method.work(tasks[3], site).weights
    assert expected is not None and found is not None and same(found, expected)


@pytest.mark.parametrize("targets", ["soft", "distil"])
def test_images_are_moved_further_in_the_end_alone_and_at_every_client(targets: Any) -> None:
    moved = moves(Lab((3, 4)), replace(METHOD, further=6, targets=targets))
    assert {(name, number) for name, number, said in moved if any(said.values())} == {
        ("train", 7),
        ("train", 8),
    }
    assert all(
        said == dict.fromkeys(range(CLIENTS), 6)
        for name, number, said in moved
        if name == "train" and number > 6
    )
    assert ("correct" in {name for name, *_ in moved}) == (targets == "soft"), (
        "the teacher sees them as they were"
    )


@pytest.mark.parametrize("noisy", [(), range(CLIENTS)], ids=["nobody flagged", "everybody flagged"])
def test_images_are_moved_no_further_where_nobody_is_told_apart(noisy: Sequence[int]) -> None:
    assert not any(any(said.values()) for *_, said in moves(Lab(noisy), replace(METHOD, further=6)))


def moves(lab: Lab, method: Method) -> list[tuple[str, int, dict[int, Any]]]:
    """Task and round of each exchange of a run, and how much further
    who was told to move images.
    """
    found, exchange = list[tuple[str, int, dict[int, Any]]](), lab.exchange

    def noted(method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        first = next(iter(tasks.values()))
        found.append(
            (first.name, first.round, {k: task.settings.get(FURTHER) for k, task in tasks.items()})
        )
        return exchange(method, tasks)

    lab.exchange = noted  # type: ignore[method-assign]
    lab.play(method)
    return found


def test_models_are_weighed_by_size_where_distance_shall_not_count() -> None:
    lab = Lab((3, 4))
    lab.clients[0].index, lab.clients[0].observed = (
        lab.clients[0].index[:12],
        lab.clients[0].observed[:12],
    )
    notes = lab.play(replace(METHOD, aggregation="size"))[-1].state.notes
    sizes = {k: len(client.index) for k, client in lab.clients.items()}
    assert len(set(sizes.values())) == 2
    assert notes == {
        k: {"weight": pytest.approx(n / sum(sizes.values()))} for k, n in sizes.items()
    }


# Nobody and everybody


def test_nobody_flagged_is_fedla_to_the_bit_over_a_whole_run() -> None:
    (lab, ours), (_, theirs) = usual(()), usual((), FedLA())
    assert not any(verdicts(ours[-1].state).values()) and len(verdicts(ours[-1].state)) == CLIENTS
    assert len(models(ours)) == ROUNDS and all(map(same, models(ours), models(theirs)))
    assert {name for name, *_ in lab.asked} == {"train", "moments", "score"}
    assert {turn.state.stage for turn in ours} == {"warm-up", "detection", "training"}
    assert not same(models(usual()[1])[-1], models(usual((3, 4), FedLA())[1])[-1]), (
        "a flag must make a difference"
    )


def test_nobody_flagged_is_fedla_to_the_bit_when_half_are_drawn() -> None:
    method = FedNoRoPlus(warmup=7, watch=5)
    ours, theirs = (Lab().play(each, participation=0.6) for each in (method, FedLA()))
    assert not any(verdicts(ours[-1].state).values())
    assert all(map(same, models(ours), models(theirs)))


def test_everybody_flagged_is_told_and_is_fedla_to_the_bit() -> None:
    played = Lab(noisy=range(CLIENTS)).play()
    assert all(verdicts(played[-1].state).values())
    assert [m for turn in played for m in turn.warnings] == [
        "every client looks noisy and there is none to learn from: going on as FedLA"
    ]
    assert {turn.state.stage for turn in played} == {"warm-up", "detection", "training"}
    theirs = Lab(noisy=range(CLIENTS)).play(FedLA())
    assert all(map(same, models(played), models(theirs)))


@pytest.mark.parametrize(
    "wrong", [{0: 0.1}, {3: 0.9}], ids=["a clean client is flagged", "a noisy one is missed"]
)
def test_a_wrong_verdict_on_one_client_breaks_nothing(wrong: dict[int, float]) -> None:
    lab, warm = Lab(noisy=(3, 4)), next(turn.state for turn in usual()[1] if turn.state.round == 5)
    played = lab.play(begin=replace(warm, memo=told({**TWO_NOISY, **wrong})))
    assert played[-1].state.round == ROUNDS and not any(turn.warnings for turn in played)
    corrected = [k for k in lab.clients if SOFT in lab.clients[k].memory]
    assert corrected == [0, 3, 4] if 0 in wrong else [4]
    assert all(lab.right(k) > 0.8 for k in corrected), (
        "right labels mostly stay, wrong ones mostly do not"
    )
    index = np.concatenate([client.index for client in lab.clients.values()])
    predicted = lab.logits(played[-1].state.model, index).argmax(dim=1).numpy()
    assert (predicted == np.concatenate(list(lab.truth.values()))).mean() > 0.85


# Who is there


def test_purge_draws_as_many_as_a_round_would_among_the_clean() -> None:
    memo = told(TWO_NOISY)
    rounds = [METHOD.plan(at(t, memo), Clients((0, 1, 2, 3, 4), (3, 4))) for t in (5, 6)]
    assert all(len(tasks) == 2 and set(tasks) <= {0, 1, 2} for tasks in rounds)
    other = [
        tuple(METHOD.plan(replace(at(5, memo), seed=s), Clients(tuple(range(5)), (3, 4))))
        for s in range(8)
    ]
    assert len(set(other)) > 1


def test_purge_without_a_clean_client_goes_on_and_says_so() -> None:
    lab = Lab(noisy=(3, 4))
    state = at(5, told(TWO_NOISY))
    assert set(METHOD.plan(state, Clients((3, 4), (3, 4)))) == {3, 4}
    played = list(play(METHOD, state, lab.exchange, (3, 4), lambda _: NOTHING))
    assert played[-1].state.round == ROUNDS
    assert all(
        "no clean client" in " ".join(turn.warnings) for turn in played if turn.task == "train"
    )


def test_a_purge_that_lasts_to_the_end_never_brings_the_noisy_back() -> None:
    lab = Lab(noisy=(3, 4))
    lab.play(replace(METHOD, purge=50))
    assert all(who == (0, 1, 2) for name, t, who, _ in lab.asked if t >= 5 and name == "train")
    assert all(name != "correct" for name, *_ in lab.asked)


def test_without_a_purge_the_warm_up_model_teaches() -> None:
    lab = Lab(noisy=(3, 4))
    played = lab.play(replace(METHOD, purge=0))
    assert [name for name, *_ in lab.asked][5:9] == ["moments", "score", "correct", "train"]
    assert TEACHER not in played[-1].state.models and SOFT in lab.clients[3].memory


@pytest.mark.parametrize(
    ("rounds", "purge", "ends"), [(95, None, 45), (12, None, 8), (6, None, 6), (40, 7, 12)]
)
def test_purge_takes_four_ninths_of_what_follows_unless_it_is_set(
    rounds: int, purge: int | None, ends: int
) -> None:
    assert FedNoRoPlus(warmup=5, purge=purge).purge_end(rounds, verdict_round=5) == ends


def test_a_run_whose_labels_are_corrected_is_not_purged_again() -> None:
    """As where it was begun with a shorter purge, by an earlier version."""
    memo = {**told(TWO_NOISY), CORRECTED: {"3": 6, "4": 6}, "corrected_in": 6}
    tasks = METHOD.plan(at(6, memo), EVERYONE)
    assert set(tasks) == {0, 1, 2, 3, 4} and {
        k for k, task in tasks.items() if SOFT in task.settings
    } == {3, 4}
    assert set(METHOD.plan(at(6, told(TWO_NOISY)), EVERYONE)) == {0, 1, 2}


# Judged again

EARLY = FedNoRoPlus(warmup=1, watch=1, revise=2, purge=2)


@pytest.fixture
def unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if clients were not that far apart: these here are told from each
    other after one round otherwise.
    """
    monkeypatch.setattr("fednoro.detection.leave_one_out_heads.HALF_LIKELIER", math.inf)


@pytest.mark.usefixtures("unsure")
def test_where_everybody_was_judged_too_early_a_later_verdict_counts() -> None:
    lab = Lab(noisy=(3, 4))
    played = lab.play(EARLY, start(16))
    everyone = (0, 1, 2, 3, 4)
    scores = [
        (turn.state.round, turn.state.memo["detection"]) for turn in played if turn.task == "score"
    ]
    assert [number for number, _ in scores] == [1, 3, 5][: len(scores)] and len(scores) > 1
    assert "everybody flagged" in scores[0][1]["reason"] and not scores[0][1]["parted"]
    judged, found = scores[-1]
    assert found["parted"] and verdicts(played[-1].state) == RIGHT
    assert found["round"] == judged and all(
        row["round"] == judged for row in found["clients"].values()
    )
    trained = [(t, who) for name, t, who, _ in lab.asked if name == "train"]
    assert trained[:judged] == [(t, everyone) for t in range(judged)]
    assert trained[judged : judged + 3] == [
        (judged, (0, 1, 2)),
        (judged + 1, (0, 1, 2)),
        (judged + 2, everyone),
    ]
    assert [(t, who) for name, t, who, _ in lab.asked if name == "correct"] == [
        (judged + 2, (3, 4))
    ]
    said = [message for turn in played for message in turn.warnings]
    assert said == [
        "every client looks noisy and there is none to learn from: going on as FedLA, judged "
        "again every 2 rounds up to round 8"
    ]
    before = next(turn.state for turn in played if turn.state.round == judged)
    assert same(before.model, played[-1].state.models[SCORING_MODEL]), (
        "who comes later is scored with the model of the verdict"
    )


@pytest.mark.usefixtures("unsure")
@pytest.mark.parametrize(
    ("method", "rounds"), [(replace(EARLY, revise=0), 8), (replace(EARLY, revise=4), 9)]
)
def test_a_verdict_stays_where_it_is_not_to_be_revised_or_half_of_the_run_is_over(
    method: Method, rounds: int
) -> None:
    lab = Lab(noisy=(3, 4))
    played = lab.play(method, start(rounds))
    assert [t for name, t, *_ in lab.asked if name == "score"] == [1]
    assert all(map(same, models(played), models(Lab(noisy=(3, 4)).play(FedLA(), start(rounds)))))
    (said,) = [message for turn in played for message in turn.warnings]
    assert "judged again" not in said


def test_groups_that_are_far_apart_are_told_apart_before_anybody_explains_much() -> None:
    played = Lab(noisy=(3, 4)).play(EARLY, start(16))
    first = next(turn.state for turn in played if turn.task == "score")
    rows = first.memo["detection"]["clients"]
    assert first.round == 1 and verdicts(first) == RIGHT
    assert max(row["explained"] for row in rows.values()) < 0.28, "otherwise this shows nothing"


RIGHT = {k: k in (3, 4) for k in range(CLIENTS)}


def revised(away: Any, rounds: int = 16, noisy: Sequence[int] = (3, 4)) -> tuple[Lab, list[Turn]]:
    lab = Lab(noisy)
    lab.away = away
    return lab, lab.play(EARLY, start(rounds))


def scored(lab: Lab) -> list[tuple[int, tuple[int, ...]]]:
    return [(t, who) for name, t, who, _ in lab.asked if name == "score"]


@pytest.mark.usefixtures("unsure")
def test_a_revision_that_nobody_answers_is_tried_in_the_next_round() -> None:
    lab, played = revised(lambda k, task: task.name == "score" and task.round == 3)
    assert [t for t, _ in scored(lab)][:3] == [1, 3, 4]
    assert [
        "no client could be scored" in " ".join(turn.warnings)
        for turn in played
        if turn.task == "score"
    ][1]
    assert verdicts(played[-1].state) == RIGHT


@pytest.mark.usefixtures("unsure")
def test_a_revision_that_nobody_answers_is_given_up_after_half_of_the_run() -> None:
    lab, played = revised(lambda k, task: task.name == "score" and task.round > 1)
    assert [t for t, _ in scored(lab)] == [1, *range(3, 9)]
    assert all(verdicts(played[-1].state).values())
    assert all(map(same, models(played), models(Lab(noisy=(3, 4)).play(FedLA(), start(16)))))


@pytest.mark.usefixtures("unsure")
def test_who_misses_a_revision_is_judged_by_it_later_not_by_what_it_said_before() -> None:
    lab, played = revised(lambda k, task: k == 0 and task.name == "score" and task.round == 3)
    first = next(turn for turn in played if turn.task == "score" and turn.state.round == 3).state
    assert first.memo["detection"]["parted"] and 0 not in verdicts(first)
    assert (3, (1, 2)) in [(t, who) for name, t, who, _ in lab.asked if name == "train"], (
        "not trusted meanwhile"
    )
    assert scored(lab)[-1] == (4, (0,)) and verdicts(played[-1].state) == RIGHT


def test_a_client_that_never_answers_does_not_keep_the_others_from_being_judged_again() -> None:
    lab, played = revised(lambda k, task: k == 0 and task.name == "score")
    assert (3, (0, 1, 2, 3, 4)) in scored(lab)
    assert verdicts(played[-1].state) == {k: noisy for k, noisy in RIGHT.items() if k}


@pytest.mark.usefixtures("unsure")
def test_a_client_that_comes_late_does_not_put_a_revision_off() -> None:
    lab, played = revised(
        lambda k, task: k == 0 and task.name == "score" and task.round == 1, rounds=10
    )
    assert [t for t, _ in scored(lab)][:3] == [1, 2, 3] and verdicts(played[-1].state) == RIGHT


def test_a_late_verdict_that_changes_nothing_does_not_begin_the_purge_anew() -> None:
    """Nobody is noisy, two cannot be scored for long: they are purged and come back, and stay."""
    lab = Lab()
    lab.away = lambda k, task: (
        k in (3, 4) and task.name == "score" and task.round < (9 if k == 3 else 99)
    )
    lab.play(begin=start(13))
    trained = {t: who for name, t, who, _ in lab.asked if name == "train"}
    assert [t for t, who in trained.items() if who != (0, 1, 2, 3, 4)] == [5, 6]


def test_noisy_clients_alone_stay_flagged_whoever_misses_a_revision() -> None:
    _, played = revised(
        lambda k, task: k in (0, 1) and task.name == "score" and task.round == 3,
        noisy=range(CLIENTS),
    )
    assert not any(
        turn.state.memo["detection"]["parted"] for turn in played if turn.task == "score"
    )


# A second look

LONG = replace(METHOD, purge=4)  # the second verdict is due after two of these rounds


def long(
    noisy: Sequence[int] = (3, 4),
    method: Method = LONG,
    away: Any = None,
    begin: State | None = None,
) -> Any:
    lab = Lab(noisy)
    if away is not None:
        lab.away = away
    return lab, lab.play(method, begin or start(12))


def second(state: State) -> dict[str, Any]:
    return {"round": state.memo["again"]["round"], "changed": state.memo["again"]["changed"]}


@pytest.mark.parametrize("detector", ["calibrated", "sketched"])
def test_in_the_middle_of_the_purge_everybody_is_judged_again(
    detector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednoro.detection.calibrated.SKETCH", 3)  # of 4 features
    monkeypatch.setitem(WIDTHS, "sketched", 3)
    method = replace(LONG, detector=detector)
    lab, played = long(method=method)
    clean, everyone = (0, 1, 2), (0, 1, 2, 3, 4)
    assert [(name, t, who) for name, t, who, _ in lab.asked if t >= 5][:9] == [
        ("moments", 5, everyone), ("score", 5, everyone), ("train", 5, clean), ("train", 6, clean),
        ("moments", 7, everyone), ("score", 7, everyone), ("train", 7, clean), ("train", 8, clean),
        ("correct", 9, (3, 4)),
    ]  # fmt: skip
    first, again = [turn.state.memo["detection"] for turn in played if turn.task == "score"]
    last = played[-1].state
    assert verdicts(last) == RIGHT and second(last) == {"round": 7, "changed": False}
    assert again["reason"].endswith("(judged again)") and again["round"] == first["round"] == 5
    assert {row["round"] for row in again["clients"].values()} == {7} and again["summed_in"] == 7
    assert "first_moments" not in last.memo and "first_moments" not in last.models
    assert (len(last.models["moments"].values) == 4 * 4 + 4 * CLASSES) == (detector == "sketched")
    alone = long(method=replace(method, second_look=False))[1]
    assert [turn.task for turn in alone].count("score") == 1
    assert all(map(same, models(played), models(alone))), "a verdict that stays changes nothing"
    assert same(last.models[TEACHER], alone[-1].state.models[TEACHER])


@pytest.mark.parametrize(
    "method",
    [replace(LONG, purge=3), replace(LONG, detector="shares"), replace(LONG, noisy=(3, 4))],
)
def test_there_is_no_second_look_in_a_short_purge_by_shares_or_where_noisy_clients_are_named(
    method: Method,
) -> None:
    lab, played = long(method=method)
    assert len(scored(lab)) <= 1 and "again" not in played[-1].state.memo


def mistaken(mistakes: Sequence[int]) -> tuple[State, State]:
    """After the first verdict: as it was, and with some verdicts turned round."""
    right = next(turn.state for turn in long()[1] if turn.task == "score")
    found = right.memo["detection"]
    rows = {
        k: {**row, "noisy": row["noisy"] != (int(k) in mistakes)}
        for k, row in found["clients"].items()
    }
    return right, replace(right, memo={**right.memo, "detection": {**found, "clients": rows}})


@pytest.mark.parametrize("mistakes", [(3,), (0,)], ids=["one missed", "one too many"])
def test_a_second_verdict_takes_the_place_of_a_mistaken_one(mistakes: Sequence[int]) -> None:
    lab, played = long(begin=mistaken(mistakes)[1])
    trained = {t: who for name, t, who, _ in lab.asked if name == "train"}
    assert set(trained[5]) == {0, 1, 2} ^ set(mistakes) and trained[7] == trained[8] == (0, 1, 2)
    last = played[-1].state
    assert verdicts(last) == RIGHT and second(last) == {"round": 7, "changed": True}
    assert [who for name, _, who, _ in lab.asked if name == "correct"] == [(3, 4)]
    # What was learnt with the mistake is not taught.
    after = {turn.state.round: turn.state for turn in played if turn.task == "train"}
    mean = (after[8].model.values.double() + after[9].model.values.double()) / 2
    torch.testing.assert_close(after[9].models[TEACHER].values.double(), mean, rtol=0, atol=1e-6)


def same_sums(one: State, other: State) -> bool:
    return torch.equal(one.models["moments"].values, other.models["moments"].values)


def test_the_first_verdict_stays_with_its_totals_where_most_miss_the_second_look() -> None:
    _, played = long(away=lambda k, task: k > 1 and task.name == "score" and task.round == 7)
    first, last = next(turn.state for turn in played if turn.task == "score"), played[-1].state
    assert last.memo["detection"] == first.memo["detection"] and second(last) == {
        "round": 7,
        "changed": False,
    }
    assert same_sums(first, last) and last.memo["moments"] == first.memo["moments"]
    assert same(first.models[SCORING_MODEL], last.models[SCORING_MODEL]), (
        "who comes later is scored as the others were"
    )


# the second verdict is due after three of these rounds, or a round later
LONGER = replace(METHOD, purge=6)


@pytest.mark.parametrize("task", ["moments", "score"])
def test_a_second_look_that_nobody_answers_is_tried_in_the_next_round(task: str) -> None:
    lab, played = long(method=LONGER, away=lambda k, asked: asked.name == task and asked.round == 8)
    assert [t for name, t, *_ in lab.asked if name == task] == [5, 8, 9]
    between = next(turn.state for turn in played if turn.task == "train" and turn.state.round == 9)
    first = next(turn.state for turn in played if turn.task == "score")
    assert same_sums(first, between) and between.memo["moments"] == first.memo["moments"]
    assert "first_moments" not in between.models and "again" not in between.memo
    assert second(played[-1].state) == {"round": 9, "changed": False}


def test_a_second_look_that_nobody_ever_answers_is_given_up() -> None:
    lab, played = long(method=LONGER, away=lambda k, task: task.name == "score" and task.round > 5)
    assert [t for t, _ in scored(lab)] == [5, 8, 9]
    assert verdicts(played[-1].state) == RIGHT and "again" not in played[-1].state.memo


def test_too_few_sums_leave_the_verdict_and_are_not_asked_for_over_and_over() -> None:
    lab, played = long(
        method=replace(METHOD, purge=12),
        away=lambda k, task: k > 2 and task.round > 5,
        begin=start(20),
    )
    assert [t for name, t, *_ in lab.asked if name == "moments"] == [5, 11, 12]
    said = {message for turn in played for message in turn.warnings if "sums" in message}
    assert said == {
        "only 3 clients sent sums that heads could be learnt from: the verdict stays as it is"
    }
    first, last = next(turn.state for turn in played if turn.task == "score"), played[-1].state
    assert last.memo["detection"] == first.memo["detection"] and same_sums(first, last)


def test_among_few_nobody_is_judged_again_until_there_are_more() -> None:
    lab, first = Lab(noisy=(3, 4)), mistaken((0,))[1]

    def there() -> list[int]:
        return (
            [0, 1, 2, 3]
            if lab.asked[-1][1] == 7 and lab.asked[-1][0] == "train"
            else [0, 1, 2, 3, 4]
        )

    lab.asked.append(("begin", 0, (), ()))
    played = list(play(LONGER, first, lab.exchange, there, lambda _: NOTHING))
    assert [(name, t) for name, t, *_ in lab.asked if t in (8, 9)][:4] == [
        ("train", 8), ("moments", 9), ("score", 9), ("train", 9)
    ]  # fmt: skip
    assert verdicts(played[-1].state) == RIGHT and second(played[-1].state) == {
        "round": 9,
        "changed": True,
    }


def test_who_joins_at_the_second_look_is_judged_by_it_a_round_later() -> None:
    """A verdict about somebody new is no other verdict about those who were there."""
    lab = Lab(noisy=(3, 4))
    lab.clients[5] = replace(lab.clients[0], id=5, memory={})

    def there() -> list[int]:
        return [0, 1, 2, 3, 4] if not lab.asked or lab.asked[-1][1] < 6 else [0, 1, 2, 3, 4, 5]

    played = list(play(LONG, start(12), lab.exchange, there, lambda _: NOTHING))
    assert scored(lab) == [(5, (0, 1, 2, 3, 4)), (7, (0, 1, 2, 3, 4)), (8, (5,))]
    last = played[-1].state
    assert verdicts(last) == {**RIGHT, 5: False} and second(last) == {"round": 7, "changed": False}
    assert (
        last.memo["detection"]["summed_in"] == 7
        and last.memo["detection"]["clients"]["5"]["round"] == 8
    )


def test_a_second_look_asks_everybody_though_half_are_drawn() -> None:
    lab = Lab(noisy=(3, 4))
    played = lab.play(LONG, mistaken((3,))[1], participation=0.6)
    assert scored(lab)[0] == (7, (0, 1, 2, 3, 4)) and verdicts(played[-1].state) == RIGHT
    assert all(
        set(who) <= {0, 1, 2} for name, t, who, _ in lab.asked if name == "train" and t in (7, 8)
    )


@pytest.mark.parametrize(
    ("purge", "rounds", "when"),
    [
        (3, 40, []),
        (4, 40, [7]),
        (5, 40, [7, 8]),
        (6, 40, [8, 9]),
        (20, 40, [15, 16]),
        (50, 16, [10, 11]),
        (None, 14, [7]),
    ],
)
def test_the_second_look_has_two_rounds_of_the_purge_before_and_after(
    purge: int | None, rounds: int, when: list[int]
) -> None:
    assert list(replace(METHOD, purge=purge).second_look_rounds(rounds, 5)) == when
    assert not replace(METHOD, purge=purge, second_look=False).second_look_rounds(rounds, 5)


# Clients that are not there


def test_a_client_that_misses_the_scoring_is_judged_later_by_the_same_cut() -> None:
    lab = Lab(noisy=(3, 4))
    lab.away = lambda k, task: (
        k in (2, 4) and (task.round < 5 or (task.name == "score" and task.round == 5))
    )
    played = lab.play()
    first, second = [turn.state.memo for turn in played if turn.task == "score"]
    assert [who for name, _, who, _ in lab.asked if name == "score"] == [(0, 1, 2, 3, 4), (2, 4)]
    assert first["detection"]["clients"].keys() == {"0", "1", "3"}
    assert [who for name, t, who, _ in lab.asked if name == "train" and t == 5] == [(0, 1)], (
        "not trusted meanwhile"
    )
    assert second["detection"]["cut"] == first["detection"]["cut"]
    assert {k: row["noisy"] for k, row in second["detection"]["clients"].items()} == {
        "0": False, "1": False, "2": False, "3": True, "4": True
    }  # fmt: skip
    assert second["detection"]["clients"]["2"]["round"] == 6


def test_a_client_that_misses_the_correction_corrects_itself_and_is_asked_again() -> None:
    lab = Lab(noisy=(3, 4))
    lab.away = lambda k, task: k == 4 and task.name == "correct" and task.round == 7
    played = lab.play()
    assert [(t, who) for name, t, who, _ in lab.asked if name == "correct"] == [
        (7, (3, 4)),
        (8, (4,)),
    ]
    assert [soft for name, t, _, soft in lab.asked if name == "train" and t >= 7] == [(3, 4)] * 2
    assert played[-1].state.memo[CORRECTED] == {"3": 7, "4": 8} and lab.right(4) > 0.8


def test_nobody_can_ever_be_judged_is_fedla() -> None:
    lab = Lab(noisy=(3, 4))
    lab.away = lambda k, task: task.name == "score"
    played = lab.play()
    assert verdicts(played[-1].state) == {}
    assert all(map(same, models(played), models(usual((3, 4), FedLA())[1])))
    said = [turn.warnings for turn in played if turn.task == "score"]
    assert len(said) == ROUNDS - 5 and all(
        "no client could be scored" in warnings[0] for warnings in said
    )


def test_a_round_of_the_purge_without_answers_keeps_model_and_teacher() -> None:
    lab = Lab(noisy=(3, 4))
    lab.away = lambda k, task: task.round == 6
    before, after = [turn.state for turn in lab.play() if turn.task == "train"][5:7]
    assert same(before.model, after.model) and same(before.models[TEACHER], after.models[TEACHER])


# Labels stay corrected


@pytest.mark.parametrize(
    ("method", "stops"),
    [(METHOD, (3, 5, 6, 7, 9, 10)), (LONG, (7, 9, 10, 13))],
    ids=[
        "watching, summed up, judged, purged once, corrected, trained on that",
        "summed up and judged again",
    ],
)
def test_labels_are_corrected_once_and_kept_through_a_stop_in_any_stage(
    method: Method, stops: Sequence[int], tmp_path: Path
) -> None:
    lab, whole = Lab(noisy=(3, 4)), list[Turn]()
    for number, turn in enumerate(
        play(method, start(12), lab.exchange, range(CLIENTS), lambda _: NOTHING)
    ):
        folder = RunFolder(tmp_path / str(number))
        folder.create()
        save_checkpoint(folder, turn.state, lab.clients)
        whole.append(turn)
    soft = {k: lab.clients[k].memory[SOFT] for k in (3, 4)}
    for number in stops:
        again = Lab(noisy=(3, 4))
        state = restore(RunFolder(tmp_path / str(number)), again.clients)
        assert state is not None
        rest = again.play(method, state)
        assert (
            same(rest[-1].state.model, whole[-1].state.model)
            and rest[-1].state.memo == whole[-1].state.memo
        )
        assert all(torch.equal(again.clients[k].memory[SOFT], soft[k]) for k in (3, 4))
        corrections = [name for name, *_ in again.asked].count("correct")
        assert corrections == (number < [t.task for t in whole].index("correct")), whole[
            number
        ].state.stage


# What leaves a site


def test_training_says_nothing_more_than_fedla_and_scoring_a_few_numbers() -> None:
    lab, task = Lab(), Task("train", 4, start().model, {"watch": True})
    site = lab.site(lab.clients[0])
    reply = METHOD.work(task, site)
    assert reply.metrics.keys() == {"loss"} and not reply.arrays and EVIDENCE in site.memory
    sums = METHOD.work(replace(task, name="moments", settings={"width": 2048}), site)
    assert sums.weights is None and not sums.metrics
    width = site.features(task.weights).shape[1] + 1
    assert {name: array.shape for name, array in sums.arrays.items()} == {
        "products": (width, width), "sums": (CLASSES, width)
    }  # fmt: skip
    asked = replace(task, name="score", settings={"counted": True}, arrays=sums.arrays)
    scored = METHOD.work(asked, site)
    assert scored.metrics.keys() == {"left_received", "left_own"} and scored.weights is None
    assert {name: array.shape for name, array in scored.arrays.items()} == {
        "areas": (CLASSES, CLASSES), "counts": (CLASSES,)
    }  # fmt: skip
    assert not METHOD.work(replace(asked, arrays={}), site).arrays


@pytest.mark.parametrize(
    "method", [replace(METHOD, detector="shares"), FedNoRo(warmup=5, detector="shares")]
)
def test_by_shares_alone_nobody_is_asked_for_more_than_two_numbers(method: Method) -> None:
    lab = Lab(noisy=(3, 4))
    seen: list[set[str]] = []

    def exchange(method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        for reply in lab.exchange(method, tasks):
            seen.append(set(reply.arrays) if isinstance(reply, Reply) else set())
            yield reply

    played = list(play(method, start(ROUNDS), exchange, range(CLIENTS), lambda _: NOTHING))
    assert "moments" not in {name for name, *_ in lab.asked} and not set().union(*seen)
    assert verdicts(played[-1].state) == RIGHT
    assert "explained shares" in played[-1].state.memo["detection"]["reason"]


@pytest.mark.parametrize(
    "change", [lambda a: a[..., :-1, :-1], lambda a: a.sum(), lambda a: a * math.nan]
)
def test_sums_that_no_network_here_could_make_do_not_end_the_run(change: Any) -> None:
    """Client 0 comes first. Its own doubt is found from heads that it has no part in,
    or by shares among the others.
    """
    lab = Lab(noisy=(3, 4))

    def exchange(method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        for reply in lab.exchange(method, tasks):
            if isinstance(reply, Reply) and reply.client == 0 and "products" in reply.arrays:
                products = np.asarray(change(reply.arrays["products"]))
                sums = reply.arrays["sums"][:, : len(products)] if products.ndim else products
                reply = replace(reply, arrays={"products": products, "sums": sums})
            yield reply

    played = list(play(METHOD, start(ROUNDS), exchange, range(CLIENTS), lambda _: NOTHING))
    said = [message for turn in played for message in turn.warnings]
    assert said[0] == "client 0 sent sums that cannot be used: heads are learnt without it"
    assert played[-1].state.round == ROUNDS and verdicts(played[-1].state) == RIGHT


def test_views_of_an_image_are_drawn_and_averaged() -> None:
    lab = Lab((3, 4))
    lab.images.augment = Augment(rotate=30, flip=True)
    site, task = lab.site(lab.clients[3]), Task("correct", 7, start().model)
    said = []
    for view in range(3):
        named = replace(task, name=f"correct.{view}")
        said.append(torch.softmax(site.logits(named, task.weights, augment=True).double(), dim=1))
    assert not torch.equal(said[0], said[1])
    counts = site.counts.double()
    for views, mean in (
        (3, sum(said) / 3),
        (0, torch.softmax(site.logits(task, task.weights).double(), dim=1)),
    ):
        replace(METHOD, views=views).work(task, site)
        expected = mean * (counts + 0.5).sqrt()
        torch.testing.assert_close(
            site.memory[SOFT], (expected / expected.sum(dim=1, keepdim=True)).float()
        )


@pytest.mark.parametrize("wanted", [Protection(min_count=3), Protection(score_epsilon=1.0)])
@pytest.mark.parametrize(
    "method",
    [METHOD, *(FedNoRo(warmup=5, detector=rule) for rule in WIDTHS)],
    ids=["plus", *WIDTHS],
)
def test_a_site_that_holds_back_refuses_to_be_scored_by_what_it_explains(
    method: Method, wanted: Protection
) -> None:
    lab = Lab()
    site = lab.site(lab.clients[0])
    site.memory[EVIDENCE] = torch.tensor([0.1, 0.2], dtype=torch.float64)

    def answer(task: Task) -> Reply:
        protected, asked = protect(method, task, wanted)
        return protected.work(asked, site)

    for name in ("moments", "score"):
        with pytest.raises(UserError, match=r"cannot|protect"):
            answer(Task(name, 5, start().model, {"watch": True}))
    trained = answer(Task("train", 4, start().model, {"watch": True}))
    assert trained.weights is not None and trained.metrics.keys() == {"loss"}


# FedNoRo with this detector

CALIBRATED = FedNoRo(warmup=5, detector="calibrated")


def test_fednoro_takes_the_same_evidence_and_the_same_cut() -> None:
    a, b = (Lab(noisy=(3, 4)).play(method) for method in (replace(METHOD, watch=5), CALIBRATED))
    assert a[-1].state.memo["detection"] == b[-1].state.memo["detection"]
    assert verdicts(b[-1].state) == {0: False, 1: False, 2: False, 3: True, 4: True}
    stages = [turn.state.stage for turn in b]
    assert stages == [*["warm-up"] * 5, *["detection"] * 2, *["noise-robust training"] * 4]
    lams = [
        {k for k, note in turn.state.notes.items() if "lam" in note}
        for turn in b
        if turn.task == "train"
    ]
    assert lams == [*[set()] * 5, *[{3, 4}] * 4]


def test_fednoro_is_fedla_to_the_bit_where_this_detector_flags_nobody() -> None:
    ours, theirs = Lab().play(CALIBRATED), usual((), FedLA())[1]
    assert not any(verdicts(ours[-1].state).values())
    assert all(map(same, models(ours), models(theirs)))


@pytest.mark.parametrize("rule", ["paper", "reference"])
def test_a_detector_may_be_named_without_the_rest_of_its_behaviour(rule: Any) -> None:
    named, whole = (
        Lab(noisy=(3, 4)).play(FedNoRo(warmup=5, **{key: rule}))
        for key in ("detector", "behaviour")
    )
    detected = [
        next(t.state for t in played if t.task == "score").memo for played in (named, whole)
    ]
    assert detected[0] == detected[1]
    assert same(models(named)[-1], models(whole)[-1]) == (rule == "paper")


@pytest.mark.parametrize("rule", WIDTHS)
@pytest.mark.parametrize("options", [{"score_epsilon": 1.0}, {"score_min_count": 3}])
def test_protection_that_this_detector_cannot_give_is_refused_at_the_start(
    options: dict[str, Any], rule: Any
) -> None:
    with pytest.raises(UserError, match=rf"method\.detector={rule} .* set method\.detector=paper"):
        FedNoRo(warmup=5, detector=rule, **options).check(10)
    FedNoRo(warmup=5, **options).check(10)


@pytest.mark.parametrize(("warmup", "rounds"), [(5, 5), (6, 5)])
def test_a_warm_up_that_leaves_no_round_is_refused(warmup: int, rounds: int) -> None:
    with pytest.raises(
        UserError, match=rf"method\.warmup must be below train\.rounds \({rounds}\), got {warmup}"
    ):
        FedNoRoPlus(warmup=warmup).check(rounds)
    FedNoRoPlus(warmup=warmup).check(warmup + 1)


def test_watching_more_rounds_than_the_warm_up_has_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"method\.watch must be at most method\.warmup \(6\), got 7: set either"
    ):
        FedNoRoPlus(warmup=6, watch=7).check(10)
    FedNoRoPlus(warmup=6, watch=6).check(10)
    FedNoRoPlus(warmup=2).check(10)  # the default is for short warm-ups too


def test_a_client_whose_measures_were_never_numbers_measures_anew() -> None:
    lab = Lab(noisy=(3, 4))
    for k in (1, 3):
        lab.clients[k].memory[EVIDENCE] = torch.full((2,), math.inf, dtype=torch.float64)
    begin = at(5, {})
    turns = play(METHOD, begin, lab.exchange, range(CLIENTS), lambda _: NOTHING)
    state = next(turn for turn in turns if turn.task == "score").state
    assert state.memo["detection"]["clients"].keys() == {"0", "1", "2", "3", "4"}


# What people read


@pytest.mark.parametrize("method", ["method=fednoro-plus", "method.detector=calibrated"])
def test_verdicts_are_shown_and_written_though_there_are_no_class_losses(
    method: str, tmp_path: Path
) -> None:
    text = io.StringIO()
    short = [
        "train.rounds=3",
        "method.warmup=2",
        "noise.epochs=1",
        "train.epochs=1",
        "partition.clients=4",
    ]
    watcher = Terminal(Console(file=text, width=120))
    run = fednoro.run("digits", method, *short, "device=cpu", f"out={tmp_path}", watcher=watcher)
    found = json.loads((run.folder / "detection.json").read_text())
    assert run.detection == found and "explained shares" in found["reason"]
    for row in found["clients"].values():
        assert row["noisy"] == (row["explained"] < found["cut"])
    lines = text.getvalue().splitlines()
    assert any(f"after round 2: {found['reason']}" in line for line in lines)
    for k, row in found["clients"].items():
        name, size = run.federation.names[int(k)], len(run.federation.parts[int(k)])
        (shown,) = (line.split("│") for line in lines if line.startswith(f"│ {name}"))
        assert int(shown[2]) == size and shown[4].strip() == ("noisy" if row["noisy"] else "clean")
    with (run.folder / "clients.csv").open(newline="") as file:
        scored = {row["client"]: row for row in csv.DictReader(file) if row["task"] == "score"}
    assert {k: float(row["left_own"]) for k, row in scored.items()} == pytest.approx(
        {k: row["left_own"] for k, row in found["clients"].items()}, rel=1e-5
    )
