"""FedLSR: the second view, the ramp of γ, and where the published code differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import MIXED, TRAINING, federation, network, start, three_channels

import fednoro
from fednoro.core.types import Step, Task, UserError
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.config.configuration import resolve
from fednoro.methods import FedLSR

pytestmark = pytest.mark.usefixtures("one_thread")


def images(channels: int, grey: bool = False) -> torch.Tensor:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(6, 1 if grey else channels, 8, 8)).astype(np.float32))
    return x.expand(6, channels, 8, 8).contiguous()


def uniforms(seed: int = 2) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((6, 7), dtype=np.float32))


def gamma(method: FedLSR, round: int) -> float:
    data, clients = federation(MIXED)
    lab = EagerEngine(network, data, 1, TRAINING, 0, torch.device("cpu"), clients)
    (value,) = method.aux(Task("train", round, start().model), lab.site(clients[0])).values()
    assert value.shape == () and value.dtype == torch.float32
    return value.item()


def test_gamma_rises_from_nothing_over_the_warm_up() -> None:
    method = FedLSR(gamma=0.4, warmup=20)
    assert [gamma(method, t) for t in (0, 5, 10, 20, 99)] == pytest.approx([0, 0.1, 0.2, 0.4, 0.4])
    assert gamma(FedLSR(gamma=0.4, warmup=0), 0) == pytest.approx(0.4)


def test_three_channels_are_taken_for_colour_and_others_are_rotated() -> None:
    for channels, same_as in ((1, "rotation"), (2, "rotation"), (3, "colour")):
        x, u = images(channels), uniforms()
        other: Any = "colour" if same_as == "rotation" else "rotation"
        chosen: Any = same_as
        assert torch.equal(FedLSR().second_view(x, u), FedLSR(view=chosen).second_view(x, u))
        assert not torch.allclose(FedLSR().second_view(x, u), FedLSR(view=other).second_view(x, u))


@pytest.mark.parametrize("view", ["colour", "rotation"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_second_view_is_another_view_of_the_same_shape_and_layout(
    channels: int, view: Any
) -> None:
    x, u = images(channels).contiguous(memory_format=torch.channels_last), uniforms()
    kept = x.clone()
    second = FedLSR(view=view).second_view(x, u)
    assert second.shape == x.shape and second.stride() == x.stride() and second.dtype == x.dtype
    assert not second.requires_grad and second.isfinite().all()
    assert torch.equal(x, kept)
    assert not torch.allclose(second, x, atol=0.1)
    assert not torch.allclose(second, FedLSR(view=view).second_view(x, uniforms(3)), atol=0.1)


def test_rotation_keeps_grey_images_grey() -> None:
    second = FedLSR(view="rotation").second_view(images(3, grey=True) * 0 + 0.3, uniforms())
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    black = (0 - mean) / deviation
    torch.testing.assert_close(second.amin(dim=(0, 2, 3)), black)  # what comes in from outside


def test_each_image_is_changed_by_its_own_numbers() -> None:
    x, u = images(3), uniforms()
    whole, v = FedLSR().second_view(x, u), u.clone()
    v[2] = uniforms(7)[2]
    changed = FedLSR().second_view(x, v)
    assert torch.equal(whole[[0, 1, 3, 4, 5]], changed[[0, 1, 3, 4, 5]])
    assert not torch.allclose(whole[2], changed[2])
    torch.testing.assert_close(FedLSR().second_view(x[2:3], u[2:3]), whole[2:3])


def test_one_lambda_mixes_the_whole_batch() -> None:
    net = three_channels().eval()
    u = torch.cat([torch.full((6, 1), 0.5), uniforms()], dim=1)
    y, aux = torch.tensor([0, 1, 2, 3, 0, 1]), {"gamma": torch.tensor(0.1)}

    def value(u: torch.Tensor) -> float:
        return FedLSR().loss(Step(net, net, images(3), y, torch.arange(6), aux, u)).item()

    others, first = u.clone(), u.clone()
    others[1:, 0], first[0, 0] = 0.9, 0.9
    assert value(others) == value(u) != value(first)


def test_agreement_counts_only_as_gamma_says() -> None:
    net = three_channels().eval()
    u = torch.cat([torch.full((6, 1), 0.5), uniforms()], dim=1)
    y = torch.tensor([0, 1, 2, 3, 0, 1])

    def value(gamma: float, **options: Any) -> float:
        aux = {"gamma": torch.tensor(gamma)}
        return FedLSR(**options).loss(Step(net, net, images(3), y, torch.arange(6), aux, u)).item()

    assert value(1.0) > value(0.0)
    paper, reference = (
        value(1.0, lam_e=0, behaviour=b) - value(0.0, lam_e=0, behaviour=b)
        for b in ("paper", "reference")
    )
    assert paper == pytest.approx(4 * reference, rel=1e-2)  # averaged over four classes as well


def test_the_published_code_hardly_tells_right_from_wrong() -> None:
    """A softmax of probabilities is nearly uniform: the published loss is
    bounded where the paper's is not.
    """
    net = three_channels().eval()
    for p in net.parameters():
        p.data.mul_(3)
    u = torch.cat([torch.full((6, 1), 0.5), uniforms()], dim=1)
    worst = net(images(3)).argmin(dim=1)
    step = Step(net, net, images(3), worst, torch.arange(6), {"gamma": torch.tensor(0.0)}, u)
    paper, reference = (
        FedLSR(lam_e=0, behaviour=b).loss(step).item() for b in ("paper", "reference")
    )  # type: ignore[arg-type]
    assert reference < np.log(3 + np.e) < paper


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(UserError, match=r"method\.gamma must be >= 0, got -1"):
        FedLSR(gamma=-1)


@pytest.mark.parametrize(
    ("preset", "warmup", "view"), [("ich", 20, "rotation"), ("isic2019", 60, "auto")]
)
def test_presets_have_the_papers_warm_up(preset: str, warmup: int, view: Any) -> None:
    assert resolve(preset, ["method=fedlsr", "data.path=anywhere"]).method == FedLSR(
        warmup=warmup, view=view
    )


@pytest.mark.parametrize("behaviour", ["paper", "reference"])
def test_it_runs_on_digits(behaviour: str, tmp_path: Path) -> None:
    small = ("train.rounds=2", "train.epochs=1", "noise=none", "model.width=4", f"out={tmp_path}")
    run = fednoro.run("digits", "method=fedlsr", f"method.behaviour={behaviour}", *small)
    assert len(run.bacc) == 2
    assert np.isfinite(run.bacc).all()
