"""What was decided about the clients, and how firmly:
the recorded verdicts and the mixture behind them.

detection.json has the class losses, not the mixture. The same losses, options and seed
give the same mixture, so it is fitted again, and whether it gives the recorded
probabilities is checked, not assumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fednoro.core.types import BoolArray, FloatArray, IntArray
from fednoro.experiment.run_folder.recorded_run import Recorded

OTHER_STARTS = 9


@dataclass(frozen=True)
class Mixture:
    """The two groups in the two leading directions of the normalised losses."""

    points: FloatArray  # K×2; NaN for a client that could not be scored
    variance_shares: tuple[float, float]  # share of the variance along each direction
    # clean or noisy, and the outline at two deviations, N×2
    ellipses: tuple[tuple[str, FloatArray], ...]


@dataclass(frozen=True)
class RecordedVerdict:
    """Verdicts in the order of `clients`."""

    clients: IntArray
    noisy: BoolArray
    posterior: FloatArray  # NaN where a client could not be scored
    reason: str
    truth: BoolArray | None
    rates: FloatArray | None  # true share of wrong labels
    # K×C, NaN where a class is not held or withheld; None for methods without class losses
    losses: FloatArray | None
    counts: IntArray | None
    normalised_losses: FloatArray | None
    mixture: Mixture | None
    reproduced: bool  # the mixture fitted again gives the recorded probabilities
    # K; share of other starts of the mixture that judge the client the same
    agreement: FloatArray | None
    level: FloatArray | None  # FedCorr's estimate of the share of wrong labels
    explained_shares: FloatArray | None  # FedNoRo+: share of its labels that a client can explain
    error: FloatArray | None  # how badly heads that are learnt from the others part its labels
    doubt: FloatArray | None  # both together
    # above which a client is flagged for its doubt,
    # or below which for its share where there is none
    cut: float | None
    evidence: str  # what the verdict was made from

    @property
    def wrong(self) -> BoolArray:
        """Verdicts against the truth; none where it is not known."""
        return np.zeros_like(self.noisy) if self.truth is None else self.noisy != self.truth

    @property
    def order(self) -> IntArray:
        """Clean first, then noisy, each by its mean normalised loss or its probability."""
        if self.normalised_losses is not None:
            key = np.nan_to_num(
                np.nanmean(
                    np.where(np.isfinite(self.normalised_losses), self.normalised_losses, 0), axis=1
                )
            )
        else:
            key = np.nan_to_num(self.posterior, nan=2.0)
        return np.lexsort((key, self.noisy))


def read_verdict(run: Recorded) -> RecordedVerdict | None:
    """The verdicts of a run; None where its method makes none or they are lost."""
    if run.detection is None or not run.detection["clients"]:
        return None
    rows = dict(sorted(run.detection["clients"].items(), key=lambda item: int(item[0])))
    clients = np.array([int(k) for k in rows], dtype=np.int64)
    posterior = np.array(
        [np.nan if row["posterior"] is None else row["posterior"] for row in rows.values()]
    )
    noisy = np.array([row["noisy"] for row in rows.values()], dtype=bool)
    holdings = run.holdings
    losses, counts = _loss_tables(rows, len(run.classes))
    detector = None if losses is None else _fit_detector(run, rows)
    normalised_losses = _normalise(detector, losses)
    marks = {
        name: _mark_column([row.get(name) for row in rows.values()])
        for name in ("mu", "explained", "error", "doubt")
    }
    cut = run.detection.get("cut")
    return RecordedVerdict(
        clients=clients,
        noisy=noisy,
        posterior=posterior,
        reason=run.detection["reason"],
        truth=None if holdings is None or holdings.noisy is None else holdings.noisy[clients],
        rates=None if holdings is None or holdings.noisy is None else holdings.rates[clients],
        losses=losses,
        counts=counts,
        normalised_losses=normalised_losses,
        mixture=None if normalised_losses is None else _directions(detector, normalised_losses),
        reproduced=_reproduces(detector, losses, counts, posterior),
        agreement=None
        if normalised_losses is None
        else _agreement(detector, normalised_losses, noisy),
        level=marks["mu"],
        explained_shares=marks["explained"],
        error=marks["error"],
        doubt=marks["doubt"],
        cut=float(cut) if isinstance(cut, int | float) and np.isfinite(cut) else None,
        evidence=_name_evidence(losses is not None, marks),
    )


def _mark_column(values: list[float | None]) -> FloatArray | None:
    # None becomes NaN
    return None if all(value is None for value in values) else np.array(values, dtype=np.float64)


def _name_evidence(losses: bool, marks: Mapping[str, FloatArray | None]) -> str:
    if losses:
        return "the losses of their classes"
    if marks["mu"] is not None:
        return "the dimension of their predictions (LID)"
    if marks["doubt"] is not None:
        return (
            "how much of their labels they can explain, "
            "and how far other clients’ models agree with them"
        )
    return (
        "how much of their labels they can explain"
        if marks["explained"] is not None
        else "the method’s own mark"
    )


def _loss_tables(rows: dict[str, Any], classes: int) -> tuple[FloatArray | None, IntArray | None]:
    try:
        # None becomes NaN
        losses = np.array([row["losses"] for row in rows.values()], dtype=np.float64)
        counts = np.array([row["counts"] for row in rows.values()], dtype=np.int64)
    except (KeyError, ValueError, TypeError):
        return None, None
    if losses.ndim != 2 or losses.shape != counts.shape or (classes and losses.shape[1] != classes):
        return None, None
    return np.where(counts > 0, losses, np.nan), counts


def _fit_detector(run: Recorded, rows: dict[str, Any]) -> Any:
    """The detector as the run fitted it:
    to those scored first, or later where they did not form two groups.
    """
    from fednoro.detection.mixture_detector import NoisyClientDetector

    behaviour = run.option("method", "detector") or run.option("method", "behaviour")
    covariance = run.option("method", "covariance")
    seed = run.config.get("seed")
    detector = None
    for last in sorted({row.get("round", 0) for row in rows.values()}):
        early = [row for row in rows.values() if row.get("round", 0) <= last]
        try:
            detector = NoisyClientDetector(
                behaviour if behaviour == "reference" else "paper",
                covariance if covariance in ("tied", "diag", "spherical") else "full",
                seed=seed if isinstance(seed, int) else 0,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                detector.fit([row["losses"] for row in early], [row["counts"] for row in early])
        except (ValueError, TypeError):
            return None
        if detector.mixture_ is not None:
            break
    return detector


def _normalise(detector: Any, losses: FloatArray | None) -> FloatArray | None:
    if detector is None or losses is None:
        return None
    complete_losses = np.where(np.isnan(losses), detector.low_, losses)
    span = detector.high_ - detector.low_
    scaled: FloatArray = np.divide(
        complete_losses - detector.low_, span, out=np.zeros_like(complete_losses), where=span > 0
    )
    scaled[~np.isfinite(losses).any(axis=1)] = np.nan
    return scaled


def _reproduces(
    detector: Any, losses: FloatArray | None, counts: IntArray | None, posterior: FloatArray
) -> bool:
    if detector is None or losses is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, again = detector.predict(losses, counts)
    return bool(np.allclose(again, posterior, atol=1e-3, equal_nan=True))


def _agreement(detector: Any, normalised_losses: FloatArray, noisy: BoolArray) -> FloatArray | None:
    """How often the verdicts come out the same when the mixture is started elsewhere."""
    from fednoro.detection.mixture_detector import NoisyClientDetector

    points = normalised_losses[np.isfinite(normalised_losses).all(axis=1)]
    if detector.mixture_ is None or len(points) < 2:
        return None
    same = np.zeros(len(noisy))
    for seed in range(1, OTHER_STARTS + 1):
        other = NoisyClientDetector(
            "paper", detector.covariance, normalise=False, seed=detector.seed + 1000 * seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdicts, _ = other.fit(points).predict(normalised_losses)
        same += verdicts == noisy
    return same / OTHER_STARTS


def _directions(detector: Any, normalised_losses: FloatArray) -> Mixture | None:
    """Principal directions of the scored clients,
    and each component's covariance seen along them.
    """
    scored = np.isfinite(normalised_losses).all(axis=1)
    if scored.sum() < 2:
        return None
    centre = normalised_losses[scored].mean(axis=0)
    _, deviations, axes = np.linalg.svd(normalised_losses[scored] - centre, full_matrices=False)
    axes = np.vstack([axes, np.zeros((2, axes.shape[1]))])[:2]
    # A larger loss is to the right.
    axes = axes * np.where(axes.sum(axis=1, keepdims=True) < 0, -1.0, 1.0)
    total = float((deviations**2).sum()) or 1.0
    shares = np.append(deviations**2, [0.0, 0.0])[:2] / total
    ellipses = []
    if detector.mixture_ is not None:
        for component in (1 - detector.noisy_component_, detector.noisy_component_):
            mean = (detector.mixture_.means_[component] - centre) @ axes.T
            covariance = axes @ detector.mixture_.covariance_of(component) @ axes.T
            values, vectors = np.linalg.eigh(covariance)
            angle = np.linspace(0, 2 * np.pi, 61)
            circle = np.stack([np.cos(angle), np.sin(angle)])
            outline = mean[:, None] + 2 * vectors @ (
                np.sqrt(np.maximum(values, 0))[:, None] * circle
            )
            ellipses.append(
                ("noisy" if component == detector.noisy_component_ else "clean", outline.T)
            )
    return Mixture(
        (normalised_losses - centre) @ axes.T, (float(shares[0]), float(shares[1])), tuple(ellipses)
    )
