"""Tasks and replies as Flower's records:
one flat vector for a model, small arrays and numbers beside it.

    task    arrays {values, counters}   small {NAME: float64}
            config {task, server-round, client, …}   settings {…}
    reply   arrays {values, counters}   small {NAME: float64}
            config {task, server-round, client}      metrics {…}

A reply has nothing else: weights, counts, means per class, sums over features and
metrics are all that leaves a site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fednoro.core.types import FloatArray, Reply, Task, Weights

SIZE = "num-examples"  # Flower's word for it
ERROR = "error"  # in a reply's config: the site could not do its task


class UnreadableError(ValueError):
    """A message that is not one of ours."""


def task_records(
    task: Task, client: int, facts: Mapping[str, str | int], model: ArrayRecord
) -> RecordDict:
    """What a site is sent; `model` is `weight_record(task.weights)`,
    which all messages of an exchange share.
    """
    config: dict[str, Any] = {
        "task": task.name,
        "server-round": task.round,
        "client": client,
        **facts,
    }
    return RecordDict(
        {
            "arrays": model,
            "small": _small_record(task.arrays),
            "config": ConfigRecord(config),
            "settings": ConfigRecord(dict(task.settings)),
        }
    )


def read_task(content: RecordDict) -> tuple[Task, int]:
    """The task in a message, and the number of the client that is to do it."""
    config = content.config_records["config"]
    weights = _weights(content.array_records["arrays"])
    settings: dict[str, Any] = dict(content.config_records["settings"])
    small = _small(content.array_records["small"])
    return Task(
        str(config["task"]), _integer(config["server-round"]), weights, settings, small
    ), _integer(config["client"])


def reply_records(task: Task, reply: Reply) -> RecordDict:
    """What a site sends back."""
    metrics: dict[str, int | float] = {key: float(value) for key, value in reply.metrics.items()}
    content = RecordDict(
        {
            "small": _small_record(reply.arrays),
            "metrics": MetricRecord({SIZE: reply.size, **metrics}),
            "config": ConfigRecord(
                {"task": task.name, "server-round": task.round, "client": reply.client}
            ),
        }
    )
    if reply.weights is not None:
        content["arrays"] = weight_record(reply.weights)
    return content


def failure_records(reason: str) -> RecordDict:
    """What a site sends back that could not do its task."""
    return RecordDict({"config": ConfigRecord({ERROR: reason})})


def read_reply(content: RecordDict) -> Reply:
    """The reply in a message."""
    try:
        config, metrics = content.config_records["config"], dict(content.metric_records["metrics"])
        size = _integer(metrics.pop(SIZE))
        return Reply(
            _integer(config["client"]),
            size,
            _weights(content.array_records["arrays"]) if "arrays" in content else None,
            {key: float(value) for key, value in metrics.items()},  # type: ignore[arg-type]
            _small(content.array_records["small"]),
            (str(config["task"]), _integer(config["server-round"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def weight_record(weights: Weights) -> ArrayRecord:
    """A model as one flat vector, and its counters."""
    parts = {"values": weights.values, "counters": weights.counters}
    return ArrayRecord(
        {name: Array(tensor.detach().cpu().numpy()) for name, tensor in parts.items()}
    )


def _weights(record: ArrayRecord) -> Weights:
    values, counters = (_array(record[name]) for name in ("values", "counters"))
    if (
        values.dtype != np.float32
        or counters.dtype != np.int64
        or values.ndim != 1
        or counters.ndim != 1
    ):
        raise UnreadableError(
            f"a model of {values.dtype} {values.shape} and {counters.dtype} {counters.shape}"
        )
    return Weights(torch.from_numpy(values), torch.from_numpy(counters))


def _small_record(arrays: Mapping[str, FloatArray]) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(np.asarray(array, dtype=np.float64)) for name, array in arrays.items()}
    )


def _small(record: ArrayRecord) -> dict[str, FloatArray]:
    return {name: _array(array).astype(np.float64) for name, array in record.items()}


def _array(array: Array) -> Any:
    return np.array(array.numpy())  # a copy that may be written to


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise UnreadableError(f"{value!r} is not a whole number")
    return value
