"""The ClientApp: one message is one task, done with the site's own data.

A task that fails is answered with the type of the exception alone: its text may name
files or values, and stays in the site's own log. An audit's last task also leaves the
site's letter on its own disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from logging import ERROR, INFO, WARNING
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log

from fednoro.audit.audit_method import Audit
from fednoro.core.metrics import confusion
from fednoro.core.types import Failure, FedNoRoWarning, Reply, Task, UserError, Weights
from fednoro.detection.score_privacy import protect
from fednoro.flower.records import SIZE, failure_records, read_task, reply_records
from fednoro.flower.site.site_memory import Memory
from fednoro.flower.site.station import (
    RefusedError,
    SiteOptions,
    Station,
    load_data,
    read_site,
    station,
)
from fednoro.methods.fednoro_plus import CORRECTED_FROM, SOFT

app = ClientApp()


class Node:
    """Who this node is, by its node-config."""

    def __init__(self, context: Context) -> None:
        node_config = context.node_config
        self.simulated = "site" not in node_config
        if self.simulated and "partition-id" not in node_config:
            raise UserError(
                "node-config names neither a site (site=, config=) nor a partition (partition-id=)"
            )
        self.name = str(node_config["partition-id"] if self.simulated else node_config["site"])
        self.partitions = int(node_config.get("num-partitions", 0)) if self.simulated else 0
        self._path = None if self.simulated else node_config.get("config")

    def options(self) -> SiteOptions | None:
        if self.simulated:
            return None
        if self._path is None:
            raise UserError(f"node-config of site {self.name} has no config=: name its site.yaml")
        return read_site(str(self._path))


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Who is there: the site's name, classes, image shape and version."""
    return _answer(message, context, _hello)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A method's task, or another one that ends in weights, counts or means."""
    return _answer(message, context, _work)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """What a model is worth on the part of the data that the site keeps for that:
    confusion counts.
    """
    return _answer(message, context, _evaluate)


def _answer(
    message: Message, context: Context, action: Callable[[RecordDict, Node], RecordDict]
) -> Message:
    simulated = True
    try:
        node = Node(context)
        simulated = node.simulated
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            content = action(message.content, node)
        for warning in caught_warnings:
            if issubclass(warning.category, FedNoRoWarning):
                log(WARNING, "%s", warning.message)
    except Exception as error:
        log(ERROR, "this site could not do what it was asked: %s", error, exc_info=error)
        error_type = type(error).__name__
        open_to_all = simulated or isinstance(error, RefusedError)
        content = failure_records(
            f"{error_type}: {error}" if open_to_all else f"{error_type} (see the site's log)"
        )
    return Message(content, reply_to=message)


def _hello(_: RecordDict, node: Node) -> RecordDict:
    facts: dict[str, str | int | bool | list[str] | list[int]] = {
        "site": node.name,
        "simulated": node.simulated,
        "partitions": node.partitions,
        "version": version("fednoro"),
    }
    size = 0
    if (options := node.options()) is not None:
        dataset = load_data(options)
        size = len(dataset)
        facts |= {
            "classes": list(dataset.classes),
            "shape": [int(side) for side in dataset.images.shape[1:]],
        }
    return RecordDict({"config": ConfigRecord(dict(facts)), "metrics": MetricRecord({SIZE: size})})


def _task_and_station(
    content: RecordDict, node: Node
) -> tuple[Task, int, Station, SiteOptions | None]:
    task, number = read_task(content)
    options = node.options()
    order = str(content.config_records["config"]["order"])
    if node.simulated:
        return task, number, station(order, None, "", None), None
    return task, number, station(order, options, node.name, number), options


def _work(content: RecordDict, node: Node) -> RecordDict:
    task, number, place, options = _task_and_station(content, node)
    client, method, engine = place.client(number), place.method, place.engine
    task = replace(task, weights=_with_segments(task.weights, engine.net.segments))
    if task.name == "recalibrate":
        return reply_records(task, _recalibrate(task, place, number))
    facts = content.config_records["config"]
    clock, oldest = int(str(facts["clock"])), int(str(facts["oldest"]))
    root = Path(str(facts["memory"]) if options is None else options.memory).expanduser()
    memory = Memory(root, str(facts["run"]), number)
    old_memory = memory.recall(clock)
    if isinstance(method, Audit) and method.run:
        run_memory = Memory(root, method.run, number).newest()  # by that run
        old_memory |= {
            name: run_memory[name] for name in (SOFT, CORRECTED_FROM) if name in run_memory
        }
    client.memory.clear()
    client.memory.update(old_memory)
    engine.serve([client])
    site_task = task
    if options is not None:
        method, site_task = protect(method, task, options.protection)
    answer = next(iter(engine.exchange(method, {number: site_task})))
    if isinstance(answer, Failure):
        raise answer.error or RuntimeError(answer.reason)
    if any(old_memory.get(name) is not value for name, value in client.memory.items()):
        memory.keep(clock, client.memory, oldest)
    if options is not None and isinstance(method, Audit) and task.name == "joint":
        from fednoro.flower.site.local_letter import (
            leave_letter,  # late: every task is a process of its own
        )

        letter = leave_letter(root, str(facts["run"]), client, place.dataset, method)
        log(INFO, "the images to look at are in %s, which nobody else has", letter)
    return reply_records(task, answer)


def _with_segments(weights: Weights, segments: tuple[int, ...]) -> Weights:
    if len(weights.values) != sum(segments):
        raise UserError(
            f"a model of {len(weights.values)} values was sent, this network has {sum(segments)}"
        )
    return Weights(weights.values, weights.counters, segments)


def _recalibrate(task: Task, place: Station, number: int) -> Reply:
    """The received weights with BatchNorm's statistics from this site's images;
    as received where it has one.
    """
    client = place.client(number)
    if len(client.index) < 2:
        return Reply(number, len(client.index))
    return Reply(number, len(client.index), place.engine.recalibrate(task.weights, client))


def _evaluate(content: RecordDict, node: Node) -> RecordDict:
    task, number, place, _ = _task_and_station(content, node)
    part, classes = place.held_out, len(place.dataset.classes)
    if not len(part):
        empty = torch.zeros(classes, classes).double().numpy()
        return reply_records(
            task, Reply(number, 0, metrics={"loss": 0.0}, arrays={"confusion": empty})
        )
    logits = place.engine.logits(task.weights, part).float().cpu()
    truth = torch.from_numpy(place.dataset.labels[part])
    counts = confusion(truth.numpy(), logits.argmax(1).numpy(), classes).astype("float64")
    loss = float(F.cross_entropy(logits, truth))
    return reply_records(
        task, Reply(number, len(part), metrics={"loss": loss}, arrays={"confusion": counts})
    )
