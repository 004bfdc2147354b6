"""A simulated federation: who holds which samples, and which labels were changed on the way."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from fednoro.core.files import write_whole
from fednoro.core.seeds import generator
from fednoro.core.types import BoolArray, FloatArray, IntArray, UserError
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.data.leakage import Report, leakage
from fednoro.data.noise import Context, NoiseModel
from fednoro.data.partition import Partition
from fednoro.data.split import Parts, Split


@dataclass(frozen=True)
class Federation:
    """Train, validation and test part, the clients' samples,
    and their labels before and after noise.
    """

    train: IntArray
    validation: IntArray  # empty where there is none
    test: IntArray
    parts: tuple[IntArray, ...]
    names: tuple[str, ...]
    classes: tuple[str, ...]
    clean: IntArray  # the data set's labels, all N
    observed: IntArray  # the labels the clients were given, all N
    noisy: BoolArray | None  # K; None where the truth is not known
    rates: FloatArray  # K, share of changed labels
    fingerprint: str  # of the data it was made from
    # what the held-out parts share with those before them
    leakage: Report = field(default_factory=dict)

    @property
    def split(self) -> Parts:
        return Parts(self.train, self.validation, self.test)

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
            validation=self.validation,
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
            leakage=np.array(json.dumps(self.leakage)),
        )
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Federation:
        try:
            with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
                return cls(
                    train=file["train"],
                    validation=file["validation"] if "validation" in file else file["train"][:0],
                    test=file["test"],
                    parts=tuple(np.split(file["members"], np.cumsum(file["sizes"])[:-1])),
                    names=tuple(str(name) for name in file["names"]),
                    classes=tuple(str(name) for name in file["classes"]),
                    clean=file["clean"],
                    observed=file["observed"],
                    noisy=file["noisy"] if len(file["noisy"]) else None,
                    rates=file["rates"],
                    fingerprint=str(file["fingerprint"]),
                    leakage=json.loads(str(file["leakage"])) if "leakage" in file else {},
                )
        except Exception as error:
            # numpy and zipfile raise a different type for each kind of damage.
            raise UserError(
                f"{path} is damaged ({str(error).splitlines()[0]}): start the run anew"
            ) from error


def assemble(
    dataset: Dataset,
    split: Split,
    partition: Partition,
    noise: NoiseModel,
    seed: int,
    annotate: Callable[[Mapping[int, IntArray]], Mapping[int, FloatArray]],
    accept: Callable[[int], None] | None = None,
) -> Federation:
    """Splits the data, shares the training part out to clients, and adds noise to their labels.

    `accept` is told how many clients there are before annotators are trained, and may raise.
    """
    parts = split.parts(dataset, generator(seed, "split"))
    sites = None if dataset.sites is None else [dataset.sites[i] for i in parts.train]
    shares = partition.split(dataset.labels[parts.train], sites, generator(seed, "partition"))
    if accept is not None:
        accept(len(shares.indices))
    indices = tuple(parts.train[share] for share in shares.indices)
    context = Context(
        classes=dataset.classes,
        ids=dataset.ids,
        rng=partial(generator, seed),
        annotate=annotate,
    )
    outcome = noise.apply(dataset.labels, indices, context)
    return Federation(
        train=parts.train,
        validation=parts.validation,
        test=parts.test,
        parts=indices,
        names=shares.names,
        classes=dataset.classes,
        clean=dataset.labels,
        observed=outcome.observed,
        noisy=outcome.noisy,
        rates=outcome.rates,
        fingerprint=fingerprint(dataset),
        leakage=leakage(dataset, parts),
    )


def fingerprint(dataset: Dataset) -> str:
    """Tells whether a resumed run sees the data it began with:
    all labels, and a sample of the images.
    """
    digest = hashlib.sha256(repr((dataset.images.shape, dataset.classes)).encode())
    digest.update(np.ascontiguousarray(dataset.labels).tobytes())
    for i in np.linspace(0, len(dataset) - 1, num=min(64, len(dataset)), dtype=int):
        digest.update(np.ascontiguousarray(dataset.images[i]).tobytes())
    return digest.hexdigest()
