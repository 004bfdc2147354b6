"""FedNoRo as a strategy of Flower's Message API,
for an existing ServerApp and a torch model of any kind.

    strategy = FedNoRo(classes=10, warmup=10)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=50)

The ClientApp answers `train` messages with its arrays and "num-examples", and `query.score`
messages with `fednoro.flower.score`. The rounds are those of `fednoro.methods.FedNoRo`;
only the records are Flower's.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    Replies,
    Reply,
    State,
    Task,
    UserError,
    Weights,
)
from fednoro.detection.verdicts import verdicts
from fednoro.experiment.rounds import Screen, draw
from fednoro.flower.own_app.client_functions import LAM, SCORE, TEMPERATURE
from fednoro.flower.records import SIZE
from fednoro.methods import FedNoRo as Method


class FedNoRo(FedAvg):
    """Finds noisy sites after some rounds of training,
    then distils on them and aggregates by distance.

    Args:
        classes: how many classes there are.
        warmup: rounds before the sites are judged.
        lam_max: largest weight of distillation against the given labels.
        ramp_end: rounds after which that weight is reached.
        temperature: of the teacher.
        behaviour: as the paper says, or as its published code does.
        covariance: shape of the mixture's components.
        seed: of the mixture and of the sample of sites.
        min_available_nodes: how many nodes to wait for.
        fraction_train: share of the sites that train in each round.
        fraction_evaluate: share of the sites that evaluate after each round.
    """

    def __init__(
        self,
        classes: int,
        warmup: int = 10,
        lam_max: float = 0.8,
        ramp_end: int | None = None,
        temperature: float = 0.8,
        behaviour: Literal["paper", "reference"] = "paper",
        covariance: Literal["full", "tied", "diag", "spherical"] = "full",
        seed: int = 0,
        min_available_nodes: int = 2,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
    ) -> None:
        super().__init__(fraction_train, fraction_evaluate, min_available_nodes=min_available_nodes)
        self.method = Method(
            warmup=warmup,
            lam_max=lam_max,
            ramp_end=ramp_end,
            temperature=temperature,
            behaviour=behaviour,
            covariance=covariance,
        )
        self.classes, self.seed = classes, seed
        self._numbers: dict[int, int] = {}  # node ids, in the order in which they were seen
        self._timeout = 3600.0
        self._state: State | None = None
        self._form: Form | None = None
        self._tasks: dict[int, Task] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """As every strategy's `start`."""
        self.method.check(num_rounds)
        self._form, self._timeout, self._numbers = Form(initial_arrays), timeout, {}
        self._state = State(
            self._form.weights(initial_arrays), 0, num_rounds, self.classes, self.seed
        )
        return super().start(grid, initial_arrays, num_rounds, timeout, *args, **kwargs)

    @property
    def noisy(self) -> dict[int, bool]:
        """Who was judged noisy so far, by node id."""
        noisy_by_number = {} if self._state is None else verdicts(self._state)
        return {
            node: noisy_by_number[k] for node, k in self._numbers.items() if k in noisy_by_number
        }

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks for scores first where some are due, then for training."""
        state, form = self._state_and_form()
        state = replace(state, model=form.weights(arrays), round=server_round - 1)
        nodes = self._wait(grid)
        numbers = tuple(sorted(nodes))
        clients = Clients(numbers, draw(numbers, self.fraction_train, state))
        tasks = self.method.plan(state, clients)
        while next(iter(tasks.values())).name == "score":
            state = self._judge(state, tasks, nodes, config, grid)
            tasks = self.method.plan(state, clients)
        self._state, self._tasks = state, tasks
        return [
            self._message(task, nodes[k], MessageType.TRAIN, config, arrays)
            for k, task in sorted(tasks.items())
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Averages by size in the warm-up, later by distance to the nearest clean site."""
        state, form = self._state_and_form()
        answers = self._usable_replies(replies, self._tasks)
        new_state = self._fold(state, "train", answers, self._tasks)
        self._state = new_state
        if not answers:
            return None, None
        losses = [
            (r.size, float(r.metrics[key])) for r in answers for key in r.metrics if "loss" in key
        ]
        total = sum(size for size, _ in losses)
        metrics = MetricRecord(
            {"train_loss": sum(n * value for n, value in losses) / total} if total else {}
        )
        return form.record(new_state.model), metrics

    def summary(self) -> None:
        """Says what it is."""
        log(INFO, "\t└──> %s", self.method)

    # Inside

    def _state_and_form(self) -> tuple[State, Form]:
        if self._state is None or self._form is None:
            raise UserError(
                "FedNoRo has not been started: call start(grid, initial_arrays, num_rounds)"
            )
        return self._state, self._form

    def _wait(self, grid: Grid) -> dict[int, int]:
        """The nodes that are there, by the numbers they keep."""
        while len(nodes := sorted(grid.get_node_ids())) < self.min_available_nodes:
            log(INFO, "%d of %d nodes are connected: waiting", len(nodes), self.min_available_nodes)
            time.sleep(1)
        for node in nodes:
            self._numbers.setdefault(node, len(self._numbers))
        return {self._numbers[node]: node for node in nodes}

    def _judge(
        self,
        state: State,
        tasks: Mapping[int, Task],
        nodes: Mapping[int, int],
        config: ConfigRecord,
        grid: Grid,
    ) -> State:
        _, form = self._state_and_form()
        arrays = form.record(next(iter(tasks.values())).weights)
        messages = [
            self._message(task, nodes[k], SCORE, config, arrays)
            for k, task in sorted(tasks.items())
        ]
        replies = grid.send_and_receive(messages, timeout=self._timeout)
        new_state = self._fold(state, "score", self._usable_replies(replies, tasks), tasks)
        if "detection" in new_state.memo:
            log(INFO, "after round %d: %s", new_state.round, new_state.memo["detection"]["reason"])
        return new_state

    def _message(
        self, task: Task, node: int, kind: str, config: ConfigRecord, arrays: ArrayRecord
    ) -> Message:
        site_config = {**config, "server-round": task.round + 1, **task.settings}
        if LAM in site_config:
            site_config[TEMPERATURE] = self.method.temperature
        content = RecordDict(
            {self.arrayrecord_key: arrays, self.configrecord_key: ConfigRecord(site_config)}
        )
        return Message(content, node, kind)

    def _usable_replies(self, replies: Iterable[Message], tasks: Mapping[int, Task]) -> list[Reply]:
        """The usable answers in the sites' order; each other one has a line in the log."""
        _, form = self._state_and_form()
        screen, answers = Screen(tasks, self.classes), []
        for message in sorted(replies, key=lambda m: self._numbers.get(m.metadata.src_node_id, -1)):
            node = message.metadata.src_node_id
            try:
                reply = _reply(self._numbers.get(node, -1), message, form)
                fault = screen.fault(reply)
            except (KeyError, TypeError, ValueError) as error:
                fault = str(error)
            if fault is not None:
                log(WARNING, "node %d is left out: %s", node, fault)
            else:
                answers.append(reply)
        return answers

    def _fold(
        self, state: State, name: str, answers: list[Reply], tasks: Mapping[int, Task]
    ) -> State:
        def stream() -> Iterator[Reply]:
            yield from answers

        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always", FedNoRoWarning)
            new_state = self.method.fold(state, Replies(name, tuple(tasks), stream()))
        for warning in caught_warnings:
            log(WARNING, "%s", warning.message)
        return new_state


