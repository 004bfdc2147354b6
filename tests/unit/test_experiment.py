"""What a finished run says, and from where it can be carried on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fednoro
from fednoro.config import anchored, resolve
from fednoro.experiment import Watcher, laboratory

TINY = (
    "data={name: synthetic, images: 160, classes: 3, size: 8, channels: 1}",
    "partition={name: iid, clients: 8}",
    "noise={name: symmetric, rate: 0.5}",
    "model={name: cnn, width: 4}",
    "train={rounds: 4, epochs: 1, batch: 16}",
)


def test_a_client_that_was_never_judged_counts_as_flagged_as_it_was_trained(tmp_path: Path) -> None:
    with pytest.warns(fednoro.types.FedNoRoWarning):
        run = fednoro.run("digits", *TINY, "method.warmup=2", "train.failures=0.8", f"out={tmp_path}")
    found = run.detection
    assert found is not None
    judged, everyone = {int(k) for k in found["clients"]}, set(range(8))
    assert judged < everyone, "this seed should leave some clients without a verdict"
    flagged, noisy = set(found["flagged"]), set(found["noisy"])
    assert everyone - judged <= flagged
    assert found["recall"] == len(flagged & noisy) / len(noisy)
    assert found["precision"] == len(flagged & noisy) / len(flagged)
    assert found["exact"] == (flagged == noisy)


def test_where_nobody_is_noisy_no_annotator_and_no_engine_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve("digits", [*TINY, "noise={name: h_idn, rate: 0}", "method=fedla", "device=cpu"])
    with laboratory(config, Watcher()) as lab:
        monkeypatch.setattr(lab, "_engine_on", lambda *_: pytest.fail("an engine was made"))
        federation = lab.federate(tmp_path)
    assert federation.noisy is not None and not federation.noisy.any()


def test_relative_paths_are_kept_absolute_so_that_a_run_resumes_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for label, level in (("a", 40), ("b", 200)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(20):
            pixels = rng.integers(level - 30, level + 30, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{i}.png")
    monkeypatch.setenv("FEDNORO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny = [*TINY[1:4], "train={rounds: 2, epochs: 1, batch: 8}", "partition.clients=2", "method=fedavg"]
    run = fednoro.run("digits", "data={name: folder, path: images, size: 8}", *tiny, "out=runs")
    folder = run.folder.absolute()
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fednoro.resume(folder).bacc == run.bacc


def test_only_what_exists_is_anchored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resize").mkdir()  # the name of an option's value, not a path
    config = resolve("digits", ["data={name: folder, path: not-there, crop: resize}"])
    assert anchored(config) == config
