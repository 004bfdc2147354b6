"""How well the audit finds wrong labels that are known: against pooled data, cleanlab and chance.

python -m benchmarks.audit [PRESET] [--seeds 5] [--scores early cross_fit] [--folds 5]
                           [--json FILE] [key=value …]

PRESET is digits (default) or another with artificial noise, such as ham10000 with data.path=…
and so on. For each seed the preset's federation is made, without training the preset's
method, and its labels are judged

- by the federated audit, with early and with cross-fitted scores, ranked by margin and
  as cleanlab does by default,
- by cleanlab on pooled data: one client that holds all images, the same network, cross-fitted
  scores after as many rounds and after a fifth of them, as pooled training learns wrong
  labels by heart much sooner.

Two figures say how good the estimates are: the mean absolute error of each site's share of wrong
labels, and its correlation with the truth; and how often the 95% interval holds the truth, at noisy
and at clean sites. Precision is the share of truly wrong labels among the top n of all images (n =
how many are wrong), among the top 10%, and among the top n_k of each noisy site. Without cleanlab
its ranking by self-confidence is computed here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.machine import describe, markdown
from fednoro.audit.audit_method import Audit
from fednoro.audit.confident_learning import site_joint
from fednoro.audit.estimates import noise
from fednoro.audit.ranking import margins
from fednoro.audit.simulated_audit import Outcome, Subject, examine
from fednoro.core.types import BoolArray, FloatArray, IntArray
from fednoro.data.client import Client
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.drive import Watcher
from fednoro.experiment.simulation import laboratory

Figures = dict[str, float]
COLUMNS = {
    "mae": "error of estimates",
    "correlation": "correlation",
    "noisy sites": "bias, noisy sites",
    "clean sites": "bias, clean sites",
    "held noisy": "interval holds, noisy",
    "held clean": "interval holds, clean",
    "top n": "top n",
    "top 10%": "top 10%",
    "top n_k": "top n_k per noisy site",
    "seconds": "s",
}


def estimated(joints: Mapping[int, IntArray], rates: FloatArray) -> Figures:
    """How near the estimates are to the truth, over all sites."""
    found = [noise(joints[k]) for k in range(len(rates))]
    shares = np.array([np.nan if e.share is None else e.share for e in found])
    known, wrong = np.isfinite(shares), rates > 0
    error = shares - rates
    held = np.array([e.low <= rate <= e.high for e, rate in zip(found, rates, strict=True)])
    return {
        "mae": float(np.abs(error[known]).mean()),
        "correlation": _correlation(shares[known], rates[known]),
        "noisy sites": _mean(error[known & wrong]),
        "clean sites": _mean(error[known & ~wrong]),
        "held noisy": _mean(held[wrong]),
        "held clean": _mean(held[~wrong]),
    }


def _correlation(a: FloatArray, b: FloatArray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else float("nan")


def _mean(values: FloatArray | BoolArray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def precise(trust: Sequence[FloatArray], wrong: Sequence[BoolArray]) -> Figures:
    """How many of the least trusted labels are wrong; `trust` and `wrong` by site."""
    order, truth = np.argsort(np.concatenate(trust), kind="stable"), np.concatenate(wrong)
    count = int(truth.sum())
    sites = [
        w[np.argsort(t, kind="stable")[: w.sum()]].mean()
        for t, w in zip(trust, wrong, strict=True)
        if w.any()
    ]
    return {
        "top n": float(truth[order[:count]].mean()),
        "top 10%": float(truth[order[: max(1, len(order) // 10)]].mean()),
        "top n_k": float(np.mean(sites)),
    }


def self_confidence(p: FloatArray, y: IntArray, joint: IntArray) -> FloatArray:
    """The default ranking of cleanlab, by cleanlab where it is
    installed, with a check of the joint.
    """
    try:
        from cleanlab.count import compute_confident_joint
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        return p[np.arange(len(y)), y]
    np.fill_diagonal(joint, joint.diagonal().clip(min=1))
    np.testing.assert_array_equal(joint, compute_confident_joint(y, p, calibrate=False))
    scores: FloatArray = get_label_quality_scores(y, p)
    return scores


def judge(of: Subject, audit: Audit) -> dict[str, Figures]:
    """The federated audit, ranked by its own margin and by cleanlab."""
    federation = of.federation
    labels = [federation.observed[part] for part in federation.parts]
    wrong = [federation.clean[part] != y for part, y in zip(federation.parts, labels, strict=True)]
    rows: dict[str, Figures] = {}

    began = time.perf_counter()
    found = examine(of, audit)
    seconds = time.perf_counter() - began
    p = [found.probabilities[k] for k in range(len(labels))]
    trust = [margins(*pair) for pair in zip(p, labels, strict=True)]
    rows["federated"] = (
        estimated(found.joints, federation.rates) | precise(trust, wrong) | {"seconds": seconds}
    )
    quality = self_confidence(
        np.concatenate(p), np.concatenate(labels), sum(found.joints.values(), 0 * found.joints[0])
    )
    rows["federated, cleanlab's ranking"] = precise(_by_site(quality, labels), wrong)

    return rows


def pool(of: Subject, audit: Audit) -> Figures:
    """Cleanlab on all images in one place, with scores from models that were trained there."""
    federation, members = of.federation, np.concatenate(of.federation.parts)
    labels = [federation.observed[part] for part in federation.parts]
    wrong = [federation.clean[part] != y for part, y in zip(federation.parts, labels, strict=True)]
    began = time.perf_counter()
    pooled: Outcome = examine(
        of, audit, [Client(0, "pooled", members, federation.observed[members])]
    )
    seconds = time.perf_counter() - began
    q = _by_site(pooled.probabilities[0], labels)
    joints = {k: site_joint(q[k], y, pooled.thresholds) for k, y in enumerate(labels)}
    quality = self_confidence(
        pooled.probabilities[0], federation.observed[members], pooled.joints[0].copy()
    )
    figures = estimated(joints, federation.rates) | precise(_by_site(quality, labels), wrong)
    return figures | {"seconds": seconds}


def _by_site(values: FloatArray, labels: Sequence[IntArray]) -> list[FloatArray]:
    return np.split(values, np.cumsum([len(y) for y in labels])[:-1])


def one_seed(
    preset: str, seed: int, scores: Sequence[str], folds: int, overrides: Sequence[str]
) -> dict[str, Figures]:
    """Every row of one seed."""
    config = resolve(preset, [*overrides, f"seed={seed}"])
    rows: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder, laboratory(config, Watcher()) as lab:
        of = Subject(Path(folder), config, lab.federate(Path(folder)), lab, None)
        flipped = (
            of.federation.clean[of.federation.train] != of.federation.observed[of.federation.train]
        )
        for kind in scores:
            audit = Audit(scores=kind, warmup=of.warmup, folds=folds)  # type: ignore[arg-type]
            rows |= {f"{kind}: {name}": figures for name, figures in judge(of, audit).items()}
        for rounds in sorted({max(1, of.warmup // 5), of.warmup}):
            rows[f"pooled cross_fit, {rounds} rounds, cleanlab"] = pool(
                of, Audit(scores="cross_fit", warmup=rounds, folds=folds)
            )
        shares = [r for r in of.federation.rates if r]
        rows["chance"] = dict.fromkeys(("top n", "top 10%"), float(flipped.mean())) | {
            "top n_k": float(np.mean(shares))
        }
    return rows


def table(seeds: Sequence[Mapping[str, Figures]]) -> str:
    """Mean ± standard deviation over seeds, shares in percent."""

    def cell(name: str, column: str) -> str:
        values = [
            rows[name][column]
            for rows in seeds
            if column in rows[name] and np.isfinite(rows[name][column])
        ]
        if not values:
            return "–"
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        if column == "correlation":
            return f"{statistics.mean(values):.3f}"
        if column == "seconds":
            return f"{statistics.mean(values):.0f}"
        if column in ("noisy sites", "clean sites"):
            return f"{100 * statistics.mean(values):+.1f}"
        return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"

    return markdown(
        ("scores", *COLUMNS.values()),
        [[name, *(cell(name, c) for c in COLUMNS)] for name in seeds[0]],
    )


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--scores", nargs="+", default=["early", "cross_fit"], choices=["early", "cross_fit"]
    )
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="also write every seed's figures")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    if "=" in options.preset:
        options.preset, options.overrides = "digits", [options.preset, *options.overrides]
    console, done = Console(stderr=True), list[dict[str, Figures]]()
    for seed in range(options.seeds):
        console.print(f"seed {seed} …")
        done.append(
            one_seed(options.preset, seed, options.scores, options.folds, options.overrides)
        )
        if options.json:
            options.json.write_text(json.dumps(done, indent=1))
    config = resolve(options.preset, options.overrides)
    print(
        f"{' '.join([options.preset, *options.overrides])}, seeds 0 to "
        f"{options.seeds - 1}, % (mean ± std)\n"
    )
    print(table(done))
    from fednoro.engine.choose import choose_device

    print(f"\n{describe(choose_device(config.device))}")


if __name__ == "__main__":
    main()
