"""Work that takes turns."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from fednoro.engine.cuda.coroutines import Coroutine, UnansweredError, run_all


def adding(numbers: Sequence[int], log: list[str], name: str) -> Coroutine:
    """Asks for each number and adds up the answers."""

    def work() -> int:
        total = 0
        for number in numbers:
            log.append(f"{name} asks {number}")
            total += turns.ask(number)
        log.append(f"{name} ends")
        return total

    turns = Coroutine(work)
    return turns


def test_requests_of_all_who_wait_are_met_together_and_nobody_runs_beside_another() -> None:
    log: list[str] = []
    a, b, c = adding([1, 2], log, "a"), adding([3], log, "b"), adding([], log, "c")
    asked: list[list[int]] = []

    def answer(requests: Sequence[int]) -> list[int]:
        asked.append(list(requests))
        return [10 * request for request in requests]

    run_all([a, b, c], answer)
    assert asked == [[1, 3], [2]]
    assert [turns.result for turns in (a, b, c)] == [30, 30, 0]
    assert log == ["a asks 1", "b asks 3", "c ends", "a asks 2", "b ends", "a ends"]


def test_an_exception_as_an_answer_is_raised_where_it_was_asked_for() -> None:
    log: list[str] = []
    a, b = adding([1], log, "a"), adding([2, 3], log, "b")
    run_all(
        [a, b],
        lambda requests: [ValueError("no") if request == 1 else request for request in requests],
    )
    assert isinstance(a.error, ValueError) and a.result is None
    assert b.result == 5 and b.error is None


def test_an_error_of_the_one_who_answers_ends_all_work_and_is_raised() -> None:
    log: list[str] = []
    everybody = [adding([1], log, "a"), adding([2], log, "b")]

    def answer(_: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(everybody, answer)
    for turns in everybody:
        assert turns.done and isinstance(turns.error, UnansweredError)


def test_work_that_does_not_give_up_is_ended_and_work_that_has_not_begun_never_begins() -> None:
    heard: list[str] = []

    def stubborn() -> None:
        for _ in range(3):
            try:
                turns.ask(1)
            except UnansweredError:
                heard.append("refused")

    def interrupted(_: object = None) -> None:
        raise KeyboardInterrupt

    turns, late = Coroutine(stubborn), adding([1], heard, "late")
    late.resume = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_all([turns, late], lambda requests: list(requests))
    assert turns.done and turns.error is None and heard == ["refused"] * 3


def test_ctrl_c_while_work_runs_ends_all_work() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    log: list[str] = []
    others = [adding([1], log, "a"), adding([2], log, "b")]
    with pytest.raises(KeyboardInterrupt):
        run_all([others[0], Coroutine(work), others[1]], lambda requests: list(requests))
    assert log == ["a asks 1"] and all(turns.done for turns in others)


def test_what_a_work_has_open_stays_open_while_it_waits() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[None]:
        log.append(f"{name} opens")
        yield
        log.append(f"{name} closes")

    def work(name: str) -> None:
        with opened(name):
            log.append(everybody[name].ask(name))

    everybody = {name: Coroutine(partial(work, name)) for name in "ab"}
    run_all(list(everybody.values()), lambda requests: [f"{request} heard" for request in requests])
    assert log == ["a opens", "b opens", "a heard", "a closes", "b heard", "b closes"]


def test_when_it_is_over_nothing_is_kept() -> None:
    """Results are models, and rubbish is collected too seldom for these."""

    class Model:
        pass

    def work(turns: list[Coroutine]) -> Model:
        model = Model()
        kept.append(weakref.ref(model))
        turns[0].ask(1)
        return model

    kept: list[weakref.ref[Model]] = []
    gc.disable()
    try:
        own: list[Coroutine] = []
        own.append(Coroutine(partial(work, own)))
        run_all(own, lambda requests: list(requests))
        assert own[0].done and kept[0]() is own[0].result is not None
        own.clear()
        assert kept[0]() is None
    finally:
        gc.enable()
