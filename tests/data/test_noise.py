from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.noise import (
    HIDN,
    NOISES,
    Context,
    FromFile,
    NoNoise,
    PairFlip,
    Symmetric,
    Transition,
    flip_labels,
    observed_from_file,
    pair_flip,
    read_matrix,
    symmetric,
    transition,
)

CLASSES = ("akiec", "bcc", "mel", "nv")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_probabilities(n, classes, seed=0):
    return rng(seed).dirichlet(np.ones(classes), n)


def uniform_annotator(parts):
    return {k: np.full((len(index), len(CLASSES)), 1 / len(CLASSES)) for k, index in parts.items()}


def context(seed=0, annotate=uniform_annotator, ids=None, classes=CLASSES):
    def derived(purpose, *keys):
        return np.random.default_rng([seed, sum(purpose.encode()), *keys])

    return Context(classes, ids, derived, annotate)


def clients(k=10, size=40, unassigned=0):
    """True labels, K index arrays of growing size, and the samples in none of them."""
    sizes = [size + i for i in range(k)]
    order = rng(9).permutation(sum(sizes) + unassigned)
    parts = tuple(np.sort(part) for part in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]))
    return rng(8).integers(0, len(CLASSES), len(order)), parts, order[sum(sizes) :]


# Algorithm 1, lines 6 to 12


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 40),
    st.integers(2, 6),
    st.floats(0, 1),
    st.integers(0, 99),
    st.sampled_from([0.01, 1.0, 100.0]),
)
def test_exactly_the_asked_share_of_labels_changes(n, classes, rate, seed, concentration):
    labels = rng(seed).integers(0, classes, n)
    p = rng(seed + 1).dirichlet(np.full(classes, concentration), n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        noisy = flip_labels(labels, p, rate, rng(seed))
    assert noisy.dtype == np.int64
    assert np.sum(noisy != labels) == round(rate * n)
    assert np.all((noisy >= 0) & (noisy < classes))


def test_samples_are_chosen_as_by_successive_draws_without_replacement():
    labels = np.array([0, 1, 2, 0, 1])
    p = some_probabilities(5, 3, seed=4)
    doubt = [1 - p[i, y] for i, y in enumerate(labels)]
    law: Counter[frozenset[int]] = Counter()
    for order in itertools.permutations(range(5), 3):
        probability, left = 1.0, sum(doubt)
        for i in order:
            probability *= doubt[i] / left
            left -= doubt[i]
        law[frozenset(order)] += probability
    assert sum(law.values()) == pytest.approx(1)

    source, draws = rng(), 20_000
    seen = Counter(
        frozenset(np.flatnonzero(flip_labels(labels, p, 0.6, source) != labels))
        for _ in range(draws)
    )
    for chosen, expected in law.items():
        assert seen[chosen] / draws == pytest.approx(
            expected, abs=5 * np.sqrt(expected * (1 - expected) / draws)
        )
    assert max(law.values()) > 2 * min(law.values())  # else a uniform choice would pass


def test_new_labels_are_drawn_in_proportion_to_the_annotators_other_classes():
    n, row = 60_000, np.array([0.5, 0.05, 0.15, 0.3])
    for true in range(4):
        noisy = flip_labels(np.full(n, true), np.tile(row, (n, 1)), 1.0, rng())
        q = row.copy()
        q[true] = 0
        q /= q.sum()
        assert np.bincount(noisy, minlength=4) / n == pytest.approx(q, abs=5 * np.sqrt(0.25 / n))
        assert true not in noisy


def test_a_sample_that_the_annotator_is_sure_of_is_never_chosen_while_others_remain():
    labels, p = np.zeros(10, int), np.tile([0.5, 0.5], (10, 1))
    p[:5] = [1, 0]
    for seed in range(50):
        assert np.array_equal(flip_labels(labels, p, 0.5, rng(seed)), [0] * 5 + [1] * 5)


def test_the_rest_is_drawn_uniformly_when_too_few_samples_can_be_misread():
    labels, p = np.zeros(10, int), np.tile([1.0, 0, 0], (10, 1))
    p[:2] = [0.7, 0.3, 0]
    chosen, targets = np.zeros(10), Counter()
    for seed in range(2000):
        with pytest.warns(
            FedNoRoWarning, match="only 2 of 10 samples .* the other 2 of the 4 labels"
        ):
            noisy = flip_labels(labels, p, 0.4, rng(seed))
        assert np.sum(noisy != 0) == 4
        assert np.array_equal(noisy[:2], [1, 1])
        chosen += noisy != 0
        targets.update(noisy[2:].tolist())
    assert chosen[2:] / 2000 == pytest.approx(1 / 4, abs=5 * np.sqrt(0.1875 / 2000))
    assert targets[1] / (targets[1] + targets[2]) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(4000))


