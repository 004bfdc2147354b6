"""A site's side: its options, its data, its engine and what it remembers.

A real site brings its own data (site.yaml). A simulated one reads its part of the federation from
the run folder, which is on the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml

from fednoro.audit.audit_method import Audit
from fednoro.core.options import Options, option
from fednoro.core.seeds import generator
from fednoro.core.types import IntArray, UserError
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.data.federation import Federation
from fednoro.data.split import Split
from fednoro.detection.score_privacy import Protection
from fednoro.engine.choose import Hardware, choose_device
from fednoro.engine.eager import EagerEngine
from fednoro.engine.threads import worthwhile_threads
from fednoro.experiment.config.configuration import Config, as_tree, resolve
from fednoro.methods import Method
from fednoro.models import initialise

SECTIONS_FOR_SITES = ("seed", "model", "method", "train")  # the sections that a site is told


class RefusedError(UserError):
    """A site will not do what it was asked; the message names no file and no value, and is sent."""


@dataclass(frozen=True)
class SiteOptions(Options):
    """site.yaml: what a site decides for itself."""

    section: ClassVar[str] = "site"

    data: Mapping[str, Any] = field(
        default_factory=dict, hash=False, metadata={"help": "where its images are: any data source"}
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, …")
    threads: int | None = option(None, "CPU threads; default: as many as are worthwhile", ge=1)
    memory: str = option(
        "/var/lib/fednoro", "where methods keep what they remember, a folder for each run"
    )
    held_out: float = option(
        0.2, "share kept to evaluate on, where the coordinator has no test set", ge=0, lt=1
    )
    min_count: int = option(0, "losses of classes with fewer images are not sent", ge=0)
    score_epsilon: float | None = option(
        None, "noise on the losses that are sent; default: none", gt=0
    )
    audit: bool | None = option(
        None, "take part in audits; default: unless min_count or score_epsilon is set"
    )
    modules: tuple[str, ...] = option(
        (), "modules of methods and models that a coordinator may name as module:Class"
    )

    @property
    def protection(self) -> Protection:
        return Protection(self.min_count, self.score_epsilon)

    @property
    def audited(self) -> bool:
        """Whether this site takes part in audits: what they send is not protected."""
        return self.protection == Protection() if self.audit is None else self.audit


def read_site(path: str | Path) -> SiteOptions:
    """The options in a site.yaml, checked."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return _parse_site(file, text)


