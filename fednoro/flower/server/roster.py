"""Which sites there are:
their numbers, which stay, and the Flower nodes behind them, which may change.

A node says who it is when it is asked (a query, once per node). Sites are numbered by name at the
start; who comes later gets the next number. The numbers are kept in sites.json, because clients'
random draws depend on them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fednoro.core.files import write_json
from fednoro.core.types import UserError
from fednoro.experiment.run_folder.run_files import RunFolder
from fednoro.flower.records import ERROR
from fednoro.flower.server.run_config import Deployment

# Seconds after which a node that was refused is asked again: its site may have been put right.
ASK_AGAIN_AFTER = 60.0
# Class names, and height, width and channels of the images.
Kind = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Visitor:
    """What a node said about itself."""

    node: int
    site: str
    simulated: bool
    partitions: int
    version: str
    kind: Kind | None  # simulated sites have the coordinator's

    @property
    def order(self) -> tuple[int, str]:
        return (int(self.site), "") if self.simulated else (0, self.site)


class Roster:
    """The sites of one run."""

    def __init__(
        self,
        grid: Grid,
        folder: RunFolder,
        options: Deployment,
        say: Callable[[str], None],
        strict: bool = False,
    ) -> None:
        self.grid, self.folder, self.options, self.say = grid, folder, options, say
        # In a simulation, a node that is refused is a mistake that ends the run.
        self.strict = strict
        self.sites: list[str] = []  # the position is the client's number
        self.kind: Kind | None = None
        self._queries: dict[str, tuple[int, float]] = {}  # message id: node and when
        self._visitors: dict[int, Visitor] = {}
        self._refusal_times: dict[int, float] = {}  # nodes, and when
        self._node_of: dict[str, int] = {}
        self._refusals: dict[str, str] = {}
        self._node_ids: set[int] = set()
        if record := known_sites(folder.path):
            self.sites = list(record["sites"])
            self.kind = (
                (tuple(record["classes"]), tuple(record["shape"])) if record["classes"] else None
            )

    # Before the rounds

    def assemble(self) -> list[Visitor]:
        """Waits until enough sites are there to begin, or to go on;
        their visitors in the sites' order.
        """
        sites = set(self.sites)

        def enough_sites() -> bool:
            visitors = self._eligible_visitors()
            minimum = (
                self.options.min_sites if sites else self.options.starting(_partitions(visitors))
            )
            return len([v for v in visitors if not sites or v.site in sites]) >= minimum

        self._wait(
            enough_sites,
            lambda: f"{len(self._eligible_visitors())} sites are here, waiting for more",
        )
        visitors = self._eligible_visitors()
        if len({visitor.simulated for visitor in visitors}) > 1:
            raise UserError(
                "some nodes are simulated (partition-id) and some are sites (site): use one kind"
            )
        return visitors

    def settle(self, kind: Kind | None) -> None:
        """Numbers the sites that are here;
        `kind` is the coordinator's own, or else that of most of them decides.
        """
        visitors = self._eligible_visitors()
        if self.kind is None:
            kinds = Counter(visitor.kind for visitor in visitors)
            # On ties the first by name decides.
            self.kind = kind or max(kinds, key=lambda each: kinds[each])
        self._enrol()

    # During the rounds

    def clients(self) -> list[int]:
        """Everybody's number, after waiting until enough of them are connected."""
        minimum = self.options.min_sites

        def enough_sites() -> bool:
            self._enrol()
            return len(self.nodes()) >= minimum

        self._wait(
            enough_sites,
            lambda: f"{len(self.nodes())} of the {minimum} sites that are needed are connected",
        )
        return list(range(len(self.sites)))

    def nodes(self) -> dict[int, int]:
        """The nodes of the sites that are connected now, by number."""
        nodes = {k: self._node_of.get(site) for k, site in enumerate(self.sites)}
        return {k: node for k, node in nodes.items() if node is not None and node in self._node_ids}

    def name(self, client: int) -> str:
        return self.sites[client]

    # Inside

    def _wait(self, enough_sites: Callable[[], bool], explain: Callable[[], str]) -> None:
        start, message_time, pause = time.monotonic(), -60.0, 0.05
        while True:
            self._meet()
            if enough_sites():
                return
            elapsed = time.monotonic() - start
            if self.options.wait_timeout and elapsed > self.options.wait_timeout:
                raise UserError(f"{explain()}: gave up after {elapsed:.0f} s (wait-timeout)")
            if elapsed - message_time >= 60 and elapsed > 5:
                self.say(explain())
                message_time = elapsed
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _meet(self) -> None:
        """Asks nodes that are new who they are, and hears those that answer."""
        self._node_ids = set(self.grid.get_node_ids())
        for node in [node for node in self._visitors if node not in self._node_ids]:
            visitor = self._visitors.pop(node)
            self.say(f"site {visitor.site} is no longer connected")
        for node, when in list(self._refusal_times.items()):
            if time.monotonic() - when > ASK_AGAIN_AFTER:
                del self._refusal_times[node]
                self._visitors.pop(node, None)
        queried_nodes = {node for node, _ in self._queries.values()}
        new_nodes = sorted(self._node_ids - queried_nodes - self._visitors.keys())
        if new_nodes:
            messages = [Message(RecordDict(), node, MessageType.QUERY) for node in new_nodes]
            self.grid.push_messages(messages)
            self._queries |= {
                m.metadata.message_id: (node, time.monotonic())
                for m, node in zip(messages, new_nodes, strict=True)
            }
        for message in self.grid.pull_messages(list(self._queries)) if self._queries else ():
            node, _ = self._queries.pop(message.metadata.reply_to_message_id)
            self._hear(node, message)
        for key, (node, when) in list(self._queries.items()):
            if node not in self._node_ids or time.monotonic() - when > self.options.round_timeout:
                del self._queries[key]  # it is asked again if it comes back

    def _hear(self, node: int, message: Message) -> None:
        try:
            visitor = _visitor(node, message)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"node {node}", f"it did not say who it is ({_short(error)})", node)
            # Remembered all the same, so that it is not asked again at once.
            visitor = Visitor(node, "", False, 0, "", None)
        self._visitors[node] = visitor

    def _eligible_visitors(self) -> list[Visitor]:
        """Nodes that said who they are and run the same version, one for each site, in order."""
        sites: dict[str, Visitor] = {}
        for visitor in sorted(self._visitors.values(), key=lambda v: v.node):
            if not visitor.site or self._is_outdated(visitor):
                continue
            first = sites.setdefault(visitor.site, visitor)
            last_node = self._node_of.get(visitor.site)
            if first is not visitor and last_node == visitor.node:
                sites[visitor.site] = visitor
        return sorted(sites.values(), key=lambda visitor: visitor.order)

    def _is_outdated(self, visitor: Visitor) -> bool:
        own_version = version("fednoro")
        if visitor.version == own_version:
            return False
        reason = (
            f"it runs fednoro {visitor.version}, the coordinator {own_version}: install the same"
        )
        self._refuse(visitor.site, reason, visitor.node)
        return True

    def _enrol(self) -> None:
        """Gives numbers to sites that are new, and nodes to those that are known."""
        old_sites = list(self.sites)
        for visitor in self._eligible_visitors():
            if visitor.kind is not None and visitor.kind != self.kind:
                self._refuse(visitor.site, _difference(visitor.kind, self.kind), visitor.node)
                continue
            if visitor.site not in self.sites:
                self.sites.append(visitor.site)
                self.say(
                    f"site {visitor.site} is client {len(self.sites) - 1}, node {visitor.node}"
                )
            elif self._node_of.get(visitor.site) not in (None, visitor.node):
                self.say(f"site {visitor.site} is connected again, now as node {visitor.node}")
            self._node_of[visitor.site] = visitor.node
        if self.sites != old_sites or not (self.folder.path / "sites.json").exists():
            self._save()

    def _refuse(self, site: str, reason: str, node: int) -> None:
        self._refusal_times.setdefault(node, time.monotonic())
        if self.strict:
            raise UserError(f"site {site} is refused: {reason}")
        if self._refusals.get(site) != reason:
            self._refusals[site] = reason
            self.say(f"site {site} is refused: {reason}")
            self._save()

    def _save(self) -> None:
        classes, shape = self.kind or ((), ())
        record = {
            "sites": self.sites,
            "classes": classes,
            "shape": shape,
            "refused": self._refusals,
        }
        write_json(self.folder.path / "sites.json", record)


