"""The calibrated detector at the server: who is asked what, how doubts
are cut, and who comes later.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, TRAINING, federation, network, start
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fednoro.core.types import Clients, FedNoRoWarning, Reply, State, Task, UserError
from fednoro.detection.calibrated import (
    AGAIN,
    AREAS,
    COUNTED,
    COUNTS,
    FIRST,
    MOMENTS,
    PRODUCTS,
    SUMS,
    WIDEST,
    WIDTH,
    WIDTHS,
    add_up,
    add_up_again,
    can_reconsider,
    judge,
    questions,
    reconsider,
    record,
    score,
    sum_features,
    suspects,
)
from fednoro.detection.explained import SENT
from fednoro.detection.leave_one_out_heads import areas as areas_of
from fednoro.detection.leave_one_out_heads import head, moments, outputs, sketch
from fednoro.detection.verdicts import verdicts
from fednoro.engine.eager import EagerEngine

pytestmark = pytest.mark.usefixtures("one_thread")

SHARES = st.lists(st.floats(-0.5, 0.99), min_size=1, max_size=30)
EVERYONE = Clients(tuple(range(len(MIXED))), tuple(range(len(MIXED))))


def reply(k: int, e: float, area: float | None = None, **changed: float) -> Reply:
    """A client that explains so much of its labels; the others' heads part
    each pair of classes so well.
    """
    arrays = {}
    if area is not None:
        parted = np.full((CLASSES, CLASSES), area)
        np.fill_diagonal(parted, np.nan)
        arrays = {AREAS: parted, COUNTS: np.full(CLASSES, 9.0)}
    return Reply(k, 9, metrics={**dict.fromkeys(SENT, 1 - e), **changed}, arrays=arrays)


# Explained shares alone


def test_a_late_client_is_judged_by_the_first_cut_and_moves_nobody() -> None:
    first = record(start(), [reply(0, 0.8), reply(1, 0.2), reply(2, 0.1)])
    cut = first.memo["detection"]["cut"]
    assert cut == pytest.approx(0.5) and verdicts(first) == {0: False, 1: True, 2: True}
    later = record(replace(first, round=3), [reply(3, 0.49), reply(4, 0.51)])
    assert verdicts(later) == {**verdicts(first), 3: True, 4: False}
    assert later.memo["detection"]["cut"] == cut
    assert later.memo["detection"]["reason"] == first.memo["detection"]["reason"]
    assert later.memo["detector"] == first.memo["detector"]
    known = first.memo["detection"]["clients"]
    assert {k: row for k, row in later.memo["detection"]["clients"].items() if k in known} == known
    assert later.memo["detection"]["clients"]["4"]["round"] == 3
    assert json.loads(json.dumps(later.memo, allow_nan=False)) == later.memo


def test_until_two_groups_were_found_everybody_is_judged_anew() -> None:
    first = record(start(), [reply(0, 0.1), reply(1, 0.15)])
    assert verdicts(first) == {0: True, 1: True} and suspects(first, range(2)) == set()
    later = record(replace(first, round=3), [reply(2, 0.8), reply(3, 0.7)])
    assert verdicts(later) == {0: True, 1: True, 2: False, 3: False} and suspects(
        later, range(4)
    ) == {0, 1}
    assert [row["round"] for row in later.memo["detection"]["clients"].values()] == [0, 0, 3, 3]
    assert (
        later.memo["detection"]["parted"]
        and "2 of 4 clients flagged" in later.memo["detection"]["reason"]
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("name", SENT)
def test_numbers_that_cannot_be_are_no_answer(name: str, bad: float) -> None:
    after = record(start(), [reply(0, 0.8), reply(1, 0.7, **{name: bad})])
    assert verdicts(after) == {0: False} and suspects(after, (0, 1)) == {1}


def test_an_answer_without_the_numbers_is_none() -> None:
    with pytest.warns(FedNoRoWarning, match="no client could be scored"):
        after = record(start(), [Reply(0, 5), Reply(1, 5, metrics={"left_own": 0.2})])
    assert (
        verdicts(after) == {} and suspects(after, (0, 1)) == set() and after.memo == {"asked_in": 0}
    )


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


# Doubts

TRUSTED, DOUBTED = (
    [(0.5, 0.95), (0.48, 0.94), (0.52, 0.93), (0.45, 0.96)],
    [(0.2, 0.7), (0.15, 0.65)],
)


def summed_up(round: int = 0) -> State:
    """A server that has the totals of everybody's sums, and is about to learn the scores."""
    return replace(start(), round=round, memo={MOMENTS: {"round": round, "clients": [0, 1, 2]}})


