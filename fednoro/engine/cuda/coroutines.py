"""Work of several clients that takes turns:
each goes on until it asks for something, and waits for the answer.

Methods are plain functions, which are left in the middle and entered again by greenlets: threads
could do that as well, but to wake one takes longer than what most clients do in their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from greenlet import greenlet


class UnansweredError(Exception):
    """Whoever was to answer has failed."""


class Coroutine:
    """One client's work, which only runs while the others wait:
    their requests can be met together.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.request: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._cancelled = False
        self._work: Any = greenlet(lambda _: self._run(work))

    @property
    def done(self) -> bool:
        return self._work is None

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            self.error = error

    def resume(self, answer: Any = None) -> None:
        """Lets the work run until it asks or ends."""
        self.request = None
        self._work.switch(answer)
        if self._work.dead:
            # It would keep this object, and with it the result, until garbage is collected.
            self._work = None

    def cancel(self) -> None:
        """Ends the work: from now on nothing that it asks for is answered."""
        self._cancelled = True
        if self._work:  # it has begun
            self._work.switch()
        self._work = None

    def ask(self, request: Any) -> Any:
        """Called by the work: waits for the answer. An exception as an answer is raised here."""
        answer = None
        if not self._cancelled:
            self.request = request
            answer = self._work.parent.switch()
        if self._cancelled:
            raise UnansweredError
        if isinstance(answer, BaseException):
            raise answer
        return answer


def run_all(
    coroutines: Sequence[Coroutine], answer_all: Callable[[Sequence[Any]], Sequence[Any]]
) -> None:
    """Runs all work to its end; `answer_all` gets the requests of all who wait at a time."""

    def resume(coroutine: Coroutine, answer: Any = None) -> None:
        coroutine.resume(answer)
        if coroutine.error is not None and not isinstance(coroutine.error, Exception):  # Ctrl-C
            raise coroutine.error

    try:
        for coroutine in coroutines:
            resume(coroutine)
        while waiting := [coroutine for coroutine in coroutines if not coroutine.done]:
            answers = answer_all([coroutine.request for coroutine in waiting])
            for coroutine, answer in zip(waiting, answers, strict=True):
                resume(coroutine, answer)
    except BaseException:
        for coroutine in coroutines:
            coroutine.cancel()
        raise
