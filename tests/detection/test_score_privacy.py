"""What sites hold back: exactly the small classes, noise of exactly the promised size,
and never from a known seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, TRAINING, federation, network, start
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fednoro.core.types import Clients, Reply, Task, UserError
from fednoro.detection.score_privacy import (
    NOISE_SEED,
    Protection,
    loss_bound,
    noise_generator,
    noisy_class_losses,
    protect,
    withhold,
)
from fednoro.engine.eager import EagerEngine
from fednoro.methods import Method
from fednoro.methods.fednoro import FedNoRo

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(
    lambda found: np.array(found, dtype=np.int64)
)
EPSILONS = st.floats(1e-3, 1e3)


def losses_for(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).exponential(2.0, len(labels))


# Withholding


@given(
    counts=arrays.arrays(np.float64, 6, elements=st.integers(0, 20).map(float)),
    min_count=st.integers(0, 25),
)
def test_withholding_removes_the_small_classes_and_nothing_else(
    counts: np.ndarray, min_count: int
) -> None:
    losses = np.where(counts > 0, np.arange(6.0) + 0.25, np.nan)
    sent, told = withhold(losses, counts, min_count)
    for c in range(6):
        if counts[c] >= min_count:
            assert told[c] == counts[c] and (sent[c] == losses[c] or np.isnan(losses[c]))
        else:
            assert np.isnan(sent[c]) and told[c] == 0


def test_a_threshold_of_zero_or_one_sends_the_bits_as_they_are() -> None:
    losses, counts = np.array([0.1, np.nan, 3.7]), np.array([4.0, 0.0, 1.0])
    for threshold in (0, 1):
        sent, told = withhold(losses, counts, threshold)
        assert sent.tobytes() == losses.tobytes() and told.tobytes() == counts.tobytes()


@given(labels=LABELS, epsilon=EPSILONS, min_count=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_noisy_losses_stay_within_bounds_and_counts_tell_nothing_but_presence(
    labels: np.ndarray, epsilon: float, min_count: int, seed: int
) -> None:
    found, told = noisy_class_losses(
        losses_for(labels), labels, 5, epsilon, np.random.default_rng(seed), min_count=min_count
    )
    held = np.bincount(labels, minlength=5)
    assert np.array_equal(told > 0, held >= max(min_count, 1)) and set(told) <= {0.0, 1.0}
    assert np.array_equal(np.isnan(found), told == 0)
    assert all(0 <= v <= loss_bound(5) for v in found[told > 0])


# Noise


@given(
    labels=LABELS,
    at=st.integers(0, 10**6),
    swapped=st.floats(allow_nan=True),
    seed=st.integers(0, 2**32),
)
def test_replacing_one_sample_moves_its_class_by_the_sensitivity_at_most(
    labels: np.ndarray, at: int, swapped: float, seed: int
) -> None:
    """With the same noise, two neighbours differ in one class, by B/n at most: ε
    times that over the scale is ε.
    """
    losses = losses_for(labels, seed)
    neighbour = losses.copy()
    neighbour[at % len(labels)] = swapped
    bound, own = loss_bound(5), int(labels[at % len(labels)])
    rows = [
        noisy_class_losses(v, labels, 5, 1e6, np.random.default_rng(seed))[0]
        for v in (losses, neighbour)
    ]
    moved = np.abs(rows[0] - rows[1])
    assert np.nan_to_num(np.delete(moved, own)).max(initial=0) == 0
    assert moved[own] <= bound / (labels == own).sum() * (1 + 1e-12)


@given(labels=LABELS, epsilon=EPSILONS, seed=st.integers(0, 2**32))
def test_noise_is_laplace_of_bound_over_count_and_epsilon(
    labels: np.ndarray, epsilon: float, seed: int
) -> None:
    """Re-derived in plain Python from the same draws."""
    losses, bound = losses_for(labels, seed), math.log(5)
    drawn = np.random.default_rng(seed).laplace(size=5).tolist()
    found, _ = noisy_class_losses(losses, labels, 5, epsilon, np.random.default_rng(seed))
    for c in range(5):
        mine = [
            min(v, bound) for v, y in zip(losses.tolist(), labels.tolist(), strict=True) if y == c
        ]
        if mine:
            wanted = sum(mine) / len(mine) + bound / (len(mine) * epsilon) * drawn[c]
            assert found[c] == pytest.approx(min(max(wanted, 0.0), bound), rel=1e-9, abs=1e-12)


def test_measured_noise_has_the_promised_scale_and_no_bias() -> None:
    """20,000 draws in the middle of the range, where nothing is clipped: mean, mean
    deviation and tails of Laplace.
    """
    n, epsilon, classes = 50, 4.0, 10
    bound = math.log(classes)
    scale = bound / (n * epsilon)
    labels, losses = np.repeat(np.arange(classes), n), np.full(n * classes, bound / 2)
    rng = np.random.default_rng(3)
    drawn = (
        np.stack(
            [noisy_class_losses(losses, labels, classes, epsilon, rng)[0] for _ in range(2000)]
        )
        - bound / 2
    )
    deviation = np.abs(drawn)
    assert drawn.mean() == pytest.approx(0, abs=5 * scale * math.sqrt(2 / drawn.size))
    # |X| is exponential: std = mean
    assert deviation.mean() == pytest.approx(scale, rel=5 / math.sqrt(drawn.size))
    for k in (1, 2, 3):
        share = math.exp(-k)
        error = math.sqrt(share * (1 - share) / drawn.size)
        assert (deviation > k * scale).mean() == pytest.approx(share, abs=5 * error)
    correlation = np.corrcoef(drawn.T) - np.eye(classes)
    assert np.abs(correlation).max() < 6 / math.sqrt(2000)


def test_the_probability_of_an_answer_changes_by_no_more_than_e_to_the_epsilon() -> None:
    """The worst pair of neighbours, by counting: one class of one sample,
    its loss 0 or beyond the bound.
    """
    epsilon, labels, draws = 1.0, np.zeros(1, dtype=np.int64), 20_000
    answers = [
        np.array(
            [
                noisy_class_losses(np.array([loss]), labels, 2, epsilon, rng)[0][0]
                for _ in range(draws)
            ]
        )
        for loss, rng in ((0.0, np.random.default_rng(1)), (99.0, np.random.default_rng(2)))
    ]
    edges = np.linspace(0, loss_bound(2), 6)
    low, high = (np.histogram(np.clip(a, 0, edges[-1]), edges)[0] / draws for a in answers)
    ends = [[(a == end).mean() for end in (0.0, loss_bound(2))] for a in answers]
    ratios = np.concatenate([low / high, np.array(ends[0]) / np.array(ends[1])])
    worst = np.abs(np.log(ratios)).max()
    assert 0.9 * epsilon < worst < 1.1 * epsilon  # reached, and not passed


def test_broken_losses_say_no_more_than_the_largest_one() -> None:
    labels = np.array([0, 0, 1])
    sound, _ = noisy_class_losses(
        np.array([99.0, 1.0, 0.5]), labels, 2, 5.0, np.random.default_rng(0)
    )
    for broken in (math.nan, math.inf):
        found, _ = noisy_class_losses(
            np.array([broken, 1.0, 0.5]), labels, 2, 5.0, np.random.default_rng(0)
        )
        assert found.tobytes() == sound.tobytes()
    zero, _ = noisy_class_losses(
        np.array([0.0, 1.0, 0.5]), labels, 2, 5.0, np.random.default_rng(0)
    )
    negative, _ = noisy_class_losses(
        np.array([-math.inf, 1.0, 0.5]), labels, 2, 5.0, np.random.default_rng(0)
    )
    assert negative.tobytes() == zero.tobytes()


@given(labels=LABELS, seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_a_class_more_does_not_move_another_classes_noise(labels: np.ndarray, seed: int) -> None:
    assume(4 not in labels)
    losses = losses_for(labels)
    before, _ = noisy_class_losses(losses, labels, 5, 1.0, np.random.default_rng(seed))
    after, _ = noisy_class_losses(
        np.append(losses, 1.0), np.append(labels, 4), 5, 1.0, np.random.default_rng(seed)
    )
    assert before[:4].tobytes() == after[:4].tobytes()


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_epsilon_must_be_a_positive_number(epsilon: float) -> None:
    with pytest.raises(UserError, match="score_epsilon must be a number above 0"):
        noisy_class_losses(
            np.ones(1), np.zeros(1, dtype=np.int64), 2, epsilon, np.random.default_rng(0)
        )


# In the method


def scored(method: FedNoRo, seed: int = 0) -> list[Reply]:
    dataset, clients = federation()
    engine = EagerEngine(network, dataset, 1, TRAINING, seed, torch.device("cpu"), clients)
    state = dataclasses.replace(start(seed=seed), round=method.warmup)
    tasks = method.plan(state, clients_of(clients))
    return [reply for reply in engine.exchange(method, tasks) if isinstance(reply, Reply)]


def clients_of(clients: Sequence[object]) -> Clients:
    everyone = tuple(range(len(clients)))
    return Clients(everyone, everyone)


@pytest.mark.usefixtures("one_thread")
class TestFedNoRo:
    """The method's options."""

    def test_defaults_send_what_they_always_did(self) -> None:
        method = FedNoRo(warmup=2)
        assert (method.score_min_count, method.score_epsilon) == (0, None)
        task = next(
            iter(method.plan(dataclasses.replace(start(), round=2), clients_of([1])).values())
        )
        assert task.name == "score" and task.settings == {}
        for reply, labels in zip(scored(method), MIXED, strict=True):
            assert (
                reply.arrays["counts"].tolist() == np.bincount(labels, minlength=CLASSES).tolist()
            )

    def test_small_classes_are_missing_and_the_rest_keep_their_bits(self) -> None:
        plain, held_back = scored(FedNoRo(warmup=2)), scored(FedNoRo(warmup=2, score_min_count=3))
        for a, b in zip(plain, held_back, strict=True):
            kept = a.arrays["counts"] >= 3
            assert np.isnan(b.arrays["losses"][~kept]).all() and not b.arrays["counts"][~kept].any()
            assert b.arrays["losses"][kept].tobytes() == a.arrays["losses"][kept].tobytes()
        # the client with one image says nothing at all
        assert not held_back[3].arrays["counts"].any()

    def test_noise_follows_from_the_seed_the_round_and_the_client(self) -> None:
        one, again, other = (
            scored(FedNoRo(warmup=2, score_epsilon=1.0), seed) for seed in (0, 0, 1)
        )
        assert all(
            a.arrays["losses"].tobytes() == b.arrays["losses"].tobytes()
            for a, b in zip(one, again, strict=True)
        )
        plain = scored(FedNoRo(warmup=2))
        assert all(
            not np.array_equal(a.arrays["losses"], b.arrays["losses"], equal_nan=True)
            for a, b in zip(one, plain, strict=True)
        )
        noise = generator_of(one), generator_of(other)
        assert noise[0] != noise[1]

    def test_hardly_any_noise_gives_the_clipped_means(self) -> None:
        exact, noisy = scored(FedNoRo(warmup=2)), scored(FedNoRo(warmup=2, score_epsilon=1e9))
        for a, b in zip(exact, noisy, strict=True):
            below = np.nan_to_num(a.arrays["losses"]) < loss_bound(CLASSES) / 2
            assert b.arrays["losses"][below] == pytest.approx(
                a.arrays["losses"][below], abs=1e-6, nan_ok=True
            )
            assert np.array_equal(b.arrays["counts"], (a.arrays["counts"] > 0).astype(float))

    @pytest.mark.parametrize("options", [{"score_epsilon": 0.0}, {"score_min_count": -1}])
    def test_options_out_of_range_are_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(UserError, match=r"method\.score_"):
            FedNoRo(**options)  # type: ignore[arg-type]


