"""Four sites with images of their own, for a Grid in memory, and what may leave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flower_grid import MemoryGrid
from flwr.app import ArrayRecord
from PIL import Image

from fednoro.detection.explained import SENT
from fednoro.experiment.config.configuration import resolve
from fednoro.flower.ops.run_follower import as_json
from fednoro.methods import METHODS

NAMES, CLASSES, IMAGES = ("north", "east", "south", "west"), ("a", "b", "c"), 24
TINY = (
    "digits",
    "data=sites",
    "partition=by_column",
    "noise=none",
    "model.width=2",
    "train.epochs=1",
    "train.batch=8",
    "train.rounds=5",
    "device=cpu",
    "checkpoint_every=1",
)
SMALL = {
    "fedcorr": ("method.iterations=1", "method.confidence=0.2"),
    "fedcorr-la": ("method.iterations=1", "method.confidence=0.2"),
}


def make_site(
    place: Path,
    seed: int,
    wrong: bool = False,
    classes: tuple[str, ...] = CLASSES,
    size: int = 8,
    **more: Any,
) -> Path:
    rng = np.random.default_rng(seed)
    for i in range(IMAGES):
        label = i % len(classes)
        pixels = rng.integers(0, 60, (size, size)).astype(np.uint8)
        pixels[:, 2 * label : 2 * label + 2] += 180
        given = (label + 1) % len(classes) if wrong and i % 2 else label
        file = place / "images" / classes[given] / f"patient-{seed}-{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    data = {
        "name": "folder",
        "path": str(place / "images"),
        "size": size,
        "grey": True,
        "cache": str(place / "cache"),
    }
    options = {
        "data": data,
        "device": "cpu",
        "threads": 1,
        "memory": str(place / "memory"),
        "held_out": 0.25,
    }
    (place / "site.yaml").write_text(yaml.safe_dump({**options, **more}))
    return place / "site.yaml"


def nodes(places: dict[str, Path], *names: str) -> dict[int, dict[str, Any]]:
    return {
        900 - 17 * i: {"site": name, "config": str(places[name])}
        for i, name in enumerate(names or NAMES)
    }


def start(out: Path, method: str, *overrides: str, **run_config: Any) -> dict[str, Any]:
    staged = ("method.warmup=2",) if "warmup" in METHODS[method].__dataclass_fields__ else ()
    chosen = (
        *TINY,
        f"method={method}",
        *staged,
        *SMALL.get(method, ()),
        f"out={out}",
        "name=run",
        *overrides,
    )
    config = as_json(resolve(chosen[0], chosen[1:]))
    return {
        "fednoro": config,
        "min-sites": 2,
        "start-sites": 4,
        "round-timeout": 60.0,
        "wait-timeout": 30.0,
        **run_config,
    }


ARRAYS = {  # beside the model; C is the number of classes
    "losses": "C", "counts": "C", "confusion": "C×C", "centroids": "C×d",
    "products": "d×d", "sums": "C×d", "areas": "C×C",
}  # fmt: skip
AUDIT_ARRAYS = {"sums": "C", "counts": "C", "joint": "C×C"}
METRICS = {"num-examples", "loss", "sce", "lid", "mu", "relabelled", *SENT}
CONFIG = {"task", "server-round", "client"}
HELLO = {"site", "simulated", "partitions", "version", "classes", "shape"}


def assert_inventory(grid: MemoryGrid, kinds: set[str], arrays: Mapping[str, str] = ARRAYS) -> None:
    """Every message that came from a site has what it may have, and nothing else."""
    (model,) = {
        len(m.content["arrays"]["values"].numpy()) for m in grid.sent if "arrays" in m.content
    }
    counters = {
        len(m.content["arrays"]["counters"].numpy()) for m in grid.sent if "arrays" in m.content
    }
    assert {m.metadata.message_type for m in grid.received} == kinds
    for message in grid.received:
        content = message.content
        assert set(content) <= {"arrays", "small", "metrics", "config"}
        for name, array in content.array_records.get("arrays", ArrayRecord()).items():
            value = array.numpy()
            expected = {"values": ((model,), np.float32), "counters": ((*counters,), np.int64)}[
                name
            ]
            assert (value.shape, value.dtype) == expected
        for name, array in content.array_records.get("small", ArrayRecord()).items():
            shape = array.numpy().shape
            assert len(shape) == len(arrays[name].split("×"))
            assert shape[0] == (len(CLASSES) if arrays[name].startswith("C") else shape[1])
            assert IMAGES not in shape and 18 not in shape and 6 not in shape, (
                "the numbers of images at a site"
            )
        for values in content.metric_records.values():
            assert set(values) <= METRICS and all(
                isinstance(value, int | float) for value in values.values()
            )
        for values in content.config_records.values():
            assert set(values) <= (HELLO if message.metadata.message_type == "query" else CONFIG)
            for value in values.values():
                assert (
                    not isinstance(value, bytes)
                    and "patient" not in str(value)
                    and "/" not in str(value)
                )
    whole = b"".join(str(m.content).encode() for m in grid.received)
    assert b"patient-" not in whole and b".png" not in whole
