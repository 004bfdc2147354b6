"""Which clients have noisy labels:
per-class losses → fill → normalise → Gaussian mixture → verdicts.

Wu et al., "FedNoRo", IJCAI 2023, section 4.1. Each client scores its own data with the global
model; l_k^c is client k's mean loss on class c. A class it does not hold takes the smallest loss of
that class, each class is scaled to [0, 1], and a two-component mixture splits the K×C matrix. The
component whose mean is larger is the noisy one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

from fednoro.core.types import BoolArray, FedNoRoWarning, FloatArray, UserError
from fednoro.detection.mixture import fit_mixtures, starting_points

Behaviour = Literal["paper", "reference"]
Covariance = Literal["full", "diag", "spherical", "tied"]

_REFERENCE_SEEDS = range(9)
_LARGEST = 1e150  # a mixture squares its inputs: what is beyond float64 then is as broken as inf
_MIXTURE = ("weights_", "means_", "covariances_")
_ARRAYS = ("noisy_", "scored_", "posterior_", "filled_", "normalised_", "low_", "high_")


def fill_missing(losses: FloatArray) -> FloatArray:
    """NaN ← the smallest loss of that class over the clients; 0 for a class that nobody holds."""
    missing = np.isnan(losses)
    least = np.min(losses, axis=0, initial=np.inf, where=~missing)
    return np.where(missing, np.where(missing.all(axis=0), 0.0, least), losses)


def min_max(losses: FloatArray) -> FloatArray:
    """Each class (column) scaled to [0, 1]; 0 where all clients are equal."""
    return _scale(losses, losses.min(axis=0), losses.max(axis=0))


class NoisyClientDetector:
    """Splits clients into clean and noisy by their per-class losses.

    Args:
        behaviour: "paper" is one fit with `seed`, and the noisy component has the larger
            norm of the mean; "reference" is the authors' code: nine fits with seeds 0 to 8,
            of which the most frequent set of flagged clients wins, and the noisy component
            has the larger sum of the mean.
        covariance: the mixture's covariance type, as in scikit-learn.
        normalise: scale each class to [0, 1] before the fit.
        seed: of the mixture's initialisation under "paper".

    Attributes:
        noisy_: the verdicts, K. A client that cannot be scored is not trusted and counts as noisy.
        posterior_: probability of the noisy component, K; NaN for a client that cannot be scored.
        scored_: whether the client's losses could be used, K.
        filled_: losses with missing classes filled, K×C; NaN rows for
            clients that cannot be scored.
        normalised_: what the mixture was fitted to, K×C. low_, high_: smallest and largest loss of
            each class, C; they scale the clients that come later.
        mixture_: the chosen mixture, None where no two groups were found.
        noisy_component_: the index of its noisy component.
        reason_: the outcome in one sentence.
    """

    noisy_: BoolArray
    posterior_: FloatArray
    scored_: BoolArray
    filled_: FloatArray
    normalised_: FloatArray
    low_: FloatArray
    high_: FloatArray
    mixture_: Mixture | None
    noisy_component_: int
    reason_: str

    def __init__(
        self,
        behaviour: Behaviour = "paper",
        covariance: Covariance = "full",
        normalise: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value, names in (
            ("behaviour", behaviour, Behaviour),
            ("covariance", covariance, Covariance),
        ):
            if value not in get_args(names):
                raise UserError(
                    f"{name} must be one of {', '.join(get_args(names))}, got {value!r}"
                )
        self.behaviour, self.covariance, self.normalise, self.seed = (
            behaviour,
            covariance,
            normalise,
            seed,
        )

    def fit(
        self, losses: ArrayLike, counts: ArrayLike | None = None, names: Sequence[str] | None = None
    ) -> Self:
        """Fits the mixture to K×C mean losses;
        missing are NaNs and, with `counts` given, classes without samples.

        Args:
            losses: mean loss of each client on each of its classes.
            counts: samples behind each mean.
            names: what warnings call the clients; their row numbers if not given.
        """
        table, self.scored_ = _read_losses(losses, counts)
        self.filled_, self.normalised_ = np.full_like(table, np.nan), np.full_like(table, np.nan)
        unheld: BoolArray = np.all(np.isnan(table[self.scored_]), axis=0)
        rows = fill_missing(table[self.scored_])
        reference = rows if len(rows) else np.zeros((1, table.shape[1]))
        self.low_, self.high_ = reference.min(axis=0), reference.max(axis=0)
        points = _scale(rows, self.low_, self.high_) if self.normalise else rows
        self.filled_[self.scored_], self.normalised_[self.scored_] = rows, points

        self.mixture_, self.noisy_component_ = None, 0
        if len(points) < 2:
            self.reason_ = "too few clients for a mixture: nobody flagged"
        elif (points == points[0]).all():
            self.reason_ = f"all {len(points)} clients have the same scores: nobody flagged"
        else:
            if unheld.any():
                _warn(f"classes held by nobody, counted as loss 0: {_join_names(unheld)}")
            if (flat := ~unheld & (self.low_ == self.high_)).any():
                _warn(
                    "classes with the same loss at every client, "
                    f"which tell nothing: {_join_names(flat)}"
                )
            self.reason_ = self._split(points)
        self.noisy_, self.posterior_ = self._judge(self.normalised_)
        if self.mixture_ is None:
            _warn(self.reason_)
        if not self.scored_.all():
            _warn(
                f"clients without usable scores, not trusted: {_join_names(~self.scored_, names)}"
            )
            self.reason_ += f"; {int((~self.scored_).sum())} without usable scores not trusted"
        return self

    def predict(
        self, losses: ArrayLike, counts: ArrayLike | None = None, names: Sequence[str] | None = None
    ) -> tuple[BoolArray, FloatArray]:
        """Verdicts and posteriors of clients that come later,
        on the scale and under the mixture of the fit.
        """
        self._check_fitted()
        table, scored = _read_losses(losses, counts)
        if table.shape[1] != len(self.low_):
            raise UserError(
                f"losses must have {len(self.low_)} classes as in fit, got {table.shape[1]}"
            )
        if not scored.all():
            _warn(f"clients without usable scores, not trusted: {_join_names(~scored, names)}")
        rows = np.where(np.isnan(table), self.low_, table)
        points = _scale(rows, self.low_, self.high_) if self.normalise else rows
        return self._judge(np.where(scored[:, None], points, np.nan))

    def to_dict(self) -> dict[str, Any]:
        """The fitted detector as JSON values."""
        self._check_fitted()
        return {
            "options": {
                name: getattr(self, name)
                for name in ("behaviour", "covariance", "normalise", "seed")
            },
            "mixture": self.mixture_
            and {name: _plain(getattr(self.mixture_, name)) for name in _MIXTURE},
            "noisy_component": self.noisy_component_,
            "reason": self.reason_,
            **{name: _plain(getattr(self, name)) for name in _ARRAYS},
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """The detector that `to_dict` described; it predicts the same, bit for bit."""
        detector = cls(**state["options"])
        detector.mixture_, detector.noisy_component_ = None, state["noisy_component"]
        detector.reason_ = state["reason"]
        if state["mixture"] is not None:
            if "covariances_" not in state["mixture"]:
                raise UserError(
                    "the verdicts of this run are an earlier version's, "
                    "which cannot judge clients who come late"
                )
            weights, means, covariances = (
                np.array(state["mixture"][name], dtype=np.float64) for name in _MIXTURE
            )
            detector.mixture_ = Mixture(weights, means, covariances, detector.covariance)
        for name in _ARRAYS:
            dtype = np.bool_ if name in ("noisy_", "scored_") else np.float64
            setattr(detector, name, np.array(state[name], dtype=dtype))  # None becomes NaN
        return detector

    def _split(self, points: FloatArray) -> str:
        """Chooses the mixture and its noisy component; says how it went."""
        paper = self.behaviour == "paper"
        votes: list[tuple[list[bool], Mixture, int]] = []
        for seed in (self.seed,) if paper else _REFERENCE_SEEDS:
            mixture = _fit_mixture(points, self.covariance, seed)
            if mixture is not None:
                sizes = (
                    np.linalg.norm(mixture.means_, axis=1) if paper else mixture.means_.sum(axis=1)
                )
                noisy = int(np.argmax(sizes))
                votes.append(
                    ((mixture.predict_proba(points)[:, noisy] > 0.5).tolist(), mixture, noisy)
                )
        if not votes:
            return "the mixture could not be fitted: nobody flagged"
        verdicts = [vote[0] for vote in votes]
        # On ties `max` takes the first.
        flagged, mixture, noisy = max(votes, key=lambda vote: verdicts.count(vote[0]))
        if all(flagged) or not any(flagged):
            return f"the mixture put all {len(points)} clients in one component: nobody flagged"
        self.mixture_, self.noisy_component_ = mixture, noisy
        return f"{sum(flagged)} of {len(points)} clients flagged by a two-component mixture"

    def _judge(self, points: FloatArray) -> tuple[BoolArray, FloatArray]:
        """Verdicts and posteriors of scaled rows; a row that is not finite cannot be scored."""
        posterior = np.full(len(points), np.nan)
        finite = np.isfinite(points).all(axis=1)
        if self.mixture_ is None:
            posterior[finite] = 0.0
        elif finite.any():
            posterior[finite] = self.mixture_.predict_proba(points[finite])[
                :, self.noisy_component_
            ]
        return ~(posterior <= 0.5), posterior

    def _check_fitted(self) -> None:
        if not hasattr(self, "noisy_"):
            raise UserError("the detector has not seen any client yet: call fit first")


def _read_losses(losses: ArrayLike, counts: ArrayLike | None) -> tuple[FloatArray, BoolArray]:
    """Losses with NaN for missing, and which clients are usable:
    some class held, and no held class broken.
    """
    try:
        table = np.array(losses, dtype=np.float64)
        present = ~np.isnan(table) if counts is None else np.asarray(counts, dtype=np.float64) > 0
    except (TypeError, ValueError) as error:
        raise UserError(f"losses and counts must be K×C numbers: {error}") from None
    if table.ndim != 2 or not table.size:
        raise UserError(
            f"losses must be K×C with at least one client and one class, got shape {table.shape}"
        )
    if present.shape != table.shape:
        raise UserError(f"counts must have the shape of losses, {table.shape}, got {present.shape}")
    table[~present] = np.nan
    scored: BoolArray = np.any(present, axis=1) & np.all(
        ~present | (np.abs(table) < _LARGEST), axis=1
    )
    return table, scored


def _scale(losses: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):
        # A later client far out of scale becomes inf, which `_judge` handles.
        scaled: FloatArray = np.divide(
            losses - low, high - low, out=np.zeros_like(losses), where=high > low
        )
    return scaled


@dataclass(frozen=True)
class Mixture:
    """Two components, by scikit-learn's names and in its shapes."""

    weights_: FloatArray  # M
    means_: FloatArray  # M×D
    covariances_: FloatArray  # full M×D×D, tied D×D, diag M×D, spherical M
    covariance: Covariance

    def predict_proba(self, points: FloatArray) -> FloatArray:
        """Posteriors of the components, K×M; NaN for a point that is too far from all of them."""
        with np.errstate(all="ignore"):
            log_joint = np.stack(
                [self._log_joint(m, points) for m in range(len(self.weights_))], axis=1
            )
            share = np.exp(log_joint - log_joint.max(axis=1, keepdims=True))
            posterior: FloatArray = share / share.sum(axis=1, keepdims=True)
        return posterior

    def covariance_of(self, component: int) -> FloatArray:
        """One component's covariance as a matrix, D×D."""
        if self.covariance == "tied":
            return self.covariances_
        values: FloatArray = self.covariances_[component]
        return values if self.covariance == "full" else values * np.eye(self.means_.shape[1])

    def _log_joint(self, component: int, points: FloatArray) -> FloatArray:
        low = np.linalg.cholesky(self.covariance_of(component))
        whitened = np.linalg.solve(low, (points - self.means_[component]).T)
        log_weight = np.log(self.weights_[component]) - np.log(np.diag(low)).sum()
        log_joint: FloatArray = log_weight - (whitened**2).sum(axis=0) / 2
        return log_joint


