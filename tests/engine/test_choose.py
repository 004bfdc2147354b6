"""Which engine runs the local steps, and how clients are cut into windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from federations import TRAINING, federation, network
from hypothesis import given
from hypothesis import strategies as st

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.engine import choose
from fednoro.engine.choose import Hardware, choose_device
from fednoro.engine.cpu import CpuEngine, windows
from fednoro.engine.cuda import image_kernel
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.config.configuration import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ONE_GIB = 2**30
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def engine(hardware: Hardware) -> Any:
    data, clients = federation()
    return hardware.engine(network, data, 1, TRAINING, 0, clients)


@pytest.mark.parametrize(
    ("device", "kind", "precision", "message"),
    [
        (CPU, "cuda", "fp32", "engine cuda runs on a cuda device, got device cpu: use engine=auto"),
        (CUDA, "cpu", "fp32", "engine cpu runs on a cpu device, got device cuda: use engine=auto"),
        (CPU, "auto", "bf16", "precision bf16 needs a CUDA device, got device cpu: use fp32"),
        (CPU, "cpu", "tf32", "precision tf32 needs a CUDA device, got device cpu: use fp32"),
        (CPU, "eager", "bf16", "precision bf16 needs a CUDA device, got device cpu: use fp32"),
        (
            CUDA,
            "eager",
            "bf16",
            "the eager engine computes in fp32, got precision bf16: use engine=auto",
        ),
        (
            CUDA,
            "eager",
            "tf32",
            "the eager engine computes in fp32, got precision tf32: use engine=auto",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    device: torch.device, kind: Any, precision: Any, message: str
):
    with pytest.raises(UserError) as refused:
        Hardware(device, kind, precision)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("device", "kind", "precision"),
    [(CPU, "auto", "fp32"), (CPU, "cpu", "fp32"), (CPU, "eager", "fp32"), (CUDA, "auto", "bf16"),
     (CUDA, "cuda", "tf32"), (CUDA, "eager", "fp32")],
)  # fmt: skip
def test_what_can_be_is_accepted(device: torch.device, kind: Any, precision: Any) -> None:
    Hardware(device, kind, precision)


@pytest.mark.parametrize(
    ("kind", "lanes", "engine_class", "says"),
    [
        ("auto", 1, CpuEngine, "cpu, 1 client at a time"),
        ("auto", 3, CpuEngine, "cpu, 3 clients at a time"),
        ("cpu", 2, CpuEngine, "cpu, 2 clients at a time"),
        ("eager", 3, EagerEngine, "eager on cpu"),
    ],
)
def test_an_engine_for_the_cpu_says_what_it_is(
    kind: Any, lanes: int, engine_class: type, says: str
) -> None:
    made = engine(Hardware(CPU, kind, lanes=lanes))
    assert type(made) is engine_class
    assert made.describe() == says
    assert sorted(made.clients) == [0, 1, 2, 3, 4]


def test_by_default_there_is_a_lane_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert len(engine(Hardware(CPU)).lanes) == 2


def test_lanes_are_no_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine(Hardware(CPU, lanes=1)).net.values.nbytes
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 4 * 6 * model * 2 + 1}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert len(engine(Hardware(CPU, lanes=5)).lanes) == 2
    monkeypatch.setitem(pages, "SC_PHYS_PAGES", 10)
    assert len(engine(Hardware(CPU, lanes=5)).lanes) == 1


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_engine_for_cuda_says_what_it_is(precision: Any) -> None:
    data, clients = federation()
    made = CudaEngine(network, data, 1, TRAINING, 0, CPU, clients, precision=precision, lanes=3)
    assert made.describe() == f"cuda graphs on 3 streams of cpu, {precision}"


class Asked:
    """Stands in for an engine and keeps what it was made of."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.given, self.options = given, options


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """As if there were a GPU with so many bytes free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr("fednoro.engine.choose.EagerEngine", type("Eager", (Asked,), {}))
    monkeypatch.setattr("fednoro.engine.cuda.cuda_engine.CudaEngine", type("Cuda", (Asked,), {}))


def test_on_cuda_the_engine_for_it_is_taken_with_its_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, ONE_GIB)
    made = engine(Hardware(CUDA, precision="bf16", compiled=True, lanes=5))
    assert type(made).__name__ == "Cuda"
    assert made.options == {"precision": "bf16", "compiled": True, "lanes": 5, "stacked": None}
    assert engine(Hardware(CUDA, stack=False)).options["stacked"] is False
    assert type(engine(Hardware(CUDA, "eager"))).__name__ == "Eager"


def test_images_that_do_not_fit_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, 800)
    with pytest.warns(
        FedNoRoWarning, match=r"the eager engine in fp32, because the images \(0.0 GiB\) leave too"
    ):
        made = engine(Hardware(CUDA))
    assert type(made).__name__ == "Eager"
    assert made.options == {"resident": False}


def test_a_gpu_without_room_for_a_network_per_stream_means_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    on_a_gpu(monkeypatch, ONE_GIB)
    monkeypatch.setattr("fednoro.engine.cuda.cuda_engine.CudaEngine", full)
    with pytest.warns(
        FedNoRoWarning, match="the eager engine in fp32, because the GPU's memory does not hold"
    ):
        made = engine(Hardware(CUDA))
    assert type(made).__name__ == "Eager" and made.options == {}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [("engine", "gpu", "auto"), ("precision", "fp16", "bf16"), ("compile", "maybe", "")],
)
def test_configuration_takes_known_values_only(key: str, value: str, allowed: str) -> None:
    with pytest.raises(UserError, match=key) as refused:
        resolve("digits", [f"{key}={value}"])
    assert allowed in str(refused.value)


def test_by_default_the_engine_is_chosen_and_computes_in_fp32() -> None:
    config = resolve("digits", [])
    assert (config.engine, config.precision, config.compile, config.stack) == (
        "auto",
        "fp32",
        False,
        True,
    )
    config = resolve("digits", ["engine=eager", "precision=tf32", "compile=true", "stack=false"])
    assert (config.engine, config.precision, config.compile, config.stack) == (
        "eager",
        "tf32",
        True,
        False,
    )


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto") == torch.device(name)


@given(
    st.lists(st.integers(0, 999), unique=True, max_size=50).map(sorted),
    st.integers(0, 100),
    st.integers(0, 1000),
    st.integers(1, 9),
)
def test_windows_cover_all_clients_once_in_order_and_hold_no_more_than_they_may(
    clients: list[int], model: int, held: int, least: int
) -> None:
    cut = [list(window) for window in windows(clients, model, held, least)]
    assert [k for window in cut for k in window] == clients
    assert all(cut)
    room = max(least, held // max(model, 1))
    assert all(len(window) == room for window in cut[:-1]) and all(
        len(window) <= room for window in cut
    )
    for window in cut:
        assert len(window) <= least or len(window) * model <= held


def test_the_data_need_not_be_a_power_of_two_for_the_share_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images of exactly half of the free memory are taken; one byte more is too much."""
    data, _ = federation()
    assert isinstance(data.images, np.ndarray)
    on_a_gpu(monkeypatch, 2 * data.images.nbytes)
    assert type(engine(Hardware(CUDA))).__name__ == "Cuda"
    on_a_gpu(monkeypatch, 2 * data.images.nbytes - 1)
    with pytest.warns(FedNoRoWarning):
        assert type(engine(Hardware(CUDA))).__name__ == "Eager"


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=needs_cuda)])
def test_warming_up_gives_no_error(device: torch.device) -> None:
    Hardware(device, precision="bf16" if device == CUDA else "fp32").warm_up()
    if device == CUDA:  # it keeps quiet about errors
        for dtype in (torch.float32, torch.bfloat16):
            choose._convolve(device, dtype)
        image_kernel.warm_up(device)