def test_an_annotator_that_is_always_sure_still_gives_the_asked_number():
    labels = rng().integers(0, 3, 50)
    with pytest.warns(FedNoRoWarning, match="only 0 of 50"):
        noisy = flip_labels(labels, np.eye(3)[labels], 0.5, rng())
    assert np.sum(noisy != labels) == 25


def test_doubt_too_small_for_one_minus_p_still_counts():
    labels, p = np.zeros(4, int), np.tile([1.0, 0], (4, 1))
    p[2, 1] = 1e-300
    assert np.array_equal(flip_labels(labels, p, 0.25, rng()), [0, 0, 1, 0])


def test_a_client_with_samples_of_one_class_gets_labels_of_the_others():
    noisy = flip_labels(np.full(30, 2), some_probabilities(30, 4), 1.0, rng())
    assert set(noisy) == {0, 1, 3}


def test_rows_are_normalised_within_a_thousandth():
    labels, p = rng().integers(0, 3, 30), some_probabilities(30, 3)
    expected = flip_labels(labels, p, 0.5, rng(1))
    assert np.array_equal(flip_labels(labels, p * 1.0009, 0.5, rng(1)), expected)
    assert np.array_equal(flip_labels(labels, p.astype(np.float32), 0.5, rng(1)), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 1.4}, r"rate must be in \[0, 1\], got 1.4"),
        ({"rate": -0.1}, r"rate must be in \[0, 1\], got -0.1"),
        ({"rate": np.nan}, r"rate must be in \[0, 1\], got nan"),
        ({"labels": [0, 3, 1]}, r"labels must be in 0..2, got 0..3"),
        ({"labels": [0, -1, 1]}, r"labels must be in 0..2, got -1..1"),
        ({"labels": [0.0, 1.0, 2.0]}, "labels must be a vector of integers, got float64"),
        (
            {"labels": [[0], [1], [2]]},
            r"labels must be a vector of integers, got int64 of shape \(3, 1\)",
        ),
        ({"labels": [0, 1]}, r"probabilities must have one row per label \(2\), got 3"),
        (
            {"probabilities": np.ones(3)},
            r"probabilities must have two dimensions .* got shape \(3,\)",
        ),
        ({"probabilities": np.ones((3, 0))}, r"at least one column, got shape \(3, 0\)"),
        (
            {"probabilities": [[1, 0, 0], [1, 0], [1, 0, 0]]},
            "probabilities must be a matrix of numbers",
        ),
        (
            {"probabilities": [[1, 0, 0], [np.nan, 0, 1], [1, 0, 0]]},
            "must be finite and >= 0, got .* in row 1",
        ),
        (
            {"probabilities": [[1, 0, 0], [1, 0, 0], [np.inf, 0, 1]]},
            "must be finite and >= 0, got .* in row 2",
        ),
        (
            {"probabilities": [[1.5, -0.5, 0], [1, 0, 0], [1, 0, 0]]},
            "must be finite and >= 0, got .* in row 0",
        ),
        (
            {"probabilities": [[1, 0, 0], [0.5, 0.498, 0], [1, 0, 0]]},
            "rows that sum to 1, got 0.998 in row 1",
        ),
        (
            {"probabilities": np.ones((3, 1)), "labels": [0, 0, 0]},
            "cannot change 2 labels with one class in all",
        ),
    ],
)
def test_malformed_input_is_named(arguments, message):
    defaults = {
        "labels": [0, 1, 2],
        "probabilities": some_probabilities(3, 3),
        "rate": 0.5,
        "rng": rng(),
    }
    with pytest.raises(UserError, match=message):
        flip_labels(
            **{k: np.array(v) if k == "labels" else v for k, v in (defaults | arguments).items()}
        )


