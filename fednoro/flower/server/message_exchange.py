"""Tasks as messages: pushed to all sites at once,
answers handed over in client order as they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fednoro.core.types import Failure, Reply, Task
from fednoro.flower.records import ERROR, UnreadableError, read_reply, task_records, weight_record
from fednoro.flower.server.roster import Roster
from fednoro.methods import Method

EXPIRY = 60.0  # seconds that a message outlives its exchange


class SiteError(Exception):
    """A site raised an exception; its own log has the rest."""


class FlowerExchange:
    """Carries the tasks of one exchange to the sites and brings their answers back."""

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        facts: Callable[[], Mapping[str, str | int]],  # what goes with every task
        timeout: float,
    ) -> None:
        self.grid, self.roster, self.facts, self.timeout = grid, roster, facts, timeout

    def __call__(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        """Each client's answer, in client order."""
        return self.ask(tasks)

    def ask(
        self, tasks: Mapping[int, Task], kind: str = MessageType.TRAIN
    ) -> Iterator[Reply | Failure]:
        """As `__call__`, with messages of any type."""
        nodes = self.roster.nodes()
        pending = self._send({k: task for k, task in tasks.items() if k in nodes}, nodes, kind)
        deadline = time.monotonic() + self.timeout
        answers: dict[int, Reply | Failure] = {}
        for k in sorted(tasks):
            pause = 0.05
            while k not in answers and k in pending.values() and time.monotonic() < deadline:
                new_answers = self._pull(pending, tasks)
                answers |= new_answers
                if k not in answers:
                    time.sleep(pause)
                    pause = 0.05 if new_answers else min(1.5 * pause, 1.0)
            yield answers.pop(k) if k in answers else self._no_answer(k, k in pending.values())

    def _send(
        self, tasks: Mapping[int, Task], nodes: Mapping[int, int], kind: str
    ) -> dict[str, int]:
        """Pushes the tasks; the client behind each message."""
        facts, models = self.facts(), {id(task.weights): task.weights for task in tasks.values()}
        records = {key: weight_record(weights) for key, weights in models.items()}
        messages = {
            k: Message(
                task_records(task, k, facts, records[id(task.weights)]),
                nodes[k],
                kind,
                ttl=self.timeout + EXPIRY,
                group_id=str(task.round),
            )
            for k, task in sorted(tasks.items())
        }
        sent_ids = set(self.grid.push_messages(list(messages.values())))
        return {
            m.metadata.message_id: k
            for k, m in messages.items()
            if m.metadata.message_id in sent_ids
        }

    def _pull(
        self, pending: dict[str, int], tasks: Mapping[int, Task]
    ) -> dict[int, Reply | Failure]:
        new_answers: dict[int, Reply | Failure] = {}
        for message in self.grid.pull_messages(list(pending)):
            # Not by sender: the reply that stands in for a dead node's comes from the SuperLink.
            client = pending.pop(message.metadata.reply_to_message_id, None)
            if client is not None:
                new_answers[client] = _read_answer(client, message, tasks[client])
        return new_answers

    def _no_answer(self, client: int, was_sent: bool) -> Failure:
        return Failure(
            client, f"no answer within {self.timeout:g} s" if was_sent else "not connected"
        )


def _read_answer(client: int, message: Message, task: Task) -> Reply | Failure:
    if message.has_error():
        return Failure(client, f"no answer: {' '.join(str(message.error.reason).split())}")
    content = message.content
    if "config" in content.config_records and ERROR in content.config_records["config"]:
        reason = str(content.config_records["config"][ERROR])
        return Failure(client, reason, SiteError(reason))
    try:
        reply = read_reply(content)
    except UnreadableError as error:
        return Failure(client, f"sent a reply that cannot be read ({error})")
    if reply.client != client:
        return Failure(client, f"answered as client {reply.client}")
    if reply.weights is None:
        return reply
    weights = replace(
        reply.weights,
        values=reply.weights.values.to(task.weights.values.device),
        segments=task.weights.segments,
    )
    return replace(reply, weights=weights)
