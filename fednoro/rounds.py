"""The only round loop: plan → work → fold, until all rounds are done.

It knows neither files nor displays. It yields a `Turn` after every exchange, and whoever drives it
records, shows, saves or stops.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from fednoro.methods import Method
from fednoro.metrics import per_class_recall
from fednoro.seeds import generator
from fednoro.types import Clients, Failure, FedNoRoWarning, IntArray, Replies, Reply, State, Task, Weights


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
    clients: Sequence[int],
    evaluate: Callable[[Weights], Evaluation],
    participation: float = 1.0,
    failures: float = 0.0,
) -> Iterator[Turn]:
    """Plays the remaining rounds from `state`."""
    raised: dict[int, Exception] = {}  # since anybody last answered
    while state.round < state.rounds:
        began = time.perf_counter()
        tasks = method.plan(state, Clients(tuple(clients), draw(clients, participation, state)))
        if not tasks:
            raise RuntimeError(f"{type(method).__name__}.plan asked nobody in round {state.round + 1}")
        name = next(iter(tasks.values())).name
        present = {k: task for k, task in tasks.items() if not _drops_out(state, name, k, failures)}
        ledger = [Answer(k, "dropped", reason="simulated failure") for k in tasks if k not in present]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream = _screened(exchange(method, present), ledger)
            after = method.fold(state, Replies(name, tuple(tasks), stream))
            for _ in stream:
                pass  # a fold that stopped early must not leave work undone
        for w in caught:
            if not issubclass(w.category, FedNoRoWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        raised = {} if any(answer.status == "ok" for answer in ledger) else raised | _errors(ledger)
        if raised.keys() >= set(clients):
            # Some failing clients are the federation's ordinary life; all of them, and no answer between, are a defect.
            raise next(iter(raised.values()))
        evaluation = evaluate(after.model) if after.round > state.round else None
        state = after
        answers = tuple(sorted(ledger, key=lambda answer: answer.client))
        messages = tuple(str(w.message) for w in caught if issubclass(w.category, FedNoRoWarning))
        yield Turn(state, name, answers, time.perf_counter() - began, messages, evaluation)


def draw(clients: Sequence[int], participation: float, state: State) -> tuple[int, ...]:
    """Who trains in the coming round: at least one client, the same for the same seed."""
    if participation >= 1:
        return tuple(clients)
    count = max(1, round(participation * len(clients)))
    rng = generator(state.seed, "participation", state.round)
    return tuple(sorted(int(k) for k in rng.choice(np.array(clients), count, replace=False)))


@dataclass(frozen=True)
class _Unanswered(Answer):
    error: Exception | None = None


def _screened(stream: Iterator[Reply | Failure], ledger: list[Answer]) -> Iterator[Reply]:
    for item in stream:
        if isinstance(item, Reply) and item.weights is not None and not _finite(item.weights):
            item = Failure(item.client, "sent weights that are not finite")
        if isinstance(item, Failure):
            warnings.warn(f"client {item.client} is left out: {item.reason}", FedNoRoWarning, stacklevel=2)
            ledger.append(_Unanswered(item.client, "failed", reason=item.reason, error=item.error))
            continue
        metrics = {key: float(value) for key, value in item.metrics.items()}
        ledger.append(Answer(item.client, "ok", item.size, metrics))
        yield item


def _finite(weights: Weights) -> bool:
    return bool(torch.isfinite(torch.stack(torch.aminmax(weights.values))).all())  # a NaN comes through as both


def _drops_out(state: State, task: str, client: int, failures: float) -> bool:
    return failures > 0 and bool(generator(state.seed, f"failure.{task}", state.round, client).random() < failures)


def _errors(ledger: Sequence[Answer]) -> dict[int, Exception]:
    return {a.client: a.error for a in ledger if isinstance(a, _Unanswered) and a.error is not None}