def test_one_class_in_all_is_fine_where_nothing_is_to_change():
    labels = np.zeros(5, int)
    assert np.array_equal(flip_labels(labels, np.ones((5, 1)), 0.0, rng()), labels)
    assert np.array_equal(symmetric(labels, 1, 0.0, rng()), labels)
    assert np.array_equal(pair_flip(labels, 1, 0.0, rng()), labels)


FLIPS = {
    "flip_labels": lambda labels, rate, source: flip_labels(
        labels, some_probabilities(len(labels), 4), rate, source
    ),
    "symmetric": lambda labels, rate, source: symmetric(labels, 4, rate, source),
    "pair_flip": lambda labels, rate, source: pair_flip(labels, 4, rate, source),
    "transition": lambda labels, rate, source: transition(
        labels, (1 - rate) * np.eye(4) + rate / 4, source
    ),
}


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_flips_depend_on_the_seed_alone_and_leave_their_input_alone(flip):
    labels = rng().integers(0, 4, 200)
    before = labels.copy()
    noisy = flip(labels, 0.5, rng(1))
    assert noisy.dtype == np.int64
    assert np.array_equal(noisy, flip(labels, 0.5, rng(1)))
    assert not np.array_equal(noisy, flip(labels, 0.5, rng(2)))
    assert np.array_equal(labels, before)
    unchanged = flip(labels, 0.0, rng(1))
    assert np.array_equal(unchanged, labels)
    assert unchanged is not labels


def test_the_caller_s_probabilities_are_left_alone():
    p = some_probabilities(50, 3)
    before = p.copy()
    flip_labels(np.zeros(50, int), p, 0.5, rng())
    assert np.array_equal(p, before)


# The other kinds


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 40), st.integers(2, 6), st.floats(0, 1), st.integers(0, 99))
def test_symmetric_and_pair_flip_change_exactly_the_asked_share(n, classes, rate, seed):
    labels = rng(seed).integers(0, classes, n)
    for flip in (symmetric, pair_flip):
        noisy = flip(labels, classes, rate, rng(seed))
        assert np.sum(noisy != labels) == round(rate * n)
        assert np.all((noisy >= 0) & (noisy < classes))