def generator_of(replies: list[Reply]) -> bytes:
    return b"".join(reply.arrays["losses"].tobytes() for reply in replies)


# On a site


def score_task(**settings: int) -> Task:
    return Task("score", 3, start().model, settings)


def test_a_site_takes_the_stricter_of_its_own_wishes_and_the_servers() -> None:
    server = FedNoRo(score_min_count=5, score_epsilon=2.0)
    for wanted, found in [
        (Protection(), (5, 2.0)),
        (Protection(3, 1.0), (5, 1.0)),
        (Protection(8, 4.0), (8, 2.0)),
        (Protection(8), (8, 2.0)),
    ]:
        method, _ = protect(server, score_task(), wanted)
        assert (method.score_min_count, method.score_epsilon) == found
    method, task = protect(FedNoRo(), score_task(), Protection())
    assert method == FedNoRo() and task.settings == {}


def test_a_sites_noise_comes_from_no_seed_that_the_server_knows() -> None:
    server = FedNoRo(score_epsilon=1.0)
    for wanted in (Protection(), Protection(score_epsilon=1.0)):
        seeds = {
            protect(server, score_task(**{NOISE_SEED: 7}), wanted)[1].settings[NOISE_SEED]
            for _ in range(3)
        }
        assert len(seeds) == 3 and 7 not in seeds and max(seeds) > 2**100
    drawn = [
        noise_generator(protect(server, score_task(), Protection())[1], 0).random()
        for _ in range(2)
    ]
    assert drawn[0] != drawn[1]


def test_training_is_left_alone() -> None:
    task = Task("train", 3, start().model, {"lam": 0.5})
    method, same = protect(FedNoRo(score_epsilon=1.0), task, Protection(9, 0.1))
    assert method == FedNoRo(score_epsilon=1.0) and same is task


@dataclass(frozen=True)
class Scoring(Method):
    """A method of one's own that scores, and knows nothing of protection."""


def test_a_site_that_withholds_refuses_a_method_that_cannot() -> None:
    with pytest.raises(UserError, match="Scoring cannot"):
        protect(Scoring(), score_task(), Protection(3))
    assert protect(Scoring(), score_task(), Protection())[0] == Scoring()


def test_noise_without_a_seed_is_refused() -> None:
    with pytest.raises(UserError, match="score_seed"):
        noise_generator(score_task(), 0)