def replies(kinds: Sequence[tuple[float, float]], first: int = 0) -> list[Reply]:
    return [reply(first + k, e, area) for k, (e, area) in enumerate(kinds)]


def test_doubts_part_clients_and_stay_for_who_comes_later() -> None:
    first = record(summed_up(), replies([*TRUSTED, *DOUBTED]))
    found = first.memo["detection"]
    assert (
        verdicts(first)
        == {k: k >= 4 for k in range(6)}
        == {k: k in suspects(first, range(6)) for k in range(6)}
    )
    low, high = (f(row["doubt"] for row in found["clients"].values()) for f in (min, max))
    assert (
        found["reason"]
        == f"2 of 6 clients flagged: doubts {low:.2f} to {high:.2f}, cut at {found['cut']:.2f}"
    )
    for row in found["clients"].values():
        assert row["doubt"] == pytest.approx(
            math.sqrt((row["error"] + 0.02) * (1 - row["explained"] + 0.02))
        )
        assert row["noisy"] == (row["doubt"] > found["cut"]) == (row["posterior"] > 0.5)
    later = record(replace(first, round=3), [reply(6, 0.5, 0.95), reply(7, 0.15, 0.65)])
    assert verdicts(later) == {**verdicts(first), 6: False, 7: True}
    rows = later.memo["detection"]["clients"]
    assert rows["6"]["doubt"] == pytest.approx(rows["0"]["doubt"]) and rows["7"][
        "doubt"
    ] == pytest.approx(rows["5"]["doubt"])
    assert {k: rows[k] for k in found["clients"]} == found["clients"] and rows["6"]["round"] == 3
    for key in ("cut", "steepness", "reason", "pairs", "mean", "round"):
        assert later.memo["detection"][key] == found[key]
    assert json.loads(json.dumps(later.memo, allow_nan=False)) == later.memo


def test_who_comes_late_without_areas_is_asked_again() -> None:
    first = record(summed_up(), replies([*TRUSTED, *DOUBTED]))
    with pytest.warns(FedNoRoWarning, match="no client could be scored"):
        later = record(replace(first, round=3), [reply(6, 0.5)])
    assert verdicts(later) == verdicts(first) and suspects(later, (0, 6)) == {6}


@pytest.mark.parametrize(("level", "noisy"), [(0.5, False), (0.2, True)])
def test_alike_in_doubt_is_nobody_or_everybody_by_what_is_explained(
    level: float, noisy: bool
) -> None:
    first = record(summed_up(), replies([(level + 0.01 * k, 0.9 + 0.005 * k) for k in range(6)]))
    assert set(verdicts(first).values()) == {noisy} and not first.memo["detection"]["parted"]
    assert "explained shares" in first.memo["detection"]["reason"]
    # With the next ones there are two groups: everybody is judged anew, from
    # what was kept of the first.
    later = record(
        replace(first, round=2),
        replies([(0.55, 0.99), (0.56, 0.98)] if noisy else DOUBTED, first=6),
    )
    assert verdicts(later) == {k: noisy == (k < 6) for k in range(8)}


@pytest.mark.parametrize(("level", "noisy"), [(0.3, 2), (0.26, 6)])
def test_where_one_kind_explains_next_to_nothing_nobody_is_trusted(
    level: float, noisy: int
) -> None:
    kinds = [*[(level, area) for _, area in TRUSTED], (0.05, 0.86), (0.05, 0.87)]
    assert sum(verdicts(record(summed_up(), replies(kinds))).values()) == noisy


