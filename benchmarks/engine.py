"""ms per client-step over whole rounds: the plain loop, `eager`, the fast engine, and the limit.

python -m benchmarks.engine [--network resnet18 cnn] [--sizes 32 64 112 224]
                            [--precision fp32 tf32 bf16] [--kd] …

A round is FedAvg's: every client trains for one epoch and the models are averaged. The limit is
the same machinery with one client that holds all the data, in batches as large as those of all
clients together; its figure is the time of that round divided by the clients' steps, so that
ratios are those of whole rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from benchmarks import plain
from benchmarks.machine import best_and_median, describe, markdown, ratio, seconds
from fednoro.core.seeds import generator
from fednoro.core.training import Augment, Training
from fednoro.core.types import Clients, Precision, State, Task
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.choose import Hardware, choose_device
from fednoro.engine.eager import EagerEngine
from fednoro.engine.threads import worthwhile_threads
from fednoro.experiment.rounds import Evaluation, play
from fednoro.methods import FedNoRo, Method
from fednoro.models import Cnn, Model, Packed, Resnet18, initialise

MODELS: dict[str, Model] = {"resnet18": Resnet18(), "cnn": Cnn(width=16)}
CHANNELS = {"resnet18": 3, "cnn": 1}
BATCH, CLASSES = 16, 8
LEAST = (
    # images of a client: more than a batch; with 17 the plain loop would end on one
    # image, which BatchNorm refuses
    18
)


@dataclass(frozen=True)
class Workload:
    """Clients of unequal size with random images, and what they train."""

    model: Model
    dataset: Dataset
    clients: tuple[Client, ...]
    training: Training
    seed: int = 0

    @classmethod
    def make(cls, network: str, size: int, clients: int, images: int, seed: int = 0) -> Workload:
        """About so many images of size×size pixels, shared out by Dirichlet(3)."""
        rng = generator(seed, "benchmark")
        least = max(2, min(LEAST, images // clients))
        rest = max(0, images - least * clients)
        sizes = least + np.floor(rest * rng.dirichlet(np.full(clients, 3.0))).astype(np.int64)
        sizes[sizes % BATCH == 1] += 1
        total = int(sizes.sum())
        pixels = rng.integers(0, 256, (total, size, size, CHANNELS[network]), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, total)
        parts = np.split(rng.permutation(total), np.cumsum(sizes)[:-1])
        return cls(
            MODELS[network],
            Dataset(pixels, labels, tuple(map(str, range(CLASSES)))),
            tuple(Client(k, str(k), part, labels[part]) for k, part in enumerate(parts)),
            Training(rounds=1, batch=BATCH, augment=Augment(rotate=10, translate=0.02, flip=True)),
            seed,
        )

    def first(self, steps: int) -> Workload:
        """The first clients that have so many steps together; all of them for 0."""
        kept: list[Client] = []
        for client in self.clients:
            if not steps or _steps(kept, self.training.batch) < steps:
                kept.append(client)
        return replace(self, clients=tuple(kept))

    def pooled(self) -> Workload:
        """All data with one client, in batches as large as those of all clients together."""
        index = np.concatenate([client.index for client in self.clients])
        together = Client(0, "all", index, self.dataset.labels[index])
        batch = len(self.clients) * self.training.batch
        return replace(self, clients=(together,), training=replace(self.training, batch=batch))

    @property
    def steps(self) -> int:
        """Client-steps in one round."""
        return _steps(self.clients, self.training.batch)

    @property
    def inputs(self) -> int:
        return self.model.inputs(self.dataset.images.shape[3])

    def network(self) -> nn.Module:
        return initialise(self.model, self.inputs, CLASSES, self.seed)

    def threads(self) -> int:
        """How many threads a run with this network takes."""
        with worthwhile_threads(
            self.network(), (self.training.batch, self.inputs, *self.dataset.images.shape[1:3])
        ):
            return torch.get_num_threads()

    def engine(self, hardware: Hardware) -> EagerEngine:
        return hardware.engine(
            self.network, self.dataset, self.inputs, self.training, self.seed, self.clients
        )

    def start(self, device: torch.device) -> State:
        """Before the first round."""
        return State(Packed(self.network(), device).weights(), 0, 1, CLASSES, self.seed)

    def judged(self, device: torch.device) -> State:
        """Before FedNoRo's first round of stage 2, with every other client flagged."""
        warmup = FedNoRo().warmup
        rows = {
            str(k): {"noisy": bool(k % 2), "posterior": float(k % 2)}
            for k in range(len(self.clients))
        }
        memo = {"detection": {"reason": None, "clients": rows}, "asked_in": warmup}
        return replace(self.start(device), round=warmup, rounds=warmup + 1, memo=memo)