def test_symmetric_noise_is_even_over_the_other_classes_and_over_the_samples():
    n = 60_000
    noisy = symmetric(np.full(n, 2), 4, 0.6, rng())
    assert np.bincount(noisy) / n == pytest.approx([0.2, 0.2, 0.4, 0.2], abs=5 * np.sqrt(0.16 / n))
    assert np.mean(noisy[: n // 2] != 2) == pytest.approx(0.6, abs=5 * np.sqrt(0.24 / n))


def test_pair_flip_goes_to_the_next_class_and_from_the_last_to_the_first():
    labels = np.arange(400) % 4
    assert np.array_equal(pair_flip(labels, 4, 1.0, rng()), (labels + 1) % 4)
    noisy = pair_flip(labels, 4, 0.5, rng())
    assert set((noisy - labels).tolist()) == {0, 1, -3}


@pytest.mark.parametrize("flip", [symmetric, pair_flip])
def test_flips_name_bad_arguments(flip):
    with pytest.raises(UserError, match="cannot change 2 labels with one class"):
        flip(np.zeros(4, int), 1, 0.5, rng())
    with pytest.raises(UserError, match=r"rate must be in \[0, 1\], got 2"):
        flip(np.zeros(4, int), 3, 2, rng())
    with pytest.raises(UserError, match=r"labels must be in 0..2, got 0..3"):
        flip(np.array([0, 3]), 3, 0.5, rng())


def test_transition_draws_each_label_from_its_row():
    matrix = np.array([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    n = 30_000
    labels = np.repeat([0, 1, 2], n)
    noisy = transition(labels, matrix, rng())
    for y in range(3):
        row = np.bincount(noisy[labels == y], minlength=3) / n
        assert row == pytest.approx(matrix[y], abs=5 * np.sqrt(0.25 / n))
        assert np.all(row[matrix[y] == 0] == 0)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.full((2, 3), 1 / 3), "must be square, got 2×3"),
        ([[0.5, 0.4], [0, 1]], "rows that sum to 1, got 0.9 in row 0"),
        ([[1.5, -0.5], [0, 1]], "finite and >= 0"),
        ([[1, 0], [1]], "matrix of numbers with rows of equal length"),
        ([["a", "b"], ["c", "d"]], "matrix of numbers"),
        ([[1.0]], r"labels must be in 0..0, got 0..1"),
    ],
)
def test_a_malformed_transition_matrix_is_named(matrix, message):
    with pytest.raises(UserError, match=message):
        transition(np.array([0, 1]), matrix, rng())


# Observed labels from a file


def write(tmp_path, content, name="observed.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


IDS, TRUE = ("a", "b", "c"), np.array([0, 1, 2])


@pytest.mark.parametrize(
    "content",
    [
        "id,label\nc,nv\na,bcc\n",
        "id,label\nc,3\na,1\n",
        "\ufeffid,label\r\nc,nv\r\n\r\na,bcc",
        'label, id,annotator\n"nv",c,x\n bcc , a ,y\n',
    ],
    ids=["names", "indices", "bom and crlf", "other columns, quotes and spaces"],
)
def test_listed_labels_replace_the_given_ones(tmp_path, content):
    labels = TRUE.copy()
    observed = observed_from_file(write(tmp_path, content), IDS, CLASSES, labels)
    assert observed.tolist() == [1, 1, 3]
    assert observed.dtype == np.int64
    assert np.array_equal(labels, TRUE)


def test_without_ids_the_position_is_the_id(tmp_path):
    assert observed_from_file(
        write(tmp_path, "id,label\n2,nv\n"), None, CLASSES, TRUE
    ).tolist() == [0, 1, 3]


def test_class_names_that_are_numbers_win_over_indices(tmp_path):
    numbered = ("1", "2", "3")
    names = write(tmp_path, "id,label\na,3\nb,1\n")
    assert observed_from_file(names, IDS, numbered, TRUE).tolist() == [2, 0, 2]
    indices = write(tmp_path, "id,label\na,0\nb,1\nc,1\n")  # 0 is no name, so all are indices
    assert observed_from_file(indices, IDS, numbered, TRUE).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,label\na,nv\nz,nv\n", "line 3: no sample has the id 'z'"),
        ("id,label\na,nv\nb,nv\na,bcc\n", "line 4: id 'a' was given on line 2 already"),
        ("id,label\na,nv\nb,wart\n", "line 3: 'wart' is not a class"),
        (
            "id,label\na,nv\nb,1\n",
            "line 3: '1' is not a class; use names throughout .* or indices throughout",
        ),
        ("id,label\na,4\n", "line 2: '4' is not a class"),
        ("id,label\na,-1\n", "line 2: '-1' is not a class"),
        ("id,label\na\n", "line 2: '' is not a class"),
        ("id,name\na,nv\n", "line 1: no column label; make the header id,label, got 'id,name'"),
        ("a,nv\nb,nv\n", "line 1: no column id and label"),
        ("", "line 1: the file is empty"),
        (" \n\n", "line 1: the file is empty"),
        ("id,label\n", "line 2: no rows after the header"),
        (b"id,label\na,nv\nb,\xff\xfe\n", "line 3: not UTF-8"),
        ('id,label\na,nv\n\nb,"nv\nc,nv\n', "line 4: not a CSV file"),
        ("id,label\n\n\nz,nv\n", "line 4: no sample has the id 'z'"),
        (b"\xef\xbb\xbf", "line 1: no column id and label"),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_line(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=message) as raised:
        observed_from_file(path, IDS, CLASSES, TRUE)
    assert str(raised.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing.csv: cannot be read: No such file"):
        observed_from_file(tmp_path / "missing.csv", IDS, CLASSES, TRUE)
    with pytest.raises(UserError, match="cannot be read"):
        observed_from_file(tmp_path, IDS, CLASSES, TRUE)


def test_ids_must_be_unique_and_one_per_label(tmp_path):
    path = write(tmp_path, "id,label\na,nv\n")
    with pytest.raises(UserError, match="not unique"):
        observed_from_file(path, ("a", "b", "a"), CLASSES, TRUE)
    with pytest.raises(UserError, match=r"one entry per label \(3\), got 2"):
        observed_from_file(path, ("a", "b"), CLASSES, TRUE)


# Applied to a federation


@pytest.mark.parametrize(
    "options", [HIDN(), Symmetric(), PairFlip()], ids=["h_idn", "symmetric", "pair_flip"]
)
def test_the_asked_clients_get_the_asked_share_and_nobody_else_is_touched(options):
    labels, parts, outside = clients(unassigned=25)
    before = labels.copy()
    noise = options.apply(labels, parts, context())
    assert noise.noisy.sum() == 4
    assert np.array_equal(labels, before)
    assert np.array_equal(noise.observed[outside], labels[outside])
    for k, part in enumerate(parts):
        changed = np.sum(noise.observed[part] != labels[part])
        assert noise.rates[k] == changed / len(part)
        if noise.noisy[k]:
            assert 0.3 * len(part) - 0.5 <= changed <= 0.5 * len(part) + 0.5
        else:
            assert changed == 0


@pytest.mark.parametrize(
    "options", [HIDN(), Symmetric(), PairFlip(), Transition(np.full((4, 4), 0.25).tolist())]
)
def test_equal_seeds_give_equal_noise(options):
    labels, parts, _ = clients()
    first, again, other = (options.apply(labels, parts, context(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.observed, again.observed)
    assert np.array_equal(first.noisy, again.noisy)
    assert not np.array_equal(first.observed, other.observed)


def test_local_noise_rates_are_uniform_between_the_bounds():
    labels, parts, _ = clients(k=400, size=1000)
    rates = Symmetric(rate=1.0, low=0.5, high=0.7).apply(labels, parts, context()).rates
    assert rates.mean() == pytest.approx(0.6, abs=5 * 0.2 / np.sqrt(12 * 400))
    assert rates.std() == pytest.approx(0.2 / np.sqrt(12), rel=0.15)
    assert 0.499 < rates.min() < 0.51
    assert 0.69 < rates.max() < 0.701


def test_every_client_is_equally_likely_to_be_noisy():
    labels, parts, _ = clients(k=5, size=4)
    times = sum(
        PairFlip(rate=0.4, low=1, high=1).apply(labels, parts, context(seed)).noisy.astype(int)
        for seed in range(1500)
    )
    assert times / 1500 == pytest.approx(0.4, abs=5 * np.sqrt(0.24 / 1500))


def test_the_noise_of_a_client_does_not_depend_on_the_others():
    labels, parts, _ = clients()
    shorter = (parts[0][:7], *parts[1:])
    one, other = (
        Symmetric(rate=1.0).apply(labels, p, context()).observed for p in (parts, shorter)
    )
    for part in parts[1:]:
        assert np.array_equal(one[part], other[part])


def test_h_idn_asks_one_annotator_per_noisy_client_and_follows_it():
    labels, parts, _ = clients()
    asked = []

    def annotate(mine):
        asked.extend(mine)
        return {k: opinion(k, index) for k, index in mine.items()}

    def opinion(k, index):
        assert np.array_equal(index, parts[k])
        p = np.zeros((len(index), 4))  # sure of the first third; elsewhere it takes y for y + 2
        p[np.arange(len(index)), labels[index]] = 1
        rest = np.arange(len(index) // 3, len(index))
        p[rest, labels[index[rest]]] = 0.5
        p[rest, (labels[index[rest]] + 2) % 4] = 0.5
        return p

    noise = HIDN(rate=0.6).apply(labels, parts, context(annotate=annotate))
    assert asked == np.flatnonzero(noise.noisy).tolist()
    assert len(asked) == 6
    for k in asked:
        given, observed = labels[parts[k]], noise.observed[parts[k]]
        changed = given != observed
        assert not changed[: len(given) // 3].any()
        assert np.array_equal(observed[changed], (given[changed] + 2) % 4)


def test_a_client_too_small_for_one_wrong_label_counts_as_clean():
    labels, parts, _ = clients(k=2, size=1)  # 1 and 2 samples
    with pytest.warns(
        FedNoRoWarning, match="client 0 was drawn as noisy but none of its 1 labels changed"
    ):
        noise = PairFlip(rate=1.0, low=0.5, high=0.5).apply(labels, parts, context())
    assert noise.noisy.tolist() == [False, True]
    assert noise.rates.tolist() == [0.0, 0.5]


def test_a_share_that_rounds_to_no_client_warns():
    labels, parts, _ = clients(k=3)
    with pytest.warns(FedNoRoWarning, match=r"noise.rate = 0.1 of 3 clients rounds to none"):
        noise = Symmetric(rate=0.1).apply(labels, parts, context())
    assert np.array_equal(noise.observed, labels)
    assert not noise.noisy.any()


def test_a_share_of_zero_is_no_noise_without_a_warning(recwarn):
    labels, parts, _ = clients()
    noise = HIDN(rate=0.0).apply(labels, parts, context())
    assert np.array_equal(noise.observed, labels)
    assert not noise.noisy.any()
    assert not recwarn.list


def test_an_empty_client_has_rate_zero():
    labels = np.array([0, 1, 2])
    parts = (np.array([], dtype=np.int64), np.arange(3))
    with pytest.warns(FedNoRoWarning, match="none of its 0 labels"):
        noise = PairFlip(rate=1.0, low=1, high=1).apply(labels, parts, context())
    assert noise.rates.tolist() == [0.0, 1.0]


SHIFT = np.roll(np.eye(4), 1, axis=1)


def save_npy(path):
    np.save(path, SHIFT)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("m.npy", save_npy),
        ("m.csv", lambda path: np.savetxt(path, SHIFT, delimiter=",")),
        ("m.txt", functools.partial(np.savetxt, X=SHIFT)),
        ("semicolons.csv", lambda path: np.savetxt(path, SHIFT, delimiter=" ; ")),
    ],
)
def test_transition_reads_its_matrix_from_a_file(tmp_path, name, save):
    save(tmp_path / name)
    labels, parts, outside = clients(unassigned=5)
    noise = Transition(str(tmp_path / name), rate=0.5).apply(labels, parts, context())
    assert noise.noisy.sum() == 5
    for k, part in enumerate(parts):
        assert np.array_equal(noise.observed[part], (labels[part] + noise.noisy[k]) % 4)
    assert np.array_equal(noise.observed[outside], labels[outside])


def test_transition_takes_a_nested_tuple_and_counts_unchanged_clients_as_clean():
    labels, parts, _ = clients(k=2)
    identity = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))
    with pytest.warns(FedNoRoWarning, match="none of its"):
        noise = Transition(identity, rate=1.0).apply(labels, parts, context())
    assert noise.noisy.tolist() == [False, False]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", "1,0\n0\n", "not a matrix of numbers"),
        ("m.csv", "a,b\n1,0\n0,1\n", "not a matrix of numbers"),
        ("m.csv", b"\xff\xfe\x00", "not a matrix of numbers"),
        ("m.csv", "", "the file is empty"),
        ("m.npy", "1,0\n0,1\n", "not a matrix of numbers"),
        ("m.npy", b"PK\x03\x04 not really", "not a matrix of numbers"),
    ],
)
def test_a_malformed_matrix_file_is_named(tmp_path, name, content, message):
    path = write(tmp_path, content, name)
    with pytest.raises(UserError, match=message) as raised:
        read_matrix(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (
            ((1.0, 0.0), (0.0, 1.0)),
            r"noise.matrix must be 4×4, a row per class, got shape \(2, 2\)",
        ),
        (((0.5, 0.5, 0.5, 0.5),) * 4, "noise.matrix must have rows that sum to 1, got 2 in row 0"),
        ("nowhere.csv", "nowhere.csv: cannot be read"),
    ],
)
def test_transition_names_a_matrix_that_does_not_fit(matrix, message):
    labels, parts, _ = clients()
    with pytest.raises(UserError, match=message):
        Transition(matrix).apply(labels, parts, context())


