"""Methods under other noise, partitions and budgets, on the same
federations and from the same warm-up.

python -m benchmarks.conditions [--preset digits] [--conditions symmetric pair-flip …]
                                [--rate 0.4] [--seeds 0 1 2] [--methods fedla fednoro]
                                [--results FILE] [--jobs 1] [key=value …]

FedNoRo+ plays its warm-up, which is FedLA's but for what clients measure, and goes on; the others
go on from the same model, and their seconds are with that warm-up. Last is the mean of the last 10
rounds, exact says how often exactly the noisy clients were flagged. --results keeps each
federation's figures as a line of JSON: what is in the file is not measured again. Without
--conditions, all that the data allows.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe, in_processes, keep, kept, markdown, overrides_in, spread
from fednoro.core.metrics import best_last
from fednoro.core.types import FedNoRoWarning, State
from fednoro.data.dataset import Dataset
from fednoro.data.federation import Federation, assemble
from fednoro.engine.choose import choose_device
from fednoro.experiment.checkpoint import to_device
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher, final_verdict
from fednoro.experiment.rounds import play
from fednoro.experiment.simulation import Lab, laboratory, make_evaluator
from fednoro.methods import Method
from fednoro.models import Packed

PLUS, SHARING = "fednoro-plus", ("fedla", "fednoro")  # whose warm-up is FedLA's
WRONG = 0.6  # of the most frequent class's labels, where that is the only class with noise

CONDITIONS: dict[str, tuple[str, ...]] = {
    "as-is": (),
    "symmetric": ("noise=symmetric", "noise.low=0.3", "noise.high=0.5"),
    "pair-flip": ("noise=pair_flip", "noise.low=0.3", "noise.high=0.5"),
    "one-class": ("noise=transition",),  # with a matrix that depends on the data
    "alpha-0.5": ("partition.alpha=0.5",),
    "sites": ("partition=by_column",),
    "10-clients": ("partition.clients=10",),
    "50-clients": ("partition.clients=50",),
    "1-epoch": ("train.epochs=1",),
    "5-epochs": ("train.epochs=5",),
    "T1-5": ("methods.fednoro.warmup=5", f"methods.{PLUS}.warmup=5"),
    "T1-10": ("methods.fednoro.warmup=10", f"methods.{PLUS}.warmup=10"),
    "T1-20": ("methods.fednoro.warmup=20", f"methods.{PLUS}.warmup=20"),
}


@dataclass(frozen=True)
class Cell:
    """One federation and what is played on it."""

    preset: str
    overrides: tuple[str, ...]
    condition: str
    rate: float
    seed: int
    methods: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        return [
            *self.overrides,
            *CONDITIONS[self.condition],
            f"noise.rate={self.rate:g}",
            f"seed={self.seed}",
        ]

    @property
    def key(self) -> str:
        return " ".join([self.preset, *self.settings])


# Measuring


def measured(cell: Cell, path: Path | None) -> dict[str, Any]:
    """Best, Last and verdicts of each method, also in a line at the end of a file."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        extra: tuple[str, ...] = ()
        if cell.condition == "one-class":
            extra = one_class_alone(resolve(cell.preset, cell.overrides).data.load(cell.seed))
        configs = {
            name: resolve(cell.preset, [*cell.settings, *extra, f"method={name}"])
            for name in (PLUS, *cell.methods)
        }
        with laboratory(configs[PLUS], Watcher()) as lab:
            parts = (
                lab.dataset,
                lab.config.split,
                lab.config.partition,
                lab.config.noise,
                cell.seed,
            )
            federation = assemble(*parts, lab.annotate)
            found = _played(
                lab, federation, {name: config.method for name, config in configs.items()}
            )
    line = {"setting": cell.key, "condition": cell.condition, "seed": cell.seed, **found}
    keep(path, line)
    return line


def one_class_alone(dataset: Dataset) -> tuple[str]:
    """An override: wrong labels in the most frequent class alone, any
    other class with equal chances.
    """
    classes = len(dataset.classes)
    common = int(np.bincount(dataset.labels, minlength=classes).argmax())
    rows = np.eye(classes)
    rows[common] = WRONG / (classes - 1)
    rows[common, common] = 1 - WRONG
    return (f"noise.matrix={json.dumps(rows.tolist())}",)


