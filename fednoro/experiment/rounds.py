"""The only round loop: plan → work → fold, until all rounds are done.

It knows neither files nor displays. It yields a `Turn` after every exchange, and whoever drives it
records, shows, saves or stops.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fednoro.core.metrics import per_class_recall
from fednoro.core.seeds import generator
from fednoro.core.types import (
    Clients,
    Failure,
    FedNoRoWarning,
    IntArray,
    Replies,
    Reply,
    State,
    Task,
    Weights,
)
from fednoro.detection.calibrated import MOMENTS
from fednoro.methods import Method


class Exchange(Protocol):
    """Whatever carries tasks to clients and brings their answers back in client order."""

    def __call__(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]: ...


@dataclass(frozen=True)
class Evaluation:
    """A model on the test set."""

    confusion: IntArray  # C×C, rows are true classes
    loss: float
    validation_bacc: float | None = None  # on the validation part, where there is one

    @property
    def recall(self) -> list[float]:
        return [float(value) for value in per_class_recall(self.confusion)]

    @property
    def bacc(self) -> float:
        """Mean recall over the classes that the test set has."""
        return float(np.nanmean(self.recall))


@dataclass(frozen=True)
class Answer:
    """One line of the ledger: what became of one client in one exchange."""

    client: int
    status: str  # ok, failed, dropped
    size: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Turn:
    """One finished exchange."""

    state: State
    task: str
    answers: tuple[Answer, ...]
    seconds: float
    warnings: tuple[str, ...]
    evaluation: Evaluation | None  # where the exchange completed a round


def play(
    method: Method,
    state: State,
    exchange: Exchange,
    clients: Sequence[int] | Callable[[], Sequence[int]],
    evaluate: Callable[[Weights], Evaluation],
    participation: float = 1.0,
    failures: float = 0.0,
) -> Iterator[Turn]:
    """Plays the remaining rounds from `state`;
    `clients` may be asked for before every exchange, as some join late.
    """
    errors: dict[int, Exception] = {}  # since anybody last answered
    while state.round < state.rounds:
        client_ids = tuple(clients() if callable(clients) else clients)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            tasks = method.plan(state, Clients(client_ids, draw(client_ids, participation, state)))
            if not tasks:
                raise RuntimeError(
                    f"{type(method).__name__}.plan asked nobody in round {state.round + 1}"
                )
            name = next(iter(tasks.values())).name
            sent_tasks = {
                k: task for k, task in tasks.items() if not _drops_out(state, name, k, failures)
            }
            ledger = [
                Answer(k, "dropped", reason="simulated failure")
                for k in tasks
                if k not in sent_tasks
            ]
            stream = _accepted_replies(
                exchange(method, sent_tasks), Screen(sent_tasks, state.classes), ledger
            )
            next_state = method.fold(state, Replies(name, tuple(tasks), stream))
            for _ in stream:
                pass  # a fold that stopped early must not leave work undone
        for w in caught_warnings:
            if not issubclass(w.category, FedNoRoWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        errors = {} if any(answer.status == "ok" for answer in ledger) else errors | _errors(ledger)
        if errors.keys() >= set(client_ids):
            # Some failing clients are the federation's ordinary life;
            # all of them, and no answer between, are a defect.
            raise next(iter(errors.values()))
        evaluation = evaluate(next_state.model) if next_state.round > state.round else None
        state = next_state
        answers = tuple(sorted(ledger, key=lambda answer: answer.client))
        messages = tuple(
            str(w.message) for w in caught_warnings if issubclass(w.category, FedNoRoWarning)
        )
        yield Turn(state, name, answers, time.perf_counter() - start, messages, evaluation)


def draw(clients: Sequence[int], participation: float, state: State) -> tuple[int, ...]:
    """Who trains in the coming round: at least one client, the same for the same seed."""
    if participation >= 1:
        return tuple(clients)
    count = max(1, round(participation * len(clients)))
    rng = generator(state.seed, "participation", state.round)
    return tuple(sorted(int(k) for k in rng.choice(np.array(clients), count, replace=False)))


@dataclass(frozen=True)
class _FailedAnswer(Answer):
    error: Exception | None = None


class Screen:
    """Tells which of the replies to one exchange can be folded:
    a site may be broken, outdated or hostile.
    """

    def __init__(self, tasks: Mapping[int, Task], classes: int) -> None:
        self.tasks, self.classes = tasks, classes
        self._answered_clients: set[int] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def fault(self, reply: Reply) -> str | None:
        """What is wrong with a reply, in words that follow the client's name;
        None where nothing is.
        """
        task = self.tasks.get(reply.client)
        if task is None:
            return "answered without having been asked"
        if reply.client in self._answered_clients:
            return "answered twice"
        if reply.answers not in (None, (task.name, task.round)):
            name, number = reply.answers or ("", 0)
            return (
                f"answered {name} of round {number + 1}, "
                f"asked was {task.name} of round {task.round + 1}"
            )
        if not reply.size > 0:
            return f"says that it has {reply.size} images"
        fault = self._array_fault(reply)
        if fault is None and reply.weights is not None:
            fault = _model_fault(reply.weights, task.weights, reply.extent)
        if fault is None:
            self._answered_clients.add(reply.client)
            self._shapes |= {name: np.shape(array) for name, array in reply.arrays.items()}
        return fault

    def _array_fault(self, reply: Reply) -> str | None:
        """Arrays are by class, and of the same shape at all clients;
        who adds up moments compares them itself.
        """
        if self.tasks[reply.client].name == MOMENTS:
            return None
        for name, array in reply.arrays.items():
            shape = np.shape(array)
            expected = self._shapes.get(name, (self.classes, *shape[1:]))
            if shape != expected:
                return f"sent {name} of shape {shape}, expected was {expected}"
        return None


def _model_fault(
    weights: Weights, reference: Weights, extent: tuple[float, float, float] | None
) -> str | None:
    values, counters = weights.values, weights.counters
    if values.shape != reference.values.shape or values.dtype != reference.values.dtype:
        return (
            f"sent a model of {len(values)} values ({values.dtype}), "
            f"expected were {len(reference.values)}"
        )
    low, high, count = extent or weights.extent().tolist()
    if counters.shape != reference.counters.shape or count < 0:
        return "sent a model with other counters than it received"
    return (
        None if math.isfinite(low) and math.isfinite(high) else "sent weights that are not finite"
    )


def _accepted_replies(
    stream: Iterator[Reply | Failure], screen: Screen, ledger: list[Answer]
) -> Iterator[Reply]:
    for item in stream:
        if isinstance(item, Reply) and (fault := screen.fault(item)) is not None:
            item = Failure(item.client, fault)
        if isinstance(item, Failure):
            warnings.warn(
                f"client {item.client} is left out: {item.reason}", FedNoRoWarning, stacklevel=2
            )
            ledger.append(
                _FailedAnswer(item.client, "failed", reason=item.reason, error=item.error)
            )
            continue
        metrics = {key: float(value) for key, value in item.metrics.items()}
        ledger.append(Answer(item.client, "ok", item.size, metrics))
        yield item


def _drops_out(state: State, task: str, client: int, failures: float) -> bool:
    return failures > 0 and bool(
        generator(state.seed, f"failure.{task}", state.round, client).random() < failures
    )


def _errors(ledger: Sequence[Answer]) -> dict[int, Exception]:
    return {
        a.client: a.error for a in ledger if isinstance(a, _FailedAnswer) and a.error is not None
    }