def _steps(clients: Sequence[Client], batch: int) -> int:
    return sum(-(-len(client.index) // batch) for client in clients)


def play_round(engine: EagerEngine, method: Method, state: State) -> State:
    """One round as a run plays it, without evaluation; a client that fails is an error."""
    unmeasured = Evaluation(np.zeros((state.classes, state.classes), dtype=np.int64), 0.0)
    (turn,) = play(method, state, engine.exchange, sorted(engine.clients), lambda _: unmeasured)
    for message in turn.warnings:
        print(f"warning: {message}", file=sys.stderr)
    for answer in turn.answers:
        if answer.status != "ok":
            raise RuntimeError(f"client {answer.client}: {answer.reason}")
    return turn.state


@dataclass(frozen=True)
class DistilEverywhere(FedNoRo):
    """FedNoRo's second stage with the distillation term on every client, its dearest round."""

    def plan(self, state: State, clients: Clients) -> dict[int, Task]:
        return {k: Task("train", state.round, state.model, {"lam": 0.5}) for k in clients.drawn}


class Alternative:
    """One way to play a round, with the settings of torch that belong to it."""

    def __init__(
        self, play: Callable[[], object], steps: int, threads: int, settings: tuple[bool, ...]
    ) -> None:
        self.play, self.steps, self.threads, self.settings = play, steps, threads, settings
        self.ms: list[float] = []  # per client-step

    def measure(self, device: torch.device, count: bool = True) -> None:
        before = torch.get_num_threads(), arithmetic()
        torch.set_num_threads(self.threads)
        set_arithmetic(self.settings)
        taken = 1000 * seconds(self.play, device) / self.steps
        torch.set_num_threads(before[0])
        set_arithmetic(before[1])
        if count:
            self.ms.append(taken)


def arithmetic() -> tuple[bool, ...]:
    """Settings that an engine makes for the whole process: several engines share this one."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32


def set_arithmetic(settings: tuple[bool, ...]) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = settings


def alternatives(
    work: Workload, options: argparse.Namespace
) -> tuple[dict[str, Alternative], list[str]]:
    """All ways to play a round of `work`, by name, and a line about each fast engine."""
    device: torch.device = options.device
    usual, threads = arithmetic(), torch.get_num_threads()
    slow = work.first(options.slow_steps)
    found: dict[str, Alternative] = {}
    notes: list[str] = []

    def add(
        name: str,
        of: Workload,
        hardware: Hardware,
        steps: int,
        counts: Iterable[int],
        kd: bool = False,
    ) -> str:
        engine, start, judged = of.engine(hardware), of.start(device), of.judged(device)
        for count in counts:
            once = partial(play_round, engine, Method(), start)
            found[f"{name}, {count}"] = Alternative(once, steps, count, arithmetic())
            if kd:
                once = partial(play_round, engine, DistilEverywhere(), judged)
                found[f"{name} kd, {count}"] = Alternative(once, steps, count, arithmetic())
        set_arithmetic(usual)
        return engine.describe()

    net = plain.stock(work.network()).to(device)
    # A small network is faster on one thread, and so is a large one on shared cores: whatever is
    # not ours to set is given whichever number serves it better.
    counts = {threads, 1} if device.type == "cpu" else {threads}
    for workers in options.workers:
        once = partial(
            plain.play_round,
            net,
            slow.dataset,
            slow.clients,
            slow.inputs,
            slow.training,
            device,
            workers,
        )
        for count in counts:
            found[f"plain {workers}, {count}"] = Alternative(once, slow.steps, count, usual)
    add("eager", slow, Hardware(device, "eager"), slow.steps, [slow.threads()])
    for name, hardware in variants(options).items():
        if device.type == "cpu":
            # a run takes its lanes from the threads that torch had before a small network got one
            hardware = replace(hardware, lanes=threads)
        told = add(f"fast {name}", work, hardware, work.steps, [work.threads()], options.kd)
        notes.append(f"fast {name}: {told}")
        # With one client, several lanes would leave all but one core idle: the limit is
        # one large batch on all cores.
        alone = Hardware(device, "eager") if device.type == "cpu" else replace(hardware, lanes=1)
        add(f"limit {name}", work.pooled(), alone, work.steps, counts)
    return found, notes


def variants(options: argparse.Namespace) -> dict[str, Hardware]:
    """The fast engine's settings, by name."""
    found: dict[str, Hardware] = {
        p: Hardware(options.device, precision=p) for p in options.precision
    }
    if options.streams:
        found |= {
            f"{p} on streams": Hardware(options.device, precision=p, stack=False)
            for p in options.precision
        }
    if options.compile:
        found |= {
            f"{p} compiled": Hardware(options.device, precision=p, compiled=True)
            for p in options.precision
        }
    return found


def rows(
    work: Workload, label: str, options: argparse.Namespace
) -> tuple[list[list[str]], list[str]]:
    """Measures all alternatives, one after another within each repeat."""
    found, notes = alternatives(work, options)
    for alternative in found.values():
        alternative.measure(options.device, count=False)
    for _ in range(options.repeat):
        for alternative in found.values():
            alternative.measure(options.device)

    def chosen(name: str) -> str:
        """The number of threads that served best."""
        tried = [key for key in found if key.startswith(f"{name}, ")]
        return min(tried, key=lambda key: statistics.median(found[key].ms))

    def ms(name: str) -> list[float]:
        return found[chosen(name)].ms

    plain_loops = [f"plain {workers}" for workers in options.workers]
    fastest = min(map(ms, plain_loops), key=statistics.median)
    table = []
    for name in variants(options):
        fast = ms(f"fast {name}")
        cells = [*map(ms, plain_loops), ms("eager"), fast, ms(f"limit {name}")]
        ratios = [(fastest, fast), (ms("eager"), fast), (fast, ms(f"limit {name}"))]
        if options.kd:
            ratios.append((ms(f"fast {name} kd"), fast))
        digits = 2 if min(fast) < 10 else 1
        figures = [best_and_median(cell, digits) for cell in cells]
        table.append([label, name, *figures, *(ratio(over, under) for over, under in ratios)])
    sizes = [len(client.index) for client in work.clients]
    slow = work.first(options.slow_steps)
    shown = [
        f"{label}: {len(sizes)} clients with {min(sizes)} to {max(sizes)} "
        f"images, {work.steps} steps per round"
    ]
    shown.append(f"plain and eager over {len(slow.clients)} clients, {slow.steps} steps")
    names = [*plain_loops, "eager", *(f"limit {name}" for name in variants(options))]
    shown.append("threads: " + "; ".join(map(chosen, names)))
    return table, [". ".join([*shown, "; ".join(notes)])]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
        "--sizes",
        nargs="+",
        type=int,
        help="pixels; default: 32, 64, 112, 224 on a GPU, else 32, and 28 for cnn",
    )
    add("--clients", type=int, default=20)
    add(
        "--images",
        type=int,
        help="of all clients; default: 8000 on a GPU, else 1200, and 4000 for cnn",
    )
    add("--device", default="auto")
    add(
        "--precision",
        nargs="+",
        choices=get_args(Precision),
        help="default: all on a GPU, else fp32",
    )
    add(
        "--workers",
        nargs="+",
        type=int,
        help="of the plain loop; default: 0 and 4 on a GPU, else 0",
    )
    add("--repeat", type=int, default=3, help="rounds that are measured, after one that is not")
    add(
        "--slow-steps",
        type=int,
        default=40,
        help="steps of the plain loop and of eager, in whole clients; 0: all",
    )
    add(
        "--kd",
        action="store_true",
        help="also a round of FedNoRo's stage 2 with distillation on every client",
    )
    add(
        "--streams",
        action="store_true",
        help="on a GPU, also with one client per stream in place of stacks",
    )
    add("--compile", action="store_true", help="also with torch.compile")
    options = parser.parse_args(arguments)
    options.device = choose_device(options.device)
    gpu = options.device.type == "cuda"
    options.network = options.network or (["resnet18"] if gpu else ["resnet18", "cnn"])
    options.precision = options.precision or (list(get_args(Precision)) if gpu else ["fp32"])
    options.workers = [0, 4] if options.workers is None and gpu else options.workers or [0]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table, row by row as they are measured."""
    options = parse(arguments)
    gpu = options.device.type == "cuda"
    # DataLoader's workers
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    plain_loops = [f"plain, {w} workers" if w else "plain, workers off" for w in options.workers]
    header = [
        "",
        "precision",
        *plain_loops,
        "eager",
        "fast",
        "limit",
        "plain / fast",
        "eager / fast",
        "fast / limit",
    ]
    print(
        f"ms per client-step of batch {BATCH} over whole rounds, augmentation on: best (median) of "
        f"{options.repeat}. Ratios: median (smallest to largest) within a repeat; plain, and on a "
        "CPU the limit, in the faster setting.\n"
    )
    print(markdown([*header, "KD / plain round"] if options.kd else header, []), flush=True)
    notes: list[str] = []
    for network in options.network:
        small = network == "cnn"
        images = options.images or (8000 if gpu else 4000 if small else 1200)
        for size in options.sizes or ([28] if small else [32, 64, 112, 224] if gpu else [32]):
            work = Workload.make(network, size, options.clients, images)
            table, told = rows(work, f"{network}, {size} px", options)
            print("\n".join(f"| {' | '.join(row)} |" for row in table), flush=True)
            notes += told
    print("\n" + "\n".join(f"- {note}" for note in notes))
    print(f"\n{describe(options.device)}")


if __name__ == "__main__":
    main()
