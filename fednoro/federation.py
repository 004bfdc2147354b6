"""A simulated federation: who holds which samples, and which labels were changed on the way."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fednoro.clients import Client
from fednoro.data.dataset import Dataset
from fednoro.data.split import train_test
from fednoro.files import write_whole
from fednoro.noise import Context, Kind
from fednoro.partition import Partition
from fednoro.seeds import generator
from fednoro.types import BoolArray, FloatArray, IntArray, UserError


@dataclass(frozen=True)
class Federation:
    """Train and test part, the clients' samples, and their labels before and after noise."""

    train: IntArray
    test: IntArray
    parts: tuple[IntArray, ...]
    names: tuple[str, ...]
    classes: tuple[str, ...]
    clean: IntArray  # the data set's labels, all N
    observed: IntArray  # the labels the clients were given, all N
    noisy: BoolArray | None  # K; None where the truth is not known
    rates: FloatArray  # K, share of changed labels
    fingerprint: str  # of the data it was made from

    def clients(self) -> list[Client]:
        return [
            Client(k, name, index, self.observed[index])
            for k, (name, index) in enumerate(zip(self.names, self.parts, strict=True))
        ]

    def save(self, path: Path) -> None:
        content = io.BytesIO()
        np.savez_compressed(
            content,
            train=self.train,
            test=self.test,
            members=np.concatenate(self.parts),
            sizes=np.array([len(part) for part in self.parts]),
            names=np.array(self.names),
            classes=np.array(self.classes),
            clean=self.clean,
            observed=self.observed,
            flipped=self.clean != self.observed,
            noisy=np.array([], dtype=bool) if self.noisy is None else self.noisy,
            rates=self.rates,
            fingerprint=np.array(self.fingerprint),
        )
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Federation:
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(
                    train=file["train"],
                    test=file["test"],
                    parts=tuple(np.split(file["members"], np.cumsum(file["sizes"])[:-1])),
                    names=tuple(str(name) for name in file["names"]),
                    classes=tuple(str(name) for name in file["classes"]),
                    clean=file["clean"],
                    observed=file["observed"],
                    noisy=file["noisy"] if len(file["noisy"]) else None,
                    rates=file["rates"],
                    fingerprint=str(file["fingerprint"]),
                )
        except Exception as error:  # numpy and zipfile raise a different type for each kind of damage
            raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}): start the run anew") from error


def assemble(
    dataset: Dataset,
    test: float,
    partition: Partition,
    noise: Kind,
    seed: int,
    annotate: Callable[[int, IntArray], FloatArray],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Federation:
    """Splits the data, shares the training part out to clients, and adds noise to their labels."""
    train, held_out = train_test(dataset.labels, test, generator(seed, "split"), dataset.groups)
    sites = None if dataset.sites is None else [dataset.sites[i] for i in train]
    parts = partition.split(dataset.labels[train], sites, generator(seed, "partition"))
    indices = tuple(train[part] for part in parts.indices)
    context = Context(
        classes=dataset.classes,
        ids=dataset.ids,
        rng=partial(generator, seed),
        annotate=annotate,
        progress=progress,
    )
    outcome = noise.apply(dataset.labels, indices, context)
    return Federation(
        train=train,
        test=held_out,
        parts=indices,
        names=parts.names,
        classes=dataset.classes,
        clean=dataset.labels,
        observed=outcome.observed,
        noisy=outcome.noisy,
        rates=outcome.rates,
        fingerprint=fingerprint(dataset),
    )


def fingerprint(dataset: Dataset) -> str:
    """Tells whether a resumed run sees the data it began with: all labels, and a sample of the images."""
    digest = hashlib.sha256(repr((dataset.images.shape, dataset.classes)).encode())
    digest.update(np.ascontiguousarray(dataset.labels).tobytes())
    for i in np.linspace(0, len(dataset) - 1, num=min(64, len(dataset)), dtype=int):
        digest.update(np.ascontiguousarray(dataset.images[i]).tobytes())
    return digest.hexdigest()
