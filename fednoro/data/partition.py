"""Which client holds which sample:
the paper's Bernoulli–Dirichlet split, Dirichlet, IID and natural sites.

Every function gives each sample to exactly one client, as sorted indices, one array per client.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from fednoro.core.options import Options, option
from fednoro.core.types import BoolArray, FloatArray, IntArray, UserError

_MAX_DRAWS = 100


@dataclass(frozen=True)
class ClientShares:
    """The clients' sample indices and the clients' names."""

    indices: tuple[IntArray, ...]
    names: tuple[str, ...]


def bernoulli_dirichlet(
    labels: IntArray,
    clients: int,
    p: float,
    alpha: float,
    rng: np.random.Generator,
    min_size: int = 1,
) -> list[IntArray]:
    """The paper's split: Φ_kc ~ Bernoulli(p);
    class c is divided by a Dirichlet(α) over the clients with Φ_kc = 1.

    A draw with a class that nobody owns or a client under `min_size` is repeated as a
    whole, which leaves exactly the paper's law given a valid split; repeating only the row
    or column at fault would not.
    """
    _check_sizes(labels, clients, min_size)
    if not 0 < p <= 1:
        raise UserError(f"p must be in (0, 1], got {p}")
    if not 0 < alpha < math.inf:
        raise UserError(f"alpha must be > 0 and finite, got {alpha}")

    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    orphaning_draws = 0  # draws that left a class to nobody
    for _ in range(_MAX_DRAWS):
        phi = _draw_ownership(clients, len(sizes), p, rng)
        if not phi.any(axis=0).all():
            orphaning_draws += 1
            continue
        counts = np.zeros(phi.shape, dtype=np.int64)  # K×C
        for c, size in enumerate(sizes):
            counts[phi[:, c], c] = rng.multinomial(
                size, _draw_shares(int(phi[:, c].sum()), alpha, rng)
            )
        if counts.sum(axis=1).min() >= min_size:
            break
    else:
        causes = []
        if orphaning_draws:
            causes.append(f"{orphaning_draws} left a class without a client (raise p, now {p:g})")
        if orphaning_draws < _MAX_DRAWS:
            advice = (
                "raise alpha or lower clients" if p == 1 else "raise p or alpha, or lower clients"
            )
            causes.append(
                f"{_MAX_DRAWS - orphaning_draws} left a client "
                f"with fewer than {min_size} samples ({advice})"
            )
        raise UserError(
            f"no split of {len(labels)} samples over {clients} clients "
            f"with alpha = {alpha:g} in {_MAX_DRAWS} draws: {', '.join(causes)}"
        )

    owner = np.empty(len(labels), dtype=np.int64)
    for c in range(len(sizes)):
        owner[rng.permutation(np.flatnonzero(class_of == c))] = np.repeat(
            np.arange(clients), counts[:, c]
        )
    return _group_by_owner(owner, clients)


def dirichlet(
    labels: IntArray, clients: int, alpha: float, rng: np.random.Generator, min_size: int = 1
) -> list[IntArray]:
    """Each class is divided by its own Dirichlet(α) over all clients;
    redrawn until all hold `min_size` samples.
    """
    return bernoulli_dirichlet(labels, clients, 1.0, alpha, rng, min_size)


def iid(labels: IntArray, clients: int, rng: np.random.Generator) -> list[IntArray]:
    """A random split in sizes that differ by at most one."""
    _check_sizes(labels, clients, min_size=1)
    return _group_by_owner(rng.permutation(np.arange(len(labels)) % clients), clients)


def by_column(values: Sequence[str]) -> ClientShares:
    """One client per distinct value, in the order of their names."""
    sites = [str(value).strip() for value in values]
    if not sites:
        raise UserError("cannot split an empty site column: give at least one sample")
    if "" in sites:
        raise UserError(
            f"sample {sites.index('')} has no site ({sites.count('')} of {len(sites)} have none): "
            "fill the site column or use another partition"
        )
    names = sorted(set(sites))
    number_of = {name: k for k, name in enumerate(names)}
    return ClientShares(
        tuple(_group_by_owner(np.array([number_of[site] for site in sites]), len(names))),
        tuple(names),
    )


def _check_sizes(labels: IntArray, clients: int, min_size: int) -> None:
    if np.ndim(labels) != 1 or not len(labels):
        raise UserError(f"labels must be a non-empty vector, got shape {np.shape(labels)}")
    if clients < 1:
        raise UserError(f"clients must be >= 1, got {clients}")
    if min_size < 1:
        raise UserError(f"min_size must be >= 1, got {min_size}")
    if clients * min_size > len(labels):
        raise UserError(
            f"clients must be at most {len(labels) // min_size} for {len(labels)} samples "
            f"with min_size = {min_size}, got {clients}"
        )


def _draw_ownership(clients: int, classes: int, p: float, rng: np.random.Generator) -> BoolArray:
    """Φ [K×C] of independent Bernoulli(p),
    given that no row (where K >= C, else no column) is all zero.

    The shorter lines are the likelier to come out empty, at small p almost surely. Conditioning
    them here, by the truncated geometric law of a line's first one, is exact and spares the redraws
    that would hardly ever succeed.
    """
    lines, length = max(clients, classes), min(clients, classes)
    position, weights = np.arange(length), (1 - p) ** np.arange(length)
    first = rng.choice(length, lines, p=weights / weights.sum())[:, None]
    phi: BoolArray = (position == first) | ((position > first) & (rng.random((lines, length)) < p))
    return phi if clients >= classes else phi.T


def _draw_shares(owners: int, alpha: float, rng: np.random.Generator) -> FloatArray:
    shares = rng.dirichlet(np.full(owners, alpha))
    if abs(shares.sum() - 1) < 1e-9:
        return shares
    # Extreme α under- or overflows to NaN or zeros:
    # take the law's limit, all to one or equal shares.
    return np.eye(owners)[rng.integers(owners)] if alpha < 1 else np.full(owners, 1 / owners)


def _group_by_owner(owner: IntArray, clients: int) -> list[IntArray]:
    # Stable: indices stay sorted within a client.
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _name_clients(indices: list[IntArray]) -> ClientShares:
    width = len(str(len(indices) - 1))
    return ClientShares(tuple(indices), tuple(f"client {k:0{width}}" for k in range(len(indices))))


class Partition(Protocol):
    """What every entry of `PARTITIONS` is: an options dataclass that can split."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def split(
        self, labels: IntArray, sites: Sequence[str] | None, rng: np.random.Generator
    ) -> ClientShares:
        """Divides all samples among the clients."""