class Form:
    """How a model's named arrays lie in one vector:
    floating-point ones in `values`, the others in `counters`.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        numpy_arrays = {name: array.numpy() for name, array in arrays.items()}
        self.arrays = {name: (array.dtype, array.shape) for name, array in numpy_arrays.items()}
        self.floats = [
            name for name, (dtype, _) in self.arrays.items() if np.issubdtype(dtype, np.floating)
        ]
        self.others = [name for name in self.arrays if name not in self.floats]
        if not self.floats:
            raise UserError("the model has no floating-point arrays")
        self.segments = tuple(math.prod(self.arrays[name][1]) for name in self.floats)

    def weights(self, arrays: ArrayRecord) -> Weights:
        """The record as one vector; raises where it is another model's."""
        numpy_arrays = {name: array.numpy() for name, array in arrays.items()}
        if {name: array.shape for name, array in numpy_arrays.items()} != {
            n: shape for n, (_, shape) in self.arrays.items()
        }:
            raise ValueError("it sent arrays of other names or shapes than the model's")
        values = np.concatenate(
            [numpy_arrays[name].ravel().astype(np.float32) for name in self.floats]
        )
        counters = [numpy_arrays[name].ravel().astype(np.int64) for name in self.others]
        all_counters = np.concatenate(counters) if counters else np.empty(0, np.int64)
        return Weights(torch.from_numpy(values), torch.from_numpy(all_counters), self.segments)

    def record(self, weights: Weights) -> ArrayRecord:
        """The vector as the record that it came from."""
        flat = {True: weights.values.numpy(), False: weights.counters.numpy()}
        start, named_arrays = {True: 0, False: 0}, dict[str, Array]()
        for name in (*self.floats, *self.others):
            is_float = name in self.floats
            dtype, shape = self.arrays[name]
            size = math.prod(shape)
            part = flat[is_float][start[is_float] : start[is_float] + size]
            start[is_float] += size
            named_arrays[name] = Array(part.astype(dtype).reshape(shape))
        return ArrayRecord({name: named_arrays[name] for name in self.arrays})


def _reply(client: int, message: Message, form: Form) -> Reply:
    if message.has_error():
        raise ValueError(f"no answer: {message.error.reason}")
    content = message.content
    metrics = dict(next(iter(content.metric_records.values())))
    size = metrics.pop(SIZE)
    if not isinstance(size, int | float):
        raise TypeError(f"its {SIZE} is {size!r}")
    small = content.array_records.get("small", ArrayRecord())
    model = [record for name, record in content.array_records.items() if name != "small"]
    return Reply(
        client,
        int(size),
        form.weights(model[0]) if model else None,
        {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)},
        {name: array.numpy().astype(np.float64) for name, array in small.items()},
    )
