from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.core.types import UserError
from fednoro.data.partition import (
    IID,
    PARTITIONS,
    BernoulliDirichlet,
    ByColumn,
    ClientShares,
    Dirichlet,
    bernoulli_dirichlet,
    by_column,
    dirichlet,
    iid,
)

label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(np.array)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_exact_cover(parts, n, min_size=1):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) >= min_size
        assert np.array_equal(part, np.sort(part))


@settings(deadline=None, max_examples=150)
@given(
    label_lists,
    st.integers(1, 6),
    st.floats(0.05, 1),
    st.floats(1e-3, 1e3),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_bernoulli_dirichlet_gives_each_sample_to_one_client_or_says_why_not(
    labels, clients, p, alpha, min_size, seed
):
    try:
        parts = bernoulli_dirichlet(labels, clients, p, alpha, rng(seed), min_size)
    except UserError as error:
        assert "100 draws" in str(error) or clients * min_size > len(labels)
        return
    assert len(parts) == clients
    assert_exact_cover(parts, len(labels), min_size)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.integers(1, 4), st.floats(1, 100), st.integers(0, 99))
def test_dirichlet_gives_each_sample_to_one_client(clients, min_size, alpha, seed):
    labels = np.arange(300) % 3
    parts = dirichlet(labels, clients, alpha, rng(seed), min_size)
    assert len(parts) == clients
    assert_exact_cover(parts, 300, min_size)


@settings(deadline=None, max_examples=100)
@given(label_lists, st.data(), st.integers(0, 99))
def test_iid_covers_exactly_in_sizes_that_differ_by_at_most_one(labels, data, seed):
    clients = data.draw(st.integers(1, len(labels)))
    parts = iid(labels, clients, rng(seed))
    sizes = [len(part) for part in parts]
    assert len(parts) == clients
    assert max(sizes) - min(sizes) <= 1
    assert_exact_cover(parts, len(labels))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["Wien", "rosendahl", "MSK", "10", "9"]), min_size=1, max_size=40))
def test_by_column_makes_one_client_per_value_sorted_by_name(values):
    parts = by_column(values)
    assert list(parts.names) == sorted(set(values))
    assert_exact_cover(parts.indices, len(values))
    for name, part in zip(parts.names, parts.indices, strict=True):
        assert {values[i] for i in part} == {name}


def test_iid_is_random():
    assert not np.array_equal(iid(np.zeros(100), 2, rng(0))[0], iid(np.zeros(100), 2, rng(1))[0])


def test_dirichlet_shares_have_the_mean_and_variance_of_a_dirichlet_multinomial():
    n, clients, alpha, draws = 2000, 4, 2.0, 3000
    source = rng()
    shares = np.array(
        [
            [len(part) / n for part in dirichlet(np.zeros(n), clients, alpha, source)]
            for _ in range(draws)
        ]
    )
    m, total = 1 / clients, clients * alpha
    variance = m * (1 - m) / n * (n + total) / (1 + total)
    assert shares.mean(axis=0) == pytest.approx(m, abs=5 * np.sqrt(variance / draws))
    assert shares.var(axis=0) == pytest.approx(variance, rel=0.15)


def test_classes_are_divided_independently():
    labels = np.repeat([0, 1], 500)
    source = rng()
    first = []
    for _ in range(1500):
        part = dirichlet(labels, 2, 1.0, source)[0]
        first.append([np.sum(part < 500), np.sum(part >= 500)])
    assert abs(np.corrcoef(np.array(first).T)[0, 1]) < 5 / np.sqrt(1500)


def test_samples_of_a_class_are_shuffled_before_they_are_divided():
    source = rng()
    position = [
        bernoulli_dirichlet(np.zeros(100), 2, 1.0, 1e6, source)[0].mean() for _ in range(200)
    ]
    assert np.mean(position) == pytest.approx(49.5, abs=1.5)  # in order it would be about 24.5


@pytest.mark.parametrize(
    ("clients", "classes", "p"), [(3, 2, 0.5), (2, 3, 0.5), (3, 2, 0.15), (2, 2, 0.8)]
)
def test_ownership_follows_the_bernoulli_law_given_that_no_client_and_no_class_is_left_out(
    clients, classes, p
):
    law = {}
    for bits in itertools.product([0, 1], repeat=clients * classes):
        phi = np.array(bits).reshape(clients, classes)
        if phi.any(axis=0).all() and phi.any(axis=1).all():
            law[bits] = p ** sum(bits) * (1 - p) ** (len(bits) - sum(bits))
    norm = sum(law.values())

    # α so large that every owner gets samples
    labels, source, draws = np.repeat(np.arange(classes), 60), rng(), 6000
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        parts = bernoulli_dirichlet(labels, clients, p, 1e6, source)
        seen[tuple(int(c in labels[part]) for part in parts for c in range(classes))] += 1

    assert set(seen) <= set(law)
    for bits, weight in law.items():
        expected = weight / norm
        assert seen[bits] / draws == pytest.approx(
            expected, abs=5 * np.sqrt(expected * (1 - expected) / draws) + 1e-4
        )