def test_from_file_changes_the_clients_labels_only_and_knows_no_truth(tmp_path):
    path = write(tmp_path, "id,label\na,nv\nb,bcc\nd,nv\n")
    labels, parts = np.array([0, 1, 2, 3, 0]), (np.array([0, 2]), np.array([1]))
    labels[3] = 0  # sample d is in no client
    noise = FromFile(str(path)).apply(labels, parts, context(ids=("a", "b", "c", "d", "e")))
    assert noise.observed.tolist() == [3, 1, 2, 0, 0]
    assert noise.noisy is None
    assert noise.rates.tolist() == [0.5, 0.0]


def test_no_noise_copies_the_labels_and_claims_no_truth():
    labels, parts, _ = clients()
    noise = NoNoise().apply(labels, parts, context())
    assert np.array_equal(noise.observed, labels)
    assert noise.observed is not labels
    assert noise.noisy is None  # nobody knows
    assert noise.rates.tolist() == [0.0] * 10


@pytest.mark.parametrize("options", [HIDN, Symmetric, PairFlip])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 1.4}, r"noise.rate must be in \[0, 1\], got 1.4"),
        ({"low": -0.1}, r"noise.low must be in \[0, 1\], got -0.1"),
        ({"high": 1.1}, r"noise.high must be in \[0, 1\], got 1.1"),
        ({"low": 0.6, "high": 0.5}, "noise.low must be <= noise.high, got 0.6 and 0.5"),
    ],
)
def test_options_out_of_range_are_named(options, arguments, message):
    with pytest.raises(UserError, match=message):
        options(**arguments)


def test_an_annotator_needs_an_epoch_and_a_matrix_a_rate_within_one():
    with pytest.raises(UserError, match=r"noise.epochs must be >= 1, got 0"):
        HIDN(epochs=0)
    with pytest.raises(UserError, match=r"noise.rate must be in \[0, 1\], got 2"):
        Transition(((1.0,),), rate=2)


def test_the_registry_holds_every_kind():
    kinds = {"none": NoNoise, "h_idn": HIDN, "symmetric": Symmetric, "pair_flip": PairFlip}
    assert kinds | {"transition": Transition, "from_file": FromFile} == NOISES
    assert HIDN() == HIDN(rate=0.4, low=0.3, high=0.5, epochs=5)