def test_a_client_with_one_class_tells_nothing_and_is_not_flagged() -> None:
    silent = replace(
        reply(6, 1.0),
        arrays={AREAS: np.full((CLASSES, CLASSES), np.nan), COUNTS: np.eye(CLASSES)[0]},
    )
    found = record(summed_up(), [*replies([*TRUSTED, *DOUBTED]), silent]).memo["detection"]
    row = found["clients"]["6"]
    assert (row["noisy"], row["posterior"], row["doubt"], row["error"]) == (False, 0.5, None, None)
    assert found["reason"].startswith("2 of 7 clients flagged") and "nan" not in found["reason"]


@pytest.mark.parametrize(
    ("name", "bad"), [(AREAS, 1.5), (AREAS, -0.1), (AREAS, math.inf), (COUNTS, -1.0)]
)
def test_areas_that_cannot_be_are_no_answer(name: str, bad: float) -> None:
    broken = reply(6, 0.5, 0.9)
    broken.arrays[name][0] = bad
    found = record(summed_up(), [*replies([*TRUSTED, *DOUBTED]), broken])
    assert 6 not in verdicts(found) and suspects(found, range(7)) == {4, 5, 6}


@pytest.mark.parametrize("name", [AREAS, COUNTS])
def test_one_client_without_areas_does_not_take_the_heads_from_the_others(name: str) -> None:
    broken = reply(6, 0.5, 0.9)
    missing = {key: array for key, array in broken.arrays.items() if key != name}
    for arrays in (missing, {**missing, name: np.zeros(2)}):
        found = record(
            summed_up(), [*replies([*TRUSTED, *DOUBTED]), replace(broken, arrays=arrays)]
        )
        assert (
            verdicts(found) == {k: k >= 4 for k in range(6)}
            and "doubts" in found.memo["detection"]["reason"]
        )


def test_areas_that_nobody_asked_for_count_for_nothing() -> None:
    found = record(start(), [*replies([*TRUSTED, *DOUBTED])[:-1], reply(5, 0.15)])
    assert verdicts(found) == {k: k >= 4 for k in range(6)}
    assert "explained shares" in found.memo["detection"]["reason"]


def test_who_errs_more_but_explains_as_much_is_not_flagged() -> None:
    kinds = [(0.5, 0.97), (0.52, 0.96), *[(0.5, 0.9)] * 6]
    assert not any(verdicts(record(summed_up(), replies(kinds))).values())


def test_few_clients_go_by_shares_alone() -> None:
    rows = [(0.5, 0.97), (0.55, 0.95), (0.45, 0.97), (0.35, 0.6)]
    assert not any(verdicts(record(summed_up(), replies(rows))).values())
    assert verdicts(record(summed_up(), replies([*rows, (0.5, 0.96)])))[3], "five are enough"


@given(st.integers(0, 2**31), st.integers(2, 15), st.integers(1, 15))
def test_planted_groups_are_found_whatever_the_order(seed: int, clean: int, noisy: int) -> None:
    if clean + noisy <= 4:
        return
    rng = np.random.default_rng(seed)
    kinds = [(0.5 + 0.03 * rng.random(), 0.93 + 0.02 * rng.random()) for _ in range(clean)]
    kinds += [(0.2 + 0.03 * rng.random(), 0.7 + 0.02 * rng.random()) for _ in range(noisy)]
    order = rng.permutation(clean + noisy)
    found = verdicts(record(summed_up(), replies([kinds[i] for i in order])))
    assert [found[k] for k in range(len(order))] == [bool(i >= clean) for i in order]


# Sums


