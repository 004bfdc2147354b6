"""Seconds and peak memory per round for more and more clients that share the same data.

python -m benchmarks.scale [--network resnet18] [--clients 20 50 100 200]
                           [--method fedavg fednoro] [--size 32] …
python -m benchmarks.scale --network cnn --clients 20 100 1000

FedNoRo's round is one of its second stage with every other client flagged: those distil, all models
are held at once, and the server weighs them by their distances. Each row comes from a fresh
process, so that its peak is its own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, get_args

import torch

from benchmarks.engine import BATCH, MODELS, Workload, play_round
from benchmarks.machine import describe, markdown, peak_memory, seconds
from fednoro.core.types import Precision
from fednoro.engine.choose import Hardware, choose_device
from fednoro.methods import FedNoRo, Method

METHODS: dict[str, Method] = {"fedavg": Method(), "fednoro": FedNoRo()}


@dataclass(frozen=True)
class Row:
    """What one process measures."""

    network: str
    method: str
    clients: int
    size: int
    images: int
    device: str
    precision: Precision
    repeat: int


@dataclass(frozen=True)
class Figures:
    """What it found."""

    engine: str
    steps: int
    seconds: tuple[float, ...]  # per round
    before: int  # bytes resident before data and networks were made
    peak: int  # bytes resident at most
    gpu: int  # bytes allocated on the GPU at most; 0 without one


def measure(row: Row) -> Figures:
    """Plays one round that is not counted, then as many as asked."""
    device = choose_device(row.device)
    torch.zeros(1, device=device)  # what CUDA itself takes is there before as well
    before = peak_memory()
    work = Workload.make(row.network, row.size, row.clients, row.images)
    lanes = torch.get_num_threads() if device.type == "cpu" else None
    engine = work.engine(Hardware(device, precision=row.precision, lanes=lanes))
    method = METHODS[row.method]
    state = work.judged(device) if isinstance(method, FedNoRo) else work.start(device)
    torch.set_num_threads(work.threads())
    play_round(engine, method, state)
    taken = tuple(
        seconds(lambda: play_round(engine, method, state), device) for _ in range(row.repeat)
    )
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Figures(engine.describe(), work.steps, taken, before, peak_memory(), gpu)


def cells(row: Row, found: Figures, first: Figures) -> list[str]:
    """One line of the table."""
    mine, theirs = statistics.median(found.seconds), statistics.median(first.seconds)
    per_step = (mine / found.steps) / (theirs / first.steps)
    return [
        row.method,
        f"{row.clients:,}",
        f"{found.steps:,}",
        f"{mine:.2f}",
        f"{min(found.seconds):.2f} to {max(found.seconds):.2f}",
        f"{1000 * mine / found.steps:.2f}",
        f"{mine / theirs:.2f}",
        f"{per_step:.2f}",
        f"{found.peak / 1e6:,.0f}",
        f"{(found.peak - found.before) / 1e6:,.0f}",
        *([f"{found.gpu / 1e6:,.0f}"] if found.gpu else []),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table per network, row by row as they are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add(
        "--network",
        nargs="+",
        choices=sorted(MODELS),
        help="default: both on a CPU, resnet18 on a GPU",
    )
    add(
        "--clients",
        nargs="+",
        type=int,
        help="default: 20 50 100 200 on a GPU, else 20 50, and 20 100 1000 for cnn",
    )
    add("--size", type=int, help="pixels; default: 64 on a GPU, else 32, and 28 for cnn")
    add(
        "--images",
        type=int,
        help="of all clients; default: 8000 on a GPU, else 1000, and 20000 for cnn",
    )
    add("--method", nargs="+", choices=sorted(METHODS), default=["fedavg", "fednoro"])
    add("--device", default="auto")
    add("--precision", choices=get_args(Precision), default="fp32")
    add("--repeat", type=int, default=2, help="rounds that are measured, after one that is not")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    gpu = device.type == "cuda"
    header = [
        "method",
        "clients",
        "steps",
        "s per round",
        "spread",
        "ms per step",
        "round / first",
        "step / first",
    ]
    header += ["peak MB", "of it for the round, MB", *(["GPU MB"] if gpu else [])]
    for network in options.network or (["resnet18"] if gpu else ["resnet18", "cnn"]):
        small = network == "cnn"
        size = options.size or (28 if small else 64 if gpu else 32)
        images = options.images or (20000 if small else 8000 if gpu else 1000)
        counts = options.clients or (
            [20, 100, 1000] if small else [20, 50, 100, 200] if gpu else [20, 50]
        )
        print(
            f"\n{network}, {size} px, about {images:,} images in all, batch "
            f"{BATCH}, {options.precision}, augmentation on: whole rounds, median "
            f"and spread of {options.repeat}\n"
        )
        print(markdown(header, []), flush=True)
        engines: dict[str, None] = {}
        for method in options.method:
            first: Figures | None = None
            for clients in counts:
                row = Row(
                    network,
                    method,
                    clients,
                    size,
                    images,
                    options.device,
                    options.precision,
                    options.repeat,
                )
                with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                    found = fresh.submit(measure, row).result()
                first = first or found
                engines[found.engine] = None
                print(f"| {' | '.join(cells(row, found, first))} |", flush=True)
        print(
            f"\nEngine: {'; '.join(engines)}. Steps grow with the clients because "
            "each client's last batch is smaller; FedNoRo's round is one of stage 2 "
            "with every other client flagged."
        )
    print(f"\n{describe(device)}")


if __name__ == "__main__":
    main()
