"""Configurations: presets, files and `key=value` overrides, checked and resolved into one value.

A configuration has a section for each part of an experiment. A section is a name and that
part's options, `method: {name: fednoro, warmup: 10}`; the bare name will do, `method:
fednoro`. The options are the fields of the part's own dataclass, so a new method or data
source brings its configuration with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from fednoro.core.options import Options, option
from fednoro.core.training import Training
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.noise import NOISES, NoiseModel
from fednoro.data.partition import PARTITIONS, Partition
from fednoro.data.sources import SOURCES, Source
from fednoro.data.split import Split
from fednoro.experiment.config.validation import suggest, validate
from fednoro.methods import METHODS, Method, find_method, name_of
from fednoro.models import MODELS, Factory, Model

REGISTRIES: dict[str, Mapping[str, type[Any]]] = {
    "data": SOURCES,
    "partition": PARTITIONS,
    "noise": NOISES,
    "model": MODELS,
    "method": METHODS,
}
SECTIONS_WITHOUT_CHOICE: dict[str, type[Options]] = {"split": Split, "train": Training}
PRESETS = files("fednoro.experiment") / "presets"
TRACKERS = ("tensorboard", "mlflow")
OWN_DATA = ("folder", "prepared")  # data sources that are the user's own images and labels
REAL_NOISE = ("none", "from_file")  # noise that is none, or what people have made of the labels
# Options that say where and by what a run is made, not what it is.
RUNTIME_KEYS = frozenset(
    {"name", "out", "device", "engine", "compile", "stack", "checkpoint_every", "track"}
)


@dataclass(frozen=True)
class General(Options):
    """What belongs to no section."""

    seed: int = option(0, "everything random follows from it", ge=0)
    name: str | None = option(
        None, "the run's folder name; made from data, method and seed if not given"
    )
    out: str = option("runs", "where run folders are made")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, …")
    engine: Literal["auto", "eager", "cpu", "cuda"] = option(
        "auto", "auto: the fastest for the device; eager: the plain loop"
    )
    precision: Literal["fp32", "tf32", "bf16"] = option(
        "fp32", "arithmetic on CUDA: fp32, or the faster tf32 and bf16"
    )
    compile: bool = option(False, "on CUDA, torch.compile the network: slow to start, faster after")
    stack: bool = option(
        True, "on CUDA, train many clients as one network where that is faster: ResNets in bf16"
    )
    checkpoint_every: int = option(5, "exchanges (rounds, mostly) between checkpoints", ge=1)
    track: tuple[str, ...] = option(
        (), f"trackers that are written into the run folder: {', '.join(TRACKERS)}"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and (
            not self.name or self.name[0] == "." or set(self.name) & set("/\\")
        ):
            raise UserError(f"name must be a plain folder name, got {self.name!r}")
        for tracker in self.track:
            if tracker not in TRACKERS:
                raise UserError(f"unknown tracker {tracker!r} in track{suggest(tracker, TRACKERS)}")


@dataclass(frozen=True, kw_only=True)
class Config(General):
    """One experiment, whole."""

    data: Source
    partition: Partition
    noise: NoiseModel
    model: Model
    method: Method
    split: Split = field(default_factory=Split)
    train: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.method.check(self.train.rounds)


def presets() -> dict[str, str]:
    """The presets' names, each with its one-line description."""
    texts = {
        Path(item.name).stem: item.read_text(encoding="utf-8")
        for item in PRESETS.iterdir()
        if item.name.endswith(".yaml")
    }
    return {name: text.splitlines()[0].lstrip("# ") for name, text in sorted(texts.items())}


def resolve(
    source: str | Path | Mapping[str, Any] = "digits", overrides: Sequence[str] = ()
) -> Config:
    """A checked configuration from a preset's name, a YAML file or a mapping,
    with `key=value` overrides.
    """
    tree = _load_tree(source)
    # Choices first: `method.tau=2 method=fedla` means the same in either order.
    for override in sorted(overrides, key=_is_option):
        _override(tree, override)
    config = _build(tree)
    data, noise = section_name(config, "data"), section_name(config, "noise")
    if data in OWN_DATA and noise not in REAL_NOISE and not _asks_for_noise(source, overrides):
        warnings.warn(
            f"noise {noise} changes your own labels: noise=none keeps them",
            FedNoRoWarning,
            stacklevel=2,
        )
    return config


