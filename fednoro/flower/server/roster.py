"""Which sites there are: their numbers, which stay, and the Flower nodes
behind them, which may change.

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

# seconds after which a node that was refused is asked again: its site may have been put right
AGAIN = 60.0
# class names, and height, width and channels of the images
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
        # in a simulation, a node that is refused is a mistake that ends the run
        self.strict = strict
        self.sites: list[str] = []  # the position is the client's number
        self.kind: Kind | None = None
        self._asked: dict[str, tuple[int, float]] = {}  # message id: node and when
        self._visitors: dict[int, Visitor] = {}
        self._turned_away: dict[int, float] = {}  # nodes, and when
        self._node_of: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._connected: set[int] = set()
        if known := known_sites(folder.path):
            self.sites = list(known["sites"])
            self.kind = (
                (tuple(known["classes"]), tuple(known["shape"])) if known["classes"] else None
            )

    # Before the rounds

    def assemble(self) -> list[Visitor]:
        """Waits until enough sites are there to begin, or to go on; their
        visitors in the sites' order.
        """
        known = set(self.sites)

        def enough() -> bool:
            found = self._introduced()
            wanted = self.options.min_sites if known else self.options.starting(_partitions(found))
            return len([v for v in found if not known or v.site in known]) >= wanted

        self._wait(enough, lambda: f"{len(self._introduced())} sites are here, waiting for more")
        found = self._introduced()
        if len({visitor.simulated for visitor in found}) > 1:
            raise UserError(
                "some nodes are simulated (partition-id) and some are sites (site): use one kind"
            )
        return found

    def settle(self, kind: Kind | None) -> None:
        """Numbers the sites that are here; `kind` is the coordinator's own, or else
        that of most of them decides.
        """
        found = self._introduced()
        if self.kind is None:
            kinds = Counter(visitor.kind for visitor in found)
            # the first by name on ties
            self.kind = kind or max(kinds, key=lambda each: kinds[each])
        self._enrol()

    # During the rounds

    def clients(self) -> list[int]:
        """Everybody's number, after waiting until enough of them are connected."""
        missing = self.options.min_sites

        def enough() -> bool:
            self._enrol()
            return len(self.connected()) >= missing

        self._wait(
            enough,
            lambda: f"{len(self.connected())} of the {missing} sites that are needed are connected",
        )
        return list(range(len(self.sites)))

    def connected(self) -> dict[int, int]:
        """The nodes of the sites that are connected now, by number."""
        nodes = {k: self._node_of.get(site) for k, site in enumerate(self.sites)}
        return {
            k: node for k, node in nodes.items() if node is not None and node in self._connected
        }

    def name(self, client: int) -> str:
        return self.sites[client]

    # Inside

    def _wait(self, enough: Callable[[], bool], why: Callable[[], str]) -> None:
        began, said, pause = time.monotonic(), -60.0, 0.05
        while True:
            self._meet()
            if enough():
                return
            waited = time.monotonic() - began
            if self.options.wait_timeout and waited > self.options.wait_timeout:
                raise UserError(f"{why()}: gave up after {waited:.0f} s (wait-timeout)")
            if waited - said >= 60 and waited > 5:
                self.say(why())
                said = waited
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _meet(self) -> None:
        """Asks nodes that are new who they are, and hears those that answer."""
        self._connected = set(self.grid.get_node_ids())
        for node in [node for node in self._visitors if node not in self._connected]:
            visitor = self._visitors.pop(node)
            self.say(f"site {visitor.site} is no longer connected")
        for node, when in list(self._turned_away.items()):
            if time.monotonic() - when > AGAIN:
                del self._turned_away[node]
                self._visitors.pop(node, None)
        asked = {node for node, _ in self._asked.values()}
        new = sorted(self._connected - asked - self._visitors.keys())
        if new:
            messages = [Message(RecordDict(), node, MessageType.QUERY) for node in new]
            self.grid.push_messages(messages)
            self._asked |= {
                m.metadata.message_id: (node, time.monotonic())
                for m, node in zip(messages, new, strict=True)
            }
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node, _ = self._asked.pop(message.metadata.reply_to_message_id)
            self._hear(node, message)
        for key, (node, when) in list(self._asked.items()):
            if node not in self._connected or time.monotonic() - when > self.options.round_timeout:
                del self._asked[key]  # it is asked again if it comes back

    def _hear(self, node: int, message: Message) -> None:
        try:
            visitor = _visitor(node, message)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"node {node}", f"it did not say who it is ({_short(error)})", node)
            # remembered, so that it is not asked again at once
            visitor = Visitor(node, "", False, 0, "", None)
        self._visitors[node] = visitor

    def _introduced(self) -> list[Visitor]:
        """Nodes that said who they are and run the same version, one for each site, in order."""
        sites: dict[str, Visitor] = {}
        for visitor in sorted(self._visitors.values(), key=lambda v: v.node):
            if not visitor.site or self._outdated(visitor):
                continue
            first = sites.setdefault(visitor.site, visitor)
            before = self._node_of.get(visitor.site)
            if first is not visitor and before == visitor.node:
                sites[visitor.site] = visitor
        return sorted(sites.values(), key=lambda visitor: visitor.order)

    def _outdated(self, visitor: Visitor) -> bool:
        own = version("fednoro")
        if visitor.version == own:
            return False
        reason = f"it runs fednoro {visitor.version}, the coordinator {own}: install the same"
        self._refuse(visitor.site, reason, visitor.node)
        return True

    def _enrol(self) -> None:
        """Gives numbers to sites that are new, and nodes to those that are known."""
        before = list(self.sites)
        for visitor in self._introduced():
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
        if self.sites != before or not (self.folder.path / "sites.json").exists():
            self._save()

    def _refuse(self, site: str, reason: str, node: int) -> None:
        self._turned_away.setdefault(node, time.monotonic())
        if self.strict:
            raise UserError(f"site {site} is refused: {reason}")
        if self._refused.get(site) != reason:
            self._refused[site] = reason
            self.say(f"site {site} is refused: {reason}")
            self._save()

    def _save(self) -> None:
        classes, shape = self.kind or ((), ())
        known = {"sites": self.sites, "classes": classes, "shape": shape, "refused": self._refused}
        write_json(self.folder.path / "sites.json", known)


