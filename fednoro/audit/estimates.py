"""What the coordinator makes of the sites' counts, and what of it may be shown.

A site's noise is estimated by the share x/m of its confidently judged images that look like another
class than their label. Images that reach no threshold are in neither number. The interval is
Wilson's, at 95%: it is never empty, never leaves [0, 1], and holds up at x = 0 and for a few dozen
images, where x/m ± 1.96 se does not. It needs the two counts alone, which is all that the
coordinator has. It says how far chance moves the estimate, not how far the model errs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fednoro.audit.confident_learning import calibrated_joint, confident_joint
from fednoro.audit.small_counts import Line, suppress
from fednoro.core.types import FloatArray, IntArray

Z95 = 1.959963984540054
COARSE = 20  # shares of a site whose count is withheld are rounded to 1/20


@dataclass(frozen=True)
class Estimate:
    """A share with its interval; `share` is None where only the bound may be shown."""

    share: float | None
    low: float
    high: float


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 95% score interval of a share; all of [0, 1] where nothing was counted."""
    if total <= 0:
        return 0.0, 1.0
    p, z2 = count / total, Z95**2 / total
    centre, half = p + z2 / 2, Z95 * math.sqrt(p * (1 - p) / total + z2 / (4 * total))
    low = 0.0 if count == 0 else max(0.0, (centre - half) / (1 + z2))
    return low, 1.0 if count == total else min(1.0, (centre + half) / (1 + z2))


def noise(joint: IntArray) -> Estimate:
    """A site's share of wrong labels, from its joint."""
    sure, wrong = int(joint.sum()), off_diagonal(joint)
    return Estimate(wrong / sure if sure else None, *wilson(wrong, sure))


def off_diagonal(joint: IntArray) -> int:
    """How many images look like another class than their label."""
    return int(joint.sum() - np.trace(joint))


@dataclass(frozen=True)
class SiteFinding:
    """What may be shown about one site."""

    client: int
    name: str
    images: int
    suspected: str  # how many look like another class: a number, "<n" or "withheld"
    estimate: Estimate | None  # None where too few images could be judged
    # (labelled, looks like): the site's most frequent pairs, none below n
    pairs: tuple[tuple[str, str], ...]
    scarce: tuple[str, ...]  # classes with fewer than n images here, or none
    verdict: str | None  # noisy, clean, not scored
    posterior: float | None
    truth: float | None  # share of wrong labels, where the simulation knows it


@dataclass(frozen=True)
class Findings:
    """All that the coordinator's page and its JSON hold: counts of at least n, shares and names."""

    classes: tuple[str, ...]
    sites: tuple[SiteFinding, ...]
    absent: tuple[str, ...]  # names of clients without an answer
    table: tuple[Line, ...]  # per given class: looks like each class, then "not sure"
    unheld: tuple[str, ...]  # classes that nobody holds
    images: int
    overall: Estimate
    least: int


def findings(
    counts: Mapping[int, IntArray],
    joints: Mapping[int, IntArray],
    names: Sequence[str],
    classes: Sequence[str],
    least: int,
    verdicts: Mapping[str, Any] | None = None,
    truth: Sequence[float] | FloatArray | None = None,
) -> Findings:
    """What may be shown of the sites' counts, `least` being the smallest count that may."""
    clients = sorted(joints)
    class_counts = (
        np.sum([counts[k] for k in clients], axis=0)
        if clients
        else np.zeros(len(classes), dtype=np.int64)
    )
    joint = sum(
        (joints[k] for k in clients), np.zeros((len(classes), len(classes)), dtype=np.int64)
    )
    table = _table(joint, class_counts, least)
    suspected = suppress([off_diagonal(joints[k]) for k in clients], least)
    verdict_rows = (verdicts or {}).get("clients", {})
    sites = tuple(
        SiteFinding(
            client=k,
            name=names[k],
            images=int(counts[k].sum()),
            suspected=suspected.text(i),
            estimate=_estimate(joints[k], suspected.marks[i], least),
            pairs=_pairs(joints[k], table, classes, least),
            scarce=tuple(classes[c] for c in np.flatnonzero(counts[k] < max(least, 1)).tolist()),
            verdict=_verdict(verdict_rows.get(str(k))) if verdict_rows else None,
            posterior=verdict_rows.get(str(k), {}).get("posterior"),
            truth=None if truth is None else float(truth[k]),
        )
        for i, k in enumerate(clients)
    )
    return Findings(
        classes=tuple(classes),
        sites=sites,
        absent=tuple(name for k, name in enumerate(names) if k not in joints),
        table=table,
        unheld=tuple(classes[c] for c in np.flatnonzero(class_counts == 0).tolist()),
        images=int(class_counts.sum()),
        overall=_overall(joint, class_counts, suspected.total is not None),
        least=least,
    )