class Bare(nn.Module):
    """A network without `features`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.flatten(1))


LARGER = [*MIXED, [0, 1, 2, 3, 3, 2]]


def lab(net: Any = network, parts: Sequence[Sequence[int]] = MIXED) -> EagerEngine:
    data, clients = federation(parts)
    return EagerEngine(net, data, 1, TRAINING, 0, torch.device("cpu"), clients)


def asked_for_sums(
    state: State,
    engine: EagerEngine,
    away: Sequence[int] = (),
    clients: Clients = EVERYONE,
    width: int = WIDEST,
) -> State:
    tasks = questions(state, clients, clients.drawn, width)
    assert {task.name for task in tasks.values()} == {MOMENTS} and tuple(tasks) == clients.present
    return add_up(
        state,
        [sum_features(tasks[k], engine.site(engine.clients[k])) for k in tasks if k not in away],
    )


@pytest.mark.parametrize("away", [(), (1,)], ids=["all", "one is late"])
def test_a_score_says_what_the_others_heads_part(away: tuple[int, ...]) -> None:
    engine, six = lab(parts=LARGER), Clients(tuple(range(6)), tuple(range(6)))
    state = asked_for_sums(start(), engine, away, six)
    tasks = questions(state, six, six.drawn, WIDEST)
    assert {k for k, task in tasks.items() if not task.settings[COUNTED]} == set(away)
    everything = {}
    for k in six.present:
        site = engine.site(engine.clients[k])
        everything[k] = site.features(state.model), site.labels
    told_apart = 0  # from a head that the client's own part is taken from once too often
    for k, task in tasks.items():
        others = [moments(*everything[j], CLASSES) for j in everything if j not in (k, *away)]
        a, b = (sum(part) for part in zip(*others, strict=True))
        said = outputs(*everything[k], a, b, in_totals=False).numpy()
        expected = areas_of(said, everything[k][1].numpy())
        wrong = outputs(*everything[k], a, b, in_totals=True).numpy()
        told_apart += not np.array_equal(
            expected, areas_of(wrong, everything[k][1].numpy()), equal_nan=True
        )
        found = score(task, engine.site(engine.clients[k]))
        assert (
            found.weights is None
            and found.metrics.keys() == set(SENT)
            and found.arrays.keys() == {AREAS, COUNTS}
        )
        np.testing.assert_array_equal(found.arrays[AREAS], expected)
        assert (
            found.arrays[COUNTS].tolist()
            == np.bincount(everything[k][1], minlength=CLASSES).tolist()
        )
    assert told_apart > 1


def test_sums_are_asked_for_once_and_again_for_another_model() -> None:
    engine = lab()
    state = asked_for_sums(start(), engine)
    kinds = {task.name for task in questions(state, EVERYONE, (0, 1), WIDEST).values()}
    assert kinds == {"score"} and set(questions(state, EVERYONE, (0, 1), WIDEST)) == {0, 1}
    # Nobody has answered: a round later there is another model.
    assert {
        t.name for t in questions(replace(state, round=1), EVERYONE, (0,), WIDEST).values()
    } == {MOMENTS}
    judged = record(state, replies([*TRUSTED, *DOUBTED]))
    assert judged.memo["detection"]["parted"]
    late = questions(replace(judged, round=4, model=replace(judged.model)), EVERYONE, (1,), WIDEST)[
        1
    ]
    assert (
        late.name == "score"
        and late.weights is judged.models["scored"]
        and late.settings == {COUNTED: True}
    )
    anew = questions(replace(judged, round=4), EVERYONE, (1,), WIDEST, anew=True)
    assert {task.name for task in anew.values()} == {MOMENTS} and set(anew) == set(EVERYONE.present)


def test_without_heads_or_among_few_nobody_is_asked_for_sums() -> None:
    for clients, heads in ((EVERYONE, False), (Clients((0, 1, 2, 3), (0, 1)), True)):
        tasks = questions(start(), clients, clients.drawn, heads)
        assert set(tasks) == set(clients.drawn) and all(
            t.name == "score" and not t.arrays for t in tasks.values()
        )


def test_a_network_without_features_is_judged_by_shares() -> None:
    engine = lab(Bare)
    state = replace(start(), model=engine.net.weights())
    with pytest.raises(UserError, match="no features"):
        engine.site(engine.clients[0]).features(state.model)
    state = asked_for_sums(state, engine)
    assert MOMENTS not in state.models
    tasks = questions(state, EVERYONE, EVERYONE.drawn, WIDEST)
    assert all(task.name == "score" and not task.arrays for task in tasks.values())
    answers = [score(tasks[k], engine.site(engine.clients[k])) for k in tasks]
    assert not any(answer.arrays for answer in answers) and len(
        verdicts(record(state, answers))
    ) == len(tasks)


@pytest.mark.parametrize(("widest", "width"), [(2048, 3), (3, 2048), (3, 10**9), (2048, -1)])
def test_of_many_features_a_sketch_is_summed_up(
    widest: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the server asks for, or than a site would send whatever it is asked."""
    engine, wide = lab(), asked_for_sums(start(), lab())
    monkeypatch.setattr("fednoro.detection.calibrated.SKETCH", 3)
    monkeypatch.setattr("fednoro.detection.calibrated.WIDEST", widest)
    state = asked_for_sums(start(), engine, width=width)
    assert len(sums_of(state)) == 4 * 4 + CLASSES * 4 < len(sums_of(wide))
    for k, task in questions(state, EVERYONE, EVERYONE.drawn, width).items():
        site = engine.site(engine.clients[k])
        x = torch.cat(
            [sketch(site.features(task.weights), 3), torch.ones(site.size, 1)], dim=1
        ).double()
        own = x.t() @ x, x.t() @ nn.functional.one_hot(site.labels, CLASSES).double()
        a, b = (torch.from_numpy(task.arrays[name]) for name in (PRODUCTS, SUMS))
        said = x @ head(a - own[0], b.t() - own[1])
        np.testing.assert_array_equal(
            score(task, site).arrays[AREAS], areas_of(said.numpy(), site.labels.numpy())
        )


