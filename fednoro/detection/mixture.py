"""Gaussian mixtures fitted from many starting points at once:
batched k-means and expectation-maximisation.

Wu et al., "FedNoRo", IJCAI 2023, repeat the mixture behind Table 3 with 10,000 seeds.
For points x_i, each fit goes

    M-step   n_m = Σ_i r_im,   μ_m = Σ_i r_im x_i / n_m
             Σ_m = Σ_i r_im (x_i − μ_m)(x_i − μ_m)ᵀ / n_m + reg·I
    E-step   r_im ∝ (n_m / Σ n) N(x_i; μ_m, Σ_m)

from its first responsibilities until the mean log-likelihood changes by less than `tol`. Formulas,
defaults and stopping rules are those of scikit-learn's `GaussianMixture`, and so are the random
draws: a seed gives the fit that `GaussianMixture(M, random_state=seed)` gives, but for rounding and
ties. Small matrices are slow one at a time, so that the fits lie along the last axis here and every
operation runs over all that have not converged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from fednoro.core.types import BoolArray, FloatArray, IntArray, UserError

Covariance = Literal["full", "diag", "spherical"]
Init = Literal["kmeans", "random"]
Rule = Literal["paper", "reference"]

# Entries of the largest array: what stays in the cache is several times faster.
_WORKING_SET = 2**18
_LARGEST = 1e150  # as in `mixture_detector`: a mixture squares its inputs
_TINY = 10 * np.finfo(np.float64).eps  # keeps a component without points from dividing by 0


@dataclass(frozen=True)
class Mixtures:
    """S mixtures of M components fitted to the same K points in D dimensions."""

    weights: FloatArray  # S×M
    means: FloatArray  # S×M×D
    covariances: FloatArray  # full S×M×D×D, diag S×M×D, spherical S×M
    posterior: FloatArray  # S×K×M, of the points under the last parameters
    lower_bound: FloatArray  # S, mean log-likelihood of the last E-step
    iterations: IntArray  # S
    converged: BoolArray  # S, before `max_iter`
    # S, a covariance was not positive definite: scikit-learn raises, here the rest is NaN
    broken: BoolArray

    @property
    def labels(self) -> IntArray:
        """The most probable component of each point, S×K."""
        labels: IntArray = self.posterior.argmax(axis=2)
        return labels


class DetectionOverSeeds(NamedTuple):
    """The columns of Table 3, each from 0 to 1."""

    recall: float  # mean
    precision: float  # mean
    match: float  # share of fits that flag exactly the noisy clients


def flagged_sets(
    features: ArrayLike,
    seeds: int | Sequence[int] = 10_000,
    covariance: Covariance = "full",
    init: Init = "kmeans",
    rule: Rule = "paper",
) -> BoolArray:
    """The clients that a mixture of two flags, for each seed: S×K.

    It decides as `NoisyClientDetector` does: nobody is flagged where there is nothing to split
    (fewer than two clients, equal features, one component for all, a broken fit), and always a
    client with features that are not finite, which is not trusted.

    Args:
        features: one row per client, K×D, filled and scaled as the indicator wants it.
        seeds: of the initialisations; a number stands for 0, 1, …, seeds − 1.
        covariance: form of the components' covariance.
        init: how a seed becomes a starting point, k-means or random responsibilities.
        rule: the noisy component has the larger norm of the mean ("paper") or
            the larger sum ("reference").
    """
    _check("rule", rule, Rule)
    _check("covariance", covariance, Covariance)
    _check("init", init, Init)
    table = np.asarray(features, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise UserError(
            f"features must be K×D with at least one client and one column, got shape {table.shape}"
        )
    numbers = range(seeds) if isinstance(seeds, int | np.integer) else seeds
    usable = (np.abs(table) < _LARGEST).all(axis=1)
    flags = np.tile(~usable, (len(numbers), 1))
    points = table[usable]
    if len(points) < 2 or not len(numbers) or (points == points[0]).all():
        return flags
    # Equal starting points have equal fits;
    # from k-means there are a few hundred at most, however many seeds.
    start, origin = np.unique(starting_points(points, numbers, init), axis=0, return_inverse=True)
    fits = fit_mixtures(points, start, covariance)
    sizes = np.linalg.norm(fits.means, axis=2) if rule == "paper" else fits.means.sum(axis=2)
    noisy = (
        np.take_along_axis(fits.posterior, sizes.argmax(axis=1)[:, None, None], axis=2)[:, :, 0]
        > 0.5
    )
    noisy[noisy.all(axis=1)] = False
    flags[:, usable] = noisy[origin.reshape(-1)]
    return flags


def detection_over_seeds(flags: ArrayLike, truth: ArrayLike) -> DetectionOverSeeds:
    """Mean recall, mean precision and share of exact matches of flagged sets, S×K,
    against the noisy clients, K.

    As in `metrics.detection`, recall is 1 when there is nothing to find,
    precision 1 when nothing is flagged.
    """
    sets, noisy = np.asarray(flags, dtype=np.bool_), np.asarray(truth, dtype=np.bool_)
    if sets.ndim != 2 or not len(sets) or sets.shape[1:] != noisy.shape:
        raise UserError(f"flags must be S×K and truth K, got shapes {sets.shape} and {noisy.shape}")
    hits, flagged = (sets & noisy).sum(axis=1), sets.sum(axis=1)
    precision = np.divide(hits, flagged, out=np.ones(len(sets)), where=flagged > 0)
    return DetectionOverSeeds(
        recall=float(hits.mean() / noisy.sum()) if noisy.any() else 1.0,
        precision=float(precision.mean()),
        match=float((sets == noisy).all(axis=1).mean()),
    )


def starting_points(
    points: FloatArray, seeds: Sequence[int], init: Init = "kmeans", components: int = 2
) -> FloatArray:
    """Responsibilities that the fits of `seeds` start from, S×K×M:
    k-means clusters, or uniform draws per point.
    """
    _check("init", init, Init)
    points = _points(points, components)
    if init == "kmeans":
        one_hot: FloatArray = np.eye(components)[kmeans(points, seeds, components)]
        return one_hot
    draws = _draws(seeds, len(points) * components).reshape(-1, len(points), components)
    draws /= draws.sum(axis=2, keepdims=True)
    return draws


def fit_mixtures(
    points: ArrayLike,
    responsibilities: ArrayLike,
    covariance: Covariance = "full",
    *,
    reg: float = 1e-6,
    tol: float = 1e-3,
    max_iter: int = 100,
) -> Mixtures:
    """Fits one mixture per starting point; each ends by itself when it has converged.

    Args:
        points: K×D.
        responsibilities: of each component for each point at the start, S×K×M.
        covariance: form of the components' covariance.
        reg: added to the diagonal of every covariance.
        tol: the fit ends when the mean log-likelihood changes by less.
        max_iter: most iterations of a fit.
    """
    _check("covariance", covariance, Covariance)
    start = np.asarray(responsibilities, dtype=np.float64)
    x = _points(points, start.shape[-1] if start.ndim == 3 else 1)
    if start.ndim != 3 or start.shape[1] != len(x) or not start.shape[2]:
        raise UserError(f"responsibilities must be S×{len(x)}×M, got shape {start.shape}")
    if max_iter < 1:
        raise UserError(f"max_iter must be >= 1, got {max_iter}")
    fits, k, m = start.shape
    d = x.shape[1]
    shape = {"full": (fits, m, d, d), "diag": (fits, m, d), "spherical": (fits, m)}[covariance]
    out = Mixtures(
        weights=np.full((fits, m), np.nan),
        means=np.full((fits, m, d), np.nan),
        covariances=np.full(shape, np.nan),
        posterior=np.full((fits, k, m), np.nan),
        lower_bound=np.full(fits, np.nan),
        iterations=np.zeros(fits, dtype=np.int64),
        converged=np.zeros(fits, dtype=np.bool_),
        broken=np.zeros(fits, dtype=np.bool_),
    )
    with np.errstate(all="ignore"):  # a fit that breaks down shows as NaN
        for block in _blocks(fits, k * m * d):
            _fit_block(
                x, start[block].transpose(1, 2, 0), covariance, (reg, tol, max_iter), out, block
            )
    return out


def _fit_block(
    x: FloatArray,
    resp: FloatArray,
    covariance: Covariance,
    limits: tuple[float, float, int],
    out: Mixtures,
    block: slice,
) -> None:
    """Runs the fits of `block` from their responsibilities, K×M×S,
    and writes each into `out` when it ends.
    """
    reg, tol, max_iter = limits
    origin = np.arange(block.start, block.stop)
    bound = np.full(len(origin), -np.inf)
    _, _, _, log_joint = _m_step(x, np.ascontiguousarray(resp), covariance, reg)
    for iteration in range(1, max_iter + 1):
        resp, norm = _e_step(log_joint)
        before, bound = bound, norm.mean(axis=0)
        weights, means, covariances, log_joint = _m_step(x, resp, covariance, reg)
        # What is broken at the start is so ever after.
        broken: BoolArray = np.any(np.isnan(log_joint), axis=(0, 1))
        converged = (np.abs(bound - before) < tol) & ~broken
        finished = converged | broken | (iteration == max_iter)
        if not finished.any():
            continue
        finished_fits, keep = origin[finished], finished & ~broken
        sound_fits = origin[keep]
        out.iterations[finished_fits], out.converged[finished_fits], out.broken[finished_fits] = (
            iteration,
            converged[finished],
            broken[finished],
        )
        out.weights[sound_fits], out.means[sound_fits] = (
            weights[:, keep].T,
            means[:, :, keep].transpose(2, 1, 0),
        )
        out.covariances[sound_fits] = covariances[..., keep].T
        out.lower_bound[sound_fits] = bound[keep]
        out.posterior[sound_fits] = _e_step(log_joint[:, :, keep])[0].transpose(2, 0, 1)
        if finished.all():
            return
        origin, bound, log_joint = origin[~finished], bound[~finished], log_joint[:, :, ~finished]


def _e_step(log_joint: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Responsibilities, K×M×S, in the place of log(weight·density), and log-likelihoods, K×S."""
    high = log_joint.max(axis=1, keepdims=True)
    log_joint -= high
    share = np.exp(log_joint, out=log_joint)
    total = share.sum(axis=1, keepdims=True)
    share /= total
    return share, (high + np.log(total))[:, 0]