def judged_at_most(site: SiteFinding, least: int) -> int:
    """The most images of a site that can have been judged, m,
    as far as what is shown of it tells that.
    """
    estimate, suspected = site.estimate, site.suspected.replace(",", "")
    if estimate is None:
        return min(site.images, max(least - 1, 0))
    if estimate.share is None:  # steps = ⌈COARSE (n − 1) / m⌉
        steps = round(estimate.high * COARSE)
        return (
            min(site.images, (COARSE * (least - 1) - 1) // (steps - 1))
            if steps > 1
            else site.images
        )
    percent = round(100 * estimate.share)
    if not suspected.isdecimal() or not percent:
        return site.images
    return min(site.images, int(100 * int(suspected) / (percent - 0.5)))


def _table(joint: IntArray, class_counts: IntArray, least: int) -> tuple[Line, ...]:
    """For each label what its images look like, and how many are not sure;
    a row sums to the images with that label.
    """
    rest = class_counts - joint.sum(axis=1)
    lines = []
    for i in range(len(class_counts)):
        # A class that nobody holds has nothing to hide.
        # Elsewhere the cells that readers miss least go first.
        n = least if class_counts[i] else 0
        lines.append(
            suppress([*joint[i].tolist(), int(rest[i])], n, hide_first=[len(class_counts), i])
        )
    if any(line.total is None for line in lines):
        # All images less the other totals would give it away.
        lines = [replace(line, total=None) for line in lines]
    return tuple(lines)


def _estimate(joint: IntArray, mark: str, least: int) -> Estimate | None:
    exact, sure = noise(joint), int(joint.sum())
    if mark == "shown":
        return exact if sure else None
    if sure < least:
        return None
    if mark == "small":  # a bound that holds for every count below n, in coarse steps
        return Estimate(None, 0.0, _up((least - 1) / sure))
    assert exact.share is not None
    return Estimate(round(exact.share * COARSE) / COARSE, _down(exact.low), _up(exact.high))


def _up(share: float) -> float:
    return min(1.0, math.ceil(share * COARSE) / COARSE)


def _down(share: float) -> float:
    return math.floor(share * COARSE) / COARSE


def _pairs(
    joint: IntArray, table: Sequence[Line], classes: Sequence[str], least: int
) -> tuple[tuple[str, str], ...]:
    """The site's pairs of at least n images, most frequent first;
    without counts, and none that the table withholds.
    """
    pairs = [
        (int(joint[i, j]), i, j)
        for i, j in np.argwhere(joint >= max(least, 1)).tolist()
        if i != j and table[i].marks[j] == "shown"
    ]
    return tuple(
        (classes[i], classes[j])
        for _, i, j in sorted(pairs, key=lambda item: (-item[0], item[1:]))[:3]
    )


def _overall(joint: IntArray, class_counts: IntArray, exact: bool) -> Estimate:
    """The share of wrong labels over all sites, by the calibrated joint."""
    if not joint.any():
        return Estimate(None, 0.0, 1.0)
    whole = calibrated_joint(confident_joint([joint]), class_counts)
    share = 1 - float(np.trace(whole)) / max(float(whole.sum()), 1.0)
    low, high = wilson(off_diagonal(joint), int(joint.sum()))
    if exact:
        return Estimate(share, min(low, share), max(high, share))
    return Estimate(round(share * COARSE) / COARSE, _down(low), _up(high))


def _verdict(row: Mapping[str, Any] | None) -> str:
    if row is None or row.get("posterior") is None:
        return "not scored"
    return "noisy" if row["noisy"] else "clean"