def test_ownership_frequency_is_p_where_nothing_is_left_out():
    labels, source = np.repeat(np.arange(8), 400), rng()
    held = [
        [len(np.unique(labels[part])) for part in bernoulli_dirichlet(labels, 20, 0.7, 1e6, source)]
        for _ in range(100)
    ]
    assert np.mean(held) / 8 == pytest.approx(0.7, abs=5 * np.sqrt(0.21 / (100 * 20 * 8)))


def test_a_small_p_that_leaves_almost_every_draw_with_an_empty_client_still_splits():
    labels = np.arange(3000) % 4  # 30 clients at p = .02: each is empty with probability .92
    assert_exact_cover(bernoulli_dirichlet(labels, 30, 0.02, 5.0, rng()), 3000)
    labels = np.arange(3000) % 100
    assert_exact_cover(bernoulli_dirichlet(labels, 4, 0.02, 5.0, rng()), 3000)


def test_labels_need_not_be_consecutive():
    assert_exact_cover(
        bernoulli_dirichlet(np.array([7, 7, 900, 900, 900, 7]), 2, 0.9, 50.0, rng()), 6
    )


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-12])
def test_a_tiny_alpha_gives_each_class_to_one_client(alpha):
    labels = np.arange(400) % 8
    parts = dirichlet(labels, 2, alpha, rng())
    assert_exact_cover(parts, 400)
    assert sum(len(np.unique(labels[part])) for part in parts) == 8


def test_a_huge_alpha_gives_equal_shares():
    sizes = [len(part) for part in dirichlet(np.zeros(10_000), 4, 1e308, rng())]
    assert sizes == pytest.approx([2500] * 4, abs=5 * np.sqrt(10_000 * 3 / 16))


def test_draws_that_underflow_to_nan_are_replaced_by_the_limit():
    class Underflowing(np.random.Generator):
        def dirichlet(self, alpha, size=None):
            return np.full(len(alpha), np.nan)

    source, labels = Underflowing(np.random.PCG64(0)), np.arange(400) % 8
    parts = dirichlet(labels, 2, 1e-9, source)
    assert_exact_cover(parts, 400)
    assert sum(len(np.unique(labels[part])) for part in parts) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients must be >= 1, got 0"),
        ({"clients": 11}, "clients must be at most 10 for 10 samples with min_size = 1, got 11"),
        (
            {"clients": 4, "min_size": 3},
            "clients must be at most 3 for 10 samples with min_size = 3, got 4",
        ),
        ({"min_size": 0}, "min_size must be >= 1, got 0"),
        ({"p": 0.0}, r"p must be in \(0, 1\], got 0.0"),
        ({"p": 1.1}, r"p must be in \(0, 1\], got 1.1"),
        ({"p": np.nan}, r"p must be in \(0, 1\], got nan"),
        ({"alpha": 0.0}, "alpha must be > 0 and finite, got 0.0"),
        ({"alpha": -1.0}, "alpha must be > 0 and finite, got -1.0"),
        ({"alpha": np.inf}, "alpha must be > 0 and finite, got inf"),
        ({"alpha": np.nan}, "alpha must be > 0 and finite, got nan"),
        ({"labels": np.zeros(0, int)}, r"labels must be a non-empty vector, got shape \(0,\)"),
        (
            {"labels": np.zeros((5, 2), int)},
            r"labels must be a non-empty vector, got shape \(5, 2\)",
        ),
    ],
)
def test_impossible_requests_are_named(arguments, message):
    defaults = {"labels": np.arange(10) % 2, "clients": 2, "p": 0.9, "alpha": 2.0, "rng": rng()}
    with pytest.raises(UserError, match=f"^{message}$"):
        bernoulli_dirichlet(**(defaults | arguments))


def test_iid_needs_a_sample_per_client():
    with pytest.raises(UserError, match="clients must be at most 3"):
        iid(np.zeros(3), 4, rng())
    with pytest.raises(UserError, match="clients must be >= 1"):
        iid(np.zeros(3), 0, rng())
    with pytest.raises(UserError, match="non-empty"):
        iid(np.zeros(0), 1, rng())


