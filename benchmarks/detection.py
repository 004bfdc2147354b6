"""Who is found noisy, by which rule: the paper's mixture, its published code's, what
clients can explain, and doubts.

python -m benchmarks.detection [--preset digits] [--rates 0 0.2 0.4 0.6 0.8 1]
                               [--ranges 0.3-0.5 0.5-0.7] [--seeds 0 1 2] [--warmups 10] [--again]
                               [--evidence FILE] [--jobs 1] [key=value …]

Each setting is one warm-up by FedLA, which all rules share: at its end the clients' class losses
go to the paper's detector and to the published code's, and what they have measured in its last
rounds to the others: `shares` goes by that alone, `calibrated` by heads that are learnt from the
other clients too, `sketched` by heads on 64 numbers of each image. With several --warmups one run
of the longest serves all. Annotators do not depend on how many clients are noisy or how much, and
are trained once for each seed.

With --again those whom `calibrated` trusts train alone for half of FedNoRo+'s purge, and everybody
is judged once more: `again`, the verdict that FedNoRo+ ends with unless it flags everybody. Whom
the rule trusted when it was measured is part of the evidence then.

--evidence keeps what was measured, a line of JSON for each setting: what is in the file is not
measured again, only judged. Noise other than the preset's: `noise=symmetric`, or `noise=transition
noise.matrix=…`, for which --ranges say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe, in_processes, keep, kept, markdown, overrides_in
from fednoro.core.losses import log_prior, per_class_losses
from fednoro.core.metrics import detection
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    FloatArray,
    IntArray,
    Replies,
    Reply,
    Site,
    State,
    Task,
)
from fednoro.data.federation import Federation, assemble
from fednoro.detection import calibrated, explained
from fednoro.detection.explained import SENT, WATCH, WATCHED, left_over, measure
from fednoro.detection.leave_one_out_heads import PURGED_WIDER, pairs_of
from fednoro.detection.mixture_detector import NoisyClientDetector
from fednoro.engine.choose import choose_device
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher
from fednoro.experiment.simulation import Lab, laboratory
from fednoro.methods import FedLA, FedNoRoPlus
from fednoro.models import Packed

DETECTORS = ("paper", "reference", "shares", "sketched", "calibrated")
# where the evidence has what the others' heads part
HEADS = {"sketched": "sketched", "calibrated": "areas"}
AGAIN = "again"
SURE = (0.5, 0.9, 0.99, 0.999, 1.1)  # where tables of probabilities are cut


@dataclass(frozen=True)
class Watched(FedLA):
    """FedLA whose clients say what they explain, and what each class costs them."""

    def work(self, task: Task, site: Site) -> Reply:
        if task.name == "train":
            reply = super().work(task, site)
            if WATCH not in task.settings:
                return reply
            return replace(
                reply, metrics={**reply.metrics, "explained": measure(task, site, reply.weights)}
            )
        if task.name == calibrated.MOMENTS:
            return calibrated.sum_features(task, site)
        if task.arrays:
            return Reply(site.client, site.size, arrays=calibrated.measure_areas(task, site))
        outputs = {
            "paper": site.logits(task, task.weights),
            "reference": site.logits(task, task.weights, augment=True),
        }
        metrics = {
            name: per_class_losses(z, site.labels, site.classes)[0] for name, z in outputs.items()
        }
        received = left_over(outputs["paper"], site.labels, log_prior(site.counts))
        return Reply(
            site.client,
            site.size,
            metrics={**metrics, "received": received[None], "counts": site.counts},
        )


@dataclass(frozen=True)
class Setting:
    """One federation."""

    preset: str
    overrides: tuple[str, ...]
    seed: int
    rate: float
    range: tuple[float, float] | None  # of η; None where the kind of noise has none

    @property
    def settings(self) -> list[str]:
        span = (
            []
            if self.range is None
            else [f"noise.low={self.range[0]:g}", f"noise.high={self.range[1]:g}"]
        )
        return [*self.overrides, f"noise.rate={self.rate:g}", *span, f"seed={self.seed}"]

    @property
    def key(self) -> str:
        return " ".join([self.preset, *self.settings])


# Measuring


def evidence(
    settings: Sequence[Setting], warmups: Sequence[int], again: bool, path: Path | None
) -> list[dict[str, Any]]:
    """What the clients of each federation measure, also in a line at the end of a
    file; only the noise may differ.
    """
    torch.set_num_threads(min(2, torch.get_num_threads()))
    found, opinions = [], dict[int, FloatArray]()
    plus = (
        resolve(settings[0].preset, [*settings[0].settings, "method=fednoro-plus"]).method
        if again
        else None
    )
    assert plus is None or isinstance(plus, FedNoRoPlus)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        with laboratory(resolve(settings[0].preset, settings[0].settings), Watcher()) as lab:
            # The most noisy clients first: all annotators are trained together then.
            for setting in sorted(settings, key=lambda s: -s.rate):
                noise = resolve(setting.preset, setting.settings).noise
                parts = (lab.dataset, lab.config.split, lab.config.partition, noise, setting.seed)
                federation = assemble(*parts, partial(_remembered, lab, opinions))
                found.append({"setting": setting.key, **_watched(lab, federation, warmups, plus)})
                keep(path, found[-1])
    return found


def _remembered(
    lab: Lab, opinions: dict[int, FloatArray], parts: Mapping[int, IntArray]
) -> dict[int, FloatArray]:
    if missing := {k: part for k, part in parts.items() if k not in opinions}:
        opinions |= lab.annotate(missing)
    return {k: opinions[k] for k in parts}


def _watched(
    lab: Lab, federation: Federation, warmups: Sequence[int], plus: FedNoRoPlus | None
) -> dict[str, Any]:
    method, engine, clients = Watched(), lab.engine, range(len(federation.parts))
    engine.serve(federation.clients())
    start = lab.calibrate(Packed(lab.initial, engine.device).weights())
    state = State(start, 0, max(warmups) + 1, len(federation.classes), lab.config.seed)
    judged: dict[int, State] = {}
    rounds: dict[str, list[list[float]]] = {}
    losses: dict[str, dict[str, Any]] = {}
    for number in range(max(warmups)):
        watch = any(0 < last - number <= WATCHED for last in warmups)
        tasks = {
            k: Task("train", number, state.model, {WATCH: True} if watch else {}) for k in clients
        }
        replies = [_answered(item) for item in engine.exchange(method, tasks)]
        state = method.fold(state, Replies("train", tuple(tasks), replies))
        if watch:
            rounds[str(number)] = [reply.metrics["explained"].tolist() for reply in replies]  # type: ignore[union-attr]
        if number + 1 in warmups:
            tasks = {k: Task("score", number + 1, state.model) for k in clients}
            scored = [_answered(reply).metrics for reply in engine.exchange(method, tasks)]
            losses[str(number + 1)] = {
                name: [row[name].tolist() for row in scored]  # type: ignore[union-attr]
                for name in ("paper", "reference", "counts", "received")
            }
            for detector, place in HEADS.items():
                losses[str(number + 1)][place] = _areas(lab, state, detector)
            judged[number + 1] = state
    assert federation.noisy is not None, "artificial noise is known"
    found = {
        "noisy": federation.noisy.tolist(),
        "shares": federation.rates.tolist(),
        "explained": rounds,
        "losses": losses,
    }
    if plus is None:
        return found
    return {**found, AGAIN: {str(t): _purged(lab, plus, found, judged[t]) for t in warmups}}


def _purged(lab: Lab, plus: FedNoRoPlus, found: Mapping[str, Any], state: State) -> dict[str, Any]:
    """What clients say about the model that trusted ones have trained alone; nothing
    where there is no second look.
    """
    first, due = (
        calibrated.judge(_rows(found, state.round)),
        plus.second_look_rounds(lab.config.train.rounds, state.round),
    )
    if first.scale is None or not due:
        return {}
    method, clean = Watched(), [k for k, noisy in enumerate(first.noisy) if not noisy]
    for number in range(state.round, due.start):
        tasks = {k: Task("train", number, state.model) for k in clean}
        replies = [_answered(item) for item in lab.engine.exchange(method, tasks)]
        state = method.fold(state, Replies("train", tuple(tasks), replies))
    tasks = {k: Task("score", state.round, state.model) for k in range(len(first.noisy))}
    answers = [_answered(reply) for reply in lab.engine.exchange(method, tasks)]
    received = [torch.as_tensor(answer.metrics["received"]).tolist() for answer in answers]
    return {"received": received, "areas": _areas(lab, state, "calibrated")}


def _areas(lab: Lab, state: State, detector: str) -> list[list[float | None]]:
    """What the others' heads part of each client's labels."""
    width = calibrated.WIDTHS[detector]
    method, everyone = Watched(), tuple(sorted(lab.engine.clients))
    clients = Clients(everyone, everyone)
    asked = calibrated.questions(state, clients, everyone, width)
    if asked[everyone[0]].name != calibrated.MOMENTS:  # so few that explained shares decide alone
        return [[] for _ in everyone]
    after = calibrated.add_up(
        state, [_answered(item) for item in lab.engine.exchange(method, asked)]
    )
    asked = calibrated.questions(after, clients, everyone, width)
    if not asked[everyone[0]].arrays:  # the network has no features
        return [[] for _ in everyone]
    replies = [_answered(item).arrays for item in lab.engine.exchange(method, asked)]
    return [calibrated.numbers(pairs_of(arrays[calibrated.AREAS])) for arrays in replies]


def _answered(item: Any) -> Reply:
    if not isinstance(item, Reply):
        raise item.error or RuntimeError(item.reason)
    return item


# Judging


def verdict(detector: str, found: Mapping[str, Any], warmup: int, seed: int) -> list[bool]:
    """Whom a rule flags after a warm-up of so many rounds."""
    if detector in ("shares", AGAIN, *HEADS):
        rows = _rows(found, warmup, HEADS.get(detector, HEADS["calibrated"]))
        if detector in HEADS:
            return list(calibrated.judge(rows).noisy)
        if detector == AGAIN:
            return _again(rows, found[AGAIN][str(warmup)])
        return list(explained.judge([[row[name] for name in SENT] for row in rows]).noisy)
    losses = found["losses"][str(warmup)]
    rule = NoisyClientDetector("paper" if detector == "paper" else "reference", seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        rule.fit(np.array(losses[detector], dtype=np.float64), np.array(losses["counts"]))
    return [bool(flag) for flag in rule.noisy_]


def _again(rows: Sequence[Mapping[str, Any]], said: Mapping[str, Any]) -> list[bool]:
    """The second verdict, or the first where that parts no two groups."""
    first, (received, _) = calibrated.judge(rows), SENT
    if not said:
        return list(first.noisy)
    later = [
        {**row, received: min(row[received], left[0]), calibrated.AREAS: parted}
        for row, left, parted in zip(rows, said["received"], said["areas"], strict=True)
    ]
    second = calibrated.judge(later, wider=PURGED_WIDER)
    return list((first if second.scale is None else second).noisy)


def _rows(
    found: Mapping[str, Any], warmup: int, heads: str = HEADS["calibrated"]
) -> list[dict[str, Any]]:
    """What each client has sent for the calibrated rules."""
    rounds = [found["explained"][str(number)] for number in range(max(0, warmup - WATCHED), warmup)]
    left, scored = np.min(rounds, axis=0), found["losses"][str(warmup)]
    return [
        dict(zip(SENT, (min(first, received[0]), own), strict=True))
        | ({calibrated.AREAS: parted, calibrated.COUNTS: counts} if parted else {})
        for (first, own), received, parted, counts in zip(
            left, scored["received"], scored[heads], scored["counts"], strict=True
        )
    ]


def table(
    known: Mapping[str, Mapping[str, Any]],
    settings: Sequence[Setting],
    warmups: Sequence[int],
    rules: Sequence[str],
) -> str:
    """Per share, range, warm-up and detector: how often exactly the noisy clients
    were flagged, recall, precision.
    """
    groups: dict[tuple[float, str, int, str], list[tuple[list[bool], list[bool]]]] = {}
    for setting in settings:
        for warmup in warmups:
            for detector in rules:
                found = known[setting.key]
                span = "" if setting.range is None else "({:g}, {:g})".format(*setting.range)
                flagged = verdict(detector, found, warmup, setting.seed)
                groups.setdefault((setting.rate, span, warmup, detector), []).append(
                    (flagged, found["noisy"])
                )
    rows, totals = [], dict[tuple[int, str], list[bool]]()
    for (rate, span, warmup, detector), pairs in groups.items():
        found_all = [detection(flagged, np.array(noisy)) for flagged, noisy in pairs]
        exact = [bool(row[2]) for row in found_all]
        totals.setdefault((warmup, detector), []).extend(exact)
        counts = ", ".join(f"{sum(flagged)} ({sum(noisy)})" for flagged, noisy in pairs)
        means = [_mean([row[i] for row in found_all]) for i in (0, 1)]
        rows.append(
            [
                f"{rate:g}",
                span,
                str(warmup),
                detector,
                f"{sum(exact)} of {len(exact)}",
                *means,
                counts,
            ]
        )
    for (warmup, detector), exact in totals.items():
        share = f"{sum(exact)} of {len(exact)} ({sum(exact) / len(exact):.0%})"
        rows.append(["all", "", str(warmup), detector, share, "", "", ""])
    header = [
        "noisy clients",
        "η",
        "T1",
        "detector",
        "exact",
        "recall",
        "precision",
        "flagged (of noisy) per seed",
    ]
    return markdown(header, rows)


def sureness(
    known: Mapping[str, Mapping[str, Any]], settings: Sequence[Setting], warmups: Sequence[int]
) -> str:
    """Where doubts part the clients: how sure `calibrated` is of its verdicts, and
    how many of these are wrong.
    """
    found: list[tuple[float, bool]] = []
    for setting in settings:
        for warmup in warmups:
            judged = calibrated.judge(_rows(known[setting.key], warmup))
            if judged.doubt is not None:
                sure = np.maximum(judged.posterior, 1 - judged.posterior)
                found += zip(
                    sure.tolist(),
                    np.array(judged.noisy) != known[setting.key]["noisy"],
                    strict=True,
                )
    rows = []
    for low, high in itertools.pairwise(SURE):
        wrong = [(1 - sure, bool(flag)) for sure, flag in found if low <= sure < high]
        if wrong:
            said, true = (f"{sum(part) / len(wrong):.2%}" for part in zip(*wrong, strict=True))
            rows.append([f"{low:g} to {min(high, 1):g}", str(len(wrong)), said, true])
    return (
        markdown(["P of the verdict", "verdicts", "wrong, by that", "wrong"], rows) if rows else ""
    )


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if value == value]  # no noisy client: recall is not defined
    return f"{statistics.mean(known):.2f}" if known else "–"


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    return float(low), float(high)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 0.2, 0.4, 0.6, 0.8, 1])
    parser.add_argument(
        "--ranges",
        type=_range,
        nargs="+",
        default=[(0.5, 0.7)],
        help="of η, such as 0.3-0.5 0.5-0.7",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--warmups", type=int, nargs="+", default=None, help="default: FedNoRo's of the preset"
    )
    parser.add_argument(
        "--again", action="store_true", help="judge once more in the middle of FedNoRo+'s purge"
    )
    parser.add_argument("--evidence", type=Path, default=None, help="a .jsonl file to go on from")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    words, overrides = overrides_in(arguments)
    options = parser.parse_args(words)

    asked = resolve(options.preset, ["method=fednoro", *overrides])
    warmups: list[int] = options.warmups or [asked.method.warmup]  # type: ignore[attr-defined]
    ranges = options.ranges if hasattr(asked.noise, "low") else [None]
    settings = [
        Setting(options.preset, overrides, seed, rate, span)
        for rate in options.rates
        for span in (ranges if rate else ranges[:1])
        for seed in options.seeds
    ]
    # A setting may be there twice, with warm-ups of different lengths, or without
    # what a newer rule asks for.
    usable = [
        row
        for row in kept(options.evidence)
        if all(place in row["losses"].get(str(t), ()) for t in warmups for place in HEADS.values())
    ]
    known = {row["setting"]: row for row in usable if AGAIN in row or not options.again}
    groups = [
        [s for s in settings if s.seed == seed and s.key not in known] for seed in options.seeds
    ]
    work = partial(evidence, warmups=warmups, again=options.again, path=options.evidence)
    for rows in in_processes(work, [group for group in groups if group], options.jobs, "seeds"):
        known |= {row["setting"]: row for row in rows}
    print(f"{' '.join([options.preset, *overrides])}, seeds {', '.join(map(str, options.seeds))}\n")
    print(table(known, settings, warmups, (*DETECTORS, AGAIN) if options.again else DETECTORS))
    if sure := sureness(known, settings, warmups):
        print(
            f"\nWhere doubts part the clients, by how sure `calibrated` is of a verdict:\n\n{sure}"
        )
    print(f"\n{describe(choose_device(asked.device))}")


if __name__ == "__main__":
    main()