def test_sites_are_told_how_wide_the_sums_are() -> None:
    asked = {
        name: questions(start(), EVERYONE, EVERYONE.drawn, width)[0]
        for name, width in WIDTHS.items()
    }
    assert [asked[name].settings for name in ("calibrated", "sketched", "shares")] == [
        {WIDTH: 2048},
        {WIDTH: 64},
        {},
    ]


@pytest.mark.parametrize("change", ["shape", "flat", "number", "nan", "large", "width", "wide"])
def test_sums_that_cannot_be_used_are_left_out_and_that_is_said(change: str) -> None:
    engine = lab(parts=LARGER)
    sent = [
        sum_features(Task(MOMENTS, 0, start().model, {WIDTH: WIDEST}), engine.site(client))
        for client in engine.clients.values()
    ]
    products, sums = sent[0].arrays[PRODUCTS].copy(), sent[0].arrays[SUMS].copy()
    if change == "shape":
        products = products[:-1]
    elif change == "flat":
        products, sums = products[:CLASSES, :CLASSES], sums[:, 0]
    elif change == "number":
        products, sums = np.array(1.0), np.array(1.0)
    elif change == "width":  # by itself it would be right, and it comes first
        products, sums = products[:-1, :-1], sums[:, :-1]
    elif change == "wide":
        products, sums = np.zeros((3000, 3000)), np.zeros((CLASSES, 3000))
    elif change == "large":
        products[0, 0] = np.inf
    else:
        products[0, 0] = math.nan
    with pytest.warns(FedNoRoWarning, match="client 0 sent sums that cannot be used"):
        state = add_up(
            start(), [replace(sent[0], arrays={PRODUCTS: products, SUMS: sums}), *sent[1:]]
        )
    assert state.memo[MOMENTS] == {"round": 0, "clients": [1, 2, 3, 4, 5]}
    totals = next(iter(questions(state, EVERYONE, (0,), WIDEST).values())).arrays
    np.testing.assert_allclose(totals[PRODUCTS], sum(reply.arrays[PRODUCTS] for reply in sent[1:]))
    np.testing.assert_allclose(totals[SUMS], sum(reply.arrays[SUMS] for reply in sent[1:]))