@lru_cache(maxsize=16)
def _parse_site(file: Path, text: str) -> SiteOptions:
    from pydantic import TypeAdapter, ValidationError

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or "data" not in tree:
        raise UserError(
            f"{file} must be a mapping with a section data, such as `data: "
            "{name: folder, path: /images}`"
        )
    if isinstance(tree["data"], str):
        tree["data"] = {"name": tree["data"]}
    try:
        options: SiteOptions = TypeAdapter(SiteOptions).validate_python(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        where = ".".join(str(part) for part in problem["loc"])
        what = cause if isinstance(cause, UserError) else f"{where}: {problem['msg']}"
        raise UserError(f"{file}: {what}") from error
    _source(options)
    return options


def load_data(
    options: SiteOptions, seed: int = 0, progress: Callable[[str, int, int], None] | None = None
) -> Dataset:
    """The site's images, prepared on the first call."""
    dataset: Dataset = _source(options).load(seed, progress)
    return dataset


def _source(options: SiteOptions) -> Any:
    return _resolved_source(json.dumps(options.data))


@lru_cache(maxsize=16)
def _resolved_source(data: str) -> Any:
    return resolve({"preset": "digits", "data": json.loads(data), "noise": "none"}).data


# What the coordinator tells its sites about a run


def run_order(
    config: Config,
    classes: tuple[str, ...],
    held_out: bool,
    split: Path | None,
    audit: Audit | None = None,
) -> str:
    """The run as one JSON string that goes with every task; `split` is for simulated sites."""
    tree = as_tree(config)
    sections = {name: tree[name] for name in SECTIONS_FOR_SITES}
    # It is a file on the coordinator's disk; a site is sent the weights themselves.
    sections["model"].pop("weights", None)
    order: dict[str, Any] = {"config": sections, "classes": list(classes), "held_out": held_out}
    if split is not None:
        order["simulated"] = {
            "split": str(split),
            **{name: tree[name] for name in ("data", "device", "engine")},
        }
    if audit is not None:
        order["audit"] = asdict(audit)
    return json.dumps(order)


@dataclass
class Station:
    """Whoever works on a task: the run as it was ordered, the data and the engine."""

    config: Config
    method: Method
    engine: EagerEngine
    clients: Mapping[int, Client]  # all of them at a simulated site, itself at a real one
    held_out: IntArray  # positions to evaluate on
    dataset: Dataset

    def client(self, number: int) -> Client:
        return self.clients[number]


@lru_cache(maxsize=4)  # a simulation's processes work on many tasks; a real site's on one
def station(order: str, site: SiteOptions | None, name: str, number: int | None) -> Station:
    """What a task needs; simulated sites have no `site` and `number`."""
    run = json.loads(order)
    # The bits depend on it, and a simulation's are those of a run in one process.
    threads: int | None = 1
    simulated = run.get("simulated")
    sections: dict[str, Any] = {**run["config"], "partition": "iid", "noise": "none"}
    if simulated is not None:
        engine = simulated["engine"]
        config = resolve({**sections, "data": simulated["data"], "device": simulated["device"]})
        dataset = config.data.load(config.seed)
        federation = Federation.load(Path(simulated["split"]))
        clients = {client.id: client for client in federation.clients()}
        held_out = federation.test[:0]  # the coordinator has it
    else:
        assert site is not None and number is not None
        threads, engine = site.threads, "auto"
        _check_modules(sections, site)
        config = resolve({**sections, "data": dict(site.data), "device": site.device})
        dataset = load_data(site, config.seed)
        if list(dataset.classes) != run["classes"]:
            raise UserError("the classes of this site are not those of the run")
        share = site.held_out if run["held_out"] else 0.0
        train, held_out = two_parts(dataset, share, config.seed)
        clients = {number: Client(number, name, train, dataset.labels[train])}
    method = Audit(**run["audit"]) if "audit" in run else config.method
    if isinstance(method, Audit) and (site is None or not site.audited):
        raise RefusedError("this site takes no part in audits (audit in its site.yaml)")
    return Station(
        config, method, _engine(config, dataset, engine, threads), clients, held_out, dataset
    )


def _check_modules(sections: Mapping[str, Any], site: SiteOptions) -> None:
    """A site imports what it has agreed to, whatever a coordinator names."""
    for section in ("method", "model"):
        value = sections.get(section) or {}
        names = (
            [value.get(key) for key in ("name", "factory")]
            if isinstance(value, Mapping)
            else [value]
        )
        for name in names:
            module, colon, _ = str(name).partition(":")
            if colon and module not in site.modules:
                raise RefusedError(
                    f"this site does not import the run's own {section} (modules in its site.yaml)"
                )


def two_parts(dataset: Dataset, share: float, seed: int) -> tuple[IntArray, IntArray]:
    """What a site trains on, and what it keeps to evaluate on: the same in every task of a run."""
    if not share:
        everything = np.arange(len(dataset))
        return everything, everything[:0]
    parts = Split(test=share).parts(dataset, generator(seed, "held_out"))
    return parts.train, parts.test


def _engine(config: Config, dataset: Dataset, kind: Any, threads: int | None) -> EagerEngine:
    inputs, classes = config.model.inputs(dataset.images.shape[3]), len(dataset.classes)

    def network() -> torch.nn.Module:
        return initialise(config.model, inputs, classes, config.seed)

    batch = (config.train.batch, inputs, *dataset.images.shape[1:3])
    if threads is None:
        with worthwhile_threads(network(), batch):
            threads = torch.get_num_threads()
    torch.set_num_threads(threads)  # for the whole process, which is the site's own
    hardware = Hardware(choose_device(config.device), kind, lanes=1)
    return hardware.engine(network, dataset, inputs, config.train, config.seed)
