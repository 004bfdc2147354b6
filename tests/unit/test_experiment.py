"""What a finished run says, and from where it can be carried on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import fednoro
from fednoro.config import anchored, resolve
from fednoro.experiment import Lab, Watcher, laboratory
from fednoro.types import UserError

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
    assert repr(run) == (
        f"Run({str(run.folder)!r}, best={run.best:.4f}, last={run.last:.4f}, final={run.final:.4f}, "
        f"flagged={found['flagged']})"
    )


def test_where_nobody_is_noisy_no_annotator_and_no_engine_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve("digits", [*TINY, "noise={name: h_idn, rate: 0}", "method=fedla", "device=cpu"])
    with laboratory(config, Watcher()) as lab:
        monkeypatch.setattr(lab, "_engine_on", lambda *_: pytest.fail("an engine was made"))
        federation = lab.federate(tmp_path)
    assert federation.noisy is not None and not federation.noisy.any()


@pytest.mark.parametrize(("named", "wrong"), [("[1, 8]", "8"), ("[-1, 7, 20]", "-1, 20")])
def test_a_noisy_client_that_the_federation_does_not_have_is_refused_before_anything_is_trained(
    named: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lab, "_engine_on", lambda *_: pytest.fail("an engine was made"))
    chosen = ["noise={name: h_idn}", "method=fednoro-plus", "method.warmup=2", f"method.noisy={named}"]
    message = f"method.noisy must name clients of the federation, from 0 to 7, got {wrong}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        fednoro.run("digits", *TINY, *chosen, "device=cpu", f"out={tmp_path}")
    assert not any(tmp_path.iterdir()), "nothing was begun that could be resumed"


def test_every_client_of_a_federation_can_be_named_noisy(tmp_path: Path) -> None:
    chosen = ["method=fednoro-plus", "method.warmup=2", "method.noisy=[0, 7]", "device=cpu"]
    assert fednoro.run("digits", *TINY, *chosen, f"out={tmp_path}").detection is None, "they were not looked for"


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
