"""Work of several clients that takes turns: each goes on until it asks for something, and waits for the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class UnansweredError(Exception):
    """Whoever was to answer has failed."""


class Turns:
    """One client's work, in a thread that only runs while the others wait: their requests can be met together."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.request: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self._cancelled = False
        self._answer: Any = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                self.result = work()
        except BaseException as error:  # whatever it is, the thread that waits must hear of it
            self.error = error
        self.done = True
        self._paused.release()

    def go_on(self, answer: Any = None) -> None:
        """Lets the work run until it asks or ends."""
        self._answer, self.request = answer, None
        self._go.release()
        self._paused.acquire()
        if self.done:
            self._thread.join()

    def cancel(self) -> None:
        """Ends the work: from now on nothing that it asks for is answered."""
        self._cancelled = True
        self._go.release()

    def ask(self, request: Any) -> Any:
        """Called by the work: waits for the answer. An exception as an answer is raised here."""
        if not self._cancelled:
            self.request = request
            self._paused.release()
            self._go.acquire()
        if self._cancelled:
            raise UnansweredError
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


def meet(everybody: Sequence[Turns], answer: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Runs all work to its end; `answer` gets the requests of all who wait at a time."""
    try:
        for turns in everybody:
            turns.go_on()
        while waiting := [turns for turns in everybody if not turns.done]:
            answers = answer([turns.request for turns in waiting])
            for turns, said in zip(waiting, answers, strict=True):
                turns.go_on(said)
    except BaseException:  # Ctrl-C among them
        for turns in everybody:
            turns.cancel()
        raise