def _fit_mixture(points: FloatArray, covariance: Covariance, seed: int) -> Mixture | None:
    """What scikit-learn's mixture of two would be with this seed, None where the fit broke down."""
    if covariance == "tied":
        return _fit_tied(points, seed)
    fits = fit_mixtures(points, starting_points(points, [seed % 2**32]), covariance)
    if fits.broken[0]:
        return None
    mixture = Mixture(fits.weights[0], fits.means[0], fits.covariances[0], covariance)
    try:
        mixture.predict_proba(points)
    except np.linalg.LinAlgError:  # all but singular: LAPACK sees it otherwise
        return None
    return mixture


def _fit_tied(points: FloatArray, seed: int) -> Mixture | None:
    from sklearn.exceptions import ConvergenceWarning  # seconds, for which other runs need not wait
    from sklearn.mixture import GaussianMixture

    # Threads cost far more than they bring on tables of this size,
    # and one thread adds up in one order.
    with threadpool_limits(1), warnings.catch_warnings(), np.errstate(all="ignore"):
        # The verdicts show whether a split is of use, converged or not.
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            fit = GaussianMixture(2, covariance_type="tied", random_state=seed % 2**32).fit(points)
        except ValueError:
            return None
    return Mixture(fit.weights_, fit.means_, fit.covariances_, "tied")


def _join_names(mask: BoolArray, names: Sequence[str] | None = None) -> str:
    return ", ".join(str(i) if names is None else names[i] for i in np.flatnonzero(mask).tolist())


def _plain(array: FloatArray | BoolArray) -> Any:
    """Nested lists with None for NaN, which JSON does not know."""
    plain = array.astype(object)
    plain[np.isnan(array)] = None
    return plain.tolist()


def _warn(message: str) -> None:
    warnings.warn(message, FedNoRoWarning, stacklevel=3)
