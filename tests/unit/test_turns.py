"""Work that takes turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import pytest

from fednoro.engine.turns import Turns, UnansweredError, meet


def adding(numbers: Sequence[int], log: list[str], name: str) -> Turns:
    """Asks for each number and adds up the answers."""

    def work() -> int:
        total = 0
        for number in numbers:
            log.append(f"{name} asks {number}")
            total += turns.ask(number)
        log.append(f"{name} ends")
        return total

    turns = Turns(work)
    return turns


def test_requests_of_all_who_wait_are_met_together_and_nobody_runs_beside_another() -> None:
    log: list[str] = []
    a, b, c = adding([1, 2], log, "a"), adding([3], log, "b"), adding([], log, "c")
    asked: list[list[int]] = []

    def answer(requests: Sequence[int]) -> list[int]:
        asked.append(list(requests))
        return [10 * request for request in requests]

    meet([a, b, c], answer)
    assert asked == [[1, 3], [2]]
    assert [turns.result for turns in (a, b, c)] == [30, 30, 0]
    assert log == ["a asks 1", "b asks 3", "c ends", "a asks 2", "b ends", "a ends"]


def test_an_exception_as_an_answer_is_raised_where_it_was_asked_for() -> None:
    log: list[str] = []
    a, b = adding([1], log, "a"), adding([2, 3], log, "b")
    meet([a, b], lambda requests: [ValueError("no") if request == 1 else request for request in requests])
    assert isinstance(a.error, ValueError) and a.result is None
    assert b.result == 5 and b.error is None


def test_an_error_of_the_one_who_answers_ends_all_work_and_is_raised() -> None:
    log: list[str] = []
    everybody = [adding([1], log, "a"), adding([2], log, "b")]

    def answer(_: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meet(everybody, answer)
    for turns in everybody:
        turns._thread.join(10)
        assert turns.done and isinstance(turns.error, UnansweredError)


def test_an_interruption_while_work_runs_leaves_no_thread_behind() -> None:
    """Ctrl-C reaches whoever waits for the work; it may be anywhere, and may not give up at once."""
    started, go = threading.Event(), threading.Event()

    def stubborn() -> None:
        started.set()
        go.wait(10)
        for _ in range(2):
            with contextlib.suppress(UnansweredError):
                turns.ask(1)

    turns = Turns(stubborn)
    others = [adding([1], [], "a"), adding([], [], "b")]

    def interrupted(answer: object = None) -> None:
        turns._go.release()
        started.wait(10)
        raise KeyboardInterrupt

    turns.go_on = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        meet([others[0], turns, others[1]], lambda requests: list(requests))
    go.set()
    for one in (turns, *others):
        one._thread.join(10)
        assert not one._thread.is_alive()