def test_classes_that_nobody_ever_owns_are_the_stated_cause():
    with pytest.raises(
        UserError, match=r"100 left a class without a client \(raise p, now 1e-06\)$"
    ):
        bernoulli_dirichlet(np.arange(400) % 20, 20, 1e-6, 2.0, rng())


def test_clients_that_stay_too_small_are_the_stated_cause():
    with pytest.raises(
        UserError,
        match=r"100 left a client with fewer than 1 samples \(raise alpha or lower clients\)$",
    ):
        dirichlet(np.arange(400) % 2, 5, 1e-6, rng())
    with pytest.raises(
        UserError,
        match=r"100 left a client with fewer than 90 samples \(raise p or alpha, or lower",
    ):
        bernoulli_dirichlet(np.arange(300) % 2, 3, 0.9, 0.1, rng(), min_size=90)


def test_by_column_refuses_missing_sites():
    with pytest.raises(UserError, match=r"sample 1 has no site \(2 of 4 have none\)"):
        by_column(["a", " ", "b", ""])
    with pytest.raises(UserError, match="empty site column"):
        by_column([])


@pytest.mark.parametrize(
    "options", [BernoulliDirichlet(7, 0.8, 3.0), Dirichlet(7, 3.0), IID(7), ByColumn()]
)
def test_equal_seeds_split_equally_and_leave_the_labels_alone(options):
    labels = np.arange(500) % 5
    sites = [f"s{i % 7}" for i in range(500)]
    first, second = (options.split(labels, sites, rng(3)) for _ in range(2))
    assert isinstance(first, ClientShares)
    assert first.names == second.names
    assert len(first.indices) == len(first.names) == 7
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, second.indices, strict=True))
    assert_exact_cover(first.indices, 500)
    assert np.array_equal(labels, np.arange(500) % 5)


def test_options_pass_their_values_on():
    labels = np.arange(3000) % 6
    held = [
        len(np.unique(labels[part]))
        for part in BernoulliDirichlet(6, 0.1, 50.0).split(labels, None, rng()).indices
    ]
    assert np.mean(held) < 3
    even = [len(part) for part in Dirichlet(6, 1e6).split(labels, None, rng()).indices]
    uneven = [len(part) for part in Dirichlet(6, 0.1).split(labels, None, rng()).indices]
    assert np.std(uneven) > 5 * np.std(even)


def test_clients_are_numbered_in_equal_width():
    assert IID(10).split(np.zeros(12), None, rng()).names[:2] == ("client 0", "client 1")
    assert IID(11).split(np.zeros(12), None, rng()).names[0::10] == ("client 00", "client 10")
    assert IID(1).split(np.zeros(12), None, rng()).names == ("client 0",)


def test_by_column_names_the_clients_after_their_sites_and_needs_a_column():
    parts = ByColumn().split(np.array([0, 1, 0]), ("b", "a", "b"), rng())
    assert parts.names == ("a", "b")
    assert [part.tolist() for part in parts.indices] == [[1], [0, 2]]
    with pytest.raises(UserError, match="the data has no site column"):
        ByColumn().split(np.array([0, 1]), None, rng())
    with pytest.raises(UserError, match=r"one entry per label \(2\), got 1"):
        ByColumn().split(np.array([0, 1]), ("a",), rng())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BernoulliDirichlet(clients=0), "partition.clients must be >= 1, got 0"),
        (lambda: BernoulliDirichlet(p=0.0), r"partition.p must be in \(0, 1\], got 0.0"),
        (lambda: BernoulliDirichlet(alpha=0.0), "partition.alpha must be > 0, got 0.0"),
        (lambda: Dirichlet(alpha=-1.0), "partition.alpha must be > 0, got -1.0"),
        (lambda: IID(clients=0), "partition.clients must be >= 1, got 0"),
    ],
)
def test_options_out_of_range_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_the_registry_holds_every_partition_with_the_papers_defaults():
    assert list(PARTITIONS) == ["bernoulli_dirichlet", "dirichlet", "iid", "by_column"]
    assert PARTITIONS["bernoulli_dirichlet"]() == BernoulliDirichlet(clients=20, p=0.9, alpha=2.0)
    assert PARTITIONS["dirichlet"]() == Dirichlet(clients=20, alpha=0.5)
    assert PARTITIONS["iid"]() == IID(clients=20)
    assert PARTITIONS["by_column"]() == ByColumn()