def known_sites(folder: Path) -> dict[str, Any]:
    """What sites.json says; nothing as long as no site has a number."""
    try:
        known: dict[str, Any] = json.loads((folder / "sites.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{folder / 'sites.json'} is damaged: {error}") from error
    return known if known["sites"] else {}


def _visitor(node: int, message: Message) -> Visitor:
    if message.has_error():
        raise ValueError(message.error.reason)
    said: dict[str, Any] = dict(message.content.config_records["config"])
    if ERROR in said:
        raise ValueError(said[ERROR])
    kind = (tuple(said["classes"]), tuple(said["shape"])) if "classes" in said else None
    return Visitor(node, said["site"], said["simulated"], said["partitions"], said["version"], kind)


def _short(error: Exception) -> str:
    line = " ".join(str(error).split())
    return line if len(line) < 300 else f"{line[:100]} … {line[-180:]}"


def _partitions(found: list[Visitor]) -> int:
    return max((visitor.partitions for visitor in found), default=0)


def _difference(kind: Kind, wanted: Kind | None) -> str:
    assert wanted is not None
    if kind[0] != wanted[0]:
        return (
            f"its classes are {', '.join(kind[0])}; the run has "
            f"{', '.join(wanted[0])}, in this order (data.classes)"
        )
    sizes = [" × ".join(map(str, shape)) for shape in (kind[1], wanted[1])]
    return f"its images are {sizes[0]}, the run's {sizes[1]} (height × width × channels)"


def numbered(roster: Roster, count: int) -> None:
    """Simulated clients are numbered by partition, whoever came first."""
    roster.sites = [str(k) for k in range(count)]
    roster.options = replace(roster.options, min_sites=min(roster.options.min_sites, count))