def _played(lab: Lab, federation: Federation, methods: Mapping[str, Method]) -> dict[str, Any]:
    engine, rounds = lab.engine, lab.config.train.rounds
    engine.serve(federation.clients())
    start = lab.calibrate(Packed(lab.initial).weights())
    state = to_device(
        State(start, 0, rounds, len(federation.classes), lab.config.seed), engine.device
    )
    evaluate = make_evaluator(engine, lab.dataset, federation.test, federation.validation)
    warmup: int = methods[PLUS].warmup  # type: ignore[attr-defined]
    found: dict[str, Any] = {"clients": len(federation.parts)}
    shared: tuple[State, list[float], float] | None = None
    for name, method in methods.items():
        clients = {client.id: client for client in federation.clients()}
        engine.serve(clients.values())
        bacc, seconds = list[float](), 0.0
        if shared is not None:
            state, bacc, seconds = shared[0], [*shared[1]], shared[2]
        began = time.perf_counter()
        for turn in play(method, state, engine.exchange, sorted(clients), evaluate):
            state = turn.state
            if turn.evaluation is not None:
                bacc.append(turn.evaluation.bacc)
            if shared is None and state.round == warmup:
                shared = state, [*bacc], time.perf_counter() - began
        best, last, _ = best_last(bacc)
        found[name] = {"best": best, "last": last, "seconds": seconds + time.perf_counter() - began}
        if (verdict := final_verdict(state, len(clients), federation.noisy)) is not None:
            found[name] |= {key: verdict[key] for key in ("flagged", "exact")}
            found["noisy"] = verdict["noisy"]
    return found


# Telling


def table(lines: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> str:
    """For each condition: Last of each method, verdicts, and how far FedNoRo+
    is ahead with the same seed.
    """
    rows = []
    for condition in dict.fromkeys(line["condition"] for line in lines):
        mine = [line for line in lines if line["condition"] == condition]
        cells = [condition, " ".join(str(line["seed"]) for line in mine)]
        for name in (*methods, PLUS):
            cells.append(spread([line[name]["last"] for line in mine]))
            judged = [line for line in mine if "exact" in line[name]]
            if judged:
                exact = sum(line[name]["exact"] for line in judged)
                who = ", ".join(
                    f"{len(line[name]['flagged'])} ({len(line['noisy'])})" for line in judged
                )
                cells[-1] += f"; exact {exact} of {len(judged)}: {who}"
        cells += [
            spread([line[PLUS]["last"] - line[name]["last"] for line in mine], "+")
            for name in methods
        ]
        rows.append(cells)
    return markdown(["", "seeds", *methods, PLUS, *(f"− {name}" for name in methods)], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), default=None)
    parser.add_argument("--rate", type=float, default=0.4, help="share of noisy clients")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--methods", nargs="+", choices=SHARING, default=list(SHARING), help="beside fednoro-plus"
    )
    parser.add_argument("--results", type=Path, default=None, help="a .jsonl file to go on from")
    parser.add_argument("--jobs", type=int, default=1, help="federations at a time")
    words, overrides = overrides_in(arguments)
    options = parser.parse_args(words)

    methods = tuple(options.methods)
    asked = resolve(options.preset, [*overrides, f"method={PLUS}"])
    wanted = options.conditions or [
        name for name in CONDITIONS if name != "sites" or asked.data.load(0).sites is not None
    ]
    cells = [
        Cell(options.preset, overrides, name, options.rate, seed, methods)
        for name in wanted
        for seed in options.seeds
    ]
    known = {row["setting"]: row for row in kept(options.results) if {PLUS, *methods} <= row.keys()}
    missing = [cell for cell in cells if cell.key not in known]
    work = partial(measured, path=options.results)
    known |= {
        line["setting"]: line for line in in_processes(work, missing, options.jobs, "federations")
    }
    span = f"ρ = {options.rate:g}, Last in %; flagged (noisy) by seed"
    print(f"{' '.join([options.preset, *overrides])}, {span}\n")
    print(table([known[cell.key] for cell in cells], methods))
    print(f"\n{describe(choose_device(asked.device))}")


if __name__ == "__main__":
    main()