def _m_step(
    x: FloatArray, resp: FloatArray, covariance: Covariance, reg: float
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Weights M×S, means D×M×S, covariances …×M×S,
    and the points' log(weight·density) under them, K×M×S.

    The variances of "diag" and "spherical" are E[x²] − E[x]² as in scikit-learn: about a
    component that dies it matters that n_m has been kept off 0, and only the same formula
    then leads to the same place.
    """
    d = x.shape[1]
    n = resp.sum(axis=0) + _TINY
    means = _multiply(x.T, resp) / n
    if covariance == "full":
        deviations = x.T[:, :, None, None] - means[:, None]  # D×K×M×S
        spread = np.empty((d, d, *n.shape))
        for i in range(d):
            spread[i, : i + 1] = (
                np.einsum("kms,jkms->jms", resp * deviations[i], deviations[: i + 1]) / n
            )
            spread[: i + 1, i] = spread[i, : i + 1]
            spread[i, i] += reg
        squares, log_det = _mahalanobis(spread, deviations)
    else:
        spread = _multiply((x**2).T, resp) / n - means**2 + reg  # D×M×S
        if covariance == "spherical":
            spread = spread.mean(axis=0, keepdims=True)
        spread[spread <= 0] = np.nan
        # Σ_d (x − μ)²/σ², multiplied out about the centre of the points:
        # that is two sums of products
        x, mu = x - x.mean(axis=0), means - x.mean(axis=0)[:, None, None]
        scale = np.broadcast_to(1 / spread, mu.shape)
        squares = _multiply(x**2, scale) - 2 * _multiply(x, mu * scale)
        squares += (mu**2 * scale).sum(axis=0)
        log_det = np.log(spread).sum(axis=0) * (d / len(spread))
        spread = spread[0] if covariance == "spherical" else spread
    weights = n / n.sum(axis=0)
    return (
        weights,
        means,
        spread,
        np.log(weights) - 0.5 * (d * math.log(2 * math.pi) + squares + log_det),
    )


def _multiply(matrix: FloatArray, stack: FloatArray) -> FloatArray:
    """Matrix product over the first axis of `stack`."""
    product: FloatArray = (matrix @ stack.reshape(len(stack), -1)).reshape(-1, *stack.shape[1:])
    return product


def _mahalanobis(spread: FloatArray, deviations: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(x − μ)ᵀ Σ⁻¹ (x − μ), K×M×S, and log |Σ|, M×S, by Cholesky;
    NaN where Σ is not positive definite.
    """
    d = len(spread)
    low = np.zeros_like(spread)
    y = np.empty_like(deviations)  # L⁻¹ (x − μ)
    for j in range(d):
        column = spread[j:, j] - np.einsum("ipms,pms->ims", low[j:, :j], low[j, :j])
        column[0, ~(column[0] > 0)] = np.nan
        low[j:, j] = column / np.sqrt(column[0])
        y[j] = (deviations[j] - np.einsum("pms,pkms->kms", low[j, :j], y[:j])) / low[j, j]
    return np.einsum("dkms,dkms->kms", y, y), 2 * np.log(low[range(d), range(d)]).sum(axis=0)


def kmeans(points: FloatArray, seeds: Sequence[int], components: int = 2) -> IntArray:
    """Cluster labels of each seed's run of Lloyd's algorithm from k-means++ centres, S×K."""
    x = _points(points, components)
    x = x - x.mean(axis=0)
    trials = 2 + int(math.log(components))  # candidates per centre, as in scikit-learn
    draws = _draws(seeds, 1 + trials * (components - 1))
    distances = np.square(x[:, None] - x[None]).sum(axis=2)
    blocks = _blocks(len(draws), trials * len(x))
    centres = np.concatenate([_plus_plus(distances, draws[block], trials) for block in blocks])
    start, origin = np.unique(centres, axis=0, return_inverse=True)
    labels = np.concatenate(
        [_lloyd(x, x[start[block]]) for block in _blocks(len(start), components * len(x))]
    )
    return labels[origin.reshape(-1)]


def _plus_plus(distances: FloatArray, draws: FloatArray, trials: int) -> IntArray:
    """Indices of the first centres, S×M:
    each next one is the best of `trials` drawn by squared distance.
    """
    k, runs = len(distances), np.arange(len(draws))
    centres = [_search(np.cumsum(np.full(k, 1 / k))[None], draws[:, :1], right=True)[:, 0]]
    closest = distances[centres[0]]  # S×K
    for at in range(1, draws.shape[1], trials):
        height = draws[:, at : at + trials] * closest.sum(axis=1, keepdims=True)
        candidates = _search(closest.cumsum(axis=1), height)
        nearer = np.minimum(closest[:, None], distances[candidates])  # S×trials×K
        best = nearer.sum(axis=2).argmin(axis=1)
        centres.append(candidates[runs, best])
        closest = nearer[runs, best]
    return np.stack(centres, axis=1)


def _search(steps: FloatArray, heights: FloatArray, right: bool = False) -> IntArray:
    """`searchsorted` of each row, never beyond its end."""
    below = steps[:, None] <= heights[:, :, None] if right else steps[:, None] < heights[:, :, None]
    positions: IntArray = np.minimum(below.sum(axis=2), steps.shape[1] - 1)
    return positions


def _lloyd(x: FloatArray, centres: FloatArray, max_iter: int = 300) -> IntArray:
    """Labels, S×K, after moving each run's centres, S×M×D, until the labels or the centres stay."""
    tol = 1e-4 * x.var(axis=0).mean()
    labels = np.full((len(centres), len(x)), -1)
    moving = np.arange(len(centres))
    for _ in range(max_iter):
        before, labels[moving] = labels[moving], _nearest(x, centres[moving])
        new_centres = _centroids(x, labels[moving], centres[moving])
        shift = np.square(new_centres - centres[moving]).sum(axis=(1, 2))
        centres[moving] = new_centres
        stays = (labels[moving] == before).all(axis=1)
        settled = moving[~stays & (shift <= tol)]
        labels[settled] = _nearest(x, centres[settled])
        moving = moving[~stays & (shift > tol)]
        if not len(moving):
            break
    else:
        labels[moving] = _nearest(x, centres[moving])
    return labels


def _nearest(x: FloatArray, centres: FloatArray) -> IntArray:
    nearest: IntArray = (
        np.square(centres).sum(axis=2)[:, None] - 2 * (x @ centres.transpose(0, 2, 1))
    ).argmin(axis=2)
    return nearest


def _centroids(x: FloatArray, labels: IntArray, centres: FloatArray) -> FloatArray:
    """Means of the clusters, S×M×D.
    An empty one takes the point farthest from its centre, as in scikit-learn.
    """
    m = centres.shape[1]
    member = (labels[:, None] == np.arange(m)[:, None]).astype(np.float64)  # S×M×K
    for s in np.flatnonzero((member.sum(axis=2) == 0).any(axis=1)):
        away = np.square(x - centres[s, labels[s]]).sum(axis=1)
        empty = np.flatnonzero(member[s].sum(axis=1) == 0)
        if away.max() > 0:
            far = np.argsort(-away)[: len(empty)]
            member[s][:, far] = 0
            member[s][empty, far] = 1
    sizes = member.sum(axis=2)
    means: FloatArray = (member @ x) / np.maximum(sizes, 1)[:, :, None]
    biggest = means[np.arange(len(means)), sizes.argmax(axis=1)]
    return np.where(sizes[:, :, None] > 0, means, biggest[:, None])


def _draws(seeds: Sequence[int], count: int) -> FloatArray:
    """`count` uniforms per seed,
    the ones that scikit-learn gets for `random_state=seed`: S×count.
    """
    state = np.random.RandomState()
    draws = np.empty((len(seeds), count))
    for row, seed in zip(draws, seeds, strict=True):
        state.seed(seed % 2**32)
        row[:] = state.random_sample(count)
    return draws


def _blocks(count: int, each: int) -> Iterator[slice]:
    """Slices of 0…count whose arrays of `each` entries per item stay within the working set."""
    size = max(1, _WORKING_SET // each)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _points(points: ArrayLike, components: int) -> FloatArray:
    x = np.asarray(points, dtype=np.float64)
    if x.ndim != 2 or not x.shape[1]:
        raise UserError(f"points must be K×D with at least one column, got shape {x.shape}")
    if len(x) < components:
        raise UserError(f"a mixture of {components} needs as many points, got {len(x)}")
    if not (np.abs(x) < _LARGEST).all():
        raise UserError("points must be finite")
    return x


def _check(name: str, value: str, names: object) -> None:
    if value not in get_args(names):
        raise UserError(f"{name} must be one of {', '.join(get_args(names))}, got {value!r}")
