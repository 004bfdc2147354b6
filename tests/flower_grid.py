"""Flower without processes: a Grid in memory that turns every message into bytes and
back, and calls the ClientApp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fednoro.models import SmallCNN

# what was asked and answered, to what arrives
Tamper = Callable[[Message, Message], Message | None]


def network(channels: int, classes: int) -> nn.Module:
    """A small network with BatchNorm, for `model=flower_grid:network`."""
    return SmallCNN(channels, classes, 2)


class MemoryGrid(Grid):
    """Nodes by id, each with its node-config; `sent` and `received` keep every
    message as its bytes told it.

    `tamper` may change or swallow a reply. Nodes may be taken out of
    `nodes` or put into it at any time.
    """

    def __init__(
        self, app: ClientApp, nodes: Mapping[int, Mapping[str, Any]], tamper: Tamper | None = None
    ) -> None:
        self.app, self.nodes, self.tamper = app, {k: dict(v) for k, v in nodes.items()}, tamper
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.bytes = {"sent": 0, "received": 0}
        self._replies: dict[str, Message] = {}
        # What a process of Flower's knows of itself before it calls an app.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            key = message.object_id
            message.metadata.__dict__["_message_id"] = key
            arrived = self._carried(message, "sent")
            arrived.metadata.__dict__["_message_id"] = key
            self.sent.append(arrived)
            pushed.append(key)
            reply = self._answer(arrived)
            if reply is not None:
                self._replies[key] = reply
        return pushed

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return Message(Error(3, "node unavailable"), reply_to=message)
        reply: Message | None = self._carried(self.app(message, self.context(node)), "received")
        if self.tamper is not None and reply is not None:
            reply = self.tamper(message, reply)
        if reply is not None:
            self.received.append(reply)
        return reply

    def context(self, node: int) -> Context:
        """What the node's app is told besides the message."""
        return Context(
            run_id=1, node_id=node, node_config=self.nodes[node], state=RecordDict(), run_config={}
        )

    def _carried(self, message: Message, way: str) -> Message:
        objects = get_all_nested_objects(message)
        contents = {key: value.deflate() for key, value in objects.items()}
        self.bytes[way] += sum(map(len, contents.values()))
        inflated = inflate_object_from_contents(message.object_id, contents)
        assert isinstance(inflated, Message)
        return inflated

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        # In any order but the one in which they were asked.
        return [self._replies.pop(key) for key in sorted(set(message_ids)) if key in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))