def test_sums_that_overflow_together_are_left_out() -> None:
    engine = lab(parts=LARGER)
    sent = [
        sum_features(Task(MOMENTS, 0, start().model, {WIDTH: WIDEST}), engine.site(client))
        for client in engine.clients.values()
    ]
    for reply in sent[:2]:
        reply.arrays[PRODUCTS][0, 0] = 1.5e308
    with pytest.warns(FedNoRoWarning, match="client 1 sent sums that cannot be used"):
        state = add_up(start(), sent)
    assert (
        state.memo[MOMENTS]["clients"] == [0, 2, 3, 4, 5]
        and state.models[MOMENTS].values.isfinite().all()
    )


def test_sums_of_a_few_are_not_shown_to_the_others() -> None:
    """From a total of two, each of them could tell the other's part."""
    with pytest.warns(FedNoRoWarning, match="only 4 clients sent sums"):
        state = asked_for_sums(start(), lab(), away=(3,))
    assert MOMENTS not in state.models and state.memo[MOMENTS]["clients"] == []
    tasks = questions(state, EVERYONE, EVERYONE.drawn, WIDEST)
    assert all(task.name == "score" and not task.arrays for task in tasks.values())


def test_a_revision_among_few_goes_by_shares() -> None:
    """Everybody was flagged by heads, then somebody left: the others are judged again without."""
    first = record(summed_up(), replies([(0.1, 0.6)] * 5))
    assert all(verdicts(first).values()) and first.memo["detection"]["summed_in"] == 0
    later, four = replace(first, round=4), Clients((0, 1, 2, 3), (0, 1, 2, 3))
    tasks = questions(later, four, four.present, WIDEST, anew=True)
    assert all(task.name == "score" and not task.arrays for task in tasks.values())
    again = record(later, [reply(k, e) for k, e in enumerate((0.6, 0.7, 0.65, 0.1))])
    assert (
        verdicts(again) == {0: False, 1: False, 2: False, 3: True}
        and "summed_in" not in again.memo["detection"]
    )


def test_totals_of_another_model_are_not_sent_to_who_comes_late() -> None:
    """A revision that nobody answered has left its totals, and the
    verdict is of an earlier model.
    """
    first = record(summed_up(), replies([(0.1, 0.6)] * 6))
    failed = replace(
        first, round=4, memo={**first.memo, MOMENTS: {"round": 4, "clients": [0, 1, 2, 3, 4]}}
    )
    task = questions(replace(failed, round=5), EVERYONE, (7,), WIDEST)[7]
    assert task.name == "score" and not task.arrays
    later = record(replace(failed, round=5), [reply(7, 0.1)])
    assert verdicts(later)[7] and "explained shares" in later.memo["detection"]["reason"]


def test_areas_are_due_for_every_pair_that_a_client_has() -> None:
    for i, j in ((0, 1), (1, 0)):
        hiding = reply(6, 0.0, 0.9)
        hiding.arrays[AREAS][i, j] = math.nan
        found = record(summed_up(), [*replies([*TRUSTED, *DOUBTED]), hiding])
        assert (6 in verdicts(found)) == (i > j), "the upper half of the matrix counts"
    everything = replace(
        reply(6, 0.0),
        arrays={AREAS: np.full((CLASSES, CLASSES), np.nan), COUNTS: np.full(CLASSES, 9)},
    )
    assert 6 not in verdicts(record(summed_up(), [*replies([*TRUSTED, *DOUBTED]), everything]))


def few_classes(k: int, e: float, held: tuple[int, ...], area: float = 0.9) -> Reply:
    full = reply(k, e, area)
    counts = np.where(np.isin(np.arange(CLASSES), held), 9.0, 0.0)
    both = np.outer(counts, counts) > 0
    return replace(full, arrays={AREAS: np.where(both, full.arrays[AREAS], np.nan), COUNTS: counts})


