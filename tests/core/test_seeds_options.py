"""Derived randomness, options with a range, clients, and the choice of a device."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.core.options import Options, option, range_text
from fednoro.core.seeds import generator, torch_seed
from fednoro.core.training import Augment, Training
from fednoro.core.types import UserError
from fednoro.data.client import Client
from fednoro.engine.choose import choose_device
from fednoro.models import Cnn

NO_CUDA = not torch.cuda.is_available()


def stream(seed: int, purpose: str, *keys: int) -> tuple[int, ...]:
    return tuple(generator(seed, purpose, *keys).integers(2**62, size=4).tolist())


# Seeds.

SMALL = st.integers(0, 3)
PLACES = st.tuples(
    SMALL,
    st.sampled_from(["train", "score", "score.augment", "model"]),
    st.lists(SMALL, max_size=4),
)


@settings(deadline=None, max_examples=200)
@given(PLACES, PLACES)
def test_streams_are_equal_exactly_when_seed_purpose_and_keys_are(
    a: tuple[int, str, list[int]], b: tuple[int, str, list[int]]
) -> None:
    assert (stream(a[0], a[1], *a[2]) == stream(b[0], b[1], *b[2])) == (a == b)


def test_trailing_zero_keys_make_another_stream() -> None:
    asked = [(), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (1, 0), (1, 0, 0), (0, 1)]
    assert len({stream(0, "train", *keys) for keys in asked}) == len(asked)


def test_drawing_from_one_stream_does_not_move_another() -> None:
    first, second = generator(0, "train", 0), generator(0, "train", 1)
    first.random(1000)
    assert tuple(second.integers(2**62, size=4).tolist()) == stream(0, "train", 1)


def test_torch_is_seeded_inside_the_block_and_restored_after_it() -> None:
    torch.manual_seed(123)
    expected = torch.randn(3)
    torch.manual_seed(123)
    with torch_seed(0, "model"):
        first = torch.randn(3)
    assert torch.equal(torch.randn(3), expected)
    with torch_seed(0, "model"):
        second = torch.randn(3)
    with torch_seed(0, "model", 0):
        other = torch.randn(3)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not torch.equal(first, expected)


def test_torch_is_restored_after_an_error_too() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"), torch_seed(0, "model"):
        torch.randn(3)
        raise RuntimeError("inside")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@pytest.mark.skipif(NO_CUDA, reason="this machine has no CUDA device")
def test_cuda_is_seeded_inside_the_block_and_restored_after_it() -> None:
    torch.zeros(1, device="cuda")
    before = torch.cuda.get_rng_state()
    draws = []
    for _ in range(2):
        with torch_seed(0, "model"):
            draws.append(torch.randn(3, device="cuda"))
    assert torch.equal(*draws)
    assert torch.equal(torch.cuda.get_rng_state(), before)


# Options.


@dataclass(frozen=True)
class Knobs(Options):
    """One field for each kind of range."""

    section: ClassVar[str] = "knobs"

    closed: float = option(0.5, ge=0, le=1)
    open: float = option(0.5, gt=0, lt=1)
    half: float = option(0.5, ge=0, lt=1)
    low: int = option(1, ge=1)
    above: float = option(1.0, gt=0)
    high: float = option(1.0, le=2.5)
    below: float = option(1.0, lt=2.5)
    maybe: int | None = option(None, ge=1)
    free: float = option(0.0)
    name: str = option("x")


@pytest.mark.parametrize(
    ("field", "good", "bad", "words"),
    [
        ("closed", (0, 0.5, 1, True), (-1e-9, 1.4), "in [0, 1]"),
        ("open", (1e-9, 0.999), (0, 1, 0.0, -3), "in (0, 1)"),
        ("half", (0, 0.999), (-1, 1), "in [0, 1)"),
        ("low", (1, 10**400), (0, -5), ">= 1"),
        ("above", (1e-300,), (0, -1.0), "> 0"),
        ("high", (2.5, -1e300), (2.6,), "<= 2.5"),
        ("below", (2.4,), (2.5,), "< 2.5"),
        ("maybe", (None, 1), (0,), ">= 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_range_and_value(
    field: str, good: tuple[float, ...], bad: tuple[float, ...], words: str
) -> None:
    for value in good:
        assert getattr(Knobs(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(UserError) as caught:
            Knobs(**{field: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"knobs.{field} must be {words}, got {value}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["closed", "low", "above", "high", "maybe"])
def test_nan_and_infinity_are_refused_wherever_there_is_a_range(field: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"knobs\.{field} must be .*, got {value}"):
        Knobs(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.int32])
def test_numpy_numbers_are_checked_like_any_other(kind: type) -> None:
    assert Knobs(low=kind(3)).low == 3
    with pytest.raises(UserError, match=r"knobs\.low must be >= 1, got -3"):
        Knobs(low=kind(-3))


def test_a_field_without_a_range_takes_anything_and_says_nothing() -> None:
    assert math.isnan(Knobs(free=math.nan).free)
    assert {field.name: range_text(field) for field in dataclasses.fields(Knobs)}["free"] == ""


def test_changing_an_option_checks_it_again() -> None:
    with pytest.raises(UserError, match=r"knobs\.low must be >= 1, got 0"):
        dataclasses.replace(Knobs(), low=0)


def test_options_without_a_section_go_by_their_bare_name() -> None:
    @dataclass(frozen=True)
    class Bare(Options):
        rate: float = option(0.0, ge=0, le=1)

    with pytest.raises(UserError, match=r"^rate must be in \[0, 1\], got 1\.4$"):
        Bare(rate=1.4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Training(lr=0), "train.lr must be > 0, got 0"),
        (lambda: Training(lr=math.nan), "train.lr must be > 0, got nan"),
        (lambda: Training(batch=0), "train.batch must be >= 1, got 0"),
        (lambda: Training(participation=1.5), "train.participation must be in (0, 1], got 1.5"),
        (lambda: Training(failures=1), "train.failures must be in [0, 0.95], got 1"),
        (lambda: Augment(translate=1), "train.augment.translate must be in [0, 1), got 1"),
        (lambda: Augment(rotate=-1), "train.augment.rotate must be in [0, 180], got -1"),
        (lambda: Cnn(width=0), "model.width must be in [1, 4096], got 0"),
    ],
)
def test_library_users_are_told_the_same_as_the_command_line(make: type, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == message


# Clients.


def test_a_client_trains_on_the_labels_it_was_given_until_they_are_corrected() -> None:
    client = Client(3, "site", np.array([5, 6, 9]), np.array([0, 2, 1]))
    assert client.labels.tolist() == [0, 2, 1]
    client.memory["labels"] = torch.tensor([0, 0, 1])
    assert client.labels.tolist() == [0, 0, 1]
    assert client.observed.tolist() == [0, 2, 1]
    assert Client(4, "other", np.array([1]), np.array([1])).memory == {}


# Devices.


def test_the_cpu_can_always_be_chosen() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_auto_takes_cuda_exactly_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto").type == ("cpu" if NO_CUDA else "cuda")
    for available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert choose_device("auto").type == ("cuda" if available else "cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cpu,cuda", "meta"])
def test_a_device_that_is_none_is_refused_by_name_in_one_line(name: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_device(name)
    known = name == "meta"  # to PyTorch
    expected = (
        "cannot be used here: " if known else "is unknown: use auto, cpu, cuda, or cuda:1 and so on"
    )
    assert str(caught.value).startswith(f"device {name!r} {expected}")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not NO_CUDA, reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(UserError, match=f"device '{name}' cannot be used here: "):
        choose_device(name)


@pytest.mark.cuda
@pytest.mark.skipif(NO_CUDA, reason="this machine has no CUDA device")
def test_cuda_can_be_chosen_where_there_is_one_but_no_further_than_it_goes() -> None:
    assert choose_device("cuda") == torch.device("cuda")
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used here: "):
        choose_device("cuda:99")