@dataclass(frozen=True)
class BernoulliDirichlet(Options):
    """The paper's partition: some classes are missing at some clients,
    the rest are unevenly divided.
    """

    section: ClassVar[str] = "partition"
    clients: int = option(20, "number of clients", ge=1)
    p: float = option(0.9, "probability that a client holds a class", gt=0, le=1)
    alpha: float = option(2.0, "Dirichlet concentration: the smaller, the more uneven", gt=0)

    def split(
        self, labels: IntArray, sites: Sequence[str] | None, rng: np.random.Generator
    ) -> ClientShares:
        """See `bernoulli_dirichlet`."""
        return _name_clients(bernoulli_dirichlet(labels, self.clients, self.p, self.alpha, rng))


@dataclass(frozen=True)
class Dirichlet(Options):
    """Every class unevenly divided among all clients."""

    section: ClassVar[str] = "partition"
    clients: int = option(20, "number of clients", ge=1)
    alpha: float = option(0.5, "Dirichlet concentration: the smaller, the more uneven", gt=0)

    def split(
        self, labels: IntArray, sites: Sequence[str] | None, rng: np.random.Generator
    ) -> ClientShares:
        """See `dirichlet`."""
        return _name_clients(dirichlet(labels, self.clients, self.alpha, rng))


@dataclass(frozen=True)
class IID(Options):
    """Random clients of equal size."""

    section: ClassVar[str] = "partition"
    clients: int = option(20, "number of clients", ge=1)

    def split(
        self, labels: IntArray, sites: Sequence[str] | None, rng: np.random.Generator
    ) -> ClientShares:
        """See `iid`."""
        return _name_clients(iid(labels, self.clients, rng))


@dataclass(frozen=True)
class ByColumn(Options):
    """Natural sites: one client per value of the data's site column."""

    section: ClassVar[str] = "partition"

    def split(
        self, labels: IntArray, sites: Sequence[str] | None, rng: np.random.Generator
    ) -> ClientShares:
        """See `by_column`."""
        if sites is None:
            raise UserError(
                "partition by_column: the data has no site column; use ham10000, isic2019 "
                "or a folder with sites, or another partition (bernoulli_dirichlet, dirichlet, iid)"
            )
        if len(sites) != len(labels):
            raise UserError(
                f"sites must have one entry per label ({len(labels)}), got {len(sites)}"
            )
        return by_column(sites)


PARTITIONS: dict[str, type[Partition]] = {
    "bernoulli_dirichlet": BernoulliDirichlet,
    "dirichlet": Dirichlet,
    "iid": IID,
    "by_column": ByColumn,
}