def test_a_late_client_whose_pair_nobody_had_is_judged_by_what_it_explains() -> None:
    first = record(
        summed_up(),
        [few_classes(k, e, (0, 1, 2), a) for k, (e, a) in enumerate([*TRUSTED, *DOUBTED])],
    )
    assert first.memo["detection"]["parted"]
    later = record(
        replace(first, round=2), [few_classes(6, 0.0, (2, 3)), few_classes(7, 0.9, (2, 3))]
    )
    assert verdicts(later) == {**verdicts(first), 6: True, 7: False}


def test_clients_that_share_no_pair_go_by_shares_alone() -> None:
    pairs = list(itertools.combinations(range(CLASSES), 2))
    shares = [0.55, 0.56, 0.54, 0.1, 0.12, 0.09]
    found = record(summed_up(), [few_classes(k, e, pairs[k]) for k, e in enumerate(shares)])
    assert verdicts(found) == {k: e < 0.2 for k, e in enumerate(shares)}
    assert "explained shares" in found.memo["detection"]["reason"]


def test_a_verdict_of_an_older_checkpoint_is_read() -> None:
    rows = {"0": {"noisy": True, "explained": 0.1}, "1": {"noisy": False, "explained": 0.6}}
    for trust, expected in ((0.4, {0}), (None, set())):
        memo = {"detector": {"trust": trust}, "detection": {"clients": rows}}
        assert suspects(replace(start(), memo=memo), (0, 1)) == expected


def test_judge_takes_rows_of_a_memo() -> None:
    state = record(summed_up(), replies([*TRUSTED, *DOUBTED]))
    rows = list(state.memo["detection"]["clients"].values())
    again = judge(rows)
    assert (
        again.noisy == tuple(row["noisy"] for row in rows)
        and again.cut == state.memo["detection"]["cut"]
    )


# A second look

SIX = Clients(tuple(range(6)), tuple(range(6)))


def looked_at(kinds: Sequence[tuple[float, float]]) -> tuple[EagerEngine, State, State]:
    """Six clients after a first verdict, and the same two rounds later,
    with the sums for a second one.
    """
    engine = lab(parts=LARGER)
    first = record(asked_for_sums(start(), engine, clients=SIX), replies(kinds))
    later = replace(first, round=2, model=replace(first.model, values=first.model.values * 1.5))
    assert can_reconsider(later)
    tasks = questions(later, SIX, SIX.present, WIDEST, anew=True)
    assert {task.name for task in tasks.values()} == {MOMENTS}
    return (
        engine,
        first,
        add_up_again(
            later, [sum_features(tasks[k], engine.site(engine.clients[k])) for k in tasks]
        ),
    )


def sums_of(state: State) -> torch.Tensor:
    return state.models[MOMENTS].values


@pytest.mark.parametrize("away", [(), (5,)], ids=["all answer", "one does not"])
def test_a_second_verdict_is_by_the_model_and_the_sums_of_then(away: Sequence[int]) -> None:
    _, first, summed_again = looked_at([*TRUSTED[:3], DOUBTED[0], TRUSTED[3], DOUBTED[1]])
    assert verdicts(first) == {k: k in (3, 5) for k in range(6)}
    assert not torch.equal(sums_of(first), sums_of(summed_again)) and torch.equal(
        summed_again.models[FIRST].values, sums_of(first)
    )
    asked = questions(summed_again, SIX, SIX.present, WIDEST, anew=True)
    assert all(
        task.name == "score" and task.weights is summed_again.model and task.arrays
        for task in asked.values()
    )
    kinds = [*TRUSTED, *DOUBTED]  # client 3 turns out to be clean, client 4 noisy
    after = reconsider(summed_again, [reply(k, *kinds[k]) for k in range(6) if k not in away])
    found = after.memo["detection"]
    assert verdicts(after) == {k: k in (4, 5) for k in range(6)} and after.memo[AGAIN] == {
        "round": 2,
        "changed": True,
    }
    assert {k: row["round"] for k, row in found["clients"].items()} == {
        str(k): 0 if k in away else 2 for k in range(6)
    }
    assert found["round"] == 0 and found["summed_in"] == 2
    more = "; 1 did not answer and stay as they were" if away else ""
    assert found["reason"].endswith(f"(judged again{more})")
    assert {k for k, row in found["clients"].items() if "doubt" not in row} == {
        str(k) for k in away
    }, "another scale"
    assert torch.equal(sums_of(after), sums_of(summed_again)) and not {FIRST} & (
        after.models.keys() | after.memo.keys()
    )
    assert not can_reconsider(after)
    late = questions(replace(after, round=4), SIX, (1,), WIDEST)[1]
    assert late.weights is summed_again.model and late.arrays and late.settings == {COUNTED: True}
    assert json.loads(json.dumps(after.memo, allow_nan=False)) == after.memo