def _asks_for_noise(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the user did, or only the preset."""
    if any(
        override.partition("=")[0].strip().partition(".")[0] == "noise" for override in overrides
    ):
        return True
    if isinstance(source, Mapping):
        return "noise" in source
    return str(source) not in presets() and "noise" in _read(str(source))


def resolve_network(path: Path) -> Config:
    """A run's configuration as far as its data and network go;
    its method may be unknown here, and FedAvg stands in.
    """
    return resolve({**_read(str(path)), "method": "fedavg", "methods": None})


def _is_option(override: str) -> bool:
    return "." in override.partition("=")[0].removesuffix(".name")


def seeds(overrides: Sequence[str]) -> tuple[list[int], list[str]]:
    """Takes `seed=0..2` or `seed=1,4,7` out of the overrides:
    the seeds, and the other overrides.
    """
    rest = [text for text in overrides if not text.startswith("seed=")]
    seed_texts = [text.removeprefix("seed=") for text in overrides if text.startswith("seed=")]
    if not seed_texts:
        return [], rest
    try:
        numbers: list[int] = []
        for part in seed_texts[-1].split(","):
            first, dots, last = part.partition("..")
            numbers += range(int(first), int(last) + 1) if dots else [int(first)]
    except ValueError as error:
        raise UserError(
            "seed must be a number, a list or a range, as in seed=3, seed=1,4 "
            f"or seed=0..2; got {seed_texts[-1]!r}"
        ) from error
    if not numbers or min(numbers) < 0 or len(set(numbers)) != len(numbers):
        raise UserError(f"seed must name distinct numbers from 0 on, got {seed_texts[-1]!r}")
    return numbers, rest


def dump(config: Config) -> str:
    """The configuration as YAML that `resolve` reads back to the same value."""
    tree: dict[str, Any] = {}
    for item in sorted(
        dataclasses.fields(config),
        key=lambda item: item.name not in ("seed", *REGISTRIES, *SECTIONS_WITHOUT_CHOICE),
    ):
        value = getattr(config, item.name)
        if item.name in REGISTRIES:
            tree[item.name] = {"name": _name(item.name, value), **_plain(dataclasses.asdict(value))}
        elif dataclasses.is_dataclass(value):
            tree[item.name] = _plain(dataclasses.asdict(value))  # type: ignore[arg-type]
        else:
            tree[item.name] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def as_tree(config: Config) -> dict[str, Any]:
    """What `dump` writes, as plain values."""
    tree: dict[str, Any] = yaml.safe_load(dump(config))
    return tree


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"method": {"warmup": 10}}` → `{"method.warmup": 10}`."""
    options: dict[str, Any] = {}
    for key, value in tree.items():
        branch = isinstance(value, Mapping) and value
        options |= flatten_tree(value, f"{prefix}{key}.") if branch else {f"{prefix}{key}": value}
    return options


def flatten_config(config: Config) -> dict[str, Any]:
    """Every option by its dotted name."""
    return flatten_tree(as_tree(config))


def with_absolute_paths(config: Config) -> Config:
    """The same with files and folders by their absolute paths,
    so that a run can be resumed from anywhere.
    """

    def absolute(part: Any) -> Any:
        options = {
            item.name: getattr(part, item.name)
            for item in dataclasses.fields(part)
            if "Literal" not in str(item.type)
        }
        paths = {
            name: Path(value).expanduser()
            for name, value in options.items()
            if value and isinstance(value, str)
        }
        return dataclasses.replace(
            part, **{name: str(path.absolute()) for name, path in paths.items() if path.exists()}
        )

    return dataclasses.replace(
        config,
        **{
            section: absolute(getattr(config, section))
            for section in ("data", "split", "noise", "model")
        },
    )


def section_name(config: Config, section: str) -> str:
    """Which entry of a registry a section chose, for example `fednoro` for `method`."""
    return _name(section, getattr(config, section))


def _name(section: str, value: Any) -> str:
    if isinstance(value, Factory):
        return value.factory
    if section == "method":
        return name_of(type(value))
    return next(name for name, kind in REGISTRIES[section].items() if type(value) is kind)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# From names and files to a tree of plain values


def _load_tree(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        tree, origin = dict(source), "the configuration"
    else:
        tree, origin = _read(str(source)), str(source)
    merged: dict[str, Any] = {}
    if "preset" in tree:
        preset = str(tree.pop("preset"))
        if preset not in presets():
            raise UserError(f"{origin}: unknown preset {preset!r}{suggest(preset, presets())}")
        merged = _load_tree(preset)
    for key, value in tree.items():
        _merge(merged, key, value, origin)
    return merged


def _read(source: str) -> dict[str, Any]:
    path = Path(source).expanduser()
    if source in presets():
        text = (PRESETS / f"{source}.yaml").read_text(encoding="utf-8")
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read: {error}") from error
    else:
        close = difflib.get_close_matches(source, presets(), 1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise UserError(f"{source!r} is neither a preset ({', '.join(presets())}) nor a file{hint}")
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{source} must be a mapping of sections, such as `method: fednoro`")
    return tree


def _normalise(key: str, value: Any, origin: str) -> Any:
    if key in REGISTRIES:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, Mapping):
            raise UserError(
                f"{origin}: {key} must be a name or a mapping with a name, got {value!r}"
            )
    return dict(value) if isinstance(value, Mapping) else value


def _merge(tree: dict[str, Any], key: str, value: Any, origin: str) -> None:
    value, old = _normalise(key, value, origin), tree.get(key)
    if key in REGISTRIES and old and value.get("name", old.get("name")) != old.get("name"):
        tree[key] = value  # another method's options would make no sense here
    else:
        tree[key] = _overlay(old, value)


def _overlay(old: Any, value: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(value, Mapping):
        return value
    return {**old, **{key: _overlay(old.get(key), item) for key, item in value.items()}}


def _split(path: str) -> list[str]:
    """`a.b.c` by its dots, but for those of a module in `methods.package.module:Class.option`."""
    before, colon, after = path.removeprefix("methods.").partition(":")
    if not colon or not path.startswith("methods."):
        return path.split(".")
    name, *rest = after.split(".")
    return ["methods", f"{before}:{name}", *rest]


def _override(tree: dict[str, Any], text: str) -> None:
    path, equals, raw = text.partition("=")
    keys = _split(path.strip())
    if not equals or not all(keys):
        raise UserError(f"override {text!r} must look like key=value, for example method.warmup=5")
    try:
        value = yaml.safe_load(raw) if raw.strip() else None
    except yaml.YAMLError as error:
        raise UserError(f"override {text!r}: the value is not valid YAML") from error
    if keys[0] in REGISTRIES and keys[1:] == ["name"]:
        keys, value = keys[:1], {"name": value}
    if len(keys) == 1:
        _merge(tree, keys[0], value, f"override {text!r}")
        return
    node = tree
    for key in keys[:-1]:
        child = {} if node.get(key) is None else node[key]
        if not isinstance(child, Mapping):
            raise UserError(f"override {text!r}: {key} is not a section")
        node[key] = node = dict(child)
    node[keys[-1]] = value


# From the tree to checked dataclasses


def _build(tree: dict[str, Any]) -> Config:
    tree = dict(tree)
    per_method = _per_method(tree.pop("methods", None))
    field_names = [item.name for item in dataclasses.fields(Config)]
    for key in tree:
        if key not in field_names:
            raise UserError(f"unknown key {key}{suggest(key, field_names)}")
    parts: dict[str, Any] = {}
    for section, registry in REGISTRIES.items():
        options = dict(tree.get(section) or {})
        name = options.pop("name", None)
        if name is None:
            raise UserError(f"{section} has no name: choose one of {', '.join(registry)}")
        if section == "model" and ":" in str(name):
            name, options = "factory", {**options, "factory": name}
        kind = _kind(section, name)
        if section == "method":
            options = {**per_method.get(name, {}), **options}
        parts[section] = validate(kind, options, section, registry)
    for section, kind in SECTIONS_WITHOUT_CHOICE.items():
        parts[section] = validate(kind, {} if tree.get(section) is None else tree[section], section)
    if isinstance(tree.get("track"), str):
        tree["track"] = [tree["track"]]  # the bare name will do here too
    general = validate(General, {key: value for key, value in tree.items() if key not in parts}, "")
    return Config(
        **parts, **{item.name: getattr(general, item.name) for item in dataclasses.fields(General)}
    )


def _per_method(table: Any) -> dict[str, dict[str, Any]]:
    """The `methods:` table, checked whole:
    a slip in it must not wait for the day its method is chosen.
    """
    if not isinstance(table, Mapping | None):
        raise UserError(f"methods must be a mapping from methods to their options, got {table!r}")
    for name, options in (table or {}).items():
        if name not in METHODS and ":" not in str(name):
            raise UserError(f"unknown key methods.{name}{suggest(name, METHODS)}")
        validate(find_method(name), options, f"methods.{name}")
    return dict(table or {})


def _kind(section: str, name: Any) -> type[Any]:
    """The dataclass behind a name."""
    registry = REGISTRIES[section]
    if section == "method" and isinstance(name, str) and ":" in name:
        return find_method(name)
    if not isinstance(name, str) or name not in registry:
        advice = "One of your own is named module:Class" if section == "method" else ""
        raise UserError(f"unknown {section} {name!r}{suggest(name, registry, advice)}")
    return registry[name]