def known_sites(folder: Path) -> dict[str, Any]:
    """What sites.json says; nothing as long as no site has a number."""
    try:
        record: dict[str, Any] = json.loads((folder / "sites.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{folder / 'sites.json'} is damaged: {error}") from error
    return record if record["sites"] else {}


def _visitor(node: int, message: Message) -> Visitor:
    if message.has_error():
        raise ValueError(message.error.reason)
    facts: dict[str, Any] = dict(message.content.config_records["config"])
    if ERROR in facts:
        raise ValueError(facts[ERROR])
    kind = (tuple(facts["classes"]), tuple(facts["shape"])) if "classes" in facts else None
    return Visitor(
        node, facts["site"], facts["simulated"], facts["partitions"], facts["version"], kind
    )


def _short(error: Exception) -> str:
    line = " ".join(str(error).split())
    return line if len(line) < 300 else f"{line[:100]} … {line[-180:]}"


def _partitions(visitors: list[Visitor]) -> int:
    return max((visitor.partitions for visitor in visitors), default=0)


def _difference(kind: Kind, run_kind: Kind | None) -> str:
    assert run_kind is not None
    if kind[0] != run_kind[0]:
        return (
            f"its classes are {', '.join(kind[0])}; "
            f"the run has {', '.join(run_kind[0])}, in this order (data.classes)"
        )
    sizes = [" × ".join(map(str, shape)) for shape in (kind[1], run_kind[1])]
    return f"its images are {sizes[0]}, the run's {sizes[1]} (height × width × channels)"


def number_by_partition(roster: Roster, count: int) -> None:
    """Simulated clients are numbered by partition, whoever came first."""
    roster.sites = [str(k) for k in range(count)]
    roster.options = replace(roster.options, min_sites=min(roster.options.min_sites, count))