def test_in_a_second_verdict_both_groups_scatter_alike() -> None:
    """Clients that the model was trained on err next to nothing: a clean one that it
    was not is no noisy one yet.
    """
    errors, shares = (0.029, 0.019, 0.04, 0.173, 0.898, 0.556), (0.54, 0.55, 0.61, 0.4, 0.08, 0.17)
    kinds = [(e, 1 - error / 2) for e, error in zip(shares, errors, strict=True)]
    _, first, summed_again = looked_at([*TRUSTED[:3], DOUBTED[0], *DOUBTED])
    assert verdicts(first) == {k: k > 2 for k in range(6)}
    assert verdicts(record(summed_up(), replies(kinds))) == {k: k > 2 for k in range(6)}
    assert verdicts(reconsider(summed_again, replies(kinds))) == {k: k > 3 for k in range(6)}


@pytest.mark.parametrize(
    "scores",
    [
        replies([*[(0.9, 0.99)] * 6]),
        replies([*TRUSTED[:2], *DOUBTED[:1]]),
        replies([*TRUSTED[:2], *DOUBTED * 2], 10),
    ],
    ids=["all alike", "half answer", "none that was known"],
)
def test_the_first_verdict_stays_where_the_second_is_none(scores: list[Reply]) -> None:
    _, first, summed_again = looked_at([*TRUSTED, *DOUBTED])
    known = scores[0].client == 0
    if known:
        after = reconsider(summed_again, scores)
    else:
        with pytest.warns(FedNoRoWarning, match="no client could be scored"):
            after = reconsider(summed_again, scores)
    assert after.memo["detection"] == first.memo["detection"] and after.memo["asked_in"] == 2
    assert (
        torch.equal(sums_of(after), sums_of(first)) and after.memo[MOMENTS] == first.memo[MOMENTS]
    )
    assert after.models["scored"] is first.models["scored"] and not {FIRST} & (
        after.models.keys() | after.memo.keys()
    )
    assert after.memo.get(AGAIN) == ({"round": 2, "changed": False} if known else None)
    assert can_reconsider(after) != known, "if nobody has answered, there may be a later one"


def test_sums_of_a_few_do_not_take_the_place_of_the_first_ones() -> None:
    engine, first, _ = looked_at([*TRUSTED, *DOUBTED])
    later = replace(first, round=2)
    tasks = questions(later, SIX, SIX.present, WIDEST, anew=True)
    with pytest.warns(
        FedNoRoWarning, match="only 3 clients sent sums .*: the verdict stays as it is"
    ):
        after = add_up_again(
            later, [sum_features(tasks[k], engine.site(engine.clients[k])) for k in (0, 1, 2)]
        )
    assert torch.equal(sums_of(after), sums_of(first)) and after.memo == {
        **first.memo,
        "asked_in": 2,
    }
    assert can_reconsider(after)


def test_only_a_verdict_by_heads_is_looked_at_again() -> None:
    assert not can_reconsider(start()) and not can_reconsider(summed_up())
    assert not can_reconsider(record(start(), [reply(k, e) for k, e in enumerate([0.1, 0.2, 0.9])]))
    alike = record(
        asked_for_sums(start(), lab(parts=LARGER), clients=SIX), replies([(0.9, 0.99)] * 6)
    )
    assert not can_reconsider(alike)
