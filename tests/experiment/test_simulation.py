"""What a finished run says, and from where it can be carried on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import fednoro
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.experiment.config.configuration import resolve, with_absolute_paths
from fednoro.experiment.drive import Watcher
from fednoro.experiment.simulation import Lab, laboratory

TINY = (
    "data={name: synthetic, images: 160, classes: 3, size: 8, channels: 1}",
    "partition={name: iid, clients: 8}",
    "noise={name: symmetric, rate: 0.5}",
    "model={name: cnn, width: 4}",
    "train={rounds: 4, epochs: 1, batch: 16}",
)


def test_a_client_that_was_never_judged_counts_as_flagged_as_it_was_trained(tmp_path: Path) -> None:
    with pytest.warns(FedNoRoWarning):
        run = fednoro.run(
            "digits", *TINY, "method.warmup=2", "train.failures=0.8", f"out={tmp_path}"
        )
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
        f"Run({str(run.folder)!r}, best={run.best:.4f}, last={run.last:.4f}, "
        f"final={run.final:.4f}, flagged={found['flagged']})"
    )


def test_where_nobody_is_noisy_no_annotator_and_no_engine_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(
        "digits", [*TINY, "noise={name: h_idn, rate: 0}", "method=fedla", "device=cpu"]
    )
    with laboratory(config, Watcher()) as lab:
        monkeypatch.setattr(lab, "_engine_on", lambda *_: pytest.fail("an engine was made"))
        federation = lab.federate(tmp_path)
    assert federation.noisy is not None and not federation.noisy.any()


@pytest.mark.parametrize(("named", "wrong"), [("[1, 8]", "8"), ("[-1, 7, 20]", "-1, 20")])
def test_a_noisy_client_that_the_federation_does_not_have_is_refused_before_anything_is_trained(
    named: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lab, "_engine_on", lambda *_: pytest.fail("an engine was made"))
    chosen = [
        "noise={name: h_idn}",
        "method=fednoro-plus",
        "method.warmup=2",
        f"method.noisy={named}",
    ]
    message = f"method.noisy must name clients of the federation, from 0 to 7, got {wrong}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        fednoro.run("digits", *TINY, *chosen, "device=cpu", f"out={tmp_path}")
    assert not any(tmp_path.iterdir()), "nothing was begun that could be resumed"


def test_every_client_of_a_federation_can_be_named_noisy(tmp_path: Path) -> None:
    chosen = ["method=fednoro-plus", "method.warmup=2", "method.noisy=[0, 7]", "device=cpu"]
    assert fednoro.run("digits", *TINY, *chosen, f"out={tmp_path}").detection is None, (
        "they were not looked for"
    )


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
    tiny = [
        *TINY[1:4],
        "train={rounds: 2, epochs: 1, batch: 8}",
        "partition.clients=2",
        "method=fedavg",
    ]
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
    assert with_absolute_paths(config) == config


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that lacks its end."""
    run = fednoro.run("digits", *TINY, "method=fedavg", "device=cpu", f"out={tmp_path}", "name=x")
    (run.folder / "result.json").unlink()
    return run.folder


def edit(folder: Path, *changes: tuple[str, str]) -> None:
    file = folder / "config.yaml"
    for before, after in changes:
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))


def test_a_configuration_that_was_edited_is_not_mixed_into_a_run(stopped: Path) -> None:
    edit(stopped, ("lr: 0.001", "lr: 0.1"), ("batch: 16", "batch: 8"))
    with pytest.raises(UserError) as refused:
        fednoro.resume(stopped)
    assert str(refused.value) == (
        f"{stopped / 'config.yaml'} has changed since the run began: train.batch (was 16, is 8), "
        "train.lr (was 0.001, is 0.1). Set it back, or begin another run with: fednoro run "
        f"{stopped / 'config.yaml'} name=another"
    )
    edit(stopped, ("lr: 0.1", "lr: 1e-3"), ("batch: 8", "batch: 16"))
    assert len(fednoro.resume(stopped).bacc) == 4, "what is written otherwise is the same"


def test_many_changes_are_counted(stopped: Path) -> None:
    edit(
        stopped,
        ("name: symmetric", "name: h_idn"),
        ("name: fedavg", "name: fedprox"),
        ("lr: 0.001", "lr: 0.1"),
    )
    edit(stopped, ("batch: 16", "batch: 8"))
    with pytest.raises(
        UserError, match=r"config.yaml has changed since the run began: noise.name .* and 1 more\. "
    ):
        fednoro.resume(stopped)


def test_where_and_how_a_run_is_carried_on_may_change(stopped: Path) -> None:
    edit(
        stopped,
        ("name: x", "name: y"),
        ("device: cpu", "device: auto"),
        ("checkpoint_every: 5", "checkpoint_every: 1"),
    )
    assert len(fednoro.resume(stopped).bacc) == 4


def test_a_run_of_an_earlier_version_resumes_and_is_guarded_from_then_on(stopped: Path) -> None:
    (stopped / "checkpoints" / "config.yaml").unlink()
    bacc = fednoro.resume(stopped).bacc
    assert len(bacc) == 4
    (stopped / "result.json").unlink()
    edit(stopped, ("lr: 0.001", "lr: 0.1"))
    with pytest.raises(UserError, match=r"train\.lr \(was 0\.001, is 0\.1\)"):
        fednoro.resume(stopped)


def test_an_option_that_a_newer_version_has_lost_does_not_stop_a_run(stopped: Path) -> None:
    kept = stopped / "checkpoints" / "config.yaml"
    kept.write_text(kept.read_text() + "gone: 1\n")
    assert len(fednoro.resume(stopped).bacc) == 4
